// Light or dark: as the system says, until the reader says otherwise.

const dark = matchMedia("(prefers-color-scheme: dark)");
const stored = {
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
  stored.set(next);
  setTheme(next);
}

setTheme(stored.get() || systemTheme());
dark.addEventListener("change", () => { if (!stored.get()) setTheme(systemTheme()); });
document.getElementById("theme").addEventListener("click", toggleTheme);
