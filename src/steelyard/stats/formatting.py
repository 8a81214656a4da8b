"""Formatting: figures for people, and untrusted text made safe to show in a terminal."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Mapping, Sequence

from steelyard.protocols import InFlight
from steelyard.stats.figures import OUTCOMES, ProgressSpec

_MISSING = "\N{EN DASH}"
_SEPARATOR = " · "
_MAX_ID = 40

# Controls but tab and newline, marks that reorder text, and characters without a width that can hide more text.
# The joiners U+200C and U+200D stay: scripts and emoji need them.
_UNSEEN = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u00ad\u061c\u180e\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f"
    "\ud800-\udfff\ufdd0-\ufdef\ufeff\ufff9-\ufffb\ufffe\uffff\U000e0000-\U000e007f]"
)
_PICTURES = 0x2400
"""First code point of Unicode's pictures of the 32 control characters."""


def format_seconds(seconds: float) -> str:
    """Format a duration to about three digits: 340µs, 1.2ms, 12ms, 214ms, 3.41s, 75.2s, 180s."""
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


def format_time(seconds: float | None, at_least: bool = False) -> str:
    """A time as `420ms`, or `≥ 600ms` where only that is known; a dash where nothing is."""
    return "–" if seconds is None else f"≥ {format_seconds(seconds)}" if at_least else format_seconds(seconds)


def format_number(number: float) -> str:
    """Format a number to about three digits, with thousands separators: 0.12, 24.1, 12,345."""
    if number == int(number) or abs(number) >= 99.95:
        return f"{number:,.0f}"
    return f"{number:.1f}" if abs(number) >= 9.995 else f"{number:.2f}"


def format_rate(done: int, elapsed: float) -> str:
    """Format a rate per second, or per minute where it is low; a dash until the first."""
    if done <= 0 or elapsed <= 0:
        return f"{_MISSING}/s"
    rate = done / elapsed
    return f"{format_number(rate)}/s" if rate >= 0.1 else f"{format_number(rate * 60)}/min"


def format_value(value: float | int | None, unit: str) -> str:
    """Format one figure in its unit; a dash when there is none."""
    if value is None:
        return _MISSING
    return format_seconds(value) if unit == "seconds" else format_number(value)


def segments(
    spec: ProgressSpec, values: Mapping[str, float | int | None], outcomes: Mapping[str, str] | None = None
) -> list[str]:
    """Format each label with its value; labels that differ only in their last word share a segment.

    `outcomes` are the pass rate and the cost, ready to be shown; one that is missing has no segment.

    `first token p50` and `first token p90` read `first token p50 0.21s p90 0.34s`. A label that is itself a
    unit, such as `tok/s`, follows its value.
    """
    parts: list[str] = []
    previous = ""
    for stat in spec:
        if stat.source in OUTCOMES:
            if outcomes and stat.source in outcomes:
                parts.append(f"{safe_text(stat.label)} {outcomes[stat.source]}")
            previous = ""
            continue
        label, text = safe_text(stat.label), format_value(values[stat.label], stat.unit)
        stem, _, last_word = label.rpartition(" ")
        if stem and stem == previous:
            parts[-1] += f" {last_word} {text}"
        else:
            parts.append(f"{text} {label}" if "/" in label else f"{label} {text}")
        previous = stem
    return parts


def join(parts: Sequence[str], width: int | None = None) -> str:
    """Join the segments on one line. Segments that do not fit are left out whole: half a number misleads."""
    from tqdm.utils import disp_len  # imported here: most callers of this module draw no line

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
    """Format a count with its noun: `1 answer`, `3,000 answers`."""
    return f"{count:,} {one if count == 1 else many or f'{one}s'}"


def trim(text: str, width: int) -> str:
    """Cut the text to this many columns, with an ellipsis where something is missing."""
    from tqdm.utils import disp_len, disp_trim

    if disp_len(text) <= width:
        return text
    return disp_trim(text, max(width - 1, 0)) + "…"


def display_width(text: str) -> int:
    """How many columns of a terminal a text takes: characters of some scripts take two."""
    from tqdm.utils import disp_len

    return int(disp_len(text))


