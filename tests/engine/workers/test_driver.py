"""The driver and real workers in one process, over connections that break, stall and come late."""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from steelyard.engine.arrivals import Schedule, parse_arrivals
from steelyard.engine.base import CancellationToken
from steelyard.engine.workers import driver as driver_module
from steelyard.engine.workers.driver import DriverRun, NoPlaceForWorker
from steelyard.engine.workers.messages import Batch, Message, WorkerInfo
from steelyard.engine.workers.pending import PendingJobs
from steelyard.engine.workers.pickling import DriverObjects, pickle_work
from steelyard.engine.workers.worker import Worker
from steelyard.errors import SteelyardError, WorkersLost
from steelyard.protocols import Emit, Tally
from steelyard.records import Job
from tests.support.engine import make_jobs
from tests.support.journal import a_record

CALLS: Counter[int] = Counter()
"""How often each job was begun, by its index: workers are in this process."""


async def answer(job: Job, emit: Emit) -> None:
    CALLS[job.index] += 1
    await asyncio.sleep(0.002)
    emit(a_record(id=job.case.id, index=job.index))


class Broken(Exception):
    """The connection broke; nobody knows what arrived."""


class Lossy:
    """Reaches a worker, but loses some messages on the way and some replies on the way back."""

    def __init__(self, worker: Worker, lost: Callable[[], bool]) -> None:
        self._worker = worker
        self._lost = lost
        self.lost_replies = self.lost_messages = 0

    def begin(self, run: int, work: bytes, parallelism: int, grace: float, paced: bool) -> Awaitable[None]:
        return self._worker.begin(run, work, parallelism, grace, paced)

    def close(self) -> None: ...

    def send(self, run: int, message: Message) -> Awaitable[None]:
        return self._over_the_wire(self._worker.receive, run, message)

    def exchange(self, run: int, message: Message) -> Awaitable[Batch]:
        return self._over_the_wire(self._worker.exchange, run, message)

    async def _over_the_wire(self, call: Callable[..., Awaitable[Any]], *args: Any) -> Any:
        if self._lost():
            self.lost_messages += 1
            raise Broken
        reply = await call(*args)
        if self._lost():
            self.lost_replies += 1
            raise Broken
        return reply


class Pool:
    """Workers of this process; those of `late` are ready when they are told, those of `never` have no place."""

    failure = None
    start_seconds = 60.0

    def __init__(self, size: int, lost: Callable[[], bool] = lambda: False) -> None:
        self.size = size
        self.connections = [Lossy(Worker(f"n{number}"), lost) for number in range(size)]
        self.late: dict[int, asyncio.Event] = {}
        self.never: set[int] = set()
        self.lost: list[int] = []

    async def worker(self, number: int) -> tuple[Any, WorkerInfo]:
        if number in self.never:
            raise NoPlaceForWorker("no place")
        if number in self.late:
            await self.late[number].wait()
        return self.connections[number], WorkerInfo(f"n{number}", number, "", "", "")

    def lose(self, number: int) -> None:
        self.lost.append(number)

    def is_loss(self, error: BaseException) -> bool:
        return isinstance(error, Broken)

    def is_broken_connection(self, error: BaseException) -> bool:
        return isinstance(error, Broken)

    def why_lost(self, error: Exception) -> str:
        return str(error)

    def cause(self, error: Exception) -> Exception:
        return error


def driver_run(pool: Pool, jobs: Any, emit: Emit, parallelism: int = 8, **options: Any) -> DriverRun:
    objects = DriverObjects()
    return DriverRun(
        1,
        pool,
        pickle_work(answer, objects),
        objects,
        PendingJobs(jobs, 3),
        emit,
        workers=pool.size,
        parallelism=parallelism,
        token=options.pop("token", CancellationToken()),
        permits=None,
        grace=1.0,
        **options,
    )


@pytest.fixture(autouse=True)
def quick(monkeypatch) -> None:
    CALLS.clear()
    monkeypatch.setattr(driver_module, "_RECONNECT_PAUSE", 0.001)


@pytest.mark.parametrize("seed", range(8))
def test_what_a_broken_connection_loses_is_sent_again_and_nothing_is_done_twice(seed) -> None:
    chance = random.Random(seed)
    emitted: list[Any] = []

    async def main() -> tuple[Tally, Pool]:
        pool = Pool(2, lambda: chance.random() < 0.2)
        return await driver_run(pool, make_jobs(120), emitted.append).run(), pool

    tally, pool = asyncio.run(main())
    assert (tally.started, tally.finished, tally.cancelled) == (120, 120, 0)
    assert Counter(range(120)) == CALLS
    assert Counter(record.index for record in emitted) == Counter(range(120))
    assert pool.lost == []
    assert sum(connection.lost_messages + connection.lost_replies for connection in pool.connections)


