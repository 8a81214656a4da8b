"""Checks a suite's tasks before an agent is paid for them: reference solutions pass, untouched workspaces fail."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec

from steelyard.case_templates import CaseTemplate, PathTemplate
from steelyard.daemon_threads import DaemonThreads
from steelyard.errors import ConfigurationError
from steelyard.protocols import Identity, InvocationContext, RepeatedJudge, Scorer
from steelyard.records import EvalCase, InvocationResponse, Record
from steelyard.run.options import RunOptions
from steelyard.run.result import Result
from steelyard.run.runner import Runner
from steelyard.scoring.tests import apply_with_git, overlay

Finding = Literal["good", "unsolved", "already passes", "flaky", "ungradable", "no solution"]
_PATCHES = (".patch", ".diff")


class Solution:
    """A case's reference solution: a folder to copy over the workspace, or a patch to apply in it.

    It is named by a path, or given as the text of a patch: `{patch: "{{ expected.patch }}"}`.
    """

    def __init__(self, given: str | Mapping[str, Any], folder: Path) -> None:
        self._path: PathTemplate | None = None
        self._text: CaseTemplate | None = None
        if isinstance(given, str):
            self._path = PathTemplate(given, "solution")
        elif list(given) == ["patch"]:
            self._text = CaseTemplate(given["patch"], "solution.patch", ("expected",))
        else:
            raise ConfigurationError(f"solution must be a path, or a mapping with `patch` alone, got {given!r:.100}")
        self._folder = folder.resolve()

    def of(self, case: EvalCase) -> Path | bytes | None:
        """The case's folder, or its patch; None where there is neither."""
        if self._text is not None:
            return self._text.render(case, expected=case.expected).encode() or None
        assert self._path is not None
        place = self._folder / self._path.render(case)
        if place.suffix in _PATCHES and place.is_file():
            return place.read_bytes()
        return place if place.is_dir() else None


class CheckedTask(msgspec.Struct, kw_only=True):
    """What was found out about one case."""

    id: str
    finding: Finding
    why: str = ""
    solved: int = 0
    """How many of the gradings of its reference solution passed."""
    untouched: int = 0
    """How many of the gradings of the untouched workspace passed."""
    repeats: int = 1
    seconds: float = 0.0
    """The longest of them, set-up and grading."""

    @property
    def is_good(self) -> bool:
        return self.finding == "good"


class _Untouched:
    """A target that leaves the workspace as it is."""

    model_id = None
    default_parallelism = 4

    def identity(self) -> Identity:
        return {"kind": "untouched"}

    async def invoke(self, case: EvalCase, context: InvocationContext) -> InvocationResponse:  # noqa: ARG002
        return InvocationResponse(response_text="")


class _Reference(_Untouched):
    """A target that puts the reference solution into the workspace."""

    def __init__(self, solution: Solution) -> None:
        self._solution = solution
        self._threads = DaemonThreads()

    def identity(self) -> Identity:
        return {"kind": "reference solution"}

    async def invoke(self, case: EvalCase, context: InvocationContext) -> InvocationResponse:
        found, workspace = await self._threads.run(self._solution.of, case), context.workspace
        assert found is not None
        assert workspace is not None
        if isinstance(found, bytes):
            await apply_with_git(found, workspace, context.programs, "the solution's patch")
        else:
            await self._threads.run(overlay, found, workspace)
        return InvocationResponse(response_text="")


async def check_suite(runner: Runner, solution: Solution, *, repeat: int = 1) -> list[CheckedTask]:
    """Grade each case's reference solution and its untouched workspace, `repeat` times each; no target is called."""
    if runner.workspace is None:
        raise ConfigurationError("a check grades workspaces, and this suite has none: give it `workspace:`")
    if repeat < 1:
        raise ConfigurationError(f"repeat must be >= 1, got {repeat}")
    scorers = [scorer for scorer in runner.scorers if not isinstance(scorer, RepeatedJudge)]
    if not scorers:
        raise ConfigurationError("a check needs a scorer that is not a judge, such as `tests`")
    cases = [(case, solution.of(case) is not None) for case in runner.suite]
    untouched = await _graded(_Untouched(), runner, scorers, repeat)
    solved = await _graded(_Reference(solution), runner, scorers, repeat, [case for case, has in cases if has])
    return [
        _finding(case.id, has, solved.get(case.id, []), untouched.get(case.id, []), repeat)
        for case, has in cases
        if case.id in untouched
    ]


async def _graded(
    target: _Untouched, runner: Runner, scorers: Sequence[Scorer], repeat: int, cases: list[EvalCase] | None = None
) -> dict[str, list[Record]]:
    """The records of a run of the suite with another target, by case."""
    from steelyard.suite.evalset import EvalSet

    if cases is not None and not cases:
        return {}
    asked = runner.options
    options = RunOptions(
        parallelism=asked.parallelism if isinstance(asked.parallelism, int) else None,
        timeout=asked.timeout,
        trials=repeat,
        progress=asked.progress,
        limit=asked.limit if cases is None else None,
        match=asked.match,
        where=asked.where,
        failed_in=asked.failed_in,
        sample=asked.sample if cases is None else None,
        seed=asked.seed,
        stop_first_errors=0,
    )
    suite = runner.suite if cases is None else EvalSet(runner.suite.id, cases)
    result: Result = await Runner(target, suite, scorers, workspace=runner.workspace, options=options).run()
    found: dict[str, list[Record]] = {}
    for record in result.iter_responses():
        found.setdefault(record.id, []).append(record)
    return found


def _finding(case_id: str, has: bool, solved: list[Record], untouched: list[Record], repeat: int) -> CheckedTask:
    task = CheckedTask(
        id=case_id,
        finding="good",
        solved=sum(record.passed is True for record in solved),
        untouched=sum(record.passed is True for record in untouched),
        repeats=repeat,
        seconds=max((record.elapsed for record in (*solved, *untouched)), default=0.0),
    )
    broken = next((_problem(record) for record in (*solved, *untouched) if record.passed is None), None)
    if not has:
        task.finding, task.why = "no solution", "there is no reference solution"
    elif broken is not None:
        task.finding, task.why = "ungradable", broken
    elif 0 < task.solved < repeat or 0 < task.untouched < repeat:
        task.finding = "flaky"
        task.why = f"solution passed {task.solved} of {repeat} times, untouched {task.untouched} of {repeat}"
    elif task.solved == 0:
        task.finding, task.why = "unsolved", _reason(solved[0])
    elif task.untouched:
        task.finding, task.why = "already passes", "the untouched workspace passes: an agent need do nothing"
    return task


def _problem(record: Record) -> str:
    """Why a record has no verdict."""
    if record.error is not None:
        return record.error
    errors = [error for score in record.scores for error in score.errors]
    return errors[0] if errors else "no scorer decides"


def _reason(record: Record) -> str:
    reasons = [score.reason for score in record.scores if score.passed is False and score.reason]
    return f"the reference solution fails: {reasons[0] if reasons else 'no reason'}"
