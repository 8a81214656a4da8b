// Assembles the page: the overview at once, the cases as soon as they are unpacked.

const page = JSON.parse(document.getElementById("overview").textContent);
let waitingFor = null;  // what was asked of the cases before they were there

function viewShown(name) {
  if (name === "cases" && table) table.paint();
  remember(name === "cases" ? "#cases" : "#");
}

function remember(hash) {
  try { history.replaceState(null, "", hash); } catch { /* an embedded page has no address */ }
}

function withCases(action) {
  showView("cases");
  if (table) action();
  else waitingFor = action;
}

const go = {
  filter: showOnly,
  slice: showSlice,
  openRecord: (record) => withCases(() => { if (record >= 0) openCase(drawer.cases.rowOf(record), record); }),
  openId: (id) => withCases(() => go.openRecord(drawer.cases.id.indexOf(id))),
};

function openCase(row, record) {
  table.show(row);
  drawer.open(row, record);
  remember("#case=" + encodeURIComponent(drawer.cases.id[record]));
}

const made = page.variants ? sideBySide() : ofOneRun();

// What the page of one run is made of; that of several (side_by_side.js) has its overview in the markup.
function ofOneRun() {
  document.getElementById("bar-name").textContent = escapeInvisible(page.about.suite);
  renderOverview(page, views.overview, go);
  return { Cases, Table, Drawer, names: page.score_names, choices: ({ meta }) => choicesOf(page.metrics.slices, meta) };
}

document.addEventListener("DOMContentLoaded", loadCases);

async function loadCases() {
  try {
    const blocks = await unpack(document.getElementById("columns"));
    const cases = new made.Cases(blocks, made.names);
    if (made.choices) cases.choices = made.choices(cases);
    table = new made.Table(cases, views.cases, (row) => openCase(row, cases.lead[row]));
    drawer = new made.Drawer(cases, page, views.cases, table);
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
