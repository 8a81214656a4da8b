"""The cases of a run: a page of them at a time, files of agents' cases, and cases that are running.

Cases are selected and sorted by the index, and read only where they are shown. Files are what agents wrote: read only
below the folders that have them, without following links, and sent as plain text or to be saved, never as something
that a browser would run.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

import msgspec
import numpy as np
import numpy.typing as npt
from starlette.exceptions import HTTPException
from starlette.responses import StreamingResponse

from steelyard.daemon_threads import DaemonThreads
from steelyard.disk import open_beneath, open_regular
from steelyard.journal.files import LOGS, OUTPUTS
from steelyard.journal.index import Rows
from steelyard.journal.reader import RecordReader
from steelyard.records import Record
from steelyard.report.case import FILE_FOLDERS, CaseFile, ending, spoken
from steelyard.report.page.data import CaseWork, TableColumns, metadata_text, shown_turns, time_line
from steelyard.report.trajectory import read_trajectory
from steelyard.stats.formatting import one_line
from steelyard.view.pages import counts_of, states_of
from steelyard.workspace.places import RunningCase, running_cases, safe_name

MAX_ROWS = 200
"""Cases that one request may ask for."""
_MAX_PAGE_BYTES = 32 << 20
"""Bytes of the journal that are read for one request; fewer cases are returned where they are longer."""
_MAX_TRIALS = 200
_MAX_SCORES = 50
_SLOW_PERCENTILE = 95
_ENOUGH_FOR_SLOW = 20
_FAILED, _PASSED, _UNSCORED, _ERROR = range(4)
_RANKS = np.array([0, 3, 2, 1])
"""How states sort, the worst first."""

Bools = npt.NDArray[np.bool_]
Ints = npt.NDArray[np.int64]

FILTERS = ("failed", "errored", "flaky", "escalated", "slow", "unscored", "passed")
MEASURED = ("first", "last", "input", "output", "cost", "at")
"""What can be sorted by once the whole journal has been read; `state` can be at once."""


class CaseTable:
    """The cases of a run as they stood when this was made. A row is a case with all of its trials.

    `rows` are in case order; with the figures of a Follower beside those of the index there is more to select by.
    """

    def __init__(self, run: Path, rows: Rows) -> None:
        self.run, self.records = run, rows
        self.states = states_of(rows)
        fresh = np.ones(len(rows), dtype=bool)
        fresh[1:] = rows["id"][1:] != rows["id"][:-1]
        self.starts: Ints = np.flatnonzero(fresh)
        self.ends: Ints = np.append(self.starts[1:], len(rows))
        self.has_figures = "last" in (rows.dtype.names or ())
        self._has = [self._any(self.states == state) for state in range(4)]
        self.marks = np.select([self._has[_FAILED], self._has[_ERROR], self._has[_UNSCORED]], [0, 3, 2], default=1)
        self.leads = self._leads()
        self._chips = {name: self._chip(name) for name in FILTERS}

    def __len__(self) -> int:
        return len(self.starts)

    @property
    def version(self) -> str:
        """Which records these are: what two requests have to agree on when they count them."""
        if not len(self.records):
            return "0"
        newest = self.records[int(np.argmax(self.records["offset"]))]
        return f"{len(self.records):x}.{int(newest['offset']):x}.{int(newest['id']):x}"

    @property
    def counts(self) -> dict[str, int]:
        """How many cases each filter lets through; only of the filters that can be applied by now."""
        return {name: int(chip.sum()) for name, chip in self._chips.items() if chip is not None}

    @property
    def record_counts(self) -> dict[str, int]:
        """How many records there are of each state."""
        return counts_of(self.states)

    @property
    def trials(self) -> int:
        """How often a case was asked at the most."""
        return int(self.records["trial"].max()) + 1 if len(self.records) else 1

    def select(self, filters: Sequence[str], sort: str | None, descending: bool, found: Bools | None) -> Ints:
        """The cases that one of the filters lets through and of which a record was found, in order."""
        wanted = np.ones(len(self), dtype=bool)
        chips = [chip for name in filters if (chip := self._chips.get(name)) is not None]
        if filters:
            wanted &= np.logical_or.reduce(chips) if chips else False
        if found is not None:
            wanted &= self._any(found)
        cases = np.flatnonzero(wanted)
        return cases if sort is None else self._sorted(cases, sort, descending)

    def block(self, cases: Ints) -> dict[str, Any]:
        """The beginning of these cases: as many as can be read for one request, at least one."""
        lengths = self.records["length"][self.leads[cases]].astype(np.int64)
        readable = int(np.searchsorted(np.cumsum(lengths), _MAX_PAGE_BYTES, side="right"))
        cases = cases[: min(max(readable, 1), MAX_ROWS)]
        records = self._read(self.leads[cases].tolist())
        names = list(dict.fromkeys(score.name for record in records for score in record.scores))[:_MAX_SCORES]
        columns = TableColumns(names)
        for record in records:
            columns.add(record, None)
        outlines = [self._outline(case) for case in cases.tolist()]
        return {"cases": outlines, "score_names": names, "leads": msgspec.Raw(columns.take())}

    def case_at(self, offset: int) -> tuple[int, int] | None:
        """The case and the record that begin at this byte; None if none that counts does."""
        found = np.flatnonzero(self.records["offset"] == offset)
        if not len(found):
            return None
        record = int(found[0])
        return int(np.searchsorted(self.starts, record, side="right")) - 1, record

    def record(self, number: int) -> Record:
        """A whole record."""
        return self._read([number])[0]

    def _read(self, numbers: list[int]) -> list[Record]:
        if not numbers:
            return []
        reader = RecordReader(self.run / OUTPUTS)
        try:
            return [reader.at(offset) for offset in self.records["offset"][numbers].tolist()]
        finally:
            reader.close()

    def _outline(self, case: int) -> dict[str, Any]:
        """Where the records of a case are and what became of them, from the index alone."""
        start, end = int(self.starts[case]), int(self.ends[case])
        shown = slice(start, min(end, start + _MAX_TRIALS))
        return {
            "case": case,
            "start": start,
            "lead": int(self.leads[case]),
            "chips": [name for name in FILTERS if self._is(name, case)],
            "trial": self.records["trial"][shown].tolist(),
            "state": self.states[shown].tolist(),
            "offset": self.records["offset"][shown].tolist(),
        }

    def _is(self, name: str, case: int) -> bool:
        chip = self._chips[name]
        return chip is not None and bool(chip[case])

    def _any(self, of_record: Bools) -> Bools:
        """Whether any record of each case is like that."""
        if not len(self.starts):
            return np.zeros(0, dtype=bool)
        return np.logical_or.reduceat(of_record, self.starts)

    def _leads(self) -> Ints:
        """The record that stands for each case: the first that is as the case is."""
        like = self.states == np.repeat(self.marks, self.ends - self.starts)
        places = np.where(like, np.arange(len(self.records)), len(self.records))
        return np.minimum.reduceat(places, self.starts) if len(self.starts) else places

    def _chip(self, name: str) -> Bools | None:
        failed, passed, unscored, errored = self._has
        if name in ("slow", "escalated") and not self.has_figures:
            return None
        match name:
            case "failed":
                return failed
            case "errored":
                return errored
            case "flaky":
                return failed & passed
            case "unscored":
                return unscored
            case "passed":
                return passed & ~failed & ~unscored & ~errored
            case "escalated":
                return self._any(self.records["escalated"] == 1)
            case _:
                return self._any(self._slow())

    def _slow(self) -> Bools:
        times = self.records["last"]
        measured = (self.records["ok"] == 1) & (self.records["cached"] == 0) & np.isfinite(times)
        if measured.sum() < _ENOUGH_FOR_SLOW:
            return np.zeros(len(times), dtype=bool)
        limit = np.percentile(times[measured], _SLOW_PERCENTILE)
        return np.asarray(measured & (times > limit), dtype=bool)

    def _sorted(self, cases: Ints, sort: str, descending: bool) -> Ints:
        if sort == "state":
            keys = _RANKS[self.marks[cases]].astype(np.float64)
        elif sort in MEASURED and self.has_figures:
            keys = self.records[sort][self.leads[cases]].astype(np.float64)
        else:
            return cases
        known = np.isfinite(keys)  # what has no value goes last either way
        order = np.argsort(-keys[known] if descending else keys[known], kind="stable")
        return np.concatenate([cases[known][order], cases[~known]])


MAX_QUERY_CHARS = 200
_TERM = re.compile(r'[^\s"=]+="[^"]*"|\S+')
_MAX_SECONDS = 3.0
_MAX_SEARCH_BYTES = 1 << 30
_LOOK_EVERY = 256


class _Words(msgspec.Struct, gc=False):
    """What is looked at of a record."""

    id: str
    response_text: str | None = None
    input_prompt: str | None = None
    error: str | None = None
    metadata: dict[str, Any] = {}


_decode = msgspec.json.Decoder(_Words).decode


class SearchResult(msgspec.Struct, frozen=True):
    """Which records hold the words, and how many were looked at before time or patience ran out."""

    records: npt.NDArray[np.bool_]
    searched: int


def terms_of(query: str) -> tuple[str, ...]:
    """The words of a query, in small letters; a record must hold all of them. `key="two words"` is one."""
    return tuple(term.replace('"', "") for term in _TERM.findall(query[:MAX_QUERY_CHARS].lower()))


def search(run: Path, rows: Rows, terms: tuple[str, ...], clock: Callable[[], float] = time.monotonic) -> SearchResult:
    """Look through the records of these rows, in the order in which they lie in the journal."""
    found = np.zeros(len(rows), dtype=bool)
    deadline, left, searched = clock() + _MAX_SECONDS, _MAX_SEARCH_BYTES, 0
    order = np.argsort(rows["offset"], kind="stable")
    places = zip(order.tolist(), rows["offset"][order].tolist(), rows["length"][order].tolist(), strict=True)
    with os.fdopen(open_regular(run / OUTPUTS), "rb", buffering=1 << 20) as file:
        for record, offset, length in places:
            if left < length or (searched % _LOOK_EVERY == 0 and clock() > deadline):
                break
            if file.tell() != offset:
                file.seek(offset)
            found[record] = _holds(file.read(length), terms)
            left -= length
            searched += 1
    return SearchResult(found, searched)


def _holds(line: bytes, terms: tuple[str, ...]) -> bool:
    try:
        words = _decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return False
    text = "\n".join((words.id, words.input_prompt or "", words.response_text or "", words.error or "")).lower()
    lines = metadata_text(words.metadata).lower().split("\n") if any("=" in term for term in terms) else ()
    return all(term in text or term in lines for term in terms)


_CHUNK = 1 << 18
_MAX_PATH = 4_096
_TEXTS = (".out", ".err", ".jsonl", ".json", ".patch", ".diff", ".txt", ".log", ".md", ".py", ".xml", ".csv")
"""Files that a browser shows, as plain text; all others it saves."""
_POLICY = "default-src 'none'; sandbox; frame-ancestors 'none'"
_MAX_RUNNING = 50
_LIVE_CHARS = 20_000
_LAST_LINE_BYTES = 400
_MAX_LIVE_TURNS = 200


def file_response(run: Path, path: str, threads: DaemonThreads) -> StreamingResponse:
    """A file of a case; 404 for anything that is not one."""
    if path.partition("/")[0] not in FILE_FOLDERS or len(path) > _MAX_PATH:
        raise HTTPException(404, "there is no such file of a case")
    try:
        descriptor = open_beneath(run, path)
    except (OSError, ValueError) as error:
        raise HTTPException(404, "there is no such file of a case") from error
    size = os.fstat(descriptor).st_size
    is_text = path.endswith(_TEXTS)
    name = quote(path.rpartition("/")[2], safe="", errors="replace")
    headers = {
        "content-length": str(size),
        "content-disposition": f"{'inline' if is_text else 'attachment'}; filename*=UTF-8''{name}",
        "content-security-policy": _POLICY,
    }
    kind = "text/plain; charset=utf-8" if is_text else "application/octet-stream"
    return StreamingResponse(_pieces(descriptor, size, threads.run), media_type=kind, headers=headers)


async def _pieces(descriptor: int, size: int, run: Callable[..., Any]) -> AsyncIterator[bytes]:
    """The file as it was when it was opened: a log may grow while it is sent."""
    try:
        while size > 0 and (piece := await run(os.read, descriptor, min(_CHUNK, size))):
            size -= len(piece)
            yield piece
        if size > 0:  # it was cut short meanwhile: what was promised is filled up
            yield b"\0" * size
    finally:
        os.close(descriptor)


def running_now(run: Path) -> list[dict[str, Any]]:
    """The attempts that are under way, each with the last line that it printed."""
    now = time.time()
    return [
        {
            "id": case.id,
            "trial": case.trial,
            "attempt": case.attempt,
            "seconds": max(0, int(now - case.since)),
            "line": _last_line(run, case),
        }
        for case in running_cases(run, _MAX_RUNNING)
    ]


def _last_line(run: Path, case: RunningCase) -> str:
    for stream in ("out", "err"):
        path = f"{LOGS}/{safe_name(case.id)}/{case.trial}.{stream}"
        lines = ending(run, CaseFile(path, 0), _LAST_LINE_BYTES).splitlines()
        if text := next((line for line in reversed(lines) if line.strip()), ""):
            return one_line(text, 160)
    return ""


def running_case(run: Path, case_id: str, trial: int) -> dict[str, Any]:
    """What can be seen of a case that is running: its logs, turns and time line so far. 404 once it is done."""
    found = next((one for one in running_cases(run, _MAX_RUNNING) if (one.id, one.trial) == (case_id, trial)), None)
    if found is None:
        raise HTTPException(404, "this case is not running")
    since = max(0.0, time.time() - found.since)
    trajectory = read_trajectory(run, case_id, trial, since)
    shown: dict[str, Any] = {**msgspec.to_builtins(found), "seconds": int(since), "turns": []}
    shown |= CaseWork(run).files(case_id, trial, _LIVE_CHARS * 4)
    if trajectory is not None:
        shown["time_line"] = time_line(trajectory)
        shown["turns"] = list(shown_turns(spoken(trajectory)[-_MAX_LIVE_TURNS:], _LIVE_CHARS))
    return shown
