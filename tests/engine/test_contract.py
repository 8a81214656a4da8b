"""What every engine promises (steelyard.Engine). A new backend adds itself to BACKENDS and runs this same file.

Work may be done in another process: it tells what happens on a board of files, and travels there by pickle.
"""

from __future__ import annotations

import asyncio
import gc
import random
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from steelyard.engine.base import CancellationToken, Engine
from steelyard.engine.local import LocalEngine
from steelyard.engine.worker_processes import ProcessEngine
from steelyard.errors import ConfigurationError
from steelyard.protocols import Emit, Tally, Work
from steelyard.records import Job
from tests.support.board import Board, BoardWork, new_board
from tests.support.engine import drop, make_job, make_jobs
from tests.support.engine import until as until_soon
from tests.support.ray import local_cluster, patiently


class Backend:
    """Makes engines whose cancelled work may take `grace` seconds to wind up, and says how exact it can be."""

    name = "local"
    ahead = 0
    """How many jobs may be taken beyond those in flight, at most, at the rates of these tests."""
    moved = 0
    """How many of the last jobs may be taken back from one process and given to another."""
    batch = 1
    """How many records may come in one turn of the loop."""
    many = 10_000
    """How many jobs are many."""

    def make(self, grace: float = 4.0) -> Engine:
        return LocalEngine(grace=grace)

    def close(self) -> None:
        pass


class WorkersBackend(Backend):
    """Engines of two workers each, kept from one test to the next: a process takes a second to start."""

    ahead = 400
    moved = 80
    batch = 1200
    many = 3_000

    def __init__(self) -> None:
        self._made: dict[float, Engine] = {}

    def make(self, grace: float = 4.0) -> Engine:
        if grace not in self._made:
            self._made[grace] = self.new(grace)
        return self._made[grace]

    def new(self, grace: float) -> Engine:
        raise NotImplementedError

    def close(self) -> None:
        for engine in self._made.values():
            engine.close()


class ProcessBackend(WorkersBackend):
    name = "processes"
    batch = 16_000

    def new(self, grace: float) -> Engine:
        return ProcessEngine(2, grace=grace)


class RayBackend(WorkersBackend):
    name = "ray"

    def new(self, grace: float) -> Engine:
        from steelyard.engine.ray.engine import RayEngine

        return RayEngine(workers=2, grace=grace)


BACKENDS = [
    pytest.param(Backend, id="local"),
    pytest.param(ProcessBackend, id="processes"),
    pytest.param(RayBackend, id="ray", marks=[pytest.mark.ray, patiently]),
]


@pytest.fixture(scope="module", params=BACKENDS)
def backend(request) -> Iterator[Backend]:
    made: Backend = request.param()
    with local_cluster(cpus=4) if made.name == "ray" else nullcontext():
        yield made
        made.close()


until = partial(until_soon, seconds=60.0)
"""A worker in another process may first have to be started, on a busy machine."""


class Broken(Exception):
    """What the tests let work, iterators and emit raise."""


async def start(
    engine: Engine,
    work: Work,
    jobs: Iterator[Job],
    token: CancellationToken | None = None,
    *,
    parallelism: int,
    emit: Callable[[Any], None] = drop,
) -> Tally:
    return await engine.run(work, jobs, emit, parallelism=parallelism, token=token or CancellationToken())


def run_all(engine: Engine, work: Work, jobs: Iterator[Job], *, parallelism: int) -> Tally:
    return asyncio.run(start(engine, work, jobs, parallelism=parallelism))


def assert_balanced(tally: Tally) -> None:
    assert tally.started == tally.finished + tally.cancelled


async def nothing(job: Job, emit: Emit) -> None:
    """Work that never waits."""


class Turns(BoardWork):
    """Takes a few turns of the loop, a number that differs from job to job."""

    async def inside(self, job: Job, emit: Emit) -> None:
        for _ in range(random.Random(job.index).randrange(5)):
            await asyncio.sleep(0)


class Held(BoardWork):
    """Stays in flight until it is released."""

    async def inside(self, job: Job, emit: Emit) -> None:
        await self.board.released(job.index)


class Endless(BoardWork):
    async def inside(self, job: Job, emit: Emit) -> None:
        await asyncio.Event().wait()


@settings(max_examples=25, deadline=None)
@given(parallelism=st.integers(1, 12), count=st.integers(0, 40))
def test_never_more_than_parallelism_in_flight_and_every_job_once(backend, parallelism, count) -> None:
    with new_board() as board:
        tally = run_all(backend.make(), Turns(board), make_jobs(count), parallelism=parallelism)
        assert sorted(board.noted("in")) == list(range(count))
        assert board.most <= tally.peak_in_flight <= parallelism
        assert (tally.started, tally.finished, tally.cancelled) == (count, count, 0)
        if backend.name == "local":
            assert tally.peak_in_flight == board.most


