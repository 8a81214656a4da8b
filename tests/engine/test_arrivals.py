"""Open loop: planned moments, and what became of them."""

from __future__ import annotations

import asyncio
from itertools import islice, pairwise

import pytest
from scipy import stats

from steelyard.engine.arrivals import Arrivals, Schedule, SendCounts, parse_arrivals
from steelyard.engine.base import CancellationToken
from steelyard.engine.local import LocalEngine
from steelyard.errors import ConfigurationError
from steelyard.protocols import Emit
from steelyard.records import Job
from steelyard.units import RateLimit
from tests.support.engine import drop, make_jobs
from tests.support.virtual_time import run_virtually, virtual_clock


@pytest.mark.parametrize(
    ("written", "kind", "per_second"),
    [("constant:20/s", "constant", 20), ("poisson:600/min", "poisson", 10), (" Poisson : 3600/h ", "poisson", 1)],
)
def test_kind_and_rate_are_read(written, kind, per_second) -> None:
    arrivals = parse_arrivals(written)
    assert (arrivals.kind, arrivals.rate.per_second) == (kind, per_second)


@pytest.mark.parametrize(
    ("written", "said"),
    [
        ("20/s", r"arrivals must be like constant:20/s or poisson:20/s, got '20/s'"),
        (20, r"got 20"),
        ("poison:20/s", r"unknown kind 'poison'; did you mean 'poisson'\?"),
        ("constant:fast", r"arrivals: the rate after constant: must be a number above 0 and a unit, .* got 'fast'"),
        ("poisson:0/s", r"got '0/s'"),
    ],
)
def test_anything_else_is_refused_with_what_was_given(written, said) -> None:
    with pytest.raises(ConfigurationError, match=said):
        parse_arrivals(written)


def test_constant_arrivals_do_not_drift() -> None:
    offsets = Arrivals("constant", RateLimit(3, 1.0)).offsets()
    assert next(islice(offsets, 300_000, None)) == 100_000.0


def test_poisson_arrivals_are_the_seeds_own_and_have_exponential_gaps() -> None:
    arrivals = parse_arrivals("poisson:20/s")
    offsets = list(islice(arrivals.offsets(5), 5000))
    assert offsets == list(islice(arrivals.offsets(5), 5000))
    assert offsets != list(islice(arrivals.offsets(6), 5000))
    gaps = [later - earlier for earlier, later in pairwise([0.0, *offsets])]
    assert stats.kstest(gaps, stats.expon(scale=1 / 20).cdf).pvalue > 0.01


def make_schedule(written: str, **options: object) -> Schedule:
    return Schedule(parse_arrivals(written), clock=virtual_clock(), **options)  # type: ignore[arg-type]


async def all_sends(schedule: Schedule) -> list[float]:
    sends = []
    while (planned := await schedule.next_send()) is not None:
        sends.append(planned)
    return sends


def test_moments_are_waited_for_and_the_clock_readings_handed_out() -> None:
    async def main() -> None:
        schedule = make_schedule("constant:4/s", count=5)
        clock = virtual_clock()
        began = clock()
        for number in range(5):
            planned = await schedule.next_send()
            assert planned == pytest.approx(began + number / 4)
            assert clock() == pytest.approx(planned, abs=0.001)
        assert await schedule.next_send() is None
        assert schedule.counts() == SendCounts(
            planned=5, sent=5, late=0, missed=0, late_after=0.01, worst_lateness=schedule.counts().worst_lateness
        )
        assert schedule.counts().worst_lateness < 0.001

    run_virtually(main())


def test_a_duration_ends_before_the_moment_at_its_end() -> None:
    async def main() -> None:
        schedule = make_schedule("constant:10/s", duration=3.0)
        assert len(await all_sends(schedule)) == 30
        assert schedule.counts().planned == 30

    run_virtually(main())


def test_lateness_does_not_add_up() -> None:
    """A timer that fires 3 ms late each time still makes the last send 3 ms late, not 300."""

    async def main() -> None:
        async def late_sleep(seconds: float) -> None:
            await asyncio.sleep(seconds + 0.003)

        schedule = make_schedule("constant:20/s", count=100, sleep=late_sleep)
        await all_sends(schedule)
        counts = schedule.counts()
        assert (counts.late, counts.sent) == (0, 100)
        assert counts.worst_lateness == pytest.approx(0.003)

    run_virtually(main())


def test_a_moment_that_has_passed_is_handed_out_at_once_and_counted_as_late() -> None:
    async def main() -> None:
        clock = virtual_clock()
        schedule = make_schedule("constant:10/s", count=10)
        await schedule.next_send()
        await asyncio.sleep(0.55)
        now = clock()
        for _ in range(5):
            await schedule.next_send()
        assert clock() == now
        counts = schedule.counts()
        assert (counts.sent, counts.late, counts.missed) == (6, 5, 0)
        assert counts.worst_lateness == pytest.approx(0.45)

    run_virtually(main())


def test_what_could_not_be_sent_before_the_end_is_missed() -> None:
    async def main() -> None:
        schedule = make_schedule("constant:10/s", duration=2.0)
        for _ in range(3):
            await schedule.next_send()
        await asyncio.sleep(60)
        assert await schedule.next_send() is None
        counts = schedule.counts()
        assert (counts.planned, counts.sent, counts.missed) == (20, 3, 17)
        assert counts.missed == 17

    run_virtually(main())


def test_a_schedule_that_never_began_has_planned_nothing() -> None:
    async def main() -> SendCounts:
        return make_schedule("poisson:10/s", duration=2.0).counts()

    assert run_virtually(main()).planned == 0


def test_a_run_that_is_cut_short_counts_only_the_moments_that_had_come() -> None:
    async def main() -> None:
        schedule = make_schedule("constant:10/s", duration=100.0)
        await schedule.next_send()
        await asyncio.sleep(0.95)
        assert schedule.counts().planned == 10
        assert schedule.counts().missed == 9

    run_virtually(main())


@pytest.mark.parametrize(
    ("workers", "sent", "late", "worst"), [(10, 30, 0, 0.0), (2, 12, 10, 1.5)], ids=["enough workers", "too few"]
)
def test_the_engine_sends_on_time_while_workers_are_free_and_late_when_they_are_not(workers, sent, late, worst) -> None:
    """10 calls a second that take half a second each need 5 workers; with 2, most come late and many never."""
    sends: list[tuple[float | None, float]] = []

    async def work(job: Job, emit: Emit) -> None:
        sends.append((job.planned_at, asyncio.get_running_loop().time()))
        await asyncio.sleep(0.5)

    async def main() -> SendCounts:
        schedule = make_schedule("constant:10/s", duration=3.0)
        token = CancellationToken()
        tally = await LocalEngine().run(work, make_jobs(999), drop, parallelism=workers, token=token, pace=schedule)
        assert tally.finished == sent
        return schedule.counts()

    counts = run_virtually(main())
    assert (counts.planned, counts.sent, counts.late, counts.missed) == (30, sent, late, 30 - sent)
    assert counts.worst_lateness == pytest.approx(worst, abs=0.001)
    assert max(at - planned for planned, at in sends if planned is not None) == pytest.approx(worst, abs=0.001)
