// A run that is being written: its figures, curves and newest cases, drawn again with every event.

const PERCENTILES = ["p50", "p90", "p99"];
const MAX_MARKED = 5;
const QUIET_FROM = 10;
const STATE_PILLS = { running: "running", complete: "passed", interrupted: "error", damaged: "failed" };

class LiveView {
  constructor(root, about, go) {
    Object.assign(this, { root, about, go, generation: null, seen: new Set(), parts: new Map() });
  }

  render(event) {
    if (!this.holder || !this.root.contains(this.holder)) {
      this.parts.clear();
      this.holder = div("live");
      this.root.replaceChildren(this.holder);
    }
    if (event.generation !== this.generation) {
      this.generation = event.generation;
      this.seen.clear();
    }
    this.set("head", this.head(event));
    if (!event.figures) return;
    this.set("tiles", this.tiles(event.figures, event.state === "running"));
    this.set("progress", div("cards", this.progress(event)));
    this.set("running", runningCard(event.running || [], this.go.openRunning), true);
    this.set("charts", this.charts(event.figures), true);
    this.set("newest", this.newest(event.newest), true);
  }

  // Parts are replaced one by one, and what somebody reads, with the pointer or the keys, is left as it is.
  set(name, element, keptWhileRead = false) {
    if (!this.parts.has(name)) {
      this.parts.set(name, div("live-" + name));
      this.holder.append(this.parts.get(name));
    }
    const slot = this.parts.get(name);
    if (!keptWhileRead || !slot.matches(":hover, :focus-within")) slot.replaceChildren(...(element ? [element] : []));
  }

  head(event) {
    const about = event.about || {}, quiet = event.quiet >= QUIET_FROM;
    const facts = [about.model, about.created ? "started " + when(about.created) : null,
      about.launches > 1 ? resumed(about.launches - 1) : null, this.about.name,
      quiet ? `no answers for ${roughly(event.quiet)}` : null];
    const shown = facts.filter(Boolean).map((fact) => el("span", {}, escapeInvisible(fact)));
    const title = el("h1", {}, escapeInvisible(about.suite || this.about.name));
    const reading = event.reading === undefined ? null
      : notice({ level: "info", title: "Reading the journal", text: percent(event.reading, 0) + " of it so far" });
    const problem = event.problem
      ? notice({ level: "warning", title: "Not all of it can be read", text: event.problem }) : null;
    return el("div", {},
      div("head", el("div", {}, title, el("p", { class: "facts" }, ...shown)),
        span("pill " + STATE_PILLS[event.state], event.state)),
      div("notices", reading, problem));
  }

  tiles(figures, running) {
    const { counts, n } = figures, scored = counts.passed + counts.failed;
    const perSecond = running ? figures.rate : n / (figures.seconds || 1);
    const tokens = figures.tokens[1] ? `${compact(figures.tokens[1])} output tokens so far` : "";
    const errors = `${number(counts.error)} of ${number(n)} ended in an error`;
    return div("tiles", passTile({ ...figures, passed: counts.passed, scored }),
      tile("Errors", percent(n ? counts.error / n : null), "", errors),
      timeTile("Time to first token", { stats: namedPercentiles(figures.first) }, "time"),
      timeTile("Time to last token", { stats: namedPercentiles(figures.last) }, "time"),
      tile("Throughput", compact(perSecond * 60), running ? "/ min now" : "/ min", tokens),
      figures.cost ? tile("Cost", money(figures.cost, ""), "", "so far") : null);
  }

  progress({ figures, planned, state }) {
    const { counts, n, rate } = figures;
    const continues = state === "running" && rate > 0 && n < planned;
    const done = el("span", {}, el("b", {}, number(n)), ` of ${plural(planned, "record")}`,
      planned ? ` (${percent(n / planned)})` : "");
    const left = el("span", {}, continues ? `about ${roughly((planned - n) / rate)} left` : "");
    const parts = [["passed", "passed", counts.passed], ["failed", "failed", counts.failed],
      ["error", "errored", counts.error], ["unscored", "unscored", counts.unscored], ["left", "not done", planned - n]];
    const there = parts.filter(([, , count]) => count > 0);
    const kinds = figures.errors.map(([kind, count]) => span("tag error", `${escapeInvisible(kind)} \u00d7 ${number(count)}`));
    return el("section", { class: "card wide progress" }, div("numbers", done, left),
      el("div", { class: "outcome", role: "img", "aria-label": `${number(n)} of ${number(planned)} done` },
        ...there.map(([name, , count]) => portion(name, count))),
      div("legend", ...there.map((part) => this.legendOf(part))), kinds.length ? div("kinds", ...kinds) : null);
  }

  legendOf([name, label, count]) {
    const inside = [span(`dot ${name}-fill`), label, el("b", {}, number(count))];
    if (name === "left") return el("span", {}, ...inside);
    return button({ title: "Show these cases", onclick: () => this.go.filter(label) }, ...inside);
  }

