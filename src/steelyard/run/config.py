"""A suite file, made into what a run needs: its target, scorers, options, gate and engine."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import msgspec

from steelyard.engine.base import Engine
from steelyard.errors import ConfigurationError, SuiteError, describe, reject_unknown
from steelyard.plugins import BUILT_IN, Kind, find, load_object, make_sandbox, takes
from steelyard.protocols import Scorer, Target
from steelyard.records import CaseLimits
from steelyard.run.hooks import as_hooks
from steelyard.run.matrix import PROMPT, TARGET, make_variants
from steelyard.run.options import (
    Option,
    RunOptions,
    options_of,
    parse_count_or_auto,
    read_suite_options,
    run_checks,
    true_or_false,
)
from steelyard.run.run_metrics import NamedMetric, as_run_metrics
from steelyard.scoring.base import LIMIT_NAMES, FunctionScorer, as_scorer, as_scorers, read_limits
from steelyard.scoring.pipeline import LimitedScorer
from steelyard.stats.metrics import slice_of
from steelyard.stats.prices import read_prices
from steelyard.stats.rules import read_rule
from steelyard.stats.slices import parse_keys
from steelyard.suite.evalset import EvalSet
from steelyard.suite.suite_file import SuiteFile, locating, read_suite_file
from steelyard.targets.function import CallableTarget, as_target
from steelyard.units import read_case_limits
from steelyard.workspace.template import Workspace

EngineName = Literal["local", "ray"]


def _engine_name(name: str, value: object) -> None:
    if value not in get_args(EngineName):
        raise ConfigurationError(f"{name} must be one of {', '.join(get_args(EngineName))}, got {value!r}")


def _address(name: str, value: object) -> None:
    if not isinstance(value, str):
        raise ConfigurationError(f"{name} must be text like host:6379, got {value!r}")


def _workers(name: str, value: object) -> None:
    if value != "auto" and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
        raise ConfigurationError(f"{name} must be a whole number >= 1 or auto, got {value!r}")


class EngineChoice(msgspec.Struct, frozen=True, kw_only=True):
    """The engine of a run, by name: this process, several processes here, or the workers of a Ray cluster."""

    engine: Annotated[
        EngineName,
        Option(
            flags=("--engine",),
            help="What makes the calls [default: local].",
            sweep="What makes the calls [default: local].",
            check=_engine_name,
        ),
    ] = "local"
    ray_address: Annotated[
        str | None,
        Option(
            flags=("--ray-address",),
            help="Ray cluster to use, or auto [default: start one on this machine].",
            sweep="Ray cluster to use, or auto [default: start one on this machine].",
            metavar="HOST:PORT",
            check=_address,
        ),
    ] = None
    workers: Annotated[
        int | Literal["auto"] | None,
        Option(
            flags=("--workers",),
            help="Processes that make the calls, or auto: all cores but one [default: none; on Ray one per CPU].",
            sweep="Processes that make the calls, or auto: all cores but one [default: none; on Ray one per CPU].",
            metavar="N",
            parse=parse_count_or_auto,
            check=_workers,
        ),
    ] = None

    strict_workers: Annotated[
        bool,
        Option(
            flags=("--strict-workers",),
            help="Stop if a node of the Ray cluster has other versions, instead of leaving it out.",
            sweep="Stop if a node of the Ray cluster has other versions, instead of leaving it out.",
            check=true_or_false,
        ),
    ] = False

    def __post_init__(self) -> None:
        run_checks(self)
        for name in ("ray_address", "strict_workers"):
            if self.engine == "local" and getattr(self, name):
                raise ConfigurationError(f"{name} goes with the engine ray, got the engine local")

    def replace(self, **changes: Any) -> EngineChoice:
        """The same with some of it changed."""
        return msgspec.structs.replace(self, **changes)

    def make(self, working_dir: Path, grace: float) -> Engine | None:
        """The engine; None for the one in this process, which the run makes by itself."""
        if self.engine == "local":
            if self.workers is None:
                return None
            from steelyard.engine.worker_processes import ProcessEngine

            return ProcessEngine(self.workers, grace=grace)
        from steelyard.engine.ray.engine import RayEngine

        workers = None if self.workers == "auto" else self.workers
        return RayEngine(
            self.ray_address,
            workers=workers,
            grace=grace,
            working_dir=working_dir.resolve(),
            strict_workers=self.strict_workers,
        )


RUN_KEYS = tuple(
    name for kind in (RunOptions, EngineChoice) for name, field in options_of(kind).items() if field.option.in_suite
)
"""The keys of a suite file's `run`."""
_ENDPOINTS = ("openai-chat", "openai-responses", "openai-completions", "anthropic-messages", "gemini", "bedrock")
_OF_THE_CONNECTION = (
    "base_url", "api_key", "api_key_env", "api_key_command", "api_key_life", "api_version", "headers", "stream",
    "proxy", "ca_bundle", "verify", "parallelism", "region", "profile",
)  # fmt: skip
"""What a judge without a target takes over from the suite's endpoint; the rest is about the answers."""


