// The charts of a run: each draws itself again whenever its width changes. What a value is, is told in a tooltip.

function chart(height, label, draw) {
  const box = el("div", { class: "chart", role: "img", "aria-label": label });
  let width = 0;
  new ResizeObserver(() => {
    if (!box.clientWidth || box.clientWidth === width) return;
    width = box.clientWidth;
    const drawing = svg("svg", { width, height, viewBox: `0 0 ${width} ${height}`, "aria-hidden": "true" });
    draw(drawing, width, height);
    box.replaceChildren(drawing);
  }).observe(box);
  box.style.height = height + "px";
  return box;
}

// A chart whose values can be read: `draw` returns what readWithKeys needs.
function readableChart(height, label, draw) {
  let values = null;
  const box = chart(height, label, (...sizes) => { values = draw(...sizes); });
  readWithKeys(box, () => values);
  return box;
}

function niceTicks(low, high, wanted) {
  const step = (high - low) / Math.max(wanted, 1);
  if (!(step > 0)) return [low];
  const power = 10 ** Math.floor(Math.log10(step));
  const nice = [1, 2, 5, 10].find((one) => one * power >= step) * power;
  const ticks = [];
  const start = Math.ceil(low / nice - 1e-9), end = Math.floor(high / nice + 1e-9);
  for (let count = start; count <= end; count++) ticks.push(+(count * nice).toPrecision(12));
  return ticks;
}

// Steps that clocks are read in, once the time runs to minutes.
function timeTicks(high, wanted) {
  const steps = [30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 28800, 86400];
  const step = steps.find((one) => one >= high / Math.max(wanted, 1));
  if (high < 120 || !step) return niceTicks(0, high, wanted);
  return Array.from({ length: Math.floor(high / step) + 1 }, (_, index) => index * step);
}

function clock(value) {
  if (value < 120) return `${value} s`;
  return value < 7200 ? `${+(value / 60).toFixed(1)} min` : `${+(value / 3600).toFixed(1)} h`;
}

function logTicks(low, high, wanted) {
  const ticks = [];
  for (let power = Math.floor(Math.log10(low)); power <= Math.ceil(Math.log10(high)); power++) {
    for (const one of [1, 2, 5]) ticks.push(+(one * 10 ** power).toPrecision(3));
  }
  const within = ticks.filter((tick) => tick >= low && tick <= high);
  return within.length > wanted ? within.filter((tick) => /^1/.test(tick.toExponential())) : within;
}

function scale(low, high, start, end, log) {
  const to = log ? Math.log : (value) => value;
  const span = to(high) - to(low) || 1;
  return (value) => start + ((to(value) - to(low)) / span) * (end - start);
}

function xAxis(drawing, ticks, x, y, show, left, right) {
  drawing.append(svg("line", { class: "axis", x1: left, x2: right, y1: y + 0.5, y2: y + 0.5 }));
  for (const tick of ticks) {
    const place = x(tick);
    const anchor = place < left + 14 ? "start" : place > right - 14 ? "end" : "middle";
    drawing.append(svg("text", { x: place, y: y + 16, "text-anchor": anchor }, show(tick)));
  }
}

function yAxis(drawing, ticks, y, show, left, right) {
  for (const tick of ticks) {
    const place = Math.round(y(tick)) + 0.5;
    drawing.append(svg("line", { class: "grid", x1: left, x2: right, y1: place, y2: place }));
    drawing.append(svg("text", { x: left - 8, y: place + 3.5, "text-anchor": "end" }, show(tick)));
  }
}

function barPath(x, y, width, base) {
  const round = Math.min(2.5, width / 2, base - y), flat = width - 2 * round;
  return `M${x} ${base}V${y + round}q0 ${-round} ${round} ${-round}h${flat}q${round} 0 ${round} ${round}V${base}z`;
}

// A transparent area that takes the pointer's events for all that lies under it.
function pointerArea(box, handlers) {
  const width = Math.max(box.right - box.left, 0), height = box.bottom - box.top;
  return svg("rect", { x: box.left, y: box.top, width, height, fill: "transparent", ...handlers });
}

// Show the value under the pointer: `at` maps a horizontal place to an index.
function followPointer(drawing, box, at, { text, highlight }) {
  drawing.append(pointerArea(box, {
    onmousemove: (event) => {
      const found = at(event.clientX - drawing.getBoundingClientRect().left);
      highlight(found);
      showTip(text(found), event.clientX, event.clientY);
    },
    onmouseleave: () => { highlight(-1); hideTip(); },
  }));
}