def test_as_many_as_asked_for_are_in_flight_while_work_remains(backend, tmp_path) -> None:
    """Each release of one call is followed by the start of the next, so that exactly N are out until the jobs end."""
    board = Board(tmp_path)

    async def main() -> Tally:
        running = asyncio.create_task(start(backend.make(), Held(board), make_jobs(40), parallelism=7))
        released: set[int] = set()
        for number in range(40 - 7):
            await until(lambda number=number: board.entered == 7 + number)
            assert board.now == 7
            released.add(one := random.choice(sorted(set(board.noted("in")) - released)))
            board.release(one)
            await until(lambda number=number: len(board.lines("out")) == number + 1)
        await until(lambda: board.entered == 40)
        assert board.now == 7
        board.release()
        return await running

    tally = asyncio.run(main())
    assert board.most == tally.peak_in_flight == 7


class Uneven(BoardWork):
    async def inside(self, job: Job, emit: Emit) -> None:
        await asyncio.sleep(0.0001 if job.index % 3 else 0)


def test_parallelism_of_one_is_sequential_and_in_order(backend, tmp_path) -> None:
    board = Board(tmp_path)
    run_all(backend.make(), Uneven(board), make_jobs(20), parallelism=1)
    assert [(what, int(index)) for what, index, *_ in board.lines()] == [
        (what, index) for index in range(20) for what in ("in", "out")
    ]


class Slow(BoardWork):
    async def inside(self, job: Job, emit: Emit) -> None:
        await asyncio.sleep(0.01)


def test_each_process_starts_its_jobs_in_the_order_of_the_iterator(backend, tmp_path) -> None:
    board = Board(tmp_path)
    run_all(backend.make(), Slow(board), make_jobs(100), parallelism=9)
    by_process: dict[str, list[int]] = {}
    for index, process in board.lines("in"):
        by_process.setdefault(process, []).append(int(index))
    assert sum(map(len, by_process.values())) == 100
    for indices in by_process.values():
        kept = [index for index in indices if index < 100 - backend.moved]
        assert kept == sorted(kept)


async def brief(job: Job, emit: Emit) -> None:
    await asyncio.sleep(0.002)
    emit(job)  # type: ignore[arg-type]


def test_jobs_are_taken_only_shortly_before_a_worker_is_free_for_them(backend) -> None:
    finished = furthest = 0

    def jobs() -> Iterator[Job]:
        nonlocal furthest
        for index in range(1500):
            furthest = max(furthest, index + 1 - finished)
            yield make_job(index)

    def count(record: Any) -> None:
        nonlocal finished
        finished += 1

    asyncio.run(start(backend.make(), brief, jobs(), parallelism=5, emit=count))
    assert finished == 1500
    assert 5 <= furthest <= 5 + backend.ahead


class OneBreaks(BoardWork):
    """The last of the first `count` jobs raises when all of them are in flight; the others note their cancellation."""

    def __init__(self, board: Board, count: int) -> None:
        super().__init__(board)
        self.count = count

    async def inside(self, job: Job, emit: Emit) -> None:
        if job.index == self.count - 1:
            await until(lambda: self.board.entered == self.count)
            raise Broken("this one")
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.board.note("cancelled", job.index)
            raise


@pytest.mark.parametrize("parallelism", [1, 4])
def test_work_that_raises_ends_the_run_and_cancels_the_rest(backend, parallelism, tmp_path) -> None:
    board = Board(tmp_path)
    jobs = make_jobs(100)
    engine = backend.make()
    with pytest.raises(Broken, match="this one"):
        run_all(engine, OneBreaks(board, parallelism), jobs, parallelism=parallelism)
    assert sorted(board.noted("cancelled")) == list(range(parallelism - 1))
    assert next(jobs).index == parallelism
    assert engine.in_flight().count == 0


def test_a_jobs_iterator_that_raises_ends_the_run_likewise(backend, tmp_path) -> None:
    """A case file that turns out to be broken half-way is not an end of the jobs."""
    board = Board(tmp_path)

    def jobs() -> Iterator[Job]:
        yield from make_jobs(2)
        raise Broken("row 3")

    with pytest.raises(Broken, match="row 3"):
        run_all(backend.make(), Endless(board), jobs(), parallelism=3)
    assert board.now == 0
    assert board.entered <= 2


