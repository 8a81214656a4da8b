// One tooltip for all charts: under the pointer, or next to the value that the arrow keys have reached.

function showTip(text, x, y) {
  const element = document.getElementById("tip");
  element.hidden = !text;
  if (!text) return;
  element.textContent = text;
  const { offsetWidth: width, offsetHeight: height } = element, below = y + 18;
  element.style.left = Math.max(8, Math.min(x + 14, window.innerWidth - width - 8)) + "px";
  element.style.top = (below + height > window.innerHeight ? y - height - 10 : below) + "px";
}

function hideTip() {
  showTip("");
}

// What a screen reader says next.
function announce(text) {
  document.getElementById("announcement").textContent = text;
}

// Make a chart readable with the keyboard: one stop for Tab, then the arrow keys go from value to value.
// `current` returns { count, text(index), place(index), highlight(index), open(index) } of what is drawn now.
function readWithKeys(box, current) {
  let index = -1;
  const name = box.getAttribute("aria-label");
  const attributes = { role: "application", "aria-roledescription": "chart", tabindex: "0",
    "aria-label": `${name}. The arrow keys read its values.` };
  for (const [key, value] of Object.entries(attributes)) box.setAttribute(key, value);

  const show = (wanted) => {
    const values = current();
    if (!values || !values.count) return;
    index = Math.max(0, Math.min(wanted, values.count - 1));
    const frame = box.getBoundingClientRect(), [x, y] = values.place(index), text = values.text(index);
    values.highlight(index);
    showTip(text, frame.left + x, frame.top + y);
    announce(text);
  };
  const clear = () => {
    const values = current();
    if (values) values.highlight(-1);
    hideTip();
  };

  box.addEventListener("focus", () => { if (box.matches(":focus-visible")) show(Math.max(index, 0)); });
  box.addEventListener("blur", clear);
  box.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const wanted = { ArrowRight: index + 1, ArrowLeft: index - 1, Home: 0, End: Infinity }[event.key];
    const values = current();
    if (wanted !== undefined) show(wanted);
    else if (event.key === "Escape") clear();
    else if (event.key === "Enter" && values && values.open && index >= 0) { clear(); values.open(index); }
    else return;
    event.preventDefault();
    event.stopPropagation();
  });
}
