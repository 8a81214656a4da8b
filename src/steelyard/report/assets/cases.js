// The cases in memory: unpacked columns, grouped by case, and what each chip, search and sort order selects.

const FLAG = { escalated: 1, cached: 2 };
const CHIPS = ["failed", "errored", "flaky", "escalated", "slow", "unscored", "passed"];
const BIT = Object.fromEntries(CHIPS.map((name, index) => [name, 1 << index]));
const COLUMNS = ["id", "trial", "state", "flags", "first", "last", "input", "output", "cost", "prompt", "answer", "meta"];
const MAX_KEYS = 6;
const MAX_CHOICES = 50;
const ENOUGH_FOR_SLOW = 20;

async function unpack(element) {
  const packed = atob(element.textContent.trim());
  const bytes = new Uint8Array(packed.length);
  for (let index = 0; index < packed.length; index++) bytes[index] = packed.charCodeAt(index);
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate-raw"));
  return new Response(stream).json();
}

// The words of a search: `key="two words"` is one.
function termsOf(words) {
  return (words.toLowerCase().match(/[^\s"=]+="[^"]*"|\S+/g) || []).map((term) => term.replaceAll('"', ""));
}

// The metadata that cases can be chosen by: keys with their values, those of slices or, without any, of the cases.
function choicesOf(slices, lines) {
  const found = new Map();
  for (const { key, value } of slices || []) found.set(key, [...(found.get(key) || []), value]);
  if (!found.size) {
    for (const line of new Set(lines.flatMap((text) => (text ? text.split("\n") : [])))) {
      const [key, value] = [line.slice(0, line.indexOf("=")), line.slice(line.indexOf("=") + 1)];
      found.set(key, [...(found.get(key) || []), value]);
    }
    for (const values of found.values()) values.sort();
  }
  const isChoice = ([, values]) => values.length > 1 && values.length <= MAX_CHOICES;
  return new Map([...found].filter(isChoice).slice(0, MAX_KEYS));
}

class Cases {
  constructor(blocks, scoreNames) {
    for (const name of COLUMNS) this[name] = blocks.flatMap((block) => block[name]);
    this.scoreNames = scoreNames;
    this.scores = scoreNames.map((_, index) => blocks.flatMap((block) => block.scores[index]));
    this.slowFrom = this.slowLimit();
    this.group();
    this.words = null;
  }

  // The 95th percentile of the answers' times: what is above it is called slow.
  slowLimit() {
    const times = this.last.filter((time, record) => time !== null && this.isMeasured(record));
    if (times.length < ENOUGH_FOR_SLOW) return Infinity;
    times.sort((a, b) => a - b);
    return times[Math.ceil(times.length * 0.95) - 1];
  }

  isMeasured(record) {
    return this.state[record] !== 3 && !(this.flags[record] & FLAG.cached);
  }

  // Records of one case are next to each other: a row of the table is a case with all of its trials.
  group() {
    this.starts = [];
    this.id.forEach((id, record) => {
      if (record === 0 || id !== this.id[record - 1]) this.starts.push(record);
    });
    this.count = this.starts.length;
    this.bits = new Uint16Array(this.count);
    this.marks = new Uint8Array(this.count);
    this.lead = new Uint32Array(this.count);  // of several trials the row shows the first that is as the row says
    this.kept = new Map();
    for (let row = 0; row < this.count; row++) this.look(row);
    this.counts = Object.fromEntries(CHIPS.map((name) => [name, 0]));
    for (const bits of this.bits) for (const name in BIT) if (bits & BIT[name]) this.counts[name]++;
  }

  look(row) {
    const seen = [0, 0, 0, 0];
    let bits = 0;
    for (let record = this.starts[row]; record < this.end(row); record++) {
      const state = this.state[record];
      seen[state]++;
      if (this.flags[record] & FLAG.escalated) bits |= BIT.escalated;
      if (this.last[record] > this.slowFrom && this.isMeasured(record)) bits |= BIT.slow;
    }
    const [failed, passed, unscored, errored] = seen;
    if (failed) bits |= BIT.failed;
    if (errored) bits |= BIT.errored;
    if (failed && passed) bits |= BIT.flaky;
    if (unscored) bits |= BIT.unscored;
    if (passed && !failed && !errored && !unscored) bits |= BIT.passed;
    this.bits[row] = bits;
    const mark = failed ? 0 : errored ? 3 : unscored ? 2 : 1;
    this.marks[row] = mark;
    this.lead[row] = this.state.indexOf(mark, this.starts[row]);
  }

  end(row) {
    return row + 1 < this.count ? this.starts[row + 1] : this.id.length;
  }

  rowOf(record) {
    let low = 0, high = this.count - 1;
    while (low < high) {
      const middle = (low + high + 1) >> 1;
      if (this.starts[middle] <= record) low = middle;
      else high = middle - 1;
    }
    return low;
  }

  // A column's value for a row: of several trials the median of those that have one.
  value(column, row) {
    const found = this.values(column, row).sort((a, b) => a - b), half = found.length >> 1;
    if (!found.length) return null;
    return found.length % 2 ? found[half] : (found[half - 1] + found[half]) / 2;
  }

  // A score's: the mean, as a median of passes and failures would hide the fewer; of labels the first.
  score(index, row) {
    const found = this.values(this.scores[index], row);
    if (typeof found[0] === "string") return found[0];
    return found.length ? found.reduce((sum, one) => sum + one, 0) / found.length : null;
  }

  values(column, row) {
    return column.slice(this.starts[row], this.end(row)).filter((one) => one !== null);
  }

  select(words, chips) {
    const wanted = chips.reduce((bits, name) => bits | BIT[name], 0);
    const terms = termsOf(words);
    if (terms.length) this.words ||= this.id.map((id, record) => this.wordsOf(id, record));
    const found = [];
    for (let row = 0; row < this.count; row++) {
      if (wanted && !(this.bits[row] & wanted)) continue;
      if (terms.length && !this.matches(row, terms)) continue;
      found.push(row);
    }
    return found;
  }

  wordsOf(id, record) {
    return `${id}\n${this.prompt[record]}\n${this.answer[record]}`.toLowerCase();
  }

  // What a case's metadata holds, as lines `key=value` between line breaks.
  metaOf(record) {
    return `\n${this.meta[record] || ""}\n`.toLowerCase();
  }

  matches(row, terms) {
    for (let record = this.starts[row]; record < this.end(row); record++) {
      const text = this.words[record];
      const isMeta = (term) => term.includes("=") && this.metaOf(record).includes(`\n${term}\n`);
      if (terms.every((term) => text.includes(term) || isMeta(term))) return true;
    }
    return false;
  }

  sort(rows, key, descending) {
    if (key === null) return rows;
    const keys = this.keys(key);
    const sign = descending ? -1 : 1;
    return rows.sort((a, b) => {
      const one = keys[a], other = keys[b];
      if (one === other) return a - b;
      if (one === null) return 1;  // what has no value goes last either way
      if (other === null) return -1;
      return one < other ? -sign : sign;
    });
  }

  keys(key) {
    let found = this.kept.get(key);
    if (!found) {
      found = Array.from({ length: this.count }, (_, row) => this.sortValue(key, row));
      this.kept.set(key, found);
    }
    return found;
  }

  sortValue(key, row) {
    if (key === "id") return this.id[this.starts[row]];
    if (key === "state") return [0, 3, 2, 1][this.marks[row]];  // failed, errored, unscored, passed
    return key.startsWith("score:") ? this.score(Number(key.slice(6)), row) : this.value(this[key], row);
  }
}
