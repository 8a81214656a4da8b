// The cases of several runs: what became of each in every variant, which cases differ, and the table of all of them.

const VARIANT_CHIPS = ["differ", "failed", "errored", "never", "always", "flaky", "answers"];
const VARIANT_BIT = Object.fromEntries(VARIANT_CHIPS.map((name, index) => [name, 1 << index]));
const VARIANT_MEANINGS = {
  differ: "Not every variant came out alike",
  failed: "Failed in at least one variant",
  errored: "Ended in an error in at least one variant",
  never: "Passed in no variant",
  always: "Passed in every variant, in every trial",
  flaky: "Passed in some trials of a variant, failed in others",
  answers: "Not every variant gave the same answer",
};
const VARIANT_LABELS = { failed: "failed in any", errored: "errors", never: "none passed", always: "all passed", answers: "answers differ" };
const ANSWERS_DIFFER = 1;
const ABSENT = 4;  // after the four states
const MARK_ORDER = [0, 3, 2, 1];  // failed, errored, unscored, passed: what several trials are called together

class VariantCases {
  constructor(blocks, variants) {
    this.variants = variants;
    for (const name of ["id", "prompt", "metadata", "flags"]) this[name] = blocks.flatMap((block) => block[name]);
    this.states = variants.map((_, place) => blocks.flatMap((block) => block.states[place]));
    this.answers = variants.map((_, place) => blocks.flatMap((block) => block.answers[place]));
    this.count = this.id.length;
    this.starts = Uint32Array.from({ length: this.count }, (_, row) => row);
    this.lead = this.starts;
    this.marks = variants.map(() => new Uint8Array(this.count));
    this.passes = new Uint16Array(this.count);
    this.bits = new Uint16Array(this.count);
    for (let row = 0; row < this.count; row++) this.look(row);
    this.counts = Object.fromEntries(VARIANT_CHIPS.map((name) => [name, 0]));
    for (const bits of this.bits) for (const name in VARIANT_BIT) if (bits & VARIANT_BIT[name]) this.counts[name]++;
    this.meta = this.metadata.map((metadata) => Object.entries(metadata).map(([name, value]) => `${name}=${value}`).join("\n"));
    this.choices = choicesOf(null, this.meta);
    this.outcomes = variants.map(() => null);  // the state that is asked for in a variant
    this.words = null;
  }

  look(row) {
    const shares = new Set();
    let bits = this.flags[row] & ANSWERS_DIFFER ? VARIANT_BIT.answers : 0, there = 0, any = false;
    this.states.forEach((column, place) => {
      const states = column[row];
      this.marks[place][row] = markOf(states);
      if (!states) return;
      there++;
      const counted = [0, 0, 0, 0];
      for (const state of states) counted[Number(state)]++;
      const [failed, passed, , errored] = counted, decided = failed + passed + errored;
      if (decided) shares.add(passed / decided);
      if (failed) bits |= VARIANT_BIT.failed;
      if (errored) bits |= VARIANT_BIT.errored;
      if (failed && passed) bits |= VARIANT_BIT.flaky;
      any ||= passed > 0;
      if (STATES[this.marks[place][row]] === "passed") this.passes[row]++;
    });
    if (shares.size > 1) bits |= VARIANT_BIT.differ;
    if (shares.size && !any) bits |= VARIANT_BIT.never;
    if (there && this.passes[row] === there) bits |= VARIANT_BIT.always;
    this.bits[row] = bits;
  }

  select(words, chips) {
    const bits = chips.reduce((found, name) => found | VARIANT_BIT[name], 0);
    const terms = termsOf(words);
    if (terms.length) this.readWords();
    const found = [];
    for (let row = 0; row < this.count; row++) {
      if (bits && !(this.bits[row] & bits)) continue;
      if (this.isUnwanted(row)) continue;
      if (terms.length && !terms.every((term) => this.words[row].includes(term) || this.hasMeta(row, term))) continue;
      found.push(row);
    }
    return found;
  }

  readWords() {
    this.words ||= this.id.map((_, row) => this.wordsOf(row));
  }

  isUnwanted(row) {
    return this.outcomes.some((state, place) => state !== null && this.marks[place][row] !== state);
  }

  hasMeta(row, term) {
    return term.includes("=") && `\n${this.meta[row]}\n`.toLowerCase().includes(`\n${term}\n`);
  }

  wordsOf(row) {
    return [this.id[row], this.prompt[row], ...this.answers.map((column) => column[row])].join("\n").toLowerCase();
  }

  rowOf(record) {
    return record;
  }

