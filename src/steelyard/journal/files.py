"""The names of a run's files, and writing a small one so that a crash leaves the old one or the new one."""

from __future__ import annotations

import contextlib
import enum
import errno
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from steelyard.disk import NotAFile, read_regular, sync_directory
from steelyard.errors import ConfigurationError, JournalError, RunFinished, SteelyardError
from steelyard.stats.formatting import counted

MANIFEST = "run.json"
OUTPUTS = "outputs.jsonl"
INDEX = "outputs.idx"
ANSWERS = "answers.jsonl"
METRICS = "metrics.json"
CORRECTION = "correction.json"
"""What labels by people make of the pass rate."""
LABELS = "labels.jsonl"
"""What people said of the answers: `steelyard label`."""
PARTIAL = "partial.json"
CASES = "cases.jsonl"
DAMAGED = "damaged.jsonl"
REPORT = "report.html"
SWEEP = "sweep.json"
SWEEP_PARTIAL = "sweep.partial.json"
MATRIX = "matrix.json"
PROCESSES = "processes.jsonl"
ARTIFACTS = "artifacts"
"""A folder: what is kept of agents' work, by case and trial."""
LOGS = "logs"
"""A folder: what agents printed."""
CALLS = "calls"
"""A folder: the model calls of agents."""
RUNNING = "running"
"""A folder: a file for each attempt of an agent that is under way."""
LOCK = ".lock"
PREVIOUS = "previous"


