"""A sweep as its folder has it, checked: whatever shows one can rely on its shape."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from steelyard.errors import ConfigurationError
from steelyard.journal.sweep_file import read_sweep


class _Percentiles(msgspec.Struct):
    p50: float | None
    p90: float | None
    p99: float | None


class _Level(msgspec.Struct):
    level: int
    run: str
    requests: int
    active_seconds: float
    requests_per_second: float
    error_rate: float | None
    pass_rate: float | None
    pass_rate_ci95: tuple[float, float] | None
    output_tps: float | None
    time_to_first_token: _Percentiles
    time_to_last_token: _Percentiles
    peak_in_flight: int
    invalid: str | None
    broken: list[str]
    reached: bool
    few: bool
    worst_error: str | None = None


class _Objective(msgspec.Struct):
    figure: str
    limit: float
    text: str


class _Recommendation(msgspec.Struct):
    level: int | None
    reason: str
    says: str


class _Sweep(msgspec.Struct):
    complete: bool
    stopped: str | None
    suite: str
    model_id: str | None
    asked: dict[str, Any]
    objectives: list[_Objective]
    levels: list[_Level]
    recommendation: _Recommendation


def checked_sweep(folder: Path) -> dict[str, Any] | None:
    """What a folder says of its sweep, complete or so far; None when it holds none. Raises if it is not understood."""
    sweep = read_sweep(folder)
    try:
        if sweep is not None:
            msgspec.convert(sweep, _Sweep)
    except msgspec.ValidationError as error:
        raise ConfigurationError(f"the sweep in {folder} cannot be understood: {error}") from error
    return sweep
