// A comparison stands in the page already: only the theme's key is left to do.

document.addEventListener("keydown", (event) => {
  if (event.key === "t" && !event.ctrlKey && !event.metaKey && !event.altKey) toggleTheme();
});
