"""Which engine a suite or a command line asks for, by name."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, get_args

import msgspec

from steelyard.errors import ConfigurationError, SuiteError, describe, reject_unknown, suggestion
from steelyard.protocols import Engine, Scorer, Target
from steelyard.scoring.base import as_scorers
from steelyard.scoring.registry import SCORERS
from steelyard.stats.prices import read_prices
from steelyard.suite.evalset import EvalSet
from steelyard.suite.suite_file import SuiteFile, read_suite_file
from steelyard.targets.function import CallableTarget
from steelyard.units import parse_duration

EngineName = Literal["local", "ray"]
ENGINE_KEYS = ("engine", "ray_address", "workers")
"""The keys of a suite's `run`, and the flags, that are about the engine."""


class EngineChoice(msgspec.Struct, frozen=True, kw_only=True):
    """The engine of a run: this process, or the workers of a Ray cluster."""

    engine: EngineName = "local"
    ray_address: str | None = None
    """Where the cluster is: host:port, or auto; None starts one on this machine."""
    workers: int | None = None
    """How many workers; one for each CPU of the cluster when None."""

    def __post_init__(self) -> None:
        if self.engine not in get_args(EngineName):
            raise ConfigurationError(f"engine must be one of {', '.join(get_args(EngineName))}, got {self.engine!r}")
        if self.ray_address is not None and not isinstance(self.ray_address, str):
            raise ConfigurationError(f"ray_address must be text like host:6379, got {self.ray_address!r}")
        if self.engine == "local" and (self.ray_address is not None or self.workers is not None):
            raise ConfigurationError("ray_address and workers go with the engine ray, got the engine local")

    def replace(self, **changes: Any) -> EngineChoice:
        """The same with some of it changed."""
        return msgspec.structs.replace(self, **changes)

    def make(self, working_dir: Path, grace: float) -> Engine | None:
        """The engine; None for the one in this process, which whoever runs makes by itself."""
        if self.engine == "local":
            return None
        from steelyard.engine.ray.engine import RayEngine

        return RayEngine(self.ray_address, workers=self.workers, grace=grace, working_dir=working_dir.resolve())


_ENDPOINTS = {
    "openai-chat": "OpenAIChat",
    "openai-responses": "OpenAIResponses",
    "anthropic-messages": "AnthropicMessages",
}
_WITH_A_MODEL = ("simulated", *_ENDPOINTS)
"""Targets that are told which model to ask."""
_OF_THE_CONNECTION = (
    "base_url", "api_key", "api_key_env", "api_version", "headers", "stream", "proxy", "ca_bundle", "verify",
    "parallelism",
)  # fmt: skip
"""What a judge without a target of its own takes over from the suite's endpoint; the rest is about the answers."""

_RUN_KEYS = (
    "parallelism",
    "max_parallelism",
    "rate",
    "tokens_per_min",
    "max_cost",
    "requests",
    "duration",
    "arrivals",
    "warmup",
    "timeout",
    "retries",
    "seed",
    "low_memory",
    "num_runs",
    "trials",
    "initial_session_file",
    "cache",
    "stop_error_rate",
    "stop_first_errors",
    "progress_bar_stats",
    *ENGINE_KEYS,
)


class Gate(msgspec.Struct, frozen=True, kw_only=True):
    """What a run must reach to be called good."""

    min_pass_rate: float | None = None
    max_error_rate: float = 0.0
    rules: tuple[str, ...] = ()
    """As written: `steelyard gate` reads them."""


class BuiltSuite(msgspec.Struct, frozen=True, kw_only=True):
    """A suite file, ready to be run."""

    suite: EvalSet
    target: Target
    scorers: list[Scorer]
    options: dict[str, Any]
    gate: Gate
    engine: EngineChoice = EngineChoice()


