// The overview: outcomes and their uncertainty, latency, throughput, cost.

const MAX_KINDS = 8;
const MAX_FLAKY = 6;
const ENDINGS = ["average", "p50", "p90", "p95", "p99", "min", "max"];
const MEASURED = [
  ["time_to_first_token", "time to first token", seconds],
  ["time_to_last_token", "time to last token", seconds],
  ["time_per_output_token", "time per output token", seconds],
  ["num_tokens_input", "input tokens", compact],
  ["num_tokens_output", "output tokens", compact],
];

function renderOverview(page, root, go) {
  const cards = div("cards");
  const add = (title, ...found) => {
    const there = found.filter(Boolean);
    if (there.length) cards.append(...(title ? [el("h2", { class: "section" }, title)] : []), ...there);
  };
  add(null, outcomeCard(page, go), scoresCard(page), metricsCard(page), ...sliceCards(page, go), trialsCard(page, go),
    errorsCard(page, go));
  const { first, last } = page.charts;
  add("Latency", latencyCard("Time to first token", first, "first"), latencyCard("Time to last token", last, "last"),
    percentilesCard(page));
  if (!page.metrics.scored_from) add("Over time", throughputCard(page), scatterCard(page, go));
  add("Tokens and cost", tokensCard(page), costCard(page));
  add("About this run", aboutCard(page));
  root.append(heading(page), div("notices", ...page.notices.map(notice)), tiles(page), cards);
}

function heading(page) {
  const { metrics, about } = page;
  const facts = [
    about.model,
    `${number(metrics.n)} of ${plural(metrics.counts.planned, "record")}`,
    about.trials > 1 ? `${number(about.trials)} trials per case` : null,
    about.created ? when(about.created) : null,
    metrics.active_seconds ? `took ${seconds(metrics.active_seconds)}` : null,
    about.run,
  ];
  const shown = facts.filter(Boolean).map((fact) => el("span", {}, escapeInvisible(fact)));
  const state = metrics.complete ? span("pill passed", "complete") : span("pill error", "not complete");
  return div("head", el("div", {}, el("h1", {}, escapeInvisible(about.suite)), el("p", { class: "facts" }, ...shown)), state);
}

function when(text) {
  const date = new Date(text);
  const parts = { day: "numeric", month: "short", year: "numeric", hour: "2-digit", minute: "2-digit" };
  return Number.isNaN(date.getTime()) ? text : date.toLocaleString("en-GB", parts);
}

function notice({ level, title, text }) {
  const role = level === "warning" ? "alert" : "note";
  const inside = el("div", {}, el("b", {}, escapeInvisible(title)), el("p", {}, escapeInvisible(text)));
  return el("div", { class: "notice " + level, role }, inside);
}

// Tiles

function tile(label, value, unit, note, extra) {
  return div("tile", div("label", label), div("value", value, unit ? el("small", {}, unit) : null),
    note ? div("note", note) : null, extra);
}

function tiles(page) {
  const { metrics } = page;
  if (!metrics.n) return div("tiles");
  const answered = `${number(metrics.counts.error)} of ${number(metrics.n)} ended in an error`;
  return div("tiles", passTile(metrics), tile("Errors", percent(metrics.error_rate), "", answered),
    timeTile("Time to first token", metrics, "time_to_first_token"),
    timeTile("Time to last token", metrics, "time_to_last_token"), throughputTile(metrics), costTile(metrics));
}

// Judges that decide and are not calibrated; a run that is being written names them itself.
function uncalibratedNote(metrics) {
  const open = metrics.uncalibrated || Object.entries(metrics.scores || {})
    .filter(([, score]) => score.by && !score.advisory && !score.calibrated).map(([name]) => name);
  if (open.length > 1) return `${open.length} judges (${escapeInvisible(open.join(", "))}) are not calibrated`;
  if (open[0] === "judge") return "the judge is not calibrated";
  return open.length ? `judge ${escapeInvisible(open[0])} is not calibrated` : "";
}

