"""What the engine in this process does beyond the contract: it starts no more workers than there is work for."""

from __future__ import annotations

import asyncio

from steelyard.engine.base import CancellationToken
from steelyard.engine.local import LocalEngine
from steelyard.protocols import Emit, Tally
from steelyard.records import Job
from tests.support.engine import drop, make_jobs


def test_a_parallelism_far_above_the_number_of_jobs_starts_few_workers() -> None:
    most = 0

    async def work(job: Job, emit: Emit) -> None:
        nonlocal most
        for _ in range(50):
            await asyncio.sleep(0)
            most = max(most, len(asyncio.all_tasks()))

    async def main() -> Tally:
        return await LocalEngine().run(work, make_jobs(3), drop, parallelism=300_000, token=CancellationToken())

    assert asyncio.run(main()) == Tally(started=3, finished=3, cancelled=0, peak_in_flight=3)
    assert most < 12


def test_all_workers_are_at_work_within_a_few_turns_of_the_loop() -> None:
    """A slow start would be a parallelism below what was asked for."""
    begun = 0

    async def work(job: Job, emit: Emit) -> None:
        nonlocal begun
        begun += 1
        await asyncio.Event().wait()

    async def main() -> None:
        token = CancellationToken()
        run = LocalEngine().run(work, make_jobs(5000), drop, parallelism=1000, token=token)
        running = asyncio.create_task(run)
        for _ in range(20):
            await asyncio.sleep(0)
        assert begun == 1000
        token.cancel()
        await running

    asyncio.run(main())
