// The table of cases. Only the rows in sight are in the document, so that a hundred thousand scroll like a hundred.

const ROW_HEIGHT = 38;
const AROUND = 4;  // rows drawn above and below those in sight
const MAX_SCORES = 3;
const MAX_DOTS = 12;
const ALWAYS = new Set(["failed", "errored", "passed"]);
const HINTS = [["/", "search"], ["j k", "move"], ["Enter", "open"], ["Esc", "close"], ["f e a", "failed, errored, all"],
  ["t", "light or dark"]];
const MEANINGS = {
  failed: "At least one trial failed",
  errored: "At least one trial ended in an error",
  flaky: "Passed in some trials, failed in others",
  escalated: "Sent to a judge because an earlier scorer failed it",
  unscored: "At least one answer has no verdict",
  passed: "Every trial passed",
};

class Table {
  constructor(cases, root, onOpen) {
    Object.assign(this, { cases, onOpen, rows: [], active: -1, sortKey: null, descending: false, chips: new Set() });
    this.all = this.makeColumns();
    this.build(root);
    this.fit();
    this.apply();
  }

  get chipNames() {
    return CHIPS;
  }

  get hints() {
    return HINTS;
  }

  get rowHeight() {
    return ROW_HEIGHT;
  }

  // A column has a key if it can be sorted by, and `from` if it is only shown in a table at least that wide.
  makeColumns() {
    const cases = this.cases;
    const columns = [
      { key: "state", label: "", title: "Outcome", width: "18px", cell: (row) => badge(STATES[cases.marks[row]]) },
      { key: "id", label: "Case", width: "minmax(130px, 1.2fr)", cell: (row) => this.idCell(row) },
    ];
    if (cases.counts.flaky || cases.counts.escalated || cases.flags.some((flags) => flags & FLAG.cached)) {
      columns.push({ key: null, label: "Marks", isHidden: true, width: "128px", from: 820, cell: (row) => this.marksCell(row) });
    }
    columns.push(
      { key: null, label: "Prompt", width: "minmax(120px, 1.7fr)", from: 900, cell: (row) => this.promptCell(row) },
      { key: null, label: "Answer", width: "minmax(120px, 1.5fr)", cell: (row) => this.answerCell(row) });
    cases.scoreNames.slice(0, MAX_SCORES).forEach((name, index) => columns.push(this.scoreColumn(name, index)));
    const figures = [["first", "First token", "92px", 760, seconds], ["last", "Last token", "92px", 440, seconds],
      ["input", "In", "52px", 960, compact], ["output", "Out", "52px", 960, compact],
      ["cost", "Cost", "84px", 960, (value) => money(value, "")]];
    for (const [key, label, width, from, show] of figures) {
      if (!cases[key].some((value) => value !== null)) continue;
      columns.push({ key, label, width, from, numeric: true, cell: (row) => show(cases.value(cases[key], row)) });
    }
    return columns;
  }

  scoreColumn(name, index) {
    const cell = (row) => {
      const value = this.cases.score(index, row);
      if (typeof value === "string") return escapeInvisible(value);
      return value === null ? MISSING : Math.abs(value) > 1 ? compact(value) : value.toFixed(2);
    };
    const label = escapeInvisible(name), from = index ? 800 : 520;
    return { key: "score:" + index, label, title: label, width: "minmax(48px, 76px)", from, numeric: true, cell };
  }

  build(root) {
    this.search = el("input", { type: "search", id: "search", placeholder: "Search ids, questions, answers, errors",
      "aria-label": "Search cases", autocomplete: "off", spellcheck: "false", oninput: () => this.apply() });
    const offered = this.chipNames.filter((name) => this.cases.counts[name] || ALWAYS.has(name));
    this.chipButtons = new Map(offered.map((name) => [name, this.chip(name)]));
    this.found = el("div", { class: "found", id: "found", "aria-live": "polite" });
    this.head = el("div", { class: "grid-head cols", role: "row", "aria-rowindex": "1" });
    this.body = el("div", { class: "body", role: "rowgroup" });
    this.empty = el("p", { class: "empty", hidden: true });
    this.grid = el("div", { class: "grid", role: "grid", tabindex: "0", id: "grid", "aria-label": "Cases",
      onscroll: () => this.paintSoon() }, this.head, this.body, this.empty);
    const chips = el("div", { class: "chips", role: "group", "aria-label": "Filters" }, ...this.chipButtons.values());
    const hints = el("div", { class: "hints", "aria-hidden": "true" },
      ...this.hints.map(([name, what]) => el("span", {}, el("kbd", {}, name), " ", what)));
    this.choices = [...(this.cases.choices || [])].map(([key, values]) => this.choice(key, values));
    const tools = div("tools", div("search", this.search, el("kbd", { "aria-hidden": "true" }, "/")), chips,
      this.choices.length ? div("chips", ...this.choices) : null);
    root.append(div("list", tools, this.grid, div("foot", this.found, hints)));
    new ResizeObserver(() => { this.fit(); this.paintSoon(); }).observe(this.grid);
  }