class Gate(msgspec.Struct, frozen=True, kw_only=True):
    """What a run must reach to be called good."""

    min_pass_rate: float | None = None
    max_error_rate: float = 0.0
    rules: tuple[str, ...] = ()
    """As written: `steelyard gate` reads them."""
    allow: tuple[str, ...] = ()
    """Conditions that may pass, such as `truncated`: see `report.rules.WAIVERS`."""


class BuiltSuite(msgspec.Struct, frozen=True, kw_only=True):
    """A suite file, ready to be run."""

    suite: EvalSet
    target: Target
    scorers: list[Scorer]
    options: dict[str, Any]
    gate: Gate
    workspace: Workspace | None = None
    case_limits: CaseLimits | None = None
    engine: EngineChoice = EngineChoice()
    hooks: Sequence[object] = ()
    run_metrics: Sequence[object] = ()


class BuiltMatrix(msgspec.Struct, frozen=True, kw_only=True):
    """A suite file that describes several runs."""

    file: SuiteFile
    axes: dict[str, list[str]]
    changes: dict[str, Any]
    """What the command line changes of every target."""
    models: tuple[str, ...] = ()
    """The models on the axis of targets, where the command line names them."""

    def build(self, at: Mapping[str, str]) -> BuiltSuite:
        """The suite of one variant, without its prompt; what is wrong with it is said with its name."""
        try:
            with locating(self.file.path, self.file.settings):
                own = self.file.targets is not None and not self.models
                return _build(_variant_of(self, at), f"targets.{at[TARGET]}" if own else "target")
        except SuiteError as error:
            message = f"{'/'.join(at.values())}: {error.message}"
            raise SuiteError(message, path=error.path, line=error.line) from error


def build_suite(path: str | Path, target: Mapping[str, Any] | None = None, settings: Sequence[str] = ()) -> BuiltSuite:
    """Everything that a suite file names, made; errors say which key is wrong.

    `target` has arguments that take the place of those of the file's own target, `settings` like `run.parallelism=5`
    of what else it says.
    """
    built = build_any(path, target, settings)
    if isinstance(built, BuiltSuite):
        return built
    names = ", ".join(variant.name for variant in make_variants(built.axes))
    raise SuiteError(f"is a matrix ({names}), and one run is wanted here: `steelyard run` runs them all", path=path)


def build_any(
    path: str | Path,
    target: Mapping[str, Any] | None = None,
    settings: Sequence[str] = (),
    models: Sequence[str] = (),
) -> BuiltSuite | BuiltMatrix:
    """The run that a suite file describes, or the matrix: with several targets, prompts or parameters, or `models`."""
    file = read_suite_file(path, settings)
    if file.is_matrix or len(models) > 1:
        return _matrix_of(file, target or {}, models)
    with locating(file.path, file.settings):
        return _build(_with_target(file, _required_target(file), target))


def _matrix_of(file: SuiteFile, changes: Mapping[str, Any], models: Sequence[str]) -> BuiltMatrix:
    if file.targets is None:
        _required_target(file)
    elif models or "model" in changes:
        raise SuiteError("has targets: --model changes the one target of a suite; --variant chooses", path=file.path)
    if len(set(models)) < len(models):
        raise ConfigurationError(f"each model once, got {', '.join(models)}")
    axes: dict[str, list[str]] = {}
    if file.targets is not None or models:
        axes[TARGET] = list(models or file.targets or ())
    if file.prompts is not None:
        axes[PROMPT] = list(file.prompts)
    for name, values in (file.params or {}).items():
        axes[name] = list(map(_label, values))
        if len(set(axes[name])) < len(values):
            raise SuiteError(f"params.{name}: each value once, got {', '.join(axes[name])}", path=file.path)
    return BuiltMatrix(file=file, axes=axes, changes=dict(changes), models=tuple(models))