def atomic_write(path: Path, data: bytes) -> None:
    """Replace a file's content so that readers and crashes see all of it or none; durable when this returns."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        sync_directory(path.parent)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise JournalError(error.errno, f"cannot write {path}: {error.strerror or error}") from error


def clear_drafts(run: Path) -> None:
    """Remove what a killed writer left half written. Only for the holder of the lock of the run, or of the sweep."""
    for name in (MANIFEST, OUTPUTS, INDEX, METRICS, PARTIAL, SWEEP, SWEEP_PARTIAL, MATRIX):
        for draft in run.glob(f"{name}.*.tmp"):
            draft.unlink(missing_ok=True)


@contextlib.contextmanager
def disk_errors(run: Path) -> Iterator[None]:
    """Turn an OSError of the disk into a JournalError: the run stops, what is on disk is kept."""
    try:
        yield
    except JournalError:
        raise
    except OSError as error:
        raise JournalError(error.errno, f"cannot write to {run}: {error.strerror or error}") from error


def write_json(path: Path, value: Any) -> None:
    """Write an object as indented JSON, atomically."""
    atomic_write(path, msgspec.json.format(msgspec.json.encode(value), indent=2) + b"\n")


def read_json_object(path: Path) -> dict[str, Any] | None:
    """The JSON object in a file; None when there is no such file or it does not hold one."""
    try:
        value = msgspec.json.decode(read_regular(path))
    except (FileNotFoundError, NotAFile, msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        return None
    return value if isinstance(value, dict) else None


def move_aside(run: Path, names: tuple[str, ...]) -> Path | None:
    """Move these files, in this order, into `previous/<time>/`; returns that folder, or None if none was there."""
    found = [name for name in names if (run / name).exists()]
    if not found:
        return None
    folder = _new_folder(run / PREVIOUS, time.strftime("%Y%m%d-%H%M%S"))
    for name in found:
        os.replace(run / name, folder / name)
    sync_directory(folder)
    sync_directory(run)
    return folder


def _new_folder(parent: Path, name: str) -> Path:
    """A folder of that name that was not there before."""
    number = 1
    while True:
        folder = parent / (name if number == 1 else f"{name}-{number}")
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            number += 1
        else:
            return folder


_ALL_FILES = (
    METRICS,
    CORRECTION,
    LABELS,
    OUTPUTS,
    INDEX,
    ANSWERS,
    PARTIAL,
    CASES,
    DAMAGED,
    REPORT,
    MANIFEST,
    ARTIFACTS,
    LOGS,
    CALLS,
    RUNNING,
)
"""In the order in which --force moves them: metrics first, so that a crash in between never looks complete."""


class RunState(enum.Enum):
    """How far the run in a directory has come."""

    FRESH = "fresh"
    INCOMPLETE = "incomplete"
    COMPLETE = "complete"


class _CoreCounts(msgspec.Struct):
    planned: int
    ok: int
    error: int
    cancelled: int
    not_started: int


class MetricsCore(msgspec.Struct):
    """What the metrics of a complete run have at the least, whatever version wrote them.

    It alone decides whether a run is complete: what cannot be read as a whole `Metrics` is another version's, and
    must not be asked and paid for again.
    """

    suite: str
    n: int
    counts: _CoreCounts
    scoring_errors: int
    errors: dict[str, int]
    scores: dict[str, Any]
    stats: dict[str, Any]


def read_core(run: Path) -> MetricsCore | None:
    """What the metrics of a complete run are sure to say; None when it is not complete."""
    metrics = read_metrics(run)
    return None if metrics is None else msgspec.convert(metrics, MetricsCore)


def read_metrics(run: Path) -> dict[str, Any] | None:
    """The metrics of a complete run; None when they are absent, torn, empty or say that they are not complete."""
    try:
        metrics = read_json_object(run / METRICS)
        if metrics is None or metrics.get("complete") is not True:
            return None
        msgspec.convert(metrics, MetricsCore)
    except (NotADirectoryError, IsADirectoryError, msgspec.ValidationError):
        return None
    return metrics


def run_state(run: Path) -> RunState:
    """What is found in a run directory."""
    if read_metrics(run) is not None:
        return RunState.COMPLETE
    if (run / MANIFEST).exists() or (run / OUTPUTS).exists():
        return RunState.INCOMPLETE
    return RunState.FRESH


def create(run: Path) -> None:
    """Make the run directory."""
    try:
        run.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError) as error:
        raise ConfigurationError(f"{run} is not a directory") from error
    except OSError as error:
        raise cannot_create(run, error) from error


def cannot_create(run: Path, error: OSError) -> SteelyardError:
    """What a folder that cannot be made is: a path that cannot be, or a disk that fails."""
    message = f"cannot create {run}: {error.strerror}"
    if error.errno in (errno.ENOENT, errno.EACCES, errno.EPERM, errno.ENAMETOOLONG, errno.ELOOP):
        return ConfigurationError(message, topic="disk")
    return JournalError(error.errno, message)


def enter(run: Path, *, force: bool, retry_errors: bool, keep: str | None = None) -> RunState:
    """Make a locked run directory ready to be written: fresh or incomplete, or refuse. Nothing is ever deleted.

    `keep` names a file that the run about to begin reads itself and that therefore stays where it is.
    """
    state = run_state(run)
    if force and state is not RunState.FRESH:
        move_aside(run, tuple(name for name in _ALL_FILES if name != keep))
        return RunState.FRESH
    if state is RunState.COMPLETE:
        if not retry_errors:
            refuse_finished(run)
        reopen(run)
        return RunState.INCOMPLETE
    return state


def reopen(run: Path) -> None:
    """Make a complete run an unfinished one: its metrics are moved aside, its records stay."""
    move_aside(run, (METRICS, CORRECTION, PARTIAL, REPORT))


def written_at(path: Path) -> int | None:
    """When a file was written last, in nanoseconds; None when there is none."""
    try:
        return path.lstat().st_mtime_ns
    except OSError:
        return None


def count_errors(errors: int, scoring_errors: int) -> str:
    """The errors of a run, those of its scorers apart: `2 errors and 1 scoring error`."""
    kinds = (errors, "error"), (scoring_errors, "scoring error")
    return " and ".join(counted(count, kind) for count, kind in kinds if count)


def refuse_finished(run: Path) -> None:
    """Raise RunFinished if the run there is complete, naming the flags that continue it or start over."""
    core = read_core(run)
    if core is None:
        return

    errors = core.counts.error + core.scoring_errors
    retry = f" {{retry_errors}} retries its {count_errors(core.counts.error, core.scoring_errors)};" if errors else ""
    remedy = f"{retry} {{update}} asks and scores what changed since; {{force}} starts over there"
    raise RunFinished(f"{run} is complete ({counted(core.n, 'record')}).", remedy, path=run, errors=errors)
