"""Agents and judges that count their calls, and runs in which the one is judged by the other.

As a program (`python -m tests.support.judged RUN LOG MOMENT`) it is a judged run that kills itself at a moment.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from steelyard import EvalCase, EvalSet, InvocationContext, InvocationResponse, Result, Runner
from steelyard.scoring import Judge

Reply = float | Exception
Call = tuple[str, int, int]
"""What a judge was asked: case id, trial, run."""


class Gauge:
    """How many model calls are out at once, and the most there were."""

    def __init__(self) -> None:
        self.now = 0
        self.peak = 0

    def __enter__(self) -> None:
        self.now += 1
        self.peak = max(self.peak, self.now)

    def __exit__(self, *_: object) -> None:
        self.now -= 1


class Agent:
    """A target that answers after some seconds and knows whom it was asked for, and when it had answered."""

    default_parallelism = 4

    def __init__(
        self,
        text: Callable[[EvalCase, InvocationContext], str] = lambda case, context: f"answer to {case.id}",
        *,
        seconds: float = 0.0,
        model_id: str = "agent",
        gauge: Gauge | None = None,
        on_call: Callable[[str], None] = lambda case_id: None,
        blocking: bool = False,
        **parameters: Any,
    ) -> None:
        self.model_id = model_id
        self.calls: list[tuple[str, int]] = []
        self.answered: list[float] = []
        self._text = text
        self._seconds = seconds
        self._gauge = gauge or Gauge()
        self._on_call = on_call
        self._blocking = blocking
        self._parameters = parameters

    def identity(self) -> dict[str, Any]:
        return {"kind": "agent", "model": self.model_id, **self._parameters}

    async def invoke(self, case: EvalCase, context: InvocationContext) -> InvocationResponse:
        self.calls.append((case.id, context.trial))
        self._on_call(case.id)
        with self._gauge:
            if self._blocking:
                await asyncio.to_thread(time.sleep, self._seconds)
            else:
                await asyncio.sleep(self._seconds)
        self.answered.append(time.monotonic())
        return InvocationResponse(response_text=self._text(case, context), stop_reason="stop")


class Assessor:
    """A judge's model: says the score that `reply` gives for (case, trial, run), or raises it."""

    default_parallelism = 4

    def __init__(
        self,
        reply: Callable[[str, int, int], Reply] = lambda case_id, trial, run: 1.0,
        *,
        seconds: float = 0.0,
        gauge: Gauge | None = None,
        on_call: Callable[[str, int], None] = lambda case_id, run: None,
        model_id: str = "assessor",
    ) -> None:
        self.model_id = model_id
        self.calls: list[Call] = []
        self._reply = reply
        self._seconds = seconds
        self._gauge = gauge or Gauge()
        self._on_call = on_call

    def identity(self) -> dict[str, Any]:
        return {"kind": "assessor", "model": self.model_id}

    async def invoke(self, case: EvalCase, context: InvocationContext) -> InvocationResponse:
        case_id, _, trial = context.case_id.rpartition("#")
        run = context.trial
        self.calls.append((case_id, int(trial), run))
        self._on_call(case_id, run)
        with self._gauge:
            await asyncio.sleep(self._seconds)
        reply = self._reply(case_id, int(trial), run)
        if isinstance(reply, Exception):
            raise reply
        verdict = {"score": reply, "passed": reply >= 0.5, "reason": f"run {run}"}
        return InvocationResponse(response_text=json.dumps(verdict))

    def judge(self, **arguments: Any) -> Judge:
        if "template" not in arguments:
            arguments = {"prompt": "helpfulness_v1", **arguments}
        return Judge(model=self.model_id, target=self, **arguments)


def suite_of(count: int, **case: Any) -> EvalSet:
    """Cases c00, c01, …; what is given is the same in all of them."""
    return EvalSet("judged", [EvalCase(id=f"c{n:02}", prompt=f"question {n}", **case) for n in range(count)])


def runner_of(agent: Any, suite: EvalSet, scorers: list[Any], **options: Any) -> Runner:
    return Runner(agent, suite, scorers, **{"parallelism": 4, "progress": "off", **options})


def run(agent: Any, suite: EvalSet, scorers: list[Any], **options: Any) -> Result:
    entry = {name: options.pop(name) for name in ("force", "retry_errors") if name in options}
    return runner_of(agent, suite, scorers, **options).run_sync(**entry)


def lines_of(run: Path, name: str) -> list[dict[str, Any]]:
    """The readable lines of a file in a run directory."""
    path = run / name
    found = []
    for line in path.read_bytes().split(b"\n") if path.exists() else ():
        try:
            found.append(json.loads(line))
        except ValueError:
            continue
    return found


def journalled(run: Path) -> set[Call]:
    """The samples of judges that answers.jsonl has, errors left out."""
    return {
        (line["id"], line["trial"], line["run"])
        for line in lines_of(run, "answers.jsonl")
        if "sample" in line and "error" not in line["sample"]
    }


# A run that is killed ----------------------------------------------------------------------------------------------

DOOMED = "c02"
CASES, RUNS = 6, 3


def killable_run(directory: Path, log: Path, moment: str) -> Runner:
    """Six cases, two judges, three runs, one at a time; `moment` says when the process dies: never, or in case c02.

    "answer" is within the agent's call, "judge JUDGE RUN" just before that judge answers that run, and
    "sample JUDGE RUN" just after its answer was journalled.
    """
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    def note(*words: object) -> None:
        os.write(descriptor, (" ".join(map(str, words)) + "\n").encode())

    def asked_agent(case_id: str) -> None:
        note("agent", case_id)
        if moment == "answer" and case_id == DOOMED:
            _die()

    def asked(name: str) -> Callable[[str, int], None]:
        def tell(case_id: str, run: int) -> None:
            note(name, case_id, run)
            if moment == f"judge {name} {run}" and case_id == DOOMED:
                _die()

        return tell

    if moment.startswith("sample"):
        _die_after_sample(*moment.split()[1:])
    judges = [Assessor(on_call=asked(name), model_id=name).judge(name=name) for name in ("first", "second")]
    agent = Agent(on_call=asked_agent)
    return runner_of(agent, suite_of(CASES), judges, parallelism=1, num_runs=RUNS, output_path=directory)


def _die_after_sample(name: str, run: str) -> None:
    from steelyard.journal.answers import AnswerLog
    from steelyard.records import StoredSample

    append = AnswerLog.append

    def append_and_die(self: AnswerLog, item: Any) -> None:
        append(self, item)
        if isinstance(item, StoredSample) and item.id == DOOMED and item.run == int(run) and item.by.startswith(name):
            _die()

    AnswerLog.append = append_and_die  # type: ignore[method-assign]


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)
    threading.Event().wait()  # the signal may be a moment away


if __name__ == "__main__":
    killable_run(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]).run_sync()
