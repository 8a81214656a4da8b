"""Asking again after a transient fault: bounded, jittered, and never without the permit."""

from __future__ import annotations

import asyncio
import pickle
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from steelyard.engine import retry
from steelyard.engine.base import CancellationToken
from steelyard.engine.local import LocalEngine
from steelyard.engine.retry import Retry, RetryPolicy
from steelyard.errors import TargetError, TransientError
from steelyard.protocols import InvocationContext
from steelyard.records import EvalCase, InvocationResponse, Record
from steelyard.run.case import CaseRunner
from steelyard.scoring.pipeline import ScoringPipeline
from steelyard.targets.function import CallableTarget
from steelyard.targets.simulated import Simulated
from tests.support.engine import Asked, Gauge, make_job, make_jobs, one_record, raising, until
from tests.support.virtual_time import LOOP_TIME, run_virtually

AT_ONCE = RetryPolicy(first_wait=0.0, max_wait=0.0)


class Failing:
    """A target that fails with these errors, one a call, and then answers; keeps the attempt numbers it saw."""

    model_id = "failing"
    default_parallelism = 3

    def __init__(self, *errors: BaseException) -> None:
        self._errors = list(errors)
        self.attempts: list[int] = []

    def identity(self) -> dict[str, Any]:
        return {"kind": "failing"}

    async def invoke(self, case: EvalCase, context: InvocationContext) -> InvocationResponse:
        self.attempts.append(context.attempt)
        if self._errors:
            raise self._errors.pop(0)
        return InvocationResponse(response_text="at last")


def ask(target: Any, policy: RetryPolicy = AT_ONCE) -> Record:
    return one_record(Retry(target, policy))


@pytest.mark.parametrize("error", [TransientError("429"), ConnectionResetError("gone"), TimeoutError("slow")])
def test_a_transient_fault_is_tried_again_and_the_record_says_how_often(error) -> None:
    target = Failing(error, error)
    record = ask(target)
    assert (record.status, record.response_text) == ("ok", "at last")
    assert (record.attempts, record.retries) == (3, 2)
    assert target.attempts == [1, 2, 3]


@pytest.mark.parametrize("error", [ValueError("no"), TargetError("final"), KeyError("k"), OSError("disk")])
def test_any_other_fault_is_final(error) -> None:
    target = Failing(error)
    record = ask(target)
    assert (record.status, record.attempts, record.retries) == ("error", 1, 0)
    assert record.error_type == type(error).__name__
    assert target.attempts == [1]


def test_what_is_named_in_retry_on_is_transient_too() -> None:
    class MyBusy(Exception):
        pass

    target = Failing(MyBusy("once"), ValueError("not named"))
    record = ask(target, RetryPolicy(first_wait=0.0, retry_on=(MyBusy,)))
    assert (record.error_type, record.attempts) == ("ValueError", 2)


@pytest.mark.parametrize("attempts", [1, 2, 5])
def test_attempts_are_bounded(attempts) -> None:
    target = Failing(*(TransientError(f"number {n}") for n in range(1, 99)))
    record = ask(target, RetryPolicy(attempts=attempts, first_wait=0.0))
    assert target.attempts == list(range(1, attempts + 1))
    assert (record.status, record.attempts) == ("error", attempts)
    assert record.error == f"TransientError: number {attempts}"


def test_a_call_that_used_up_its_attempts_says_how_often_it_was_tried_again() -> None:
    record = ask(raising(TransientError("busy")))
    assert (record.attempts, record.retries) == (5, 4)


def test_the_total_time_is_bounded_and_no_wait_goes_past_it(monkeypatch) -> None:
    clock = 0.0

    async def sleep(seconds: float) -> None:
        nonlocal clock
        clock += seconds

    monkeypatch.setattr(retry.asyncio, "sleep", sleep)
    monkeypatch.setattr(retry.time, "monotonic", lambda: clock)
    monkeypatch.setattr(retry.random, "uniform", lambda low, high: high)
    target = Failing(*(TransientError("busy") for _ in range(999)))
    policy = RetryPolicy(attempts=999, first_wait=1.0, max_wait=8.0, total_seconds=30.0)
    with pytest.raises(TransientError):
        asyncio.run(Retry(target, policy).invoke(EvalCase(id="c"), InvocationContext(case_id="c")))
    # 1 + 2 + 4 + 8 + 8 = 23 s; another wait of 8 s would end after the 30 s.
    assert clock == 23.0
    assert target.attempts == [1, 2, 3, 4, 5, 6]


@given(
    attempt=st.integers(2, 5_000),
    first=st.floats(0.0, 10.0),
    longest=st.floats(0.0, 100.0),
)
def test_a_wait_is_within_the_bounds_of_full_jitter(attempt, first, longest) -> None:
    wait = RetryPolicy(first_wait=first, max_wait=longest).wait_before(attempt)
    ceiling = min(longest, first * 2.0 ** min(attempt - 2, 900))
    assert 0.0 <= wait <= ceiling * (1 + 1e-12)


