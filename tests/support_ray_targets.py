"""Targets, work and an engine that write on a board, whichever process they are in."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from typing import Any

from steelyard.contracts import Emit, Tally
from steelyard.errors import TransientError
from steelyard.records import EvalCase, InvocationResponse, Job, Unjudged
from support_board import Board
from support_journal import a_record


class Asking:
    """A target that notes each call: the case, the process, the moment."""

    model_id: str | None = None
    default_parallelism = 1

    def __init__(self, board: Board, seconds: float = 0.02) -> None:
        self.board = board
        self.seconds = seconds

    def identity(self) -> dict[str, Any]:
        return {"kind": "asking"}

    async def invoke(self, case: EvalCase, context: Any) -> InvocationResponse:
        self.board.note("called", case.id, os.getpid(), time.monotonic())
        await asyncio.sleep(self.seconds)
        return InvocationResponse(response_text=f"about {case.id}", time_to_last_token=self.seconds)


class Deadly(Asking):
    """Kills its process when it is asked about one case, and only when others are in flight there."""

    def __init__(self, board: Board, case_id: str) -> None:
        super().__init__(board)
        self.case_id = case_id

    async def invoke(self, case: EvalCase, context: Any) -> InvocationResponse:
        if case.id == self.case_id:
            self.board.note("killing", os.getpid())
            await asyncio.sleep(0.05)
            os.kill(os.getpid(), signal.SIGKILL)
        return await super().invoke(case, context)


class RefusesOnce(Asking):
    """At the other end of a wire: refuses one case the first time, and asks to be left alone for a second."""

    endpoint = "http://refusing:80"

    def check(self) -> None: ...

    async def open(self, parallelism: int) -> None:
        self.board.note("opened", parallelism)

    async def close(self) -> None:
        self.board.note("closed")

    async def invoke(self, case: EvalCase, context: Any) -> InvocationResponse:
        if case.id == "c100" and context.attempt == 1:
            self.board.note("refused", os.getpid(), time.monotonic())
            raise TransientError("too many", retry_after=1.0, overloaded=True)
        return await super().invoke(case, context)


class DiesBeforeJudging:
    """Work that answers, says so, and takes its process with it; given the stored answer, it only judges."""

    def __init__(self, board: Board) -> None:
        self.board = board

    async def __call__(self, job: Job, emit: Emit) -> None:
        record = a_record(id=job.case.id, index=job.index)
        if job.stored is not None:
            self.board.note("judged", job.index)
            emit(job.stored)
            return
        self.board.note("asked", job.index)
        emit(Unjudged(record))
        await asyncio.sleep(0.5)
        os.kill(os.getpid(), signal.SIGKILL)


class Watched:
    """An engine that notes on a board which records have been taken in."""

    works_elsewhere = True

    def __init__(self, engine: Any, board: Board) -> None:
        self._engine = engine
        self._board = board
        self.in_flight = engine.in_flight

    async def run(self, work: Any, jobs: Any, emit: Emit, **options: Any) -> Tally:
        def noting(record: Any) -> None:
            emit(record)
            self._board.note("journalled", record.id)

        tally: Tally = await self._engine.run(work, jobs, noting, **options)
        return tally


def called_when_journalled(board: Board) -> list[str]:
    """The cases that were called although their records had been taken in."""
    journalled: set[str] = set()
    found = []
    for word, name, *_ in board.lines():
        if word == "journalled":
            journalled.add(name)
        elif word == "called" and name in journalled:
            found.append(name)
    return found
