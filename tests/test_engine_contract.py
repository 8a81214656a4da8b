"""What every engine promises (contracts.Engine). A new backend adds its factory to ENGINES and runs this same file."""

from __future__ import annotations

import asyncio
import gc
import random
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from steelyard.contracts import Emit, Engine, Tally, Work
from steelyard.engine.cancellation import CancellationToken
from steelyard.engine.local import LocalEngine
from steelyard.errors import ConfigurationError
from steelyard.records import Job
from support_engine import Gauge, drop, make_job, make_jobs, until

ENGINES = [pytest.param(lambda grace=4.0: LocalEngine(grace=grace), id="local")]
"""Each makes an engine whose cancelled work may take `grace` seconds to wind up."""

EngineFactory = Callable[..., Engine]

pytestmark = pytest.mark.parametrize("make_engine", ENGINES)


class Broken(Exception):
    """What the tests let work, iterators and emit raise."""


async def start(
    engine: Engine, work: Work, jobs: Iterator[Job], token: CancellationToken | None = None, *, parallelism: int
) -> Tally:
    return await engine.run(work, jobs, drop, parallelism=parallelism, token=token or CancellationToken())


def run_all(engine: Engine, work: Work, jobs: Iterator[Job], *, parallelism: int) -> Tally:
    return asyncio.run(start(engine, work, jobs, parallelism=parallelism))


def assert_balanced(tally: Tally) -> None:
    assert tally.started == tally.finished + tally.cancelled


async def nothing(job: Job, emit: Emit) -> None:
    """Work that never waits."""


async def forever(job: Job, emit: Emit) -> None:
    await asyncio.Event().wait()


@settings(max_examples=25, deadline=None)
@given(parallelism=st.integers(1, 12), count=st.integers(0, 40), seed=st.integers(0, 99))
def test_never_more_than_parallelism_in_flight_and_every_job_once(make_engine, parallelism, count, seed) -> None:
    gauge = Gauge()
    done: list[int] = []
    turns = random.Random(seed)

    async def work(job: Job, emit: Emit) -> None:
        with gauge:
            for _ in range(turns.randrange(5)):
                await asyncio.sleep(0)
            done.append(job.index)

    tally = run_all(make_engine(), work, make_jobs(count), parallelism=parallelism)
    assert sorted(done) == list(range(count))
    assert gauge.most <= parallelism
    assert tally == Tally(started=count, finished=count, cancelled=0, peak_in_flight=gauge.most)


def test_as_many_as_asked_for_are_in_flight_while_work_remains(make_engine) -> None:
    """Each release of one call is followed by the start of the next, so that exactly N are out until the jobs end."""
    gauge = Gauge()
    waiting: list[asyncio.Event] = []

    async def work(job: Job, emit: Emit) -> None:
        with gauge:
            released = asyncio.Event()
            waiting.append(released)
            await released.wait()

    async def main() -> Tally:
        running = asyncio.create_task(start(make_engine(), work, make_jobs(40), parallelism=7))
        for number in range(40 - 7):
            await until(lambda number=number: gauge.entered == 7 + number)
            assert gauge.now == 7
            waiting.pop(random.randrange(len(waiting))).set()
        await until(lambda: gauge.entered == 40)
        assert gauge.now == 7
        for released in waiting:
            released.set()
        return await running

    tally = asyncio.run(main())
    assert gauge.most == tally.peak_in_flight == 7


def test_parallelism_of_one_is_sequential_and_in_order(make_engine) -> None:
    events: list[tuple[str, int]] = []

    async def work(job: Job, emit: Emit) -> None:
        events.append(("begin", job.index))
        await asyncio.sleep(0.0001 if job.index % 3 else 0)
        events.append(("end", job.index))

    run_all(make_engine(), work, make_jobs(20), parallelism=1)
    assert events == [(what, index) for index in range(20) for what in ("begin", "end")]


def test_jobs_are_started_in_the_order_of_the_iterator(make_engine) -> None:
    started: list[int] = []

    async def work(job: Job, emit: Emit) -> None:
        started.append(job.index)
        await asyncio.sleep(0)

    run_all(make_engine(), work, make_jobs(100), parallelism=9)
    assert started == list(range(100))


def test_jobs_are_taken_only_when_a_worker_is_free_for_them(make_engine) -> None:
    finished = 0
    furthest = 0

    def jobs() -> Iterator[Job]:
        nonlocal furthest
        for index in range(200):
            furthest = max(furthest, index + 1 - finished)
            yield make_job(index)

    async def work(job: Job, emit: Emit) -> None:
        nonlocal finished
        await asyncio.sleep(0)
        finished += 1

    run_all(make_engine(), work, jobs(), parallelism=5)
    assert furthest == 5