function highlighter(elements) {
  return (found) => elements.forEach((one, index) => one && one.classList.toggle("lit", index === found));
}

function within(position, count) {
  return Math.min(count - 1, Math.max(0, position));
}

function histogramChart(data, kind, show, label) {
  const { edges, counts } = data, low = edges[0], high = edges[edges.length - 1];
  const text = (index) => `${between(edges[index], edges[index + 1], data.whole, show)}\n` +
    `${plural(counts[index], "answer")}, ${percent(counts[index] / data.n)}`;
  return readableChart(190, label, (drawing, width, height) => {
    const box = { left: 0, right: width, top: 30, bottom: height - 22 };
    const x = scale(low, high, box.left, box.right, data.log);
    const y = scale(0, Math.max(...counts), box.bottom, box.top, false);
    const bars = counts.map((count, index) => {
      const start = x(edges[index]), wide = Math.max(x(edges[index + 1]) - start - 1, 0.5);
      const d = barPath(start + 0.5, Math.min(y(count), box.bottom - 1.5), wide, box.bottom);
      return count ? svg("path", { class: "bars-" + kind, d }) : null;
    });
    drawing.append(...bars.filter(Boolean));
    const ticks = (data.log ? logTicks : niceTicks)(low, high, Math.floor(width / 80));
    xAxis(drawing, data.whole ? ticks.filter(Number.isInteger) : ticks, x, box.bottom, show, box.left, box.right);
    percentileRules(drawing, data, x, box, show);
    const highlight = highlighter(bars);
    const at = (place) => within(edges.findLastIndex((edge) => x(edge) <= place), counts.length);
    followPointer(drawing, box, at, { text, highlight });
    const filled = [...counts.keys()].filter((index) => counts[index]);  // keys skip the bars that are not there
    return { count: filled.length, text: (index) => text(filled[index]), highlight: (index) => highlight(filled[index]),
      place: (index) => [x(edges[filled[index]]), y(counts[filled[index]])] };
  });
}

function between(low, high, whole, show) {
  const [first, last] = whole ? [Math.ceil(low), Math.floor(high)] : [low, high];
  return first === last ? show(first) : `${show(first)} to ${show(last)}`;
}

function percentileRules(drawing, data, x, box, show) {
  const taken = [-Infinity, -Infinity, -Infinity];  // how far to the right each line of labels is written on
  for (const name of ["p50", "p90", "p99"]) {
    const place = x(data[name]), label = `${name} ${show(data[name])}`, wide = label.length * 7.2 + 8;
    const flip = place + wide > box.right;
    const start = flip ? place - wide : place;
    const row = Math.max(0, taken.findIndex((end) => start >= end));
    taken[row] = start + wide;
    const top = box.top - 18 + row * 13;
    drawing.append(svg("line", { class: "rule", x1: place, x2: place, y1: top - 8, y2: box.bottom }));
    const written = flip ? { x: place - 4, "text-anchor": "end" } : { x: place + 4, "text-anchor": "start" };
    drawing.append(svg("text", { class: "rule-label", y: top, ...written }, label));
  }
}

function overTimeChart(data, label) {
  const { finished, errors, width: step } = data, ends = step * finished.length;
  const rates = finished.map((count) => count / step);
  const text = (index) => {
    const share = finished[index] ? ` (${percent(errors[index] / finished[index])})` : "";
    return `${seconds(index * step)} to ${seconds((index + 1) * step)}\n${number(rates[index])} a second\n` +
      `${plural(errors[index], "error")} of ${number(finished[index])}${share}`;
  };
  return readableChart(210, label, (drawing, width, height) => {
    const box = { left: 44, right: width, top: 10, bottom: height - 22 }, most = Math.max(...rates) || 1;
    const x = scale(0, ends, box.left, box.right, false);
    const y = scale(0, most * 1.05, box.bottom, box.top, false);
    yAxis(drawing, niceTicks(0, most, 4), y, compact, box.left, box.right);
    const bars = rates.map((rate, index) => {
      const start = x(index * step) + 0.5, wide = Math.max(x(step) - x(0) - 1, 0.5), failed = y(errors[index] / step);
      const group = svg("g", {});
      if (rate) group.append(svg("path", { class: "bars-plain", d: barPath(start, y(rate), wide, box.bottom) }));
      const part = { x: start, width: wide, y: failed, height: Math.max(box.bottom - failed, 1) };
      if (errors[index]) group.append(svg("rect", { class: "bars-error", ...part }));
      return group;
    });
    drawing.append(...bars);
    xAxis(drawing, timeTicks(ends, Math.floor(width / 90)), x, box.bottom, clock, box.left, box.right);
    const at = (place) => Math.floor(((place - box.left) / (box.right - box.left)) * rates.length);
    const highlight = highlighter(bars);
    followPointer(drawing, box, (place) => within(at(place), rates.length), { text, highlight });
    return { count: rates.length, text, highlight, place: (index) => [x(index * step), y(rates[index])] };
  });
}

