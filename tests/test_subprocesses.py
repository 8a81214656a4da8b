"""However a program's call ends, nothing of it is left: no process, no zombie, no descriptor, no hang."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import psutil
import pytest
import uvloop

from steelyard import subprocesses as process_module
from steelyard.errors import TargetError
from steelyard.protocols import InvocationContext
from steelyard.records import EvalCase
from steelyard.subprocesses import ProcessLog, ending_of
from steelyard.targets import Command

CASE = EvalCase(id="fr", prompt="Capital of France?")
CONTEXT = InvocationContext(case_id="fr")

pytestmark = pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="looks at /proc")


@pytest.fixture(params=["asyncio", "uvloop", "asyncio in a thread", "uvloop in a thread"])
def run(request: pytest.FixtureRequest) -> Callable[[Coroutine[Any, Any, Any]], Any]:
    """Run a coroutine on each kind of loop, in the main thread and outside it."""
    factory = uvloop.new_event_loop if "uvloop" in request.param else asyncio.new_event_loop

    def here(coroutine: Coroutine[Any, Any, Any]) -> Any:
        with asyncio.Runner(loop_factory=factory) as runner:
            return runner.run(coroutine)

    def in_a_thread(coroutine: Coroutine[Any, Any, Any]) -> Any:
        outcome: list[Any] = []

        def body() -> None:
            try:
                outcome.append(here(coroutine))
            except BaseException as error:
                outcome.append(error)

        thread = threading.Thread(target=body)
        thread.start()
        thread.join(timeout=30)
        assert outcome, "the loop in the thread hangs"
        if isinstance(outcome[0], BaseException):
            raise outcome[0]
        return outcome[0]

    return in_a_thread if "thread" in request.param else here


@pytest.fixture(scope="module", autouse=True)
def uvloop_has_its_signal_pipe() -> None:
    """libuv opens one pipe for the whole process with the first loop that runs; it is not a leak of ours."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(asyncio.sleep(0))


@pytest.fixture(autouse=True)
def nothing_is_left(uvloop_has_its_signal_pipe: None) -> Any:
    """After every test here: the same descriptors as before, and no child but the reaper, dead or alive."""
    process_module.REAPER.start()
    before = set(os.listdir("/proc/self/fd"))
    yield
    assert programs() == []
    assert len(set(os.listdir("/proc/self/fd"))) <= len(before)


def programs() -> list[psutil.Process]:
    """What this process has started, but for its reaper."""
    children = psutil.Process().children(recursive=True)
    return [child for child in children if "reaper.py" not in " ".join(child.cmdline())]


def shell(script: str, **options: Any) -> Command:
    return Command(["/bin/sh", "-c", script], **options)


async def pids_in(file: Path) -> list[int]:
    """The process ids that a program wrote, as soon as they are there."""
    deadline = time.monotonic() + 10
    while (words := read_words(file)) is None:
        assert time.monotonic() < deadline, "the program never got there"
        await asyncio.sleep(0.002)
    return [int(word) for word in words]


def read_words(file: Path) -> list[str] | None:
    return file.read_text().split() if file.exists() else None


def announce(*pids: str) -> str:
    """Shell words that write process ids to $READY, whole or not at all."""
    return f"echo {' '.join(pids)} > $READY.part; mv $READY.part $READY"


