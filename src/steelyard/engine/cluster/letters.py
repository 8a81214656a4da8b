"""What the driver of a run and its workers say to each other: letters one way, batches the other."""

from __future__ import annotations

from typing import Any, TypeAlias

import msgspec

from steelyard.records import Job
from steelyard.stats.lag import ClientLoad

Item: TypeAlias = tuple[str, int, Any]
"""What a worker has to say: its kind, the ticket or number it is about, and the rest (pickled where it is a record)."""

SAID, ENDED, RETURNED, CALL, OVER = "said", "ended", "returned", "call", "over"


class Letter(msgspec.Struct):
    """From the driver: jobs with their tickets, and whatever else has changed. What is None has not."""

    jobs: list[tuple[int, Job]] = []
    share: int | None = None
    """How many calls the worker may have in flight."""
    number: int = 0
    """Of the share, counting up: a batch says which one it knew."""
    answers: list[tuple[int, Any]] = []
    """To what the worker called for, by the call's number."""
    overloads: list[tuple[int, float | None]] = []
    """Endpoints that were too busy for another worker, and how long they asked to be left alone."""
    recall: int = 0
    """So many jobs that have not begun are wanted back."""
    no_more: bool = False
    cancelled: str | None = None


class Batch(msgspec.Struct):
    """From a worker: what happened since the last one, in order, and how it stands."""

    items: list[Item]
    inside: int
    """Calls in flight."""
    peak: int
    """The most there were since the last batch."""
    share_number: int
    """The last share it heard of."""


class Ending(msgspec.Struct):
    """How the work of one worker ended."""

    failure: bytes | None = None
    """The exception that ended the run, pickled."""
    load: ClientLoad | None = None


class Greeting(msgspec.Struct):
    """Who a worker is and what it runs on."""

    node: str
    pid: int
    python: str
    steelyard: str
    ray: str