function scatterChart(data, label, open) {
  const most = Math.max(...data.last) || 1, ends = Math.max(...data.at) || 1, r = data.at.length > 400 ? 2.2 : 3;
  const text = (index) => `${STATES[data.state[index]]}, ${seconds(data.last[index])}\n` +
    `finished ${seconds(data.at[index])} after the start`;
  return readableChart(210, label, (drawing, width, height) => {
    const box = { left: 52, right: width - 4, top: 10, bottom: height - 22 };
    const x = scale(0, ends, box.left, box.right, false);
    const y = scale(0, most * 1.05, box.bottom, box.top, false);
    yAxis(drawing, niceTicks(0, most, 4), y, seconds, box.left, box.right);
    xAxis(drawing, timeTicks(ends, Math.floor(width / 90)), x, box.bottom, clock, box.left, box.right);
    const { at, last, state: states } = data;
    const places = at.map((when, index) => ({ index, cx: x(when), cy: y(last[index]), state: states[index] }));
    const dots = places.map(({ cx, cy, state }) => svg("circle", { class: "pt " + STATES[state], cx, cy, r }));
    const bottomUp = [...places].sort((one, other) => DRAWN[one.state] - DRAWN[other.state]);
    drawing.append(...bottomUp.map(({ index }) => dots[index]));
    const under = (event) => nearestPlace(places, event, drawing.getBoundingClientRect());
    drawing.append(pointerArea(box, {
      onmousemove: (event) => {
        const index = under(event);
        event.currentTarget.style.cursor = index < 0 ? "default" : "pointer";
        showTip(index < 0 ? "" : text(index), event.clientX, event.clientY);
      },
      onmouseleave: hideTip,
      onclick: (event) => {
        const index = under(event);
        hideTip();
        if (index >= 0) open(data.record[index]);
      },
    }));
    const byTime = [...places].sort((one, other) => one.cx - other.cx), highlight = highlighter(dots);
    return { count: byTime.length, text: (place) => text(byTime[place].index),
      highlight: (place) => highlight(place < 0 ? -1 : byTime[place].index),
      place: (place) => [byTime[place].cx, byTime[place].cy], open: (place) => open(data.record[byTime[place].index]) };
  });
}

const DRAWN = [2, 0, 1, 3];  // in which order the states are drawn: failures last, so that they are not hidden
const REACH = 12;  // pixels from the pointer to a point that it still means

function nearestPlace(places, event, frame) {
  let best = -1, distance = REACH ** 2;
  for (const { index, cx, cy } of places) {
    const far = (cx - event.clientX + frame.left) ** 2 + (cy - event.clientY + frame.top) ** 2;
    if (far < distance) [best, distance] = [index, far];
  }
  return best;
}

// A 95 % interval within 0..1, and where in it the estimate lies.
function whisker(value, [low, high]) {
  const label = `${percent(value)}, 95 % interval ${percent(low)} to ${percent(high)}`;
  return chart(12, label, (drawing, width, height) => {
    const x = scale(0, 1, 0, width, false), bar = { y: height / 2 - 3, height: 6, rx: 3 };
    drawing.append(
      svg("rect", { class: "whole", x: 0, width, ...bar }),
      svg("rect", { class: "band", x: x(low), width: Math.max(x(high) - x(low), 3), ...bar }),
      svg("rect", { class: "mean", x: Math.min(Math.max(x(value) - 1.5, 0), width - 3), width: 3, height, rx: 1.5 }));
  });
}
