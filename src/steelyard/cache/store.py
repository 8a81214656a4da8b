"""What a store of responses promises, and which responses may go into one."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import msgspec

from steelyard.errors import SteelyardError
from steelyard.records import InvocationResponse

_CUT_SHORT = frozenset(
    {
        "length", "max_tokens", "max_output_tokens", "max_completion_tokens", "max_turns", "max_steps",
        "model_context_window_exceeded", "context_length_exceeded", "incomplete", "pause_turn",
        "content_filter", "content_filtered", "safety", "recitation", "blocklist", "prohibited_content", "spii",
        "refusal", "guardrail_intervened", "malformed_function_call",
        "cancelled", "canceled", "abort", "aborted", "interrupted",
        "timeout", "timed_out", "error", "failed",
    }
)  # fmt: skip
"""Stop reasons, as the providers spell them, of an answer that something other than the model brought to its end."""


class StoreError(SteelyardError):
    """A store could not do as asked. A run warns and asks the target instead."""


class StoreInfo(msgspec.Struct, frozen=True):
    """How much a store holds."""

    entries: int
    bytes: int


@runtime_checkable
class EvaluationDataStore(Protocol):
    """Where responses are kept. `get` is called on the event loop and should take well under a millisecond;
    `put` is called in a thread. Both raise StoreError when the store fails; a miss is None.
    """

    def get(self, eval_set_id: str, case_id: str, key: str) -> InvocationResponse | None: ...

    def put(self, eval_set_id: str, case_id: str, key: str, response: InvocationResponse) -> None: ...


@runtime_checkable
class ManagedStore(EvaluationDataStore, Protocol):
    """A store that the command line can look after."""

    def info(self) -> StoreInfo:
        """How many entries there are, and the bytes they take on disk."""
        ...

    def clear(self, eval_set_id: str | None = None) -> int:
        """Remove the entries of one eval set, or all of them; returns how many."""
        ...

    def close(self) -> None: ...


def is_cacheable(response: object) -> bool:
    """Whether a response completed normally: an answer, no error, not cancelled, not cut short by a limit or filter."""
    if not isinstance(response, InvocationResponse):
        return False
    if response.error is not None or response.error_type is not None:
        return False
    if response.response_text is None and not response.messages:
        return False  # nothing was said: a placeholder, not an answer
    reason = response.stop_reason
    return reason is None or (isinstance(reason, str) and _spelled(reason) not in _CUT_SHORT)


def check_cacheable(response: InvocationResponse) -> None:
    """StoreError for a response that must never be served later; callers ask `is_cacheable` first."""
    if not is_cacheable(response):
        given = type(response).__name__
        if isinstance(response, InvocationResponse):
            given = f"error={response.error!r:.200}, stop_reason={response.stop_reason!r:.50}"
        raise StoreError(f"only a response that completed normally may be stored, got {given}")


def _spelled(reason: str) -> str:
    return reason.strip().lower().replace("-", "_").replace(" ", "_")