def test_a_connection_that_stays_broken_is_given_up_and_its_cases_go_to_others(monkeypatch) -> None:
    monkeypatch.setattr(driver_module, "_RECONNECT_SECONDS", 0.02)
    emitted: list[Any] = []

    async def main() -> tuple[Tally, Pool]:
        pool = Pool(2)
        broken = pool.connections[0] = Lossy(Worker("n0"), lambda: len(emitted) > 20)
        pool.connections[1] = Lossy(Worker("n1"), lambda: False)
        run = driver_run(pool, make_jobs(200), emitted.append)
        assert broken.lost_messages == 0
        return await run.run(), pool

    tally, pool = asyncio.run(main())
    assert tally.finished == 200
    assert set(pool.lost) == {0}
    assert {record.index for record in emitted} == set(range(200))


def test_a_load_run_takes_no_job_before_all_workers_are_ready() -> None:
    taken: list[int] = []

    def jobs() -> Any:
        for job in make_jobs(30):
            taken.append(job.index)
            yield job

    async def main() -> Tally:
        pool = Pool(3)
        pool.late[2] = asyncio.Event()
        running = asyncio.create_task(driver_run(pool, jobs(), lambda _: None, together=True).run())
        await asyncio.sleep(0.2)
        assert not taken
        pool.late[2].set()
        return await running

    assert asyncio.run(main()).finished == 30


def test_a_load_run_starts_without_a_worker_that_has_no_place_or_that_does_not_come(monkeypatch, caplog) -> None:
    async def main(pool: Pool) -> Tally:
        pool.never.add(0)
        pool.late[1] = asyncio.Event()
        return await driver_run(pool, make_jobs(30), lambda _: None, together=True).run()

    monkeypatch.setattr(driver_module, "_TOGETHER_SECONDS", 0.0)
    assert asyncio.run(main(Pool(3))).finished == 30
    assert "the load starts with 1 of 2 workers" in caplog.text


@pytest.mark.parametrize("schedule", [None, Schedule(parse_arrivals("constant:100/s"), count=5)])
def test_a_run_for_which_no_worker_has_a_place_fails(schedule) -> None:
    """It would look like one that was stopped before its first case."""

    async def main() -> Tally:
        pool = Pool(2)
        pool.never = {0, 1}
        return await driver_run(pool, make_jobs(5), lambda _: None, schedule=schedule).run()

    with pytest.raises(WorkersLost, match="no worker is left"):
        asyncio.run(main())


def test_an_evaluation_starts_with_the_first_worker_and_lends_it_the_share_of_those_that_are_missing(
    monkeypatch,
) -> None:
    monkeypatch.setattr(driver_module, "EXPECTED_SECONDS", 0.0)
    emitted: list[Any] = []

    async def main() -> Tally:
        pool = Pool(2)
        pool.late[1] = asyncio.Event()
        tally = await driver_run(pool, make_jobs(50), emitted.append, parallelism=8).run()
        assert not pool.late[1].is_set()
        return tally

    tally = asyncio.run(main())
    assert tally.finished == 50
    assert tally.peak_in_flight == 8


def test_a_silent_worker_is_reported_and_what_it_does_not_use_is_lent(monkeypatch, caplog) -> None:
    """Two workers of 4; one stops answering while it has one case of its own: the other may then have 7."""
    monkeypatch.setattr(driver_module, "_SILENT_SECONDS", 0.05)
    stall = asyncio.Event()
    emitted: list[Any] = []

    class Stalling(Lossy):
        def exchange(self, run: int, message: Message) -> Awaitable[Batch]:
            async def stalled() -> Batch:
                if len(emitted) > 3:
                    await stall.wait()
                return await self._worker.exchange(run, message)

            return stalled()

    def jobs() -> Any:
        yield from make_jobs(4)
        while not caplog.text:
            yield None
        yield from make_jobs(60)

    async def main() -> Tally:
        pool = Pool(2)
        pool.connections[0] = Stalling(Worker("n0"), lambda: False)
        run = driver_run(pool, jobs(), emitted.append)

        def look(record: Any) -> None:
            emitted.append(record)
            if len(emitted) > 40:
                stall.set()

        run._emit = look
        return await run.run()

    tally = asyncio.run(main())
    assert tally.finished == 64
    assert "the worker on n0 has been silent for" in caplog.text
    assert tally.peak_in_flight <= 8


def test_workers_are_added_when_the_pool_grows() -> None:
    seen: set[str | None] = set()

    async def main() -> Tally:
        pool = Pool(3)
        pool.size = 1
        until_all = itertools.takewhile(lambda _: len(seen) < 3, make_jobs(100_000))
        run = driver_run(pool, until_all, lambda record: seen.add(record.node))
        pool.size = 3
        return await run.run()

    assert asyncio.run(main()).finished < 100_000
    assert seen == {"n0", "n1", "n2"}


def test_a_pool_that_failed_ends_the_run() -> None:
    async def main() -> None:
        pool = Pool(1)
        pool.late[0] = asyncio.Event()
        pool.failure = SteelyardError("the cluster is lost")  # type: ignore[assignment]
        await driver_run(pool, make_jobs(3), lambda _: None).run()

    began = time.monotonic()
    with pytest.raises(SteelyardError, match="the cluster is lost"):
        asyncio.run(main())
    assert time.monotonic() - began < 30