def _label(value: Any) -> str:
    """A parameter's value as it is in the name of a variant."""
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()


def _variant_of(matrix: BuiltMatrix, at: Mapping[str, str]) -> SuiteFile:
    """The suite file with the target of one variant."""
    file, changes = matrix.file, matrix.changes
    own = _required_target(file) if file.targets is None else file.targets[at[TARGET]]
    if matrix.models:
        changes = {**changes, "model": at[TARGET]}
    changed = _with_target(file, own, changes)
    values = {
        name: next(value for value in given if _label(value) == at[name]) for name, given in (file.params or {}).items()
    }
    return _with_target(changed, changed.target, {"params": values}, by="`params`") if values else changed


def _required_target(file: SuiteFile) -> str | dict[str, Any]:
    if file.target is None:
        raise SuiteError(
            f"has no target: give one of {', '.join(BUILT_IN['targets'])}", path=file.path, topic="no-target"
        )
    return file.target


def _with_target(file: SuiteFile, target: Any, changes: Mapping[str, Any] | None, by: str | None = None) -> SuiteFile:
    """The suite file with this target, some of whose arguments are changed."""
    file = dataclasses.replace(file, target=target)
    return dataclasses.replace(file, target=_changed_target(file, changes, by)) if changes else file


def _build(file: SuiteFile, target: str = "target") -> BuiltSuite:
    """What the suite file names; `target` is the place of its target."""
    assert file.target is not None
    reject_unknown(file.run, RUN_KEYS, "run")
    return BuiltSuite(
        suite=file.cases,
        target=_build_target(file, file.target, target),
        scorers=_build_scorers(file),
        options=_run_options(file),
        gate=build_gate(file.gate, file.path),
        workspace=_build_workspace(file),
        case_limits=read_case_limits(file.case_limits),
        engine=_engine_choice(file),
        hooks=_build_hooks(file),
        run_metrics=_build_run_metrics(file),
    )


def _build_workspace(file: SuiteFile) -> Workspace | None:
    """The suite's workspace; paths in it are relative to the suite's folder."""
    if file.workspace is None:
        return None
    given = {("template" if key == "from" else key): value for key, value in file.workspace.items()}
    known = ["from", *(name for name in takes(Workspace) or () if name not in ("template", "folder"))]
    reject_unknown(file.workspace, known, "workspace")
    return Workspace(**given, folder=file.path.parent.resolve())


def _engine_choice(file: SuiteFile) -> EngineChoice:
    given = read_suite_options(file.run, EngineChoice, file.path.parent)
    try:
        return EngineChoice(**given)
    except ConfigurationError as error:
        raise ConfigurationError(f"run: {error}") from error


def _run_options(file: SuiteFile) -> dict[str, Any]:
    """The suite's own options; paths are relative to its folder, and times may have a unit."""
    options = read_suite_options(file.run, RunOptions, file.path.parent)
    if file.prices:
        read_prices(file.prices, None)
        options["prices"] = file.prices
    if by := parse_keys([*file.by, *_gated_keys(file)], "by"):
        options["by"] = by
    try:
        RunOptions(**{**options, "low_memory": False})  # which needs an output_path, that is not known here
    except ConfigurationError as error:
        raise ConfigurationError(f"run: {error}") from error
    return options


def _gated_keys(file: SuiteFile) -> list[str]:
    """The metadata keys of the slices that the suite's own rules name: the run has to count by them."""
    rules = file.gate.get("rules") or ()
    found = [read_rule(rule) for rule in rules if isinstance(rule, str)] if isinstance(rules, list) else []
    named = [slice_of(rule.name) for rule in found if rule is not None]
    return [one[1] for one in named if one is not None]


