"""Live runs as server-sent events: one look at a journal serves every page that shows it.

Each event is the whole picture, so that a page that missed some, or lost its server for a while, needs only the next
one. A slow reader skips to the newest: nothing is queued for it. The id of an event is a digest of what it says; who
reconnects with the id of the present one gets nothing until something changes.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
import zlib
from collections import OrderedDict, deque
from collections.abc import AsyncIterator
from hashlib import blake2b
from operator import attrgetter
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from steelyard.daemon_threads import DaemonThreads
from steelyard.disk import open_regular
from steelyard.errors import RunRefused
from steelyard.journal.files import OUTPUTS
from steelyard.journal.index import ROWS, UNSCORED, Rows, id_digests, short_fingerprint
from steelyard.journal.manifest import Manifest, read_manifest
from steelyard.journal.reader import Entry, belonging_rows, decode_entry, read_exactly
from steelyard.records import verdict
from steelyard.report.headline import live_state
from steelyard.stats.errors import error_name
from steelyard.stats.formatting import counted, one_line
from steelyard.view.cases import running_now
from steelyard.view.pages import in_case_order, live_figures
from steelyard.view.runs import sayable, signature_of

_PULSE = 0.5
"""Seconds between two looks at a run that is being written."""
_SLOW_PULSE = 2.0
_SHARE = 8
"""A look that takes long is taken seldom: at most one part in eight of the time."""
_HEARTBEAT = 15.0
_RETRY = 1_000
"""Milliseconds after which a browser that lost the server tries again."""
_MAX_WATCHED = 8
"""Runs whose rows stay in memory when no page shows them."""


class RunEvent(msgspec.Struct, frozen=True):
    """One server-sent event: the state of a run, for its pages."""

    id: str
    data: bytes

    def encoded(self) -> bytes:
        return b"id: %b\ndata: %b\n\n" % (self.id.encode(), self.data)


class RunWatch:
    """One run that pages look at: its rows so far, and the newest event."""

    def __init__(self, run: Path, threads: DaemonThreads) -> None:
        self.run = run
        self.readers = 0
        self.latest: RunEvent | None = None
        self._threads = threads
        self._follower = Follower(run)
        self._reading = asyncio.Lock()
        self._changed = asyncio.Event()
        self._wanted = asyncio.Event()
        self._pulse: asyncio.Task[None] | None = None
        self._stopped = False
        self._last_event: dict[str, Any] = {}

    async def rows(self) -> Rows:
        """The rows of the whole journal as it is now, in case order."""
        async with self._reading:
            while not await self._threads.run(self._follower.advance):
                pass
            return await self._threads.run(self._counted_rows)

    def _counted_rows(self) -> Rows:
        rows = self._follower.rows
        if not self._follower.damaged:  # else a row's place is not the number of its line
            rows = belonging_rows(self.run, rows)
        return in_case_order(rows)

    async def events(self, seen: str | None) -> AsyncIterator[bytes]:
        """The run as it changes, until the reader goes; `seen` is the id of the last event that it got."""
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

    def _look(self) -> tuple[bool, bool, RunEvent]:
        """Read on; whether the end was reached, whether the run is being written, and what there is to say now."""
        follower = self._follower
        try:
            state = live_state(self.run)  # before reading: of a run that has ended, all is read
            at_end = follower.advance()
        except OSError as error:
            return True, False, _event({"state": "damaged", "problem": sayable(str(error))}, "")
        running = state == "running"
        report = blake2b(repr(signature_of(self.run)).encode(), digest_size=6).hexdigest()
        event: dict[str, Any] = {
            "generation": follower.generation,
            "position": follower.position,
            "state": state,
            "report": report,
        }
        if at_end and not running and event == self._last_event and self.latest is not None:
            return True, False, self.latest  # nothing has changed, and nothing depends on the hour
        self._last_event = event if at_end else {}
        more = self._picture(state) if at_end else {"reading": follower.position / max(follower.size, 1)}
        return at_end, running, _event({**event, **more}, f"{follower.generation}.{follower.position}.")

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
        figures["uncalibrated"] = sorted(follower.uncalibrated)
        if follower.is_grouped:  # cases of a group count together, which is worked out at the end
            figures["pass_rate_ci95"] = None
        return {
            **({"state": "damaged"} if problem and state == "interrupted" else {}),
            "problem": problem,
            "about": _about(manifest),
            "planned": max(manifest.planned if manifest is not None else 0, figures["n"]),
            "quiet": int(quiet),
            "figures": figures,
            "newest": list(follower.newest)[::-1],
            "running": running_now(self.run) if state == "running" else [],
        }


def _event(content: dict[str, Any], place: str) -> RunEvent:
    data = msgspec.json.encode(content)
    return RunEvent(place + blake2b(data, digest_size=6).hexdigest(), data)


class Watches:
    """The runs that pages look at, and a few that they looked at lately."""

    def __init__(self, threads: DaemonThreads) -> None:
        self._threads = threads
        self._known: OrderedDict[Path, RunWatch] = OrderedDict()

    def of(self, run: Path) -> RunWatch:
        watch = self._known.pop(run, None) or RunWatch(run, self._threads)
        self._known[run] = watch
        for place, other in list(self._known.items()):
            if len(self._known) > _MAX_WATCHED and not other.readers and other is not watch:
                other.stop()
                del self._known[place]
        return watch

    @property
    def readers(self) -> int:
        """How many pages are following runs."""
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
        "launches": len(manifest.launches),
        "load": manifest.load,
    }


def _quiet_seconds(run: Path) -> float:
    """How long ago the journal grew last."""
    with contextlib.suppress(OSError):
        return max(time.time() - (run / OUTPUTS).stat().st_mtime, 0.0)
    return 0.0


FIGURES = np.dtype(
    [
        *(field for field in ROWS.descr if field[0] not in ("crc", "check")),
        ("at", "<f4"),
        ("first", "<f4"),
        ("last", "<f4"),
        ("input", "<f4"),
        ("output", "<f4"),
        ("cached_input", "<f4"),
        ("reasoning", "<f4"),
        ("cost", "<f4"),
        ("kind", "<u2"),
        ("cached", "u1"),
        ("escalated", "u1"),
    ]
)
"""A row of the index, and what charts and sorting need: NaN where a record does not say."""

NEWEST = 12
_FIELDS = {
    "at": "run_time",
    "first": "time_to_first_token",
    "last": "time_to_last_token",
    "input": "num_tokens_input",
    "output": "num_tokens_output",
    "cached_input": "num_tokens_input_cached",
    "reasoning": "num_tokens_output_reasoning",
    "cost": "cost",
}
_STRIDE = 8 << 20
"""Bytes read at a time: a large journal is caught up with in steps, between which others have their turn."""
_MAX_KINDS = 1_000
_BEGINNING = 256
_MAX_PREVIEW_CHARS = 160
_LIMIT = 1e12


class Follower:
    """One journal, as far as it has been read."""

    def __init__(self, run: Path) -> None:
        self._path = run / OUTPUTS
        self._forget()

    def _forget(self) -> None:
        self.position = 0
        """How many bytes are accounted for: the end of the last whole line that was read."""
        self.size = 0
        self.damaged = 0
        """How many whole lines are not records."""
        self.kinds: list[str] = ["error"]
        """What the rows' `kind` means: the types of errors."""
        self.uncalibrated: set[str] = set()
        """The judges that decided a record and are not calibrated."""
        self.is_grouped = False
        self.newest: deque[dict[str, Any]] = deque(maxlen=NEWEST)
        self.caught_up = False
        """Whether all whole lines that were there at the last look have been read."""
        self._place: tuple[int, int] | None = None
        self._beginning = b""
        self._rows = np.empty(1024, dtype=FIGURES)
        self._count = 0

    @property
    def rows(self) -> Rows:
        """One row for each record, in the order in which they finished."""
        return self._rows[: self._count]

    @property
    def generation(self) -> str:
        """Which journal this is: the same for every reader, another one after a rewrite."""
        if self._place is None or not self._beginning:
            return ""
        return f"{self._place[1]:x}{zlib.crc32(self._beginning):08x}"

    def advance(self) -> bool:
        """Read one step further; whether the end was reached. What follows the last newline is not looked at."""
        try:
            descriptor = open_regular(self._path, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0))
        except FileNotFoundError:
            self._forget()
            self.caught_up = True
            return True
        try:
            self._check_same(descriptor)
            data = self._whole_lines(descriptor)
            if data:
                self._take(data)
                self._beginning = self._beginning or data[: min(_BEGINNING, data.find(b"\n"))]
        finally:
            os.close(descriptor)
        return self.caught_up

    def _check_same(self, descriptor: int) -> None:
        """Start over if this is not the file, or not the content, that was read so far."""
        status = os.fstat(descriptor)
        place = (status.st_dev, status.st_ino)
        same = place == self._place and status.st_size >= self.position
        if same and self.position:
            ends = read_exactly(descriptor, 1, self.position - 1) == b"\n"
            same = ends and read_exactly(descriptor, len(self._beginning), 0) == self._beginning
        if not same:
            self._forget()
        self._place, self.size = place, status.st_size

    def _whole_lines(self, descriptor: int) -> bytes:
        stride = _STRIDE
        while True:
            data = read_exactly(descriptor, min(stride, self.size - self.position), self.position)
            self.caught_up = self.position + len(data) >= self.size
            ends = data.rfind(b"\n") + 1
            if ends or self.caught_up:
                return data[:ends]
            stride *= 2  # a line longer than that

    def _take(self, data: bytes) -> None:
        entries: list[Entry] = []
        places: list[tuple[int, int]] = []
        offset = self.position
        for line in data[:-1].split(b"\n"):
            entry = decode_entry(line) if line else None
            if entry is not None:
                entries.append(entry)
                places.append((offset, len(line) + 1))
            self.damaged += entry is None and bool(line)
            offset += len(line) + 1
        self.position = offset
        if entries:
            self._append(entries, places)
            latest = zip(entries[-NEWEST:], places[-NEWEST:], strict=True)
            self.newest.extend(_in_words(entry, place[0]) for entry, place in latest)

    def _append(self, entries: list[Entry], places: list[tuple[int, int]]) -> None:
        needed = self._count + len(entries)
        if needed > len(self._rows):
            grown = np.empty(max(needed, 2 * len(self._rows)), dtype=FIGURES)
            grown[: self._count] = self.rows
            self._rows = grown
        self._fill(self._rows[self._count : needed], entries, places)
        self._count = needed

    def _fill(self, rows: Rows, entries: list[Entry], places: list[tuple[int, int]]) -> None:
        """Write the entries to rows, column by column: a third of the time that it takes row by row."""
        rows["offset"], rows["length"] = np.array(places, dtype=np.int64).T
        rows["id"] = id_digests([entry.id for entry in entries])
        rows["index"] = [entry.index for entry in entries]
        rows["trial"] = [entry.trial for entry in entries]
        rows["ok"] = ok = np.array([entry.status == "ok" for entry in entries])
        verdicts = [verdict(entry.scores) for entry in entries]
        rows["verdict"] = np.where(ok, [UNSCORED if one is None else one for one in verdicts], UNSCORED)
        rows["case"] = [short_fingerprint(entry.case_fp) for entry in entries]
        rows["cached"] = [entry.cached for entry in entries]
        rows["escalated"] = [any(score.escalated for score in entry.scores) for entry in entries]
        for entry in entries:
            self.uncalibrated.update(
                score.name
                for score in entry.scores
                if score.by is not None and not (score.advisory or score.calibrated)
            )
            self.is_grouped = self.is_grouped or entry.group is not None
        rows["kind"] = [0 if entry.status == "ok" else self._kind(error_name(entry).kind) for entry in entries]
        for name, field in _FIELDS.items():
            rows[name] = _numbers(list(map(attrgetter(field), entries)))
        rows["last"] = np.where(ok, rows["last"], _numbers([entry.elapsed for entry in entries]))

    def _kind(self, name: str) -> int:
        if name not in self.kinds:
            if len(self.kinds) >= _MAX_KINDS:
                return 0
            self.kinds.append(name)
        return self.kinds.index(name)


def _in_words(entry: Entry, offset: int) -> dict[str, Any]:
    """What the live page says of a record."""
    ok = entry.status == "ok"
    passed = verdict(entry.scores)
    return {
        "offset": offset,
        "id": entry.id,
        "trial": entry.trial,
        "state": 3 if not ok else UNSCORED if passed is None else int(passed),
        "at": entry.run_time,
        "last": entry.time_to_last_token if ok else entry.elapsed,
        "prompt": one_line(entry.input_prompt or "", _MAX_PREVIEW_CHARS),
        "answer": one_line((entry.response_text if ok else entry.error) or "", _MAX_PREVIEW_CHARS),
    }


def _numbers(values: list[Any]) -> npt.NDArray[np.float64]:
    """The values, NaN where there is none or none that a chart could show."""
    numbers = np.array(values, dtype=np.float64)
    return np.where(np.abs(numbers) < _LIMIT, numbers, np.nan)
