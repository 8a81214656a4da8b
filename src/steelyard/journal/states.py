"""What is found in a run directory, and what may be done with it: the table of states in one place."""

from __future__ import annotations

import enum
from pathlib import Path
from typing import Any

import msgspec

from steelyard.errors import ConfigurationError, JournalError, RunFinished
from steelyard.journal.files import (
    CASES,
    DAMAGED,
    INDEX,
    INVOCATIONS,
    MANIFEST,
    METRICS,
    OUTPUTS,
    PARTIAL,
    REPORT,
    move_aside,
    read_json_object,
)
from steelyard.stats.wording import counted

_ALL_FILES = (METRICS, OUTPUTS, INDEX, INVOCATIONS, PARTIAL, CASES, DAMAGED, REPORT, MANIFEST)
"""In the order in which --force moves them: metrics first, so that a crash in between never looks complete."""


class RunState(enum.Enum):
    """How far the run in a directory has come."""

    FRESH = "fresh"
    INCOMPLETE = "incomplete"
    COMPLETE = "complete"


class _Counts(msgspec.Struct):
    planned: int
    ok: int
    error: int
    cancelled: int
    not_started: int


class _CompleteMetrics(msgspec.Struct):
    """What the metrics of a complete run have at the least; a file without it was not written by one."""

    suite: str
    n: int
    counts: _Counts
    scoring_errors: int
    errors: dict[str, int]
    scores: dict[str, Any]
    stats: dict[str, Any]


def read_metrics(run: Path) -> dict[str, Any] | None:
    """The metrics of a complete run; None when they are absent, torn, empty or say that they are not complete."""
    try:
        metrics = read_json_object(run / METRICS)
        if metrics is None or metrics.get("complete") is not True:
            return None
        msgspec.convert(metrics, _CompleteMetrics)
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
        raise JournalError(error.errno, f"cannot create {run}: {error.strerror}") from error


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
        move_aside(run, (METRICS, PARTIAL, REPORT))
        return RunState.INCOMPLETE
    return state


def refuse_finished(run: Path) -> None:
    """Raise RunFinished if the run there is complete, naming what can be asked for instead."""
    metrics = read_metrics(run)
    if metrics is None:
        return

    errors = metrics["counts"]["error"] + metrics["scoring_errors"]
    retry = f" --retry-errors asks its {counted(errors, 'errored record')} again;" if errors else ""
    message = f"{run} is complete ({counted(metrics['n'], 'record')}).{retry} --force starts over there"
    raise RunFinished(message, path=run, errors=errors)
