"""Targets, work and an engine that write on a board, whichever process they are in."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections.abc import Callable
from typing import Any

from steelyard.engine.base import Engine
from steelyard.errors import TransientError
from steelyard.protocols import Emit, InFlight, Tally
from steelyard.records import EncodedRecord, EncodedRecords, EvalCase, InvocationResponse, Job, UnscoredAnswer
from tests.support.board import Board
from tests.support.journal import a_record


class Asking:
    """A target that notes each call: the case, the process, the moment."""

    default_parallelism = 1

    def __init__(
        self, board: Board, seconds: float = 0.02, model_id: str | None = None, tokens: int | None = None
    ) -> None:
        self.board = board
        self.seconds = seconds
        self.model_id = model_id
        self.tokens = tokens

    def identity(self) -> dict[str, Any]:
        return {"kind": "asking"}

    async def invoke(self, case: EvalCase, context: Any) -> InvocationResponse:
        self.board.note("called", case.id, os.getpid(), time.monotonic())
        await asyncio.sleep(self.seconds)
        return InvocationResponse(
            response_text=f"about {case.id}",
            time_to_last_token=self.seconds,
            num_tokens_input=self.tokens,
            num_tokens_output=None if self.tokens is None else 0,
        )


class AskedOfAll(Asking):
    """Answers nothing before this many processes were called."""

    def __init__(self, board: Board, processes: int) -> None:
        super().__init__(board)
        self.processes = processes

    async def invoke(self, case: EvalCase, context: Any) -> InvocationResponse:
        response = await super().invoke(case, context)
        while len({line[1] for line in self.board.lines("called")}) < self.processes:  # noqa: ASYNC110 - other processes
            await asyncio.sleep(0.01)
        return response


class Failing(Asking):
    """Cannot answer."""

    async def invoke(self, case: EvalCase, context: Any) -> InvocationResponse:
        await super().invoke(case, context)
        raise ValueError("broken")


class Seeing(Asking):
    """Tells what its session holds, after leaving its own mark there."""

    def __init__(self) -> None:
        self.model_id = None

    async def invoke(self, case: EvalCase, context: Any) -> InvocationResponse:
        context.session.data["seen"].append(case.id)
        said = [message["content"] for message in case.messages or []]
        return InvocationResponse(response_text=f"{' '.join(said)} {context.session.data['seen']}")


class Juror(Asking):
    """A judge's model: finds everything right."""

    def __init__(self, board: Board) -> None:
        super().__init__(board, 0.002, "j")

    async def invoke(self, case: EvalCase, context: Any) -> InvocationResponse:
        self.board.note("judged", case.id)
        await asyncio.sleep(self.seconds)
        return InvocationResponse(response_text='{"score": 1.0, "passed": true, "reason": "right"}')


def weather(city: str = "Rome") -> str:
    """The weather of a city."""
    return f"clear in {city}"


class Wordy(Asking):
    """Answers at once, at length."""

    def __init__(self, board: Board, kilobytes: int) -> None:
        super().__init__(board, 0.0)
        self.kilobytes = kilobytes

    async def invoke(self, case: EvalCase, context: Any) -> InvocationResponse:
        await super().invoke(case, context)
        return InvocationResponse(response_text=os.urandom(self.kilobytes * 512).hex())


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
        emit(UnscoredAnswer(record))
        await asyncio.sleep(0.5)
        os.kill(os.getpid(), signal.SIGKILL)


class Watched(Engine):
    """An engine that notes on a board which records have been taken in, and may take its time about each."""

    runs_in_other_processes = True

    def __init__(
        self, engine: Any, board: Board, seconds: float = 0.0, look: Callable[[], None] = lambda: None
    ) -> None:
        self._engine = engine
        self._board = board
        self._seconds = seconds
        self._look = look
        self.taken = 0
        self.nodes: set[str] = set()

    async def run(self, work: Any, jobs: Any, emit: Emit, **options: Any) -> Tally:
        def noting(record: Any) -> None:
            emit(record)
            for one in record.records if isinstance(record, EncodedRecords) else [record]:
                time.sleep(self._seconds)
                self._board.note("journalled", one.id)
                self.taken += 1
                if isinstance(one, EncodedRecord):
                    self.nodes.add(json.loads(one.line).get("node"))
            self._look()

        tally: Tally = await self._engine.run(work, jobs, noting, **options)
        return tally

    def in_flight(self) -> InFlight:
        flight: InFlight = self._engine.in_flight()
        return flight


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


def most_outstanding(board: Board) -> int:
    """The most cases that had been called and not been taken in, at any moment."""
    now = most = 0
    for word, *_ in board.lines():
        now += (word == "called") - (word == "journalled")
        most = max(most, now)
    return most
