"""Sync functions in daemon threads."""

from __future__ import annotations

import asyncio
import contextvars
import gc
import pickle
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import uvloop

from steelyard import daemon_threads as threads_module
from steelyard.daemon_threads import DaemonThreads, LoopThread
from steelyard.errors import TargetError
from tests.support.engine import wait_for

LOOPS = [asyncio.new_event_loop, uvloop.new_event_loop]


def eventually(condition: Callable[[], bool], seconds: float = 5.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it never came true"
        time.sleep(0.001)


@pytest.mark.parametrize("loop_factory", LOOPS)
def test_a_function_runs_in_a_daemon_thread_and_its_result_comes_back(loop_factory) -> None:
    async def main() -> None:
        threads = DaemonThreads()
        seen = await threads.run(lambda a, b: (a + b, threading.current_thread()), 1, 2)
        assert seen[0] == 3
        assert seen[1] is not threading.current_thread()
        assert seen[1].daemon

    with asyncio.Runner(loop_factory=loop_factory) as runner:
        runner.run(main())


def test_calls_one_after_the_other_use_one_thread() -> None:
    async def main() -> None:
        threads = DaemonThreads()
        assert len({await threads.run(threading.get_ident) for _ in range(200)}) == 1

    asyncio.run(main())


def test_there_are_as_many_threads_as_calls_at_once_and_no_more() -> None:
    async def main() -> None:
        threads = DaemonThreads()
        barrier = threading.Barrier(8)

        def meet() -> int:
            barrier.wait(timeout=5)
            return threading.get_ident()

        first = set(await asyncio.gather(*(threads.run(meet) for _ in range(8))))
        second = set(await asyncio.gather(*(threads.run(meet) for _ in range(8))))
        assert len(first) == 8
        assert second == first

    asyncio.run(main())


def test_context_variables_are_carried_into_the_thread_and_not_out_of_it() -> None:
    variable = contextvars.ContextVar("variable", default="unset")

    def read_and_change() -> str:
        seen = variable.get()
        variable.set("changed in the thread")
        return seen

    async def main() -> None:
        variable.set("set in the task")
        assert await DaemonThreads().run(read_and_change) == "set in the task"
        assert variable.get() == "set in the task"

    asyncio.run(main())


def test_an_exception_comes_back_as_it_was_raised() -> None:
    error = ValueError("from the thread")

    def fail() -> None:
        raise error

    async def main() -> None:
        with pytest.raises(ValueError, match="from the thread") as caught:
            await DaemonThreads().run(fail)
        assert caught.value is error

    asyncio.run(main())


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt("now"), GeneratorExit(), asyncio.CancelledError()])
def test_an_exit_raised_by_the_function_is_the_calls_error_and_the_thread_lives_on(error) -> None:
    def leave() -> None:
        raise error

    async def main() -> None:
        threads = DaemonThreads()
        before = await threads.run(threading.get_ident)
        with pytest.raises(TargetError, match=type(error).__name__):
            await threads.run(leave)
        assert await threads.run(threading.get_ident) == before

    asyncio.run(main())


def test_stop_iteration_raised_by_the_function_does_not_hang_the_caller() -> None:
    async def main() -> None:
        with pytest.raises(RuntimeError, match="StopIteration"):
            await asyncio.wait_for(DaemonThreads().run(next, iter(())), timeout=5)

    asyncio.run(main())


def test_a_cancelled_call_runs_on_as_excess_and_its_thread_is_reused_only_after_it_ended() -> None:
    async def main() -> None:
        threads = DaemonThreads()
        entered, release = threading.Event(), threading.Event()
        busy: list[int] = []

        def hang() -> None:
            busy.append(threading.get_ident())
            entered.set()
            release.wait(timeout=5)

        task = asyncio.create_task(threads.run(hang))
        await asyncio.sleep(0)
        assert entered.wait(timeout=5)
        assert threads.excess == 0
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert threads.excess == 1
        assert await threads.run(threading.get_ident) != busy[0]
        release.set()
        eventually(lambda: threads.excess == 0)
        assert await threads.run(threading.get_ident) == busy[0]  # the last to become idle is the first taken

    asyncio.run(main())


