// The cases of a run on the server: rows are fetched as they come into sight, bodies when their drawer opens.

const BLOCK = 100;
const MAX_BODIES = 64;
const TYPING = 200;  // milliseconds after the last letter until the words are searched for

async function ask(path, query = {}) {
  const words = new URLSearchParams(Object.entries(query).filter(([, value]) => value !== null && value !== ""));
  const reply = await fetch(`${path}?${words}`);
  if (!reply.ok) throw new Error((await reply.text()).trim() || reply.statusText);
  return reply.json();
}

// What the report's table and drawer read, filled in as it is fetched: by case, and by record.
class RemoteCases {
  constructor(scoreNames) {
    this.scoreNames = scoreNames;
    this.forget();
  }

  forget() {
    for (const name of [...COLUMNS, "offset", "starts", "ends", "bits", "marks", "lead"]) this[name] = [];
    this.scores = this.scoreNames.map(() => []);
    this.bodies = new Map();
    this.count = 0;
    this.counts = Object.fromEntries(CHIPS.map((name) => [name, 0]));
    this.slowFrom = Infinity;
  }

  take(block) {
    block.cases.forEach((outline, index) => this.takeCase(outline, index, block));
  }

  takeCase(outline, index, { leads, score_names: names }) {
    const { case: row, start, lead } = outline;
    this.starts[row] = start;
    this.ends[row] = start + outline.state.length;
    this.lead[row] = lead;
    this.marks[row] = leads.state[index];
    this.bits[row] = outline.chips.reduce((bits, name) => bits | BIT[name], 0);
    outline.state.forEach((state, trial) => {
      this.id[start + trial] = leads.id[index];
      this.state[start + trial] = state;
      this.trial[start + trial] = outline.trial[trial];
      this.offset[start + trial] = outline.offset[trial];
      this.flags[start + trial] = 0;
    });
    for (const name of COLUMNS) this[name][lead] = leads[name][index];
    this.scoreNames.forEach((name, place) => {
      const there = names.indexOf(name);
      this.scores[place][lead] = there < 0 ? null : leads.scores[there][index];
    });
  }

  end(row) {
    return this.ends[row];
  }

  value(column, row) {
    return column[this.lead[row]];
  }

  score(index, row) {
    return this.value(this.scores[index], row);
  }
}

class RemoteTable extends Table {
  constructor(run, cases, root, onOpen) {
    cases.run = run;
    super(cases, root, onOpen);
  }

  makeColumns() {
    const cases = this.cases;
    const columns = [
      { key: "state", label: "", title: "Outcome", width: "18px", cell: (row) => badge(STATES[cases.marks[row]]) },
      { key: "id", label: "Case", width: "minmax(130px, 1.2fr)", cell: (row) => this.idCell(row) },
      { key: null, label: "Marks", isHidden: true, width: "128px", from: 980, cell: (row) => this.marksCell(row) },
      { key: null, label: "Prompt", width: "minmax(120px, 1.7fr)", from: 900, cell: (row) => this.promptCell(row) },
      { key: null, label: "Answer", width: "minmax(120px, 1.5fr)", cell: (row) => this.answerCell(row) },
    ];
    cases.scoreNames.forEach((name, index) => columns.push({ ...this.scoreColumn(name, index), key: null }));
    const figures = [["first", "First token", "80px", 760, seconds], ["last", "Last token", "80px", 440, seconds],
      ["output", "Out", "52px", 960, compact], ["cost", "Cost", "84px", 1100, (value) => money(value, "")]];
    for (const [key, label, width, from, show] of figures) {
      columns.push({ key, label, width, from, numeric: true, cell: (row) => show(cases.value(cases[key], row)) });
    }
    return columns;
  }

  // The index has no ids to sort by.
  headCell(column) {
    return super.headCell(column.key === "id" ? { ...column, key: null } : column);
  }

  // Ask for the first rows of what is chosen now; the rest when it comes into sight.
  async apply() {
    clearTimeout(this.typing);
    const typed = this.search.value !== (this.searched || "");
    if (typed) await new Promise((resolve) => { this.typing = setTimeout(resolve, TYPING); });
    this.searched = this.search.value;
    this.asking = new Map();
    this.round = (this.round || 0) + 1;
    this.active = -1;
    for (const [name, chip] of this.chipButtons) chip.setAttribute("aria-pressed", String(this.chips.has(name)));
    this.markSorted();
    this.grid.setAttribute("aria-busy", "true");
    await this.fetchFrom(0, true);
    this.grid.removeAttribute("aria-busy");
  }

  async fetchFrom(start, isFirst = false) {
    if (this.asking.has(start)) return;
    this.asking.set(start, true);
    const round = this.round;
    const query = { start, count: BLOCK, search: this.search.value, filters: [...this.chips].join(","),
      sort: this.sortKey, order: this.descending ? "down" : null, version: isFirst ? null : this.version };
    try {
      const block = await ask(`/api/runs/${this.cases.run}/cases`, query);
      if (round !== this.round) return;
      if (isFirst) this.begin(block);
      else if (block.version !== this.version) { this.apply(); return; }  // the server has forgotten what was shown
      this.cases.take(block);
      block.cases.forEach((outline, index) => { this.rows[start + index] = outline.case; });
      // Long records come in smaller pieces: the rest is asked for when it is in sight.
      if (block.cases.length < BLOCK) this.asking.delete(start);
      this.paint();
    } catch (problem) {
      if (round === this.round) this.showMessage(`The cases could not be read. ${problem.message}`);
      this.asking.delete(start);
    }
  }