def build_suite(path: str | Path, target: Mapping[str, Any] | None = None) -> BuiltSuite:
    """Everything that a suite file names, made; errors say which key is wrong.

    `target` has arguments that take the place of those of the file's own target.
    """
    file = read_suite_file(path)
    if target and file.target is not None:
        file = dataclasses.replace(file, target=_changed_target(file, target))
    if file.target is None:
        raise SuiteError(f"has no target: give one of {', '.join(TARGETS)}", path=path)
    reject_unknown(file.run, _RUN_KEYS, "run", file=file.path)
    return BuiltSuite(
        suite=file.cases,
        target=_build_target(file, file.target),
        scorers=_build_scorers(file),
        options=_run_options(file),
        gate=build_gate(file.gate, file.path),
        engine=_engine_choice(file),
    )


def _engine_choice(file: SuiteFile) -> EngineChoice:
    try:
        return EngineChoice(**{name: file.run[name] for name in ENGINE_KEYS if name in file.run})
    except ConfigurationError as error:
        raise SuiteError(f"run: {error}", path=file.path) from error


def _run_options(file: SuiteFile) -> dict[str, Any]:
    """The suite's own options; paths are seen from its folder, and times may have a unit."""
    options = {name: value for name, value in file.run.items() if name not in ENGINE_KEYS}
    try:
        if file.prices:
            read_prices(file.prices, None)
            options["prices"] = file.prices
        for name in ("timeout", "duration"):
            if isinstance(options.get(name), str):
                options[name] = parse_duration(options[name], f"run.{name}")
    except ConfigurationError as error:
        raise SuiteError(str(error), path=file.path) from error
    for name in ("initial_session_file", "cache"):
        if isinstance(options.get(name), str):
            options[name] = file.path.parent / options[name]
    return options


def build_gate(raw: Mapping[str, Any], path: Path | None = None) -> Gate:
    """The thresholds of a suite file or of flags, checked."""
    reject_unknown(raw, Gate.__struct_fields__, "gate", file=path)
    rules = raw.get("rules") or ()
    if not isinstance(rules, (list, tuple)) or not all(isinstance(rule, str) for rule in rules):
        raise SuiteError(f"gate.rules must be a list of rules such as cost<2, got {rules!r}", path=path)
    thresholds = {name: value for name, value in raw.items() if name != "rules" and value is not None}
    for name, value in thresholds.items():
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= 1:
            raise SuiteError(f"gate.{name} must be within 0..1, got {value!r}", path=path)
    return Gate(rules=tuple(rules), **thresholds)


def _changed_target(file: SuiteFile, changes: Mapping[str, Any]) -> dict[str, Any]:
    kind, arguments = _name_and_arguments(file.target, "target", file.path)
    if kind not in _WITH_A_MODEL or not isinstance(arguments, (dict, type(None))):
        flags = " and ".join(f"--{name.replace('_', '-')}" for name in changes)
        raise SuiteError(f"target: {kind} is not asked by model or address: {flags} cannot change it", path=file.path)
    return {kind: {**(arguments or {}), **changes}}


def _build_target(file: SuiteFile, raw: str | dict[str, Any]) -> Target:
    name, arguments = _name_and_arguments(raw, "target", file.path)
    if name not in TARGETS:
        raise SuiteError(f"target: no target is named {name!r}; {suggestion(name, TARGETS)}", path=file.path)
    return TARGETS[name](file.path, arguments)


def _build_scorers(file: SuiteFile) -> list[Scorer]:
    scorers: list[object] = []
    for number, raw in enumerate(file.scorers):
        where = f"scorers[{number}]"
        name, arguments = _name_and_arguments(raw, where, file.path)
        if name == "python":
            scorers.append(_load_argument(file.path, arguments, where))
        elif name == "judge":
            scorers.append(_build_judge(file, arguments, f"{where}.judge"))
        elif name in SCORERS:
            scorers.append(_make(SCORERS[name], arguments, f"{where}.{name}", file.path))
        else:
            known = (*SCORERS, "judge", "python")
            raise SuiteError(f"{where}: no scorer is named {name!r}; {suggestion(name, known)}", path=file.path)
    try:
        return as_scorers(scorers)
    except ConfigurationError as error:
        raise SuiteError(f"scorers: {error}", path=file.path) from error