def test_waits_use_the_whole_range_and_grow() -> None:
    """Full jitter: from nothing to the ceiling, so that clients that failed together do not come back together."""
    policy = RetryPolicy(first_wait=1.0, max_wait=30.0)
    for attempt, ceiling in ((2, 1.0), (3, 2.0), (4, 4.0), (20, 30.0)):
        waits = [policy.wait_before(attempt) for _ in range(2_000)]
        assert min(waits) < 0.05 * ceiling
        assert max(waits) > 0.95 * ceiling
        assert abs(sum(waits) / len(waits) - ceiling / 2) < 0.05 * ceiling


def test_a_call_in_backoff_keeps_its_permit() -> None:
    """While one waits to be tried again, its place is not given to another."""
    gauge = Gauge()
    asked: list[str] = []

    async def answer(case: EvalCase, context: InvocationContext) -> InvocationResponse:
        asked.append(case.id)
        with gauge:
            await asyncio.sleep(0)
        if context.attempt == 1 and case.id == "c0":
            raise TransientError("once")
        return InvocationResponse()

    work = CaseRunner(Retry(Asked(answer), AT_ONCE), ScoringPipeline(()), timeout=None, seed=0)
    records: list[Record] = []

    async def main() -> None:
        await LocalEngine().run(work, make_jobs(3), records.append, parallelism=1, token=CancellationToken())

    asyncio.run(main())
    assert asked == ["c0", "c0", "c1", "c2"]
    assert [record.id for record in records] == ["c0", "c1", "c2"]


def test_cancellation_ends_a_backoff_at_once() -> None:
    policy = RetryPolicy(first_wait=3600.0, max_wait=3600.0, total_seconds=1e9)
    target = Failing(TransientError("busy"))
    token = CancellationToken()
    work = CaseRunner(Retry(target, policy), ScoringPipeline(()), timeout=None, seed=0, token=token)
    records: list[Record] = []

    async def main() -> None:
        began = time.monotonic()
        run = LocalEngine().run(work, iter([make_job()]), records.append, parallelism=1, token=token)
        running = asyncio.create_task(run)
        await until(lambda: target.attempts == [1])
        await asyncio.sleep(0)
        token.cancel()
        tally = await running
        assert (tally.finished, tally.cancelled) == (0, 1)
        assert time.monotonic() - began < 2

    asyncio.run(main())
    assert records == []


def test_the_cases_time_limit_ends_a_backoff_and_the_record_has_the_attempts() -> None:
    """The limit is for the case, its retries included."""
    policy = RetryPolicy(first_wait=3600.0, max_wait=3600.0, total_seconds=1e9)
    record = one_record(Retry(Failing(TransientError("busy")), policy), timeout=0.03)
    assert (record.error_type, record.attempts) == ("TimeoutError", 1)


def test_a_cancellation_is_never_tried_again() -> None:
    target = Failing(asyncio.CancelledError(), ValueError("a second call"))
    with pytest.raises(asyncio.CancelledError):
        asyncio.run(
            Retry(target, RetryPolicy(first_wait=0.0, retry_on=(Exception,))).invoke(
                EvalCase(id="c"), InvocationContext(case_id="c")
            )
        )
    assert target.attempts == [1]


@pytest.mark.parametrize("failures", [0, 1])
@pytest.mark.parametrize("answer", ["text", None, 3, {"response_text": "x"}])
def test_an_answer_of_the_wrong_type_is_named_as_such(answer, failures) -> None:
    errors = [TransientError("once")] * failures

    async def give(case: EvalCase, context: InvocationContext) -> Any:
        if errors:
            raise errors.pop()
        return answer

    record = ask(Asked(give))
    assert record.error_type == "TypeError"
    assert record.error == f"TypeError: the target returned {type(answer).__name__}, not an InvocationResponse"


def test_a_response_object_that_a_target_hands_out_many_times_is_not_written_to() -> None:
    shared = InvocationResponse(response_text="the same")
    failures = [TransientError("once")]

    async def answer(case: EvalCase, context: InvocationContext) -> InvocationResponse:
        if failures:
            raise failures.pop()
        return shared

    assert ask(Asked(answer)).retries == 1
    assert shared.retries == 0


def test_retries_that_a_target_made_by_itself_are_kept() -> None:
    failures = [TransientError("once")]

    async def answer(case: EvalCase, context: InvocationContext) -> InvocationResponse:
        if failures and case.prompt:
            raise failures.pop()
        return InvocationResponse(retries=2)

    assert ask(Asked(answer)).retries == 2
    assert one_record(Retry(Asked(answer), AT_ONCE), job=make_job(prompt="fail once")).retries == 3


