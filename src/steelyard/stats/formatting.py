"""Figures as people read them, and text from elsewhere made safe for a terminal."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Mapping, Sequence

from steelyard.protocols import InFlight
from steelyard.stats.spec import ProgressSpec

_MISSING = "\N{EN DASH}"
_SEPARATOR = " · "
_LONGEST_ID = 40


def format_seconds(seconds: float) -> str:
    """A duration to about three digits: 340µs, 1.2ms, 12ms, 214ms, 3.41s, 75.2s, 180s."""
    if seconds == 0:
        return "0s"
    if abs(seconds) < 0.000_995:
        return f"{seconds * 1e6:.0f}µs"
    if abs(seconds) < 0.009_95:
        return f"{seconds * 1e3:.1f}ms"
    if abs(seconds) < 0.9995:
        return f"{seconds * 1e3:.0f}ms"
    if abs(seconds) < 9.995:
        return f"{seconds:.2f}s"
    return f"{seconds:.1f}s" if abs(seconds) < 99.95 else f"{seconds:,.0f}s"


def format_number(number: float) -> str:
    """A number to about three digits, with separators between thousands: 0.12, 24.1, 12,345."""
    if number == int(number) or abs(number) >= 99.95:
        return f"{number:,.0f}"
    return f"{number:.1f}" if abs(number) >= 9.995 else f"{number:.2f}"


def format_rate(done: int, elapsed: float) -> str:
    """How many a second, or a minute where a second is too short; missing until the first."""
    if done <= 0 or elapsed <= 0:
        return f"{_MISSING}/s"
    rate = done / elapsed
    return f"{format_number(rate)}/s" if rate >= 0.1 else f"{format_number(rate * 60)}/min"


def format_value(value: float | int | None, unit: str) -> str:
    """One figure in its unit; a dash when there is none."""
    if value is None:
        return _MISSING
    return format_seconds(value) if unit == "seconds" else format_number(value)


def segments(spec: ProgressSpec, values: Mapping[str, float | int | None]) -> list[str]:
    """Each label with its value; labels that differ in their last word alone share a segment.

    `first token p50` and `first token p90` read `first token p50 0.21s p90 0.34s`. A label that is itself a
    unit, such as `tok/s`, follows its value.
    """
    parts: list[str] = []
    previous = ""
    for stat in spec:
        label, text = safe_text(stat.label), format_value(values[stat.label], stat.unit)
        stem, _, last_word = label.rpartition(" ")
        if stem and stem == previous:
            parts[-1] += f" {last_word} {text}"
        else:
            parts.append(f"{text} {label}" if "/" in label else f"{label} {text}")
        previous = stem
    return parts


def join(parts: Sequence[str], width: int | None = None) -> str:
    """The segments on one line. Whole ones are left out where they do not fit: half a number misleads."""
    from tqdm.utils import disp_len  # here, as most who count in words draw no line

    whole = _SEPARATOR.join(parts)
    if width is None or disp_len(whole) <= width:
        return whole
    kept = list(parts)
    while len(kept) > 1:
        kept.pop()
        line = _SEPARATOR.join(kept) + " …"
        if disp_len(line) <= width:
            return line
    return trim(whole, width)


def counted(count: int, one: str, many: str | None = None) -> str:
    """So many of a thing: `1 answer`, `3,000 answers`."""
    return f"{count:,} {one if count == 1 else many or f'{one}s'}"


def trim(text: str, width: int) -> str:
    """The text cut to this many columns, with an ellipsis where something is missing."""
    from tqdm.utils import disp_len, disp_trim

    if disp_len(text) <= width:
        return text
    return disp_trim(text, max(width - 1, 0)) + "…"


def silence_notice(seconds: float, in_flight: InFlight) -> str:
    """What is being waited for, when nothing has come back for a while."""
    notice = f"no answer for {seconds:,.0f} s: {in_flight.count:,} in flight"
    if in_flight.oldest_id is None:
        return notice
    oldest = trim(safe_text(in_flight.oldest_id), _LONGEST_ID)
    return f"{notice}, oldest '{oldest}' for {in_flight.oldest_seconds:,.0f} s"


def safe_text(text: str) -> str:
    """The text with everything that could steer a terminal replaced: controls, escapes, bidi marks, line breaks."""
    return "".join("�" if _steers(character) else character for character in text)


def _steers(character: str) -> bool:
    category = unicodedata.category(character)
    return category[0] == "C" or category in ("Zl", "Zp")


# Controls but tab and newline, marks that reorder text, and characters without a width that can hide more text.
# The joiners U+200C and U+200D stay: scripts and emoji need them.
_UNSEEN = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u00ad\u061c\u180e\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f"
    "\ud800-\udfff\ufdd0-\ufdef\ufeff\ufff9-\ufffb\ufffe\uffff\U000e0000-\U000e007f]"
)
_PICTURES = 0x2400
"""Where Unicode has a picture of each of the first 32 controls."""


def visible(text: str) -> str:
    """The text with each control, bidi mark and hidden character as a sign that says which it was."""
    return _UNSEEN.sub(_sign, text.replace("\r\n", "\n"))


def one_line(text: str, longest: int) -> str:
    """The beginning of a text, visible, on one line."""
    # Cut before the work: a text may be megabytes long. Runs of blanks are rare enough for four times as much to do.
    line = " ".join(visible(text[: longest * 4]).split())
    return line if len(line) <= longest and len(text) <= longest * 4 else line[: longest - 1].rstrip() + "…"


def cut(text: str, longest: int, note: str) -> str:
    """The text, or its beginning and a note where it is longer than that."""
    return text if len(text) <= longest else f"{text[:longest]}…\n[{note}]"


def _sign(found: re.Match[str]) -> str:
    code = ord(found[0])
    if code < 0x20:
        return chr(_PICTURES + code)
    return "\N{SYMBOL FOR DELETE}" if code == 0x7F else f"⟨U+{code:04X}⟩"
