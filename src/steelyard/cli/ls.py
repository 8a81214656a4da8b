"""`steelyard ls`: the runs, matrices and sweeps in a folder, newest first."""

from __future__ import annotations

import sys
from datetime import datetime
from pathlib import Path
from typing import Any

import click
import msgspec

from steelyard.cli.main import terminal_columns
from steelyard.cli.output import say, show, show_json
from steelyard.cli.output_dir import RUNS
from steelyard.errors import ConfigurationError, RunRefused
from steelyard.journal.files import RunState, run_state
from steelyard.journal.manifest import read_sweep
from steelyard.report.headline import Headline, is_writing, read_headline
from steelyard.run.matrix import is_matrix, read_matrix
from steelyard.stats.formatting import counted, display_width, safe_text, trim, wrap

_HEADER = ("run", "state", "suite", "model", "done", "errors", "pass rate", "created")
_SUITE, _MODEL, _CREATED = 2, 3, 7
_CUT = (_SUITE, _MODEL)
"""The columns that are cut where a terminal is narrow, to `_MIN_NAME` at most."""
_LEFT_OUT = (_CREATED, _SUITE, _MODEL)
"""Those that are left out where that is not enough: the names of run folders have the suite and the time in them."""
_MIN_NAME = 8
_GAP = 2


class ListRow(Headline, kw_only=True):
    """One run, matrix or sweep, in a line."""

    run: str
    variant: str | None = None
    """Its name, where it is a variant of a matrix."""
    levels: int | None = None
    """How many a sweep has measured; None of a run."""
    runs: list[ListRow] = msgspec.field(default_factory=list)
    """Of a matrix its variants, of a sweep its levels."""


@click.command("ls")
@click.argument("folder", type=click.Path(path_type=Path), default=RUNS)
@click.option("--json", "as_json", is_flag=True, help="Print the list as JSON.")
def command(folder: Path, as_json: bool) -> int:
    """List the runs, matrices and sweeps in FOLDER (default: runs), newest first.

    The variants of a matrix and the levels of a sweep are listed below it.
    """
    if not folder.is_dir() and folder != RUNS:
        raise ConfigurationError(f"there is no folder {folder}")
    places = sorted(folder.iterdir()) if folder.is_dir() else []
    listed = [found for place in places if place.is_dir() and (found := _look(place)) is not None]
    listed.sort(key=lambda run: run.created, reverse=True)
    if as_json:
        show_json(listed)
    elif listed:
        show(_table(listed, terminal_columns() if sys.stdout.isatty() else None))
    else:
        say(f"no runs in {folder}; steelyard run SUITE makes one")
    return 0


def _look(place: Path) -> ListRow | None:
    """What a folder holds, from its small files and its index alone; None when it is no run, matrix or sweep."""
    try:
        if run_state(place) is RunState.FRESH:
            return _look_at_matrix(place) if is_matrix(place) else _look_at_sweep(place)
    except (OSError, RunRefused) as error:
        return ListRow(run=str(place), state="damaged", problem=str(error))
    return _look_at_run(place)


def _look_at_run(place: Path, variant: str | None = None) -> ListRow:
    return ListRow(run=str(place), variant=variant, **msgspec.structs.asdict(read_headline(place)))


def _look_at_matrix(place: Path) -> ListRow:
    matrix = read_matrix(place)
    begun = {name: run for name, run in matrix.runs(place).items() if run_state(run) is not RunState.FRESH}
    runs = [_look_at_run(run, name) for name, run in begun.items()]
    complete = len(begun) == len(matrix.variants) and all(run.state == "complete" for run in runs)
    unfinished = "running" if is_writing(place) else "interrupted"
    return ListRow(
        run=str(place),
        state="complete" if complete else unfinished,
        suite=matrix.suite,
        model=counted(len(matrix.variants), "variant"),
        created=matrix.created,
        done=sum(run.done for run in runs),
        planned=sum(run.planned for run in runs),
        errors=sum(run.errors for run in runs),
        runs=runs,
    )


