"""What all calls to one endpoint share: a rate, a token budget, a pause. In virtual time, to the microsecond."""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from steelyard.engine import retry
from steelyard.engine.adaptive import AdaptivePermits
from steelyard.engine.rate_limit import EndpointLimits, Pause, RateLimited, Spacing
from steelyard.engine.retry import Retry, RetryPolicy
from steelyard.errors import ConfigurationError, TransientError
from steelyard.protocols import InvocationContext
from steelyard.records import EvalCase, InvocationResponse
from steelyard.run import case
from steelyard.run.case import Deadlines
from steelyard.targets.simulated import Simulated
from steelyard.units import RateLimit, parse_rate
from tests.support.engine import Asked
from tests.support.virtual_time import LOOP_TIME, run_virtually, virtual_clock


class Endpoint:
    """Remembers when each case was sent, in seconds from the beginning; answers as it is told to."""

    def __init__(self, answer: Callable[[EvalCase], Any] = lambda case: InvocationResponse(), **limits: Any) -> None:
        self.clock = virtual_clock()
        self.began = self.clock()
        self.limits = EndpointLimits(clock=self.clock, **limits)
        self.target = RateLimited(
            Asked(self._invoke), self.limits, estimate=lambda case: case.metadata.get("tokens", 0)
        )
        self.sent: list[tuple[str, float]] = []
        self.contexts: dict[str, InvocationContext] = {}
        self._answer = answer

    async def _invoke(self, case: EvalCase, context: InvocationContext) -> InvocationResponse:
        self.sent.append((case.id, self.clock() - self.began))
        answer = self._answer(case)
        if isinstance(answer, Awaitable):
            answer = await answer
        if isinstance(answer, Exception):
            raise answer
        return answer

    @property
    def times(self) -> list[float]:
        return [at for _, at in self.sent]

    async def ask(self, name: str, tokens: int = 0, context: InvocationContext | None = None) -> InvocationResponse:
        self.contexts[name] = context or InvocationContext(name)
        return await self.target.invoke(EvalCase(id=name, metadata={"tokens": tokens}), self.contexts[name])

    async def ask_all(self, count: int, tokens: int = 0) -> None:
        await asyncio.gather(*(self.ask(f"c{number}", tokens) for number in range(count)), return_exceptions=True)


@settings(max_examples=60, deadline=None)
@given(
    count=st.integers(1, 40),
    period=st.sampled_from([1.0, 60.0, 3600.0]),
    moments=st.lists(st.tuples(st.floats(0, 0.005), st.sampled_from([0.0] * 30 + [0.3, 2.0])), max_size=200),
)
def test_no_window_of_the_period_ever_has_more_sends_than_allowed(count, period, moments) -> None:
    """Whatever the timers' lateness, and after any time without a send."""
    spacing = Spacing(RateLimit(count, period))
    now, sends = 0.0, []
    for late, idle_periods in moments:
        now = max(now + idle_periods * period, spacing.ready_at() + late)
        spacing.take(now)
        sends.append(now)
    apart = np.array(sends[count:]) - np.array(sends[: max(0, len(sends) - count)])
    assert np.all(apart >= period * (1 - 1e-9))


@pytest.mark.parametrize("rate", ["2/s", "600/min", "1000/s", "5000/h"])
def test_timers_that_fire_late_cost_hardly_any_of_the_rate(rate) -> None:
    limit = parse_rate(rate)
    spacing = Spacing(limit)
    now = 0.0
    for _ in range(2000):
        now = max(now, spacing.ready_at() + 0.002)
        spacing.take(now)
    assert 0.985 <= 2000 / now / limit.per_second <= 1.001


def test_calls_are_sent_at_even_distances_in_the_order_in_which_they_came() -> None:
    async def main() -> None:
        endpoint = Endpoint(rate=parse_rate("600/min"))
        await endpoint.ask_all(50)
        assert [name for name, _ in endpoint.sent] == [f"c{number}" for number in range(50)]
        assert endpoint.times[0] == 0
        assert np.allclose(np.diff(endpoint.times)[1:], 0.1, rtol=0.01)
        assert endpoint.limits.waiting == 0

    run_virtually(main())


