"""Searching the records of a run for words: one pass over the journal, within bounds."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt

from steelyard.journal.files import OUTPUTS
from steelyard.journal.index import Rows

LONGEST_QUERY = 200
_MOST_SECONDS = 3.0
_MOST_BYTES = 1 << 30
_LOOK_EVERY = 256


class _Words(msgspec.Struct, gc=False):
    """What is looked at of a record."""

    id: str
    response_text: str | None = None
    input_prompt: str | None = None
    error: str | None = None


_decode = msgspec.json.Decoder(_Words).decode


class Found(msgspec.Struct, frozen=True):
    """Which records hold the words, and how many were looked at before time or patience ran out."""

    records: npt.NDArray[np.bool_]
    searched: int


def terms_of(query: str) -> tuple[str, ...]:
    """The words of a query, in small letters; a record must hold all of them."""
    return tuple(query[:LONGEST_QUERY].lower().split())


def search(run: Path, rows: Rows, terms: tuple[str, ...], clock: Callable[[], float] = time.monotonic) -> Found:
    """Look through the records of these rows, in the order in which they lie in the journal."""
    found = np.zeros(len(rows), dtype=bool)
    deadline, left, searched = clock() + _MOST_SECONDS, _MOST_BYTES, 0
    order = np.argsort(rows["offset"], kind="stable")
    places = zip(order.tolist(), rows["offset"][order].tolist(), rows["length"][order].tolist(), strict=True)
    with open(run / OUTPUTS, "rb", buffering=1 << 20) as file:
        for record, offset, length in places:
            if left < length or (searched % _LOOK_EVERY == 0 and clock() > deadline):
                break
            if file.tell() != offset:
                file.seek(offset)
            found[record] = _holds(file.read(length), terms)
            left -= length
            searched += 1
    return Found(found, searched)


def _holds(line: bytes, terms: tuple[str, ...]) -> bool:
    try:
        words = _decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return False
    text = "\n".join((words.id, words.input_prompt or "", words.response_text or "", words.error or "")).lower()
    return all(term in text for term in terms)
