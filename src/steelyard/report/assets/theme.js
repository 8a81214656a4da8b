// Light or dark: as the system is set, until the reader chooses, with the button or the key t.

const dark = matchMedia("(prefers-color-scheme: dark)");
const storedTheme = {
  get: () => { try { return localStorage.getItem("steelyard-theme"); } catch { return null; } },
  set: (name) => { try { localStorage.setItem("steelyard-theme", name); } catch { /* not kept, then */ } },
};

function setTheme(name) {
  document.documentElement.dataset.theme = name;
  document.getElementById("theme").textContent = name === "dark" ? "\u2600" : "\u263e";
}

function systemTheme() {
  return dark.matches ? "dark" : "light";
}

function toggleTheme() {
  const next = document.documentElement.dataset.theme === "dark" ? "light" : "dark";
  storedTheme.set(next);
  setTheme(next);
}

// Whether keys pressed there are for it: what is typed, or chosen from a list.
function isField(target) {
  return target instanceof HTMLInputElement || target instanceof HTMLSelectElement;
}

setTheme(storedTheme.get() || systemTheme());
dark.addEventListener("change", () => { if (!storedTheme.get()) setTheme(systemTheme()); });
document.getElementById("theme").addEventListener("click", toggleTheme);
document.addEventListener("keydown", (event) => {
  if (event.key === "t" && !isField(event.target) && !event.ctrlKey && !event.metaKey && !event.altKey) toggleTheme();
});
