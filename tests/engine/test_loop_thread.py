"""A coroutine on a loop in a thread of its own: `LoopThread`."""

from __future__ import annotations

import asyncio
import gc
import threading
from typing import Any

import pytest

from steelyard.engine.loop_thread import LoopThread
from tests.support.engine import wait_for


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
