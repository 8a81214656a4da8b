"""Runs that are killed while scorers run: functions in threads, async ones, classes, and judges after them.

As a program (`python -m tests.support.scored RUN LOG KIND NTH`) it is a run that kills itself in the nth call of its
scorer, while the other calls are held.
"""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from steelyard import EvalCase, InvocationResponse, Runner
from tests.support.crash import die
from tests.support.judged import Agent, Assessor, runner_of, suite_of

CASES = 12
PARALLELISM = 4
NEVER = 0


class Log:
    """A file to which each call is written before it does anything."""

    def __init__(self, path: Path) -> None:
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    def note(self, word: str, case_id: str) -> None:
        os.write(self._descriptor, f"{word} {case_id}\n".encode())


class SlowScorers:
    """Scorers of each kind. With a moment to die, each call but the nth waits for an end that does not come."""

    def __init__(self, log: Log, nth: int) -> None:
        self._log = log
        self._nth = nth
        self._calls = 0
        self._lock = threading.Lock()

    def _begin(self, case: EvalCase) -> bool:
        """Note the call and die in the nth; whether the others are to be held."""
        self._log.note("scoring", case.id)
        with self._lock:
            self._calls += 1
            if self._calls == self._nth:
                die()
        return self._nth != NEVER and self._calls > self._nth - PARALLELISM

    def thread(self, case: EvalCase, response: InvocationResponse) -> float:
        if self._begin(case):
            threading.Event().wait()
        return float(response.response_text == f"answer to {case.id}")

    async def coroutine(self, case: EvalCase, response: InvocationResponse) -> float:
        if self._begin(case):
            await asyncio.Event().wait()
        return float(response.response_text == f"answer to {case.id}")

    def score(self, case: EvalCase, response: InvocationResponse) -> Any:
        """As an object: called in the event loop itself, which it would block."""
        self._begin(case)
        from steelyard import Score

        return Score("object", float(response.response_text == f"answer to {case.id}"))


def scorers_of(kind: str, log: Log, nth: int) -> list[Any]:
    slow = SlowScorers(log, nth)
    judge = Assessor(on_call=lambda case_id, run: log.note("judge", case_id)).judge(name="judge")
    kinds: dict[str, Callable[[], list[Any]]] = {
        "thread": lambda: [slow.thread],
        "async": lambda: [slow.coroutine],
        "object": lambda: [slow],
        "judge after a thread": lambda: [judge, slow.thread],
        "thread after a built-in": lambda: ["exact", slow.thread],
    }
    return kinds[kind]()


KINDS = ("thread", "async", "object", "judge after a thread", "thread after a built-in")


def run_in(directory: Path, log_path: Path, kind: str, nth: int = NEVER) -> Runner:
    log = Log(log_path)
    agent = Agent(on_call=lambda case_id: log.note("agent", case_id))
    scorers = scorers_of(kind, log, nth)
    return runner_of(agent, suite_of(CASES), scorers, parallelism=PARALLELISM, output_path=directory)


if __name__ == "__main__":
    run_in(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], int(sys.argv[4])).run_sync()
