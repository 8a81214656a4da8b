"""What the tests of the engine, of the work and of the runner share: jobs, targets that misbehave on order, drivers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from steelyard.engine.base import CancellationToken
from steelyard.protocols import InvocationContext, Scorer, Target
from steelyard.records import EvalCase, InvocationResponse, Job, Record, StoredSample, UnscoredAnswer
from steelyard.run.case import CaseRunner
from steelyard.scoring.pipeline import ScoringPipeline
from steelyard.suite.evalset import EvalSet


def make_job(index: int = 0, **case: Any) -> Job:
    """A job for the case `c<index>`."""
    return Job(index=index, trial=0, case=EvalCase(id=f"c{index}", **case), case_fp="f", scored_by="")


def make_jobs(count: int) -> Iterator[Job]:
    """Jobs c0, c1, ..., made as they are taken."""
    return (make_job(index) for index in range(count))


def make_suite(count: int, id: str = "suite", **case: Any) -> EvalSet:
    """A suite of the cases c0, c1, ..., each asking for its own number."""
    return EvalSet(id, [EvalCase(id=f"c{n}", prompt=f"what is {n}?", **case) for n in range(count)])


def drop(record: Record) -> None:
    """An `emit` for those who do not look."""


class Asked:
    """A Target over an async function of `case, context`, with none of CallableTarget's checks in between."""

    model_id: str | None = None
    default_parallelism = 1

    def __init__(self, answer: Callable[..., Any]) -> None:
        self._answer = answer

    def identity(self) -> dict[str, Any]:
        return {"kind": "asked"}

    async def invoke(self, case: EvalCase, context: InvocationContext) -> InvocationResponse:
        answer: InvocationResponse = await self._answer(case, context)
        return answer


def raising(error: BaseException) -> Asked:
    """A target that raises this."""

    async def answer(case: EvalCase, context: InvocationContext) -> InvocationResponse:
        raise error

    return Asked(answer)


def returning(value: object) -> Asked:
    """A target that gives this back, whatever it is."""

    async def answer(case: EvalCase, context: InvocationContext) -> Any:
        return value

    return Asked(answer)


def one_record(
    target: Target,
    scorers: Sequence[Scorer] = (),
    *,
    timeout: float | None = None,
    job: Job | None = None,
    token: CancellationToken | None = None,
) -> Record:
    """The one record that the work makes of a job."""
    records: list[Record] = []
    work = CaseRunner(target, ScoringPipeline(scorers), timeout=timeout, seed=0, token=token)

    def emit(item: Record | UnscoredAnswer | StoredSample) -> None:
        if isinstance(item, Record):
            records.append(item)

    asyncio.run(work(job or make_job(), emit))
    assert len(records) == 1
    return records[0]


class Gauge:
    """Counts how many are inside it at once, and knows the most there ever were."""

    def __init__(self) -> None:
        self.now = 0
        self.most = 0
        self.entered = 0

    def __enter__(self) -> Gauge:
        self.now += 1
        self.entered += 1
        self.most = max(self.most, self.now)
        return self

    def __exit__(self, *_: object) -> None:
        self.now -= 1


async def until(condition: Callable[[], bool], *, seconds: float = 10.0) -> None:
    """Give the loop turns until the condition holds; fails when it does not come to hold."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "what was waited for did not happen"
        await asyncio.sleep(0.001)


def wait_for(condition: Callable[[], bool], *, seconds: float = 10.0) -> None:
    """The same from code that is not async."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "what was waited for did not happen"
        time.sleep(0.002)
