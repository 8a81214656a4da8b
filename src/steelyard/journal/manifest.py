"""`run.json`: what a run is of, so that no other run is written to the same directory, and which lines belong to it.

A line of the journal is left out when its case was edited since, or removed, or is not among those selected now. Of the
lines that belong, the last ok one of a (case, trial) counts, else its last error.
"""

from __future__ import annotations

import platform
from array import array
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeAlias

import msgspec

from steelyard._version import __version__
from steelyard.disk import read_regular
from steelyard.errors import RunMismatch, RunRefused
from steelyard.journal.files import (
    MANIFEST,
    MATRIX,
    SWEEP,
    SWEEP_PARTIAL,
    RunState,
    read_json_object,
    read_metrics,
    run_state,
    write_json,
)
from steelyard.stats.metrics import JournalLines, JudgeCalibration

SCHEMA_VERSION = 1
SELECTION = ("where", "failed_in", "sample")
"""The options that choose cases by more than their number and ids: another choice is another run."""
_SHOWN = 200
PLOTS = ("error-rate.svg", "latency.svg")
"""The pictures that a sweep leaves in its folder."""
Ranges: TypeAlias = list[tuple[int, int]]
"""Numbers of lines, from 1, each pair the first and the last of some that follow one another."""


class Launch(msgspec.Struct):
    """One launch of a run: when it started, and how much was done before."""

    started: str
    done_before: int
    steelyard: str = __version__
    left_out: str = ""
    """Lines of outputs.jsonl that did not belong to the run any more when it began: `3-4,9`."""


class Manifest(msgspec.Struct, kw_only=True):
    """The resolved facts of a run, without secrets."""

    v: int = SCHEMA_VERSION
    suite: str
    target: dict[str, Any]
    model_id: str | None = None
    seed: int = 0
    suite_file: str | None = None
    scored_from: str | None = None
    load: dict[str, Any] | None = None
    """Of a load run: how its requests were to be sent."""
    variant: dict[str, str] = {}
    """Of a run in a matrix: its value on each axis."""
    planned: int = 0
    scorers: list[dict[str, Any]] = []
    calibrations: dict[str, JudgeCalibration] = {}
    """By the name of the judge: what its calibration file says."""
    run_metrics: list[dict[str, Any]] = []
    """What each metric over all records depends on."""
    options: dict[str, Any] = {}
    versions: dict[str, str] = {}
    created: str = ""
    launches: list[Launch] = []
    fields_left_out: list[str] = []
    """Fields of the model's own turns that the endpoint refused to take back."""


def now() -> str:
    """The time of day, for people: never used in arithmetic."""
    return datetime.now(UTC).isoformat(timespec="milliseconds")


def versions() -> dict[str, str]:
    """What ran: recorded with every run."""
    return {"steelyard": __version__, "python": platform.python_version(), "platform": platform.platform()}


def read_manifest(run: Path) -> Manifest | None:
    """The manifest in a run directory, None when there is none; refuses one that cannot be understood."""
    path = run / MANIFEST
    try:
        data = read_regular(path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise RunRefused(f"{path} cannot be read: {error.strerror}", path=run) from error
    try:
        manifest = msgspec.json.decode(data, type=Manifest)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise RunRefused(f"{path} cannot be read ({error});", " {force} starts over", path=run) from error
    if manifest.v > SCHEMA_VERSION:
        raise RunRefused(f"{path} was written by a newer Steelyard (schema {manifest.v})", path=run, topic="version")
    return manifest


def last_launch(run: Path) -> Launch | None:
    """The launch that began last, as far as run.json can be read."""
    try:
        manifest = read_manifest(run)
    except RunRefused:
        return None
    return manifest.launches[-1] if manifest is not None and manifest.launches else None


def write_manifest(run: Path, manifest: Manifest) -> None:
    """Write the manifest, atomically."""
    write_json(run / MANIFEST, manifest)


def compare(run: Path, old: Manifest, new: Manifest) -> list[str]:
    """Warnings about what changed; raises RunMismatch naming each difference that would mix two runs in one."""
    differences = [] if old.suite == new.suite else [f"suite: {_show(old.suite)} there, {_show(new.suite)} now"]
    if old.seed != new.seed:
        differences.append(f"seed: {old.seed} there, {new.seed} now")
    hard, soft = _identity_differences(old.target, _as_json(new.target))
    differences += hard
    for name in SELECTION:
        before, current = old.options.get(name) or None, _as_json(new.options).get(name) or None
        if before != current:
            soft.append(f"{name}: {_show(before)} there, {_show(current)} now")
    if differences:
        listed = "\n  ".join(differences)
        raise RunMismatch(
            f"{run} holds a run of something else:\n  {listed}\n",
            "use {out}, or {force} to start over there",
            path=run,
            differences=differences,
        )
    return soft


def same_run(
    old: Manifest, suite: str, target: Mapping[str, Any], seed: int, options: Mapping[str, Any] | None = None
) -> bool:
    """Whether a manifest is of this suite, target and seed and, where `options` are given, of the cases they choose."""
    if options is not None and any(
        (old.options.get(name) or None) != (options.get(name) or None) for name in SELECTION
    ):
        return False
    return old.suite == suite and old.seed == seed and not _identity_differences(old.target, _as_json(target))[0]


def _identity_differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    hard: list[str] = []
    soft: list[str] = []
    for key in sorted({*old, *new}):
        if old.get(key) != new.get(key):
            text = f"target {key.lstrip('~')}: {_show(old.get(key))} there, {_show(new.get(key))} now"
            (soft if key.startswith("~") else hard).append(text)
    return hard, soft


def _as_json(value: Mapping[str, Any]) -> dict[str, Any]:
    """The value as it would be read back, so that a tuple equals the list it becomes."""
    decoded: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(value))
    return decoded


