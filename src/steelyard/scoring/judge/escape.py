"""Escaping: how untrusted text is put into a judge's prompt so that it cannot be taken for part of the prompt.

A text is put between two marker lines that carry a code. The code is derived from the texts and occurs in none of
them, so no text can contain its own end marker; and the same texts always get the same code.
"""

from __future__ import annotations

import hashlib
import itertools
import re
import unicodedata
from collections.abc import Sequence

ESCAPE_VERSION = 1
"""Part of a judge's identity. Raise it when the same texts would be escaped differently."""

MAX_TEXT = 50_000
"""Characters of one text that a judge is shown; the middle of a longer one is cut."""

_SLOT = "\x00"
_SLOTS = re.compile(r"\x00(\d+)\x00")
_LINE_ENDS = re.compile(r"\r\n?|[\x85\u2028\u2029]")


def slot(number: int) -> str:
    """Return the placeholder of text `number` in a message."""
    return f"{_SLOT}{number}{_SLOT}"


def holds_slot_marks(text: str) -> bool:
    """Whether a text contains the character that marks placeholders, and so cannot be used as a message."""
    return _SLOT in text


def fill(message: str, texts: Sequence[str]) -> str:
    """Put each text, escaped, in its slot; the message's first line names the code of the markers."""
    shown = [_visible(text) for text in texts]
    code = escape_code([part for parts in shown for part in parts])

    def escaped(found: re.Match[str]) -> str:
        number = int(found[1])
        body = f"\n<<<cut {code}: {_left_out(texts[number]):,} characters>>>\n".join(shown[number])
        above = "" if message[found.start() - 1 : found.start()] in ("", "\n") else "\n"
        below = "" if message[found.end() : found.end() + 1] in ("", "\n") else "\n"
        return f"{above}<<<data {code}>>>\n{body}\n<<<end {code}>>>{below}"

    return f"The code of this message is {code}.\n\n{_SLOTS.sub(escaped, message)}"


def escape_code(texts: Sequence[str]) -> str:
    """Return 16 hex digits that occur in none of the texts, in any spelling; the same for the same texts."""
    digest = hashlib.sha256()
    for text in texts:
        data = text.encode("utf-8", "surrogatepass")
        digest.update(b"%d:%b" % (len(data), data))  # the length keeps ["ab", "c"] apart from ["a", "bc"]
    plain = [unicodedata.normalize("NFKC", text).lower() for text in texts]
    for number in itertools.count():
        attempt = digest.copy()
        attempt.update(b"#%d" % number)
        code = attempt.hexdigest()[:16]
        if not any(code in text for text in plain):
            return code
    raise AssertionError("unreachable: the count has no end")


def _visible(text: str) -> list[str]:
    """Return a text as shown: one part, or its two ends when it is too long; nothing in it is invisible."""
    if len(text) > MAX_TEXT:
        half = MAX_TEXT // 2
        return [_without_controls(text[:half]), _without_controls(text[-half:])]
    return [_without_controls(text)]


def _left_out(text: str) -> int:
    return len(text) - MAX_TEXT // 2 * 2


def _without_controls(text: str) -> str:
    return _LINE_ENDS.sub("\n", text).translate(_VISIBLE)


def _visible_table() -> dict[int, str]:
    """Map control characters to their pictures, and bidi marks, hidden characters and surrogates to U+FFFD."""
    hidden = [*range(0x80, 0xA0), 0x61C, 0x200E, 0x200F, *range(0x202A, 0x202F), *range(0x2066, 0x206A)]
    hidden += [*range(0xD800, 0xE000), *range(0xE0000, 0xE0080), 0xFEFF, 0xFFFE, 0xFFFF]
    pictures = {code: chr(0x2400 + code) for code in range(0x20) if chr(code) not in "\n\t"}
    return pictures | {0x7F: "\u2421"} | dict.fromkeys(hidden, "\ufffd")


_VISIBLE = _visible_table()
