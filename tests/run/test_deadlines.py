"""The time limit of a case, one timer for all of them: `Deadlines`, as the work uses it."""

from __future__ import annotations

import asyncio
import pickle
import time
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from steelyard.protocols import InvocationContext
from steelyard.records import EvalCase, InvocationResponse, Record
from steelyard.run import case
from steelyard.run.case import CaseRunner, Deadlines
from steelyard.scoring.pipeline import ScoringPipeline
from tests.support.engine import Asked, make_job
from tests.support.virtual_time import LOOP_TIME, run_virtually


class RateLimited:
    """Calls under one limit."""

    def __init__(self, seconds: float) -> None:
        self._work = CaseRunner(Asked(self._answer), ScoringPipeline(()), timeout=seconds, seed=0)

    async def _answer(self, case: EvalCase, context: InvocationContext) -> InvocationResponse:
        return InvocationResponse(response_text=await case.metadata["call"]())

    async def record(self, call: Callable[[], Awaitable[str]]) -> Record:
        records: list[Record] = []
        await self._work(make_job(metadata={"call": call}), records.append)
        assert len(records) == 1
        return records[0]

    async def outcome(self, call: Callable[[], Awaitable[str]]) -> str:
        """What a limited call came to: its answer, or the type of its error."""
        record = await self.record(call)
        return record.error_type or record.response_text or ""


async def answer_after(seconds: float) -> str:
    await asyncio.sleep(seconds)
    return "answer"


async def never() -> str:
    return await answer_after(3600)


def assert_not_being_cancelled() -> None:
    task = asyncio.current_task()
    assert task is not None
    assert task.cancelling() == 0


def test_a_call_within_its_time_is_left_alone() -> None:
    assert asyncio.run(RateLimited(5.0).outcome(lambda: answer_after(0))) == "answer"


def test_a_call_is_ended_when_its_time_is_up_and_not_before() -> None:
    async def main() -> float:
        began = time.monotonic()
        record = await RateLimited(0.05).record(never)
        assert (record.error_type, record.error) == ("TimeoutError", "TimeoutError: no answer within 0.05 s")
        return time.monotonic() - began

    spent = asyncio.run(main())
    assert 0.049 <= spent < 5.0


def test_the_task_can_go_on_after_a_timeout() -> None:
    """Nothing of the cancellation is left: the worker takes the next job."""

    async def main() -> None:
        limited = RateLimited(0.01)
        for _ in range(3):
            assert await limited.outcome(never) == "TimeoutError"
            assert_not_being_cancelled()
            assert await limited.outcome(lambda: answer_after(0)) == "answer"

    asyncio.run(main())


def test_calls_that_began_apart_each_get_their_own_time() -> None:
    async def main() -> None:
        limited = RateLimited(0.06)
        began = time.monotonic()
        ended: list[float] = []

        async def one(delay: float) -> None:
            await asyncio.sleep(delay)
            assert await limited.outcome(never) == "TimeoutError"
            ended.append(time.monotonic() - began - delay)

        await asyncio.gather(*(one(0.01 * number) for number in range(5)))
        assert all(0.055 <= spent < 5.0 for spent in ended)

    asyncio.run(main())


def test_all_calls_share_one_timer() -> None:
    async def main() -> int:
        loop = asyncio.get_running_loop()
        timers = 0
        original = loop.call_at

        def counting(*args: Any, **kwargs: Any) -> asyncio.TimerHandle:
            nonlocal timers
            timers += 1
            return original(*args, **kwargs)

        loop.call_at = counting  # type: ignore[method-assign]
        limited = RateLimited(5.0)
        for _ in range(20):
            await asyncio.gather(*(limited.outcome(answer_at_once) for _ in range(50)))
        return timers

    async def answer_at_once() -> str:
        return "answer"

    assert asyncio.run(main()) == 1


@pytest.mark.parametrize("calls", [2, 100])
def test_calls_that_expire_at_the_same_moment_all_end(calls) -> None:
    async def main() -> list[str]:
        limited = RateLimited(0.02)
        return await asyncio.gather(*(limited.outcome(never) for _ in range(calls)))

    assert asyncio.run(main()) == ["TimeoutError"] * calls