def test_time_unused_is_not_saved_up_for_a_burst() -> None:
    async def main() -> None:
        endpoint = Endpoint(rate=parse_rate("10/s"))
        await endpoint.ask("first")
        await asyncio.sleep(60)
        await endpoint.ask_all(10)
        assert np.all(np.diff(endpoint.times)[1:] > 0.08)

    run_virtually(main())


def test_the_time_that_a_call_waited_is_told_apart_and_its_own_clock_stands_still() -> None:
    class Clock:
        def __init__(self) -> None:
            self.calls: list[str] = []

        def stop(self) -> None:
            self.calls.append("stop")

        def start(self) -> None:
            self.calls.append("start")

    async def main() -> None:
        endpoint = Endpoint(rate=parse_rate("1/s"))
        clocks = [Clock(), Clock()]
        await asyncio.gather(
            *(endpoint.ask(f"c{n}", context=InvocationContext(f"c{n}", clock=clocks[n])) for n in range(2))
        )
        assert clocks[0].calls == []
        assert clocks[1].calls == ["stop", "start"]
        assert endpoint.contexts["c0"].waiting == 0
        assert endpoint.contexts["c1"].waiting == pytest.approx(1.0, rel=0.02)

    run_virtually(main())


def test_waiting_for_leave_does_not_use_up_the_time_of_the_case(monkeypatch) -> None:
    monkeypatch.setattr(case, "time", LOOP_TIME)

    async def main() -> None:
        endpoint = Endpoint(lambda case: asyncio.sleep(4, InvocationResponse()), rate=parse_rate("1/min"))
        limit = Deadlines(5.0)

        async def one(name: str) -> bool:
            task = asyncio.current_task()
            assert task is not None
            clock = limit.begin(task)
            try:
                await endpoint.ask(name, context=InvocationContext(name, clock=clock))
            finally:
                late = limit.end(task)
            return late

        assert await asyncio.gather(*(one(f"c{n}") for n in range(4))) == [False] * 4
        assert endpoint.times[-1] > 179

    run_virtually(main())


def test_a_wait_that_is_cancelled_takes_nothing_from_those_behind_it() -> None:
    async def main() -> None:
        endpoint = Endpoint(rate=parse_rate("1/s"))
        tasks = [asyncio.create_task(endpoint.ask(f"c{number}")) for number in range(6)]
        await asyncio.sleep(0.5)
        for number in (1, 2, 3):
            tasks[number].cancel()
        await asyncio.wait(tasks)
        assert [name for name, _ in endpoint.sent] == ["c0", "c4", "c5"]
        assert endpoint.times == pytest.approx([0, 1, 2], rel=0.02)
        assert endpoint.contexts["c2"].waiting == pytest.approx(0.5)

    run_virtually(main())


def test_leave_given_to_a_call_that_is_cancelled_in_the_same_turn_is_given_back() -> None:
    async def main() -> None:
        endpoint = Endpoint(rate=parse_rate("1/s"), tokens_per_min=60)
        tasks = [asyncio.create_task(endpoint.ask(f"c{number}", tokens=1)) for number in range(3)]
        await asyncio.sleep(0)
        loop = asyncio.get_running_loop()
        # At the very moment at which c1 is let through: in one turn of the loop it gets a permit and is cancelled.
        loop.call_at(loop.time() + 1.01 - 0.01, tasks[1].cancel)
        await asyncio.wait(tasks)
        assert [name for name, _ in endpoint.sent] == ["c0", "c2"]
        assert endpoint.times[1] == pytest.approx(1.0, rel=0.03)

    run_virtually(main())


def test_when_all_are_cancelled_no_timer_is_left() -> None:
    async def main() -> None:
        endpoint = Endpoint(rate=parse_rate("1/h"))
        tasks = [asyncio.create_task(endpoint.ask(f"c{number}")) for number in range(3)]
        await asyncio.sleep(1)
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        assert [handle for handle in asyncio.get_running_loop()._scheduled if not handle.cancelled()] == []  # type: ignore[attr-defined]

    run_virtually(main())


def test_a_token_budget_spaces_calls_by_their_size() -> None:
    async def main() -> None:
        endpoint = Endpoint(tokens_per_min=600)
        await asyncio.gather(*(endpoint.ask(f"c{n}", tokens=size) for n, size in enumerate([50, 100, 200, 1, 1])))
        assert endpoint.times == pytest.approx([0, 5, 15, 35, 35.1], rel=0.01, abs=0.1)

    run_virtually(main())


