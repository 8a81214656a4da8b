"""Chooses the output directory when the command line names none: a run that can be resumed, or a new folder."""

from __future__ import annotations

import json
import logging
import os
import re
import shlex
import shutil
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

import click
from click.core import ParameterSource

from steelyard.errors import ConfigurationError, RunFinished, RunLocked, RunRefused
from steelyard.journal.files import LOCK, MetricsCore, cannot_create, count_errors, create, read_core
from steelyard.journal.lock import is_locked
from steelyard.journal.manifest import Manifest, read_manifest, read_sweep, same_run, sweep_manifest
from steelyard.run.matrix import Matrix, is_matrix, read_matrix
from steelyard.run.matrix_runner import MatrixRunner
from steelyard.run.plan import manifest_of, read_session
from steelyard.run.runner import Runner

RUNS = Path("runs")
_JOB_FOLDERS = "runtime_resources/working_dir_files"
"""Below this Ray unpacks the working directories of jobs, and deletes them again."""

log = logging.getLogger("steelyard")


class PlaceFlags(Protocol):
    """The flags that decide where a run goes."""

    @property
    def out(self) -> Path | None: ...
    @property
    def new(self) -> bool: ...
    @property
    def force(self) -> bool: ...
    @property
    def retry_errors(self) -> bool: ...
    @property
    def update(self) -> bool: ...
    @property
    def dry_run(self) -> bool: ...


def choose_place(runner: Runner, flags: PlaceFlags) -> Path:
    """The run directory: as given, or the newest run of the same suite and target that can be resumed, or a new one."""
    given = flags.out or (None if flags.new else runner.options.output_path)
    if given is not None:
        return Path(given)
    # A load run is measured without a break: there is never one to resume.
    newest = None if flags.new or runner.options.is_load else newest_run(runner)
    if newest is None:
        if flags.retry_errors:
            raise ConfigurationError(f"{RUNS} has no run of this suite and target whose errors could be retried")
        return new_place(runner.suite.id, make=not flags.dry_run)
    place, metrics = newest
    if metrics is None:
        return _resume(place, "run", force=flags.force)
    if flags.force or flags.retry_errors or flags.update:
        return place
    _refuse_errors(place, metrics.counts.error, metrics.scoring_errors)
    return new_place(runner.suite.id, make=not flags.dry_run)


def warn_if_temporary(place: Path) -> None:
    """Warn of a run directory in the working directory of a Ray job: it is gone when the job's folder is."""
    if _JOB_FOLDERS in place.absolute().as_posix():
        log.warning(
            "%s is in the folder of a Ray job, which Ray deletes: give --out a path that stays, on a shared disk", place
        )


def choose_matrix_place(matrix: MatrixRunner, flags: PlaceFlags) -> Path:
    """The folder of a matrix: as given, or the newest of the same suite and targets to be resumed, or a new one."""
    given = flags.out or (None if flags.new else matrix.options.output_path)
    if given is not None:
        return Path(given)
    newest = None if flags.new else newest_matrix(matrix)
    if newest is None:
        if flags.retry_errors:
            raise ConfigurationError(
                f"{RUNS} has no matrix of this suite and its targets whose errors could be retried"
            )
        return new_place(matrix.suite.id, make=not flags.dry_run)
    place, cores = newest
    complete = [core for core in cores if core is not None]
    if len(complete) < len(cores):
        return _resume(place, "matrix", force=flags.force)
    if flags.force or flags.retry_errors or flags.update:
        return place
    errors, scoring = sum(core.counts.error for core in complete), sum(core.scoring_errors for core in complete)
    _refuse_errors(place, errors, scoring)
    return new_place(matrix.suite.id, make=not flags.dry_run)


