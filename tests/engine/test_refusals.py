"""What a run makes of an endpoint that refuses: of a rate that is too high, by chance, or because nobody is there."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable

import pytest

from steelyard.engine import retry
from steelyard.engine.rate_limit import EndpointLimits, Outage, Pause, RateLimited
from steelyard.engine.retry import Retry, RetryPolicy
from steelyard.errors import TransientError, TransportError
from steelyard.protocols import InvocationContext
from steelyard.records import EvalCase, InvocationResponse
from tests.support.engine import Asked
from tests.support.virtual_time import LOOP_TIME, run_virtually, virtual_clock

Answer = Callable[[], Awaitable[InvocationResponse]]


@pytest.fixture(autouse=True)
def _virtual_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retry, "time", LOOP_TIME)


class Provider:
    """Takes so many calls a second, and as many in one burst; refuses the others."""

    def __init__(
        self, rate: float, *, latency: float, refusal_latency: float, retry_after: float | None = None
    ) -> None:
        self._retry_after = retry_after
        self._rate, self._latency, self._refusal_latency = rate, latency, refusal_latency
        self._clock = virtual_clock()
        self._room, self._since = max(1.0, rate), self._clock()
        self.refused = 0

    async def answer(self) -> InvocationResponse:
        now = self._clock()
        self._room = min(max(1.0, self._rate), self._room + (now - self._since) * self._rate)
        self._since = now
        if self._room < 1:
            self.refused += 1
            await asyncio.sleep(self._refusal_latency)
            raise TransientError("HTTP 429", overloaded=True, retry_after=self._retry_after)
        self._room -= 1
        await asyncio.sleep(self._latency)
        return InvocationResponse()


class Outcome:
    """How it went with a number of cases, a number of them at once."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.failed = 0
        self.attempts: list[int] = []

    async def run(
        self, answer: Answer, *, cases: int, at_once: int, policy: RetryPolicy | None = None, pauses: bool = True
    ) -> Outcome:
        clock = virtual_clock()
        began = clock()
        limited = RateLimited(Asked(lambda case, context: answer()), EndpointLimits(clock=clock, pauses=pauses))
        target = Retry(limited, policy or RetryPolicy())
        numbers = iter(range(cases))

        async def worker() -> None:
            for number in numbers:
                context = InvocationContext(f"c{number}")
                try:
                    await target.invoke(EvalCase(id=context.case_id), context)
                except TransientError:
                    self.failed += 1
                self.attempts.append(context.attempt)

        await asyncio.gather(*(worker() for _ in range(at_once)))
        self.seconds = clock() - began
        return self


@pytest.mark.parametrize("told", [None, 0.0, 0.2], ids=["says nothing", "says at once", "says when"])
@pytest.mark.parametrize(("rate", "latency", "refusal_latency"), [(5, 0.05, 0.01), (5, 0.5, 0.2), (0.5, 0.5, 0.05)])
def test_a_rate_limit_that_is_far_too_low_for_the_parallelism_fails_no_case_and_is_used_up(
    rate: float, latency: float, refusal_latency: float, told: float | None
) -> None:
    async def main() -> None:
        provider = Provider(
            rate, latency=latency, refusal_latency=refusal_latency, retry_after=told and told * 5 / rate
        )
        outcome = await Outcome().run(provider.answer, cases=200, at_once=50)
        assert outcome.failed == 0
        assert outcome.seconds < 1.1 * 200 / rate
        # It is found out how much it takes: not more than about two refusals for each answer.
        assert provider.refused < 2.5 * 200

    run_virtually(main())


@pytest.mark.parametrize(("share", "most_seconds"), [(0.1, 12), (0.2, 25), (0.3, 60)])
def test_refusals_by_chance_slow_a_sequential_run_by_little_more_than_their_pauses(
    share: float, most_seconds: float
) -> None:
    """200 calls of 20 ms: 4 s, and a tenth of a second for most refusals."""

    async def main() -> None:
        chance = random.Random(7)

        async def answer() -> InvocationResponse:
            await asyncio.sleep(0.02)
            if chance.random() < share:
                raise TransientError("HTTP 503", overloaded=True)
            return InvocationResponse()

        outcome = await Outcome().run(answer, cases=200, at_once=1)
        assert outcome.failed == 0
        assert outcome.seconds < most_seconds

    run_virtually(main())


def test_refusals_by_chance_do_not_stop_those_beside_them_for_long() -> None:
    async def main() -> None:
        chance = random.Random(7)

        async def answer() -> InvocationResponse:
            await asyncio.sleep(0.1)
            if chance.random() < 0.1:
                raise TransientError("HTTP 503", overloaded=True)
            return InvocationResponse()

        outcome = await Outcome().run(answer, cases=1000, at_once=50)
        assert outcome.failed == 0
        assert outcome.seconds < 10

    run_virtually(main())


def test_an_endpoint_that_answers_nobody_gets_as_many_tries_as_were_allowed() -> None:
    async def answer() -> InvocationResponse:
        raise TransientError("HTTP 429", overloaded=True)

    outcome = run_virtually(Outcome().run(answer, cases=20, at_once=20))
    assert outcome.failed == 20
    assert set(outcome.attempts) == {5}


