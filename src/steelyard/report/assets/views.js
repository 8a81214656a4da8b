// The two views of a run, their tabs, and the keys. The page that includes this defines `viewShown` (called when a
// view is shown), `withCases` (runs an action once the cases are there) and `go` (where links lead).

const views = { overview: document.getElementById("overview-view"), cases: document.getElementById("cases-view") };
const tabs = { overview: document.getElementById("tab-overview"), cases: document.getElementById("tab-cases") };
let table = null, drawer = null;  // eslint-disable-line prefer-const -- set by page.js and run.js

function showView(name) {
  for (const [one, view] of Object.entries(views)) {
    view.hidden = one !== name;
    tabs[one].setAttribute("aria-selected", String(one === name));
    tabs[one].tabIndex = one === name ? 0 : -1;
  }
  viewShown(name);
}

for (const [name, tab] of Object.entries(tabs)) {
  tab.addEventListener("click", () => showView(name));
  tab.addEventListener("keydown", (event) => {
    if (event.key !== "ArrowLeft" && event.key !== "ArrowRight") return;
    const other = name === "cases" ? "overview" : "cases";
    showView(other);
    tabs[other].focus();
  });
}

function showOnly(name) {
  return withCases(() => { table.search.value = ""; table.toggle(name, true); table.grid.focus(); });
}

// The cases of a slice: those with this value in their metadata.
function showSlice(key, value) {
  return withCases(() => { table.chips.clear(); table.search.value = ""; table.choose(key, value); table.grid.focus(); });
}

// Keys

const KEYS = {
  "/": () => withCases(() => { table.search.focus(); table.search.select(); }),
  j: () => step(1), k: () => step(-1), ArrowDown: () => step(1), ArrowUp: () => step(-1),
  PageDown: () => step(table.perScreen), PageUp: () => step(-table.perScreen),
  Home: () => step(-Infinity), End: () => step(Infinity),
  Enter: () => table.open(),
  f: () => showOnly("failed"), e: () => showOnly("errored"), a: () => withCases(() => table.showAll()),
};
const OF_THE_TABLE = new Set(["j", "k", "ArrowDown", "ArrowUp", "PageDown", "PageUp", "Home", "End", "Enter"]);

function step(by) {
  if (Number.isFinite(by)) table.move(by);
  else table.activate(by < 0 ? 0 : table.rows.length - 1);
  if (drawer.isOpen) table.open();
}

function closeOrClear(typing) {
  if (!table || views.cases.hidden) return;
  if (typing) { table.search.value = ""; table.apply(); table.grid.focus(); }
  else if (drawer.isOpen) { drawer.close(); viewShown("cases"); }
  else table.showAll();
}

document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  const typing = isField(event.target);
  if (event.key === "Escape") { closeOrClear(typing); return; }
  if (event.target === table?.search && (event.key === "Enter" || event.key === "ArrowDown") && table.rows.length) {
    event.preventDefault();
    table.grid.focus();
    table.activate(0);
  }
  const action = typing ? null : KEYS[event.key];
  if (!action) return;
  if (OF_THE_TABLE.has(event.key)) {
    const onControl = event.target.closest("button, summary, tr") && event.key === "Enter";
    const reading = event.target.closest(".drawer") && event.key.length > 1;
    if (!table || views.cases.hidden || onControl || reading) return;
  }
  event.preventDefault();
  action();
});
