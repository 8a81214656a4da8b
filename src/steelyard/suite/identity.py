"""Identity of cases: canonical bytes, 64-bit fingerprints of them, and digest collections in little memory.

A run keeps digests, not strings, for each case: a million cases cost a few tens of megabytes.
"""

from __future__ import annotations

import json
import sys
from bisect import bisect_left
from hashlib import blake2b
from typing import Any, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

from steelyard.attachments import (
    attached,
    attachment_name,
    has_attachments,
    identity,
    messages_by_content,
    messages_by_name,
)
from steelyard.records import CaseLimits, EvalCase

Digests: TypeAlias = npt.NDArray[np.uint64]

_SPELLED = 4096  # digests: 64 KB of text at a time

MIN_BATCH = 4096


class BadCase(ValueError):
    """A case that is invalid; the caller, which knows its file and line, adds the place."""


class _Asked(msgspec.Struct, omit_defaults=True):
    """What decides an automatic id: the question, and nothing that may be added later."""

    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    system_prompt: str | None = None
    tools: list[dict[str, Any]] | None = None
    attachments: list[str] = []


class _Seen(msgspec.Struct, omit_defaults=True):
    """What a target may see of a case, and so what its answer may depend on."""

    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    system_prompt: str | None = None
    tools: list[dict[str, Any]] | None = None
    metadata: dict[str, Any] = {}
    limits: CaseLimits | None = None
    attachments: list[list[str]] = []


class _Graded(msgspec.Struct, omit_defaults=True):
    """What a scorer compares an answer with."""

    expected: Any = None
    expected_trajectory: Any = None


def canonical(value: Any) -> bytes:
    """Return the canonical JSON of a value: keys sorted, UTF-8, no NaN or infinity (BadCase)."""
    try:
        encoded = _encode(value)
    except (UnicodeEncodeError, TypeError):  # lone surrogates, or keys that are not text
        return as_json(value, sort_keys=True, ascii_only=False).encode("utf-8", "surrogatepass")
    except RecursionError:
        raise BadCase("a value is nested too deeply to be written as JSON") from None
    if b"null" in encoded:  # msgspec writes NaN as null: check with the stricter encoder
        as_json(value)
    return encoded


def as_json(value: Any, *, sort_keys: bool = False, ascii_only: bool = True) -> str:
    """Return JSON that reads back unchanged, lone surrogates included; BadCase for what JSON cannot hold."""
    try:
        plain = msgspec.to_builtins(value, str_keys=True, order="deterministic", enc_hook=_from_numpy)
        return json.dumps(plain, sort_keys=sort_keys, allow_nan=False, ensure_ascii=ascii_only, separators=(",", ":"))
    except RecursionError:
        raise BadCase("a value is nested too deeply to be written as JSON") from None
    except (TypeError, ValueError) as error:
        raise BadCase(f"a value cannot be written as JSON: {error}") from error


def content_digest(case: EvalCase) -> int:
    """Return 48 bits (12 hex digits) of the question: the first half of an automatic id."""
    if has_attachments(case):
        names = [attachment_name(one) for one in attached(case)]
        asked = _Asked(case.prompt, messages_by_name(case.messages), case.system_prompt, case.tools, names)
    else:
        asked = _Asked(case.prompt, case.messages, case.system_prompt, case.tools)
    return int.from_bytes(blake2b(canonical(asked), digest_size=6).digest())


def seen(case: EvalCase) -> bytes:
    """Return what a target may see of a case, as canonical JSON."""
    if (case.messages is None and not case.attachments) or not has_attachments(case):
        return canonical(_Seen(case.prompt, case.messages, case.system_prompt, case.tools, case.metadata, case.limits))
    messages, contents = messages_by_content(case.messages), [identity(one) for one in attached(case)]
    more = (case.system_prompt, case.tools, case.metadata, case.limits, contents)
    return canonical(_Seen(case.prompt, messages, *more))


def graded(case: EvalCase) -> bytes:
    """Return what a scorer compares the answer to a case with, as canonical JSON."""
    return canonical(_Graded(case.expected, case.expected_trajectory))


def grading_prefix(scorers: bytes) -> bytes:
    """Return the prefix of `graded`: the length makes the split between the two unambiguous."""
    return b"%d:%b" % (len(scorers), scorers)


