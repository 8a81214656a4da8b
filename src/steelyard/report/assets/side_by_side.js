// One case by every variant, next to each other: answers, scores and reasons, and the words in which two of them differ.

const EXPECTED = "expected";

function sideBySide() {
  document.addEventListener("keydown", stepWithArrows);
  KEYS.d = () => showOnly("differ");
  return { Cases: VariantCases, Table: VariantTable, Drawer: SideBySide, names: page.variants };
}

// Left and right go from case to case, except where they are needed to scroll or to choose.
function stepWithArrows(event) {
  const by = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
  if (!by || event.ctrlKey || event.metaKey || event.altKey || !drawer || !drawer.isOpen || views.cases.hidden) return;
  const place = event.target, scrolls = place.closest(".text, .variants-scroll");
  if (isField(place) || place.closest("[role=tab]") || (scrolls && scrolls.scrollWidth > scrolls.clientWidth)) return;
  event.preventDefault();
  drawer.step(by);
}

class SideBySide extends Drawer {
  constructor(cases, shown, root, list) {
    super(cases, shown, root, list);
    this.element.classList.add("side-by-side");
    this.chosen = ["", ""];  // which two answers are compared word by word
    this.trial = cases.variants.map(() => 0);
  }

  async show(row) {
    this.record = row;
    const { cases, table: list } = this;
    const control = (label, title, sign, onclick) => button({ class: "icon", "aria-label": label, title, onclick }, sign);
    this.title.textContent = escapeInvisible(cases.id[row]);
    const place = span("found", `${number(list.active + 1)} of ${number(list.rows.length)}`);
    this.head.replaceChildren(this.title, place,
      control("Previous case", "Previous (\u2190 or k)", "\u2190", () => this.step(-1)),
      control("Next case", "Next (\u2192 or j)", "\u2192", () => this.step(1)),
      control("Close", "Close (Esc)", "\u2715", () => this.close()));
    const body = await this.body(row);
    if (this.record !== row) return;  // the reader has gone on meanwhile
    this.shown = body;
    this.trial = body.variants.map((trials, place) => leadOf(cases.states[place][row], trials.length));
    this.difference = div("difference");
    this.content.replaceChildren(this.askedPart(body), this.comparePart(), this.columns(body));
    this.compare();
    this.element.scrollTop = 0;
    this.element.dataset.record = row;
    announce(`${escapeInvisible(cases.id[row])}: ${cases.passes[row]} of ${cases.variants.length} variants passed`);
  }

  command() {
    const { about } = this.page;
    about.run = this.current.run;
    return super.command();
  }

  // What was asked and expected

  askedPart(body) {
    this.current = this.cases.variants[0];
    const asked = this.labelled("question", this.text(body.question || ""));
    const metadata = Object.entries(body.metadata);
    const note = this.page.about.suite_note;
    const expected = body.expected
      ? this.labelled(body.expected.length > 1 ? "expected, any of" : "expected", body.expected.flatMap((one) => this.text(one)))
      : note ? div("cut", escapeInvisible(`What was expected is not shown: ${note}.`)) : null;
    const trajectory = body.trajectory === undefined ? null
      : this.labelled("expected trajectory", this.text(body.trajectory));
    return el("section", { class: "part asked" }, el("h3", { class: "visually-hidden" }, "Question and expected answer"),
      div("asked-grid", asked, div("", expected, trajectory, this.editedNote(body))),
      metadata.length ? div("tags", ...metadata.map(([name, value]) => span("tag", escapeInvisible(`${name}: ${value}`)))) : null);
  }

  // The words of two answers

  comparePart() {
    const options = (place) => [["", "nothing"], [EXPECTED, "expected"],
      ...this.cases.variants.map(({ name }, index) => [String(index), name])]
      .map(([value, label]) => el("option", { value, selected: value === this.chosen[place] }, escapeInvisible(label)));
    const select = (place, label) => labelledSelect(label,
      (event) => { this.chosen[place] = event.target.value; this.compare(); }, ...options(place));
    return el("section", { class: "part compare-words" }, el("h3", {}, "Word by word"),
      div("facets", select(0, "compare"), select(1, "with")), this.difference);
  }

  textOf(choice) {
    if (choice === "") return null;
    if (choice === EXPECTED) return this.shown.expected ? this.shown.expected[0] : null;
    const one = this.shown.variants[Number(choice)][this.trial[Number(choice)]];
    return one ? one.answer || (one.patch ? one.patch.text : null) : null;  // of an agent, what it changed
  }