def _build_judge(file: SuiteFile, arguments: Any, where: str) -> Scorer:
    """A judge; without a `target` of its own it asks the suite's kind of target for another model."""
    from steelyard.scoring.judge.judge import Judge

    if not isinstance(arguments, dict):
        raise SuiteError(f"{where} takes a mapping of arguments, with at least a model", path=file.path)
    given = dict(arguments)
    if "model" not in given:
        raise SuiteError(f"{where}: name its model; a judge has no default", path=file.path)
    if isinstance(given.get("calibration"), str):
        given["calibration"] = file.path.parent / given["calibration"]
    given["target"] = _build_target(file, _judge_target(file, given, where))
    made: Scorer = _make(Judge, given, where, file.path)
    return made


def _judge_target(file: SuiteFile, given: dict[str, Any], where: str) -> Any:
    """Who is asked to judge: an endpoint gets the judge's model and parameters, and, unless it is named, the place."""
    kind, arguments = _name_and_arguments(given.get("target", file.target), f"{where}.target", file.path)
    params = given.get("params") or {}
    if "target" in given:
        if kind not in _ENDPOINTS or not isinstance(arguments, dict | None) or not isinstance(params, dict):
            return given["target"]
        own = {"model": given["model"], **(arguments or {})}
        return {kind: {**own, "params": {**(own.get("params") or {}), **params}}}
    if not isinstance(arguments, dict) or "model" not in arguments:
        raise SuiteError(f"{where}: give it a target; the suite's own takes no model", path=file.path)
    if kind in _ENDPOINTS:
        arguments = {name: arguments[name] for name in _OF_THE_CONNECTION if name in arguments} | {"params": params}
    return {kind: {**arguments, "model": given["model"]}}


def _simulated(path: Path, arguments: Any) -> Target:
    from steelyard.targets.simulated import Simulated

    made: Target = _make(Simulated, arguments, "target.simulated", path)
    return made


def _command(path: Path, arguments: Any) -> Target:
    """A program; `cwd` and a program named by a relative path are seen from the suite file's folder.

    The folder is part of the target's identity: resolved, it is the same from wherever the suite is run.
    """
    from steelyard.targets.command import Command

    if isinstance(arguments, (str, list)):
        arguments = {"argv": arguments}
    if isinstance(arguments, dict):
        cwd = arguments.get("cwd", ".")
        if not isinstance(cwd, str):
            raise SuiteError(f"target.command: cwd must be a folder's path, got {cwd!r}", path=path)
        arguments = {**arguments, "cwd": (path.parent / cwd).resolve()}
    made: Target = _make(Command, arguments, "target.command", path)
    return made


def _python(path: Path, arguments: Any) -> Target:
    """Your own function or Target: `python: agent.py:answer`, or a mapping with `function` and its options."""
    options: dict[str, Any] = {}
    if isinstance(arguments, dict) and "function" in arguments:
        options = {key: value for key, value in arguments.items() if key != "function"}
        arguments = arguments["function"]
    loaded = _load_argument(path, arguments, "target.python")
    if isinstance(loaded, Target):
        reject_unknown(options, (), "target.python", file=path)
        return loaded
    made: Target = _make(CallableTarget, options, "target.python", path, loaded)
    return made


def _endpoint(kind: str, path: Path, arguments: Any) -> Target:
    """A model's endpoint; its functions and its CA bundle are seen from the suite file's folder."""
    from steelyard import targets

    where = f"target.{kind}"
    make = getattr(targets, _ENDPOINTS[kind])
    known = [name for name in inspect.signature(make).parameters if name != "transport"]
    if isinstance(arguments, dict):
        reject_unknown(arguments, known, where, file=path)
    if not isinstance(arguments, dict) or not arguments.get("model"):
        raise SuiteError(f"{where} takes a mapping of arguments, with at least a model", path=path)
    given = dict(arguments)
    if isinstance(given.get("ca_bundle"), str):
        given["ca_bundle"] = str(path.parent / given["ca_bundle"])
    if isinstance(given.get("functions"), dict):
        given["functions"] = {
            name: _load_argument(path, reference, f"{where}.functions.{name}")
            for name, reference in given["functions"].items()
        }
    made: Target = _make(make, given, where, path)
    return made