def test_a_call_larger_than_the_whole_budget_is_sent_and_paid_off_after() -> None:
    async def main() -> None:
        endpoint = Endpoint(tokens_per_min=100)
        await asyncio.gather(endpoint.ask("huge", tokens=300), endpoint.ask("next", tokens=1))
        assert endpoint.times == pytest.approx([0, 180], rel=0.01)

    run_virtually(main())


def test_what_was_really_used_takes_the_place_of_the_estimate() -> None:
    async def main() -> None:
        used = InvocationResponse(num_tokens_input=10, num_tokens_output=50)
        endpoint = Endpoint(lambda case: used, tokens_per_min=600)
        await endpoint.ask("c0", tokens=10)
        await endpoint.ask("c1", tokens=10)  # 60 tokens and not 10 were used: 6 s later
        assert endpoint.times[1] == pytest.approx(6, rel=0.02)
        # By now it is known that answers come to 50 tokens more than their estimates: they are set aside beforehand.
        await asyncio.gather(endpoint.ask("c2", tokens=10), endpoint.ask("c3", tokens=10))
        assert endpoint.times[3] - endpoint.times[2] == pytest.approx(6, rel=0.02)

    run_virtually(main())


def test_an_estimate_that_was_too_high_is_given_back_at_once() -> None:
    async def main() -> None:
        endpoint = Endpoint(
            lambda case: asyncio.sleep(1, InvocationResponse(num_tokens_input=6, num_tokens_output=0)),
            tokens_per_min=60,
        )
        await asyncio.gather(endpoint.ask("c0", tokens=600), endpoint.ask("c1", tokens=6))
        assert endpoint.times[1] == pytest.approx(6, rel=0.02)

    run_virtually(main())


@pytest.mark.parametrize("given", [0, -5])
def test_a_budget_of_nothing_is_refused(given) -> None:
    with pytest.raises(ConfigurationError, match=f"tokens_per_min must be >= 1, got {given}"):
        EndpointLimits(tokens_per_min=given)


def overloaded_once(retry_after: float | None) -> Callable[[EvalCase], Any]:
    return lambda case: (
        TransientError("429", overloaded=True, retry_after=retry_after) if case.id == "bad" else InvocationResponse()
    )


def test_an_overloaded_endpoint_is_left_alone_by_all_until_its_retry_after() -> None:
    async def main() -> None:
        endpoint = Endpoint(overloaded_once(7.5))
        with pytest.raises(TransientError):
            await endpoint.ask("bad")
        await endpoint.ask_all(64)
        times = endpoint.times[1:]
        assert times[0] == pytest.approx(7.5)
        # Not all at once: they double every 20 ms, and all are through after 6 doublings.
        assert max(sum(start <= at < start + 0.005 for at in times) for start in times) <= 16
        assert times[-1] == pytest.approx(7.5 + 0.02 * 6, abs=0.001)
        assert endpoint.contexts["c0"].waiting == pytest.approx(7.5)

    run_virtually(main())


def test_those_who_come_when_the_pause_has_just_ended_are_spread_as_well() -> None:
    """Retries that waited out the same Retry-After come back at the same moment."""

    async def main() -> None:
        endpoint = Endpoint(overloaded_once(1.0))
        with pytest.raises(TransientError):
            await endpoint.ask("bad")
        await asyncio.sleep(1.0)
        await endpoint.ask_all(64)
        assert endpoint.times[-1] - endpoint.times[1] == pytest.approx(0.12, abs=0.001)
        before = len(endpoint.sent)
        await asyncio.sleep(1.0)
        await endpoint.ask_all(64)
        assert len(set(endpoint.times[before:])) == 1

    run_virtually(main())


def test_a_fault_that_is_no_overload_pauses_nobody() -> None:
    async def main() -> None:
        endpoint = Endpoint(lambda case: TransientError("500", retry_after=9.0))
        await endpoint.ask_all(3)
        assert endpoint.times == [0, 0, 0]

    run_virtually(main())


