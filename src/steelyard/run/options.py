"""The options of a run. Each is declared once, with its flag, its help, how it is read and how it is checked.

The flags of the commands, the keys under `run` in a suite file, what run.json keeps and the table in the docs are
derived from the declarations here.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, TypedDict, get_args, get_type_hints

import msgspec

from steelyard.cache.store import parse_store, relative_store
from steelyard.errors import ConfigurationError, suggestion
from steelyard.stats.slices import parse_keys
from steelyard.suite.selection import parse_condition
from steelyard.units import parse_duration, parse_percentage, parse_rate, parse_size

Progress = Literal["auto", "bar", "lines", "off"]

_RETRIES = 4

Parse = Callable[[object, str], Any]
"""Reads what is written, given a name for its errors."""
Check = Callable[[str, Any], None]
"""Refuses a value that cannot be used, given the option's name."""


class Option(msgspec.Struct, frozen=True, kw_only=True):
    """What belongs to an option besides its name, type and default."""

    help: str
    """What `run --help` and the docs say."""
    flags: tuple[str, ...] = ()
    """Its flags on the command line; none: it is set by other flags, or in Python only."""
    metavar: str | None = None
    sweep: str | None = None
    """What `sweep --help` says; None: sweep does not have the flag."""
    score: str | None = None
    """What `score --help` says; None: score does not have the flag."""
    parse: Parse | None = None
    """How text is read, of a flag or of a suite file alike."""
    check: Check | None = None
    """None, where the type allows it, is not checked."""
    relative: Callable[[Any, Path], Any] | None = None
    """Takes what a suite file says relative to its folder. Paths of flags are relative to the current folder."""
    in_suite: bool = True
    """Whether it is a key under `run` in a suite file."""
    in_manifest: bool = True
    """Whether run.json keeps it: what can change an answer or a figure."""


class OptionField(msgspec.Struct, frozen=True, kw_only=True):
    """An option with its name, type and default."""

    name: str
    type: Any
    default: Any
    option: Option


@cache
def options_of(kind: type[msgspec.Struct]) -> dict[str, OptionField]:
    """The options that a struct declares, by name, in their order."""
    hints = get_type_hints(kind, include_extras=True)
    found = {}
    for field in msgspec.structs.fields(kind):
        declared = get_args(hints[field.name])
        default = None if field.default is msgspec.NODEFAULT else field.default
        found[field.name] = OptionField(name=field.name, type=declared[0], default=default, option=declared[1])
    return found


def run_checks(options: msgspec.Struct) -> None:
    """Refuse a value that its option's check refuses; constructors of structs check no types of their own."""
    for name, field in options_of(type(options)).items():
        value = getattr(options, name)
        if field.option.check is not None and (value is not None or type(None) not in get_args(field.type)):
            field.option.check(name, value)


def read_suite_options(given: Mapping[str, Any], kind: type[msgspec.Struct], folder: Path) -> dict[str, Any]:
    """The options that a suite file's `run` gives: texts are read, paths are taken relative to the suite's folder."""
    values = {}
    for name, field in options_of(kind).items():
        if name not in given:
            continue
        value, option = given[name], field.option
        if option.parse is not None and isinstance(value, str):
            value = option.parse(value, f"run.{name}")
        if option.relative is not None and isinstance(value, (str, Path)):
            value = option.relative(value, folder)
        values[name] = value
    return values


def _whole(name: str, value: object, *, least: int | None = None) -> None:
    if not isinstance(value, int) or isinstance(value, bool):
        raise ConfigurationError(f"{name} must be a whole number, got {value!r}")
    if least is not None and value < least:
        raise ConfigurationError(f"{name} must be >= {least}, got {value}")


def _at_least_0(name: str, value: object) -> None:
    _whole(name, value, least=0)


def _at_least_1(name: str, value: object) -> None:
    _whole(name, value, least=1)


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _above_0(name: str, value: Any) -> None:
    if not (_is_number(value) and value > 0):
        raise ConfigurationError(f"{name} must be a number above 0, got {value!r}")


