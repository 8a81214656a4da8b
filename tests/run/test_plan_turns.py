"""Passing over many cases leaves the event loop its turns."""

from __future__ import annotations

import asyncio

from steelyard import EvalCase, EvalSet, Runner
from steelyard.run.plan import make_plan

COUNT = 20_000


def many() -> EvalSet:
    return EvalSet("many", lambda: (EvalCase(id=f"c{number:05}", prompt="?") for number in range(COUNT)))


def test_jobs_give_a_sign_while_cases_are_passed_over() -> None:
    plan = make_plan(many(), match="c[01]999[09]")
    jobs = list(plan.jobs())
    assert [job.case.id for job in jobs if job is not None] == ["c09990", "c09999", "c19990", "c19999"]
    assert jobs.count(None) > 100


def test_a_call_is_not_timed_out_because_the_next_case_is_far_away() -> None:
    longest = 0.0

    async def answer(case: EvalCase) -> str:
        nonlocal longest
        loop = asyncio.get_running_loop()
        for _ in range(5):
            before = loop.time()
            await asyncio.sleep(0)
            longest = max(longest, loop.time() - before)
        return "yes"

    result = Runner(answer, many(), match="c[01]9999", parallelism=2, progress="off").run_sync()
    assert result.metrics["counts"]["ok"] == 2
    # The whole of the suite takes several times as long to read.
    assert longest < 0.05