function passTile(metrics) {
  if (metrics.pass_rate === null) return null;
  const interval = metrics.pass_rate_ci95;
  const sure = interval ? `, 95\u00a0%\u00a0CI ${(interval[0] * 100).toFixed(1)}\u2013${percent(interval[1])}` : "";
  const mark = uncalibratedNote(metrics).replace(/^./, "; $&");
  const { trials } = metrics, repeated = trials && trials.trials > 1;
  const scored = repeated ? `mean of ${plural(trials.cases, "case")}` : `${number(metrics.passed)} of ${number(metrics.scored)} scored`;
  const grouped = metrics.groups ? ` in ${plural(metrics.groups, "group")}` : "";
  const all = metrics.scored < metrics.n ? `; ${percent(metrics.pass_rate_all)} of all, errors included` : "";
  const note = `${scored}${grouped}${sure}${all}${correctedNote(metrics)}${mark}`;
  const drawn = interval ? div("whisker", whisker(metrics.pass_rate, interval)) : null;
  return tile("Pass rate", percent(metrics.pass_rate), "", note, drawn);
}

// The rate that labels correct, as `correction_note` in Python has it.
function correctedNote(metrics) {
  const { correction, pass_rate_corrected: rate, pass_rate_corrected_ci95: interval } = metrics;
  if (!correction) return "";
  if (correction.why_not) return `; not corrected: ${escapeInvisible(correction.why_not)}`;
  const sure = interval ? `, 95\u00a0%\u00a0CI ${(interval[0] * 100).toFixed(1)}\u2013${percent(interval[1])}` : "";
  const labels = plural(correction.labels, "label") + (correction.labels_of ? " of another run" : "");
  const assumes = correction.assumes_same_errors ? ", assumes the same error rates" : "";
  return `; corrected by ${labels}: ${percent(rate)}${sure}${assumes}` +
    (correction.clustered ? ", trials and groups count as independent" : "");
}

function timeTile(label, metrics, name) {
  const { stats } = metrics;
  if (stats[name + "-p50"] === null) return null;
  const [value, unit] = seconds(stats[name + "-p50"]).split(" ");
  const interval = intervalOf(percentileOf(metrics, name, "p99"));
  const note = `p90 ${timeOf(metrics, name, "p90")}, p99 ${timeOf(metrics, name, "p99")}` +
    (interval ? ` (95\u00a0%\u00a0CI of the p99: ${interval})` : "");
  return tile(label, (isAtLeast(metrics, name, "p50") ? "\u2265\u00a0" : "") + value, unit + " median", note);
}

// A percentile with its interval, as metrics.json has it; runs of older versions have none.
const percentileOf = (metrics, name, ending) => ((metrics.latency || {})[name] || {})[ending];

const isAtLeast = (metrics, name, ending) => Boolean((percentileOf(metrics, name, ending) || {}).at_least);

function timeOf(metrics, name, ending) {
  return (isAtLeast(metrics, name, ending) ? "\u2265\u00a0" : "") + seconds(metrics.stats[`${name}-${ending}`]);
}

function intervalOf(found) {
  if (!found) return "";
  if (!found.ci95) return `n too small (${number(found.needed)} needed)`;
  return `${seconds(found.ci95[0])}\u2013${found.ci95[1] === null ? "?" : seconds(found.ci95[1])}`;
}

function throughputTile({ stats, scored_from: scoredFrom }) {
  if (scoredFrom || stats.requests_per_minute === null) return null;
  const tokens = stats.total_output_tokens ? `${number(stats.output_tps)} output tokens per second` : "";
  return tile("Throughput", compact(stats.requests_per_minute), "answers/min", tokens);
}

function callsWithoutCost(metrics) {
  return (metrics.cost_unknown || 0) + (metrics.cost_unknown_errors || 0) + (metrics.cost_unknown_judges || 0);
}

