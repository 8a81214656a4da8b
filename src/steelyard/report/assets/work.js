// What an agent did and left behind: its time line, turns, patch, logs and files. All of it is untrusted, and enters as text.

const SHOWN_TURNS = 40;
const SHOWN_FILES = 20;

const PART_NAMES = { model: "model", tools: "tools and the agent itself", waiting: "rate-limit wait" };

// A chart with bars as report/chart.py draws it, put in place shape by shape.
function barChart({ description, width, height, left, right, bottom, x_label: label, x_ticks: ticks, rows, bars }) {
  const text = (x, y, words, anchor) => svg("text", { x, y, "text-anchor": anchor }, words);
  return svg("svg", { class: "chart", viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": description },
    svg("line", { class: "axis", x1: left, x2: right, y1: bottom, y2: bottom }),
    ...ticks.map(([x, words]) => text(x, bottom + 16, words, "middle")), text(right, bottom + 34, label, "end"),
    ...rows.map(([y, name]) => text(left - 8, y + 3.5, name, "end")),
    ...bars.map((bar) => svg("rect", { class: bar.kind, x: bar.x, y: bar.y, width: bar.width, height: bar.height, rx: 2 },
      svg("title", {}, bar.text))));
}

function timeLine(line) {
  const legend = Object.entries(line.parts).map(([part, time]) =>
    el("span", {}, span("dot span-" + part), PART_NAMES[part], el("b", {}, seconds(time))));
  const cut = line.cut ? div("cut", "Only the first calls are drawn: there are too many for all of them.") : null;
  return [barChart(line.drawing), div("legend", ...legend), cut];
}

// When a turn was, how long it took, and what it used.
function turnFacts(figures, currency) {
  if (!figures) return [];
  const { at, took, waited, first, input, output, estimated, cost, model } = figures;
  const tokens = (input ?? output) === undefined ? null : `${number(input || 0)} + ${number(output || 0)} tokens`;
  const facts = [model && escapeInvisible(model), `at ${seconds(at)}`, took ? `took ${seconds(took)}` : null,
    waited ? `rate-limit wait ${seconds(waited)}` : null, first === undefined ? null : `first token ${seconds(first)}`,
    tokens && (estimated ? "about " + tokens : tokens), cost === undefined ? null : `cost ${money(cost, currency)}`];
  return facts.filter(Boolean).map((fact) => el("span", {}, fact));
}

// The first children at once, the others when they are asked for.
function firstOf(items, count, word, show) {
  const rest = items.slice(count), shown = items.slice(0, count).map(show);
  if (!rest.length) return shown;
  const more = button({ class: "chip", onclick: () => more.replaceWith(...rest.map(show)) },
    `Show ${number(rest.length)} more ${word}`);
  return [...shown, more];
}

function bytes(size) {
  if (size < 1000) return `${size} B`;
  const unit = size < 1e6 ? [1e3, "kB"] : size < 1e9 ? [1e6, "MB"] : [1e9, "GB"];
  return `${(size / unit[0]).toFixed(size / unit[0] < 9.95 ? 1 : 0)} ${unit[1]}`;
}

// A patch, its lines coloured by what they do.
function patchText(text) {
  const box = el("div", { class: "text patch", tabindex: "0", role: "region", "aria-label": "Patch" });
  for (const line of text.replace(/\n$/, "").split("\n")) {
    const kind = /^(diff |index |--- |\+\+\+ |new file|deleted file|old mode|new mode|similarity|rename )/.test(line) ? "about"
      : line.startsWith("+") ? "added" : line.startsWith("-") ? "removed" : line.startsWith("@@") ? "place" : null;
    box.append(el("span", { class: kind }, rich(line), "\n"));
  }
  return box;
}

// What is in it is made when it is opened: most are not.
function folded(summary, make, { open = false } = {}) {
  const element = el("details", { class: "folded", open }, el("summary", {}, ...summary));
  const fill = () => { if (element.open && element.children.length < 2) element.append(...make()); };
  element.addEventListener("toggle", fill);
  if (open) element.append(...make());
  return element;
}

// The path of a file: a link where a server gives it out, else its name, to be found in the run directory.
function fileName(path, href, root) {
  const shown = escapeInvisible(root && path.startsWith(root) ? path.slice(root.length) : path);
  return href ? el("a", { href, target: "_blank", rel: "noopener", class: "mono" }, shown) : span("mono", shown);
}

function fileRow(path, size, href, root) {
  return div("file", fileName(path, href, root), span("size", bytes(size)));
}