def build_gate(raw: Mapping[str, Any], path: Path | None = None) -> Gate:
    """The thresholds of a suite file or of flags, checked."""
    reject_unknown(raw, Gate.__struct_fields__, "gate", file=path)
    rules = raw.get("rules") or ()
    if not isinstance(rules, (list, tuple)) or not all(isinstance(rule, str) for rule in rules):
        raise SuiteError(f"gate.rules must be a list of rules such as cost<2, got {rules!r}", path=path)
    allow = raw.get("allow") or ()
    if not isinstance(allow, (list, tuple)) or not all(isinstance(name, str) for name in allow):
        raise SuiteError(f"gate.allow must be a list of names such as truncated, got {allow!r}", path=path)
    thresholds = {name: value for name, value in raw.items() if name not in ("rules", "allow") and value is not None}
    for name, value in thresholds.items():
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= 1:
            raise SuiteError(f"gate.{name} must be within 0..1, got {value!r}", path=path)
    return Gate(rules=tuple(rules), allow=tuple(allow), **thresholds)


def _changed_target(file: SuiteFile, changes: Mapping[str, Any], by: str | None = None) -> dict[str, Any]:
    """The suite's target with another model or address, if it takes one; `by` is what wants to change it."""
    kind, arguments = _name_and_arguments(file.target, "target", file.path)
    if kind == "python" and isinstance(arguments, str):
        arguments = {"class": arguments}
    arguments = {} if arguments is None else arguments
    known = _target_arguments(file, kind, arguments) if isinstance(arguments, dict) else []
    refused = [name for name in changes if known is not None and name not in known]
    if refused:
        flags = by or " and ".join(map(target_flag, refused))
        raise SuiteError(
            f"target: {kind} does not take {' or '.join(refused)}: {flags} cannot change it", path=file.path
        )
    if "params" in changes:
        suites = arguments.get("params") or {}
        if not isinstance(suites, dict):
            raise SuiteError(f"target.{kind}.params must be a mapping, got {suites!r}", path=file.path)
        changes = {**changes, "params": {**suites, **changes["params"]}}
    return {kind: {**arguments, **changes}}


def target_flag(name: str) -> str:
    """The flag that changes an argument of the target."""
    return "--param" if name == "params" else f"--{name.replace('_', '-')}"


def _target_arguments(file: SuiteFile, kind: str, arguments: Mapping[str, Any]) -> list[str] | None:
    """What the target of that name can be given; None for anything."""
    if kind == "python":
        reference = arguments.get("class", arguments.get("function"))
        found = _load_argument(file.path, reference, "target.python")
    else:
        found = _found("targets", kind, "target", file.path)
    return takes(found) if inspect.isclass(found) else []


def _build_target(file: SuiteFile, raw: str | dict[str, Any], place: str) -> Target:
    name, arguments = _name_and_arguments(raw, place, file.path)
    where = f"{place}.{name}"
    if name in _READERS:
        return _READERS[name](file.path, arguments, where)
    return _as_target(_found("targets", name, place, file.path), arguments, where, file.path)


def _as_target(found: Any, arguments: Any, where: str, path: Path) -> Target:
    """A target from what a name refers to: a class is made, a function wrapped, a target used as it is."""
    if not inspect.isclass(found):
        if not isinstance(found, Target):
            made: Target = _make(CallableTarget, arguments, where, path, found)
            return made
        if arguments:
            raise SuiteError(f"{where}: that is a target already, which takes no arguments", path=path)
        return found
    made = _make(found, arguments, where, path)
    try:
        return as_target(made)
    except ConfigurationError as error:
        raise SuiteError(f"{where}: {error}", path=path) from error


def _found(kind: Kind, name: str, where: str, path: Path) -> Any:
    """What a name in a suite file refers to: built in, a package's, or file.py:Name."""
    if ":" in name:
        return _load_argument(path, name, where)
    try:
        return find(kind, name)
    except ConfigurationError as error:
        raise SuiteError(f"{where}: {error}", path=path) from error


def _build_scorers(file: SuiteFile) -> list[Scorer]:
    scorers: list[object] = []
    for number, raw in enumerate(file.scorers):
        where = f"scorers[{number}]"
        name, arguments = _name_and_arguments(raw, where, file.path)
        extract = None
        if isinstance(arguments, dict) and "extract" in arguments:
            arguments = dict(arguments)
            extract = arguments.pop("extract")
        scorer = _build_scorer(file, name, arguments, where)
        scorers.append(scorer if extract is None else _extracting(scorer, extract, f"{where}.{name}", file.path))
    try:
        return as_scorers(scorers)
    except ConfigurationError as error:
        raise SuiteError(f"scorers: {error}", path=file.path) from error