function costTile(metrics) {
  if (!metrics.cost) return null;
  const each = metrics.cost_per_passed_case;
  const unknown = callsWithoutCost(metrics);
  const note = [
    each ? `${money(each, metrics.currency)} per passed case` : "",
    unknown ? `${plural(unknown, "call")} not included` : "",
  ].filter(Boolean).join("; ");
  return tile("Cost", money(metrics.cost, ""), escapeInvisible(metrics.currency || ""), note);
}

// Cards

function card(title, aside, wide, ...children) {
  const head = el("header", {}, el("h2", {}, title), aside ? div("aside", aside) : null);
  return el("section", { class: wide ? "card wide" : "card" }, head, ...children);
}

const hiddenName = (name) => span("visually-hidden", name);

function tableOf(head, rows) {
  const names = head.map((name) => el("th", { scope: "col" }, name));
  const top = el("thead", {}, el("tr", {}, ...names));
  return div("scroll", el("table", {}, top, el("tbody", {}, ...rows)));
}

function line(...cells) {
  const isCell = (one) => one instanceof Element && one.tagName === "TD";
  return el("tr", {}, ...cells.map((one) => (isCell(one) ? one : el("td", {}, one))));
}

// A bar of shares, and a legend that names them: each part is a name, a count, the class of its colour.
function shares(kind, parts) {
  const whole = parts.reduce((sum, [, count]) => sum + count, 0);
  const bar = el("div", { class: kind, "aria-hidden": "true" });
  for (const [, count, fill] of parts) {
    const piece = span(fill);
    piece.style.flex = `${(100 * count) / whole} 1 0`;
    bar.append(piece);
  }
  return bar;
}

function key(fill, label, figure) {
  return [span("dot " + fill), label, figure === undefined ? null : el("b", {}, figure)];
}

function outcomeCard(page, go) {
  const { counts, metrics } = page;
  const all = { ...counts, left: metrics.counts.planned - metrics.n };
  const parts = ["passed", "failed", "error", "unscored", "left"].filter((name) => all[name] > 0)
    .map((name) => [name, all[name], name + "-fill"]);
  if (!parts.length) return card("Outcome", "", true, el("p", { class: "facts" }, "No answers yet."));
  const entries = parts.map(([name, count, fill]) => {
    if (name === "left") return el("span", {}, ...key(fill, "not done", number(count)));
    const chip = name === "error" ? "errored" : name;
    return button({ title: "Show these cases", onclick: () => go.filter(chip) }, ...key(fill, chip, number(count)));
  });
  return card("Outcome", "", true, shares("outcome", parts), div("legend", ...entries));
}

function scoresCard(page) {
  const rows = Object.entries(page.metrics.scores).flatMap(([name, score]) =>
    score.labels ? labelLines(name, score) : [scoreLine(name, score)]);
  const head = ["score", "mean", hiddenName("interval, drawn"), "95 % interval", "passed", "n"];
  return rows.length ? card("Scores", "", true, tableOf(head, rows)) : null;
}

function scoreLine(name, score) {
  const tags = [
    score.advisory ? span("tag error", "advisory") : null,
    score.escalated ? span("tag accent", `judged ${number(score.escalated)} failures`) : null,
    score.errors ? span("tag failed", `${number(score.errors)} without a score`) : null,
  ].filter(Boolean).flatMap((tag) => [" ", tag]);
  const judge = score.by ? span("sub", escapeInvisible(score.by.join(", "))) : null;
  const interval = score.mean === null ? null : score.mean_ci95, isNumber = score.max !== undefined;
  const range = isNumber && score.mean !== null ? span("sub", `${number(score.min)} to ${number(score.max)}`) : null;
  const drawn = el("td", {}, isNumber ? range : interval ? whisker(score.mean, interval) : null);
  drawn.style.width = "38%";
  const named = el("td", { class: "name" }, escapeInvisible(name), ...tags, judge);
  const show = (value) => (isNumber ? number(value) : value.toFixed(3));
  const unit = isNumber && score.unit ? ` ${escapeInvisible(score.unit)}` : "";
  const mean = score.mean === null ? MISSING : show(score.mean) + unit;
  const sure = interval ? `${show(interval[0])} \u2013 ${show(interval[1])}` : "";
  return line(named, mean, drawn, sure, percent(score.pass_rate), number(score.n));
}