async def two_wait(job: Job, emit: Emit) -> None:
    if job.index < 2:
        await asyncio.Event().wait()
    emit(None)  # type: ignore[arg-type]


def test_emit_that_raises_ends_the_run_likewise(backend) -> None:
    """A disk that is full must stop the asking."""

    def full(record: Any) -> None:
        raise Broken("no space")

    jobs = make_jobs(50)
    with pytest.raises(Broken, match="no space"):
        asyncio.run(start(backend.make(), two_wait, jobs, parallelism=3, emit=full))
    assert next(jobs).index == 3


async def all_break(job: Job, emit: Emit) -> None:
    try:
        await asyncio.sleep(0 if job.index == 1 else 3600)
    finally:
        raise Broken(f"number {job.index}")


def test_the_first_failure_is_the_one_that_is_raised(backend, caplog) -> None:
    with pytest.raises(Broken, match="number 1"):
        run_all(backend.make(), all_break, make_jobs(9), parallelism=3)
    gc.collect()
    assert not caplog.records


def test_a_token_that_is_cancelled_already_starts_nothing(backend, tmp_path) -> None:
    token = CancellationToken()
    token.cancel()
    jobs = make_jobs(3)
    assert asyncio.run(start(backend.make(), Endless(Board(tmp_path)), jobs, token, parallelism=2)) == Tally()
    assert next(jobs).index == 0


class FiveThenEndless(BoardWork):
    async def __call__(self, job: Job, emit: Emit) -> None:
        if job.index >= 5:
            await super().__call__(job, emit)

    async def inside(self, job: Job, emit: Emit) -> None:
        await asyncio.Event().wait()


def test_a_token_cancelled_during_the_run_cancels_what_is_in_flight(backend, tmp_path) -> None:
    token = CancellationToken()
    board = Board(tmp_path)

    async def main() -> Tally:
        run = start(backend.make(), FiveThenEndless(board), make_jobs(1000), token, parallelism=3)
        running = asyncio.create_task(run)
        await until(lambda: board.now == 3)
        token.cancel("enough")
        began = time.monotonic()
        tally = await running
        assert time.monotonic() - began < 4  # which is the grace of those that do not obey
        return tally

    tally = asyncio.run(main())
    assert (tally.finished, tally.peak_in_flight) == (5, 3)
    assert 8 <= tally.started <= 8 + backend.ahead
    assert_balanced(tally)
    assert board.now == 0


def test_a_token_cancelled_after_the_run_changes_nothing(backend) -> None:
    token = CancellationToken()
    tally = asyncio.run(start(backend.make(), nothing, make_jobs(3), token, parallelism=2))
    token.cancel()
    assert (tally.finished, tally.cancelled) == (3, 0)


@pytest.mark.parametrize("parallelism", [1, 3])
def test_no_job_is_taken_once_the_token_is_cancelled(backend, parallelism) -> None:
    """Not even the few that a busy loop could take before it hears of it."""
    token = CancellationToken()
    taken = taken_before = 0

    def jobs() -> Iterator[Job]:
        nonlocal taken
        for job in make_jobs(5000):
            taken += 1
            yield job

    def cancel_at_ten(job: Any) -> None:
        nonlocal taken_before
        if job.index == 10:
            token.cancel()
            taken_before = taken

    tally = asyncio.run(start(backend.make(), brief, jobs(), token, parallelism=parallelism, emit=cancel_at_ten))
    assert tally.started == taken == taken_before < 5000
    assert_balanced(tally)


class Swallowing(BoardWork):
    async def inside(self, job: Job, emit: Emit) -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            return


def test_work_that_swallows_its_cancellation_gets_no_further_job(backend, tmp_path) -> None:
    token = CancellationToken()
    board = Board(tmp_path)

    async def main() -> Tally:
        running = asyncio.create_task(start(backend.make(), Swallowing(board), make_jobs(100), token, parallelism=4))
        await until(lambda: board.now == 4)
        token.cancel()
        return await running

    tally = asyncio.run(main())
    assert (board.entered, tally.started) == (4, 4)
    assert_balanced(tally)


class LastWords(BoardWork):
    async def __call__(self, job: Job, emit: Emit) -> None:
        try:
            await super().__call__(job, emit)
        except asyncio.CancelledError:
            await asyncio.sleep(0.001)
            emit(job)  # type: ignore[arg-type]

    async def inside(self, job: Job, emit: Emit) -> None:
        await asyncio.Event().wait()