def _build_hooks(file: SuiteFile) -> list[object]:
    """The suite's hooks: a name with its arguments, or `python:` with a class or an object of your own."""
    made = [_made(file, "hooks", number, raw, lambda found, _: found) for number, raw in enumerate(file.hooks)]
    try:
        return as_hooks(made)
    except ConfigurationError as error:
        raise SuiteError(f"hooks: {error}", path=file.path) from error


def _build_run_metrics(file: SuiteFile) -> list[NamedMetric]:
    """The suite's functions over all records: a name with its arguments, or `python:` with one of your own."""
    try:
        return as_run_metrics(
            [_made(file, "run_metrics", number, raw, NamedMetric) for number, raw in enumerate(file.run_metrics)]
        )
    except SuiteError:
        raise
    except ConfigurationError as error:
        raise SuiteError(f"run_metrics: {error}", path=file.path) from error


def _made(file: SuiteFile, kind: Kind, number: int, raw: Any, named: Callable[[Any, str | None], object]) -> object:
    """What one item of a list names: a class is made with its arguments, a function may be given a `name`."""
    where = f"{kind}[{number}]"
    name, arguments = _name_and_arguments(raw, where, file.path)
    if name == "python":
        where = f"{where}.python"
        reference, arguments = _own_object(file.path, arguments, where)
        found = _load_argument(file.path, reference, where)
    else:
        found = _found(kind, name, where, file.path)
    if inspect.isclass(found):
        return _make(found, arguments, f"{where}.{name}" if name != "python" else where, file.path)
    given = arguments or {}
    if any(key != "name" or kind == "hooks" for key in given):
        what = "a hook already, which takes no arguments" if kind == "hooks" else "a function: it takes a name alone"
        raise SuiteError(f"{where}: that is {what}", path=file.path)
    return named(found, given.get("name"))


def _build_scorer(file: SuiteFile, name: str, arguments: Any, where: str) -> object:
    if name == "python":
        return _python_scorer(file.path, arguments, f"{where}.python")
    if name == "judge":
        return _build_judge(file, arguments, f"{where}.judge")
    return _as_scorer(_found("scorers", name, where, file.path), arguments, f"{where}.{name}", file.path)


def _extracting(scorer: object, extract: Any, where: str, path: Path) -> object:
    """The scorer of what `extract` finds in the answer."""
    from steelyard.scoring.extract import extracting

    try:
        return extracting(scorer, extract)
    except ConfigurationError as error:
        raise SuiteError(f"{where}: {error}", path=path) from error


def _python_scorer(path: Path, arguments: Any, where: str) -> object:
    """Your own function or class: `python: checks.py:polite`, or a mapping with `class` or `function` and arguments."""
    reference, options = _own_object(path, arguments, where)
    return _as_scorer(_load_argument(path, reference, where), options, where, path)


def _as_scorer(found: Any, arguments: Any, where: str, path: Path) -> object:
    """A scorer from what a name refers to: a class is made, a function wrapped, a scorer used as it is.

    A scorer that does not take `timeout`, `parallelism` or `retries` itself gets them all the same.
    """
    is_class = inspect.isclass(found)
    if is_class or not isinstance(found, Scorer):
        maker = found if is_class else FunctionScorer
        known = takes(maker)
        if not arguments and not is_class:
            return found
        if isinstance(arguments, dict) and "folder" in (known or ()):  # what its paths are relative to
            arguments = {"folder": path.parent.resolve(), **arguments}
    else:
        maker, known = None, []
    given = arguments if isinstance(arguments, dict) else {}
    own = {name: given[name] for name in LIMIT_NAMES if name in given and known is not None and name not in known}
    if own:
        arguments = {name: value for name, value in given.items() if name not in own}
    if maker is not None:
        made = _make(maker, arguments, where, path, *(() if is_class else (found,)), known_too=("extract",))
    elif arguments:
        raise SuiteError(f"{where}: that is a scorer already; it takes {', '.join(LIMIT_NAMES)} alone", path=path)
    else:
        made = found
    if not own:
        return made
    try:
        return LimitedScorer(as_scorer(made), read_limits(own))
    except ConfigurationError as error:
        raise SuiteError(f"{where}: {error}", path=path) from error


