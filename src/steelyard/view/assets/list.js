// The runs in the folder, read again every two seconds while the page is visible.

const EVERY = 2000;
const MAX_PICKED = 5;
const ORDER = ["running", "complete", "interrupted", "damaged"];
const PILLS = { complete: "passed", running: "running", interrupted: "error", damaged: "failed" };
const here = JSON.parse(document.getElementById("about").textContent);
const at = (id) => document.getElementById(id);
const picked = [];  // the first one is the baseline
const hiddenStates = new Set();
let runs = null, asked = false, together = 0;  // how many sweeps and matrices there are

at("folder").textContent = escapeInvisible(here.folder);
at("runs-head").append(el("tr", {}, ...[["Selected", "check-cell"], ["Run", "left"], ["State", "left"], ["Done", ""], ["Pass rate", ""],
  ["95 % interval", "less"], ["Errors", "least"], ["Median", "less"], ["Cost", "less"], ["Started", "least"]]
  .map(([name, kind]) => el("th", { scope: "col", class: kind },
    kind === "check-cell" ? span("visually-hidden", name) : name))));

async function refresh() {
  if (asked || document.hidden) return;
  asked = true;
  try {
    const found = await Promise.all(["/api/runs", "/api/sweeps", "/api/matrices"].map(read));
    if (found.join() !== refresh.last) {
      refresh.last = found.join();
      const [listed, sweeps, matrices] = found.map(JSON.parse);
      [runs, together] = [listed, sweeps.length + matrices.length];
      renderSweeps(sweeps);
      renderMatrices(matrices);
      render();
    }
    at("lost").hidden = true;
  } catch {
    at("lost").hidden = false;
  } finally {
    asked = false;
  }
}

async function read(path) {
  const reply = await fetch(path);
  if (!reply.ok) throw new Error(reply.statusText);
  return reply.text();
}

// What the levels of a sweep add up to; each level is also a run in the list.
function renderSweeps(sweeps) {
  at("sweeps").hidden = !sweeps.length;
  const rows = sweeps.map((sweep) => {
    const about = [sweep.suite, sweep.model].filter(Boolean).join(" \u00b7 ");
    return el("tr", {},
      el("td", { class: "name" }, el("a", { href: "/sweep/" + sweep.id }, escapeInvisible(sweep.name)),
        span("sub", escapeInvisible(about))),
      el("td", {}, plural(sweep.levels, "level") + (sweep.complete ? "" : " so far")), el("td", { class: "says" }, escapeInvisible(sweep.says)));
  });
  const head = hiddenHead(["Sweep", "Levels", "Recommendation"]);
  at("sweeps").replaceChildren(el("h2", {}, "Sweeps"), div("scroll", el("table", {}, head, el("tbody", {}, ...rows))));
}

// A matrix is one entry: its variants are on its page, and not in the list of runs.
function renderMatrices(matrices) {
  at("matrices").hidden = !matrices.length;
  const rows = matrices.map((matrix) => {
    const left = matrix.begun < matrix.variants ? `, ${number(matrix.begun)} begun` : "";
    const leader = matrix.leader === null ? MISSING
      : `${percent(matrix.pass_rate)} ${escapeInvisible(matrix.leader)}`;
    const mark = matrix.uncalibrated ? span("tag error", "judge not calibrated") : null;
    const about = [matrix.suite !== matrix.name ? matrix.suite : null, matrix.created ? started(matrix.created) : null];
    return el("tr", {},
      el("td", { class: "name" }, el("a", { href: "/matrix/" + matrix.id }, escapeInvisible(matrix.name)),
        span("sub", escapeInvisible(about.filter(Boolean).join(" \u00b7 ")))),
      el("td", { class: "left" }, span("pill " + PILLS[matrix.state], matrix.state)),
      el("td", {}, plural(matrix.variants, "variant") + left),
      el("td", { class: "bar-cell" }, `${number(matrix.done)} of ${number(matrix.planned)}`,
        matrix.state === "complete" || !matrix.planned ? null : meter(matrix.done / matrix.planned)),
      el("td", {}, leader, mark, span("sub", matrix.leads)),
      el("td", { class: "less" }, matrix.cost ? money(matrix.cost, matrix.currency) : MISSING));
  });
  const head = hiddenHead(["Matrix", "State", "Variants", "Done", "Leader", "Cost"]);
  at("matrices").replaceChildren(el("h2", {}, "Matrices"), div("scroll", el("table", {}, head, el("tbody", {}, ...rows))));
}

function hiddenHead(names) {
  return el("thead", { class: "visually-hidden" }, el("tr", {}, ...names.map((name) => el("th", { scope: "col" }, name))));
}

