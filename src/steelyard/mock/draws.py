"""The chance in a request: drawn from its body and how often that came before, never from the order of arrival."""

from __future__ import annotations

import struct
from hashlib import blake2b

import msgspec

_LOTS = struct.Struct("<14I8x")
_ALL = 2**32


class Lots(msgspec.Struct, gc=False):
    """One lot, of 32 bits, for each thing that is left to chance, so that none changes what another decides."""

    error: int
    drop: int
    torn: int
    tear: int
    slow_first: int
    latency: int
    pace: int
    output_tokens: int
    reasoning_tokens: int
    right: int
    tool_call: int
    tool: int
    refusal: int
    words: int


def hits(lot: int, rate: float) -> bool:
    """Whether a lot falls on something that happens at this rate."""
    return lot < rate * _ALL


def pick(lot: int, count: int) -> int:
    """A number below `count`, each as likely as the others."""
    return lot * count // _ALL


def share(lot: int) -> float:
    """The lot as a number between 0 and 1, both excluded."""
    return (lot + 0.5) / _ALL


class Draw(msgspec.Struct, frozen=True, gc=False):
    """What chance has to say about one request."""

    id: str
    nth: int
    """How often the same body came before."""
    digest: bytes
    """Of the body alone."""
    raw: bytes

    def lots(self) -> Lots:
        return Lots(*_LOTS.unpack(self.raw))


class Dice:
    """Draws from (seed, body, how often this body came before)."""

    def __init__(self, seed: int) -> None:
        self._key = seed.to_bytes(16, signed=True) if -(2**127) <= seed < 2**127 else str(seed).encode()[:64]
        self._seen: dict[bytes, int] = {}

    def draw(self, body: bytes) -> Draw:
        digest = blake2b(body, digest_size=8).digest()
        nth = self._seen.get(digest, 0)
        self._seen[digest] = nth + 1
        raw = blake2b(b"%b%d" % (digest, nth), digest_size=64, key=self._key).digest()
        return Draw(raw[-8:].hex(), nth, digest, raw)

    def reset(self) -> None:
        """Forget which bodies came before."""
        self._seen.clear()