def _own_object(path: Path, arguments: Any, where: str) -> tuple[Any, dict[str, Any]]:
    """Where the user's own class or function is, and what it is to be given."""
    if not isinstance(arguments, dict):
        return arguments, {}
    named = [key for key in ("class", "function") if key in arguments]
    if len(named) != 1:
        message = f"{where} takes a class or a function: file.py:Name or package.module:Name, got {arguments!r}"
        raise SuiteError(message, path=path)
    return arguments[named[0]], {key: value for key, value in arguments.items() if key != named[0]}


def _build_judge(file: SuiteFile, arguments: Any, where: str) -> Scorer:
    """Make a judge; without a `target` it asks the suite's kind of target for another model."""
    from steelyard.scoring.judge.calibration import calibration_file
    from steelyard.scoring.judge.judge import Judge

    if not isinstance(arguments, dict):
        raise SuiteError(f"{where} takes a mapping of arguments, with at least a model", path=file.path)
    given = dict(arguments)
    if "models" in given:
        return _build_jury(file, given, where)
    if "model" not in given:
        raise SuiteError(f"{where}: name its model; a judge has no default", path=file.path)
    if isinstance(given.get("calibration"), str):
        given["calibration"] = calibration_file(given["calibration"], file.path.parent)
    place = f"{where}.target" if "target" in given else where
    given["target"] = _build_target(file, _judge_target(file, given, where), place)
    made: Scorer = _make(Judge, given, where, file.path, known_too=("models", "extract"))
    return made


def _build_jury(file: SuiteFile, given: dict[str, Any], where: str) -> Scorer:
    """Several judges with one question, each with another model."""
    from steelyard.scoring.judge.calibration import calibration_file
    from steelyard.scoring.judge.judge import Jury

    models = given.pop("models")
    if "model" in given:
        raise SuiteError(f"{where}: give model or models, not both", path=file.path)
    if not isinstance(models, list) or len(models) < 2 or not all(isinstance(model, str) for model in models):
        raise SuiteError(f"{where}.models must be a list of two models or more, got {models!r}", path=file.path)
    own = {name: given.pop(name) for name in ("name", "calibration") if name in given}
    if isinstance(own.get("calibration"), str):
        own["calibration"] = calibration_file(own["calibration"], file.path.parent)
    judges = [_build_judge(file, {**given, "model": model}, where) for model in models]
    made: Scorer = _make(Jury, own, where, file.path, judges, known_too=("extract",))
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


def _command(path: Path, arguments: Any, where: str) -> Target:
    """A program; `cwd` and a program named by a relative path are relative to the suite file's folder.

    The folder is part of the target's identity: resolved, it is the same from wherever the suite is run.
    """
    from steelyard.targets.command import Command

    if isinstance(arguments, (str, list)):
        arguments = {"argv": arguments}
    if isinstance(arguments, dict):
        cwd = arguments.get("cwd", ".")
        if not isinstance(cwd, str):
            raise SuiteError(f"{where}: cwd must be a folder's path, got {cwd!r}", path=path)
        arguments = {**arguments, "cwd": (path.parent / cwd).resolve()}
    made: Target = _make(Command, arguments, where, path)
    return made


def _agent(path: Path, arguments: Any, where: str) -> Target:
    """An agent's program; `{{ suite }}` in its words is the suite file's folder."""
    from steelyard.targets.agent import Agent

    if isinstance(arguments, (str, list)):
        arguments = {"argv": arguments}
    if isinstance(arguments, dict):
        if "folder" in arguments:
            raise SuiteError(f"unknown key {where}.folder", path=path)
        arguments = {**arguments, "folder": path.parent.resolve()}
        output = arguments.get("output")
        if isinstance(output, dict):
            reject_unknown(output, ("python",), f"{where}.output", file=path)
            arguments["output"] = _load_argument(path, output.get("python"), f"{where}.output.python")
    made: Agent = _make(Agent, arguments, where, path)
    if made.gateway is not None:
        from steelyard.workspace.gateway import check_apis

        check_apis(made.gateway, f"{where}.gateway")
    make_sandbox(made.sandbox, f"{where}.sandbox", path.parent.resolve())  # its names; the run makes and checks it
    return made


