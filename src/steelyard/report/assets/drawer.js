// One case in full: expected and actual answer, scores and their reasons, conversation, times.

const MAX_CHUNKS = 8;
const MAX_TRIALS = 20;
const LONG = 1500;
const FACTS = [
  ["time_to_first_token", "first token", seconds],
  ["time_to_first_content_token", "first content token", seconds],
  ["time_to_first_reasoning_token", "first reasoning token", seconds],
  ["time_to_last_token", "last token", seconds],
  ["time_per_output_token", "per output token", seconds],
  ["time_between_tokens_p50", "between tokens, median", seconds],
  ["time_between_tokens_p99", "between tokens, p99", seconds],
  ["time_between_tokens_max", "between tokens, longest", seconds],
  ["stalls", "gaps of 0.5 s or longer", number],
  ["time_from_planned", "since the planned start", seconds],
  ["time_waiting", "rate-limit wait", seconds],
  ["time_in_failed_tries", "failed tries", seconds],
  ["time_in_backoff", "retry backoff", seconds],
  ["time_queued", "queued in the client", seconds],
  ["elapsed", "total, with scoring", seconds],
  ["run_time", "finished (since start)", seconds],
  ["num_turns", "turns", number],
  ["time_in_model", "in the model", seconds],
  ["time_in_tools", "in tools", seconds],
  ["cpu_seconds", "CPU time", seconds],
  ["peak_memory", "peak memory", bytes],
  ["disk_used", "workspace on disk", bytes],
  ["exit_code", "exit code", String],
  ["num_tokens_input", "input tokens", number],
  ["num_tokens_input_cached", "of them cached", number],
  ["num_tokens_output", "output tokens", number],
  ["num_tokens_output_reasoning", "of them reasoning", number],
  ["tokens_estimated", "token counts", () => "estimated"],
  ["cost", "cost", (value, metrics) => money(value, metrics.currency || "")],
  ["attempts", "attempts", number],
  ["cached", "answer", () => "from the cache"],
  ["stop_reason", "stopped because", escapeInvisible],
  ["http_status", "HTTP status", String],
  ["request_id", "provider's request id", escapeInvisible],
  ["request_time", "sent", escapeInvisible],
  ["notes", "notes", (value) => escapeInvisible(value.join("; "))],
];

class Drawer {
  constructor(cases, page, root, table) {
    Object.assign(this, { cases, page, table, chunks: new Map(), row: -1, record: -1 });
    this.title = el("h2", { tabindex: "-1" });
    this.head = el("header", {});
    this.content = el("div", {});
    const attributes = { class: "drawer", id: "drawer", "aria-label": "Case", hidden: true };
    this.element = el("aside", attributes, this.head, this.content);
    root.append(this.element);
  }

  get isOpen() {
    return !this.element.hidden;
  }

  open(row, record) {
    const isNew = !this.isOpen;
    this.row = row;
    this.element.hidden = false;
    this.show(record);
    if (isNew) this.title.focus({ preventScroll: true });
  }

  close() {
    this.element.hidden = true;
    this.table.grid.focus({ preventScroll: true });
  }

  step(by) {
    this.table.move(by);
    this.table.open();
  }

  async show(record) {
    this.record = record;
    const state = STATES[this.cases.state[record]];
    const control = (label, title, sign, onclick) =>
      button({ class: "icon", "aria-label": label, title, onclick }, sign);
    this.title.textContent = escapeInvisible(this.cases.id[record]);
    this.head.replaceChildren(span("pill " + state, `${SIGNS[state]} ${state}`), this.title,
      control("Previous case", "Previous (k)", "\u2191", () => this.step(-1)),
      control("Next case", "Next (j)", "\u2193", () => this.step(1)),
      control("Close", "Close (Esc)", "\u2715", () => this.close()));
    const body = await this.body(record);
    if (this.record !== record) return;  // the reader has gone on meanwhile
    const parts = [this.trialBar(), this.errorPart(body), this.answerPart(body), this.scoresPart(body),
      this.timeLinePart(body), this.patchPart(body), this.stderrPart(body), this.talkPart(body), this.logsPart(body),
      this.filesPart(body), this.timesPart(body), this.placePart(body)];
    this.content.replaceChildren(...parts.filter(Boolean));
    this.element.scrollTop = 0;
    this.element.dataset.record = record;
  }