@pytest.mark.parametrize("parallelism", [1, 4])
def test_work_that_raises_ends_the_run_and_cancels_the_rest(make_engine, parallelism) -> None:
    cancelled: list[int] = []

    async def work(job: Job, emit: Emit) -> None:
        if job.index == parallelism - 1:
            raise Broken("this one")
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.append(job.index)
            raise

    jobs = make_jobs(100)
    engine = make_engine()
    with pytest.raises(Broken, match="this one"):
        run_all(engine, work, jobs, parallelism=parallelism)
    assert cancelled == list(range(parallelism - 1))
    assert next(jobs).index == parallelism
    assert engine.in_flight().count == 0


def test_a_jobs_iterator_that_raises_ends_the_run_likewise(make_engine) -> None:
    """A case file that turns out to be broken half-way is not an end of the jobs."""
    gauge = Gauge()

    def jobs() -> Iterator[Job]:
        yield from make_jobs(2)
        raise Broken("row 3")

    async def work(job: Job, emit: Emit) -> None:
        with gauge:
            await asyncio.Event().wait()

    with pytest.raises(Broken, match="row 3"):
        run_all(make_engine(), work, jobs(), parallelism=3)
    assert (gauge.entered, gauge.now) == (2, 0)


def test_emit_that_raises_ends_the_run_likewise(make_engine) -> None:
    """A disk that is full must stop the asking."""

    def full(record: Any) -> None:
        raise Broken("no space")

    async def work(job: Job, emit: Emit) -> None:
        if job.index < 2:
            await asyncio.Event().wait()
        emit(None)  # type: ignore[arg-type]

    jobs = make_jobs(50)

    async def main() -> None:
        await make_engine().run(work, jobs, full, parallelism=3, token=CancellationToken())

    with pytest.raises(Broken, match="no space"):
        asyncio.run(main())
    assert next(jobs).index == 3


def test_the_first_failure_is_the_one_that_is_raised(make_engine, caplog) -> None:
    async def work(job: Job, emit: Emit) -> None:
        try:
            await asyncio.sleep(0 if job.index == 1 else 3600)
        finally:
            raise Broken(f"number {job.index}")

    with pytest.raises(Broken, match="number 1"):
        run_all(make_engine(), work, make_jobs(9), parallelism=3)
    gc.collect()
    assert not caplog.records


def test_a_token_that_is_cancelled_already_starts_nothing(make_engine) -> None:
    token = CancellationToken()
    token.cancel()
    jobs = make_jobs(3)
    assert asyncio.run(start(make_engine(), forever, jobs, token, parallelism=2)) == Tally()
    assert next(jobs).index == 0


def test_a_token_cancelled_during_the_run_cancels_what_is_in_flight(make_engine) -> None:
    token = CancellationToken()
    gauge = Gauge()

    async def work(job: Job, emit: Emit) -> None:
        if job.index < 5:
            return
        with gauge:
            await asyncio.Event().wait()

    async def main() -> Tally:
        running = asyncio.create_task(start(make_engine(), work, make_jobs(100), token, parallelism=3))
        await until(lambda: gauge.now == 3)
        token.cancel("enough")
        return await running

    assert asyncio.run(main()) == Tally(started=8, finished=5, cancelled=3, peak_in_flight=3)
    assert gauge.now == 0


def test_a_token_cancelled_after_the_run_changes_nothing(make_engine) -> None:
    token = CancellationToken()
    tally = asyncio.run(start(make_engine(), nothing, make_jobs(3), token, parallelism=2))
    token.cancel()
    assert (tally.finished, tally.cancelled) == (3, 0)


@pytest.mark.parametrize("parallelism", [1, 3])
def test_no_job_is_started_once_the_token_is_cancelled(make_engine, parallelism) -> None:
    """Not even the few that a busy loop could start before it hears of it."""
    token = CancellationToken()
    after: list[int] = []

    async def work(job: Job, emit: Emit) -> None:
        if token.cancelled:
            after.append(job.index)
        if job.index == 10:
            token.cancel()

    tally = asyncio.run(start(make_engine(), work, make_jobs(1000), token, parallelism=parallelism))
    assert after == []
    assert tally.started == 11
    assert_balanced(tally)


