"""`matrix.json`: which variants a matrix has, and the run directory of each beneath its folder."""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from itertools import product
from pathlib import Path
from typing import TypeAlias

import msgspec

from steelyard.disk import read_regular
from steelyard.errors import ConfigurationError, RunFinished, RunMismatch, RunRefused, suggestion
from steelyard.journal.files import (
    CASES,
    MATRIX,
    PREVIOUS,
    REPORT,
    RunState,
    clear_drafts,
    count_errors,
    disk_errors,
    move_aside,
    read_core,
    run_state,
    write_json,
)
from steelyard.journal.manifest import now, refuse_run, refuse_sweep
from steelyard.run.directory import OpenMode
from steelyard.stats.formatting import counted

MATRIX_VERSION = 1
MAX_VARIANTS = 64
"""How many runs may share a folder: more would be a mistake in the axes, and an expensive one."""
TARGET = "target"
PROMPT = "prompt"
_MAX_DIRECTORY = 80
_UNSAFE = re.compile(r"[^A-Za-z0-9._=-]+")


class Variant(msgspec.Struct, frozen=True, kw_only=True):
    """One combination of a matrix: one run."""

    name: str
    """`small/terse`: its value on each axis; those of parameters as `temperature=0.7`."""
    directory: str
    """Its run directory, a name beneath the folder of the matrix."""
    axes: dict[str, str]
    """Its value on each axis: `target`, `prompt`, and each parameter by its name."""


class Matrix(msgspec.Struct, frozen=True, kw_only=True):
    """What matrix.json says: a suite, the axes along which its runs differ, and a run directory for each variant.

    Variants that have not begun have no directory yet.
    """

    v: int = MATRIX_VERSION
    suite: str
    suite_file: str | None = None
    axes: dict[str, list[str]]
    """The values on each axis, in the order of the suite; the targets first, then the prompts."""
    variants: list[Variant]
    created: str = msgspec.field(default_factory=now)

    def runs(self, folder: str | Path) -> dict[str, Path]:
        """The run directory of each variant, by its name."""
        return {variant.name: Path(folder) / variant.directory for variant in self.variants}


def is_matrix(folder: str | Path) -> bool:
    """Whether a folder holds a matrix."""
    return (Path(folder) / MATRIX).is_file()


def read_matrix(folder: str | Path) -> Matrix:
    """What matrix.json says; RunRefused where there is none, or none that can be used."""
    path = Path(folder) / MATRIX
    try:
        matrix = msgspec.json.decode(read_regular(path), type=Matrix)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise RunRefused(f"{folder} holds no matrix: it has no {MATRIX}", path=folder) from error
    except OSError as error:
        raise RunRefused(f"{path} cannot be read: {error.strerror}", path=folder) from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise RunRefused(f"{path} cannot be read ({error});", " {force} starts over", path=folder) from error
    if matrix.v > MATRIX_VERSION:
        raise RunRefused(f"{path} was written by a newer Steelyard (schema {matrix.v})", path=folder, topic="version")
    for variant in matrix.variants:
        if variant.directory in ("", ".", "..") or _UNSAFE.search(variant.directory):
            raise RunRefused(f"{path}: {variant.directory!r} is not the name of a run directory", path=folder)
    return matrix


def write_matrix(folder: str | Path, matrix: Matrix) -> None:
    """Write matrix.json, atomically."""
    write_json(Path(folder) / MATRIX, matrix)


