"""libcurl's timer on the event loop."""

from __future__ import annotations

import asyncio
from time import monotonic

import pytest

from steelyard.transport.event_loop import Bridge
from tests.support.raw_server import each_loop, run


class PretendMulti:
    """Stands in for libcurl, which says when it wants to be called, and says it once only."""

    def __init__(self, *still_due: int) -> None:
        self.called: list[float] = []
        self.wake = asyncio.Event()
        self.still_due = [*still_due, -1]

    def socket_action(self, _descriptor: int, _events: int) -> tuple[int, int]:
        self.called.append(monotonic())
        self.wake.set()
        return 0, 0

    def timeout(self) -> int:
        return self.still_due.pop(0)

    def close(self) -> None:
        pass


@each_loop
@pytest.mark.parametrize("milliseconds", [[0], [7], [10, 11], [10, 11, 13], [20, 3], [5, -1, 8], [4, 4, 4]])
def test_libcurl_is_called_when_it_asked_to_be_and_never_before(new_loop, milliseconds: list[int]) -> None:
    """Called too early it would not ask again, and what it waits for would never come."""

    async def main() -> None:
        bridge = Bridge(1, lambda *_: None, pytest.fail)
        bridge._multi.close()
        multi = bridge._multi = PretendMulti()
        for wish in milliseconds:
            asked = monotonic()
            bridge._note_timeout(wish)
        await multi.wake.wait()
        await asyncio.sleep(0.02)
        bridge.close()
        assert len(multi.called) == 1
        assert multi.called[0] - asked >= milliseconds[-1] / 1000

    run(main(), new_loop)


@each_loop
def test_libcurl_is_called_again_when_its_clock_runs_behind(new_loop) -> None:
    async def main() -> None:
        bridge = Bridge(1, lambda *_: None, pytest.fail)
        bridge._multi.close()
        multi = bridge._multi = PretendMulti(2, 3)
        bridge._note_timeout(1)
        while multi.still_due:
            multi.wake.clear()
            await multi.wake.wait()
        bridge.close()
        assert len(multi.called) == 3

    run(main(), new_loop)
