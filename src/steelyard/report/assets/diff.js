// Which words of one text are not in the other, in order: the longest common run of words is what they share.

const MAX_STEPS = 4e6;

// Words and signs, each with the blanks after it: these belong to the text, but not to the comparison.
function words(text) {
  return text.match(/(?:[\p{L}\p{N}_]+|[^\s\p{L}\p{N}_])\s*|\s+/gu) || [];
}

// For each word of both texts whether the other has it too; null when they are too long to compare.
function compareWords(leftWords, rightWords) {
  const left = leftWords.map((word) => word.trim()), right = rightWords.map((word) => word.trim());
  let start = 0, leftEnd = left.length, rightEnd = right.length;
  while (start < leftEnd && start < rightEnd && left[start] === right[start]) start++;
  while (leftEnd > start && rightEnd > start && left[leftEnd - 1] === right[rightEnd - 1]) { leftEnd--; rightEnd--; }
  const shared = { left: new Array(left.length).fill(true), right: new Array(right.length).fill(true) };
  shared.left.fill(false, start, leftEnd);
  shared.right.fill(false, start, rightEnd);
  const rows = leftEnd - start, columns = rightEnd - start;
  if (rows * columns > MAX_STEPS) return null;
  const width = columns + 1, longest = new Uint16Array((rows + 1) * width);
  for (let i = rows - 1; i >= 0; i--) {
    for (let j = columns - 1; j >= 0; j--) {
      longest[i * width + j] = left[start + i] === right[start + j]
        ? longest[(i + 1) * width + j + 1] + 1 : Math.max(longest[(i + 1) * width + j], longest[i * width + j + 1]);
    }
  }
  for (let i = 0, j = 0; i < rows && j < columns;) {
    if (left[start + i] === right[start + j]) { shared.left[start + i++] = true; shared.right[start + j++] = true; }
    else if (longest[(i + 1) * width + j] >= longest[i * width + j + 1]) i++;
    else j++;
  }
  return shared;
}

// The words as a fragment; stretches that the other text does not have are marked.
function marked(list, shared, kind) {
  const fragment = document.createDocumentFragment();
  for (let index = 0; index < list.length;) {
    let end = index + 1;
    while (end < list.length && shared[end] === shared[index]) end++;
    const text = list.slice(index, end).join(""), inner = text.trimEnd();
    if (shared[index]) fragment.append(rich(text));
    else fragment.append(el("mark", { class: kind }, rich(inner)), text.slice(inner.length));
    index = end;
  }
  return fragment;
}

// Which of several accepted texts is most like the answer.
function nearest(accepted, answer) {
  if (accepted.length === 1) return 0;
  const likenesses = accepted.map((text) => likeness(text, answer));
  return likenesses.indexOf(Math.max(...likenesses));
}

// How two texts compare as a whole, in words; nothing where the marks say it.
function alikeness(expected, answer, shared) {
  if (expected === answer) return "identical";
  if (!shared) return "too long to compare word by word";
  return shared.left.every(Boolean) && shared.right.every(Boolean) ? "identical except for white space" : "";
}

function likeness(expected, answer) {
  const left = words(expected), right = words(answer), shared = compareWords(left, right);
  return shared ? (2 * shared.left.filter(Boolean).length) / (left.length + right.length || 1) : 0;
}