  // Rows without a value in a variant go last either way.
  sort(rows, key, descending) {
    if (key === null) return rows;
    const sign = descending ? -1 : 1, place = key.startsWith("variant:") ? Number(key.slice(8)) : -1;
    const value = key === "id" ? (row) => this.id[row] : key === "passes" ? (row) => this.passes[row]
      : (row) => [0, 3, 2, 1, descending ? -1 : 9][this.marks[place][row]];
    return rows.sort((a, b) => {
      const one = value(a), other = value(b);
      return one === other ? a - b : one < other ? -sign : sign;
    });
  }
}

function markOf(states) {
  if (!states) return ABSENT;
  return MARK_ORDER.find((state) => states.includes(state));
}

class VariantTable extends Table {
  get chipNames() {
    return VARIANT_CHIPS;
  }

  get rowHeight() {
    return 58;
  }

  get hints() {
    return [["/", "search"], ["j k", "move"], ["Enter", "open"], ["\u2190 \u2192", "from case to case"], ["Esc", "close"],
      ["d f e a", "differ, failed, errored, all"]];
  }

  makeColumns() {
    const { cases } = this;
    return [
      { key: "id", label: "Case", width: "minmax(150px, 1.1fr)", cell: (row) => this.caseCell(row) },
      { key: "passes", label: "Passed", title: "How many variants passed, in every trial", width: "58px", from: 700, numeric: true,
        cell: (row) => `${cases.passes[row]}/${cases.variants.length}` },
      ...cases.variants.map((variant, place) => ({ key: "variant:" + place, label: escapeInvisible(variant.name),
        title: escapeInvisible(variant.name), width: "minmax(150px, 1fr)", cell: (row) => this.variantCell(row, place) })),
    ];
  }

  build(root) {
    super.build(root);
    this.search.placeholder = "Search ids, questions, metadata, answers";
    // Before the first letter is typed, where the browser has the time.
    (window.requestIdleCallback || setTimeout)(() => this.cases.readWords());
    const tools = this.grid.parentElement.querySelector(".tools");
    this.outcomeSelects = this.cases.variants.map((variant, place) => this.outcomeSelect(variant, place));
    const filters = div("facets", ...this.outcomeSelects);
    tools.append(el("details", { class: "by-variant" }, el("summary", {}, "By variant"), filters));
  }

  outcomeSelect({ name }, place) {
    const states = ["failed", "passed", "unscored", "error"].map((state, code) => el("option", { value: String(code) }, state));
    const choose = (event) => {
      this.cases.outcomes[place] = event.target.value ? Number(event.target.value) : null;
      this.apply();
    };
    return labelledSelect(escapeInvisible(name), choose, el("option", { value: "" }, "any"), ...states,
      el("option", { value: String(ABSENT) }, "absent"));
  }

  chip(name) {
    const count = this.cases.counts[name];
    return button({ class: "chip", "aria-pressed": "false", "data-chip": name, title: VARIANT_MEANINGS[name],
      disabled: count === 0, onclick: () => this.toggle(name) }, VARIANT_LABELS[name] || name, span("n", number(count)));
  }

  showAll() {
    this.cases.outcomes.fill(null);
    for (const select of this.outcomeSelects) select.value = "";
    super.showAll();
  }

  fit() {
    super.fit();
    const least = this.columns.reduce((sum, { width }) => sum + Number(width.match(/\d+/)[0]) + 16, 32);
    this.body.style.minWidth = this.head.style.minWidth = least + "px";
  }

  // Cells

  caseCell(row) {
    const id = escapeInvisible(this.cases.id[row]);
    return div("case-cell", el("b", { title: id }, id), span("prompt", escapeInvisible(this.cases.prompt[row])));
  }

  variantCell(row, place) {
    const { cases } = this, mark = cases.marks[place][row], states = cases.states[place][row];
    if (mark === ABSENT) return span("absent", "no record");
    const dots = states.length > 1 ? trialDots(states) : null;
    const text = span(mark === 3 ? "answer error-text" : "answer", escapeInvisible(cases.answers[place][row]));
    return div("variant-cell", div("outcome-of", badge(STATES[mark]), dots), text);
  }
}

function trialDots(states) {
  if (states.length <= MAX_DOTS) return span("trials", ...[...states].map((state) => el("i", { class: STATES[state] + "-fill" })));
  const passed = [...states].filter((state) => STATES[state] === "passed").length;
  return span("tag", `${passed} / ${states.length}`);
}

function labelledSelect(label, onchange, ...options) {
  return el("label", { class: "choice" }, span("", label), el("select", { onchange, "aria-label": label }, ...options));
}
