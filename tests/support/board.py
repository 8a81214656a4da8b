"""A board that work in any process writes on and the test reads: files in a folder."""

from __future__ import annotations

import asyncio
import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

from steelyard.protocols import Emit
from steelyard.records import Job


class Board:
    """What happened, in order, line by line; and what was released."""

    def __init__(self, place: str | Path) -> None:
        self.place = str(place)
        self._log = f"{self.place}/log"

    def note(self, *words: object) -> None:
        """Write a line, in one piece whoever else writes."""
        descriptor = os.open(self._log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        try:
            os.write(descriptor, (" ".join(map(str, words)) + "\n").encode())
        finally:
            os.close(descriptor)

    def lines(self, first: str | None = None) -> list[list[str]]:
        """All lines, as words; those that begin with one word, without it."""
        try:
            text = Path(self._log).read_text()
        except FileNotFoundError:
            return []
        lines = [line.split() for line in text.splitlines()]
        return lines if first is None else [line[1:] for line in lines if line[0] == first]

    def noted(self, first: str) -> list[int]:
        """The numbers in the lines that begin with this word."""
        return [int(line[0]) for line in self.lines(first)]

    @contextlib.contextmanager
    def inside(self, number: int) -> Iterator[None]:
        """Count as being inside."""
        self.note("in", number, os.getpid())
        try:
            yield
        finally:
            self.note("out", number)

    @property
    def entered(self) -> int:
        return len(self.lines("in"))

    @property
    def now(self) -> int:
        """How many are inside."""
        return self.entered - len(self.lines("out"))

    @property
    def most(self) -> int:
        """The most that were inside at once."""
        now = most = 0
        for word, *_ in self.lines():
            now += (word == "in") - (word == "out")
            most = max(most, now)
        return most

    def release(self, name: object = "all") -> None:
        Path(f"{self.place}/release-{name}").touch()

    def is_released(self, name: object = "all") -> bool:
        return any(os.path.exists(f"{self.place}/release-{one}") for one in (name, "all"))

    async def released(self, name: object = "all") -> None:
        """Wait until this, or all, was released."""
        while not self.is_released(name):  # noqa: ASYNC110 - nobody in this process sets an event
            await asyncio.sleep(0.002)


@contextlib.contextmanager
def new_board() -> Iterator[Board]:
    with tempfile.TemporaryDirectory(prefix="sy-board-") as place:
        yield Board(place)


class BoardWork:
    """Work that writes on a board. What it does inside is left to the classes below; they travel to any process."""

    def __init__(self, board: Board) -> None:
        self.board = board

    async def __call__(self, job: Job, emit: Emit) -> None:
        with self.board.inside(job.index):
            await self.inside(job, emit)

    async def inside(self, job: Job, emit: Emit) -> None:
        """Nothing, without waiting."""
