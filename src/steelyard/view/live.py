"""Live runs as server-sent events: one look at a journal serves every page that shows it.

Each event is the whole picture, so that a page that missed some, or lost its server for a while, needs only the next
one. A slow reader skips to the newest: nothing is queued for it. The id of an event is a digest of what it says; who
reconnects with the id of the present one is told nothing until something changes.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import OrderedDict
from collections.abc import AsyncIterator
from hashlib import blake2b
from pathlib import Path
from typing import Any

import msgspec

from steelyard.errors import RunRefused
from steelyard.journal.files import OUTPUTS
from steelyard.journal.index import Rows
from steelyard.journal.manifest import Manifest, read_manifest
from steelyard.report.headline import live_state
from steelyard.stats.wording import counted
from steelyard.threads import DaemonThreads
from steelyard.view.figures import in_case_order, live_figures
from steelyard.view.follow import Follower
from steelyard.view.runs import sayable, signature_of

_PULSE = 0.5
"""Seconds between two looks at a run that is being written."""
_SLOW_PULSE = 2.0
_SHARE = 8
"""A look that takes long is taken seldom: at most one part in so many of the time."""
_HEARTBEAT = 15.0
_RETRY = 1_000
"""Milliseconds after which a browser that lost the server tries again."""
_MOST_WATCHED = 8
"""Runs whose rows stay in memory when no page shows them."""


class Event(msgspec.Struct, frozen=True):
    """What the pages of a run are told."""

    id: str
    data: bytes

    def encoded(self) -> bytes:
        return b"id: %b\ndata: %b\n\n" % (self.id.encode(), self.data)


class Watch:
    """One run that pages look at: its rows so far, and the newest event."""

    def __init__(self, run: Path, threads: DaemonThreads) -> None:
        self.run = run
        self.readers = 0
        self.latest: Event | None = None
        self._threads = threads
        self._follower = Follower(run)
        self._reading = asyncio.Lock()
        self._changed = asyncio.Event()
        self._wanted = asyncio.Event()
        self._pulse: asyncio.Task[None] | None = None
        self._stopped = False
        self._told: dict[str, Any] = {}

    async def rows(self) -> Rows:
        """The rows of the whole journal as it is now, in case order."""
        async with self._reading:
            while not await self._threads.run(self._follower.advance):
                pass
            return await self._threads.run(in_case_order, self._follower.rows)

    async def events(self, seen: str | None) -> AsyncIterator[bytes]:
        """The run as it changes, until the reader goes; `seen` is the id of the last event that it was told."""
        if not self.readers:
            self.latest = None  # what was true when somebody last looked
            self._wanted.set()
        self.readers += 1
        try:
            if self._pulse is None or self._pulse.done():
                self._pulse = asyncio.create_task(self._watch())
            yield b"retry: %d\n\n" % _RETRY
            while not self._stopped:
                event, changed = self.latest, self._changed
                if event is not None and event.id != seen:
                    seen = event.id
                    yield event.encoded()
                    continue
                try:
                    async with asyncio.timeout(_HEARTBEAT):
                        await changed.wait()
                except TimeoutError:
                    yield b": still here\n\n"
        finally:
            self.readers -= 1

    def stop(self) -> None:
        """Let all readers go."""
        self._stopped = True
        self._changed.set()
        if self._pulse is not None:
            self._pulse.cancel()

    async def _watch(self) -> None:
        """Look again and again, as long as anybody reads."""
        while self.readers:
            began = time.monotonic()
            async with self._reading:
                at_end, running, event = await self._threads.run(self._look)
            if self.latest is None or event.id != self.latest.id:
                self.latest = event
                self._changed.set()
                self._changed = asyncio.Event()
            taken = time.monotonic() - began
            if at_end:
                await self._rest(max(_PULSE if running else _SLOW_PULSE, taken * _SHARE))

    async def _rest(self, pause: float) -> None:
        """Wait so long, or until somebody begins to read."""
        self._wanted.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(pause):
                await self._wanted.wait()

    def _look(self) -> tuple[bool, bool, Event]:
        """Read on; whether the end was reached, whether the run is being written, and what there is to say now."""
        follower = self._follower
        try:
            state = live_state(self.run)  # before reading: of a run that has ended, all is read
            at_end = follower.advance()
        except OSError as error:
            return True, False, _event({"state": "damaged", "problem": sayable(str(error))}, "")
        running = state == "running"
        report = blake2b(repr(signature_of(self.run)).encode(), digest_size=6).hexdigest()
        told: dict[str, Any] = {
            "generation": follower.generation,
            "position": follower.position,
            "state": state,
            "report": report,
        }
        if at_end and not running and told == self._told and self.latest is not None:
            return True, False, self.latest  # nothing has changed, and nothing depends on the hour
        self._told = told if at_end else {}
        more = self._picture(state) if at_end else {"reading": follower.position / max(follower.size, 1)}
        return at_end, running, _event({**told, **more}, f"{follower.generation}.{follower.position}.")

    def _picture(self, state: str) -> dict[str, Any]:
        follower, manifest, problem = self._follower, None, None
        try:
            manifest = read_manifest(self.run)
        except RunRefused as error:
            problem = sayable(str(error))
        if follower.damaged:
            problem = f"{counted(follower.damaged, 'unreadable line')} of {OUTPUTS} left out"
        quiet = _quiet_seconds(self.run) if state == "running" else 0.0
        figures = live_figures(follower.rows, follower.kinds, quiet)
        return {
            **({"state": "damaged"} if problem and state == "interrupted" else {}),
            "problem": problem,
            "about": _about(manifest),
            "planned": max(manifest.planned if manifest is not None else 0, figures["n"]),
            "quiet": int(quiet),
            "figures": figures,
            "newest": list(follower.newest)[::-1],
        }


def _event(told: dict[str, Any], place: str) -> Event:
    data = msgspec.json.encode(told)
    return Event(place + blake2b(data, digest_size=6).hexdigest(), data)


class Watches:
    """The runs that pages look at, and a few that they looked at lately."""

    def __init__(self, threads: DaemonThreads) -> None:
        self._threads = threads
        self._known: OrderedDict[Path, Watch] = OrderedDict()

    def of(self, run: Path) -> Watch:
        watch = self._known.pop(run, None) or Watch(run, self._threads)
        self._known[run] = watch
        for place, other in list(self._known.items()):
            if len(self._known) > _MOST_WATCHED and not other.readers and other is not watch:
                other.stop()
                del self._known[place]
        return watch

    @property
    def readers(self) -> int:
        """How many pages are being told of runs."""
        return sum(watch.readers for watch in self._known.values())

    def stop(self) -> None:
        for watch in self._known.values():
            watch.stop()


def _about(manifest: Manifest | None) -> dict[str, Any]:
    if manifest is None:
        return {}
    return {
        "suite": manifest.suite,
        "model": manifest.model_id,
        "created": manifest.created,
        "sittings": len(manifest.sittings),
        "load": manifest.load,
    }


def _quiet_seconds(run: Path) -> float:
    """How long ago the journal grew last."""
    with contextlib.suppress(OSError):
        return max(time.time() - (run / OUTPUTS).stat().st_mtime, 0.0)
    return 0.0
