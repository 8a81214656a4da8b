"""How a run is to go: one frozen struct, checked when it is made, passed whole."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, TypedDict, get_args

import msgspec

from steelyard.errors import ConfigurationError, suggestion

Progress = Literal["auto", "bar", "lines", "off"]

_RETRIES = 4
_CHANGES_NO_ANSWER = frozenset({"output_path", "progress", "progress_bar_stats", "low_memory", "cache"})


class RunOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Everything a run may be told, with its defaults."""

    parallelism: int | Literal["auto"] | None = None
    """Calls in flight; "auto" finds out what the endpoint bears; the target's own `default_parallelism` when None."""
    max_parallelism: int = 512
    """What "auto" and open-loop arrivals never go above."""
    output_path: str | Path | None = None
    """The run directory; without it nothing is written."""
    low_memory: bool = False
    """Keep no response in memory; needs an output_path."""
    timeout: float | None = 600.0
    """Seconds for one case, its retries included; None waits forever."""
    retries: int | None = None
    """How often a call is tried again after a transient fault: 4 when None, and 0 in a load run."""
    retry_on: tuple[type[Exception], ...] = ()
    """More exceptions of your own callable that are worth another try."""
    num_runs: int = 1
    """How often each judge is asked about one response."""
    trials: int = 1
    """How often the target is asked each case."""
    initial_session_file: str | Path | None = None
    """JSON with `data` and `messages`: the session each case begins with."""
    cache: Any = None
    """Where answers are kept across runs: a folder, a .sqlite file, or an EvaluationDataStore."""
    seed: int = 0
    """Where random choices derive from, together with the case's id and the trial."""
    limit: int | None = None
    """Only the first n of the selected cases."""
    match: str | None = None
    """Only cases whose id matches: a glob, or a part of the id."""
    stop_error_rate: float | None = None
    """Stop early, resumable, when after 50 cases a larger share than this has failed."""
    stop_first_errors: int = 20
    """Stop early, resumable, when the first so many calls all failed for the same lasting reason; 0 goes on."""
    rate: str | None = None
    """Send no more often than this to an endpoint: "600/min", "10/s"."""
    tokens_per_min: int | None = None
    """Spend no more tokens a minute than this at an endpoint, input and output together."""
    prices: Any = None
    """What tokens cost: a mapping of prices per million, or one such mapping for each model."""
    max_cost: float | None = None
    """Stop early, resumable, when this much was spent."""
    requests: int | None = None
    """A load run: send so many requests, going round the cases as often as it takes."""
    duration: float | None = None
    """A load run: keep sending for so many seconds, going round the cases."""
    arrivals: str | None = None
    """A load run in open loop: send at these moments, whatever is still in flight: "constant:20/s", "poisson:20/s"."""
    warmup: int = 0
    """Requests that are sent first and left out of everything."""
    progress: Progress = "auto"
    """The live display: a bar on terminals and in notebooks, plain lines elsewhere."""
    progress_bar_stats: Mapping[str, Any] | None = None
    """What the display shows: label to spec; {} shows none, None the default."""

    def __post_init__(self) -> None:
        if self.parallelism not in (None, "auto"):
            _whole("parallelism", self.parallelism, least=1)
        _whole("max_parallelism", self.max_parallelism, least=1)
        if self.limit is not None:
            _whole("limit", self.limit, least=1)
        if self.retries is not None:
            _whole("retries", self.retries, least=0)
        _whole("num_runs", self.num_runs, least=1)
        _whole("trials", self.trials, least=1)
        _whole("seed", self.seed, least=None)
        if self.timeout is not None and not (_is_number(self.timeout) and self.timeout > 0):
            raise ConfigurationError(f"timeout must be a number of seconds above 0, got {self.timeout!r}")
        rate = self.stop_error_rate
        if rate is not None and not (_is_number(rate) and 0.0 <= rate <= 1.0):
            raise ConfigurationError(f"stop_error_rate must be within 0..1, got {rate!r}")
        _whole("stop_first_errors", self.stop_first_errors, least=0)
        if self.progress not in get_args(Progress):
            raise ConfigurationError(f"progress must be one of {', '.join(get_args(Progress))}, got {self.progress!r}")
        if self.match is not None and not isinstance(self.match, str):
            raise ConfigurationError(f"match must be text, got {self.match!r}")
        _exception_classes(self.retry_on)
        self._check_limits()
        self._check_load()
        self._check_place()

    def _check_limits(self) -> None:
        if self.rate is not None and not isinstance(self.rate, str):
            raise ConfigurationError(f"rate must be text like '600/min', got {self.rate!r}")
        if self.tokens_per_min is not None:
            _whole("tokens_per_min", self.tokens_per_min, least=1)
        if self.max_cost is not None and not (_is_number(self.max_cost) and self.max_cost > 0):
            raise ConfigurationError(f"max_cost must be a number above 0, got {self.max_cost!r}")

    def _check_load(self) -> None:
        _whole("warmup", self.warmup, least=0)
        if self.requests is not None:
            _whole("requests", self.requests, least=1)
        if self.duration is not None and not (_is_number(self.duration) and self.duration > 0):
            raise ConfigurationError(f"duration must be a number of seconds above 0, got {self.duration!r}")
        if self.arrivals is not None and not isinstance(self.arrivals, str):
            raise ConfigurationError(f"arrivals must be text like 'constant:20/s', got {self.arrivals!r}")
        if self.arrivals is not None and self.parallelism == "auto":
            raise ConfigurationError("arrivals decide when calls are sent: parallelism 'auto' does not go with them")
        if self.is_load and self.trials > 1:
            raise ConfigurationError("trials do not go with a load run, which goes round the cases by itself")

    @property
    def is_load(self) -> bool:
        """Whether an endpoint is measured under load: cases repeat, nothing is cached or, unless asked for, retried."""
        return self.requests is not None or self.duration is not None or self.arrivals is not None

    @property
    def attempts(self) -> int:
        """How often a call is sent at most."""
        if self.retries is None:
            return 1 if self.is_load else 1 + _RETRIES
        return 1 + self.retries

    def _check_place(self) -> None:
        path = self.output_path
        if path is not None and not (isinstance(path, (str, Path)) and str(path)):
            raise ConfigurationError(f"output_path must be a path, got {path!r}")
        if not isinstance(self.low_memory, bool):
            raise ConfigurationError(f"low_memory must be true or false, got {self.low_memory!r}")
        if self.low_memory and path is None:
            raise ConfigurationError("low_memory=True needs an output_path: responses are kept there, not in memory")

    def replace(self, **changes: Any) -> RunOptions:
        """The same options with some of them changed; an unknown name is an error that names the nearest."""
        known = self.__struct_fields__
        for name in changes:
            if name not in known:
                raise ConfigurationError(f"no option is named {name!r}; {suggestion(name, known)}")
        return msgspec.structs.replace(self, **changes)

    def for_manifest(self) -> dict[str, Any]:
        """The options that belong in run.json, as JSON."""
        values = {name: getattr(self, name) for name in self.__struct_fields__ if name not in _CHANGES_NO_ANSWER}
        values["retry_on"] = [kind.__qualname__ for kind in self.retry_on]
        if self.initial_session_file is not None:
            values["initial_session_file"] = str(self.initial_session_file)
        return values


