"""Stopping a run: by token, by cancelling its task, by Ctrl-C. What finished is kept, the counts add up."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from steelyard import CancellationToken, EvalCase, Result, RunCancelled, Runner
from tests.support.engine import make_suite, until, wait_for

QUIET: dict[str, Any] = {"progress": "off"}


class Stalling:
    """Answers the first cases and then waits for ever; knows how many wait and how many were asked."""

    def __init__(self, answered: int) -> None:
        self._answered = answered
        self.asked = 0
        self.waiting = 0

    async def __call__(self, case: EvalCase) -> str:
        self.asked += 1
        if self.asked > self._answered:
            self.waiting += 1
            try:
                await asyncio.Event().wait()
            finally:
                self.waiting -= 1
        return "answer"


def assert_partial(result: Result, *, ok: int, cancelled: int, planned: int = 100) -> None:
    assert (result.cancelled, result.complete) == (True, False)
    assert result.metrics["counts"] == {
        "planned": planned,
        "ok": ok,
        "error": 0,
        "cancelled": cancelled,
        "not_started": planned - ok - cancelled,
    }
    assert len(result.load_responses()) == ok


@pytest.mark.parametrize("on_disk", [False, True])
def test_a_token_cancelled_from_another_thread_ends_the_run_with_what_finished(on_disk, tmp_path) -> None:
    token = CancellationToken()
    target = Stalling(answered=7)
    options = {"output_path": tmp_path / "run"} if on_disk else {}
    runner = Runner(target, make_suite(100), token=token, parallelism=4, **options, **QUIET)

    def stop() -> None:
        wait_for(lambda: target.waiting == 4)
        token.cancel("operator")

    threading.Thread(target=stop).start()
    result = runner.run_sync()
    assert_partial(result, ok=7, cancelled=4)
    assert (target.asked, target.waiting) == (11, 0)
    assert result.metrics["stopped"] == "operator"
    assert (tmp_path / "run" / "partial.json").exists() == on_disk
    assert not (tmp_path / "run" / "metrics.json").exists()


def test_what_is_read_of_a_cancelled_run_is_what_it_said_itself(tmp_path) -> None:
    token, target = CancellationToken(), Stalling(answered=7)
    runner = Runner(target, make_suite(20), token=token, parallelism=4, output_path=tmp_path / "run", **QUIET)
    stopper = threading.Thread(target=lambda: (wait_for(lambda: target.waiting == 4), token.cancel("SIGINT")))
    stopper.start()
    said = runner.run_sync().summary()
    stopper.join()
    read = Result.load(tmp_path / "run").summary()
    assert read == said
    assert "stopped: Ctrl-C (SIGINT)" in read
    assert "left: 4 cancelled, 9 not started" in read


@pytest.mark.parametrize("newer", ["outputs.jsonl", "run.json", None])
def test_figures_of_an_earlier_launch_are_not_taken_for_those_of_a_later_one(tmp_path, newer) -> None:
    """Of files that were copied the times may say nothing: then the records are counted."""
    token, target, run = CancellationToken(), Stalling(answered=7), tmp_path / "run"
    runner = Runner(target, make_suite(20), token=token, parallelism=2, output_path=run, **QUIET)
    stopper = threading.Thread(target=lambda: (wait_for(lambda: target.waiting == 2), token.cancel("operator")))
    stopper.start()
    runner.run_sync()
    stopper.join()
    if newer is None:
        lines = (run / "outputs.jsonl").read_bytes().splitlines(keepends=True)
        (run / "outputs.jsonl").write_bytes(b"".join(lines[:-1]))
        os.utime(run / "partial.json")
    else:
        os.utime(run / newer, (2e9, 2e9))
    metrics = Result.load(run).typed_metrics
    assert metrics.counts.cancelled == 0
    assert metrics.n == (6 if newer is None else 7)
    assert "stopped" not in Result.load(run).summary()


def test_a_cancelled_run_is_resumed_and_asks_only_for_the_rest(tmp_path) -> None:
    target = Stalling(answered=7)
    token = CancellationToken()
    runner = Runner(target, make_suite(20), token=token, parallelism=2, output_path=tmp_path / "run", **QUIET)
    stopper = threading.Thread(target=lambda: (wait_for(lambda: target.waiting == 2), token.cancel()))
    stopper.start()
    assert not runner.run_sync().complete
    stopper.join()
    again = Stalling(answered=999)
    runner = Runner(again, make_suite(20), parallelism=2, output_path=tmp_path / "run", **QUIET)
    result = runner.run_sync()
    assert (result.complete, result.cancelled, again.asked) == (True, False, 13)
    assert not (tmp_path / "run" / "partial.json").exists()


def test_a_token_cancelled_before_the_run_asks_and_writes_nothing(tmp_path) -> None:
    token = CancellationToken()
    token.cancel("too late")
    target = Stalling(answered=99)
    runner = Runner(target, make_suite(3), token=token, output_path=tmp_path / "run", **QUIET)
    with pytest.raises(RunCancelled, match="too late"):
        runner.run_sync()
    assert target.asked == 0
    assert not (tmp_path / "run" / "run.json").exists()


def test_a_token_cancelled_from_inside_a_target_stops_after_that_case() -> None:
    token = CancellationToken()

    def answer(case: EvalCase) -> str:
        if case.id == "c4":
            token.cancel("seen enough")
        return "answer"

    result = Runner(answer, make_suite(100), token=token, **QUIET).run_sync()
    # The call that cancelled may have been cancelled itself before its answer was taken.
    assert result.metrics["counts"]["ok"] + result.metrics["counts"]["cancelled"] == 5
    assert result.metrics["counts"]["not_started"] == 95


def test_a_token_cancelled_after_the_last_case_leaves_the_run_complete() -> None:
    token = CancellationToken()

    async def answer(case: EvalCase) -> str:
        if case.id == "c2":
            token.cancel()
        return "answer"

    result = Runner(answer, make_suite(3), token=token, **QUIET).run_sync()
    assert (result.complete, result.cancelled) == (True, False)


def test_a_run_that_stops_itself_leaves_the_callers_token_alone() -> None:
    token = CancellationToken()

    def fail(case: EvalCase) -> str:
        raise ValueError("down")

    result = Runner(fail, make_suite(99), token=token, stop_error_rate=0.1, **QUIET).run_sync()
    assert result.cancelled
    assert not token.cancelled


def test_one_token_stops_several_runs() -> None:
    token = CancellationToken()
    targets = [Stalling(answered=0), Stalling(answered=0)]

    async def main() -> list[Result]:
        runs = [
            asyncio.create_task(Runner(target, make_suite(100), token=token, parallelism=3, **QUIET).run())
            for target in targets
        ]
        await until(lambda: all(target.waiting == 3 for target in targets))
        token.cancel()
        return await asyncio.gather(*runs)

    for result in asyncio.run(main()):
        assert_partial(result, ok=0, cancelled=3)


def test_a_target_sees_the_cancellation_through_its_context() -> None:
    token = CancellationToken()
    seen: list[bool] = []
    inside = threading.Event()

    async def answer(case: EvalCase, context: Any) -> str:
        inside.set()
        try:
            await asyncio.Event().wait()
        finally:
            seen.append(context.token.cancelled)
        return ""

    runner = Runner(answer, make_suite(1), token=token, **QUIET)
    threading.Thread(target=lambda: (inside.wait(10), token.cancel())).start()
    runner.run_sync()
    assert seen == [True]


def test_cancelling_the_task_of_a_run_writes_the_partial_result_and_is_passed_on(tmp_path) -> None:
    target = Stalling(answered=7)

    async def main() -> None:
        runner = Runner(target, make_suite(100), parallelism=4, output_path=tmp_path / "run", **QUIET)
        task = asyncio.create_task(runner.run())
        await until(lambda: target.waiting == 4)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert target.waiting == 0

    asyncio.run(main())
    partial = json.loads((tmp_path / "run" / "partial.json").read_text())
    assert partial["counts"] == {"planned": 100, "ok": 7, "error": 0, "cancelled": 4, "not_started": 89}
    assert partial["complete"] is False
    assert len(Result.load(tmp_path / "run").load_responses()) == 7


def test_a_timeout_around_a_run_works(tmp_path) -> None:
    target = Stalling(answered=3)

    async def main() -> None:
        runner = Runner(target, make_suite(100), parallelism=2, output_path=tmp_path / "run", **QUIET)
        async with asyncio.timeout(None) as limit:

            async def expire() -> None:
                await until(lambda: target.waiting == 2)
                limit.reschedule(0)

            expiring = asyncio.create_task(expire())
            await runner.run()
        await expiring

    with pytest.raises(TimeoutError):
        asyncio.run(main())
    assert json.loads((tmp_path / "run" / "partial.json").read_text())["counts"]["ok"] == 3


def test_a_task_cancelled_while_the_run_is_being_prepared_asks_nothing(tmp_path) -> None:
    target = Stalling(answered=99)
    reading = threading.Event()
    go_on = threading.Event()

    def cases() -> Any:
        reading.set()
        assert go_on.wait(10)
        yield from make_suite(3)

    from steelyard import EvalSet

    async def main() -> None:
        runner = Runner(target, EvalSet("slow", cases), output_path=tmp_path / "run", **QUIET)
        task = asyncio.create_task(runner.run())
        await until(reading.is_set)
        task.cancel()
        await asyncio.sleep(0.01)
        go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await asyncio.wait_for(asyncio.shield(task), 10)

    asyncio.run(main())
    assert target.asked == 0


def test_a_target_that_refuses_to_be_cancelled_does_not_hold_up_the_end() -> None:
    from steelyard.engine.local import LocalEngine

    token = CancellationToken()
    inside = threading.Barrier(2)
    release = threading.Event()
    asked = 0

    async def stubborn(case: EvalCase) -> str:
        nonlocal asked
        asked += 1
        if asked == 2:
            inside.wait(10)
        while not release.is_set():
            try:
                await asyncio.sleep(0.01)
            except asyncio.CancelledError:
                continue
        return "late"

    runner = Runner(stubborn, make_suite(9), token=token, engine=LocalEngine(grace=0.1), parallelism=2, **QUIET)
    threading.Thread(target=lambda: (inside.wait(10), token.cancel())).start()
    began = time.monotonic()
    result = runner.run_sync()
    assert time.monotonic() - began < 5
    assert_partial(result, ok=0, cancelled=2, planned=9)
    release.set()


def test_ctrl_c_in_run_sync_commits_what_finished_and_raises_keyboard_interrupt(tmp_path) -> None:
    script = textwrap.dedent(
        """
        import asyncio, json, pathlib, sys
        from steelyard import EvalCase, EvalSet, Runner

        async def answer(case):
            if int(case.id) >= 5:
                print("waiting", flush=True)
                await asyncio.sleep(3600)
            return "answer"

        suite = EvalSet("s", [EvalCase(id=str(n), prompt="p") for n in range(20)])
        try:
            Runner(answer, suite, parallelism=1, output_path=sys.argv[1], progress="off").run_sync()
        except KeyboardInterrupt:
            counts = json.loads(pathlib.Path(sys.argv[1], "partial.json").read_text())["counts"]
            print("interrupted", counts["ok"], counts["cancelled"], flush=True)
        """
    )
    process = subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path / "run")], stdout=subprocess.PIPE, text=True, cwd=tmp_path
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "waiting\n"
        os.kill(process.pid, signal.SIGINT)
        out, _ = process.communicate(timeout=20)
    finally:
        process.kill()
        process.wait()
    assert out == "interrupted 5 1\n"
    assert process.returncode == 0


def test_a_failing_disk_ends_the_run_with_its_error_and_the_other_calls_are_cancelled(tmp_path, monkeypatch) -> None:
    from steelyard import JournalError
    from steelyard.journal import writer

    target = Stalling(answered=3)
    real = os.write
    lines = 0

    def write(descriptor: int, data: bytes) -> int:
        nonlocal lines
        if bytes(data[:5]) == b'{"v":':
            lines += 1
            if lines > 2:
                raise OSError(28, "No space left on device")
        return real(descriptor, data)

    monkeypatch.setattr(writer.os, "write", write)
    runner = Runner(target, make_suite(50), parallelism=2, output_path=tmp_path / "run", **QUIET)
    with pytest.raises(JournalError, match="No space left"):
        runner.run_sync()
    assert target.waiting == 0
    assert not (tmp_path / "run" / "metrics.json").exists()
    monkeypatch.undo()
    assert len(Result.load(Path(tmp_path / "run")).load_responses()) == 2