@settings(max_examples=15, deadline=None)
@given(st.lists(st.sampled_from([0.0, 0.009, 0.0099, 0.01, 0.0101, 0.011, 60.0]), min_size=1, max_size=30))
def test_when_answers_race_with_the_deadline_each_call_is_an_answer_or_a_timeout(times) -> None:
    """Whichever wins, it wins alone: no call is lost, hangs, or is left with a cancellation."""

    async def one(limited: RateLimited, seconds: float) -> str:
        said = await limited.outcome(lambda: answer_after(seconds))
        await asyncio.sleep(0)
        assert_not_being_cancelled()
        return said

    async def main() -> list[str]:
        limited = RateLimited(0.01)
        return await asyncio.gather(*(one(limited, seconds) for seconds in times))

    said = asyncio.run(main())
    assert set(said) <= {"answer", "TimeoutError"}
    assert all(answer == "TimeoutError" for answer, seconds in zip(said, times, strict=True) if seconds == 60.0)
    assert all(answer == "answer" for answer, seconds in zip(said, times, strict=True) if seconds == 0.0)


@pytest.mark.parametrize("both", [False, True], ids=["before the deadline", "at the very same moment"])
def test_a_cancellation_from_outside_is_not_reported_as_a_timeout(both) -> None:
    async def main() -> None:
        limited = RateLimited(0.02)
        inside = asyncio.Event()

        async def call() -> str:
            inside.set()
            return await never()

        task = asyncio.create_task(limited.outcome(call))
        await inside.wait()
        if both:
            time.sleep(0.03)  # noqa: ASYNC251 - the deadline passes while the loop is busy: both come in one turn
            asyncio.get_running_loop().call_soon(task.cancel)
        else:
            task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())


def test_a_call_that_swallows_the_deadline_and_answers_late_has_answered() -> None:
    """The answer was given and paid for; its time tells that it was late."""

    async def stubborn() -> str:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            await asyncio.sleep(0.005)
        return "late"

    async def main() -> None:
        assert await RateLimited(0.01).outcome(stubborn) == "late"
        assert_not_being_cancelled()
        await asyncio.sleep(0)

    asyncio.run(main())


def test_what_a_call_raises_when_its_time_is_up_is_what_it_raised() -> None:
    async def breaks() -> str:
        try:
            return await never()
        except asyncio.CancelledError:
            raise ValueError("could not clean up") from None

    async def main() -> None:
        assert await RateLimited(0.01).outcome(breaks) == "ValueError"
        assert_not_being_cancelled()

    asyncio.run(main())


@pytest.mark.parametrize(
    ("inner", "said"), [(0.005, "inner"), (60.0, "TimeoutError")], ids=["inner is shorter", "ours is shorter"]
)
def test_a_timeout_of_the_target_nests_in_ours(inner, said) -> None:
    async def careful() -> str:
        try:
            async with asyncio.timeout(inner):
                await asyncio.sleep(60)
        except TimeoutError:
            return "inner"
        return ""

    assert asyncio.run(RateLimited(0.05).outcome(careful)) == said


def test_a_timeout_of_the_target_at_the_same_moment_as_ours_ends_the_call_once() -> None:
    async def careful() -> str:
        async with asyncio.timeout(0.01):
            time.sleep(0.02)  # noqa: ASYNC251 - both deadlines pass while the loop is busy
            await asyncio.sleep(60)
        return ""

    async def main() -> None:
        assert await RateLimited(0.01).outcome(careful) == "TimeoutError"
        assert_not_being_cancelled()

    asyncio.run(main())


def test_a_pickled_copy_starts_without_timers() -> None:
    async def main() -> Deadlines:
        task = asyncio.current_task()
        assert task is not None
        deadlines = Deadlines(60.0)
        deadlines.begin(task)
        copy: Deadlines = pickle.loads(pickle.dumps(deadlines))
        deadlines.end(task)
        return copy

    assert asyncio.run(main()).seconds == 60.0


def current() -> asyncio.Task[Any]:
    task = asyncio.current_task()
    assert task is not None
    return task


