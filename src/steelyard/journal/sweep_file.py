"""The file of a sweep: what it is of and what was found, in the end or so far."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from steelyard.errors import RunRefused
from steelyard.journal.files import SWEEP, SWEEP_PARTIAL, read_json_object
from steelyard.journal.manifest import Manifest
from steelyard.journal.states import RunState, run_state


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


def refuse_sweep(folder: Path) -> None:
    """Raise RunRefused if a folder holds a sweep: a run poured into it would belong to neither."""
    if read_sweep(folder) is not None:
        raise RunRefused(
            f"{folder} holds a sweep, not a run: use another --out (steelyard sweep goes on there)", path=folder
        )


def refuse_run(folder: Path) -> None:
    """Raise RunRefused if a folder holds a run: a sweep keeps its runs in folders of their own."""
    if run_state(folder) is not RunState.FRESH:
        raise RunRefused(
            f"{folder} holds a run, not a sweep: use another --out (steelyard run goes on there)", path=folder
        )