@pytest.mark.parametrize("late", ["result", "exception", "coroutine"])
def test_what_an_abandoned_call_comes_to_is_dropped_without_a_warning(late, caplog) -> None:
    entered, release = threading.Event(), threading.Event()

    async def never_awaited() -> None: ...

    def hang() -> object:
        entered.set()
        release.wait(timeout=5)
        if late == "exception":
            raise ValueError("too late")
        return never_awaited() if late == "coroutine" else "too late"

    async def main() -> None:
        threads = DaemonThreads()
        task = asyncio.create_task(threads.run(hang))
        await asyncio.sleep(0)
        assert entered.wait(timeout=5)
        task.cancel()
        await asyncio.wait({task})
        release.set()
        eventually(lambda: threads.excess == 0)
        await threads.run(int)
        gc.collect()

    asyncio.run(main())
    assert not caplog.records


def test_a_result_that_arrived_just_before_the_cancellation_is_dropped_without_a_warning() -> None:
    async def never_awaited() -> None: ...

    async def main() -> None:
        threads = DaemonThreads()
        returned = threading.Event()

        def give() -> object:
            returned.set()
            return never_awaited()

        task = asyncio.create_task(threads.run(give))
        await asyncio.sleep(0)
        returned.wait(timeout=5)
        eventually(lambda: len(threads._idle) == 1)
        asyncio.get_running_loop().call_soon(task.cancel)
        await asyncio.wait({task})
        assert threads.excess == 0
        gc.collect()

    asyncio.run(main())


def test_a_call_that_was_cancelled_before_its_thread_took_it_never_runs(monkeypatch) -> None:
    async def main() -> None:
        threads = DaemonThreads()
        gate, ran = threading.Event(), []
        perform = threads_module._perform

        def late(call):
            gate.wait(timeout=5)
            return perform(call)

        monkeypatch.setattr(threads_module, "_perform", late)
        task = asyncio.create_task(threads.run(ran.append, 1))
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait({task})
        gate.set()
        eventually(lambda: threads.excess == 0)
        assert ran == []

    asyncio.run(main())


@pytest.mark.parametrize("loop_factory", LOOPS)
def test_a_loop_that_is_closed_before_the_thread_ends_does_no_harm(loop_factory) -> None:
    threads = DaemonThreads()
    entered, release = threading.Event(), threading.Event()

    def hang() -> None:
        entered.set()
        release.wait(timeout=5)

    async def main() -> None:
        task = asyncio.create_task(threads.run(hang))
        await asyncio.sleep(0)
        assert entered.wait(timeout=5)
        task.cancel()

    with asyncio.Runner(loop_factory=loop_factory) as runner:
        runner.run(main())
    assert threads.excess == 1
    release.set()
    eventually(lambda: threads.excess == 0)
    assert asyncio.run(threads.run(str, 7)) == "7"


def test_a_loop_that_is_closed_under_a_waiting_call_leaves_the_thread_usable() -> None:
    threads = DaemonThreads()
    entered, release = threading.Event(), threading.Event()

    def hang() -> None:
        entered.set()
        release.wait(timeout=5)

    loop = asyncio.new_event_loop()
    waiting = threads.run(hang)
    asyncio.set_event_loop(None)
    loop.call_soon(lambda: None)

    async def step() -> None:
        waiting.send(None)  # started, and left waiting when the loop is closed

    loop.run_until_complete(step())
    assert entered.wait(timeout=5)
    loop.close()
    release.set()
    eventually(lambda: len(threads._idle) == 1)
    waiting.close()
    assert threads.excess == 0
    assert asyncio.run(threads.run(str, 7)) == "7"


def test_several_loops_in_several_threads_share_one_instance() -> None:
    threads = DaemonThreads()
    wrong: list[object] = []

    async def many(start: int) -> None:
        results = await asyncio.gather(*(threads.run(abs, -number) for number in range(start, start + 200)))
        if results != list(range(start, start + 200)):
            wrong.append(results)

    loops = [threading.Thread(target=lambda n=n: asyncio.run(many(n * 1000))) for n in range(4)]
    for one in loops:
        one.start()
    for one in loops:
        one.join(timeout=30)
    assert wrong == []
    assert threads.excess == 0


