"""Sync callables in a run: in threads, bounded, in order with one worker, and never in the way of the exit."""

from __future__ import annotations

import asyncio
import contextvars
import logging
import subprocess
import sys
import textwrap
import threading
import time
from typing import Any

import pytest

from steelyard import EvalCase, InvocationContext, Runner
from steelyard.report.summary import summary
from tests.support.engine import make_suite, wait_for

QUIET: dict[str, Any] = {"progress": "off"}


def test_an_async_function_that_blocks_the_event_loop_is_reported() -> None:
    async def blocks(case: EvalCase) -> str:
        time.sleep(0.1)  # noqa: ASYNC251 - the mistake that is reported
        return "x"

    suite = make_suite(12)
    result = Runner(blocks, suite, parallelism=5, progress="off").run_sync()
    told = (
        "asked for 5 at a time, at most 1 was in flight: your async function blocks the event loop; use `def`, or await"
    )
    assert result.metrics["parallelism_shortfall"] == told
    assert told in summary(result.typed_metrics)


@pytest.mark.parametrize("parallelism", [1, 5, 50])
def test_a_function_that_awaits_reaches_its_parallelism(parallelism: int) -> None:
    async def awaits(case: EvalCase) -> str:
        await asyncio.sleep(0.02)
        return "x"

    suite = make_suite(12)
    result = Runner(awaits, suite, parallelism=parallelism, progress="off").run_sync()
    assert "parallelism_shortfall" not in result.metrics


def test_sync_calls_run_at_once_and_never_more_than_asked_for() -> None:
    """Four calls meet at a barrier, so four run at once; the count shows that no fifth ever does."""
    lock = threading.Lock()
    barrier = threading.Barrier(4, timeout=20)
    now = most = 0

    def answer(case: EvalCase) -> str:
        nonlocal now, most
        with lock:
            now += 1
            most = max(most, now)
        barrier.wait()
        with lock:
            now -= 1
        return "met"

    result = Runner(answer, make_suite(40), parallelism=4, **QUIET).run_sync()
    assert [record.response_text for record in result.responses] == ["met"] * 40
    assert most == 4


def test_with_one_worker_sync_calls_come_one_after_the_other_in_order() -> None:
    events: list[tuple[str, str]] = []

    def answer(case: EvalCase) -> str:
        events.append(("begin", case.id))
        time.sleep(0.0005)
        events.append(("end", case.id))
        return ""

    Runner(answer, make_suite(10), **QUIET).run_sync()
    assert events == [(what, f"c{n}") for n in range(10) for what in ("begin", "end")]


def test_sync_calls_do_not_run_on_the_thread_of_the_event_loop() -> None:
    names: set[str] = set()

    def answer(case: EvalCase) -> str:
        names.add(threading.current_thread().name)
        return ""

    Runner(answer, make_suite(10), **QUIET).run_sync()
    assert names == {"steelyard-call"}


def test_a_context_variable_that_one_call_sets_is_not_seen_by_the_next() -> None:
    variable: contextvars.ContextVar[str] = contextvars.ContextVar("variable", default="unset")

    def answer(case: EvalCase) -> str:
        before = variable.get()
        variable.set(case.id)
        return before

    result = Runner(answer, make_suite(5), **QUIET).run_sync()
    assert [record.response_text for record in result.responses] == ["unset"] * 5


def test_a_sync_call_that_outlives_its_timeout_is_reported_as_excess_and_its_place_is_taken(caplog) -> None:
    release = threading.Event()

    def answer(case: EvalCase, context: InvocationContext) -> str:
        if case.id in ("c0", "c1"):
            release.wait(30)
        return "answer"

    runner = Runner(answer, make_suite(6), timeout=0.05, retries=0, **QUIET)
    with caplog.at_level(logging.WARNING, logger="steelyard"):
        result = runner.run_sync()
    assert [record.status for record in result.responses] == ["error"] * 2 + ["ok"] * 4
    assert [record.error for record in result.responses[:2]] == ["TimeoutError: no answer within 0.05 s"] * 2
    assert "2 calls still running after the timeout" in caplog.text
    release.set()
    wait_for(lambda: runner.target.excess == 0)  # type: ignore[attr-defined]


def test_a_sync_call_that_never_ends_does_not_hold_up_the_exit() -> None:
    script = textwrap.dedent(
        """
        import threading
        from steelyard import EvalCase, EvalSet, Runner

        def hang(case):
            if case.id == "a":
                threading.Event().wait()
            return "answer"

        suite = EvalSet("s", [EvalCase(id="a", prompt="p"), EvalCase(id="b", prompt="p")])
        result = Runner(hang, suite, timeout=0.05, retries=0, progress="off").run_sync()
        print([record.status for record in result.responses], result.complete)
        """
    )
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", script], capture_output=True, text=True, timeout=30, check=False
    )
    assert done.stdout == "['error', 'ok'] True\n"
    assert done.returncode == 0
    assert "1 call still running after the timeout" in done.stderr