def test_work_that_swallows_its_cancellation_gets_no_further_job(make_engine) -> None:
    token = CancellationToken()
    gauge = Gauge()

    async def work(job: Job, emit: Emit) -> None:
        with gauge:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                return

    async def main() -> Tally:
        running = asyncio.create_task(start(make_engine(), work, make_jobs(100), token, parallelism=4))
        await until(lambda: gauge.now == 4)
        token.cancel()
        return await running

    tally = asyncio.run(main())
    assert (gauge.entered, tally.started) == (4, 4)
    assert_balanced(tally)


def test_a_record_that_comes_while_the_run_winds_up_is_still_taken(make_engine) -> None:
    """It was paid for."""
    token = CancellationToken()
    gauge = Gauge()
    emitted: list[object] = []

    async def work(job: Job, emit: Emit) -> None:
        try:
            with gauge:
                await asyncio.Event().wait()
        except asyncio.CancelledError:
            await asyncio.sleep(0.001)
            emit(job)  # type: ignore[arg-type]

    async def main() -> Tally:
        run = make_engine().run(work, make_jobs(9), emitted.append, parallelism=2, token=token)
        running = asyncio.create_task(run)
        await until(lambda: gauge.now == 2)
        token.cancel()
        return await running

    assert asyncio.run(main()) == Tally(started=2, finished=2, cancelled=0, peak_in_flight=2)
    assert len(emitted) == 2


def test_work_that_refuses_to_end_is_left_behind_after_the_grace(make_engine) -> None:
    token = CancellationToken()
    gauge = Gauge()
    release = asyncio.Event()
    emitted: list[object] = []

    async def work(job: Job, emit: Emit) -> None:
        with gauge:
            while not release.is_set():
                try:
                    await release.wait()
                except asyncio.CancelledError:
                    continue
        emit(job)  # type: ignore[arg-type]

    async def main() -> None:
        engine = make_engine(grace=0.05)
        run = engine.run(work, make_jobs(100), emitted.append, parallelism=2, token=token)
        running = asyncio.create_task(run)
        await until(lambda: gauge.now == 2)
        token.cancel()
        tally = await asyncio.wait_for(running, 5)
        assert tally == Tally(started=2, finished=0, cancelled=2, peak_in_flight=2)
        assert engine.in_flight().count == 0
        release.set()
        await until(lambda: gauge.now == 0)
        await asyncio.sleep(0.01)
        # The books are closed: what comes now must reach neither them nor a journal that is closed as well.
        assert emitted == []
        assert tally == Tally(started=2, finished=0, cancelled=2, peak_in_flight=2)
        assert gauge.entered == 2

    asyncio.run(main())


def test_work_that_cancels_itself_costs_no_worker_and_ends_no_run(make_engine) -> None:
    """A stray cancellation is not a request to stop: the job counts as cancelled, the others go on, still N at once."""
    gauge = Gauge()
    done: list[int] = []

    async def work(job: Job, emit: Emit) -> None:
        with gauge:
            if job.index in (0, 3, 4):
                asyncio.current_task().cancel()  # type: ignore[union-attr]
            if job.index == 5:
                raise asyncio.CancelledError
            await asyncio.sleep(0)
            done.append(job.index)

    tally = run_all(make_engine(), work, make_jobs(20), parallelism=2)
    assert done == [index for index in range(20) if index not in (0, 3, 4, 5)]
    assert tally == Tally(started=20, finished=16, cancelled=4, peak_in_flight=2)


def test_cancelling_the_task_that_runs_the_engine_cancels_the_work(make_engine) -> None:
    gauge = Gauge()

    async def work(job: Job, emit: Emit) -> None:
        with gauge:
            await asyncio.Event().wait()

    async def main() -> None:
        running = asyncio.create_task(start(make_engine(), work, make_jobs(9), parallelism=3))
        await until(lambda: gauge.now == 3)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert gauge.now == 0

    asyncio.run(main())


@settings(max_examples=30, deadline=None)
@given(
    parallelism=st.integers(1, 6),
    behaviours=st.lists(st.sampled_from(["done", "wait", "swallow", "cancel"]), max_size=25),
)
def test_the_tally_balances_in_every_ending(make_engine, parallelism, behaviours) -> None:
    token = CancellationToken()
    running: set[int] = set()

    async def work(job: Job, emit: Emit) -> None:
        running.add(job.index)
        try:
            match behaviours[job.index]:
                case "wait":
                    await asyncio.sleep(0.001)
                case "cancel":
                    token.cancel()
                    await asyncio.sleep(3600)
                case "swallow":
                    try:
                        await asyncio.sleep(0.002)
                    except asyncio.CancelledError:
                        return
        finally:
            running.discard(job.index)

    tally = asyncio.run(start(make_engine(), work, make_jobs(len(behaviours)), token, parallelism=parallelism))
    assert_balanced(tally)
    assert not running
    assert tally.started <= len(behaviours)
    if not token.cancelled:
        assert tally.finished == len(behaviours)