def make_variants(axes: Mapping[str, Sequence[str]], known: Sequence[Variant] = ()) -> list[Variant]:
    """Every combination of the axes, the last one changing fastest; those in `known` keep their directories."""
    count = math.prod(map(len, axes.values()))
    if count > MAX_VARIANTS:
        sizes = " × ".join(f"{len(values)} {axis}" for axis, values in axes.items())
        raise ConfigurationError(
            f"{count:,} variants ({sizes}) are more than {MAX_VARIANTS}: run some of them at a time, with fewer values"
        )
    directories = {variant.name: variant.directory for variant in known}
    taken = {PREVIOUS, *(directory.casefold() for directory in directories.values())}
    found: dict[str, Variant] = {}
    for values in product(*axes.values()):
        at = dict(zip(axes, values, strict=True))
        name = "/".join(value if axis in (TARGET, PROMPT) else f"{axis}={value}" for axis, value in at.items())
        if name in found:
            raise ConfigurationError(f"two variants would be named {name!r}: name the values of the axes otherwise")
        if name not in directories:
            directories[name] = _directory(name, taken)
            taken.add(directories[name].casefold())
        found[name] = Variant(name=name, directory=directories[name], axes=at)
    return list(found.values())


def _directory(name: str, taken: set[str]) -> str:
    """A name for a folder that none has yet, also where upper and lower case are the same."""
    safe = _UNSAFE.sub("-", name).strip(".-")[:_MAX_DIRECTORY] or "variant"
    chosen, number = safe, 2
    while chosen.casefold() in taken:
        chosen, number = f"{safe}-{number}", number + 1
    return chosen


def select_variants(variants: Sequence[Variant], patterns: Iterable[str]) -> list[Variant]:
    """The variants whose names match one of the patterns; all where there is none."""
    patterns = list(patterns)
    for pattern in patterns:
        if not any(fnmatchcase(variant.name, pattern) for variant in variants):
            names = [variant.name for variant in variants]
            raise ConfigurationError(f"no variant is named {pattern!r}; {suggestion(pattern, names)}")
    return [
        variant
        for variant in variants
        if not patterns or any(fnmatchcase(variant.name, pattern) for pattern in patterns)
    ]


CheckVariant: TypeAlias = Callable[[Variant], None]


def enter_matrix(
    folder: Path,
    suite: str,
    axes: Mapping[str, Sequence[str]],
    selected: Sequence[str],
    mode: OpenMode,
    check: CheckVariant,
) -> tuple[Matrix, dict[str, OpenMode]]:
    """Make a locked folder ready for these variants, or refuse; matrix.json is yet to be written.

    `check` raises for a variant whose run there is of something else. Returns the matrix, with the variants of earlier
    launches, and how each selected one is to be opened: those that are complete are only read, unless the mode says
    otherwise.
    """
    with disk_errors(folder):
        clear_drafts(folder)
        matrix, modes = look_at_matrix(folder, suite, axes, selected, mode, check)
        starts_over = modes and all(one.force for one in modes.values())
        old = _readable(folder) if starts_over else None
        if old is not None and not _kept_beside(old, matrix, selected):
            # Its list last: until then what is left is still the old matrix.
            move_aside(folder, (REPORT, *(variant.directory for variant in old.variants), CASES, MATRIX))
    return matrix, modes


def look_at_matrix(
    folder: Path,
    suite: str,
    axes: Mapping[str, Sequence[str]],
    selected: Sequence[str],
    mode: OpenMode,
    check: CheckVariant,
) -> tuple[Matrix, dict[str, OpenMode]]:
    """The same, without a change to what is there."""
    refuse_run(folder, "a matrix")
    refuse_sweep(folder, "a matrix")
    old = _read_old(folder, suite, axes, mode)
    variants = make_variants(axes, [] if old is None else old.variants)
    chosen = [variant for variant in variants if variant.name in selected]
    complete = all(run_state(folder / variant.directory) is RunState.COMPLETE for variant in chosen)
    if mode.if_complete == "new" and complete:
        mode = msgspec.structs.replace(mode, force=True)
    for variant in chosen if not mode.force else ():
        check(variant)
    _refuse_finished(folder, chosen, mode)
    modes = {variant.name: _mode_of(folder / variant.directory, mode) for variant in chosen}
    others = [] if old is None or (mode.force and not _kept_beside(old, old, selected)) else old.variants
    begun = {one.name for one in others}
    listed = [variant for variant in variants if variant.name in selected or variant.name in begun]
    names = {variant.name for variant in listed}
    matrix = Matrix(
        suite=suite,
        axes=_all_values(axes, old.axes if others and old is not None else {}),
        variants=[*listed, *(one for one in others if one.name not in names)],
        created=old.created if others and old is not None else now(),
    )
    return matrix, modes