def newest_matrix(matrix: MatrixRunner, runs: Path = RUNS) -> tuple[Path, list[MetricsCore | None]] | None:
    """The newest matrix of the same suite, axes and targets, unfinished ones first.

    With the metrics of the variants that are to be run, None for each that is not complete.
    """
    ours = {variant.name: _same_as(matrix.runner_of(variant)) for variant in matrix.variants}
    newest: tuple[Path, list[MetricsCore | None]] | None = None
    found = [(described.created, place, described) for place in _folders(runs) if (described := _matrix(place))]
    for _, place, described in sorted(found, key=lambda one: one[:2], reverse=True):
        places = {name: run for name, run in described.runs(place).items() if name in ours}
        manifests = {name: manifest for name, run in places.items() if (manifest := _manifest(run)) is not None}
        if described.suite != matrix.suite.id or list(described.axes) != list(matrix.axes):
            continue
        # Of variants that have not begun there, it is enough that the matrix knows their values.
        known = all(at in described.axes[axis] for one in matrix.variants for axis, at in one.axes.items())
        if not (manifests or known) or not all(ours[name](one) for name, one in manifests.items()):
            continue
        cores = [read_core(places[name]) if name in places else None for name in ours]
        if None in cores:
            return place, cores
        newest = newest or (place, cores)
    return newest


def choose_sweep_place(runner: Runner, *, out: Path | None, new: bool, force: bool) -> Path:
    """The folder of a sweep: as given, or the newest unfinished sweep of the same suite and target, or a new one."""
    if out is not None:
        return out
    place = None if new else newest_unfinished_sweep(runner)
    return new_place(f"{runner.suite.id}-sweep", make=True) if place is None else _resume(place, "sweep", force=force)


def _resume(place: Path, what: str, *, force: bool) -> Path:
    """The place of an unfinished run or sweep, unless another process is at work there."""
    if (holder := is_locked(place)) is not None:
        who = f"process {holder.pid or '?'} on {holder.host or '?'}"
        raise RunLocked(
            f"{place} is being written by {who}; --new starts another {what}",
            path=place,
            pid=holder.pid,
            host=holder.host,
        )
    if not force:
        log.info("found the unfinished %s %s; --new starts another", what, place)
    return place


def _refuse_errors(place: Path, errors: int, scoring_errors: int) -> None:
    """Refuse to start beside a complete run whose errors may be what is really meant."""
    if not errors + scoring_errors:
        return
    raise RunFinished(
        f"{place} is complete with {count_errors(errors, scoring_errors)}. "
        f"This {does_again(errors, scoring_errors)}:\n"
        f"  {command_again(place, '--retry-errors')}\n"
        "--new starts another run",
        path=place,
        errors=errors + scoring_errors,
    )


def newest_run(runner: Runner, runs: Path = RUNS) -> tuple[Path, MetricsCore | None] | None:
    """The newest run of the same suite, target and seed, unfinished ones first, with its metrics if complete."""
    found = [(manifest, place) for place in _folders(runs) if (manifest := _manifest(place)) is not None]
    is_ours = _same_as(runner)
    ours = [(manifest.created, place) for manifest, place in found if manifest.load is None and is_ours(manifest)]
    newest: tuple[Path, MetricsCore | None] | None = None
    for _, place in sorted(ours, reverse=True):
        metrics = read_core(place)
        if metrics is None:
            return place, None
        newest = newest or (place, metrics)
    return newest


def newest_unfinished_sweep(runner: Runner, runs: Path = RUNS) -> Path | None:
    """The newest sweep of the same suite, target and seed that is not finished."""
    is_ours = _same_as(runner)
    found = [
        (manifest.created, place)
        for place in _folders(runs)
        if (sweep := read_sweep(place)) is not None
        and not sweep.get("complete")
        and (manifest := sweep_manifest(sweep)) is not None
        and is_ours(manifest)
    ]
    return max(found)[1] if found else None