def test_in_flight_names_the_oldest_call(make_engine) -> None:
    engine = make_engine()
    releases: dict[int, asyncio.Event] = {}

    async def work(job: Job, emit: Emit) -> None:
        releases[job.index] = asyncio.Event()
        await releases[job.index].wait()

    async def main() -> None:
        assert (engine.in_flight().count, engine.in_flight().oldest_id) == (0, None)
        running = asyncio.create_task(start(engine, work, make_jobs(4), parallelism=3))
        await until(lambda: len(releases) == 3)
        await asyncio.sleep(0.01)
        first = engine.in_flight()
        assert (first.count, first.oldest_id) == (3, "c0")
        assert first.oldest_seconds >= 0.009
        releases[0].set()
        await until(lambda: len(releases) == 4)
        assert engine.in_flight().oldest_id == "c1"
        for release in releases.values():
            release.set()
        await running
        assert (engine.in_flight().count, engine.in_flight().oldest_seconds) == (0, 0.0)

    asyncio.run(main())


def test_two_runs_at_once_on_one_engine_do_not_disturb_each_other(make_engine) -> None:
    engine = make_engine()
    gauge = Gauge()
    release = asyncio.Event()

    async def work(job: Job, emit: Emit) -> None:
        with gauge:
            await release.wait()

    async def main() -> None:
        first = asyncio.create_task(start(engine, work, make_jobs(3), parallelism=3))
        second = asyncio.create_task(start(engine, work, make_jobs(4), parallelism=2))
        await until(lambda: gauge.now == 5)
        assert engine.in_flight().count == 5
        first.cancel()
        await asyncio.wait([first])
        assert engine.in_flight().count == 2
        release.set()
        assert (await second).finished == 4
        assert engine.in_flight().count == 0

    asyncio.run(main())


@pytest.mark.parametrize("parallelism", [1, 50, 1000])
def test_work_that_never_waits_does_not_starve_the_loop(make_engine, parallelism) -> None:
    """A ticker beside a no-op target keeps ticking: the bar is drawn and Ctrl-C is heard, whatever the parallelism.

    Counted in jobs of 20 µs, not in seconds, so that a loaded machine changes nothing.
    """
    done = 0
    between: list[int] = []

    async def ticker() -> None:
        while True:
            before = done
            await asyncio.sleep(0)
            between.append(done - before)

    async def busy(job: Job, emit: Emit) -> None:
        nonlocal done
        done += 1
        began = time.perf_counter()
        while time.perf_counter() - began < 0.00002:
            pass

    async def main() -> None:
        ticking = asyncio.create_task(ticker())
        await start(make_engine(), busy, make_jobs(10_000), parallelism=parallelism)
        ticking.cancel()

    asyncio.run(main())
    assert done == 10_000
    assert max(between) <= 500 + parallelism  # 10 ms of work, and one more job of each worker


def test_a_thousand_workers_share_ten_thousand_jobs(make_engine) -> None:
    gauge = Gauge()

    async def work(job: Job, emit: Emit) -> None:
        with gauge:
            await asyncio.sleep(0.001)

    tally = run_all(make_engine(), work, make_jobs(10_000), parallelism=1000)
    assert tally == Tally(started=10_000, finished=10_000, cancelled=0, peak_in_flight=1000)
    assert gauge.most == 1000


@pytest.mark.parametrize("count", [0, 1, 3])
def test_fewer_jobs_than_workers_is_no_problem(make_engine, count) -> None:
    tally = run_all(make_engine(), nothing, make_jobs(count), parallelism=50)
    assert (tally.started, tally.finished, tally.cancelled) == (count, count, 0)


@pytest.mark.parametrize("parallelism", [0, -1])
def test_a_pool_without_workers_is_refused_and_does_not_hang(make_engine, parallelism) -> None:
    with pytest.raises(ConfigurationError, match=f"parallelism must be >= 1, got {parallelism}"):
        run_all(make_engine(), nothing, make_jobs(3), parallelism=parallelism)


def test_no_task_is_left_when_a_run_has_ended(make_engine) -> None:
    async def main() -> set[asyncio.Task[Any]]:
        await start(make_engine(), nothing, make_jobs(3), parallelism=5)
        return asyncio.all_tasks() - {asyncio.current_task()}  # type: ignore[arg-type]

    assert asyncio.run(main()) == set()