  // Bodies are unpacked a chunk at a time; the last few chunks are kept.
  async body(record) {
    const starts = this.page.chunks;
    let chunk = starts.length - 1;
    while (chunk > 0 && starts[chunk] > record) chunk--;
    if (!this.chunks.has(chunk)) {
      if (this.chunks.size >= MAX_CHUNKS) this.chunks.delete(this.chunks.keys().next().value);
      this.chunks.set(chunk, unpack(document.getElementById("chunk-" + chunk)));
    }
    return (await this.chunks.get(chunk))[record - starts[chunk]];
  }

  // Pieces that several parts are made of

  part(title, aside, ...children) {
    return el("section", { class: "part" }, el("h3", {}, title, aside ? el("span", {}, aside) : null), ...children);
  }

  labelled(label, boxes) {
    return div("labelled", div("who", el("b", {}, escapeInvisible(label))), ...boxes);
  }

  // A text, and where the rest of it is when the page holds only its beginning.
  text(value, { kind = "text", inside = null } = {}) {
    const [text, length] = Array.isArray(value) ? value : [value, 0];
    const box = el("div", { class: kind, tabindex: text.length > LONG ? "0" : null }, inside || rich(text));
    if (!length) return [box];
    return [box, div("cut", `The first ${number(text.length)} of ${number(length)} characters. `, ...this.whole())];
  }

  whole() {
    return ["All of it: ", el("code", {}, this.command())];
  }

  command() {
    const quoted = (text) => (/^[\w./@%+=:,-]+$/.test(text) ? text : "'" + text.replaceAll("'", "'\\''") + "'");
    const id = this.cases.id[this.record], run = this.page.about.run;
    if (/[\n\t]/.test(id) || escapeInvisible(id) !== id) return `outputs.jsonl in ${escapeInvisible(run)}`;
    return `steelyard report ${quoted(run)} --case=${quoted(id)} -f json`;
  }

  // The parts, from top to bottom

  trialBar() {
    const from = this.cases.starts[this.row], count = this.cases.end(this.row) - from;
    if (count < 2) return null;
    const wanted = this.record - from - MAX_TRIALS / 2;
    const near = Math.max(0, Math.min(wanted, count - MAX_TRIALS));
    const length = Math.min(count, MAX_TRIALS);
    const buttons = Array.from({ length }, (_, index) => this.trialButton(from + near + index));
    const rest = count > MAX_TRIALS ? span("found", `of ${number(count)}`) : null;
    const attributes = { class: "trial-bar", role: "group", "aria-label": "Trials" };
    return el("div", attributes, el("h3", {}, "Trials"), ...buttons, rest);
  }

  trialButton(record) {
    const name = String(this.cases.trial[record] + 1), state = STATES[this.cases.state[record]];
    return button({ "aria-pressed": String(record === this.record), "aria-label": `Trial ${name}: ${state}`,
      onclick: () => this.show(record) }, span(`dot ${state}-fill`), name);
  }

  errorPart(body) {
    const retried = (body.retried || []).map((one) => div("cut", "Retried after: ", begun(one)));
    if (body.error === null) return retried.length ? this.part("Retries", "", ...retried) : null;
    const trace = body.traceback ? this.text(body.traceback, { kind: "text" }) : [];
    return this.part("Error", escapeInvisible(body.error_type || ""), ...this.text(body.error, { kind: "text bad" }),
      ...trace, ...retried);
  }

  stderrPart(body) {
    if ((body.logs || []).some((log) => log.end !== undefined && log.path.endsWith(".err"))) return null;  // shown there
    return body.stderr ? this.part("stderr", "", ...this.text(body.stderr, { kind: "text" })) : null;
  }

  answerPart(body) {
    if (body.expected) return body.answer === null ? this.expectedPart(body) : this.differencePart(body);
    if (!body.answer) return null;
    const note = this.page.about.suite_note;
    const missing = note ? div("cut", escapeInvisible(`What was expected is not shown: ${note}.`)) : null;
    return this.part("Answer", "", ...this.text(body.answer), missing);
  }

  expectedPart(body) {
    return this.part("Expected", "", ...body.expected.flatMap((one) => this.text(one)), this.editedNote(body));
  }

  editedNote(body) {
    const note = "This case was edited since: what is expected now may differ from what the answer was compared with.";
    return body.edited ? div("cut", note) : null;
  }

