// Labelling: one answer at a time, a key each. What judges said of it is not on this page.

const here = JSON.parse(document.getElementById("about").textContent);
const at = (id) => document.getElementById(id);
const address = "/api/runs/" + here.id;
let state = null, busy = false;
const open = { expected: false, conversation: false };

async function ask(path, body) {
  const options = body && { method: "POST", body: JSON.stringify(body),
    headers: { "content-type": "application/json", "x-steelyard-csrf": here.csrf } };
  const reply = await fetch(path, options || {});
  if (!reply.ok) throw new Error((await reply.text()).trim() || reply.statusText);
  return reply.json();
}

// Nothing is taken as saved before the server has said so.
async function change(path, body) {
  if (busy) return;
  busy = true;
  try {
    state = await ask(path, body);
    at("problem").hidden = true;
    at("lost").hidden = true;
    render();
  } catch (problem) {
    if (problem instanceof TypeError) at("lost").hidden = false;
    else { at("problem").hidden = false; at("problem").textContent = escapeInvisible(problem.message); }
  } finally {
    busy = false;
  }
}

const load = () => change(`${address}/label?labeller=${encodeURIComponent(at("labeller").value)}`);

function act(action, grade) {
  if (!state || (!state.item && action !== "undo")) return;
  const { id, trial } = state.item || { id: "", trial: 0 };
  const comment = at("comment").value;
  change(`${address}/label`, { labeller: state.labeller, action, id, trial, grade: grade === undefined ? -1 : grade, comment });
}

function render() {
  const { progress, item } = state;
  const done = progress.labelled + progress.skipped;
  const counts = Object.entries(progress.counts).reverse().filter(([, count]) => count)
    .map(([grade, count]) => `${number(count)} ${escapeInvisible(grade)}`);
  const facts = [`${number(done)} of ${number(progress.total)} done`, ...counts,
    ...(progress.skipped ? [`${number(progress.skipped)} skipped`] : [])];
  at("progress").replaceChildren(...facts.map((fact) => el("span", {}, fact)));
  at("meter").firstElementChild.style.width = `${(100 * done) / progress.total}%`;
  at("labeller").value = state.labeller;
  at("comment").value = "";
  open.expected = open.conversation = false;
  at("ending").hidden = true;
  at("tools").hidden = !item;
  renderItem();
  renderButtons();
  window.scrollTo(0, 0);
  at("heading").focus({ preventScroll: true });
  at("announcement").textContent = item ? `Answer ${done + 1} of ${progress.total}` : "All answers are labelled";
  document.documentElement.dataset.ready = item ? `${item.id}/${item.trial}` : "done";
  if (!item) showAgreement();
}

function block(title, text, note) {
  return el("section", { class: "card" }, el("h2", {}, title), el("pre", { class: "text" }, text ? rich(text) : span("hint", note)));
}

function renderItem() {
  const { item } = state;
  at("item").removeAttribute("aria-busy");
  if (!item) { at("item").replaceChildren(); return; }
  const asked = open.conversation && item.conversation ? block("Conversation", item.conversation, "") : block("Question", item.question, "no question was recorded");
  const parts = [asked, block("Answer", item.answer, "the answer is empty")];
  if (open.expected) parts.push(block("Expected", item.expected, "nothing is expected"));
  at("item").replaceChildren(...parts);
}

function keyed(key, text, attributes) {
  return button({ class: "chip", "aria-keyshortcuts": key, ...attributes }, text, " ", el("kbd", { "aria-hidden": "true" }, key));
}

function renderButtons() {
  const { item, grades, keys, progress } = state;
  if (!item) return;
  const names = Object.entries(keys).sort(([, one], [, other]) => other - one);
  const plain = grades.join() !== "fail,pass";
  if (plain) names.reverse();
  at("grades").replaceChildren(...names.map(([key, grade]) => keyed(key, escapeInvisible(grades[grade]),
    { class: "chip grade" + (plain ? "" : grade ? " passed" : " failed"), onclick: () => act("label", grade) })));
  const others = [keyed("e", open.expected ? "Hide expected" : "Show expected", { onclick: () => toggle("expected"), "aria-pressed": String(open.expected) })];
  if (item.conversation) {
    others.push(keyed("t", open.conversation ? "Show question" : "Show conversation", { onclick: () => toggle("conversation"), "aria-pressed": String(open.conversation) }));
  }
  others.push(keyed("s", "Skip", { onclick: () => act("skip") }), keyed("u", "Undo", { onclick: () => act("undo"), disabled: !progress.can_undo }),
    keyed("q", "Agreement so far", { onclick: showAgreement }));
  at("others").replaceChildren(...others);
}

function toggle(name) {
  if (name === "conversation" && !state.item.conversation) return;
  open[name] = !open[name];
  renderItem();
  renderButtons();
}

// Over all labels together: it says nothing of an answer that is still to be labelled.
async function showAgreement() {
  const lines = await ask(`${address}/agreement?labeller=${encodeURIComponent(state.labeller)}`).catch((problem) => [problem.message]);
  const left = state.progress.total - state.progress.labelled - state.progress.skipped;
  const heading = left ? "Agreement so far" : "All answers are labelled";
  at("ending").replaceChildren(el("h2", {}, heading), el("ul", {}, ...lines.map((line) => el("li", { class: line.startsWith(" ") ? "sub" : "" }, escapeInvisible(line.trim())))),
    ...(left ? [] : [keyed("u", "Undo the last", { onclick: () => act("undo") })]));
  at("ending").hidden = false;
  at("ending").scrollIntoView({ block: "nearest" });
}

document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && ["TEXTAREA", "INPUT"].includes(event.target.tagName)) { at("heading").focus(); return; }
  if (event.ctrlKey || event.metaKey || event.altKey || event.repeat || !state) return;
  if (["TEXTAREA", "INPUT", "SELECT"].includes(event.target.tagName)) return;
  const actions = { c: () => at("comment").focus(), s: () => act("skip"), u: () => act("undo"), q: showAgreement,
    e: () => toggle("expected"), t: () => toggle("conversation") };
  const action = event.key in state.keys ? () => act("label", state.keys[event.key]) : actions[event.key];
  if (!action || (!state.item && !["u", "q"].includes(event.key))) return;
  event.preventDefault();
  action();
});

at("tools").addEventListener("submit", (event) => event.preventDefault());
at("labeller").value = here.labeller;
at("labeller").addEventListener("change", load);
at("comment").maxLength = here.max_comment;
load();