def _python(path: Path, arguments: Any, where: str) -> Target:
    """Your own function, class or target: `python: agent.py:answer`, or a mapping with `class` or `function`."""
    reference, options = _own_object(path, arguments, where)
    loaded = _load_argument(path, reference, where)
    if isinstance(loaded, Target) and not inspect.isclass(loaded):
        reject_unknown(options, ("function",), where, file=path)
    return _as_target(loaded, options, where, path)


def _endpoint(kind: str, path: Path, arguments: Any, where: str) -> Target:
    """A model's endpoint; its functions and its CA bundle are relative to the suite file's folder."""
    make = find("targets", kind)
    known = [name for name in takes(make) or () if name != "transport"]
    if isinstance(arguments, dict):
        reject_unknown(arguments, known, where, file=path)
    if not isinstance(arguments, dict | None):
        raise SuiteError(f"{where} takes a mapping of arguments, with at least a model, got {arguments!r}", path=path)
    if not (arguments or {}).get("model"):
        raise SuiteError(f"{where} needs a model: {where}.model", path=path)
    given = dict(arguments or {})
    if isinstance(given.get("ca_bundle"), str):
        given["ca_bundle"] = str(path.parent / given["ca_bundle"])
    if isinstance(key := given.get("api_key"), dict):
        reject_unknown(key, ("python",), f"{where}.api_key", file=path)
        given["api_key"] = _load_argument(path, key.get("python"), f"{where}.api_key.python")
    if isinstance(given.get("functions"), dict):
        given["functions"] = {
            name: _load_argument(path, reference, f"{where}.functions.{name}")
            for name, reference in given["functions"].items()
        }
    made: Target = _make(make, given, where, path)
    return made


def _answers(path: Path, arguments: Any, where: str) -> Target:
    """Answers from a file: its path alone, or with arguments; relative to the suite's folder."""
    given = {"path": arguments} if isinstance(arguments, str) else arguments
    if isinstance(given, dict) and isinstance(given.get("path"), str):
        given = {**given, "path": str(path.parent / given["path"])}
    return _as_target(find("targets", "answers"), given, where, path)


_READERS: Mapping[str, Callable[[Path, Any, str], Target]] = {
    "command": _command,
    "agent": _agent,
    "answers": _answers,
    "python": _python,
    **{kind: partial(_endpoint, kind) for kind in _ENDPOINTS},
}
"""Targets whose arguments in a suite file are more than those of their class: paths, short forms."""


def _name_and_arguments(raw: Any, where: str, path: Path) -> tuple[str, Any]:
    """A name, or a mapping from one name to its arguments."""
    if isinstance(raw, str):
        return raw, None
    if isinstance(raw, dict) and len(raw) == 1:
        name, arguments = next(iter(raw.items()))
        return str(name), arguments
    raise SuiteError(f"{where} must be a name, or a mapping from one name to its arguments", path=path)


def _make(
    kind: Callable[..., Any], arguments: Any, where: str, path: Path, *first: Any, known_too: tuple[str, ...] = ()
) -> Any:
    """Call `kind` with the arguments of a suite file, after checking their names.

    `known_too` are keys that were taken out of them before, and are named among those that are known.
    """
    arguments = {} if arguments is None else arguments
    if not isinstance(arguments, dict):
        raise SuiteError(f"{where} takes a mapping of arguments, got {arguments!r}", path=path)
    known = takes(kind)
    if known is not None:
        reject_unknown(arguments, (*known[len(first) :], *known_too), where, file=path)
    try:
        return kind(*first, **arguments)
    except (ConfigurationError, TypeError, ValueError) as error:
        raise SuiteError(f"{where}: {error}", path=path) from error
    except Exception as error:  # of a class that is not ours
        raise SuiteError(f"{where}: {describe(error)}", path=path) from error


def _load_argument(path: Path, reference: Any, where: str) -> Any:
    if not isinstance(reference, str) or ":" not in reference:
        raise SuiteError(f"{where} must be file.py:name or package.module:name, got {reference!r}", path=path)
    try:
        return load_object(reference, path.parent)
    except ConfigurationError as error:
        raise SuiteError(f"{where}: {error}", path=path) from error
