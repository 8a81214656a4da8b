"""What a run leaves behind: no thread, no task, no file descriptor, and not much memory."""

from __future__ import annotations

import asyncio
import gc
import subprocess
import sys
import textwrap
import threading
import warnings
from collections.abc import Callable
from typing import Any

import psutil
import pytest

from steelyard import EvalCase, Runner, daemon_threads
from tests.support.engine import make_suite, wait_for

QUIET: dict[str, Any] = {"progress": "off"}


def fails_sometimes(case: EvalCase) -> str:
    if case.id.endswith("3"):
        raise ValueError("three")
    return "answer"


async def answers(case: EvalCase) -> str:
    await asyncio.sleep(0)
    return fails_sometimes(case)


@pytest.fixture
def no_new_threads(monkeypatch) -> Callable[[], bool]:
    """Whether all threads are as old as the test. Those for sync calls, kept for the next, go at once here."""
    monkeypatch.setattr(daemon_threads, "IDLE_SECONDS", 0.01)
    before = set(threading.enumerate())
    return lambda: set(threading.enumerate()) <= before


@pytest.mark.parametrize("target", [answers, fails_sometimes], ids=["async", "sync"])
@pytest.mark.parametrize("low_memory", [False, True])
def test_no_thread_and_no_file_descriptor_is_left_after_runs(target, low_memory, tmp_path, no_new_threads) -> None:
    def run(number: int) -> None:
        runner = Runner(target, make_suite(30), ["exact"], parallelism=4, retries=0, **QUIET)
        result = runner.run_sync(output_path=tmp_path / str(number), low_memory=low_memory)
        assert len(result.load_responses()) == 30

    process = psutil.Process()
    run(0)  # what is imported and opened once is not a leak
    wait_for(no_new_threads)
    gc.collect()
    descriptors = process.num_fds()
    with warnings.catch_warnings():
        warnings.simplefilter("error", ResourceWarning)
        for number in range(1, 6):
            run(number)
        gc.collect()
    wait_for(no_new_threads)
    wait_for(lambda: process.num_fds() <= descriptors)


def test_no_task_is_left_after_a_run_on_the_callers_loop(tmp_path) -> None:
    async def main() -> set[str]:
        await Runner(answers, make_suite(10), parallelism=3, output_path=tmp_path / "run", **QUIET).run()
        await asyncio.sleep(0)
        return {task.get_name() for task in asyncio.all_tasks()} - {asyncio.current_task().get_name()}  # type: ignore[union-attr]

    assert asyncio.run(main()) == set()


def test_a_refused_run_leaves_no_descriptor_and_no_lock(tmp_path) -> None:
    runner = Runner(answers, make_suite(3), output_path=tmp_path / "run", **QUIET)
    runner.run_sync()
    gc.collect()
    before = psutil.Process().num_fds()
    for _ in range(5):
        with pytest.raises(Exception, match="complete"):
            runner.run_sync()
    gc.collect()
    wait_for(lambda: psutil.Process().num_fds() <= before)
    assert runner.run_sync(force=True).complete


def test_a_run_keeps_no_response_alive_in_low_memory_mode() -> None:
    """20,000 answers of 4 KB are 80 MB; a run in low memory must grow by a small part of that."""
    script = textwrap.dedent(
        """
        import resource, sys, tempfile
        from steelyard import EvalCase, EvalSet, Runner

        async def answer(case):
            return case.id.rjust(4096)

        def suite(count):
            return EvalSet("s", lambda: (EvalCase(id=str(n), prompt="p") for n in range(count)))

        def peak():
            unit = 1 if sys.platform == "darwin" else 1024
            return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit

        with tempfile.TemporaryDirectory() as folder:
            def run(count, name):
                runner = Runner(answer, suite(count), ["exact"], parallelism=50, progress="off")
                return runner.run_sync(output_path=f"{folder}/{name}", low_memory=True)
            run(2_000, "warm")
            before = peak()
            result = run(20_000, "run")
            assert result.complete and result.responses == []
            count = sum(1 for record in result.iter_responses() if len(record.response_text) == 4096)
            print(count, peak() - before)
        """
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    count, growth = map(int, done.stdout.split())
    assert count == 20_000
    assert growth < 20_000_000
