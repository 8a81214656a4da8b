"""How much memory a driver and the workers that it hears of have, while a run goes on."""

from __future__ import annotations

import os
from typing import Any

import psutil

from tests.support.board import Board

_LOOK_EVERY = 100


class Memory:
    """Looks now and then; the growth since everything had been used once."""

    def __init__(self, board: Board) -> None:
        self._board = board
        self._looks = 0
        self._sizes: dict[int, list[int]] = {}

    def look(self) -> None:
        """Take note of how large each process is: this one, and all that a call was made in."""
        self._looks += 1
        if self._looks % _LOOK_EVERY:
            return
        for process in {os.getpid(), *(int(line[1]) for line in self._board.lines("called"))}:
            self._sizes.setdefault(process, []).append(_resident(process))

    @property
    def driver_growth(self) -> int:
        return _growth(self._sizes[os.getpid()])

    @property
    def worker_growth(self) -> int:
        return max(_growth(sizes) for process, sizes in self._sizes.items() if process != os.getpid())


def _growth(sizes: list[int]) -> int:
    return max(sizes) - sizes[0]


def _resident(process: int) -> int:
    information: Any = psutil.Process(process).memory_info()
    return int(information.rss)