def _look_at_sweep(place: Path) -> ListRow | None:
    sweep = read_sweep(place)
    if sweep is None:
        return None
    unfinished = "running" if is_writing(place) else "interrupted"
    return ListRow(
        run=str(place),
        state="complete" if sweep.get("complete") else unfinished,
        suite=str(sweep.get("suite") or ""),
        model=None if sweep.get("model_id") is None else str(sweep["model_id"]),
        created=str(sweep.get("created") or ""),
        levels=len(sweep["levels"]),
        runs=[_look_at_run(run) for run in _level_runs(place, sweep)],
    )


def _level_runs(place: Path, sweep: dict[str, Any]) -> list[Path]:
    """The run directories of a sweep's levels that are still there."""
    names = [name for level in sweep["levels"] if isinstance(level, dict) for name in level.get("runs") or ()]
    plain = [name for name in names if isinstance(name, str) and Path(name).name == name]
    return [place / name for name in plain if run_state(place / name) is not RunState.FRESH]


def _table(listed: list[ListRow], columns: int | None = None) -> str:
    """A row for each run, as wide as a terminal of that many `columns`; the name of a run is never cut."""
    rows = [_HEADER]
    every = [(run, below) for outer in listed for run, below in ((outer, False), *((one, True) for one in outer.runs))]
    for run, below in every:
        rate = "–" if run.pass_rate is None else f"{run.pass_rate:.1%}" + (" *" if run.uncalibrated else "")
        done = f"{run.done:,}/{run.planned:,}" if run.levels is None else counted(run.levels, "level")
        errors = f"{run.errors:,}" if run.levels is None else "–"
        name = f"  {run.variant or Path(run.run).name}" if below else run.run
        suite, created = ("", "") if below else (run.suite, _local_time(run.created))
        rows.append((name, run.state, suite, run.model or "–", done, errors, rate, created))
    shown = [[safe_text(cell) for cell in row] for row in rows]
    marks = [
        f"* {safe_text(run.run)}: {safe_text(sentence)}"
        for run, _ in every
        if run.pass_rate is not None
        for sentence in run.uncalibrated
    ]
    return "\n".join([*_lines(shown, columns), *(mark if columns is None else wrap(mark, columns) for mark in marks)])


def _lines(rows: list[list[str]], columns: int | None) -> list[str]:
    """The rows of the table; the names of runs have lines to themselves where there is no room for more."""
    widths = [max(map(display_width, column)) for column in zip(*rows, strict=True)]
    if columns is None or _narrow(widths, columns):
        return [_line(row, widths) for row in rows]
    widths[0] = _GAP
    _narrow(widths, columns)
    return [line for name, *rest in rows for line in (name, _line(["", *rest], widths))]


def _line(row: list[str], widths: list[int]) -> str:
    cells = [(trim(cell, width), width) for cell, width in zip(row, widths, strict=True) if width]
    return "".join(cell + " " * (width + _GAP - display_width(cell)) for cell, width in cells).rstrip()


def _narrow(widths: list[int], columns: int) -> bool:
    """Cut and leave out columns until the others have room; whether they have. One that is left out gets no width."""
    for left_out in (None, *_LEFT_OUT):
        if left_out is not None:
            widths[left_out] = 0
        over = sum(width + _GAP for width in widths if width) - _GAP - columns
        if over <= sum(max(widths[at] - _MIN_NAME, 0) for at in _CUT):
            break
    else:
        return False
    for _ in range(over):
        widths[max(_CUT, key=lambda at: widths[at])] -= 1
    return True


def _local_time(created: str) -> str:
    """A manifest's time as the clock on the wall says it, like the names of run folders."""
    try:
        return datetime.fromisoformat(created).astimezone().strftime("%Y-%m-%d %H:%M")
    except ValueError:
        return created