  charts(figures) {
    const data = figures.over_time;
    if (!data) return null;
    const legend = div("legend", ...PERCENTILES.map((name) => el("span", {}, span("dot " + name), name)));
    const times = data.times.some(Boolean)
      ? card("Time to last token", "of the answers in each interval", false, timesChart(data), legend) : null;
    return div("cards", throughputCard({ charts: { over_time: data }, metrics: {} }), times);
  }

  newest(found) {
    const news = found.filter((one) => !this.seen.has(one.offset)).length;
    const marking = this.seen.size > 0 && news <= MAX_MARKED;  // where all is new, a mark says nothing
    const rows = found.map((one) => this.newestRow(one, marking && !this.seen.has(one.offset)));
    this.seen = new Set(found.map((one) => one.offset));
    const names = [["Outcome", "sign-cell"], ["Case", ""], ["Prompt", ""], ["Answer", ""], ["Took", "figure-cell"]];
    const head = el("tr", {}, ...names.map(([name, kind]) => el("th", { scope: "col", class: kind },
      kind === "sign-cell" ? span("visually-hidden", name) : name)));
    const table = el("table", { class: "newest-cases" }, el("thead", {}, head), el("tbody", {}, ...rows));
    const nothing = el("p", { class: "empty" }, "No answers yet.");
    return div("cards", card("Newest", "", true, rows.length ? table : nothing));
  }

  newestRow(one, fresh) {
    const open = () => this.go.openAt(one.offset);
    const name = one.trial ? `${one.id} (trial ${one.trial + 1})` : one.id;
    return el("tr", { class: fresh ? "fresh" : null, tabindex: "0", onclick: open,
      onkeydown: (event) => { if (event.key === "Enter") open(); } },
      el("td", { class: "sign-cell" }, badge(STATES[one.state])),
      el("td", {}, escapeInvisible(name)),
      el("td", { class: "answer" }, escapeInvisible(one.prompt)),
      el("td", { class: one.state === 3 ? "error-text" : "answer" }, escapeInvisible(one.answer)),
      el("td", { class: "figure-cell" }, seconds(one.last)));
  }
}

function resumed(times) {
  return times === 1 ? "resumed once" : times === 2 ? "resumed twice" : `resumed ${number(times)} times`;
}

function namedPercentiles(values) {
  return Object.fromEntries(PERCENTILES.map((name, index) => ["time-" + name, values ? values[index] : null]));
}

function portion(name, count) {
  const piece = span(name + "-fill");
  piece.style.flex = `${count} 1 0`;
  return piece;
}

// A time that is only a guess.
function roughly(value) {
  if (value < 90) return `${Math.ceil(value)} s`;
  return value < 5400 ? `${Math.round(value / 60)} min` : `${(value / 3600).toFixed(1)} h`;
}

// Percentiles of the times over the run: a gap where nothing came back.
function timesChart(data) {
  return readableChart(210, "Time to last token over the run: median, p90 and p99", (drawing, width, height) => {
    const box = { left: 52, right: width - 4, top: 10, bottom: height - 22 }, { times } = data;
    const ends = data.width * times.length, most = Math.max(...times.filter(Boolean).map((one) => one[2])) || 1;
    const x = scale(0, ends, box.left, box.right, false), y = scale(0, most * 1.05, box.bottom, box.top, false);
    yAxis(drawing, niceTicks(0, most, 4), y, seconds, box.left, box.right);
    xAxis(drawing, timeTicks(ends, Math.floor(width / 90)), x, box.bottom, clock, box.left, box.right);
    PERCENTILES.forEach((name, rank) => drawCurve(drawing, name, times.map((one, index) =>
      (one ? [x((index + 0.5) * data.width), y(one[rank])] : null))));
    const share = (px) => (px - box.left) / (box.right - box.left);
    const place = (px) => within(Math.floor(share(px) * times.length), times.length);
    const text = (index) => timesTip(data, index), highlight = () => {};
    followPointer(drawing, box, place, { text, highlight });
    const heights = times.map((one) => (one ? y(one[0]) : box.bottom));
    return { count: times.length, text, highlight, place: (index) => [x((index + 0.5) * data.width), heights[index]] };
  });
}

function drawCurve(drawing, name, places) {
  let path = "";
  places.forEach((place, index) => {
    if (!place) return;
    const [x, y] = place, begins = !places[index - 1];
    path += `${begins ? "M" : "L"}${x.toFixed(1)} ${y.toFixed(1)}`;
    if (begins && !places[index + 1]) drawing.append(svg("circle", { class: "knot " + name, cx: x, cy: y, r: 2 }));
  });
  drawing.append(svg("path", { class: "curve " + name, d: path }));
}

function timesTip(data, index) {
  const found = data.times[index];
  const lines = found ? PERCENTILES.map((name, rank) => `${name} ${seconds(found[rank])}`) : ["no answers"];
  return [`${seconds(index * data.width)} to ${seconds((index + 1) * data.width)}`, ...lines].join("\n");
}