def case_fingerprint(case: EvalCase, more: bytes = b"") -> int:
    """Return 64 bits of what a target may see: a stored answer is valid for a case while this is unchanged.

    `more` is what it sees besides the case: the content of its workspace.
    """
    return _digest(seen(case) + more)


def grading_fingerprint(scorers: bytes, case: EvalCase) -> int:
    """Return 64 bits of how a case is graded: stored scores are valid while this is unchanged."""
    return _digest(grading_prefix(scorers) + graded(case))


def as_hex(digest: int) -> str:
    """Return a 64-bit digest as records write it: 16 hex digits."""
    return f"{digest:016x}"


def _digest(data: bytes) -> int:
    return int.from_bytes(blake2b(data, digest_size=8).digest())


def _from_numpy(value: Any) -> Any:
    """Convert numpy's scalars and arrays, which are common in cases built from data frames."""
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"{type(value).__name__} is not JSON")


_encode = msgspec.json.Encoder(order="sorted", enc_hook=_from_numpy).encode


class DigestColumn:
    """A column of digests, each of the same `prefix` and the added data."""

    def __init__(self, prefix: bytes = b"") -> None:
        self._begun = blake2b(prefix, digest_size=8)
        self._bytes = bytearray()

    def add(self, data: bytes) -> None:
        digest = self._begun.copy()  # cheaper than a new hash, with or without a prefix
        digest.update(data)
        self._bytes += digest.digest()

    def numbers(self) -> Digests:
        """Return the digests as numbers that share the column's memory: nothing can be added afterwards."""
        numbers = np.frombuffer(self._bytes, dtype=np.uint64)
        return numbers.byteswap(inplace=True) if sys.byteorder == "little" else numbers


class Spelling:
    """Digests as records write them, 16 hex digits each; fast when they are read in order."""

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
    """Digests of a file's blocks as they are read, compared with an earlier reading: equal blocks hold equal cases."""

    def __init__(self, before: Marks | None = None) -> None:
        self._before = before._met if before is not None else []
        self._met: list[bytes] = []
        self.same = False
        """Whether the last block equals the one at its place in the earlier reading."""

    def meet(self, block: bytes) -> None:
        digest = blake2b(block, digest_size=16).digest()
        place = len(self._met)
        self._met.append(digest)
        self.same = place < len(self._before) and self._before[place] == digest


class Occurrences:
    """Numbers each digest's occurrences from 1, in 8 bytes for each that occurs once.

    Digests that occurred once are kept in a sorted array; new ones wait in a small set until there are enough to
    merge. Only a repeated digest costs a dictionary entry. Where the repeated ones are known from an earlier pass
    (`among`), only those are kept.
    """

    def __init__(self, among: frozenset[int] | None = None) -> None:
        self._among = among
        self._counts: dict[int, int] = {}
        self._recent: set[int] = set()
        self._settled = np.empty(0, dtype=np.uint64).data

    @property
    def repeated(self) -> frozenset[int]:
        """The digests that occurred more than once."""
        return frozenset(digest for digest, count in self._counts.items() if count > 1)

    def count(self, digest: int) -> int:
        """Count an occurrence of this digest and return its number."""
        count = self._counts.get(digest, 0)
        if not count:
            if self._among is not None:
                if digest not in self._among:
                    return 1
            elif digest not in self._recent and not self._is_settled(digest):
                self._remember(digest)
                return 1
            else:
                count = 1
        self._counts[digest] = count + 1
        return count + 1

    def _is_settled(self, digest: int) -> bool:
        place = bisect_left(self._settled, digest)
        return place < len(self._settled) and self._settled[place] == digest

    def _remember(self, digest: int) -> None:
        self._recent.add(digest)
        # Merge at a fixed fraction: all merges together cost O(n log n), and the set, which is bulky, stays small.
        if len(self._recent) >= max(MIN_BATCH, len(self._settled) // 16):
            recent = np.fromiter(self._recent, dtype=np.uint64, count=len(self._recent))
            self._recent.clear()
            merged = np.concatenate([np.asarray(self._settled), recent])
            merged.sort()
            self._settled = merged.data