def _show(value: Any) -> str:
    text = msgspec.json.encode(value).decode()
    return text if len(text) <= _SHOWN else text[: _SHOWN - 1] + "…"


def read_sweep(folder: Path) -> dict[str, Any] | None:
    """What a folder says of its sweep, complete or so far; None when it holds none that can be read."""
    for name in (SWEEP, SWEEP_PARTIAL):
        try:
            found = read_json_object(folder / name)
        except (NotADirectoryError, IsADirectoryError):
            return None
        if found is not None and isinstance(found.get("levels"), list):
            return found
    return None


def sweep_manifest(sweep: dict[str, Any]) -> Manifest | None:
    """What a sweep is of, as a run's manifest would say it; None for an older one, which does not tell its target."""
    if "target" not in sweep:
        return None
    try:
        return msgspec.convert({name: sweep.get(name) for name in ("suite", "target", "seed", "created")}, Manifest)
    except msgspec.ValidationError:
        return None


def refuse_sweep(folder: Path, what: str = "a run") -> None:
    """Raise RunRefused if a folder holds a sweep: what is written to it would mix the two."""
    if read_sweep(folder) is not None:
        raise RunRefused(f"{folder} holds a sweep, not {what}: ", "use {out} (steelyard sweep resumes it)", path=folder)


def refuse_matrix(folder: Path, what: str = "a run") -> None:
    """Raise RunRefused if a folder holds a matrix: its runs are in subfolders."""
    if (folder / MATRIX).exists():
        raise RunRefused(
            f"{folder} holds a matrix, not {what}: ",
            "use {out} (steelyard run resumes it, with its suite)",
            path=folder,
        )


def refuse_run(folder: Path, what: str = "a sweep") -> None:
    """Raise RunRefused if a folder holds a run: a sweep and a matrix keep their runs in subfolders."""
    if run_state(folder) is not RunState.FRESH:
        raise RunRefused(f"{folder} holds a run, not {what}: ", "use {out} (steelyard run resumes it)", path=folder)


class LeftOut:
    """Collects lines that are left out, by their distance from the end, as a journal is read from there."""

    def __init__(self) -> None:
        self.count = 0
        self._bounds = array("Q")

    def add(self, distance: int) -> None:
        """Add a line: 0 is the last one. Each distance must be larger than the one before."""
        self.count += 1
        if self._bounds and self._bounds[-1] == distance - 1:
            self._bounds[-1] = distance
        else:
            self._bounds.extend((distance, distance))

    def ranges(self, lines: int) -> Ranges:
        """The numbers of the lines, given how many there are in all."""
        numbers = [lines - distance for distance in reversed(self._bounds)]
        return list(zip(numbers[::2], numbers[1::2], strict=True))


def write_ranges(ranges: Ranges) -> str:
    """Ranges as text: `3-4,9`."""
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in ranges)


def read_ranges(text: str) -> Ranges:
    """The ranges in a text; ValueError where it is none."""
    ranges = []
    for part in text.split(",") if text else ():
        first, _, last = part.partition("-")
        ranges.append((int(first), int(last or first)))
    return ranges


def left_out_lines(run: Path) -> Ranges:
    """The lines of a run's journal that do not belong to it, as its metrics or its last launch say."""
    known = metrics_lines(run)
    if known is not None:
        text = known.left_out
    else:
        launch = last_launch(run)
        text = launch.left_out if launch is not None else ""
    try:
        return read_ranges(text)
    except ValueError:
        return []


def metrics_lines(run: Path) -> JournalLines | None:
    """What the metrics of a complete run say of its lines; None when it is not complete, or they do not say."""
    found = (read_metrics(run) or {}).get("lines")
    try:
        return None if found is None else msgspec.convert(found, JournalLines)
    except msgspec.ValidationError:
        return None