  begin(block) {
    if (block.version !== this.version) this.cases.forget();
    if (!this.cases.scoreNames.length && block.score_names.length) this.nameScores(block.score_names);
    this.version = block.version;
    Object.assign(this.cases, { count: block.total, counts: { ...this.cases.counts, ...block.counts } });
    this.rows = new Array(block.found);
    this.renewChips(block.counts);
    const all = plural(block.total, "case"), looked = block.searched && block.searched.map(number);
    const partly = looked ? `, in the first ${looked[0]} of ${looked[1]} records` : "";
    this.found.textContent = (block.found === block.total ? all : `${number(block.found)} of ${all}`) + partly;
    const none = block.total ? "No cases match. Press Esc to clear the filters." : "This run has no records yet.";
    this.showMessage(block.found ? "" : none);
    this.grid.setAttribute("aria-rowcount", String(block.found + 1));
    this.body.style.height = block.found * ROW_HEIGHT + "px";
    this.grid.scrollTop = 0;
    if (this.onBegin) this.onBegin(block);
  }

  // Of a run that has no figures yet, the records say what it is scored by.
  nameScores(names) {
    this.cases.scoreNames = names.slice(0, MAX_SCORES);
    this.cases.scores = this.cases.scoreNames.map(() => []);
    this.all = this.makeColumns();
    this.columns = null;
    this.fit();
  }

  showMessage(text) {
    this.empty.hidden = !text;
    this.empty.textContent = escapeInvisible(text);
  }

  // How many are slow or escalated is known only once the journal was read; slow ones can be asked for before.
  renewChips(counts) {
    const isOffered = (name) => counts[name] || ALWAYS.has(name) || (name === "slow" && counts.slow === undefined);
    this.chipButtons = new Map(CHIPS.filter(isOffered).map((name) => [name, this.chip(name)]));
    this.grid.parentElement.querySelector(".chips").replaceChildren(...this.chipButtons.values());
    for (const [name, chip] of this.chipButtons) chip.setAttribute("aria-pressed", String(this.chips.has(name)));
  }

  chip(name) {
    const count = this.cases.counts[name], isUnknown = name === "slow" && !count;
    return button({ class: "chip", "aria-pressed": "false", "data-chip": name,
      disabled: !count && !isUnknown && !this.chips.has(name), onclick: () => this.toggle(name),
      title: MEANINGS[name] || "Slower than 95% of the answers" }, name, isUnknown ? null : span("n", number(count)));
  }

  paint() {
    super.paint();
    const top = this.grid.scrollTop, shown = Math.ceil(this.grid.clientHeight / ROW_HEIGHT) + AROUND;
    const first = Math.max(0, Math.floor(top / ROW_HEIGHT) - AROUND);
    for (let place = first; place < Math.min(this.rows.length, first + shown + AROUND); place++) {
      if (this.rows[place] === undefined) { this.fetchFrom(this.blockStart(place)); return; }
    }
  }

  // The first missing place of a block.
  blockStart(place) {
    let start = place - (place % BLOCK);
    while (start < place && this.rows[start] !== undefined) start++;
    return start;
  }

  rowElement(place) {
    if (this.rows[place] !== undefined) return super.rowElement(place);
    const attributes = { class: "row cols waiting", role: "row", id: "row-" + place, "aria-rowindex": place + 2 };
    const element = el("div", attributes);
    element.style.top = place * ROW_HEIGHT + "px";
    element.style.gridTemplateColumns = this.template;
    return element;
  }

  open() {
    if (this.active >= 0 && this.rows[this.active] !== undefined) this.onOpen(this.rows[this.active]);
  }

  show(row) {
    const place = this.rows.indexOf(row);
    if (place >= 0) this.activate(place);
  }
}

class RemoteDrawer extends Drawer {
  async body(record) {
    const { cases } = this;
    if (!cases.bodies.has(record)) {
      if (cases.bodies.size >= MAX_BODIES) cases.bodies.delete(cases.bodies.keys().next().value);
      const query = { at: cases.offset[record], version: this.table.version };
      cases.bodies.set(record, ask(`/api/runs/${cases.run}/case`, query).then((found) => found.body));
    }
    try {
      return await cases.bodies.get(record);
    } catch (problem) {
      cases.bodies.delete(record);
      const nothing = { answer: null, error_type: "", scores: [], turns: [], facts: {}, offset: cases.offset[record] };
      return { ...nothing, error: `This case could not be read. ${problem.message}` };
    }
  }

  fileHref(path) {
    return `/api/runs/${this.cases.run}/file?path=${encodeURIComponent(path)}`;
  }

  // A record that need not be in the table: by the byte at which it begins, or by its number.
  async openAt(query) {
    const found = await ask(`/api/runs/${this.cases.run}/case`, { ...query, version: this.table.version });
    if (found.version !== this.table.version) await this.table.apply();
    this.cases.take(found);
    this.cases.bodies.set(found.record, Promise.resolve(found.body));
    this.table.show(found.cases[0].case);
    this.open(found.cases[0].case, found.record);
  }
}