function render() {
  for (const id of [...picked]) if (!runs.some((run) => run.id === id)) picked.splice(picked.indexOf(id), 1);
  const terms = at("search").value.toLowerCase().split(/\s+/).filter(Boolean);
  const shown = runs.filter((run) => !hiddenStates.has(run.state) && matches(run, terms));
  at("runs").replaceChildren(...shown.map(runRow));
  at("many").textContent = plural(runs.length, "run");
  at("empty").hidden = shown.length > 0 || (together > 0 && !runs.length);
  at("empty").textContent = runs.length ? "No runs match. Press Esc in the search box to clear it." : "No runs here yet: steelyard run SUITE makes one.";
  const states = ORDER.filter((state) => runs.some((run) => run.state === state));
  at("states").replaceChildren(...(states.length > 1 ? states.map(stateChip) : []));
  renderPicked();
  document.documentElement.dataset.ready = "runs";
}

function matches(run, terms) {
  const text = `${run.name}\n${run.suite}\n${run.model || ""}\n${run.state}`.toLowerCase();
  return terms.every((term) => text.includes(term));
}

function stateChip(state) {
  const count = runs.filter((run) => run.state === state).length;
  const toggle = () => { if (!hiddenStates.delete(state)) hiddenStates.add(state); render(); };
  return button({ class: "chip", "aria-pressed": String(!hiddenStates.has(state)), onclick: toggle }, state,
    span("n", number(count)));
}

function runRow(run) {
  const label = "Pick " + escapeInvisible(run.name);
  const box = el("input", { type: "checkbox", "aria-label": label, onchange: () => pick(run.id) });
  box.checked = picked.includes(run.id);
  const left = run.planned > 0 && run.state !== "complete";
  const done = left ? `${number(run.done)} of ${number(run.planned)}` : number(run.done);
  const passed = run.scored ? span("sub", `${compact(run.passed)} of ${compact(run.scored)}`) : null;
  const mark = (run.uncalibrated || []).length
    ? span("tag error", "judge not calibrated") : null;
  const corrected = run.pass_rate_corrected === null || run.pass_rate_corrected === undefined
    ? null : span("sub", `corrected ${percent(run.pass_rate_corrected)}`);
  if (corrected) corrected.title = run.correction;
  if (mark) mark.title = run.uncalibrated.join("; ");
  const interval = run.pass_rate_ci95 ? whisker(run.pass_rate, run.pass_rate_ci95) : MISSING;
  const cells = [
    ["", box],
    ["name left", ...nameCell(run)],
    ["left", span("pill " + PILLS[run.state], run.state)],
    ["bar-cell", done, left ? meter(run.done / run.planned) : null],
    ["", percent(run.pass_rate), passed, corrected, mark],
    ["whisker-cell less", interval],
    ["least", number(run.errors)],
    ["less", seconds(run.p50)],
    ["less", run.cost ? money(run.cost, run.currency) : MISSING],
    ["least", run.created ? started(run.created) : MISSING],
  ];
  const attributes = { "data-run": run.id, class: box.checked ? "picked" : null };
  return el("tr", attributes, ...cells.map(([kind, ...inside]) => el("td", { class: kind }, ...inside)));
}

function nameCell(run) {
  const about = [run.suite !== run.name ? run.suite : null, run.model].filter(Boolean).join(" \u00b7 ");
  return [el("a", { href: "/run/" + run.id }, escapeInvisible(run.name)),
    picked[0] === run.id && picked.length < 3 ? span("tag accent", "baseline") : null,
    span("sub", escapeInvisible(run.problem || about))];
}

function meter(share) {
  const filled = el("span", {});
  filled.style.width = Math.min(100, 100 * share) + "%";
  return div("meter", filled);
}

function started(text) {
  const date = new Date(text), today = new Date().toDateString() === date.toDateString();
  const parts = { ...(today ? {} : { day: "numeric", month: "short" }), hour: "2-digit", minute: "2-digit" };
  return Number.isNaN(date.getTime()) ? escapeInvisible(text) : date.toLocaleString("en-GB", parts);
}

function pick(id) {
  if (picked.includes(id)) picked.splice(picked.indexOf(id), 1);
  else picked.push(id);
  while (picked.length > MAX_PICKED) picked.shift();
  render();
}

function renderPicked() {
  const names = picked.map((id) => runs.find((run) => run.id === id).name);
  at("compare").disabled = picked.length < 2;
  at("compare").textContent = picked.length < 2 ? "Compare" : `Compare ${picked.length} runs`;
  const chosen = picked.length === 2 ? `${names[0]} is the baseline` : names.join(", ");
  at("compare").title = picked.length < 2 ? "Pick at least two runs" : escapeInvisible(chosen);
}

at("compare").addEventListener("click", () => {
  location.href = "/compare?" + picked.map((id) => "run=" + encodeURIComponent(id)).join("&");
});
at("search").addEventListener("input", render);
document.addEventListener("visibilitychange", refresh);
document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  const typing = event.target === at("search");
  if (typing && event.key === "Escape") { at("search").value = ""; at("search").blur(); render(); }
  else if (!typing && event.key === "/") { event.preventDefault(); at("search").focus(); }
});
refresh();
setInterval(refresh, EVERY);
