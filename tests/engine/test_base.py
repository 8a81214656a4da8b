"""What deriving from Engine gives, and what a run asks of an engine of the user's."""

from __future__ import annotations

import asyncio
import inspect
import sys
import threading
from types import FrameType
from typing import Any

import pytest

from steelyard import ConfigurationError, Engine, EvalCase, EvalSet, LocalEngine, Runner
from steelyard.engine.base import CancellationToken
from steelyard.protocols import InFlight, Tally
from tests.support.engine import until


class Counting(Engine):
    """The two methods that every engine must have, and nothing else."""

    def __init__(self) -> None:
        self._inner = LocalEngine()
        self.runs = 0

    async def run(self, *args: Any, **options: Any) -> Tally:
        self.runs += 1
        return await self._inner.run(*args, **options)

    def in_flight(self) -> InFlight:
        return self._inner.in_flight()


def a_suite() -> EvalSet:
    return EvalSet("three", [EvalCase(prompt=f"p{number}") for number in range(3)])


def test_an_engine_with_only_run_and_in_flight_runs_a_suite() -> None:
    with Counting() as engine:
        result = Runner(lambda prompt: prompt, a_suite(), engine=engine, progress="off").run_sync()
    assert (result.complete, result.metrics["n"], engine.runs) == (True, 3, 1)


def test_the_defaults_are_those_of_an_engine_in_this_process() -> None:
    engine = Counting()
    engine.check(pace=True)
    engine.close()
    engine.close()
    assert not engine.runs_in_other_processes
    assert list(engine.client_loads()) == []


def test_an_engine_without_run_cannot_be_made() -> None:
    class Empty(Engine):
        pass

    with pytest.raises(TypeError, match="in_flight"):
        Empty()  # type: ignore[abstract]


def test_a_runner_refuses_what_is_not_an_engine() -> None:
    class Lookalike:
        run = in_flight = None

    with pytest.raises(ConfigurationError, match="engine must be an Engine, got Lookalike"):
        Runner(lambda prompt: prompt, a_suite(), engine=Lookalike())  # type: ignore[arg-type]


@pytest.mark.parametrize("failing", [False, True])
def test_a_check_that_raises_ends_the_run_before_any_call(failing) -> None:
    class Checked(Counting):
        def check(self, *, pace: bool = False) -> None:
            if failing:
                raise ConfigurationError(f"not today, pace={pace}")

    engine = Checked()
    runner = Runner(lambda prompt: prompt, a_suite(), engine=engine, progress="off")
    if failing:
        with pytest.raises(ConfigurationError, match="not today, pace=False"):
            runner.run_sync()
    else:
        runner.run_sync()
    assert engine.runs == (0 if failing else 1)


def test_a_new_token_is_not_cancelled() -> None:
    token = CancellationToken()
    assert (token.cancelled, token.reason) == (False, None)


def test_the_first_reason_stays() -> None:
    token = CancellationToken()
    token.cancel("first")
    token.cancel("second")
    assert (token.cancelled, token.reason) == (True, "first")


def test_waiting_for_a_cancelled_token_returns_its_reason_at_once() -> None:
    token = CancellationToken()
    token.cancel("done")
    assert asyncio.run(asyncio.wait_for(token.wait(), 5)) == "done"


def test_every_waiter_is_woken_from_another_thread() -> None:
    token = CancellationToken()

    async def main() -> list[str]:
        waiters = [asyncio.create_task(token.wait()) for _ in range(5)]
        await asyncio.sleep(0)
        threading.Thread(target=token.cancel, args=("elsewhere",)).start()
        return await asyncio.wait_for(asyncio.gather(*waiters), 5)

    assert asyncio.run(main()) == ["elsewhere"] * 5


def test_waiters_on_several_loops_are_all_woken() -> None:
    token = CancellationToken()
    waiting = threading.Barrier(4)
    reasons: list[str] = []

    async def wait() -> None:
        waiter = asyncio.create_task(token.wait())
        await asyncio.sleep(0)
        waiting.wait(5)
        reasons.append(await asyncio.wait_for(waiter, 5))

    threads = [threading.Thread(target=lambda: asyncio.run(wait())) for _ in range(3)]
    for thread in threads:
        thread.start()
    waiting.wait(5)
    token.cancel("all")
    for thread in threads:
        thread.join(5)
    assert reasons == ["all"] * 3


def test_a_waiter_that_gave_up_leaves_nothing_behind() -> None:
    """A token may outlive thousands of runs."""
    token = CancellationToken()

    async def main() -> None:
        waiter = asyncio.create_task(token.wait())
        await asyncio.sleep(0)
        waiter.cancel()
        await asyncio.wait([waiter])

    asyncio.run(main())
    assert token._callbacks == []
    token.cancel()


def test_a_waiter_whose_loop_was_closed_does_not_keep_the_others_from_hearing() -> None:
    token = CancellationToken()
    loop = asyncio.new_event_loop()
    abandoned = token.wait()
    loop.call_soon(abandoned.send, None)
    loop.call_soon(loop.stop)
    # `wait` asks for the running loop, so it must begin inside one; then that loop dies without ending it.
    loop.run_forever()
    loop.close()
    heard: list[bool] = []
    token.on_cancel(lambda: heard.append(True))
    token.cancel()
    assert heard == [True]
    abandoned.close()


def test_a_callback_is_called_once_and_not_after_it_was_taken_back() -> None:
    token = CancellationToken()
    called: list[str] = []
    token.on_cancel(lambda: called.append("kept"))
    forget = token.on_cancel(lambda: called.append("forgotten"))
    forget()
    forget()
    token.cancel()
    token.cancel()
    token.on_cancel(lambda: called.append("late"))()
    assert called == ["kept", "late"]


def test_a_callback_may_use_the_token() -> None:
    token = CancellationToken()
    seen: list[Any] = []
    token.on_cancel(lambda: (token.cancel("again"), token.on_cancel(lambda: seen.append(token.reason))))
    token.cancel("first")
    assert seen == ["first"]


def _lines_of_on_cancel() -> list[int]:
    source, first = inspect.getsourcelines(CancellationToken.on_cancel)
    return list(range(1, len(source))) if first else []


@pytest.mark.parametrize("line", _lines_of_on_cancel())
def test_a_signal_in_the_middle_of_on_cancel_loses_no_callback(line) -> None:
    """A signal handler runs between any two lines of the thread it interrupts, and may cancel this very token."""
    token = CancellationToken()
    called: list[bool] = []
    code = CancellationToken.on_cancel.__code__
    interrupted = False

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal interrupted
        if frame.f_code is not code:
            return None
        if event == "line" and frame.f_lineno == code.co_firstlineno + line and not interrupted:
            interrupted = True
            token.cancel("signal")
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        token.on_cancel(lambda: called.append(True))
    finally:
        sys.settrace(before)
    token.cancel("at last")
    assert called == [True]


def test_cancelling_from_many_threads_wakes_once() -> None:
    token = CancellationToken()
    calls: list[bool] = []
    token.on_cancel(lambda: calls.append(True))
    barrier = threading.Barrier(8)

    def cancel(number: int) -> None:
        barrier.wait(5)
        token.cancel(str(number))

    threads = [threading.Thread(target=cancel, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(5)
    assert calls == [True]


def test_waiting_survives_a_cancellation_of_the_waiter_in_the_same_turn() -> None:
    token = CancellationToken()

    async def main() -> None:
        waiter = asyncio.create_task(token.wait())
        await asyncio.sleep(0)
        token.cancel()
        waiter.cancel()
        await until(waiter.done)
        assert waiter.cancelled()

    asyncio.run(main())
