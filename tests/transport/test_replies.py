"""How replies reach their callers."""

from __future__ import annotations

import asyncio

from steelyard.errors import TransportError
from steelyard.protocols import HttpReply
from steelyard.transport.replies import Handover


def reply(chunks: int) -> HttpReply:
    return HttpReply(200, {}, [b"x"] * chunks, [0.0] * chunks, 0.0, 0.0)


async def given(*outcomes: HttpReply | TransportError) -> tuple[Handover, list[asyncio.Future[HttpReply]]]:
    loop = asyncio.get_running_loop()
    handover = Handover(loop)
    waiting: list[asyncio.Future[HttpReply]] = [loop.create_future() for _ in outcomes]
    for done, outcome in zip(waiting, outcomes, strict=True):
        handover.give(done, outcome)
    return handover, waiting


def test_long_streams_are_handed_over_one_a_turn() -> None:
    async def main() -> list[int]:
        _, waiting = await given(reply(256), reply(256), reply(256))
        settled = []
        for _ in waiting:
            settled.append(sum(one.done() for one in waiting))
            await asyncio.sleep(0)
        return settled

    assert asyncio.run(main()) == [1, 2, 3]


def test_a_few_short_streams_share_a_turn() -> None:
    async def main() -> int:
        _, waiting = await given(*[reply(64)] * 10)
        return sum(one.done() for one in waiting)

    assert asyncio.run(main()) == 4


def test_whole_answers_are_handed_over_at_once() -> None:
    async def main() -> bool:
        _, waiting = await given(*[reply(1)] * 20)
        return all(one.done() for one in waiting)

    assert asyncio.run(main())


def test_a_new_turn_has_room_again() -> None:
    async def main() -> bool:
        handover, _ = await given(reply(256))
        await asyncio.sleep(0)
        late: asyncio.Future[HttpReply] = asyncio.get_running_loop().create_future()
        handover.give(late, reply(1))
        return late.done()

    assert asyncio.run(main())


def test_a_failure_waits_its_turn_and_is_raised() -> None:
    async def main() -> str:
        _, (_, failed) = await given(reply(256), TransportError("cut off"))
        assert not failed.done()
        try:
            await failed
        except TransportError as error:
            return str(error)
        return "nothing was raised"

    assert asyncio.run(main()) == "cut off"


def test_one_that_nobody_waits_for_is_passed_over() -> None:
    async def main() -> list[bool]:
        _, (first, second, third) = await given(reply(256), reply(256), reply(256))
        second.cancel()
        await asyncio.sleep(0)
        return [first.done(), second.cancelled(), third.done()]

    assert asyncio.run(main()) == [True, True, True]


def test_closing_hands_over_all_that_is_left() -> None:
    async def main() -> bool:
        handover, waiting = await given(*[reply(256)] * 5)
        handover.close()
        return all(one.done() for one in waiting)

    assert asyncio.run(main())
