"""The engine under permits that change and at a given pace."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from steelyard.engine.adaptive import AdaptivePermits
from steelyard.engine.base import CancellationToken
from steelyard.engine.local import LocalEngine
from steelyard.protocols import Emit, Tally
from steelyard.records import Job
from tests.support.engine import Gauge, drop, make_job, make_jobs, until
from tests.support.journal import a_record


class SetPermits:
    """A number that the test sets."""

    def __init__(self, allowed: int) -> None:
        self._allowed = allowed
        self._callbacks: list[Callable[[], None]] = []

    @property
    def allowed(self) -> int:
        return self._allowed

    def on_change(self, callback: Callable[[], None]) -> None:
        self._callbacks.append(callback)

    def set(self, allowed: int) -> None:
        self._allowed = allowed
        for callback in self._callbacks:
            callback()


class SetPace:
    """Moments that the test lets come."""

    def __init__(self, *moments: float) -> None:
        self._moments = iter(moments)
        self.come = asyncio.Semaphore(0)
        self.asking = 0
        self.most_asking = 0

    async def next_send(self) -> float | None:
        self.asking += 1
        self.most_asking = max(self.most_asking, self.asking)
        try:
            await self.come.acquire()
            return next(self._moments, None)
        finally:
            self.asking -= 1

    def let_come(self, count: int) -> None:
        for _ in range(count):
            self.come.release()


class Held:
    """Work that stays in flight until the test releases it."""

    def __init__(self) -> None:
        self.gauge = Gauge()
        self.taken: list[Job] = []
        self._releases: list[asyncio.Event] = []

    async def __call__(self, job: Job, emit: Emit) -> None:
        self.taken.append(job)
        released = asyncio.Event()
        self._releases.append(released)
        with self.gauge:
            await released.wait()

    def release(self, count: int) -> None:
        for _ in range(count):
            self._releases.pop(0).set()


async def settle() -> None:
    for _ in range(30):
        await asyncio.sleep(0)


def start(work: Held, jobs: Iterator[Job | None], **options: object) -> asyncio.Task[Tally]:
    token = options.pop("token", None) or CancellationToken()
    return asyncio.create_task(
        LocalEngine().run(work, jobs, drop, **{"parallelism": 50, "token": token, **options})  # type: ignore[arg-type]
    )


def test_as_many_are_in_flight_as_are_allowed_at_each_moment() -> None:
    async def main() -> None:
        work, permits = Held(), SetPermits(3)
        running = start(work, make_jobs(40), permits=permits)
        await settle()
        assert work.gauge.now == 3
        permits.set(7)
        await settle()
        assert work.gauge.now == 7
        permits.set(2)
        await settle()
        assert work.gauge.now == 7  # those in flight finish
        work.release(5)
        await settle()
        assert (work.gauge.now, work.gauge.entered) == (2, 7)
        work.release(1)
        await settle()
        assert (work.gauge.now, work.gauge.entered) == (2, 8)
        permits.set(50)
        await settle()
        assert work.gauge.now == 34
        work.release(34)
        assert await running == Tally(started=40, finished=40, cancelled=0, peak_in_flight=34)

    asyncio.run(main())


def test_parallelism_stays_the_upper_bound() -> None:
    async def main() -> None:
        work = Held()
        running = start(work, make_jobs(40), permits=SetPermits(1000), parallelism=5)
        await settle()
        assert work.gauge.now == 5
        for _ in range(8):
            work.release(5)
            await settle()
        assert (await running).peak_in_flight == 5

    asyncio.run(main())


def test_a_worker_that_waits_for_a_permit_holds_no_case() -> None:
    given_out = 0

    def jobs() -> Iterator[Job]:
        nonlocal given_out
        for index in range(20):
            given_out += 1
            yield make_job(index)

    async def main() -> None:
        work = Held()
        token = CancellationToken()
        running = start(work, jobs(), permits=SetPermits(2), token=token)
        await settle()
        assert given_out == 2
        token.cancel()
        assert await running == Tally(started=2, finished=0, cancelled=2, peak_in_flight=2)
        assert given_out == 2

    asyncio.run(main())


def test_no_more_workers_are_started_than_permits_call_for() -> None:
    async def main() -> None:
        work = Held()
        token = CancellationToken()
        running = start(work, make_jobs(9999), permits=SetPermits(4), parallelism=5000, token=token)
        await settle()
        assert len(asyncio.all_tasks()) < 15
        token.cancel()
        await running

    asyncio.run(main())


@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=30), st.integers(1, 9), st.integers(0, 99))
def test_never_above_the_permits_and_every_job_once(levels, parallelism, seed) -> None:
    """However often their number changes."""
    source = random.Random(seed)
    permits = SetPermits(levels[0])
    gauge = Gauge()
    done: list[int] = []

    async def work(job: Job, emit: Emit) -> None:
        assert gauge.now < permits.allowed
        with gauge:
            for _ in range(source.randrange(4)):
                await asyncio.sleep(0)
            if job.index % 2 and levels:
                permits.set(levels.pop())
            done.append(job.index)

    async def main() -> Tally:
        return await LocalEngine().run(
            work, make_jobs(60), drop, parallelism=parallelism, token=CancellationToken(), permits=permits
        )

    tally = asyncio.run(main())
    assert sorted(done) == list(range(60))
    assert tally == Tally(started=60, finished=60, cancelled=0, peak_in_flight=gauge.most)


def test_cancelling_while_workers_wait_ends_the_run_and_leaves_no_task() -> None:
    async def main() -> None:
        work, token, pace = Held(), CancellationToken(), SetPace(1.0, 2.0)
        running = start(work, make_jobs(20), permits=SetPermits(1), pace=pace, token=token)
        pace.let_come(1)
        await settle()
        token.cancel()
        assert await running == Tally(started=1, finished=0, cancelled=1, peak_in_flight=1)
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(main())


def test_work_that_raises_ends_a_run_in_which_workers_wait() -> None:
    async def work(job: Job, emit: Emit) -> None:
        await asyncio.sleep(0.001)
        raise ValueError("broken")

    async def main() -> None:
        await LocalEngine().run(
            work, make_jobs(20), drop, parallelism=9, token=CancellationToken(), permits=SetPermits(1)
        )

    with pytest.raises(ValueError, match="broken"):
        asyncio.run(main())


def test_a_stray_cancellation_of_a_worker_that_waits_costs_no_worker() -> None:
    async def main() -> None:
        work, permits = Held(), SetPermits(1)
        running = start(work, make_jobs(6), permits=permits, parallelism=2)
        await settle()
        waiting = [task for task in asyncio.all_tasks() if task.get_name() == "steelyard-worker-1"]
        waiting[0].cancel()
        await settle()
        permits.set(2)
        await settle()
        assert work.gauge.now == 2
        for _ in range(3):
            work.release(2)
            await settle()
        assert (await running).finished == 6

    asyncio.run(main())


def test_a_job_that_has_its_answer_makes_room_for_another_while_it_is_scored() -> None:
    """Else a slow judge on another endpoint would decide how much the target is asked."""

    async def main() -> None:
        work, permits = Held(), AdaptivePermits(20, start=2)
        running = start(work, make_jobs(8), permits=permits)
        await settle()
        assert [job.case.id for job in work.taken] == ["c0", "c1"]
        permits.answered("c0", 0)
        permits.answered("c0", 0)  # a judge that asks at the same endpoint was answered
        await settle()
        assert [job.case.id for job in work.taken] == ["c0", "c1", "c2"]
        work.release(1)  # c0 is scored: its permit was given back long ago
        await settle()
        assert len(work.taken) == 3
        work.release(1)
        await settle()
        assert len(work.taken) == 4
        for _ in range(6):
            work.release(1)
            await settle()
        assert (await running).finished == 8

    asyncio.run(main())


def test_a_job_that_brings_its_answer_along_takes_no_permit() -> None:
    def jobs() -> Iterator[Job]:
        for job in make_jobs(12):
            if job.index:
                job.stored = a_record()
            yield job

    async def main() -> None:
        work = Held()
        running = start(work, jobs(), permits=AdaptivePermits(20, start=2))
        await settle()
        assert work.gauge.now == 12
        work.release(12)
        assert (await running).finished == 12

    asyncio.run(main())


def test_nobody_comes_in_while_all_permits_are_on_the_wire_for_others() -> None:
    async def main() -> None:
        work, permits = Held(), AdaptivePermits(20, start=2)
        permits.began()
        permits.began()
        running = start(work, make_jobs(2), permits=permits)
        await settle()
        assert work.taken == []
        permits.ended()
        await settle()
        assert len(work.taken) == 2
        work.release(2)
        assert (await running).finished == 2

    asyncio.run(main())


def test_each_job_is_taken_when_its_moment_has_come_and_carries_it() -> None:
    async def main() -> None:
        work, pace = Held(), SetPace(10.0, 10.5, 11.0)
        running = start(work, make_jobs(99), pace=pace)
        await settle()
        assert (work.gauge.entered, pace.asking) == (0, 1)
        pace.let_come(2)
        await settle()
        assert [(job.index, job.planned_at) for job in work.taken] == [(0, 10.0), (1, 10.5)]
        pace.let_come(2)  # the last moment, and the news that there are no more
        await settle()
        work.release(3)
        assert await running == Tally(started=3, finished=3, cancelled=0, peak_in_flight=3)
        assert pace.most_asking == 1

    asyncio.run(main())


def test_when_all_workers_are_busy_nobody_asks_for_the_next_moment() -> None:
    async def main() -> None:
        work, pace = Held(), SetPace(1.0, 2.0, 3.0)
        running = start(work, make_jobs(3), pace=pace, parallelism=2)
        pace.let_come(9)
        await settle()
        assert (work.gauge.now, pace.asking) == (2, 0)
        work.release(1)
        await settle()
        assert work.taken[-1].planned_at == 3.0
        work.release(2)
        assert (await running).finished == 3

    asyncio.run(main())


def test_jobs_that_end_before_the_moments_do_end_the_run() -> None:
    async def main() -> None:
        work, pace = Held(), SetPace(*map(float, range(99)))
        running = start(work, make_jobs(2), pace=pace)
        pace.let_come(3)
        await settle()
        work.release(2)
        assert (await running).finished == 2

    asyncio.run(main())


def test_a_job_that_is_not_there_yet_is_asked_for_again_and_keeps_its_moment() -> None:
    def jobs() -> Iterator[Job | None]:
        for job in make_jobs(2):
            yield None
            yield None
            yield job

    async def main() -> None:
        work, pace = Held(), SetPace(1.0, 2.0)
        running = start(work, jobs(), pace=pace, permits=SetPermits(2))
        pace.let_come(3)
        await until(lambda: work.gauge.entered == 2)
        assert [job.planned_at for job in work.taken] == [1.0, 2.0]
        work.release(2)
        assert (await running).finished == 2

    asyncio.run(main())