async def stopped_for(limit: Deadlines, steps: list[tuple[str, float]]) -> bool:
    """Whether the time ran out during these steps: each a number of seconds to wait, stopped or running."""
    task = current()
    clock = limit.begin(task)
    try:
        for what, seconds in steps:
            if what == "stopped":
                clock.stop()
            try:
                await asyncio.sleep(seconds)
            finally:
                if what == "stopped":
                    clock.start()
    except asyncio.CancelledError:
        assert limit.end(task)
        return True
    late = limit.end(task)
    assert not task.cancelling()
    return late


@pytest.mark.parametrize(
    ("steps", "late"),
    [
        ([("running", 4.9)], False),
        ([("running", 5.1)], True),
        ([("stopped", 60.0)], False),
        ([("running", 3.0), ("stopped", 60.0), ("running", 1.9)], False),
        ([("running", 3.0), ("stopped", 60.0), ("running", 2.1)], True),
        ([("stopped", 9.0), ("running", 3.0), ("stopped", 9.0), ("running", 1.9)], False),
        ([("stopped", 9.0), ("running", 3.0), ("stopped", 9.0), ("running", 2.1)], True),
    ],
)
def test_time_while_the_clock_is_stopped_does_not_count(monkeypatch, steps, late) -> None:
    monkeypatch.setattr(case, "time", LOOP_TIME)
    assert run_virtually(stopped_for(Deadlines(5.0), steps)) is late


def test_calls_that_are_stopped_do_not_hold_up_those_that_are_not(monkeypatch) -> None:
    """The oldest is stopped; the younger ones behind it in the order still expire on time."""
    monkeypatch.setattr(case, "time", LOOP_TIME)

    async def main() -> None:
        limit = Deadlines(5.0)
        loop = asyncio.get_running_loop()
        began = loop.time()
        ended: dict[str, float] = {}

        async def one(name: str, steps: list[tuple[str, float]]) -> bool:
            late = await stopped_for(limit, steps)
            ended[name] = loop.time() - began
            return late

        late = await asyncio.gather(
            one("stopped", [("stopped", 20.0), ("running", 60.0)]),
            one("running", [("running", 60.0)]),
            one("done", [("running", 1.0)]),
        )
        assert late == [True, True, False]
        assert ended == pytest.approx({"stopped": 25.0, "running": 5.0, "done": 1.0}, abs=0.01)

    run_virtually(main())


def test_parts_of_a_call_that_wait_at_once_start_it_again_when_all_have_done_so(monkeypatch) -> None:
    monkeypatch.setattr(case, "time", LOOP_TIME)

    async def main() -> bool:
        limit, task = Deadlines(5.0), current()
        clock = limit.begin(task)
        clock.stop()
        clock.stop()
        await asyncio.sleep(60)
        clock.start()
        await asyncio.sleep(60)
        clock.start()
        clock.start()  # once too often: of no effect
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            return limit.end(task)
        return False

    assert run_virtually(main())


def test_a_clock_that_outlives_its_call_does_not_touch_the_next_one(monkeypatch) -> None:
    """The same task runs one call after the other."""
    monkeypatch.setattr(case, "time", LOOP_TIME)

    async def main() -> None:
        limit, task = Deadlines(5.0), current()
        old = limit.begin(task)
        old.stop()
        assert limit.end(task) is False
        old.start()
        await asyncio.sleep(1)
        limit.begin(task)
        old.stop()
        with pytest.raises(asyncio.CancelledError):
            await asyncio.sleep(60)
        assert limit.end(task)
        old.start()
        await asyncio.sleep(60)
        assert_not_being_cancelled()

    run_virtually(main())


def test_a_call_whose_time_is_up_while_it_unwinds_can_still_stop_its_clock(monkeypatch) -> None:
    monkeypatch.setattr(case, "time", LOOP_TIME)

    async def main() -> None:
        limit, task = Deadlines(5.0), current()
        clock = limit.begin(task)
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            clock.stop()
            await asyncio.sleep(60)
            clock.start()
        assert limit.end(task)
        await asyncio.sleep(60)
        assert_not_being_cancelled()

    run_virtually(main())
