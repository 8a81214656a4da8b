"""Columns of 64-bit digests, 8 bytes a case: made one at a time, spelled out a block at a time."""

from __future__ import annotations

import sys
from hashlib import blake2b
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

Digests: TypeAlias = npt.NDArray[np.uint64]

_SPELLED = 4096  # digests: 64 KB of text at a time


class DigestColumn:
    """Collects digests of what is added, each taken together with the same `prefix`."""

    def __init__(self, prefix: bytes = b"") -> None:
        self._begun = blake2b(prefix, digest_size=8)
        self._bytes = bytearray()

    def add(self, data: bytes) -> None:
        digest = self._begun.copy()  # cheaper than a new one, with or without a prefix
        digest.update(data)
        self._bytes += digest.digest()

    def numbers(self) -> Digests:
        """The digests as numbers, in the column's own memory: nothing can be added any more."""
        numbers = np.frombuffer(self._bytes, dtype=np.uint64)
        return numbers.byteswap(inplace=True) if sys.byteorder == "little" else numbers


class Spelling:
    """Digests as records spell them, 16 hex digits each; cheap when they are asked for in order."""

    def __init__(self, digests: Digests) -> None:
        self._digests = digests
        self._begins = 0
        self._text = ""

    def at(self, position: int) -> str:
        place = (position - self._begins) * 16
        if not 0 <= place < len(self._text):
            self._begins, place = position, 0
            self._text = self._digests[position : position + _SPELLED].astype(">u8").tobytes().hex()
        return self._text[place : place + 16]


class Marks:
    """Digests of a file's blocks as they are read: a block that an earlier reading met too holds the same cases."""

    def __init__(self, before: Marks | None = None) -> None:
        self._before = before._met if before is not None else []
        self._met: list[bytes] = []
        self.same = False
        """Whether the block read last is what stood at its place in the reading before."""

    def meet(self, block: bytes) -> None:
        digest = blake2b(block, digest_size=16).digest()
        place = len(self._met)
        self._met.append(digest)
        self.same = place < len(self._before) and self._before[place] == digest
