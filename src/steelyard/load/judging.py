"""A level's answers as a suite of their own: what judges are asked when the level is over, and can be resumed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec

from steelyard.contracts import Identity, InvocationContext
from steelyard.options import RunOptions
from steelyard.planning import plan_of
from steelyard.records import EvalCase, InvocationResponse
from steelyard.rescore import StoredAnswers
from steelyard.suite.cycle import cycling
from steelyard.suite.evalset import EvalSet

_ROUND = "#"
"""Between a case's id and the round in which it was sent."""


class LevelAnswers:
    """A target that answers the request `<case>#<round>` with what a load run has recorded for it."""

    def __init__(self, run: Path) -> None:
        self._stored = StoredAnswers(run)
        self.default_parallelism = self._stored.default_parallelism

    @property
    def model_id(self) -> str | None:
        return self._stored.model_id

    def identity(self) -> Identity:
        """Who answered in the level."""
        return self._stored.identity()

    async def invoke(self, case: EvalCase, context: InvocationContext) -> InvocationResponse:
        """The recorded answer, with the times of the call that was made then."""
        case_id, _, number = case.id.rpartition(_ROUND)
        asked = msgspec.structs.replace(case, id=case_id)
        return await self._stored.invoke(asked, msgspec.structs.replace(context, trial=int(number)))

    def close(self) -> None:
        """Let go of the run's file."""
        self._stored.close()


def requests_of(suite: EvalSet, options: RunOptions, requests: int) -> EvalSet:
    """The first so many requests of a load run, each a case of its own with its round in the id."""
    plan = plan_of(suite, [], options.replace(requests=None, duration=None, arrivals=None))

    def sent() -> Iterator[EvalCase]:
        for job in cycling(plan, requests=requests, duration=None).jobs():
            if job is not None:
                yield msgspec.structs.replace(job.case, id=f"{job.case.id}{_ROUND}{job.trial}")

    return EvalSet(id=suite.id, cases=list(sent()))
