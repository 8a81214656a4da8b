"""Text from models and cases with what cannot be seen made visible: for files that people open elsewhere."""

from __future__ import annotations

import re

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
