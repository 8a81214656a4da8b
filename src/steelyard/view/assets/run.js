// One run: live while it is being written, its report when it is not, and from one to the other without a reload.

const here = JSON.parse(document.getElementById("about").textContent);
const base = "/api/runs/" + here.id;
let source = null, seen = "", shown = null;  // the stream, the last event's id, which report is on the page

// Views

function viewShown(name) {
  if (name === "cases") openTable();
  history.replaceState(null, "", name === "cases" ? "#cases" : location.pathname);
}

const ready = () => new Promise((resolve) => {
  if (table.version !== undefined) resolve();
  else table.onBegin = () => { table.onBegin = null; resolve(); };
});

async function withCases(action) {
  showView("cases");
  await ready();
  try { await action(); } catch (problem) { table.showMessage(problem.message); }
}

const runningDrawer = new RunningDrawer(here.id, document.body, { openId: (id) => go.openId(id) });

const go = {
  openRunning: (one) => runningDrawer.open(one),
  filter: showOnly,
  slice: showSlice,
  openRecord: (record) => withCases(() => drawer.openAt({ record })),
  openAt: (offset) => withCases(() => drawer.openAt({ at: offset })),
  openId: (id) => withCases(() => { table.search.value = id; table.apply(); }),
};

function openTable() {
  if (!table) {
    const page = RemoteDrawer.page || { about: { run: here.run }, metrics: {} };
    const cases = new RemoteCases((page.score_names || []).slice(0, MAX_SCORES));
    cases.choices = choicesOf(page.metrics.slices, []);
    table = new RemoteTable(here.id, cases, views.cases, (row) => drawer.open(row, cases.lead[row]));
    drawer = new RemoteDrawer(cases, page, views.cases, table);
  }
  table.paint();
}

// Events from the server

function listen() {
  if (source || document.hidden) return;
  source = new EventSource(`${base}/events?seen=${encodeURIComponent(seen)}`);
  source.onopen = () => { document.getElementById("lost").hidden = true; };
  source.onmessage = (event) => { seen = event.lastEventId; take(JSON.parse(event.data)); };
  source.onerror = () => {
    document.getElementById("lost").hidden = false;
    if (source.readyState === EventSource.CLOSED) { stopListening(); setTimeout(listen, 2000); }
  };
}

// A hidden page closes its stream: a browser has only a few connections to one server.
function stopListening() {
  if (source) source.close();
  source = null;
}

document.addEventListener("visibilitychange", () => (document.hidden ? stopListening() : listen()));

const live = new LiveView(views.overview, here, go);
let latest = null;

function take(event) {
  latest = event;
  document.documentElement.dataset.state = event.state;
  document.title = titleOf(event);
  if (event.figures) document.getElementById("tab-count").textContent = number(event.figures.n);
  offerMore();
  runningDrawer.refresh();
  if (event.state === "running" || event.state === "damaged") showLive(event);
  else if (event.report !== shown) {
    if (event.figures && !RemoteDrawer.page) live.render(event);  // until its report, which takes longer, is there
    shown = event.report;
    showReport(event).catch(() => { shown = null; showLive(event); });
  }
}

function showLive(event) {
  shown = null;
  views.overview.removeAttribute("aria-busy");
  live.render(event);
  document.documentElement.dataset.ready = "live";
}

function titleOf({ state, figures, planned }) {
  const name = escapeInvisible(here.name);
  if (state !== "running" || !figures || !planned) return `${name} \u2013 Steelyard`;
  return `${Math.floor((100 * figures.n) / planned)}% ${name} \u2013 Steelyard`;
}

// The figures at once, the charts as soon as the journal was read for them.
async function showReport(event) {
  const page = await ask(base + "/overview");
  drawReport(event, page, "figures");
  drawReport(event, { ...page, charts: await ask(base + "/charts") }, "report");
}

function drawReport(event, page, stage) {
  if (shown !== event.report) return;
  const place = document.scrollingElement.scrollTop;
  views.overview.replaceChildren();
  renderOverview(page, views.overview, go);
  views.overview.removeAttribute("aria-busy");
  document.scrollingElement.scrollTop = place;
  RemoteDrawer.page = page;
  renewTable(page);
  document.documentElement.dataset.ready = stage;
}

function renewTable(page) {
  document.getElementById("tab-count").textContent = number(page.metrics.n);
  if (!table) return;
  drawer.page = page;
  offerMore();
}

// While a run is written the table stays as it is, with a button that says how many more records there are.
function offerMore() {
  if (!table || table.version === undefined || !latest.figures) return;
  const total = latest.figures.n;
  const loaded = parseInt(table.version.split(".")[0], 16), more = total - loaded;
  if (!table.more) {
    table.more = button({ class: "since", onclick: () => { table.apply(); table.more.hidden = true; } });
    views.cases.querySelector(".tools").append(table.more);
  }
  table.more.hidden = more <= 0;
  table.more.textContent = `Show ${number(more)} more`;
}

document.getElementById("bar-name").textContent = escapeInvisible(here.name);
listen();
if (location.hash === "#cases") showView("cases");