def is_gone(pid: int) -> bool:
    """Gone, or dead and left to init: a grandchild's zombie is not ours to reap."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def assert_gone(pids: list[int]) -> None:
    deadline = time.monotonic() + 2
    while not all(map(is_gone, pids)):
        assert time.monotonic() < deadline, f"still alive: {[pid for pid in pids if not is_gone(pid)]}"
        time.sleep(0.002)


async def cancel_when_ready(command: Command, ready: Path) -> tuple[list[int], float]:
    """Cancel the call once the program said its process ids; give them, and how long cancelling took."""
    task = asyncio.create_task(command.invoke(CASE, CONTEXT))
    pids = await pids_in(ready)
    started = time.perf_counter()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    return pids, time.perf_counter() - started


def test_a_cancelled_program_is_ended_at_once(run, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(process_module, "GRACE_SECONDS", 30.0)
    ready = tmp_path / "ready"
    command = shell(f"{announce('$$')}; exec sleep 60", env={"READY": str(ready)})
    pids, seconds = run(cancel_when_ready(command, ready))
    assert_gone(pids)
    assert seconds < 5


def test_a_program_that_ignores_sigterm_dies_all_the_same(run, tmp_path) -> None:
    ready = tmp_path / "ready"
    command = shell(f"trap '' TERM; {announce('$$')}; while :; do sleep 60; done", env={"READY": str(ready)})
    pids, seconds = run(cancel_when_ready(command, ready))
    assert_gone(pids)
    assert seconds < 2


def test_cancelling_ends_the_programs_own_children_too(run, tmp_path) -> None:
    ready = tmp_path / "ready"
    script = f"sleep 60 & child=$!; (trap '' TERM; exec sleep 60) & {announce('$$', '$child', '$!')}; wait"
    pids, seconds = run(cancel_when_ready(shell(script, env={"READY": str(ready)}), ready))
    assert len(pids) == 3
    assert_gone(pids)
    assert seconds < 2


def test_a_program_gets_the_time_to_clean_up(run, tmp_path) -> None:
    ready, cleaned = tmp_path / "ready", tmp_path / "cleaned"
    script = f"trap 'echo > {cleaned}; exit' TERM; {announce('$$')}; while :; do sleep 0.01; done"
    run(cancel_when_ready(shell(script, env={"READY": str(ready)}), ready))
    assert cleaned.exists()


def test_a_second_cancellation_skips_the_grace(run, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(process_module, "GRACE_SECONDS", 30.0)
    ready = tmp_path / "ready"
    command = shell(f"trap '' TERM; {announce('$$')}; while :; do sleep 60; done", env={"READY": str(ready)})

    async def main() -> list[int]:
        task = asyncio.create_task(command.invoke(CASE, CONTEXT))
        pids = await pids_in(ready)
        task.cancel()
        await asyncio.sleep(0.02)
        assert not task.done()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asyncio.wait_for(task, timeout=5)
        return pids

    assert_gone(run(main()))


def test_a_timeout_ends_the_program(run, tmp_path) -> None:
    async def main() -> None:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await Command("sleep 60").invoke(CASE, CONTEXT)

    run(main())


def test_a_grandchild_that_keeps_stdout_open_does_not_hang_the_call(run, tmp_path) -> None:
    ready = tmp_path / "ready"
    script = f"(trap '' TERM; exec sleep 60) & {announce('$!')}; echo answer"

    async def main() -> None:
        started = time.perf_counter()
        response = await shell(script, env={"READY": str(ready)}).invoke(CASE, CONTEXT)
        assert response.response_text == "answer"
        elapsed = time.perf_counter() - started
        assert elapsed < 5
        assert response.time_to_last_token < elapsed - 0.5  # what its leftovers cost is not the program's time
        assert_gone(await pids_in(ready))

    run(main())


def test_a_silent_grandchild_is_not_left_behind(run, tmp_path) -> None:
    ready = tmp_path / "ready"
    script = f"sleep 60 < /dev/null > /dev/null 2>&1 & {announce('$!')}; echo answer"

    async def main() -> None:
        await shell(script, env={"READY": str(ready)}).invoke(CASE, CONTEXT)
        assert_gone(await pids_in(ready))

    run(main())


def test_what_a_pipeline_says_just_after_the_program_ended_is_read(run) -> None:
    async def main() -> None:
        response = await shell("(sleep 0.05; echo late) & echo early").invoke(CASE, CONTEXT)
        assert response.response_text == "early\nlate"

    run(main())


def test_a_program_that_left_its_group_and_holds_stdout_does_not_hang_the_call(tmp_path) -> None:
    """It escaped on purpose, so it is let go: the call ends, and the test ends the program."""
    ready = tmp_path / "ready"
    script = f"setsid sh -c '{announce('$$')}; exec sleep 60' & while [ ! -e $READY ]; do sleep 0.01; done; echo ok"

    async def main() -> None:
        response = await shell(script, env={"READY": str(ready)}).invoke(CASE, CONTEXT)
        assert response.response_text == "ok"
        [pid] = await pids_in(ready)
        assert not is_gone(pid)
        os.kill(pid, signal.SIGKILL)
        assert_gone([pid])

    asyncio.run(main())


def test_a_flood_is_stopped_promptly(run) -> None:
    async def main() -> None:
        started = time.perf_counter()
        with pytest.raises(TargetError, match="more than 100000 bytes"):
            await Command("yes", max_output_bytes=100_000).invoke(CASE, CONTEXT)
        assert time.perf_counter() - started < 5

    run(main())


def test_many_calls_of_every_ending_leave_nothing_behind(run) -> None:
    scripts = ["cat", "exit 3", "exec <&- >&- 2>&-", "kill -KILL $$", "echo x; echo y >&2", "sleep 60", "yes"]

    async def one(script: str) -> str:
        try:
            async with asyncio.timeout(0.3 if script == "sleep 60" else 20):
                await shell(script, max_output_bytes=10_000).invoke(CASE, CONTEXT)
        except Exception as error:
            return type(error).__name__
        return "ok"

    async def main() -> None:
        endings = await asyncio.gather(*(one(script) for script in scripts * 3))
        expected = ["ok", "TargetError", "TargetError", "TargetError", "ok", "TimeoutError", "TargetError"]
        assert endings == expected * 3
        assert programs() == []

    run(main())


def test_the_end_of_the_loop_ends_the_programs_that_still_run(run, tmp_path) -> None:
    """`asyncio.run` cancels what is left when the main task is done."""
    ready = tmp_path / "ready"
    command = shell(f"{announce('$$')}; exec sleep 60", env={"READY": str(ready)})
    left: list[Any] = []

    async def main() -> list[int]:
        left.append(asyncio.create_task(command.invoke(CASE, CONTEXT)))
        return await pids_in(ready)

    assert_gone(run(main()))
    assert left[0].cancelled()


def test_a_loop_that_is_closed_under_the_call_still_ends_the_program(tmp_path) -> None:
    ready = tmp_path / "ready"
    command = shell(f"{announce('$$')}; exec sleep 60", env={"READY": str(ready)})
    waiting = command.invoke(CASE, CONTEXT)

    async def main() -> list[int]:
        waiting.send(None)
        return await pids_in(ready)

    loop = asyncio.new_event_loop()
    pids = loop.run_until_complete(main())
    loop.close()
    waiting.close()
    assert_gone(pids)


def test_a_program_is_ended_when_watching_it_cannot_even_begin(monkeypatch) -> None:
    def no_threads(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    async def main() -> None:
        monkeypatch.setattr(process_module.threading.Thread, "start", no_threads)
        with pytest.raises(RuntimeError, match="can't start new thread"):
            await Command("sleep 60").invoke(CASE, CONTEXT)

    asyncio.run(main())


def test_programs_run_side_by_side(tmp_path) -> None:
    """Each of ten programs waits until all ten have started."""
    script = 'touch "$PLACE/$$"; while [ "$(ls "$PLACE" | wc -l)" -lt 10 ]; do sleep 0.05; done; echo x'

    async def main() -> list[str]:
        calls = [shell(script, env={"PLACE": str(tmp_path)}).invoke(CASE, CONTEXT) for _ in range(10)]
        return [response.response_text for response in await asyncio.gather(*calls)]

    assert asyncio.run(main()) == ["x"] * 10


KILLED = """
import asyncio, os, sys
from pathlib import Path
from steelyard import EvalCase, InvocationContext
from steelyard.subprocesses import ProcessLog
from steelyard.targets import Command