const MAX_ROWS = 20;

// The labels of a score, the most frequent ones: each its share.
function labelLines(name, score) {
  const labels = Object.keys(score.labels);
  const rows = labels.slice(0, MAX_ROWS).map((label) => {
    const share = score.shares[label], interval = score.shares_ci95[label];
    const named = el("td", { class: "name" }, escapeInvisible(name), " ", span("tag", escapeInvisible(label)));
    const drawn = el("td", {}, interval ? whisker(share, interval) : null);
    const sure = interval ? `${percent(interval[0])} \u2013 ${percent(interval[1])}` : "";
    return line(named, percent(share), drawn, sure, "", number(score.labels[label]));
  });
  if (labels.length > MAX_ROWS) rows.push(line(`and ${number(labels.length - MAX_ROWS)} more labels`));
  return rows;
}

// What functions over all records give.
function metricsCard({ metrics }) {
  const show = (value) => (Math.abs(value) <= 1 ? value.toFixed(3) : number(value));
  const rows = Object.entries(metrics.run_metrics || {}).map(([name, { value, ci95, unit, n, error }]) => {
    const failed = error ? [" ", span("tag failed", "failed"), span("sub", escapeInvisible(error))] : [];
    const figure = value === null ? MISSING : show(value) + (unit ? ` ${escapeInvisible(unit)}` : "");
    const sure = ci95 ? `${show(ci95[0])} \u2013 ${show(ci95[1])}` : "";
    return line(el("td", { class: "name" }, escapeInvisible(name), ...failed), figure, sure, n === undefined ? "" : number(n));
  });
  const head = ["metric", "value", "95 % interval", "n"];
  return rows.length ? card("Metrics of the whole run", "", true, tableOf(head, rows)) : null;
}

// A card for each metadata key: its values with their rates; a click shows the cases.
function sliceCards(page, go) {
  const keys = new Map();
  for (const one of page.metrics.slices || []) keys.set(one.key, [...(keys.get(one.key) || []), one]);
  const head = ["value", "passed", hiddenName("interval, drawn"), "95 % interval", "of", "errors", "last token p50"];
  return [...keys].map(([key, slices]) => {
    const small = slices.some((one) => one.small) ? "small: fewer than 30 cases or groups say little" : "";
    const aside = [uncalibratedNote(page.metrics), small].filter(Boolean);
    return card(`By ${escapeInvisible(key)}`, aside.join("; "), true, tableOf(head, slices.map((one) => sliceLine(one, go))));
  });
}

function sliceLine(one, go) {
  const isValue = !["(other)", "(not kept)", "(none)"].includes(one.value);
  const named = isValue
    ? button({ class: "linkish", title: "Show these cases", onclick: () => go.slice(one.key, one.value) }, escapeInvisible(one.value))
    : one.value;
  const interval = one.pass_rate_ci95, last = one.latency.time_to_last_token;
  const drawn = el("td", {}, interval ? whisker(one.pass_rate, interval) : null);
  drawn.style.width = "34%";
  const sure = interval ? `${percent(interval[0])} \u2013 ${percent(interval[1])}` : "";
  const cell = el("td", { class: "name" }, named, ...(one.small ? [" ", span("tag", "small")] : []));
  const p50 = last && last.p50.value !== null ? (last.p50.at_least ? "\u2265\u00a0" : "") + seconds(last.p50.value) : "";
  return line(cell, percent(one.pass_rate), drawn, sure, number(one.scored), one.errors ? number(one.errors) : "", p50);
}