def test_a_record_that_comes_while_the_run_winds_up_is_still_taken(backend, tmp_path) -> None:
    """It was paid for."""
    token = CancellationToken()
    board = Board(tmp_path)
    emitted: list[object] = []

    async def main() -> Tally:
        run = start(backend.make(), LastWords(board), make_jobs(9), token, parallelism=2, emit=emitted.append)
        running = asyncio.create_task(run)
        await until(lambda: board.now == 2)
        token.cancel()
        return await running

    assert asyncio.run(main()) == Tally(started=2, finished=2, cancelled=0, peak_in_flight=2)
    assert len(emitted) == 2


class Refusing(BoardWork):
    """Ends when it is released, and not when it is cancelled."""

    async def __call__(self, job: Job, emit: Emit) -> None:
        await super().__call__(job, emit)
        emit(job)  # type: ignore[arg-type]

    async def inside(self, job: Job, emit: Emit) -> None:
        while not self.board.is_released():
            try:
                await self.board.released()
            except asyncio.CancelledError:
                continue


def test_work_that_refuses_to_end_is_left_behind_after_the_grace(backend, tmp_path) -> None:
    token = CancellationToken()
    board = Board(tmp_path)
    emitted: list[object] = []

    async def main() -> None:
        engine = backend.make(grace=0.05)
        run = start(engine, Refusing(board), make_jobs(100), token, parallelism=2, emit=emitted.append)
        running = asyncio.create_task(run)
        await until(lambda: board.now == 2)
        token.cancel()
        tally = await asyncio.wait_for(running, 5)
        assert tally == Tally(started=2, finished=0, cancelled=2, peak_in_flight=2)
        assert engine.in_flight().count == 0
        board.release()
        await until(lambda: board.now == 0)
        await asyncio.sleep(0.01)
        # The counts are closed: what comes now must reach neither them nor a journal that is closed as well.
        assert emitted == []
        assert tally == Tally(started=2, finished=0, cancelled=2, peak_in_flight=2)
        assert board.entered == 2

    asyncio.run(main())


class CancelsItself(BoardWork):
    async def inside(self, job: Job, emit: Emit) -> None:
        if job.index in (0, 3, 4):
            asyncio.current_task().cancel()  # type: ignore[union-attr]
        if job.index == 5:
            raise asyncio.CancelledError
        await asyncio.sleep(0)
        self.board.note("done", job.index)


def test_work_that_cancels_itself_costs_no_worker_and_ends_no_run(backend, tmp_path) -> None:
    """A stray cancellation is not a request to stop: the job counts as cancelled, the others go on, still N at once."""
    board = Board(tmp_path)
    tally = run_all(backend.make(), CancelsItself(board), make_jobs(20), parallelism=2)
    assert sorted(board.noted("done")) == [index for index in range(20) if index not in (0, 3, 4, 5)]
    assert tally == Tally(started=20, finished=16, cancelled=4, peak_in_flight=2)


def test_cancelling_the_task_that_runs_the_engine_cancels_the_work(backend, tmp_path) -> None:
    board = Board(tmp_path)

    async def main() -> None:
        running = asyncio.create_task(start(backend.make(), Endless(board), make_jobs(9), parallelism=3))
        await until(lambda: board.now == 3)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert board.now == 0

    asyncio.run(main())


class Behaving(BoardWork):
    """Does what is written for each job; one that cancels the run asks for it by what it emits."""

    def __init__(self, board: Board, behaviours: list[str]) -> None:
        super().__init__(board)
        self.behaviours = behaviours

    async def inside(self, job: Job, emit: Emit) -> None:
        match self.behaviours[job.index]:
            case "wait":
                await asyncio.sleep(0.001)
            case "cancel":
                emit("cancel")  # type: ignore[arg-type]
                await asyncio.sleep(3600)
            case "swallow":
                try:
                    await asyncio.sleep(0.002)
                except asyncio.CancelledError:
                    return


@settings(max_examples=25, deadline=None)
@given(
    parallelism=st.integers(1, 6),
    behaviours=st.lists(st.sampled_from(["done", "wait", "swallow", "cancel"]), max_size=25),
)
def test_the_tally_balances_in_every_ending(backend, parallelism, behaviours) -> None:
    token = CancellationToken()

    def emit(said: Any) -> None:
        if said == "cancel":
            token.cancel()

    with new_board() as board:
        run = start(
            backend.make(),
            Behaving(board, behaviours),
            make_jobs(len(behaviours)),
            token,
            parallelism=parallelism,
            emit=emit,
        )
        tally = asyncio.run(run)
        assert_balanced(tally)
        assert board.now == 0
        assert tally.started <= len(behaviours)
        if not token.cancelled:
            assert tally.finished == len(behaviours)