  differencePart(body) {
    const begins = (value) => (Array.isArray(value) ? value[0] : value);
    const answer = begins(body.answer), accepted = body.expected.map(begins);
    const best = nearest(accepted, answer);
    const left = words(accepted[best]), right = words(answer), shared = compareWords(left, right);
    const label = accepted.length > 1 ? `expected, the nearest of ${accepted.length}` : "expected";
    const expected = this.text(body.expected[best], { inside: shared && marked(left, shared.left, "expected") });
    const actual = this.text(body.answer, { inside: shared && marked(right, shared.right, "wrong") });
    const texts = () => body.expected.flatMap((one) => this.text(one));
    const all = accepted.length > 1 ? el("details", {}, el("summary", {}, "All accepted answers"), ...texts()) : null;
    return this.part("Expected and actual", alikeness(accepted[best], answer, shared),
      this.labelled(label, expected), this.labelled("answer", actual), all, this.editedNote(body));
  }

  scoresPart(body) {
    return body.scores.length ? this.part("Scores", "", ...body.scores.map((score) => this.score(score))) : null;
  }

  score(score) {
    const outcome = score.passed === true ? "passed" : score.passed === false ? "failed" : null;
    const mark = (kind, word, title) => el("span", { class: kind, title }, word);
    const tags = [outcome ? mark("tag " + outcome, outcome) : null,
      score.escalated ? mark("tag accent", "escalated", "Called because an earlier scorer failed the answer") : null,
      score.overruled ? mark("tag", "overruled", "A judge passed the answer, which counts instead") : null,
      score.advisory ? mark("tag error", "advisory", "Not calibrated: it does not decide whether a case passes") : null];
    const repeated = score.samples && score.samples.length > 1 && typeof score.std_dev === "number";
    const spread = repeated ? ` \u00b1 ${score.std_dev.toFixed(2)}` : "";
    const more = (text) => div("more", begun(text));
    const samples = this.samples(score);
    return div("score", div("what", escapeInvisible(score.name), ...tags), div("figure", scoreFigure(score) + spread),
      score.extracted === undefined ? null : div("more", "Extracted: ", begun(score.extracted)),
      score.reason && !samples ? more(score.reason) : null, ...(score.errors || []).map(more),
      ...(score.error_traceback ? this.text(score.error_traceback, { kind: "text" }) : []), samples,
      score.by ? div("by", escapeInvisible(score.by)) : null);
  }

  samples(score) {
    if (!score.samples || score.samples.length < 2 || !score.reasons) return null;
    return div("samples", ...score.samples.map((value, index) => {
      const reason = score.reasons[index];
      return el("div", {}, el("b", {}, figure(value)), el("span", {}, reason ? begun(reason) : ""));
    }));
  }

  talkPart(body) {
    const turns = firstOf(body.turns, SHOWN_TURNS, "messages", (turn) => this.turn(turn));
    if (body.trajectory !== undefined) turns.push(this.labelled("expected trajectory", this.text(body.trajectory)));
    const title = body.time_line ? "Trajectory" : "Conversation";
    return turns.length ? this.part(title, plural(body.turns.length, "message"), ...turns) : null;
  }

  turn(turn) {
    const calls = (turn.calls || []).map((call) => {
      const who = div("who", "calls ", el("b", { class: "mono" }, escapeInvisible(call.name)),
        call.malformed ? span("tag error", "not valid JSON") : null);
      return div("call", who, ...this.text(call.arguments));
    });
    const text = turn.is_answer ? [div("cut", "The answer above.")] : turn.text ? this.text(turn.text) : [];
    const error = turn.figures && turn.figures.error ? this.text(turn.figures.error, { kind: "text bad" }) : [];
    const who = div("who", el("b", {}, escapeInvisible(turn.role)),
      turn.tool ? el("span", { class: "mono" }, escapeInvisible(turn.tool)) : null,
      turn.thread ? span("tag", `conversation ${number(turn.thread)}`) : null,
      ...turnFacts(turn.figures, this.page.metrics.currency || ""));
    return div("labelled", who, ...text, ...error, ...calls);
  }

  // What an agent did and left behind

  fileHref() {
    return null;  // a page without a server only names files: opened from here, one could run as a page itself
  }

  timeLinePart(body) {
    const line = body.time_line;
    if (!line) return null;
    const calls = line.calls === null ? "" : plural(line.calls, "model call");
    return this.part("Time line", calls, ...timeLine(line));
  }

