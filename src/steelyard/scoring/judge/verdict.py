"""Strict parsing of a judge's reply: one JSON verdict, or an error that can be shown to the judge."""

from __future__ import annotations

import json
import math
import re
from typing import Any, NamedTuple

import msgspec

from steelyard.records import InvocationResponse

RULES_VERSION = 1
"""Part of a judge's identity. Raise it when the same reply would be read differently."""

_MAX_REPLY = 100_000
_MAX_REASON = 2_000
_MAX_TRIES = 200
_OPEN_CODE_BLOCK = re.compile(r"```\w{0,20}\Z")
_THOUGHT_BEGINS, _THOUGHT_ENDS = "<think>", "</think>"


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """A judge's verdict: a score within 0..1, and `passed` where the judge gave it."""

    score: float
    passed: bool | None = None
    reason: str | None = None


class NoVerdict(ValueError):
    """A reply that is not one verdict; the message says why, without quoting the reply."""


class _Found(NamedTuple):
    value: dict[str, Any]
    start: int
    end: int


def read_verdict(reply: str) -> Verdict:
    """Read the verdict that a reply is, or ends with after some reasoning; NoVerdict for anything less clear."""
    if len(reply) > _MAX_REPLY:
        raise NoVerdict(f"the reply has {len(reply):,} characters, more than {_MAX_REPLY:,}")
    text = _after_thoughts(reply.strip())
    if not text:
        raise NoVerdict("the reply is empty")
    found = _objects(text)
    verdicts = [one for one in found if "score" in one.value]
    if not verdicts:
        raise NoVerdict("the JSON object has no score" if found else "there is no JSON object in the reply")
    last = verdicts[-1]
    if any(one.value != last.value for one in verdicts):
        raise NoVerdict(f"the reply has {len(verdicts)} verdicts that differ")
    before, after = text[: last.start].rstrip(), text[last.end :].strip()
    if after and not (after == "```" and _OPEN_CODE_BLOCK.search(before)):
        raise NoVerdict("there is text after the verdict")
    return _checked(last.value)


def is_verdict(response: InvocationResponse) -> bool:
    """Whether a judge's reply can be read."""
    try:
        read_verdict(response.response_text or "")
    except NoVerdict:
        return False
    return True


def _after_thoughts(text: str) -> str:
    """Return what follows a reasoning block: verdicts inside it are not the model's verdict.

    Only a block at the start of the reply counts: later, the tag may be quoted from the answer.
    """
    if not text.startswith(_THOUGHT_BEGINS):
        return text
    _, closed, rest = text.partition(_THOUGHT_ENDS)
    if not closed:
        raise NoVerdict("the reply ends within its reasoning")
    return rest.strip()


def _objects(text: str) -> list[_Found]:
    """Return the top-level JSON objects of a text.

    After a failure the search continues where the object broke off, so that the inside of a truncated one is not
    taken for a verdict.
    """
    found: list[_Found] = []
    position = 0
    for _ in range(_MAX_TRIES):
        start = text.find("{", position)
        if start < 0:
            return found
        try:
            value, position = _DECODER.raw_decode(text, start)
            found.append(_Found(value, start, position))
        except json.JSONDecodeError as error:
            position = max(error.pos, start + 1)
        except NoVerdict:
            raise
        except (RecursionError, ValueError) as error:  # nested without end, or a number of thousands of digits
            raise NoVerdict("the JSON cannot be read") from error
    raise NoVerdict("there are too many braces in the reply")


def _checked(value: dict[str, Any]) -> Verdict:
    score, passed, reason = value["score"], value.get("passed"), value.get("reason")
    if isinstance(score, bool) or not isinstance(score, (int, float)):
        raise NoVerdict("score is not a number")
    if passed is not None and not isinstance(passed, bool):
        raise NoVerdict("passed is neither true nor false")
    if reason is not None and not isinstance(reason, str):
        raise NoVerdict("reason is not a text")
    if isinstance(score, float) and not math.isfinite(score):
        raise NoVerdict("score is not a finite number")
    reason = _cut(reason)
    clamped = min(max(0, score), 1)
    if clamped != score:
        reason = with_note(reason, f"score {_short(score)} clamped to {clamped}")
    return Verdict(score=float(clamped), passed=passed, reason=reason)


def with_note(reason: str | None, note: str) -> str:
    """Append our note to a reason."""
    return f"{reason} [{note}]" if reason else f"[{note}]"


def _cut(reason: str | None) -> str | None:
    return reason if reason is None or len(reason) <= _MAX_REASON else f"{reason[:_MAX_REASON]}…"


def _short(score: float) -> str:
    return f"{score:g}" if abs(score) < 1e300 else "beyond 1e300"


def _refuse(constant: str) -> Any:
    raise NoVerdict(f"{constant} is not JSON")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        raise NoVerdict("a key is duplicated in the JSON object")
    return value


_DECODER = json.JSONDecoder(parse_constant=_refuse, object_pairs_hook=_unique)