function trialsCard(page, go) {
  const trials = page.metrics.trials;
  if (!trials || trials.trials < 2 || !trials.cases) return null;
  const all = Object.keys(trials.pass_at_k).filter((k) => trials.pass_at_k[k] !== null);
  const isShown = (k, index) => all.length <= 8 || Number.isInteger(Math.log2(Number(k))) || index === all.length - 1;
  const ks = all.filter(isShown);
  const rows = [["pass@k: any of k passes", trials.pass_at_k], ["pass^k: all k pass", trials.pass_hat_k]]
    .map(([label, of]) => line(label, ...ks.map((k) => percent(of[k]))));
  const title = `${number(trials.trials)} trials of ${plural(trials.cases, "case")}`;
  return card("Trials", title, true, tableOf(["k", ...ks], rows), ...ofWhich(trials), ...flakyCases(trials, go));
}

// Of which cases pass@k and pass^k are, and how sure the last of them is; runs of older versions do not say.
function ofWhich(trials) {
  const k = trials.verdicts_for_k;
  if (!k) return [];
  const sure = [["pass@", trials.pass_at_k_ci95], ["pass^", trials.pass_hat_k_ci95]].filter(([, of]) => of && of[k])
    .map(([label, of]) => `${label}${k} 95\u00a0%\u00a0CI ${percent(of[k][0])} \u2013 ${percent(of[k][1])}`);
  const text = `of the ${plural(trials.cases_for_k, "case")} with ${plural(k, "verdict")} or more; ${sure.join("; ")}`;
  return [el("p", { class: "facts" }, text)];
}

function flakyCases(trials, go) {
  const none = "No flaky cases: each passed in all of its trials or in none.";
  if (!trials.flaky) return [el("p", { class: "facts" }, none)];
  const shown = trials.flaky_cases.slice(0, MAX_FLAKY);
  const entries = shown.map(({ id, passed, tried }) =>
    button({ onclick: () => go.openId(id) }, escapeInvisible(id), span("tag", `${number(passed)}/${number(tried)}`)));
  const rest = trials.flaky - shown.length;
  if (rest) entries.push(button({ onclick: () => go.filter("flaky") }, `and ${number(rest)} more`));
  return [el("h3", {}, `Flaky: ${number(trials.flaky)} of ${plural(trials.cases, "case")}`), div("legend", ...entries)];
}

function errorsCard(page, go) {
  const { error_kinds: kinds, error_kind_examples: ofKinds, errors, error_examples: ofTypes } = page.metrics;
  const entries = Object.entries(kinds || errors), examples = (kinds ? ofKinds : ofTypes) || {};  // older runs: by type
  const rows = entries.slice(0, MAX_KINDS).map(([kind, count]) => {
    const example = examples[kind];
    const open = button({ class: "linkish", onclick: () => go.filter("errored") }, escapeInvisible(kind));
    const message = example ? span("sub", escapeInvisible(`${example.id}: ${example.error}`)) : null;
    return line(el("td", { class: "name" }, open, message), number(count));
  });
  if (entries.length > MAX_KINDS) rows.push(line(`and ${entries.length - MAX_KINDS} more kinds`, ""));
  return rows.length ? card("Errors by kind", "", true, tableOf([hiddenName("kind"), hiddenName("errors")], rows)) : null;
}

function latencyCard(title, data, kind) {
  if (!data) return null;
  const label = `${title}: median ${seconds(data.p50)}, p90 ${seconds(data.p90)}, p99 ${seconds(data.p99)}`;
  const aside = plural(data.n, "answer") + (data.log ? ", log scale" : "");
  return card(title, aside, false, histogramChart(data, kind, seconds, label));
}

