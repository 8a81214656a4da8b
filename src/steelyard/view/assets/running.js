// Cases that agents are working on: a list of them, and one of them with its logs as they come.

const NEAR_END = 24;  // pixels from the end of a log at which a reader is taken to follow it

function runningCard(found, open) {
  if (!found.length) return null;
  const rows = found.map((one) => {
    const show = () => open(one);
    const name = one.trial ? `${one.id} (trial ${one.trial + 1})` : one.id;
    return el("tr", { tabindex: "0", onclick: show, onkeydown: (event) => { if (event.key === "Enter") show(); } },
      el("td", {}, escapeInvisible(name), one.attempt > 1 ? span("tag", `attempt ${one.attempt}`) : null),
      el("td", { class: "answer mono" }, escapeInvisible(one.line)),
      el("td", { class: "figure-cell" }, roughly(one.seconds)));
  });
  const names = [["Case", ""], ["Last line", ""], ["For", "figure-cell"]];
  const head = el("tr", {}, ...names.map(([name, kind]) => el("th", { scope: "col", class: kind }, name)));
  const table = el("table", { class: "newest-cases running-cases" }, el("thead", {}, head), el("tbody", {}, ...rows));
  return div("cards", card("Running now", plural(found.length, "case"), true, table));
}

class RunningDrawer extends Drawer {
  constructor(run, root, go) {
    super({ run, id: [""], trial: [0] }, { about: { run: "" }, metrics: {} }, root, null);
    Object.assign(this, { run, go, shown: null });
    this.element.id = "running-drawer";
    this.element.classList.add("over");
    this.element.setAttribute("aria-label", "Running case");
    document.addEventListener("keydown", (event) => { if (event.key === "Escape" && this.isOpen) this.close(); });
  }

  whole() {
    return [];
  }

  fileHref(path) {
    return `/api/runs/${this.run}/file?path=${encodeURIComponent(path)}`;
  }

  open({ id, trial }) {
    this.shown = { id, trial };
    this.slots = new Map(["ended", "time", "logs", "talk"].map((name) => [name, el("div", {})]));
    this.content.replaceChildren(...this.slots.values());
    Object.assign(this, { boxes: null, turns: -1 });
    this.element.hidden = false;
    this.title.textContent = escapeInvisible(trial ? `${id} (trial ${trial + 1})` : id);
    this.pill = span("pill running", "running");
    this.head.replaceChildren(this.pill, this.title,
      button({ class: "icon", "aria-label": "Close", title: "Close (Esc)", onclick: () => this.close() }, "\u2715"));
    this.title.focus({ preventScroll: true });
    return this.refresh();
  }

  close() {
    this.element.hidden = true;
    this.shown = null;
  }

  // Called with every event of the run: what there is now.
  async refresh() {
    const asked = this.shown;
    if (!asked) return;
    try {
      const found = await ask(`/api/runs/${this.run}/running`, asked);
      if (this.shown !== asked) return;
      this.pill.textContent = `running for ${roughly(found.seconds)}`;
      this.set("time", found.time_line ? this.timeLinePart(found) : null);
      this.showLogs(found.logs || []);
      if (this.turns !== found.turns.length) this.set("talk", this.talkPart(found));
      this.turns = found.turns.length;
      this.element.dataset.ready = "running";
    } catch {
      if (this.shown === asked) this.ended(asked);
    }
  }

  ended({ id }) {
    this.pill.className = "pill";
    this.pill.textContent = "done";
    const show = button({ class: "chip", onclick: () => { this.close(); this.go.openId(id); } }, "Show it among the cases");
    this.set("ended", this.part("This case is done", "", show));
  }

  set(name, element) {
    this.slots.get(name).replaceChildren(...(element ? [element] : []));
  }

  // The boxes stay, so that their place is kept; one that is read at its end stays there.
  showLogs(logs) {
    const shown = logs.filter((log) => log.end !== undefined);
    if (!shown.length) return;
    if (!this.boxes) {
      this.set("logs", this.part("Logs", "as they come"));
      this.boxes = new Map();
    }
    const part = this.slots.get("logs").firstChild;
    for (const log of shown) {
      if (!this.boxes.has(log.path)) {
        const name = log.path.endsWith(".err") ? "stderr" : "stdout";
        const box = el("div", { class: "text log", tabindex: "0", role: "log", "aria-label": name });
        const size = span("size");
        part.append(div("labelled", div("who", el("b", {}, name), size, fileName(log.path, this.fileHref(log.path))), box));
        this.boxes.set(log.path, { box, size });
      }
      const { box, size } = this.boxes.get(log.path);
      const follows = box.scrollTop + box.clientHeight >= box.scrollHeight - NEAR_END;
      box.replaceChildren(rich(log.end));
      size.textContent = bytes(log.size);
      if (follows) box.scrollTop = box.scrollHeight;
    }
  }
}