def wrap(text: str, width: int) -> str:
    """Break a line between words where it is longer than this; the lines below the first are indented.

    What is indented itself is left whole, as are words: commands, paths and addresses are copied from there.
    """
    if len(text) <= width or text.startswith(" "):
        return text
    import textwrap

    return textwrap.fill(text, width, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)


def silence_notice(seconds: float, in_flight: InFlight) -> str:
    """Describe what the run is waiting for when no answer has come for a while."""
    notice = f"no answer for {seconds:,.0f} s: {in_flight.count:,} in flight"
    if in_flight.oldest_id is None:
        return notice
    oldest = trim(without_commands(safe_text(in_flight.oldest_id)), _MAX_ID)
    return f"{notice}, oldest '{oldest}' for {in_flight.oldest_seconds:,.0f} s"


def safe_text(text: str) -> str:
    """Replace everything that could control a terminal: controls, escapes, bidi marks, line breaks."""
    return "".join("�" if _steers(character) else character for character in text)


def _steers(character: str) -> bool:
    category = unicodedata.category(character)
    return category[0] == "C" or category in ("Zl", "Zp")


_COMMAND_ANYWHERE = re.compile(r"##(?=[\w.-]*\[)")
"""`##[error]` of GitHub and Azure, `##vso[…]` of Azure, `##teamcity[…]`: obeyed wherever in a line they are."""
_COMMAND_AT_START = re.compile(r"(?m)(^|\r)(\s*):(?=:.*?::)")
"""`::error::` and others of GitHub, and `::TOKEN::`, which ends `::stop-commands::TOKEN`: obeyed at a line's start."""


def without_commands(text: str) -> str:
    """Break whatever a CI system would obey that finds it in a log; for all that is printed, never for files.

    With a blank that can be seen: comparisons that heed a culture, as in .NET, skip characters without a width.
    """
    if "##" in text:
        text = _COMMAND_ANYWHERE.sub("# #", text)
    return _COMMAND_AT_START.sub(r"\1\2: ", text) if "::" in text else text


def json_without_commands(text: str) -> str:
    """The same for JSON, which has a way to write them that no log obeys: its values stay as they are."""
    return _COMMAND_ANYWHERE.sub(r"#\\u0023", text)


def xml_without_commands(text: str) -> str:
    """The same for XML."""
    text = _COMMAND_ANYWHERE.sub("#&#35;", text)
    return _COMMAND_AT_START.sub(r"\1\2&#58;", text)


def escape_invisible(text: str) -> str:
    """Replace each control, bidi mark and hidden character by a visible sign that names it."""
    return _UNSEEN.sub(_sign, text.replace("\r\n", "\n"))


def format_bytes(size: int) -> str:
    """A number of bytes in the unit that suits it, powers of 1000: `512 B`, `1.2 kB`, `34 MB`."""
    if size < 1000:
        return f"{size} B"
    power = next((power for power in (1, 2, 3) if size / 1000**power < 999.5), 4)
    value = size / 1000**power
    return f"{value:.{1 if value < 9.95 else 0}f} {('kB', 'MB', 'GB', 'TB')[power - 1]}"


def one_line(text: str, max_length: int) -> str:
    """Return the beginning of a text, visible, on one line."""
    # Cut first: a text may be megabytes long. Four times the length leaves room for runs of blanks.
    line = " ".join(escape_invisible(text[: max_length * 4]).split())
    return line if len(line) <= max_length and len(text) <= max_length * 4 else line[: max_length - 1].rstrip() + "…"


def cut(text: str, max_length: int, note: str) -> str:
    """Return the text, or its beginning and a note where it is longer than the limit."""
    return text if len(text) <= max_length else f"{text[:max_length]}…\n[{note}]"


def _sign(found: re.Match[str]) -> str:
    code = ord(found[0])
    if code < 0x20:
        return chr(_PICTURES + code)
    return "\N{SYMBOL FOR DELETE}" if code == 0x7F else f"⟨U+{code:04X}⟩"