def test_without_pauses_an_overloaded_endpoint_is_asked_on() -> None:
    async def main() -> None:
        endpoint = Endpoint(overloaded_once(9.0), pauses=False)
        with pytest.raises(TransientError):
            await endpoint.ask("bad")
        await endpoint.ask("next")
        assert endpoint.times == [0, 0]

    run_virtually(main())


def test_a_pause_of_unknown_length_grows_while_it_does_not_help_and_decays_when_it_does() -> None:
    pause, now, lengths = Pause(), 0.0, []
    for _ in range(12):
        pause.overloaded(now, sent=now, retry_after=None)
        lengths.append(pause.ready_at() - now)
        now = pause.ready_at()
    assert lengths[:4] == pytest.approx([0.1, 0.2, 0.4, 0.8])
    assert lengths[-1] == 30.0
    for _ in range(60):
        pause.answered()
    pause.overloaded(now, sent=now, retry_after=None)
    assert pause.ready_at() - now == pytest.approx(0.1)


def test_calls_refused_together_make_one_pause_and_not_one_each() -> None:
    pause = Pause()
    for number in range(50):
        pause.overloaded(10.0 + number / 1000, sent=9.0, retry_after=None)
    assert pause.ready_at() == pytest.approx(10.1)
    pause.overloaded(10.06, sent=9.0, retry_after=3.0)
    assert pause.ready_at() == pytest.approx(13.06)
    pause.overloaded(10.07, sent=9.0, retry_after=0.01)
    assert pause.ready_at() == pytest.approx(13.06)


@pytest.mark.parametrize("asked", [601.0, 3600.0, 1e9, float("inf")])
def test_an_endpoint_that_asks_for_longer_than_any_call_would_wait_does_not_hold_up_the_run(asked) -> None:
    """Waiting for a permit stops a case's own time: nothing else would end a run that was told to wait for a year."""
    pause, now = Pause(), 0.0
    for _ in range(20):
        pause.overloaded(now, sent=now, retry_after=asked)
        assert pause.ready_at() - now == pytest.approx(0.1)
        now = pause.ready_at()
    pause.overloaded(now, sent=now, retry_after=600.0)
    assert pause.ready_at() - now == pytest.approx(600.0)


@pytest.mark.parametrize("asked", [None, 20.0])
def test_an_endpoint_that_has_refused_everything_for_ten_minutes_holds_up_the_run_no_longer(asked, monkeypatch) -> None:
    """Else each pause would let one call through to be refused, and a run of thousands of cases take weeks."""
    monkeypatch.setattr(retry, "time", LOOP_TIME)

    async def main() -> None:
        endpoint = Endpoint(lambda case: TransientError("503", overloaded=True, retry_after=asked))
        endpoint.target = Retry(endpoint.target, RetryPolicy())
        await endpoint.ask_all(400)
        assert len(endpoint.sent) == 400 * 5
        assert sum(at < 600 for at in endpoint.times) < 100
        assert endpoint.times[-1] < 1000

    run_virtually(main())


def test_an_answer_makes_the_pauses_patient_again() -> None:
    pause = Pause()
    pause.overloaded(0.0, sent=0.0, retry_after=5.0)
    pause.overloaded(601.0, sent=601.0, retry_after=5.0)
    assert pause.ready_at() == pytest.approx(601.1)
    pause.answered()
    pause.overloaded(602.0, sent=602.0, retry_after=5.0)
    assert pause.ready_at() == pytest.approx(607.0)


def test_a_run_whose_endpoint_refuses_everything_for_an_hour_ends_within_seconds(monkeypatch) -> None:
    monkeypatch.setattr(retry, "time", LOOP_TIME)

    async def main() -> None:
        endpoint = Endpoint(lambda case: TransientError("429", overloaded=True, retry_after=3600.0))
        endpoint.target = Retry(endpoint.target, RetryPolicy())
        await endpoint.ask_all(200)
        assert len(endpoint.sent) == 200
        assert 19 < endpoint.times[-1] < 30

    run_virtually(main())


class Recorder(AdaptivePermits):
    """Keeps what it is told."""

    def __init__(self) -> None:
        super().__init__(100)
        self.seen: list[tuple[str, float, int | None]] = []
        self.on_wire = 0

    def began(self) -> int:
        self.on_wire += 1
        return self.on_wire

    def ended(self) -> None:
        self.on_wire -= 1

    def observe(self, outcome: Any, latency: float, in_use: int | None = None) -> None:
        self.seen.append((outcome, round(latency, 6), in_use))