def test_an_idle_thread_goes_away(monkeypatch) -> None:
    monkeypatch.setattr(threads_module, "IDLE_SECONDS", 0.01)
    threads = DaemonThreads()
    thread = asyncio.run(threads.run(threading.current_thread))
    thread.join(timeout=5)
    assert not thread.is_alive()
    assert asyncio.run(threads.run(str, 7)) == "7"


def test_an_idle_thread_does_not_keep_the_last_arguments_alive() -> None:
    class Big: ...

    async def main() -> None:
        threads = DaemonThreads()
        big = Big()
        gone = weakref.ref(big)
        await threads.run(lambda one: None, big)
        del big
        eventually(lambda: gone() is None)

    asyncio.run(main())


def test_a_pickled_copy_starts_without_threads_and_works() -> None:
    threads = DaemonThreads()
    asyncio.run(threads.run(int))
    copy = pickle.loads(pickle.dumps(threads))
    assert copy._idle == []
    assert asyncio.run(copy.run(str, 7)) == "7"


def test_a_forked_process_does_not_wait_for_the_parents_threads() -> None:
    script = """
import asyncio, os, signal
from steelyard.daemon_threads import DaemonThreads
threads = DaemonThreads()
asyncio.run(threads.run(int))
pid = os.fork()
if pid == 0:
    signal.alarm(5)
    os._exit(asyncio.run(threads.run(int, "7")))
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=20)


def test_a_hung_function_does_not_hold_up_the_exit() -> None:
    script = """
import asyncio, threading
from steelyard.daemon_threads import DaemonThreads
async def main():
    entered = threading.Event()
    def hang():
        entered.set()
        threading.Event().wait()
    task = asyncio.create_task(DaemonThreads().run(hang))
    while not entered.is_set():
        await asyncio.sleep(0)
    task.cancel()
asyncio.run(main())
print("bye")
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=10)
    assert (done.returncode, done.stdout, done.stderr) == (0, "bye\n", "")


def test_the_value_comes_back_to_the_caller() -> None:
    async def answer() -> str:
        await asyncio.sleep(0)
        return threading.current_thread().name

    running = LoopThread(answer())
    assert running.result() == "steelyard-loop"
    assert running.wait(0)


@pytest.mark.parametrize("error", [ValueError("bad"), SystemExit(3), KeyboardInterrupt(), asyncio.CancelledError()])
def test_what_the_coroutine_raises_is_raised_in_the_callers_thread(error) -> None:
    async def fail() -> None:
        await asyncio.sleep(0)
        raise error

    with pytest.raises(type(error)):
        LoopThread(fail()).result()


def test_cancelling_from_outside_ends_the_coroutine() -> None:
    started = threading.Event()

    async def hang() -> None:
        started.set()
        await asyncio.Event().wait()

    running = LoopThread(hang())
    assert started.wait(10)
    assert not running.wait(0.01)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        running.result()


def test_cancelling_what_has_ended_does_nothing() -> None:
    async def nothing() -> int:
        return 3

    running = LoopThread(nothing())
    assert running.result() == 3
    wait_for(lambda: not running._thread.is_alive())
    running.cancel()
    assert running.result() == 3


def test_tasks_that_the_coroutine_left_behind_are_cancelled() -> None:
    ended: list[str] = []

    async def straggler() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append("straggler")

    kept: list[Any] = []

    async def leave() -> None:
        kept.append(asyncio.create_task(straggler()))
        await asyncio.sleep(0)

    running = LoopThread(leave())
    running.result()
    wait_for(lambda: ended == ["straggler"])
    wait_for(lambda: not running._thread.is_alive())
    assert running._loop.is_closed()


def test_a_loop_that_cannot_be_made_leaves_no_coroutine_unawaited(recwarn) -> None:
    async def never() -> None:
        raise AssertionError

    def broken() -> asyncio.AbstractEventLoop:
        raise OSError("no loop today")

    with pytest.raises(OSError, match="no loop today"):
        LoopThread(never(), broken)
    gc.collect()
    assert not recwarn.list