  patchPart({ patch }) {
    if (!patch) return null;
    const [text, size] = Array.isArray(patch.text) ? patch.text : [patch.text, 0];
    const counts = patch.files === undefined ? ""
      : `${plural(patch.files, "file")}, ${number(patch.added)} added, ${number(patch.removed)} removed`;
    const cut = size ? div("cut", `The first ${number(text.length)} characters of ${bytes(size)}.`) : null;
    return this.part("Changes", counts, text ? patchText(text) : div("cut", "The agent changed nothing."), cut,
      div("cut", fileName(patch.path, this.fileHref(patch.path))));
  }

  logsPart({ logs = [] }) {
    if (!logs.length) return null;
    const rows = logs.map((log) => {
      if (log.end === undefined) return fileRow(log.path, log.size, this.fileHref(log.path), "logs/");
      const cut = log.end.length < log.size ? div("cut", `The end of ${bytes(log.size)}.`) : null;
      const name = log.path.endsWith(".err") ? "stderr" : "stdout";
      const make = () => [...this.text(log.end), cut, div("cut", fileName(log.path, this.fileHref(log.path)))].filter(Boolean);
      return folded([name, span("size", bytes(log.size))], make);
    });
    return this.part("Logs", "", ...rows);
  }

  filesPart({ artifacts = [], more_artifacts: more = 0 }) {
    if (!artifacts.length) return null;
    const root = artifacts[0][0].split("/").slice(0, 3).join("/") + "/";
    const row = ([path, size]) => fileRow(path, size, this.fileHref(path), root);
    const left = more ? div("cut", `\u2026 and ${number(more)} more in ${escapeInvisible(root)}`) : null;
    return this.part("Artifacts", plural(artifacts.length + more, "file"),
      ...firstOf(artifacts, SHOWN_FILES, "files", row), left);
  }

  timesPart({ facts }) {
    const rows = FACTS.filter(([name]) => facts[name] !== undefined)
      .map(([name, label, show]) => [label, show(facts[name], this.page.metrics)]);
    return this.part("Times, tokens, cost", "", this.spans(facts), pairs(rows));
  }

  // Where the time went, as one bar: waiting, backing off, queued, until the first token, until the last.
  spans(facts) {
    const first = facts.time_to_first_token || 0, last = facts.time_to_last_token || 0;
    const parts = [
      ["rate-limit wait", facts.time_waiting, "unscored-fill"],
      ["failed tries", facts.time_in_failed_tries, "failed-fill"],
      ["retry backoff", facts.time_in_backoff, "error-fill"],
      ["queued in the client", facts.time_queued, "left-fill"],
      ["until the first token", first, "first-fill"],
      ["from first to last token", last - first, "last-fill"],
    ].filter(([, time]) => time > 0);
    if (!parts.length) return null;
    const bar = shares("spans", parts);
    bar.title = parts.map(([label, time]) => `${label} ${seconds(time)}`).join(", ");
    return bar;
  }

  placePart(body) {
    const id = this.cases.id[this.record], trial = String(this.cases.trial[this.record]);
    const rows = [["id", id], ["trial", trial], ["in", `${this.page.about.run}/outputs.jsonl at byte ${body.offset}`]];
    const meta = ((this.cases.meta || [])[this.record] || "").split("\n").filter(Boolean)
      .map((one) => [one.slice(0, one.indexOf("=")), one.slice(one.indexOf("=") + 1)]);
    rows.push(...meta);
    return this.part("Location", "", pairs(rows, "mono"), div("cut", ...this.whole()));
  }
}

// A score's value in its unit, or its label.
function scoreFigure(score) {
  const isNumber = score.unit !== undefined || score.better !== undefined;
  const value = typeof score.value !== "number" ? "" : isNumber ? number(score.value) : figure(score.value);
  const words = [value, score.unit, score.label].filter(Boolean).map(escapeInvisible).join(" ");
  return words || MISSING;
}

// Two digits after the point, three where the third says something.
function figure(value) {
  if (typeof value !== "number") return MISSING;
  return Number(value.toFixed(2)) === Number(value.toFixed(3)) ? value.toFixed(2) : value.toFixed(3);
}

// A text that may have been cut.
function begun(text) {
  return rich(Array.isArray(text) ? text[0] + "\u2026" : text);
}
