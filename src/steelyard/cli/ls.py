"""`steelyard ls`: the runs in a folder, newest first."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import Any

import click
import msgspec

from steelyard.cli.output import say, show, show_json
from steelyard.cli.place import RUNS
from steelyard.errors import ConfigurationError, RunRefused
from steelyard.journal.files import OUTPUTS
from steelyard.journal.index import PASSED, UNSCORED, winners
from steelyard.journal.lock import is_locked
from steelyard.journal.manifest import read_manifest
from steelyard.journal.reader import index_rows
from steelyard.journal.states import RunState, read_metrics, run_state
from steelyard.stats.wording import safe_text


class Listed(msgspec.Struct, kw_only=True):
    """One run, in a line."""

    run: str
    state: str
    suite: str
    model: str | None
    created: str
    done: int = 0
    planned: int = 0
    errors: int = 0
    pass_rate: float | None = None


@click.command("ls")
@click.argument("folder", type=click.Path(path_type=Path), default=RUNS)
@click.option("--json", "as_json", is_flag=True, help="Print the list as JSON.")
def command(folder: Path, as_json: bool) -> int:
    """List the runs in FOLDER (default: runs), newest first."""
    if not folder.is_dir() and folder != RUNS:
        raise ConfigurationError(f"there is no folder {folder}")
    places = sorted(folder.iterdir()) if folder.is_dir() else []
    listed = [found for place in places if place.is_dir() and (found := _look(place)) is not None]
    listed.sort(key=lambda run: run.created, reverse=True)
    if as_json:
        show_json(listed)
    elif listed:
        show(_table(listed))
    else:
        say(f"no runs in {folder}; steelyard run SUITE makes one")
    return 0


def _look(place: Path) -> Listed | None:
    """What a folder holds, from its small files and its index alone; None when it is not a run."""
    try:
        if run_state(place) is RunState.FRESH:
            return None
        return _listed(place)
    except (RunRefused, OSError):
        return Listed(run=str(place), state="unreadable", suite="", model=None, created="")


def _listed(place: Path) -> Listed:
    manifest = read_manifest(place)
    run = Listed(
        run=str(place),
        state="complete",
        suite=manifest.suite if manifest else "",
        model=manifest.model_id if manifest else None,
        created=manifest.created if manifest else "",
    )
    metrics = read_metrics(place)
    if metrics is not None:
        _from_metrics(run, metrics)
    else:
        run.state = "running" if is_locked(place) else "unfinished"
        run.planned = manifest.planned if manifest else 0
        _from_index(run, place)
    return run


def _from_metrics(run: Listed, metrics: dict[str, Any]) -> None:
    run.done, run.planned = metrics["n"], metrics["counts"]["planned"]
    run.errors, run.pass_rate = metrics["counts"]["error"], metrics["pass_rate"]


def _from_index(run: Listed, place: Path) -> None:
    if not (place / OUTPUTS).exists():
        return
    try:
        rows = winners(index_rows(place))
    except RunRefused:
        run.state = "damaged"
        return
    run.done, run.errors = len(rows), int((rows["ok"] == 0).sum())
    scored = rows[(rows["ok"] == 1) & (rows["verdict"] != UNSCORED)]
    if len(scored):
        run.pass_rate = float((scored["verdict"] == PASSED).mean())


def _table(listed: list[Listed]) -> str:
    header = ("run", "state", "suite", "model", "done", "errors", "pass rate", "created")
    rows = [header]
    for run in listed:
        rate = "–" if run.pass_rate is None else f"{run.pass_rate:.1%}"
        done = f"{run.done:,}/{run.planned:,}"
        rows.append(
            (run.run, run.state, run.suite, run.model or "–", done, f"{run.errors:,}", rate, _local_time(run.created))
        )
    shown = [[safe_text(cell) for cell in row] for row in rows]
    widths = [max(len(row[column]) for row in shown) for column in range(len(header))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in shown
    )


def _local_time(created: str) -> str:
    """A manifest's time as the clock on the wall says it, like the names of run folders."""
    try:
        return datetime.fromisoformat(created).astimezone().strftime("%Y-%m-%d %H:%M")
    except ValueError:
        return created