  chip(name) {
    const limit = this.cases.slowFrom;
    const slow = Number.isFinite(limit) ? `Slower than 95% of the answers: more than ${seconds(limit)}` : "";
    const count = this.cases.counts[name];
    return button({ class: "chip", "aria-pressed": "false", "data-chip": name, title: MEANINGS[name] || slow,
      disabled: count === 0, onclick: () => this.toggle(name) }, name, span("n", number(count)));
  }

  // A choice among the values of a metadata key: it writes `key=value` into the search.
  choice(key, values) {
    const option = (value, label) => el("option", { value }, label);
    const label = escapeInvisible(key);
    return el("select", { class: "chip", "aria-label": label, "data-key": key,
      onchange: (event) => this.choose(key, event.target.value) },
    option("", `${label}: any`), ...values.map((value) => option(value, `${label}: ${escapeInvisible(value)}`)));
  }

  choose(key, value) {
    const kept = (this.search.value.match(/[^\s"=]+="[^"]*"|\S+/g) || []).filter((term) => !term.startsWith(key + "="));
    const quoted = /\s/.test(value) ? `"${value}"` : value;
    this.search.value = [...kept, ...(value ? [`${key}=${quoted}`] : [])].join(" ");
    this.apply();
  }

  markChoices() {
    const terms = termsOf(this.search.value);
    for (const select of this.choices || []) {
      const chosen = [...select.options].find(({ value }) =>
        value && terms.includes(`${select.dataset.key}=${value}`.toLowerCase()));
      select.value = chosen ? chosen.value : "";
      select.setAttribute("data-chosen", String(Boolean(chosen)));
    }
  }

  // The columns that there is room for: an open drawer, or a narrow window, leaves out the lesser ones.
  fit() {
    const width = this.grid.clientWidth || 1200;
    const columns = this.all.filter((column) => !column.from || width >= column.from);
    if (this.columns && columns.length === this.columns.length) return;
    this.columns = columns;
    this.template = columns.map((column) => column.width).join(" ");
    this.head.replaceChildren(...columns.map((column) => this.headCell(column)));
    this.head.style.gridTemplateColumns = this.template;
    this.markSorted();
  }

  headCell({ key, label, title, numeric, isHidden }) {
    const attributes = { role: "columnheader", class: numeric ? "num" : null, "data-key": key, title };
    if (!key) return el("div", attributes, span(isHidden ? "visually-hidden" : "unsorted", label));
    const sort = { "aria-label": "Sort by " + (title || label), onclick: () => this.sortBy(key, Boolean(numeric)) };
    return el("div", attributes, button(sort, label || "\u2022"));
  }

  markSorted() {
    for (const cell of this.head.children) {
      if (!cell.dataset.key) continue;
      const order = this.descending ? "descending" : "ascending";
      cell.setAttribute("aria-sort", cell.dataset.key === this.sortKey ? order : "none");
    }
  }

  // Cells

  idCell(row) {
    const cases = this.cases, from = cases.starts[row], count = cases.end(row) - from;
    const name = el("span", { title: escapeInvisible(cases.id[from]) }, escapeInvisible(cases.id[from]));
    if (count === 1) return [name];
    const states = cases.state.slice(from, from + count).map((state) => STATES[state]);
    const passed = states.filter((state) => state === "passed").length;
    if (count > MAX_DOTS) return [name, span("tag", `${passed} / ${count}`)];
    return [name, span("trials", ...states.map((state) => el("i", { class: state + "-fill" })))];
  }

  marksCell(row) {
    const { bits, flags, lead } = this.cases;
    return span("marks", bits[row] & BIT.flaky ? span("tag error", "flaky") : null,
      bits[row] & BIT.escalated ? span("tag accent", "escalated") : null,
      flags[lead[row]] & FLAG.cached ? span("tag", "cached") : null);
  }

  promptCell(row) {
    return span("prompt", escapeInvisible(this.cases.prompt[this.cases.lead[row]]));
  }

  answerCell(row) {
    const record = this.cases.lead[row];
    return span(this.cases.state[record] === 3 ? "error-text" : "answer", escapeInvisible(this.cases.answer[record]));
  }

  // What is shown, and in which order

  toggle(name, alone = false) {
    if (alone) this.chips = new Set([name]);
    else if (!this.chips.delete(name)) this.chips.add(name);
    this.apply();
  }

  showAll() {
    this.chips.clear();
    this.search.value = "";
    this.apply();
  }

  // Numbers begin with the largest; the third click brings back the suite's order.
  sortBy(key, numeric) {
    if (this.sortKey !== key) [this.sortKey, this.descending] = [key, numeric];
    else if (this.descending === numeric) this.descending = !this.descending;
    else this.sortKey = null;
    this.apply();
  }

  apply() {
    const { cases } = this, before = this.active >= 0 ? this.rows[this.active] : -1;
    this.rows = cases.sort(cases.select(this.search.value, [...this.chips]), this.sortKey, this.descending);
    this.active = before >= 0 ? this.rows.indexOf(before) : -1;
    for (const [name, chip] of this.chipButtons) chip.setAttribute("aria-pressed", String(this.chips.has(name)));
    this.markSorted();
    const all = plural(cases.count, "case");
    this.found.textContent = this.rows.length === cases.count ? all : `${number(this.rows.length)} of ${all}`;
    this.empty.hidden = this.rows.length > 0;
    const none = cases.count ? "No cases match. Press Esc to clear the filters." : "This run has no records yet.";
    this.empty.textContent = none;
    this.grid.setAttribute("aria-rowcount", String(this.rows.length + 1));
    this.body.style.height = this.rows.length * this.rowHeight + "px";
    if (this.active < 0) this.grid.scrollTop = 0;
    this.paint();
  }

  // Drawing

  paintSoon() {
    this.waiting ||= requestAnimationFrame(() => { this.waiting = 0; this.paint(); });
  }

  paint() {
    this.markChoices();
    const top = this.grid.scrollTop, bottom = top + this.grid.clientHeight;
    const first = Math.max(0, Math.floor(top / this.rowHeight) - AROUND);
    const last = Math.min(this.rows.length, Math.ceil(bottom / this.rowHeight) + AROUND);
    const shown = [];
    for (let place = first; place < last; place++) shown.push(this.rowElement(place));
    this.body.replaceChildren(...shown);
    const inSight = this.active >= first && this.active < last;
    setAll(this.grid, { "aria-activedescendant": inSight ? "row-" + this.active : "" });
  }

  rowElement(place) {
    const row = this.rows[place], isActive = place === this.active;
    const cells = this.columns.map((column) => {
      const kind = column.numeric ? "num" : column.key === "id" ? "id" : null;
      return el("div", { role: "gridcell", class: kind }, ...[column.cell(row)].flat());
    });
    const element = el("div", { class: isActive ? "row cols active" : "row cols", role: "row", id: "row-" + place,
      "aria-rowindex": place + 2, "aria-selected": String(isActive), "data-id": this.cases.id[this.cases.starts[row]],
      onclick: () => { this.activate(place); this.open(); } }, ...cells);
    element.style.top = place * this.rowHeight + "px";
    element.style.gridTemplateColumns = this.template;
    return element;
  }

  // The active row

  activate(place) {
    if (!this.rows.length) return;
    this.active = Math.max(0, Math.min(place, this.rows.length - 1));
    const top = this.active * this.rowHeight, view = this.grid.clientHeight - this.head.offsetHeight;
    if (top < this.grid.scrollTop) this.grid.scrollTop = top;
    else if (top + this.rowHeight > this.grid.scrollTop + view) this.grid.scrollTop = top + this.rowHeight - view;
    this.paint();
  }

  move(by) {
    this.activate(this.active < 0 ? 0 : this.active + by);
  }

  open() {
    if (this.active >= 0) this.onOpen(this.rows[this.active]);
  }

  show(row) {
    if (!this.rows.includes(row)) this.showAll();
    this.activate(this.rows.indexOf(row));
  }

  get perScreen() {
    return Math.max(1, Math.floor(this.grid.clientHeight / this.rowHeight) - 2);
  }
}