@pytest.mark.parametrize("target", [Simulated(parallelism=7), CallableTarget(len, parallelism=2), Failing()])
def test_what_a_target_says_of_itself_is_passed_on(target) -> None:
    outer = Retry(target, AT_ONCE)
    assert outer.model_id == target.model_id
    assert outer.default_parallelism == target.default_parallelism
    assert outer.identity() == target.identity()


def test_a_retrying_target_can_be_pickled() -> None:
    copy = pickle.loads(pickle.dumps(Retry(Simulated(latency=0), RetryPolicy(attempts=2))))
    assert copy.model_id == "simulated"


def ask_virtually(monkeypatch, target: Any, policy: RetryPolicy, context: InvocationContext) -> float:
    """Seconds that it took, to an answer or an error that is raised."""
    monkeypatch.setattr(retry, "time", LOOP_TIME)

    async def main() -> float:
        loop = asyncio.get_running_loop()
        began = loop.time()
        await Retry(target, policy).invoke(EvalCase(id="c"), context)
        return loop.time() - began

    return run_virtually(main())


@pytest.mark.parametrize(
    ("retry_after", "waited"), [(None, 0.5), (0.1, 0.5), (0.0, 0.5), (float("nan"), 0.5), (45.0, 45.0)]
)
def test_the_wait_is_the_longer_of_the_jitter_and_what_the_endpoint_asks_for(monkeypatch, retry_after, waited) -> None:
    """Also beyond the policy's longest wait: to come back sooner would be to be refused again."""
    monkeypatch.setattr(retry.random, "uniform", lambda low, high: high)
    target = Failing(TransientError("429", retry_after=retry_after))
    context = InvocationContext("c")
    took = ask_virtually(monkeypatch, target, RetryPolicy(max_wait=30.0), context)
    assert took == context.backoff == pytest.approx(waited)
    assert context.attempt == 2


def test_backoff_adds_up_over_the_tries(monkeypatch) -> None:
    context = InvocationContext("c")
    target = Failing(*(TransientError("429", retry_after=seconds) for seconds in (40.0, 50.0)))
    ask_virtually(monkeypatch, target, RetryPolicy(), context)
    assert context.backoff == pytest.approx(90.0)


def test_an_endpoint_that_asks_for_more_time_than_is_left_is_given_up_on_at_once(monkeypatch) -> None:
    partial = InvocationResponse(response_text="half", http_status=429)
    errors = [
        TransientError("429 slow down", retry_after=100.0, overloaded=True),
        TransientError("429 slow down", retry_after=86_400.0, overloaded=True, partial=partial),
    ]
    context = InvocationContext("c")
    with pytest.raises(TransientError) as raised:
        ask_virtually(monkeypatch, Failing(*errors), RetryPolicy(), context)
    assert str(raised.value) == ("429 slow down; not retried: it asks to wait 86400 s, and 500 s are left for retries")
    assert (raised.value.partial, raised.value.overloaded) == (partial, True)
    assert raised.value.__cause__ is errors[1]
    assert (context.attempt, context.backoff) == (2, pytest.approx(100.0))


def test_the_last_error_is_raised_as_it_is_with_its_partial_answer(monkeypatch) -> None:
    errors = [TransientError(f"number {n}", partial=InvocationResponse(response_text=str(n))) for n in range(2)]
    with pytest.raises(TransientError) as raised:
        ask_virtually(monkeypatch, Failing(*errors), RetryPolicy(attempts=2), InvocationContext("c"))
    assert raised.value is errors[1]


def test_time_spent_waiting_for_leave_is_not_taken_from_the_total(monkeypatch) -> None:
    monkeypatch.setattr(retry.random, "uniform", lambda low, high: high)

    async def answer(case: EvalCase, context: InvocationContext) -> InvocationResponse:
        await asyncio.sleep(100)
        context.waiting += 99
        if context.attempt < 5:
            raise TransientError("busy")
        return InvocationResponse()

    context = InvocationContext("c", waiting=7.0)
    took = ask_virtually(monkeypatch, Asked(answer), RetryPolicy(total_seconds=15.0), context)
    assert took == pytest.approx(5 * 100 + 0.5 + 1 + 2 + 4)


def test_a_backoff_that_is_cut_short_still_counts_for_what_it_was(monkeypatch) -> None:
    monkeypatch.setattr(retry, "time", LOOP_TIME)
    context = InvocationContext("c")
    target = Retry(Failing(TransientError("429", retry_after=60.0)), RetryPolicy())

    async def main() -> None:
        task = asyncio.create_task(target.invoke(EvalCase(id="c"), context))
        await asyncio.sleep(20)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    run_virtually(main())
    assert context.backoff == pytest.approx(20.0)