def test_a_call_that_is_refused_for_ever_while_others_are_answered_ends_all_the_same() -> None:
    async def main() -> None:
        calls = 0

        async def answer() -> InvocationResponse:
            nonlocal calls
            calls += 1
            await asyncio.sleep(0.01)
            if asyncio.current_task() is unlucky:
                raise TransientError("HTTP 429", overloaded=True)
            return InvocationResponse()

        limited = RateLimited(Asked(lambda case, context: answer()), EndpointLimits(clock=virtual_clock()))
        target = Retry(limited, RetryPolicy())
        context = InvocationContext("unlucky")

        async def others() -> None:
            while True:
                await target.invoke(EvalCase(id="c"), InvocationContext("c"))

        beside = asyncio.create_task(others())
        unlucky = asyncio.create_task(target.invoke(EvalCase(id="unlucky"), context))
        with pytest.raises(TransientError):
            await unlucky
        beside.cancel()
        assert context.attempt <= 105

    run_virtually(main())


def test_who_wants_no_retries_gets_none_of_a_refusal_either() -> None:
    async def main() -> None:
        provider = Provider(5, latency=0.05, refusal_latency=0.01)
        outcome = await Outcome().run(provider.answer, cases=50, at_once=50, policy=RetryPolicy(attempts=1))
        assert set(outcome.attempts) == {1}
        assert outcome.failed == 45

    run_virtually(main())


def test_in_a_load_run_a_refusal_is_a_try_like_any_other() -> None:
    """Its errors are what is measured."""

    async def main() -> None:
        provider = Provider(5, latency=0.05, refusal_latency=0.01)
        outcome = await Outcome().run(
            provider.answer, cases=100, at_once=50, policy=RetryPolicy(attempts=3), pauses=False
        )
        assert max(outcome.attempts) == 3
        assert outcome.failed > 50

    run_virtually(main())


def test_after_a_pause_as_many_go_at_once_as_were_answered_before_it() -> None:
    pause = Pause()
    for _ in range(12):
        pause.answered()
    pause.overloaded(10.0, sent=9.9, retry_after=1.0)
    times = []
    for _ in range(48):
        times.append(round(pause.ready_at() - 11.0, 6))
        pause.take()
    assert times[:12] == [0.0] * 12
    # Refusals take 0.1 s to come back: from there on twice as many every 0.2 s.
    assert times[23] == pytest.approx(0.2)
    assert times[47] == pytest.approx(0.4)


def test_pauses_stay_short_while_there_are_answers_between_them() -> None:
    pause, now = Pause(), 0.0
    for _ in range(12):
        pause.overloaded(now, sent=now, retry_after=None)
        pause.answered()
        now = pause.ready_at()
    for _ in range(3):
        pause.overloaded(now, sent=now, retry_after=None)
        pause.answered()
        assert pause.ready_at() - now <= 2.0
        now = pause.ready_at()


def test_an_endpoint_that_nobody_can_reach_is_not_hammered_and_asked_soon_when_it_is_back() -> None:
    """In a load run too, which does not pause for refusals."""

    async def main() -> None:
        clock = virtual_clock()
        began, tries = clock(), 0

        async def answer(case: EvalCase, context: InvocationContext) -> InvocationResponse:
            nonlocal tries
            tries += 1
            await asyncio.sleep(0.001)
            if clock() - began < 60:
                raise TransportError("cannot connect")
            return InvocationResponse()

        target = RateLimited(Asked(answer), EndpointLimits(clock=clock, pauses=False))
        back_at = 0.0

        async def worker() -> None:
            nonlocal back_at
            while not back_at:
                try:
                    await target.invoke(EvalCase(id="c"), InvocationContext("c"))
                except TransportError:
                    continue
                back_at = clock() - began

        await asyncio.gather(*(worker() for _ in range(10)))
        assert tries < 10 * 50
        assert 60 <= back_at < 62.1

    run_virtually(main())


def test_lost_connections_among_answers_hold_up_nobody() -> None:
    outage = Outage()
    for moment in range(100):
        for _ in range(9):
            outage.failed(moment, sent=moment)
        outage.reached()
        assert outage.ready_at() <= moment


def test_the_tenth_lost_connection_in_a_row_starts_an_outage() -> None:
    outage = Outage()
    for _ in range(9):
        outage.failed(5.0, sent=4.0)
    assert outage.ready_at() < 5.0
    outage.failed(5.0, sent=4.0)
    assert outage.ready_at() == pytest.approx(5.1)


def test_an_outage_is_waited_for_twice_as_long_each_time_up_to_two_seconds() -> None:
    outage, now, waits = Outage(), 0.0, []
    for _ in range(9):
        outage.failed(now, sent=now)
    for _ in range(8):
        outage.failed(now, sent=now)
        outage.failed(now, sent=now - 0.01)  # sent before: known
        waits.append(outage.ready_at() - now)
        now = outage.ready_at()
    assert waits == pytest.approx([0.1, 0.2, 0.4, 0.8, 1.6, 2.0, 2.0, 2.0])