class RunChanges(TypedDict, total=False):
    """The same names as keywords of `Runner(...)` and `run(...)`."""

    parallelism: int | Literal["auto"] | None
    max_parallelism: int
    output_path: str | Path | None
    low_memory: bool
    timeout: float | None
    retries: int | None
    retry_on: tuple[type[Exception], ...]
    num_runs: int
    trials: int
    initial_session_file: str | Path | None
    cache: Any
    seed: int
    limit: int | None
    match: str | None
    stop_error_rate: float | None
    stop_first_errors: int
    rate: str | None
    tokens_per_min: int | None
    prices: Any
    max_cost: float | None
    requests: int | None
    duration: float | None
    arrivals: str | None
    warmup: int
    progress: Progress
    progress_bar_stats: Mapping[str, Any] | None


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _whole(name: str, value: object, *, least: int | None) -> None:
    if not isinstance(value, int) or isinstance(value, bool):
        raise ConfigurationError(f"{name} must be a whole number, got {value!r}")
    if least is not None and value < least:
        raise ConfigurationError(f"{name} must be >= {least}, got {value}")


def _exception_classes(kinds: object) -> None:
    """Refuse what `except` cannot take, and what must end a run instead of being tried again."""
    if not isinstance(kinds, tuple):
        raise ConfigurationError(f"retry_on must be a tuple of exception classes, got {kinds!r}")
    for kind in kinds:
        if not (isinstance(kind, type) and issubclass(kind, BaseException)):
            raise ConfigurationError(f"retry_on must be a tuple of exception classes, got {kind!r}")
        if not issubclass(kind, Exception):
            raise ConfigurationError(f"retry_on: {kind.__name__} ends a run, it cannot be tried again")