def test_permits_hear_of_every_try_its_seconds_on_the_wire_and_how_many_were_there() -> None:
    answers = {
        "told": InvocationResponse(time_to_last_token=1.5),
        "measured": InvocationResponse(),
        "bad": InvocationResponse(error="nonsense"),
        "busy": TransientError("429", overloaded=True),
        "broken": ValueError("bug"),
    }

    async def main() -> None:
        permits = Recorder()
        endpoint = Endpoint(lambda case: asyncio.sleep(2, answers[case.id]), permits=permits, pauses=False)
        await asyncio.gather(*(endpoint.ask(name) for name in answers), return_exceptions=True)
        assert sorted(permits.seen, key=lambda seen: seen[2] or 0) == [
            ("ok", 1.5, 1),
            ("ok", 2.0, 2),
            ("error", 2.0, 3),
            ("overloaded", 2.0, 4),
            ("error", 2.0, 5),
        ]
        assert permits.on_wire == 0

    run_virtually(main())


def test_no_more_calls_are_on_the_wire_than_there_are_permits_whoever_makes_them() -> None:
    """A judge's endpoint has no gate of its own in front of it."""

    async def main() -> None:
        permits = AdaptivePermits(3, start=3)
        endpoint = Endpoint(lambda case: asyncio.sleep(1, InvocationResponse(error="no news")), permits=permits)
        await endpoint.ask_all(9)
        assert endpoint.times == pytest.approx([0, 0, 0, 1, 1, 1, 2, 2, 2])
        assert endpoint.contexts["c8"].waiting == pytest.approx(2)

    run_virtually(main())


def test_permits_that_are_added_let_those_go_who_wait() -> None:
    async def main() -> None:
        permits = AdaptivePermits(100, start=2, clock=virtual_clock())
        endpoint = Endpoint(lambda case: asyncio.sleep(1, InvocationResponse()), permits=permits)
        await endpoint.ask_all(14)
        assert endpoint.times == pytest.approx([0] * 2 + [1] * 4 + [2] * 8)

    run_virtually(main())


def test_a_permit_given_to_a_call_that_is_cancelled_in_the_same_turn_goes_to_the_next() -> None:
    async def main() -> None:
        permits = AdaptivePermits(1)
        limits = EndpointLimits(permits=permits, clock=virtual_clock())
        assert limits.permit_now(0) is not None
        given, behind = (asyncio.create_task(limits.permit(0, InvocationContext("c"))) for _ in range(2))
        await asyncio.sleep(0)
        limits.ended()
        given.cancel()
        await asyncio.wait([given, behind])
        assert given.cancelled()
        assert (behind.result().in_use, permits.has_room) == (1, False)
        limits.ended()
        assert permits.has_room

    run_virtually(main())


def test_a_call_that_is_cancelled_says_nothing_of_the_endpoint_but_leaves_the_wire() -> None:
    async def main() -> None:
        permits = Recorder()
        endpoint = Endpoint(lambda case: asyncio.sleep(60, InvocationResponse()), permits=permits)
        task = asyncio.create_task(endpoint.ask("c"))
        await asyncio.sleep(1)
        assert permits.on_wire == 1
        task.cancel()
        await asyncio.wait([task])
        assert (permits.on_wire, permits.seen) == (0, [])

    run_virtually(main())


def test_an_answer_of_the_wrong_type_is_passed_on_for_the_work_to_name() -> None:
    async def main() -> Any:
        return await Endpoint(lambda case: "text").ask("c")

    assert run_virtually(main()) == "text"


def test_what_a_target_says_of_itself_is_passed_on() -> None:
    inner = Simulated(parallelism=7)
    outer = RateLimited(inner, EndpointLimits())
    assert outer.model_id == inner.model_id
    assert outer.default_parallelism == 7
    assert outer.identity() == inner.identity()


def test_a_limited_target_can_be_pickled() -> None:
    limits = EndpointLimits(rate=parse_rate("1/s"), tokens_per_min=9, permits=AdaptivePermits(5))
    copy = pickle.loads(pickle.dumps(RateLimited(Simulated(latency=0), limits)))
    assert copy.model_id == "simulated"
