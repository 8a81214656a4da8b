"""A sweep as its folder has it, checked: whatever shows one can rely on its shape."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import msgspec

from steelyard.errors import ConfigurationError
from steelyard.journal.sweep_file import read_sweep

_Number = Annotated[float, msgspec.Meta(ge=0, le=1e15)]
"""A figure that can be drawn: nothing that is measured is less, or comes near to more."""
_Count = Annotated[int, msgspec.Meta(ge=0, le=10**15)]
_Parallelism = Annotated[int, msgspec.Meta(ge=1, le=10**9)]
_Share = Annotated[float, msgspec.Meta(ge=0, le=1)]


class _Percentiles(msgspec.Struct):
    p50: _Number | None
    p90: _Number | None
    p99: _Number | None

    def __post_init__(self) -> None:
        if len({value is None for value in (self.p50, self.p90, self.p99)}) > 1:
            raise ValueError("a time has all of its percentiles or none")


class _Level(msgspec.Struct):
    level: _Parallelism
    run: str
    requests: _Count
    active_seconds: _Number
    requests_per_second: _Number
    error_rate: _Share | None
    pass_rate: _Share | None
    pass_rate_ci95: tuple[_Share, _Share] | None
    output_tps: _Number | None
    time_to_first_token: _Percentiles
    time_to_last_token: _Percentiles
    peak_in_flight: _Count
    invalid: str | None
    broken: list[str]
    reached: bool
    few: bool
    error_kinds: dict[str, _Count] = {}
    worst_error: str | None = None


class _Asked(msgspec.Struct):
    duration: _Number | None = None


class _Objective(msgspec.Struct):
    figure: str
    limit: _Number
    text: str


class _Recommendation(msgspec.Struct):
    level: _Parallelism | None
    reason: str
    says: str


class _Sweep(msgspec.Struct):
    complete: bool
    stopped: str | None
    suite: str
    model_id: str | None
    asked: _Asked
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