def _same_as(runner: Runner) -> Callable[[Manifest], bool]:
    """What tells a manifest of the runner's suite, target, seed and session from others."""
    file = runner.options.initial_session_file
    session = None if file is None else read_session(file)
    ours = manifest_of(runner.target, runner.suite, (), runner.options, session=session)
    return lambda old: same_run(old, ours.suite, ours.target, ours.seed, ours.options)


def _folders(runs: Path) -> list[Path]:
    return [place for place in runs.iterdir() if place.is_dir()] if runs.is_dir() else []


def _manifest(place: Path) -> Manifest | None:
    """A manifest that can be read; a folder with another one is not a run that could be ours."""
    try:
        return read_manifest(place)
    except RunRefused:
        return None


def _matrix(place: Path) -> Matrix | None:
    """What a folder says of its matrix, if it holds one that can be read."""
    try:
        return read_matrix(place) if is_matrix(place) else None
    except RunRefused:
        return None


def new_place(suite_id: str, *, make: bool) -> Path:
    """runs/<suite>-<time>, a name that no run has yet; made at once, so that no other run takes it."""
    safe = re.sub(r"[^A-Za-z0-9._-]+", "-", suite_id).strip(".-")[:80] or "suite"
    name = f"{safe}-{time.strftime('%Y%m%d-%H%M%S')}"
    place, number = RUNS / name, 2
    while not _is_ours(place, make=make):
        place, number = RUNS / f"{name}-{number}", number + 1
    return place


def _is_ours(place: Path, *, make: bool) -> bool:
    if not make:
        return not place.exists()
    create(place.parent)
    try:
        place.mkdir()
    except FileExistsError:
        return False
    except OSError as error:
        raise cannot_create(place, error) from error
    return True


def remove_if_unused(place: Path) -> None:
    """Take away a folder under runs/ in which nothing came to be: the run was refused before it began."""
    if place.parent == RUNS:
        with suppress(OSError):  # it holds a run, or is gone
            if [file.name for file in place.iterdir()] == [LOCK]:
                (place / LOCK).unlink()
            place.rmdir()
            RUNS.rmdir()


_STARTS_OVER = ("force", "new")


def command_again(place: Path, *more: str, begun: bool = True) -> str:
    """The command that was given, in this directory; once the run has begun, without what would start it over."""
    context = click.get_current_context()
    left_out = ("out", *_STARTS_OVER) if begun else ("out",)
    words: list[str] = []
    flags: list[str] = []
    for parameter in context.command.params:
        name, flag = str(parameter.name), parameter.opts[-1]
        value = context.params.get(name)
        if isinstance(parameter, click.Argument):
            # A leading dash would make it a flag.
            words.append(f"./{value}" if str(value).startswith("-") else str(value))
        elif _was_given(context, name) and name not in left_out and flag not in more:
            flags += [flag] if value is True else [word for one in _written(value) for word in (flag, one)]
    return shlex.join([_program(), str(context.info_name), *words, "--out", str(place), *flags, *more])


def _written(value: Any) -> list[str]:
    """The values of a flag as they were written: of one that may be given several times, each."""
    if isinstance(value, dict):
        return [f"{name}={one if isinstance(one, str) else json.dumps(one)}" for name, one in value.items()]
    return [str(one) for one in value] if isinstance(value, tuple) else [str(value)]


def _was_given(context: click.Context, name: str) -> bool:
    return context.get_parameter_source(name) is ParameterSource.COMMANDLINE


def _program() -> str:
    """`steelyard` where the shell finds this very program by that name, else the path it was started by."""
    given, found = sys.argv[0], shutil.which("steelyard")
    if os.path.basename(given) != "steelyard" or not os.path.exists(given):
        return "steelyard"
    return "steelyard" if found is not None and os.path.samefile(found, given) else given


def does_again(errors: int, scoring_errors: int) -> str:
    """What `--retry-errors` does about the errors of a run: those of scorers need no call."""
    if not scoring_errors:
        return "retries them"
    return "retries or scores them again" if errors else "scores them again"
