"""The runs in a folder: where they are, what state each is in, and its headline. Reads, never writes.

A page names a run by a digest of its place. The digest is looked up among the runs that were found, so that nothing
that a request says ever becomes part of a path. Links are not followed: what is shown lies in the folder.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from hashlib import blake2b
from pathlib import Path

import msgspec

from steelyard.errors import ConfigurationError
from steelyard.journal.files import INDEX, LOCK, MANIFEST, METRICS, OUTPUTS, PARTIAL, PREVIOUS
from steelyard.journal.states import RunState, run_state
from steelyard.report.headline import Headline, is_writing, read_headline

_DEEPEST = 3
"""Folders within folders that are looked into: a sweep keeps each level's run in a folder of its own."""
_MOST_FOLDERS = 5_000
_FRESH = 1.0
"""Seconds that a list of the folder is good for, however many pages ask."""
_SHARE = 8
"""A run whose headline takes long is read seldom: at most one part in so many of the time."""
_FILES = (MANIFEST, OUTPUTS, METRICS, PARTIAL)

Signature = tuple[tuple[int, int, int] | None, ...]


class ListedRun(Headline, kw_only=True):
    """One run of the list: its headline, and what pages and people call it."""

    id: str
    name: str


class _Known(msgspec.Struct):
    """A headline, of which state of the files it is, and until when it will do while a run is being written."""

    headline: ListedRun
    signature: Signature
    good_until: float

    def will_do(self, signature: Signature, now: float) -> bool:
        return self.signature == signature or (self.headline.state == "running" and now < self.good_until)


class Runs:
    """The runs below a folder; the folder may be a run itself. Any thread may ask."""

    def __init__(self, root: Path) -> None:
        self.root = root.resolve()
        if not self.root.is_dir():
            raise ConfigurationError(f"there is no folder {root}")
        self.is_run = run_state(self.root) is not RunState.FRESH
        self._places: dict[str, Path] = {}
        self._looked = -_FRESH
        self._known: dict[Path, _Known] = {}
        self._looking = threading.Lock()

    def find(self, run_id: str) -> Path | None:
        """The run of that id, if the folder holds it."""
        if run_id not in self._places:
            with self._looking:
                self._look()
        place = self._places.get(run_id)
        return place if place is not None and is_inside(place) else None

    def headlines(self) -> list[ListedRun]:
        """All runs, the newest first."""
        with self._looking:
            self._look()
            found = [one for run_id, place in self._places.items() if (one := self._headline(run_id, place))]
        return sorted(found, key=lambda one: (one.created, one.name), reverse=True)

    def id_of(self, place: Path) -> str:
        """What pages call the run at a place: the same whenever the folder is served."""
        relative = place.relative_to(self.root).as_posix()
        return blake2b(relative.encode("utf-8", "surrogateescape"), digest_size=8).hexdigest()

    def name_of(self, place: Path) -> str:
        """What people call it: its place below the folder."""
        relative = place.relative_to(self.root).as_posix()
        return sayable(self.root.name if relative == "." else relative)

    def _look(self) -> None:
        if time.monotonic() - self._looked < _FRESH:
            return
        self._places = {self.id_of(place): place for place in _run_folders(self.root)}
        self._known = {place: known for place, known in self._known.items() if self.id_of(place) in self._places}
        self._looked = time.monotonic()

    def _headline(self, run_id: str, place: Path) -> ListedRun | None:
        """What is known of a run; read again only where it has changed, and not too often."""
        began, signature, known = time.monotonic(), signature_of(place), self._known.get(place)
        if known is not None and known.will_do(signature, began) and _still(known.headline.state, place):
            return known.headline
        found = msgspec.structs.asdict(read_headline(place))
        headline = ListedRun(id=run_id, name=self.name_of(place), **found)
        headline.problem = None if headline.problem is None else sayable(headline.problem)
        ended = time.monotonic()
        self._known[place] = _Known(headline, signature, ended + max(_FRESH, _SHARE * (ended - began)))
        return headline if any(signature) else None


def sayable(text: str) -> str:
    """The text with a stand-in for what is no text: a file's name may be any bytes."""
    return text.encode("utf-8", "replace").decode()


def _still(state: str, run: Path) -> bool:
    """Whether a run is in the same state, unless its files say otherwise: a lock comes and goes without a trace."""
    return state in ("complete", "damaged") or is_writing(run) == (state == "running")


def signature_of(run: Path) -> Signature:
    """What changes whenever a file of the run does."""
    return tuple(stat_of(run / name) for name in _FILES)


def stat_of(path: Path) -> tuple[int, int, int] | None:
    """What changes whenever a file does; None when there is none."""
    try:
        status = path.lstat()
    except OSError:
        return None
    return status.st_ino, status.st_size, status.st_mtime_ns


def is_inside(run: Path) -> bool:
    """Whether a run's folder, the folders above it and its files are what they seem, and no links elsewhere.

    The path must be one that had no links in it when it was found.
    """
    names = (*_FILES, INDEX, LOCK)
    return run.is_dir() and run.resolve() == run and not any((run / name).is_symlink() for name in names)


def _run_folders(root: Path) -> Iterator[Path]:
    """The folders that hold a run, without following links; a bounded number of them."""
    waiting, seen = [(root, 0)], 0
    while waiting and seen < _MOST_FOLDERS:
        folder, depth = waiting.pop()
        seen += 1
        try:
            with os.scandir(folder) as entries:
                found = list(entries)
        except OSError:
            continue
        if any(entry.name in (MANIFEST, OUTPUTS) for entry in found) and is_inside(folder):
            yield folder
        if depth < _DEEPEST:
            below = [entry for entry in found if entry.is_dir(follow_symlinks=False) and entry.name != PREVIOUS]
            waiting += [(folder / entry.name, depth + 1) for entry in below if not entry.name.startswith(".")]