function percentilesCard(page) {
  const { metrics } = page, { stats } = metrics;
  const cell = (name, ending, show) => {
    const text = isAtLeast(metrics, name, ending) ? timeOf(metrics, name, ending) : show(stats[`${name}-${ending}`]);
    const interval = intervalOf(percentileOf(metrics, name, ending));
    return interval ? el("td", {}, text, span("sub", interval)) : text;
  };
  const rows = MEASURED.filter(([name]) => typeof stats[name + "-average"] === "number")
    .map(([name, label, show]) => line(label, ...ENDINGS.map((ending) => cell(name, ending, show))));
  if (!rows.length) return null;
  const timeouts = ((metrics.latency || {}).time_to_last_token || {}).timeouts;
  const aside = "of answers that did not come from the cache, percentiles of times with 95\u00a0% intervals" +
    (timeouts ? `; ${plural(timeouts, "call")} timed out, counted as longer` : "");
  return card("Percentiles", aside, true, tableOf([hiddenName("figure"), ...ENDINGS], rows));
}

function throughputCard(page) {
  const data = page.charts.over_time;
  if (!data) return null;
  const entries = [el("span", {}, ...key("last-fill", "finished per second"))];
  if (data.errors.some(Boolean)) entries.push(el("span", {}, ...key("error-fill", "errors")));
  const drawn = overTimeChart(data, "Records finished per second over the run, and errors among them");
  return card("Throughput and errors", "", false, drawn, div("legend", ...entries));
}

function scatterCard(page, go) {
  const data = page.charts.points;
  if (!data) return null;
  const present = [1, 0, 3, 2].filter((state) => data.state.includes(state)).map((state) => STATES[state]);
  const entries = present.map((name) => el("span", {}, ...key(name + "-fill", name)));
  const all = "time to last token; of errors, until the error";
  const aside = data.at.length < data.of ? `${number(data.at.length)} of ${number(data.of)} shown` : all;
  const drawn = scatterChart(data, "When each record finished and how long it took", go.openRecord);
  return card("Timeline", aside, false, drawn, div("legend", ...entries));
}

function tokensCard(page) {
  const { total_input_tokens: input, total_output_tokens: output } = page.metrics.stats;
  if (!input && !output) return null;
  const cached = Math.min(page.charts.cached_input, input), reasoning = Math.min(page.charts.reasoning, output);
  const parts = [
    ["input", input - cached, "first-fill"],
    ["input from the provider's cache", cached, "unscored-fill"],
    ["output", output - reasoning, "last-fill"],
    ["reasoning", reasoning, "error-fill"],
  ].filter(([, count]) => count > 0);
  const entries = parts.map(([name, count, fill]) => el("span", {}, ...key(fill, name, compact(count))));
  const title = "Output tokens per answer", data = page.charts.output;
  const spread = data ? [el("h3", {}, title), histogramChart(data, "plain", compact, title)] : [];
  const aside = `${compact(input + output)} in all`;
  return card("Tokens", aside, !page.metrics.cost, shares("stack", parts), div("legend", ...entries), ...spread);
}

function costCard({ metrics }) {
  if (!metrics.cost) return null;
  const rows = [
    ["answers", metrics.cost_answers],
    ["judges", metrics.cost_judges],
    ["failed calls", metrics.cost_errors],
    ["per 1,000 cases", metrics.cost_per_1000_cases],
    ["per passed case", metrics.cost_per_passed_case],
  ].filter(([, amount]) => amount).map(([label, amount]) => line(label, money(amount, metrics.currency)));
  const unknown = callsWithoutCost(metrics);
  const notes = [
    unknown ? `The cost of ${plural(unknown, "call")} is unknown and not included.` : "",
    metrics.cost_estimated ? `${plural(metrics.cost_estimated, "call")} priced by estimated token counts.` : "",
  ].filter(Boolean).join(" ");
  const note = notes ? el("p", { class: "facts" }, notes) : null;
  return card("Cost", money(metrics.cost, metrics.currency), false, tableOf([hiddenName("cost of"), hiddenName("amount")], rows), note);
}

function aboutCard(page) {
  const groups = page.about.groups.map(([title, facts]) => el("div", {}, el("h3", {}, title), pairs(facts, "mono")));
  return card("Settings", "", true, div("groups", ...groups));
}
