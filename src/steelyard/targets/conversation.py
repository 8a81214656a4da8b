"""A case as the body of a request: encoded once, whatever is the same in every request encoded beforehand."""

from __future__ import annotations

import json
from typing import Any

import msgspec

from steelyard.errors import TargetError
from steelyard.records import EvalCase


class Conversation(msgspec.Struct):
    """What is asked of the model: turns that may grow, and the rest of the body, which stays."""

    turns: list[dict[str, Any]]
    rest: bytes = b""
    """More fields of the body, each with a comma before it."""


def asked_turns(case: EvalCase) -> list[dict[str, Any]]:
    """The case's messages and its prompt, in a list of its own."""
    turns = list(case.messages) if case.messages else []
    if case.prompt is not None:
        turns.append({"role": "user", "content": case.prompt})
    if not turns:
        raise TargetError("the case asks nothing: it has neither a prompt nor messages")
    return turns


def encoded(value: Any) -> bytes:
    """The value as JSON, lone surrogates escaped; TargetError for what JSON cannot say."""
    try:
        return msgspec.json.encode(value)
    except UnicodeEncodeError:
        return json.dumps(msgspec.to_builtins(value)).encode("ascii")
    except (TypeError, ValueError, RecursionError) as error:
        raise TargetError(f"the case cannot be written as JSON: {error}") from error
