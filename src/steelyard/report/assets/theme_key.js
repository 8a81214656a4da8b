// The theme's key, for pages that have no other keys.

document.addEventListener("keydown", (event) => {
  if (event.key === "t" && !event.ctrlKey && !event.metaKey && !event.altKey) toggleTheme();
});
