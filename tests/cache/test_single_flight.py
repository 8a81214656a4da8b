"""Identical questions in flight: asked once, and nobody waits for ever when the one who asks does not come back."""

from __future__ import annotations

import asyncio
import random
import threading

import pytest

from steelyard.cache import SingleFlight
from steelyard.cache.cached import flights_of


async def settle():
    """Let every task run until it waits."""
    for _ in range(10):
        await asyncio.sleep(0)


class Oracle:
    """Asked about a key, waits until it is told what to do."""

    def __init__(self):
        self.flights = SingleFlight()
        self.waiting: list[asyncio.Future] = []

    async def _ask(self):
        self.waiting.append(asyncio.get_running_loop().create_future())
        return await self.waiting[-1]

    def start(self, key="k", **more):
        return asyncio.create_task(self.flights.get_or_ask(key, self._ask, **more))


def test_followers_get_the_leaders_answer():
    async def main():
        oracle = Oracle()
        tasks = [oracle.start() for _ in range(20)]
        await settle()
        assert len(oracle.waiting) == 1
        oracle.waiting[0].set_result("answer")
        assert await asyncio.gather(*tasks) == ["answer"] * 20
        again = oracle.start()
        await settle()
        assert len(oracle.waiting) == 2, "an answer is not remembered once everybody has it"
        oracle.waiting[1].set_result("new")
        assert await again == "new"

    asyncio.run(main())


def test_other_keys_do_not_wait():
    async def main():
        oracle = Oracle()
        tasks = [oracle.start(key) for key in "ab"]
        await settle()
        for number, future in enumerate(oracle.waiting):
            future.set_result(number)
        assert await asyncio.gather(*tasks) == [0, 1]

    asyncio.run(main())


@pytest.mark.parametrize("how", ["fails", "is cancelled", "gets an answer not to be shared"])
def test_when_the_leader_brings_nothing_a_follower_asks(how):
    async def main():
        oracle = Oracle()
        leader, *followers = [oracle.start(shareable=lambda answer: answer == "good") for _ in range(4)]
        await settle()
        if how == "fails":
            oracle.waiting[0].set_exception(ConnectionError("gone"))
        elif how == "is cancelled":
            leader.cancel()
        else:
            oracle.waiting[0].set_result("cut short")
        await settle()
        assert len(oracle.waiting) == 2, "one of the three asks, the others wait for it"
        oracle.waiting[1].set_result("good")
        assert await asyncio.gather(*followers) == ["good"] * 3
        (outcome,) = await asyncio.gather(leader, return_exceptions=True)
        expected = {"fails": ConnectionError, "is cancelled": asyncio.CancelledError}.get(how, str)
        assert isinstance(outcome, expected)

    asyncio.run(main())


def test_a_cancelled_follower_disturbs_nobody():
    async def main():
        oracle = Oracle()
        leader, follower, other = [oracle.start() for _ in range(3)]
        await settle()
        follower.cancel()
        await settle()
        assert follower.cancelled()
        oracle.waiting[0].set_result("answer")
        assert await asyncio.gather(leader, other) == ["answer"] * 2
        assert len(oracle.waiting) == 1

    asyncio.run(main())


def test_a_follower_cancelled_at_the_moment_of_its_promotion_hands_it_on():
    async def main():
        oracle = Oracle()
        leader, second, third = [oracle.start() for _ in range(3)]
        await settle()
        leader.cancel()
        second.cancel()
        await settle()
        assert len(oracle.waiting) == 2
        oracle.waiting[1].set_result("answer")
        assert await third == "answer"

    asyncio.run(main())


@pytest.mark.parametrize("seed", range(20))
def test_under_random_cancellations_and_failures_everybody_ends_and_nothing_is_left(seed):
    async def main():
        rng = random.Random(seed)
        flights: SingleFlight[str] = SingleFlight()
        asking = dict.fromkeys("abc", 0)

        async def ask(key):
            asking[key] += 1
            assert asking[key] == 1, "two at once for one key"
            try:
                for _ in range(rng.randrange(4)):
                    await asyncio.sleep(0)
                if rng.random() < 0.4:
                    raise ConnectionError
                return key
            finally:
                asking[key] -= 1

        tasks = {asyncio.create_task(flights.get_or_ask(key, lambda key=key: ask(key))): key for key in "abc" * 15}
        while not all(task.done() for task in tasks):
            rng.choice(list(tasks)).cancel() if rng.random() < 0.3 else None
            await asyncio.sleep(0)
        for task, key in tasks.items():
            assert task.cancelled() or isinstance(task.exception(), ConnectionError) or task.result() == key
        assert flights._flights == {}

    asyncio.run(asyncio.wait_for(main(), 10))


def test_callers_on_another_event_loop_ask_for_themselves():
    flights: SingleFlight[str] = SingleFlight()
    both = threading.Barrier(2, timeout=10)
    answers = []

    async def ask():
        await asyncio.to_thread(both.wait)
        return "answer"

    threads = [
        threading.Thread(target=lambda: answers.append(asyncio.run(flights.get_or_ask("k", ask)))) for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == ["answer"] * 2


def test_flights_belong_to_the_store_for_as_long_as_it_lives():
    class Store:
        pass

    store = Store()
    assert flights_of(store) is flights_of(store)
    assert flights_of(store) is not flights_of(Store())
    assert flights_of({}) is not None, "what cannot be referred to weakly gets its own"
