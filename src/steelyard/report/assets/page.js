// Puts the page together: the overview at once, the cases as soon as they are unpacked, and the keys.

const page = JSON.parse(document.getElementById("overview").textContent);
const views = { overview: document.getElementById("overview-view"), cases: document.getElementById("cases-view") };
const tabs = { overview: document.getElementById("tab-overview"), cases: document.getElementById("tab-cases") };
let table = null, drawer = null;
let waitingFor = null;  // what was asked of the cases before they were there

function showView(name) {
  for (const [one, view] of Object.entries(views)) {
    view.hidden = one !== name;
    tabs[one].setAttribute("aria-selected", String(one === name));
    tabs[one].tabIndex = one === name ? 0 : -1;
  }
  if (name === "cases" && table) table.paint();
  remember(name === "cases" ? "#cases" : "#");
}

function remember(hash) {
  try { history.replaceState(null, "", hash); } catch { /* an embedded page has no address of its own */ }
}

function withCases(action) {
  showView("cases");
  if (table) action();
  else waitingFor = action;
}

const go = {
  filter: (name) => withCases(() => { table.search.value = ""; table.toggle(name, true); table.grid.focus(); }),
  openRecord: (record) => withCases(() => { if (record >= 0) openCase(drawer.cases.rowOf(record), record); }),
  openId: (id) => withCases(() => go.openRecord(drawer.cases.id.indexOf(id))),
};

function openCase(row, record) {
  table.show(row);
  drawer.open(row, record);
  remember("#case=" + encodeURIComponent(drawer.cases.id[record]));
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

document.getElementById("bar-name").textContent = visible(page.about.suite);
renderOverview(page, views.overview, go);

document.addEventListener("DOMContentLoaded", loadCases);

async function loadCases() {
  try {
    const blocks = await unpack(document.getElementById("columns"));
    const cases = new Cases(blocks, page.score_names);
    table = new Table(cases, views.cases, (row) => openCase(row, cases.lead[row]));
    drawer = new Drawer(cases, page, views.cases, table);
    document.getElementById("tab-count").textContent = number(cases.count);
    if (waitingFor) waitingFor();
    else if (location.hash.startsWith("#case=")) go.openId(decodeURIComponent(location.hash.slice(6)));
    else if (location.hash === "#cases") showView("cases");
    performance.mark("cases-ready");
    document.documentElement.dataset.ready = "cases";
  } catch (problem) {
    const old = typeof DecompressionStream === "undefined";
    const why = old ? "This browser is too old: it has no DecompressionStream." : String(problem);
    views.cases.replaceChildren(el("p", { class: "empty" }, `The cases could not be unpacked. ${why}`));
    document.documentElement.dataset.ready = "failed";
  }
}

const KEYS = {
  "/": () => withCases(() => { table.search.focus(); table.search.select(); }),
  j: () => step(1), k: () => step(-1), ArrowDown: () => step(1), ArrowUp: () => step(-1),
  PageDown: () => step(table.perScreen), PageUp: () => step(-table.perScreen),
  Home: () => step(-Infinity), End: () => step(Infinity),
  Enter: () => table.open(), t: toggleTheme,
  f: () => go.filter("failed"), e: () => go.filter("errored"), a: () => withCases(() => table.showAll()),
};
const OF_THE_TABLE = new Set(["j", "k", "ArrowDown", "ArrowUp", "PageDown", "PageUp", "Home", "End", "Enter"]);

function step(by) {
  if (Number.isFinite(by)) table.move(by);
  else table.activate(by < 0 ? 0 : table.rows.length - 1);
  if (drawer.isOpen) table.open();
}

document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  const typing = event.target instanceof HTMLInputElement;
  if (event.key === "Escape") return escape_(typing);
  if (typing) {
    if ((event.key === "Enter" || event.key === "ArrowDown") && table.rows.length) {
      event.preventDefault();
      table.grid.focus();
      table.activate(0);
    }
    return undefined;
  }
  const action = KEYS[event.key];
  if (!action) return undefined;
  if (OF_THE_TABLE.has(event.key)) {
    const onControl = event.target instanceof HTMLButtonElement || event.target.tagName === "SUMMARY";
    const reading = event.target.closest && event.target.closest(".drawer") && event.key.length > 1;
    if (!table || views.cases.hidden || (onControl && event.key === "Enter") || reading) return undefined;
  }
  event.preventDefault();
  return action();
});

function escape_(typing) {
  if (!table || views.cases.hidden) return;
  if (typing) { table.search.value = ""; table.apply(); table.grid.focus(); }
  else if (drawer.isOpen) { drawer.close(); remember("#cases"); }
  else table.showAll();
}
