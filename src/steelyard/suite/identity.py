"""What makes a case the same case: canonical bytes, and the 64-bit digests taken of them.

Digests, not strings, are what a run keeps for each case: a million cases cost a few tens of megabytes.
"""

from __future__ import annotations

import json
from hashlib import blake2b
from typing import Any

import msgspec

from steelyard.records import EvalCase


class BadCase(ValueError):
    """A case that cannot be asked or told apart; whoever knows where it stands adds the place."""


class _Asked(msgspec.Struct, omit_defaults=True):
    """What decides an automatic id: the question, and nothing that may be added to it later."""

    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    system_prompt: str | None = None
    tools: list[dict[str, Any]] | None = None


class _Seen(msgspec.Struct, omit_defaults=True):
    """What a target may see of a case, and so what its answer may depend on."""

    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    system_prompt: str | None = None
    tools: list[dict[str, Any]] | None = None
    metadata: dict[str, Any] = {}


class _Graded(msgspec.Struct, omit_defaults=True):
    """What a scorer holds an answer against."""

    expected: Any = None
    expected_trajectory: Any = None


def canonical(value: Any) -> bytes:
    """The one JSON spelling of a value: keys sorted, UTF-8, no NaN or infinity (BadCase)."""
    try:
        encoded = _encode(value)
    except (UnicodeEncodeError, TypeError):  # lone surrogates, or keys that are not text
        return as_json(value, sort_keys=True, ascii_only=False).encode("utf-8", "surrogatepass")
    except RecursionError:
        raise BadCase("a value is nested too deeply to be written as JSON") from None
    if b"null" in encoded:  # msgspec writes NaN as null: let the stricter encoder look at it
        as_json(value)
    return encoded


def as_json(value: Any, *, sort_keys: bool = False, ascii_only: bool = True) -> str:
    """JSON text that reads back as it was, lone surrogates included; BadCase for what JSON cannot hold."""
    try:
        plain = msgspec.to_builtins(value, str_keys=True, order="deterministic", enc_hook=_from_numpy)
        return json.dumps(plain, sort_keys=sort_keys, allow_nan=False, ensure_ascii=ascii_only, separators=(",", ":"))
    except RecursionError:
        raise BadCase("a value is nested too deeply to be written as JSON") from None
    except (TypeError, ValueError) as error:
        raise BadCase(f"a value cannot be written as JSON: {error}") from error


def content_digest(case: EvalCase) -> int:
    """48 bits (12 hex digits) of what is asked: the first half of an automatic id."""
    asked = _Asked(case.prompt, case.messages, case.system_prompt, case.tools)
    return int.from_bytes(blake2b(canonical(asked), digest_size=6).digest())


def seen(case: EvalCase) -> bytes:
    """What a target may see of a case, in its one spelling."""
    return canonical(_Seen(case.prompt, case.messages, case.system_prompt, case.tools, case.metadata))


def graded(case: EvalCase) -> bytes:
    """What a scorer holds the answer to a case against, in its one spelling."""
    return canonical(_Graded(case.expected, case.expected_trajectory))


def grading_prefix(scorers: bytes) -> bytes:
    """What comes before `graded`: its length keeps the two apart from any other split of the same bytes."""
    return b"%d:%b" % (len(scorers), scorers)


def case_fingerprint(case: EvalCase) -> int:
    """64 bits of what a target may see: a stored answer counts for a case while this is unchanged."""
    return _digest(seen(case))


def grading_fingerprint(scorers: bytes, case: EvalCase) -> int:
    """64 bits of how a case is graded: stored scores count while this is unchanged."""
    return _digest(grading_prefix(scorers) + graded(case))


def as_hex(digest: int) -> str:
    """A 64-bit digest as a record spells it: 16 hex digits."""
    return f"{digest:016x}"


def _digest(data: bytes) -> int:
    return int.from_bytes(blake2b(data, digest_size=8).digest())


def _from_numpy(value: Any) -> Any:
    """numpy's scalars and arrays as Python's own; they are common in cases built from data frames."""
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"{type(value).__name__} is not JSON")


_encode = msgspec.json.Encoder(order="sorted", enc_hook=_from_numpy).encode
