// Everything that comes from a model or a case enters the page through here, as text.

const STATES = ["failed", "passed", "unscored", "error"];
const SIGNS = { passed: "\u2713", failed: "\u2715", unscored: "\u2013", error: "!" };

function el(tag, attributes, ...children) {
  const element = document.createElement(tag);
  setAll(element, attributes);
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
}

const div = (kind, ...children) => el("div", { class: kind }, ...children);
const span = (kind, ...children) => el("span", { class: kind }, ...children);
const button = (attributes, ...children) => el("button", { type: "button", ...attributes }, ...children);

// Names and values, side by side.
function pairs(rows, kind) {
  const pair = ([name, value]) => [el("dt", {}, escapeInvisible(name)), el("dd", { class: kind }, escapeInvisible(value))];
  return el("dl", { class: "pairs" }, ...rows.flatMap(pair));
}

function svg(tag, attributes, ...children) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  setAll(element, attributes);
  element.append(...children);
  return element;
}

function setAll(element, attributes) {
  for (const [name, value] of Object.entries(attributes || {})) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value === true) element.setAttribute(name, "");
    else if (value !== null && value !== undefined && value !== false) element.setAttribute(name, value);
  }
}

// Controls, marks that reorder text and characters without a width: shown as what they are. The same as in stats/formatting.py.
const UNSEEN = new RegExp(
  "[\\x00-\\x08\\x0b-\\x1f\\x7f-\\x9f\\u00ad\\u061c\\u180e\\u200b\\u200e\\u200f\\u2028-\\u202e\\u2060-\\u206f" +
    "\\ufdd0-\\ufdef\\ufeff\\ufff9-\\ufffb\\ufffe\\uffff\\u{e0000}-\\u{e007f}]", "gu");

function signOf(character) {
  const code = character.codePointAt(0);
  if (code < 0x20) return String.fromCharCode(0x2400 + code);
  if (code === 0x7f) return "\u2421";
  return "\u27e8U+" + code.toString(16).toUpperCase().padStart(4, "0") + "\u27e9";
}

function escapeInvisible(text) {
  return String(text).replaceAll("\r\n", "\n").replace(UNSEEN, signOf);
}

function rich(whole) {
  const text = whole.replaceAll("\r\n", "\n");
  const fragment = document.createDocumentFragment();
  let end = 0;
  for (const found of text.matchAll(UNSEEN)) {
    fragment.append(text.slice(end, found.index), el("span", { class: "sign" }, signOf(found[0])));
    end = found.index + found[0].length;
  }
  fragment.append(text.slice(end));
  return fragment;
}

const MISSING = "\u2013";

function seconds(value) {
  if (value === null || value === undefined || Number.isNaN(value)) return MISSING;
  const size = Math.abs(value);
  if (size === 0) return "0 s";
  if (size < 0.000995) return (value * 1e6).toFixed(0) + " \u00b5s";
  if (size < 0.00995) return (value * 1e3).toFixed(1) + " ms";
  if (size < 0.9995) return (value * 1e3).toFixed(0) + " ms";
  if (size < 9.995) return value.toFixed(2) + " s";
  if (size < 119.5) return value.toFixed(1) + " s";
  if (size < 7170) return (value / 60).toFixed(1) + " min";
  return (value / 3600).toFixed(1) + " h";
}

function number(value) {
  if (value === null || value === undefined || Number.isNaN(value)) return MISSING;
  if (Number.isInteger(value) || Math.abs(value) >= 99.95) return Math.round(value).toLocaleString("en-GB");
  return value.toFixed(Math.abs(value) >= 9.995 ? 1 : 2);
}

function compact(value) {
  if (value === null || value === undefined) return MISSING;
  if (Math.abs(value) >= 1e9) return (value / 1e9).toFixed(1) + "G";
  if (Math.abs(value) >= 1e6) return (value / 1e6).toFixed(1) + "M";
  if (Math.abs(value) >= 1e4) return (value / 1e3).toFixed(1) + "k";
  return number(value);
}

function percent(value, digits = 1) {
  return value === null || value === undefined ? MISSING : (value * 100).toFixed(digits) + "%";
}

function money(value, currency) {
  if (value === null || value === undefined) return MISSING;
  const size = Math.abs(value);
  const digits = size > 0 && size < 1 ? Math.max(2, 1 - Math.floor(Math.log10(size))) : 2;
  const amount = value.toLocaleString("en-GB", { minimumFractionDigits: digits, maximumFractionDigits: digits });
  return currency ? amount + " " + escapeInvisible(currency) : amount;
}

function plural(count, word) {
  return number(count) + " " + word + (count === 1 ? "" : "s");
}

function badge(state) {
  return el("span", { class: "sign-mark " + state, title: state, role: "img", "aria-label": state }, SIGNS[state]);
}
