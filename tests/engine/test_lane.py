"""Several runs on one lane: one limit for all of them, taken in turn."""

from __future__ import annotations

import asyncio
import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from steelyard.engine.adaptive import AdaptivePermits, PermitsShare
from steelyard.engine.base import CancellationToken
from steelyard.engine.lane import Lane, LaneEngine
from steelyard.protocols import Emit, Tally
from steelyard.records import Job
from tests.support.engine import Gauge, drop, make_jobs, until


class Work:
    """Work of several runs that counts what is in flight, and notes the order in which jobs begin."""

    def __init__(self, seed: int = 0) -> None:
        self.gauge = Gauge()
        self.began: list[tuple[int, str]] = []
        self._random = random.Random(seed)

    def of(self, run: int):
        async def work(job: Job, emit: Emit) -> None:
            self.began.append((run, job.case.id))
            with self.gauge:
                for _ in range(self._random.randrange(1, 5)):
                    await asyncio.sleep(0)

        return work


async def run_all(engines: list[LaneEngine], sizes: list[int], work: Work, parallelism: int) -> list[Tally]:
    token = CancellationToken()
    return await asyncio.gather(
        *(
            engine.run(work.of(number), make_jobs(size), drop, parallelism=parallelism, token=token)
            for number, (engine, size) in enumerate(zip(engines, sizes, strict=True))
        )
    )


@settings(max_examples=40, deadline=None)
@given(
    sizes=st.lists(st.integers(0, 30), min_size=1, max_size=6),
    parallelism=st.integers(1, 12),
    seed=st.integers(0, 1000),
)
def test_the_limit_holds_over_all_runs_and_every_job_is_done_once(sizes, parallelism, seed) -> None:
    lane = Lane(parallelism)
    engines = [lane.engine() for _ in sizes]
    work = Work(seed)
    tallies = asyncio.run(run_all(engines, sizes, work, parallelism))
    assert [tally.finished for tally in tallies] == sizes
    assert Counter(work.began) == Counter((run, f"c{n}") for run, size in enumerate(sizes) for n in range(size))
    assert work.gauge.most <= parallelism
    if sum(sizes) >= 4 * parallelism * len(sizes):
        assert work.gauge.most == parallelism
    assert lane.inside == 0


def test_runs_take_their_jobs_in_turn() -> None:
    lane = Lane(5)
    engines = [lane.engine() for _ in range(4)]
    work = Work(1)
    asyncio.run(run_all(engines, [50] * 4, work, 5))
    ahead: Counter[int] = Counter()
    for run, _ in work.began:
        ahead[run] += 1
        if len(ahead) == 4:
            assert max(ahead.values()) - min(ahead.values()) <= 3
    assert len({run for run, _ in work.began[:8]}) == 4


def test_a_run_that_is_behind_catches_up_first() -> None:
    lane = Lane(2)
    engines = [lane.engine() for _ in range(2)]
    engines[0].progress = 20
    work = Work(1)
    asyncio.run(run_all(engines, [10, 30], work, 2))
    assert sum(run == 1 for run, _ in work.began[:20]) >= 18


def test_nobody_begins_before_all_have_arrived_or_left() -> None:
    async def scenario() -> None:
        lane = Lane(3)
        first, second, third = (lane.engine() for _ in range(3))
        work, token = Work(), CancellationToken()

        def start(number: int, engine: LaneEngine) -> asyncio.Task[Tally]:
            return asyncio.create_task(engine.run(work.of(number), make_jobs(4), drop, parallelism=3, token=token))

        one = start(1, first)
        two = start(2, second)
        for _ in range(20):
            await asyncio.sleep(0)
        assert work.began == []
        third.leave()
        assert [(await one).finished, (await two).finished] == [4, 4]

    asyncio.run(scenario())


def test_a_run_has_never_more_than_its_own_limit_in_flight() -> None:
    async def scenario() -> None:
        lane = Lane(10)
        narrow, wide = lane.engine(), lane.engine()
        own, other = Work(3), Work(4)
        token = CancellationToken()
        await asyncio.gather(
            narrow.run(own.of(0), make_jobs(20), drop, parallelism=2, token=token),
            wide.run(other.of(1), make_jobs(100), drop, parallelism=10, token=token),
        )
        assert own.gauge.most == 2
        assert other.gauge.most >= 8

    asyncio.run(scenario())


def test_cancelling_one_run_leaves_the_others_their_turns() -> None:
    async def scenario() -> None:
        lane = Lane(4)
        stuck, other = lane.engine(), lane.engine()
        token, others_token, work = CancellationToken(), CancellationToken(), Work()
        waiting = Gauge()

        async def wait(job: Job, emit: Emit) -> None:
            with waiting:
                await asyncio.Event().wait()

        first = asyncio.create_task(stuck.run(wait, make_jobs(50), drop, parallelism=4, token=token))
        second = asyncio.create_task(other.run(work.of(1), make_jobs(5), drop, parallelism=4, token=others_token))
        await until(lambda: waiting.now == 4)
        assert not second.done()
        token.cancel("enough")
        tally = await first
        assert (tally.finished, tally.started) == (0, tally.cancelled)
        assert (await second).finished == 5
        assert lane.inside == 0

    asyncio.run(scenario())


def test_adaptive_permits_are_shared_and_cases_of_one_id_are_told_apart() -> None:
    """Two runs ask cases of the same ids: an answer in one frees no place of the other."""

    async def scenario() -> None:
        shared = AdaptivePermits(3, start=3)
        lane = Lane(3, shared)
        shares = [PermitsShare(shared), PermitsShare(shared)]
        token = CancellationToken()
        asked, scored = Gauge(), Gauge()
        release = asyncio.Event()

        def work_of(share: PermitsShare):
            async def work(job: Job, emit: Emit) -> None:
                with asked:
                    await asyncio.sleep(0)
                share.answered(job.case.id, job.trial)
                with scored:  # a slow judge
                    await release.wait()

            return work

        runs = [
            asyncio.create_task(
                lane.engine().run(work_of(share), make_jobs(10), drop, parallelism=20, token=token, permits=share)
            )
            for share in shares
        ]
        await until(lambda: scored.now == 20)  # scoring holds no permit
        assert asked.most <= 3
        release.set()
        assert [(await run).finished for run in runs] == [10, 10]
        assert lane.inside == 0

    asyncio.run(scenario())


@pytest.mark.parametrize("size", [0, 3])
def test_a_lane_of_one_run_is_an_ordinary_engine(size) -> None:
    lane = Lane(2)
    work = Work()
    (tally,) = asyncio.run(run_all([lane.engine()], [size], work, 2))
    assert tally.finished == size
    assert [case for _, case in work.began] == [f"c{n}" for n in range(size)]