TARGETS: Mapping[str, Callable[[Path, Any], Target]] = {
    "simulated": _simulated,
    "command": _command,
    "python": _python,
    **{kind: partial(_endpoint, kind) for kind in _ENDPOINTS},
}


def _name_and_arguments(raw: Any, where: str, path: Path) -> tuple[str, Any]:
    """A name, or a mapping from one name to its arguments."""
    if isinstance(raw, str):
        return raw, None
    if isinstance(raw, dict) and len(raw) == 1:
        name, arguments = next(iter(raw.items()))
        return str(name), arguments
    raise SuiteError(f"{where} must be a name, or a mapping from one name to its arguments", path=path)


def _make(kind: Callable[..., Any], arguments: Any, where: str, path: Path, *first: Any) -> Any:
    """Call `kind` with the arguments of a suite file, after checking their names."""
    arguments = {} if arguments is None else arguments
    if not isinstance(arguments, dict):
        raise SuiteError(f"{where} takes a mapping of arguments, got {arguments!r}", path=path)
    parameters = list(inspect.signature(kind).parameters)[len(first) :]
    reject_unknown(arguments, parameters, where, file=path)
    try:
        return kind(*first, **arguments)
    except (ConfigurationError, TypeError, ValueError) as error:
        raise SuiteError(f"{where}: {error}", path=path) from error


def _load_argument(path: Path, reference: Any, where: str) -> Any:
    if not isinstance(reference, str) or ":" not in reference:
        raise SuiteError(f"{where} must be file.py:name or package.module:name, got {reference!r}", path=path)
    try:
        return load_object(reference, path.parent)
    except ConfigurationError as error:
        raise SuiteError(f"{where}: {error}", path=path) from error


def load_object(reference: str, folder: Path) -> Any:
    """What `file.py:name` (seen from `folder`) or `package.module:name` refers to."""
    place, _, name = reference.rpartition(":")
    module = _load_file(folder / place) if place.endswith(".py") else _load_module(place, folder)
    value: Any = module
    for part in name.split("."):
        if not hasattr(value, part):
            named = vars(module).items()
            public = [known for known, it in named if not (known.startswith("_") or isinstance(it, ModuleType))]
            raise ConfigurationError(f"{place} has no {name!r}; {suggestion(name, public)}")
        value = getattr(value, part)
    return value


def _load_file(path: Path) -> ModuleType:
    """The module in a file, its folder importable, under its own name so that its objects can be pickled."""
    if not path.is_file():
        raise ConfigurationError(f"there is no file {path}")
    _make_importable(path.parent)
    name = path.stem
    loaded = sys.modules.get(name)
    if loaded is not None:
        if Path(getattr(loaded, "__file__", None) or "").resolve() == path.resolve():
            return loaded
        name = f"{name}_from_file"  # `json.py` must not take the place of the module that others mean by `json`
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        raise _not_importable(path, error) from error
    return module


def _load_module(name: str, folder: Path) -> ModuleType:
    _make_importable(folder)
    try:
        return importlib.import_module(name)
    except (Exception, SystemExit) as error:
        raise _not_importable(name, error) from error


def _make_importable(folder: Path) -> None:
    place = str(folder.resolve())
    if place not in sys.path:
        sys.path.insert(0, place)


def _not_importable(what: str | Path, error: BaseException) -> ConfigurationError:
    if isinstance(error, SystemExit):
        return ConfigurationError(f"{what} cannot be imported: it calls exit() when it is")
    return ConfigurationError(f"{what} cannot be imported: {describe(error)}")
