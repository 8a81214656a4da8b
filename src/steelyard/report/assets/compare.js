"use strict";
const stored = {
  get: () => { try { return localStorage.getItem("steelyard-theme"); } catch { return null; } },
  set: (name) => { try { localStorage.setItem("steelyard-theme", name); } catch { /* not kept, then */ } },
};
const button = document.getElementById("theme");
function show(name) {
  document.documentElement.dataset.theme = name;
  button.textContent = name === "dark" ? "\u2600" : "\u263e";
}
function toggle() {
  const next = document.documentElement.dataset.theme === "dark" ? "light" : "dark";
  stored.set(next);
  show(next);
}
show(stored.get() || (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light"));
button.addEventListener("click", toggle);
document.addEventListener("keydown", (event) => {
  if (event.key === "t" && !event.ctrlKey && !event.metaKey && !event.altKey) toggle();
});
