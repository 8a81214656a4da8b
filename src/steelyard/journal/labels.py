"""`labels.jsonl`: labels of a run's answers by people, a line each, on the disk as soon as it was given.

The first line says how the answers were drawn. Several people may write at once: each line is appended under a lock
of the file. A line that a crash cut off is skipped, and the next one begins on a new line.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import filelock
import msgspec

from steelyard.disk import open_regular, read_regular
from steelyard.errors import ConfigurationError, JournalError
from steelyard.journal.checksum import is_sound, sealed
from steelyard.journal.files import LABELS
from steelyard.journal.manifest import now
from steelyard.journal.writer import clean_texts
from steelyard.stats.formatting import counted

log = logging.getLogger("steelyard")

LABELS_VERSION = 1
MIN_GRADES, MAX_GRADES = 2, 9
PASS_FAIL = ("fail", "pass")
_NO_FOLLOW = getattr(os, "O_NOFOLLOW", 0)
"""A file that is a link would have its target written to."""


Action = Literal["label", "skip", "undo"]


class LabelSettings(msgspec.Struct, frozen=True, kw_only=True):
    """How the answers to label are drawn and the scale: the same for all who label a run."""

    v: int
    count: int
    """How many are drawn from each stratum."""
    seed: int
    grades: tuple[str, ...]
    """The scale, from the worst to the best."""


class GivenLabel(msgspec.Struct, kw_only=True, omit_defaults=True, gc=False):
    """What one person did about one answer: gave a label, skipped it, or took back what they had done."""

    v: int
    id: str
    trial: int
    labeller: str
    action: Action
    answer: str
    """The digest of the answer: a label is of no other one."""
    time: str
    grade: str | None = None
    label: float | None = None
    """The grade as a number, from 0 for the worst to 1 for the best."""
    comment: str | None = None


_decode_settings = msgspec.json.Decoder(LabelSettings).decode
_decode_given = msgspec.json.Decoder(GivenLabel).decode
_encode = msgspec.json.Encoder().encode

Given = dict[tuple[str, int], GivenLabel]
"""By case id and trial, the latest last."""


def answer_digest(text: str | None) -> str:
    """The digest of an answer."""
    return hashlib.blake2b((text or "").encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()


def parse_scale(text: str) -> tuple[str, ...]:
    """The grades that `pass/fail`, `1-5` or `bad,fair,good` names, from the worst to the best."""
    if text == "pass/fail":
        return PASS_FAIL
    first, dash, last = text.partition("-")
    if dash and first.isdecimal() and last.isdecimal() and len(text) <= 9:
        grades = tuple(map(str, range(int(first), int(last) + 1)))
    else:
        grades = tuple(part.strip() for part in text.split(","))
    if not MIN_GRADES <= len(grades) <= MAX_GRADES or len(set(grades)) < len(grades) or not all(grades):
        raise ConfigurationError(
            f"a scale is pass/fail, numbers such as 1-5, or {MIN_GRADES} to {MAX_GRADES} different grades from the "
            f"worst to the best, such as bad,fair,good; got {text!r}"
        )
    return grades


def show_scale(grades: tuple[str, ...]) -> str:
    """The grades as a person would write them."""
    return "pass/fail" if grades == PASS_FAIL else ",".join(grades)


class LabelLog:
    """The labels of a run. What others have written meanwhile is seen with each look at it."""

    def __init__(self, run: Path) -> None:
        self._path = run / LABELS
        self._read_size = -1
        self._settings: LabelSettings | None = None
        self._current: dict[str, Given] = {}

    @property
    def exists(self) -> bool:
        """Whether anybody has begun to label this run."""
        return self.settings is not None

    @property
    def settings(self) -> LabelSettings | None:
        """How the answers are drawn; None where nobody has begun."""
        self._refresh()
        return self._settings

    @property
    def current(self) -> dict[str, Given]:
        """What each labeller did and has not taken back, in that order."""
        self._refresh()
        return self._current

    def begin(self, *, count: int | None, seed: int | None, grades: tuple[str, ...] | None) -> LabelSettings:
        """Agree on how to label: as those before did, with more answers if asked for; what differs is refused."""
        with self._locked():
            there = self.settings
            if there is None:
                wanted = LabelSettings(
                    v=LABELS_VERSION, count=count or DEFAULT_COUNT, seed=seed or 0, grades=grades or PASS_FAIL
                )
                self._write(_encode(wanted))
                return wanted
            if grades is not None and grades != there.grades:
                raise ConfigurationError(
                    f"{self._path} has labels on the scale {show_scale(there.grades)}, not {show_scale(grades)}: "
                    "leave out --scale, or move the file away to start over"
                )
            if seed is not None and seed != there.seed:
                raise ConfigurationError(
                    f"{self._path} has labels of answers drawn with --seed {there.seed}, not {seed}: "
                    "leave out --seed, or move the file away to start over"
                )
            if count is None or count <= there.count:
                return there
            wanted = msgspec.structs.replace(there, count=count)
            self._write(_encode(wanted))
            return wanted

    def append(self, given: GivenLabel) -> None:
        """Write down what a person did; it is on the disk when this returns."""
        try:
            line = _encode(given)
        except UnicodeEncodeError:
            clean_texts(given)
            line = _encode(given)
        with self._locked():
            self._write(line)

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        try:
            self._descriptor = open_regular(self._path, os.O_RDWR | os.O_CREAT | os.O_APPEND | _NO_FOLLOW)
        except OSError as error:
            raise JournalError(error.errno, f"cannot open {self._path}: {error.strerror or error}") from error
        try:
            filelock.lock_descriptor(self._descriptor, blocking=True)
            yield
        finally:
            os.close(self._descriptor)  # which unlocks it too

    def _write(self, line: bytes) -> None:
        """Append a line, after the end of one that a crash cut off; the file is locked."""
        descriptor = self._descriptor
        try:
            size = os.fstat(descriptor).st_size
            torn = size > 0 and os.pread(descriptor, 1, size - 1) != b"\n"
            data = (b"\n" if torn else b"") + sealed(line)
            try:
                if os.write(descriptor, data) != len(data):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            except OSError:
                os.ftruncate(descriptor, size)
                raise
            os.fsync(descriptor)
        except OSError as error:
            raise JournalError(error.errno, f"cannot write {self._path}: {error.strerror or error}") from error

    def _refresh(self) -> None:
        """Read the file again if it has grown."""
        try:
            size = self._path.stat().st_size
            if size == self._read_size:
                return
            data = read_regular(self._path)
        except FileNotFoundError:
            self._settings, self._current, self._read_size = None, {}, -1
            return
        self._settings, self._current, self._read_size = None, {}, len(data)
        bad = [number for number, line in enumerate(data.split(b"\n"), 1) if line and not self._take(line)]
        if bad:
            lines = counted(len(bad), "line")
            log.warning("%s: skipped %s not as written, the first is line %d", self._path, lines, bad[0])

    def _take(self, line: bytes) -> bool:
        """Take in a line; whether it is one of ours."""
        if not is_sound(line):
            return False
        with contextlib.suppress(msgspec.DecodeError, UnicodeDecodeError):
            settings = _decode_settings(line)
            if settings.v > LABELS_VERSION:
                raise ConfigurationError(
                    f"{self._path} was written by a newer Steelyard: version {settings.v}, known: {LABELS_VERSION}"
                )
            self._settings = settings
            return True
        try:
            given = _decode_given(line)
        except (msgspec.DecodeError, UnicodeDecodeError):
            return False
        given_labels = self._current.setdefault(given.labeller, {})
        given_labels.pop((given.id, given.trial), None)
        if given.action != "undo":
            given_labels[given.id, given.trial] = given
        return True


DEFAULT_COUNT = 30
"""Answers drawn from each stratum: enough for a judge that errs in one of ten to be told from one at the limit."""


def given(
    place: tuple[str, int],
    labeller: str,
    action: Action,
    answer: str | None,
    *,
    grade: int | None = None,
    grades: tuple[str, ...] = PASS_FAIL,
    comment: str | None = None,
) -> GivenLabel:
    """What a person did just now; `grade` is a position in `grades`."""
    return GivenLabel(
        v=LABELS_VERSION,
        id=place[0],
        trial=place[1],
        labeller=labeller,
        action=action,
        answer=answer_digest(answer),
        time=now(),
        grade=None if grade is None else grades[grade],
        label=None if grade is None else grade / (len(grades) - 1),
        comment=comment or None,
    )