def test_in_flight_names_the_oldest_call(backend, tmp_path) -> None:
    engine = backend.make()
    board = Board(tmp_path)

    async def main() -> None:
        assert (engine.in_flight().count, engine.in_flight().oldest_id) == (0, None)
        running = asyncio.create_task(start(engine, Held(board), make_jobs(4), parallelism=3))
        await until(lambda: board.entered == 3)
        await asyncio.sleep(0.01)
        first = engine.in_flight()
        # A job that was handed to a worker may be waiting there when another worker joins and takes its permit.
        assert 3 <= first.count <= 3 + min(backend.ahead, 1)
        assert first.oldest_id == "c0"
        assert first.oldest_seconds >= 0.009
        board.release(0)
        await until(lambda: board.entered == 4)
        await until(lambda: engine.in_flight().oldest_id == "c1")  # another process may say later that it has ended
        board.release()
        await running
        assert (engine.in_flight().count, engine.in_flight().oldest_seconds) == (0, 0.0)

    asyncio.run(main())


def test_two_runs_at_once_on_one_engine_do_not_disturb_each_other(backend, tmp_path) -> None:
    engine = backend.make()
    board = Board(tmp_path)

    async def main() -> None:
        first = asyncio.create_task(start(engine, Held(board), make_jobs(3), parallelism=3))
        second = asyncio.create_task(start(engine, Held(board), make_jobs(4), parallelism=2))
        await until(lambda: board.now == 5)
        assert engine.in_flight().count == 5
        first.cancel()
        await asyncio.wait([first])
        assert engine.in_flight().count == 2
        board.release()
        assert (await second).finished == 4
        assert engine.in_flight().count == 0

    asyncio.run(main())


async def busy(job: Job, emit: Emit) -> None:
    began = time.perf_counter()
    while time.perf_counter() - began < 0.00002:
        pass
    emit(None)  # type: ignore[arg-type]


@pytest.mark.parametrize("parallelism", [1, 50, 1000])
def test_work_that_never_waits_does_not_starve_the_loop(backend, parallelism) -> None:
    """A ticker beside a no-op target keeps ticking: the bar is drawn and Ctrl-C is heard, whatever the parallelism.

    Counted in jobs of 20 µs, not in seconds, so that a loaded machine changes nothing.
    """
    done = 0
    between: list[int] = []

    def count(record: Any) -> None:
        nonlocal done
        done += 1

    async def ticker() -> None:
        while True:
            before = done
            await asyncio.sleep(0)
            between.append(done - before)

    async def main() -> None:
        ticking = asyncio.create_task(ticker())
        await start(backend.make(), busy, make_jobs(backend.many), parallelism=parallelism, emit=count)
        ticking.cancel()

    asyncio.run(main())
    assert done == backend.many
    assert max(between) <= 500 + parallelism + backend.batch  # 10 ms of work, and one more job of each worker


class Short(BoardWork):
    async def inside(self, job: Job, emit: Emit) -> None:
        await asyncio.sleep(0.001)


def test_a_thousand_workers_share_ten_thousand_jobs(backend, tmp_path) -> None:
    board = Board(tmp_path)
    tally = run_all(backend.make(), Short(board), make_jobs(10_000), parallelism=1000)
    assert (tally.started, tally.finished, tally.cancelled) == (10_000, 10_000, 0)
    assert board.most <= tally.peak_in_flight <= 1000
    if backend.name == "local":
        assert board.most == 1000


@pytest.mark.parametrize("count", [0, 1, 3])
def test_fewer_jobs_than_workers_is_no_problem(backend, count) -> None:
    tally = run_all(backend.make(), nothing, make_jobs(count), parallelism=50)
    assert (tally.started, tally.finished, tally.cancelled) == (count, count, 0)


@pytest.mark.parametrize("parallelism", [0, -1])
def test_a_pool_without_workers_is_refused_and_does_not_hang(backend, parallelism) -> None:
    with pytest.raises(ConfigurationError, match=f"parallelism must be >= 1, got {parallelism}"):
        run_all(backend.make(), nothing, make_jobs(3), parallelism=parallelism)


def test_no_task_is_left_when_a_run_has_ended(backend) -> None:
    async def main() -> set[asyncio.Task[Any]]:
        await start(backend.make(), nothing, make_jobs(3), parallelism=5)
        return asyncio.all_tasks() - {asyncio.current_task()}  # type: ignore[arg-type]

    assert asyncio.run(main()) == set()