def _readable(folder: Path) -> Matrix | None:
    """The matrix in a folder that is to start over: one that cannot be read is as good as none."""
    try:
        return read_matrix(folder)
    except RunRefused:
        return None


def _kept_beside(old: Matrix, new: Matrix, selected: Sequence[str]) -> bool:
    """Whether an old matrix has variants that stay when the selected ones start over."""
    same = old.suite == new.suite and list(old.axes) == list(new.axes)
    return same and any(variant.name not in selected for variant in old.variants)


def leave_if_unused(folder: Path) -> None:
    """Take back the files of a matrix that was refused before any of its variants began."""
    with contextlib.suppress(RunRefused, OSError):
        places = read_matrix(folder).runs(folder).values()
        if all(run_state(place) is RunState.FRESH for place in places):
            (folder / MATRIX).unlink()
            (folder / CASES).unlink(missing_ok=True)
            for place in places:
                with contextlib.suppress(OSError):  # never made, or something else is in it
                    place.rmdir()


def _read_old(folder: Path, suite: str, axes: Mapping[str, Sequence[str]], mode: OpenMode) -> Matrix | None:
    """The matrix that is there, if it is of the same suite and axes; another one is refused, unless it is replaced."""
    old = _readable(folder) if mode.force or not is_matrix(folder) else read_matrix(folder)
    if old is None:
        return None
    differences = [] if old.suite == suite else [f"suite: {old.suite!r} there, {suite!r} now"]
    if list(old.axes) != list(axes):
        differences.append(f"axes: {', '.join(old.axes)} there, {', '.join(axes)} now")
    if not differences:
        return old
    if mode.force:
        return None
    raise RunMismatch(
        f"{folder} holds a matrix of something else: {'; '.join(differences)}\n",
        "use {out}, or {force} to start over there",
        path=folder,
        differences=differences,
    )


def _mode_of(run: Path, mode: OpenMode) -> OpenMode:
    """How one variant is to be opened; a complete one without errors has nothing to retry."""
    core = None if mode.force else read_core(run)
    if core is None:
        return mode
    errors = core.counts.error + core.scoring_errors
    if mode.if_complete == "update" or (mode.retry_errors and errors):
        return mode
    return msgspec.structs.replace(mode, retry_errors=False, if_complete="load")


def _refuse_finished(folder: Path, chosen: Sequence[Variant], mode: OpenMode) -> None:
    """Raise RunFinished where every variant is complete, and nothing says what to do about it."""
    if mode.force or mode.if_complete in ("load", "update"):
        return
    found = [read_core(folder / variant.directory) for variant in chosen]
    cores = [core for core in found if core is not None]
    failed, unscored = sum(core.counts.error for core in cores), sum(core.scoring_errors for core in cores)
    errors = failed + unscored
    if len(cores) < len(chosen) or (mode.retry_errors and errors):
        return
    records = counted(sum(core.n for core in cores), "record")
    retry = f" {{retry_errors}} retries its {count_errors(failed, unscored)};" if errors else ""
    remedy = f"{retry} {{update}} asks and scores what changed since; {{force}} starts over there"
    message = f"{folder} is complete ({counted(len(chosen), 'variant')}, {records})."
    raise RunFinished(message, remedy, path=folder, errors=errors)


def _all_values(axes: Mapping[str, Sequence[str]], earlier: Mapping[str, Sequence[str]]) -> dict[str, list[str]]:
    """The values on each axis, with those of earlier launches after today's."""
    return {axis: list(dict.fromkeys([*values, *earlier.get(axis, ())])) for axis, values in axes.items()}
