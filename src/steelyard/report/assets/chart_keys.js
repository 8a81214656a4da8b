// The charts that are in the page's markup, readable with the keyboard too: each mark has its text in a <title>.

for (const chart of document.querySelectorAll("svg.chart")) {
  const marks = [...chart.querySelectorAll("circle > title")].map((title) => title.parentNode);
  const place = (index) => {
    const frame = chart.getBoundingClientRect(), box = marks[index].getBoundingClientRect();
    return [box.left + box.width / 2 - frame.left, box.top + box.height / 2 - frame.top];
  };
  const highlight = (found) => marks.forEach((mark, index) => mark.classList.toggle("lit", index === found));
  const text = (index) => marks[index].querySelector("title").textContent;
  readWithKeys(chart, () => ({ count: marks.length, text, place, highlight }));
}