async def main():
    target = Command(["/bin/sh", "-c", sys.argv[1]])
    await target.invoke(EvalCase(id="a", prompt="?"), InvocationContext("a"))

asyncio.run(main())
"""


def killed_runner(folder: Path, script: str, count: int) -> list[int]:
    """The pids that a program and its descendants wrote before whoever ran them was killed with -9."""
    runner = subprocess.Popen([sys.executable, "-c", KILLED, script], cwd=folder)
    deadline = time.monotonic() + 20
    while len(list(folder.glob("pid-*"))) < count:
        assert time.monotonic() < deadline, "the program never got there"
        time.sleep(0.01)
    runner.kill()
    runner.wait()
    return [int(path.name.removeprefix("pid-")) for path in folder.glob("pid-*")]


@pytest.mark.parametrize(
    "script",
    [
        "touch pid-$$; sleep 600",
        "(touch pid-$$; sleep 600) & wait",
        "setsid sh -c 'touch pid-$$; sleep 600'",
        "setsid sh -c 'touch pid-$$; sleep 600' & exec sleep 600",
        "trap '' TERM INT HUP; touch pid-$$; while :; do sleep 1; done",
    ],
    ids=["the program", "a child", "a child with its own session", "one that outlived its parent", "one that ignores"],
)
def test_no_program_outlives_a_killed_runner_by_two_seconds(tmp_path: Path, script: str) -> None:
    pids = killed_runner(tmp_path, script, 1)
    deadline = time.monotonic() + 2
    while any(psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE for pid in pids):
        assert time.monotonic() < deadline, "still running two seconds later"
        time.sleep(0.01)


def test_a_log_of_programs_lets_the_next_launch_end_what_is_left(tmp_path: Path) -> None:
    log = ProcessLog(tmp_path / "processes.jsonl")
    left = subprocess.Popen(["/bin/sleep", "600"], start_new_session=True)
    ended = subprocess.Popen(["/bin/sleep", "600"], start_new_session=True)
    try:
        log.started(left.pid)
        log.started(ended.pid)
        log.ended(ended.pid)
        with open(tmp_path / "processes.jsonl", "ab") as file:
            file.write(b'{"torn": ')
        assert ProcessLog(tmp_path / "processes.jsonl").end_leftovers() == [left.pid]
        assert left.wait(5) == -signal.SIGKILL
        assert ended.poll() is None
        assert not (tmp_path / "processes.jsonl").exists()
    finally:
        for process in (left, ended):
            process.kill()
            process.wait()


def test_a_log_of_another_machine_or_boot_ends_nothing(tmp_path: Path) -> None:
    bystander = subprocess.Popen(["/bin/sleep", "600"], start_new_session=True)
    try:
        log = ProcessLog(tmp_path / "processes.jsonl")
        log.started(bystander.pid)
        path = tmp_path / "processes.jsonl"
        entry = json.loads(path.read_text())
        for changed in ({"host": "elsewhere"}, {"boot": "another"}, {"pid_namespace": "pid:[1]"}, {"start": 1}):
            path.write_text(json.dumps({**entry, **changed, "marker": "none"}) + "\n")
            assert log.end_leftovers() == []
            assert bystander.poll() is None
    finally:
        bystander.kill()
        bystander.wait()


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (0, "exited with code 0"),
        (3, "exited with code 3"),
        (-9, "was killed by SIGKILL"),
        (-99, "was killed by signal 99"),
    ],
)
def test_how_a_program_ended_is_said_in_words(code, words) -> None:
    assert ending_of(code) == words