  compare() {
    const texts = this.chosen.map((choice) => this.textOf(choice));
    if (this.chosen.includes("")) { this.difference.replaceChildren(); return; }
    if (texts.includes(null)) { this.difference.replaceChildren(div("cut", "One of them has no answer to this case.")); return; }
    const [one, other] = texts.map((text) => (Array.isArray(text) ? text[0] : text));
    const left = words(one), right = words(other), shared = compareWords(left, right);
    const nameOf = (choice) => (choice === EXPECTED ? EXPECTED : this.cases.variants[Number(choice)].name);
    const side = (place, list, kept, kind) => {
      this.current = this.cases.variants[Number(this.chosen[place])] || this.cases.variants[0];
      return this.labelled(nameOf(this.chosen[place]), this.text(texts[place], { inside: shared && marked(list, kept, kind) }));
    };
    const verdict = alikeness(one, other, shared);
    this.difference.replaceChildren(...(verdict ? [div("cut", `The two are ${verdict}.`)] : []),
      div("asked-grid", side(0, left, shared && shared.left, "wrong"), side(1, right, shared && shared.right, EXPECTED)));
  }

  // The variants next to each other

  columns(body) {
    this.boxes = this.cases.variants.map(() => el("section", { class: "variant" }));
    this.boxes.forEach((box, place) => this.fill(box, body.variants[place], place));
    return el("div", { class: "variants-scroll", tabindex: "0", role: "region", "aria-label": "Answers of the variants" },
      div("variants", ...this.boxes));
  }

  fill(box, trials, place) {
    const variant = this.cases.variants[place], body = trials[this.trial[place]];
    this.current = variant;
    const name = el("h3", {}, escapeInvisible(variant.name));
    if (!body) { box.replaceChildren(name, div("cut", "No record of this case.")); return; }
    const state = STATES[this.cases.states[place][this.record][this.trial[place]]];
    const answer = body.answer ? this.labelled("answer", this.text(body.answer)) : null;
    const parts = [this.errorPart(body), this.scoresPart(body), this.timeLinePart(body), this.patchPart(body),
      this.stderrPart(body), this.talk(body), this.logsPart(body), this.filesPart(body), this.times(body)];
    box.replaceChildren(div("variant-head", name, span("pill " + state, `${SIGNS[state]} ${state}`)),
      ...[this.trialsOf(trials, place), answer, ...parts].filter(Boolean));
  }

  talk(body) {
    const part = this.talkPart({ ...body, trajectory: undefined });
    if (!part || body.turns.length < 3) return null;
    const title = body.time_line ? "Trajectory" : "Conversation";
    return el("details", { class: "part" }, el("summary", {}, `${title}, ${plural(body.turns.length, "message")}`),
      ...[...part.children].slice(1));
  }

  // The figures that variants are compared by; all of them when it is opened.
  times(body) {
    const { facts } = body, tokens = facts.num_tokens_output;
    const few = [facts.time_to_last_token === undefined ? null : seconds(facts.time_to_last_token),
      tokens === undefined ? null : plural(tokens, "token"),
      facts.cost === undefined ? null : money(facts.cost, this.page.metrics.currency), facts.cached ? "from the cache" : null];
    return el("details", { class: "part" }, el("summary", {}, few.filter(Boolean).join(" \u00b7 ") || "Times, tokens, cost"),
      ...[...this.timesPart(body).children].slice(1), div("cut", ...this.whole()));
  }

  trialsOf(trials, place) {
    if (trials.length < 2) return null;
    const states = this.cases.states[place][this.record];
    const choose = (index) => {
      this.trial[place] = index;
      this.fill(this.boxes[place], trials, place);
      this.compare();
      this.boxes[place].querySelectorAll(".trial-bar button")[index].focus();
    };
    const buttons = trials.slice(0, MAX_TRIALS).map((_, index) => button({ "aria-pressed": String(index === this.trial[place]),
      "aria-label": `Trial ${index + 1}: ${STATES[states[index]]}`, onclick: () => choose(index) },
    span(`dot ${STATES[states[index]]}-fill`), String(index + 1)));
    const rest = trials.length > MAX_TRIALS ? span("found", `of ${number(trials.length)}`) : null;
    return el("div", { class: "trial-bar", role: "group", "aria-label": "Trials" }, ...buttons, rest);
  }
}

// The trial that is shown first: the first that is as the case is marked.
function leadOf(states, count) {
  return count ? Math.max(0, states.indexOf(String(markOf(states)))) : 0;
}