def _seconds(name: str, value: Any) -> None:
    if not (_is_number(value) and value > 0):
        raise ConfigurationError(f"{name} must be a number of seconds above 0, got {value!r}")


def _share(name: str, value: Any) -> None:
    if not (_is_number(value) and 0.0 <= value <= 1.0):
        raise ConfigurationError(f"{name} must be within 0..1, got {value!r}")


def _text(name: str, value: object) -> None:
    if not isinstance(value, str):
        raise ConfigurationError(f"{name} must be text, got {value!r}")


def true_or_false(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise ConfigurationError(f"{name} must be true or false, got {value!r}")


_is_url = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/+").match  # Path("s3://bucket/x") is written s3:/bucket/x
"""Matches what begins like a URL; one letter alone is a drive of Windows."""


def _path(name: str, value: object) -> None:
    if not (isinstance(value, (str, Path)) and str(value)):
        raise ConfigurationError(f"{name} must be a path, got {value!r}")
    if _is_url(str(value)):
        raise ConfigurationError(
            f"{name} must be a folder on this machine, got the URL {str(value)!r}: a run appends to its files, which "
            "object stores cannot do. Write to a local folder, and copy that when the run has ended"
        )


def _parallelism(name: str, value: object) -> None:
    if value != "auto":
        _at_least_1(name, value)


def parse_count_or_auto(value: object, name: str) -> int | str:
    """Read a whole number, or `auto`."""
    if value == "auto" or isinstance(value, int):
        return value
    try:
        return int(str(value))
    except ValueError:
        raise ConfigurationError(f"{name}: {value!r} is neither a whole number nor auto") from None


def _rate(name: str, value: object) -> None:
    if not isinstance(value, str):
        raise ConfigurationError(f"{name} must be text like '600/min', got {value!r}")
    parse_rate(value, name)


def _arrivals(name: str, value: object) -> None:
    from steelyard.engine.arrivals import parse_arrivals

    if not isinstance(value, str):
        raise ConfigurationError(f"{name} must be text like 'constant:20/s', got {value!r}")
    parse_arrivals(value, name)


def _progress(name: str, value: object) -> None:
    if value not in get_args(Progress):
        raise ConfigurationError(f"{name} must be one of {', '.join(get_args(Progress))}, got {value!r}")


def _exception_classes(name: str, kinds: object) -> None:
    """Refuse what `except` cannot take, and what must end a run instead of being retried."""
    if not isinstance(kinds, tuple):
        raise ConfigurationError(f"{name} must be a tuple of exception classes, got {kinds!r}")
    for kind in kinds:
        if not (isinstance(kind, type) and issubclass(kind, BaseException)):
            raise ConfigurationError(f"{name} must be a tuple of exception classes, got {kind!r}")
        if not issubclass(kind, Exception):
            raise ConfigurationError(f"{name}: {kind.__name__} ends a run, it cannot be tried again")


def _is_same(one: str | Path, other: str | Path) -> bool:
    return Path(one).resolve() == Path(other).resolve()


def _beside(path: str | Path, folder: Path) -> Path:
    return folder / path


def _keys(name: str, value: object) -> None:
    if not isinstance(value, tuple) or parse_keys(value, name) != value:
        raise ConfigurationError(f"{name} must be a tuple of metadata keys, each once, got {value!r}")


def _check_where(name: str, value: object) -> None:
    if not isinstance(value, tuple):
        raise ConfigurationError(f"{name} must be a tuple of conditions such as difficulty=hard, got {value!r}")
    for one in value:
        parse_condition(one, name)


def _stop_when(name: str, value: object) -> None:
    if value != "decided":
        raise ConfigurationError(f"{name} must be decided, got {value!r}")


class RunOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Everything a run may be told, with its defaults; checked when it is made, passed whole."""

    parallelism: Annotated[
        int | Literal["auto"] | None,
        Option(
            flags=("-j", "--parallelism"),
            help="Calls in flight, or auto [default: the target's own].",
            score="Judge calls in flight, or auto [default: 50].",
            metavar="N",
            parse=parse_count_or_auto,
            check=_parallelism,
        ),
    ] = None
    max_parallelism: Annotated[
        int,
        Option(
            flags=("--max-parallelism",),
            help="Most calls in flight with auto and --arrivals [default: 512].",
            sweep="Most calls in flight that auto tries [default: 512].",
            check=_at_least_1,
        ),
    ] = 512
    limit: Annotated[
        int | None,
        Option(flags=("-n", "--limit"), help="Only the first N cases.", check=_at_least_1, in_suite=False),
    ] = None
    match: Annotated[
        str | None,
        Option(
            flags=("-k",),
            help="Only cases whose id contains this, or matches this glob.",
            sweep="Only cases whose id contains this, or matches this glob.",
            metavar="PATTERN",
            check=_text,
            in_suite=False,
        ),
    ] = None
    where: Annotated[
        tuple[str, ...],
        Option(
            flags=("--where",),
            help="Only cases with this metadata: difficulty=hard. If repeated, all must match.",
            sweep="Only cases with this metadata: difficulty=hard. If repeated, all must match.",
            metavar="CONDITION",
            check=_check_where,
            in_suite=False,
        ),
    ] = ()
    failed_in: Annotated[
        str | Path | None,
        Option(
            flags=("--failed-in",),
            help="Only cases that failed or ended in an error in this run.",
            metavar="RUN",
            in_suite=False,
        ),
    ] = None
    sample: Annotated[
        int | None,
        Option(
            flags=("--sample",),
            help="Only N cases, chosen at random with --seed.",
            metavar="N",
            check=_at_least_1,
            in_suite=False,
        ),
    ] = None
    by: Annotated[
        tuple[str, ...],
        Option(
            flags=("--by",),
            help="Also show results by these metadata keys: category,difficulty.",
            score="Also show results by these metadata keys: category,difficulty.",
            metavar="KEY",
            parse=parse_keys,
            check=_keys,
            in_suite=False,
        ),
    ] = ()
    seed: Annotated[int, Option(flags=("--seed",), help="Seed for everything random.", check=_whole)] = 0
    timeout: Annotated[
        float | None,
        Option(
            flags=("--timeout",),
            help="Time for one case (90s, 2m), retries included [default: 600s].",
            sweep="Time for one call (90s, 2m) [default: 600s].",
            metavar="DURATION",
            parse=parse_duration,
            check=_seconds,
        ),
    ] = 600.0
    retries: Annotated[
        int | None,
        Option(
            flags=("--retries",),
            help="Further attempts after a transient error [default: 4; 0 in a load run].",
            check=_at_least_0,
        ),
    ] = None
    rate: Annotated[
        str | None,
        Option(
            flags=("--rate",),
            help="Rate limit for each endpoint: 600/min, 10/s.",
            metavar="N/TIME",
            check=_rate,
        ),
    ] = None
    tokens_per_min: Annotated[
        int | None,
        Option(
            flags=("--tokens-per-min",),
            help="Token limit per minute, for each endpoint: 200k.",
            metavar="N",
            parse=parse_size,
            check=_at_least_1,
        ),
    ] = None
    max_cost: Annotated[
        float | None,
        Option(
            flags=("--max-cost",),
            help="Stop when the run has cost this much; resumable.",
            sweep="Stop when all levels have cost this much; resumable.",
            metavar="AMOUNT",
            check=_above_0,
        ),
    ] = None
    requests: Annotated[
        int | None,
        Option(
            flags=("--requests",),
            help="Load run: send this many requests, cycling through the cases.",
            check=_at_least_1,
        ),
    ] = None
    duration: Annotated[
        float | None,
        Option(
            flags=("--duration",),
            help="Load run: send for this long (60s, 2m), cycling through the cases.",
            metavar="DURATION",
            parse=parse_duration,
            check=_seconds,
        ),
    ] = None
    arrivals: Annotated[
        str | None,
        Option(
            flags=("--arrivals",),
            help="Load run, open loop: constant:20/s or poisson:20/s.",
            metavar="KIND:RATE",
            check=_arrivals,
        ),
    ] = None
    warmup: Annotated[
        int,
        Option(
            flags=("--warmup",),
            help="Requests sent first that count nowhere.",
            sweep="Requests sent first in each level that count nowhere.",
            check=_at_least_0,
        ),
    ] = 0
    num_runs: Annotated[
        int,
        Option(
            flags=("--num-runs",),
            help="Samples of each judge for one response [default: 1].",
            score="Samples of each judge for one response.",
            check=_at_least_1,
        ),
    ] = 1
    trials: Annotated[
        int,
        Option(flags=("--trials",), help="How often each case is sent to the target [default: 1].", check=_at_least_1),
    ] = 1
    cache: Annotated[
        Any,
        Option(
            flags=("--cache",),
            help="Keep answers across runs: a folder, a .sqlite file, or STORE:PLACE.",
            metavar="PATH",
            parse=parse_store,
            relative=relative_store,
            in_manifest=False,
        ),
    ] = None
    initial_session_file: Annotated[
        str | Path | None,
        Option(
            flags=("--initial-session-file",),
            help="JSON file with the session that each case starts with.",
            relative=_beside,
        ),
    ] = None
    low_memory: Annotated[
        bool,
        Option(
            flags=("--low-memory",), help="Do not keep responses in memory.", check=true_or_false, in_manifest=False
        ),
    ] = False
    stop_error_rate: Annotated[
        float | None,
        Option(
            flags=("--stop-error-rate",),
            help="Stop early above this error rate (0.2, 20%), after 50 cases.",
            metavar="RATE",
            parse=parse_percentage,
            check=_share,
        ),
    ] = None
    stop_first_errors: Annotated[
        int,
        Option(
            flags=("--stop-first-errors",),
            help="Stop if the first N calls all fail for the same lasting reason [default: 20; 0: never].",
            metavar="N",
            check=_at_least_0,
        ),
    ] = 20
    stop_when: Annotated[
        Literal["decided"] | None,
        Option(
            flags=("--stop-when",),
            help="decided: send cases in random order, and stop when every rule of the gate is settled.",
            metavar="decided",
            check=_stop_when,
        ),
    ] = None
    baseline: Annotated[
        str | Path | None,
        Option(
            flags=("--baseline",),
            help="With --stop-when decided: the run that this one must not be worse than.",
            metavar="RUN",
            relative=_beside,
            check=_path,
        ),
    ] = None
    max_regression: Annotated[
        float | None,
        Option(
            flags=("--max-regression",),
            help="How far the pass rate may be below the baseline's (0.02, 2%) [default: 0].",
            metavar="RATE",
            parse=parse_percentage,
            check=_share,
        ),
    ] = None
    decide: Annotated[
        tuple[str, ...],
        Option(help="The rules that stop_when settles; in a suite file, those of its gate.", in_suite=False),
    ] = ()
    tracebacks: Annotated[
        bool,
        Option(
            flags=("--no-tracebacks",),
            help="Do not write tracebacks of failing functions to the records.",
            score="Do not write tracebacks of failing functions to the records.",
            check=true_or_false,
            in_manifest=False,
        ),
    ] = True
    keep_expected: Annotated[
        bool,
        Option(
            flags=("--no-expected",),
            help="Do not write `expected` and `metadata` of the cases to records and pages.",
            score="Do not write `expected` and `metadata` of the cases to records and pages.",
            check=true_or_false,
        ),
    ] = True
    output_path: Annotated[
        str | Path | None,
        Option(
            help="The run directory; if not set, nothing is written.", check=_path, in_suite=False, in_manifest=False
        ),
    ] = None
    retry_on: Annotated[
        tuple[type[Exception], ...],
        Option(
            help="More exception types of your function that are retried.",
            check=_exception_classes,
            in_suite=False,
        ),
    ] = ()
    prices: Annotated[
        Any,
        Option(
            help="Token prices per million: one mapping, or one for each model.",
            in_suite=False,
        ),
    ] = None
    progress: Annotated[
        Progress,
        Option(
            help="Live progress: a bar on terminals and in notebooks, plain lines elsewhere.",
            check=_progress,
            in_suite=False,
            in_manifest=False,
        ),
    ] = "auto"
    progress_bar_stats: Annotated[
        Mapping[str, Any] | None,
        Option(
            help="What the progress shows, as label: statistic. {} shows nothing, None the default.", in_manifest=False
        ),
    ] = None

    def __post_init__(self) -> None:
        run_checks(self)
        if self.arrivals is not None and self.parallelism == "auto":
            raise ConfigurationError("arrivals cannot be used with parallelism 'auto': they decide when calls are sent")
        if self.is_load and self.trials > 1:
            raise ConfigurationError("trials cannot be used in a load run, which repeats the cases itself")
        if self.stop_when is not None and self.is_load:
            raise ConfigurationError("stop_when: decided cannot be used in a load run, which repeats the cases")
        if self.sample is not None and self.limit is not None:
            raise ConfigurationError("sample and limit both say how many cases: give one of them")
        if self.failed_in is not None and self.output_path is not None and _is_same(self.failed_in, self.output_path):
            raise ConfigurationError(
                "failed_in names the run's own directory: give the new run another one (--out, output_path)"
            )
        if self.by and not self.keep_expected:
            raise ConfigurationError(
                "by cannot be used with keep_expected off: it needs the cases' metadata in the records"
            )
        if self.low_memory and self.output_path is None:
            raise ConfigurationError("low_memory=True needs an output_path: responses are kept there, not in memory")

    @property
    def is_load(self) -> bool:
        """Whether an endpoint is measured under load: cases repeat, nothing is cached or, unless asked for, retried."""
        return self.requests is not None or self.duration is not None or self.arrivals is not None

    @property
    def spooled_cases(self) -> int | None:
        """How many cases are read from an iterator, which may have no end; None: all, as any of them may be taken."""
        return self.limit if self.match is None and not self.where and self.failed_in is None else None

    @property
    def attempts(self) -> int:
        """How often a call is sent at most."""
        if self.retries is None:
            return 1 if self.is_load else 1 + _RETRIES
        return 1 + self.retries

    def replace(self, **changes: Any) -> RunOptions:
        """The same options with some of them changed; an unknown name is an error that names the nearest."""
        known = self.__struct_fields__
        for name in changes:
            if name not in known:
                raise ConfigurationError(f"no option is named {name!r}; {suggestion(name, known)}")
        return msgspec.structs.replace(self, **changes)

    def for_manifest(self) -> dict[str, Any]:
        """The options that belong in run.json, as JSON."""
        fields = options_of(RunOptions).values()
        return {field.name: _as_json(getattr(self, field.name)) for field in fields if field.option.in_manifest}


def _as_json(value: Any) -> Any:
    """An option's value as JSON has it: a path as text, exception classes as their names."""
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, tuple):
        return [each if isinstance(each, str) else each.__qualname__ for each in value]
    return value


class RunChanges(TypedDict, total=False):
    """The same names as keywords of `Runner(...)` and `run(...)`."""

    parallelism: int | Literal["auto"] | None
    max_parallelism: int
    limit: int | None
    match: str | None
    where: tuple[str, ...]
    failed_in: str | Path | None
    sample: int | None
    by: tuple[str, ...]
    seed: int
    timeout: float | None
    retries: int | None
    rate: str | None
    tokens_per_min: int | None
    max_cost: float | None
    requests: int | None
    duration: float | None
    arrivals: str | None
    warmup: int
    num_runs: int
    trials: int
    cache: Any
    initial_session_file: str | Path | None
    low_memory: bool
    stop_error_rate: float | None
    stop_first_errors: int
    stop_when: Literal["decided"] | None
    baseline: str | Path | None
    max_regression: float | None
    decide: tuple[str, ...]
    tracebacks: bool
    keep_expected: bool
    output_path: str | Path | None
    retry_on: tuple[type[Exception], ...]
    prices: Any
    progress: Progress
    progress_bar_stats: Mapping[str, Any] | None
