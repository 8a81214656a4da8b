"""What suites and commands use by name: targets, scorers, stores, report formats, judge prompts, hooks and sandboxes.

Built-in names are `"module:Name"` strings here, imported when one is used. A package adds names by entry points of the
groups `steelyard.targets`, `steelyard.scorers` and so on, which are read only for a name that is not built in. What is
in no package is named by where it is: `file.py:Name` or `package.module:Name`.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import msgspec

from steelyard._version import __version__
from steelyard.errors import ConfigurationError, describe, nearest, reject_unknown, suggestion
from steelyard.protocols import SandboxProvider

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

Kind: TypeAlias = Literal["targets", "scorers", "stores", "reports", "prompts", "sandboxes", "run_metrics", "hooks"]

_JUDGE_PROMPTS = "steelyard.scoring.judge.prompts"
BUILT_IN: Mapping[Kind, Mapping[str, str]] = {
    "targets": {
        "simulated": "steelyard.targets.simulated:Simulated",
        "command": "steelyard.targets.command:Command",
        "agent": "steelyard.targets.agent:Agent",
        "answers": "steelyard.targets.answers:Answers",
        "python": "steelyard.targets.function:CallableTarget",
        "openai-chat": "steelyard.targets.openai_chat:OpenAIChat",
        "openai-responses": "steelyard.targets.openai_responses:OpenAIResponses",
        "openai-completions": "steelyard.targets.openai_completions:OpenAICompletions",
        "anthropic-messages": "steelyard.targets.anthropic:AnthropicMessages",
        "gemini": "steelyard.targets.gemini:Gemini",
        "bedrock": "steelyard.targets.bedrock:Bedrock",
    },
    "scorers": {
        "exact": "steelyard.scoring.text:Exact",
        "contains": "steelyard.scoring.text:Contains",
        "regex": "steelyard.scoring.text:Regex",
        "choice": "steelyard.scoring.choice:Choice",
        "number": "steelyard.scoring.number:Number",
        "json_match": "steelyard.scoring.structured:JsonMatch",
        "json_schema": "steelyard.scoring.structured:JsonSchema",
        "similarity": "steelyard.scoring.similarity:Similarity",
        "rouge_l": "steelyard.scoring.similarity:RougeL",
        "bleu": "steelyard.scoring.similarity:Bleu",
        "latency": "steelyard.scoring.latency:Latency",
        "tokens": "steelyard.scoring.latency:Tokens",
        "trajectory": "steelyard.scoring.trajectory:Trajectory",
        "tests": "steelyard.scoring.tests:Tests",
        "program": "steelyard.scoring.tests:Program",
        "combined": "steelyard.scoring.pipeline:Combined",
        "judge": "steelyard.scoring.judge.judge:Judge",
        "python": "steelyard.scoring.base:FunctionScorer",
    },
    "stores": {
        "files": "steelyard.cache.files:LocalFileTaskResultStore",
        "sqlite": "steelyard.cache.sqlite:SqliteTaskResultStore",
    },
    "reports": {
        "text": "steelyard.report.summary:summary",
        "md": "steelyard.report.markdown:markdown",
        "html": "steelyard.report.page.page:page",
        "json": "steelyard.journal.files:read_metrics",
        "csv": "steelyard.report.csv:table_csv",
        "junit": "steelyard.report.junit:junit",
    },
    "prompts": {
        "correctness_v1": f"{_JUDGE_PROMPTS}:CORRECTNESS_V1",
        "helpfulness_v1": f"{_JUDGE_PROMPTS}:HELPFULNESS_V1",
        "faithfulness_v1": f"{_JUDGE_PROMPTS}:FAITHFULNESS_V1",
        "pairwise_v1": f"{_JUDGE_PROMPTS}:PAIRWISE_V1",
        "safety_v1": f"{_JUDGE_PROMPTS}:SAFETY_V1",
        "instruction_following_v1": f"{_JUDGE_PROMPTS}:INSTRUCTION_FOLLOWING_V1",
    },
    "sandboxes": {"bubblewrap": "steelyard.workspace.sandbox:Bubblewrap"},
    "run_metrics": {
        "accuracy": "steelyard.run.run_metrics:Accuracy",
        "classification": "steelyard.run.run_metrics:Classification",
        "corpus_bleu": "steelyard.run.run_metrics:CorpusBleu",
        "majority": "steelyard.run.run_metrics:Majority",
    },
    "hooks": {
        "mlflow": "steelyard.integrations.mlflow:MlflowHook",
        "webhook": "steelyard.integrations.webhook:Webhook",
    },
}
_NOUNS: Mapping[Kind, str] = {
    "run_metrics": "run metric",
    "targets": "target",
    "scorers": "scorer",
    "stores": "store",
    "reports": "report format",
    "prompts": "prompt",
    "sandboxes": "sandbox",
    "hooks": "hook",
}


class Plugin(msgspec.Struct, frozen=True, kw_only=True):
    """A name that can be used, and where it comes from."""

    kind: Kind
    name: str
    object: str
    """`module:Name`."""
    package: str
    version: str | None
    problem: str | None = None
    """Why it cannot be used; None when it can. Built-in ones are not tried."""


def find(kind: Kind, name: str) -> Any:
    """The object of that name; ConfigurationError when there is none, or a package's own cannot be loaded."""
    if name in BUILT_IN[kind]:
        return load_object(BUILT_IN[kind][name])
    found = [point for point in _entry_points(kind) if point.name == name]
    if not found:
        raise ConfigurationError(unknown(kind, name), topic="unknown-name")
    if len(found) > 1:
        packages = " and ".join(sorted(_package(point)[0] for point in found))
        raise ConfigurationError(f"the {_NOUNS[kind]} {name!r} is added by {packages}: uninstall one of them")
    return _loaded(kind, found[0])


def names(kind: Kind) -> list[str]:
    """Every name of that kind: the built-in ones, then those that packages add."""
    built_in = list(BUILT_IN[kind])
    return built_in + sorted({point.name for point in _entry_points(kind)} - set(built_in))


def is_known(kind: Kind, name: str) -> bool:
    """Whether something of that kind has the name."""
    return name in BUILT_IN[kind] or name in names(kind)


def plugins_of(kind: Kind) -> list[Plugin]:
    """All that is there of that kind. What packages add is loaded, to see whether it can be."""
    built_in = BUILT_IN[kind]
    found = [
        Plugin(kind=kind, name=name, object=place, package="steelyard", version=__version__)
        for name, place in built_in.items()
    ]
    for point in sorted(_entry_points(kind), key=lambda point: point.name):
        problem = None
        if point.name in built_in:
            problem = f"the built-in {_NOUNS[kind]} of that name is used"
        else:
            try:
                find(kind, point.name)
            except ConfigurationError as error:
                problem = str(error)
        package, version = _package(point)
        found.append(
            Plugin(kind=kind, name=point.name, object=point.value, package=package, version=version, problem=problem)
        )
    return found


def takes(maker: Callable[..., Any]) -> list[str] | None:
    """The names of the arguments that a class or function takes; None when it takes any."""
    try:
        parameters = inspect.signature(maker).parameters.values()
    except (TypeError, ValueError):  # some of those written in C do not say
        return None
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return None
    by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return [parameter.name for parameter in parameters if parameter.kind in by_name]


def _entry_points(kind: Kind) -> list[EntryPoint]:
    from importlib.metadata import entry_points

    return list(entry_points(group=f"steelyard.{kind}"))


def _package(point: EntryPoint) -> tuple[str, str | None]:
    return (point.dist.name, point.dist.version) if point.dist is not None else ("an unknown package", None)


def _loaded(kind: Kind, point: EntryPoint) -> Any:
    try:
        return point.load()
    except (Exception, SystemExit) as error:
        package = " ".join(part for part in _package(point) if part is not None)
        raise ConfigurationError(
            f"the {_NOUNS[kind]} {point.name!r} of {package} cannot be loaded ({point.value}): {describe(error)}"
        ) from error


def unknown(kind: Kind, name: str) -> str:
    """What an error says of a name that nothing has: the nearest name if one is near, and all of them."""
    known = names(kind)
    match = nearest(name, known)
    hint = f"did you mean {match!r}? " if match else ""
    return f"no {_NOUNS[kind]} is named {name!r}; {hint}known here: {', '.join(known) or 'none'}"


def load_object(reference: str, folder: Path | None = None) -> Any:
    """What `file.py:Name` (relative to `folder`) or `package.module:Name` refers to.

    With a folder, modules in it can be imported too.
    """
    place, _, name = reference.rpartition(":")
    in_a_file = folder is not None and place.endswith(".py")
    module = _load_file((folder or Path()) / place) if in_a_file else _load_module(place, folder)
    value: Any = module
    for part in name.split("."):
        if not hasattr(value, part):
            raise ConfigurationError(f"{place} has no {name!r}; {_names_in(module, name)}")
        value = getattr(value, part)
    return value


def _names_in(module: ModuleType, name: str) -> str:
    """The name in a module that is most like this one; else those that it defines, not what it imports."""
    public = {
        known: it for known, it in vars(module).items() if not (known.startswith("_") or isinstance(it, ModuleType))
    }
    if nearest(name, public) is not None:
        return suggestion(name, public)
    imported = {
        known
        for known, it in public.items()
        if (inspect.isclass(it) or inspect.isfunction(it)) and it.__module__ != module.__name__
    }
    return suggestion(name, [known for known in public if known not in imported] or public)


def make_importable(folder: Path) -> None:
    """Let modules in a folder be imported, before all others."""
    place = str(folder.resolve())
    if place not in sys.path:
        sys.path.insert(0, place)


def _load_file(path: Path) -> ModuleType:
    """The module in a file, its folder importable, under its own name so that its objects can be pickled."""
    if not path.is_file():
        raise ConfigurationError(f"there is no file {path}")
    make_importable(path.parent)
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


def _load_module(name: str, folder: Path | None) -> ModuleType:
    if folder is not None:
        make_importable(folder)
    try:
        return importlib.import_module(name)
    except (Exception, SystemExit) as error:
        raise _not_importable(name, error) from error


def _not_importable(what: str | Path, error: BaseException) -> ConfigurationError:
    if isinstance(error, SystemExit):
        return ConfigurationError(f"{what} cannot be imported: it calls exit() when it is")
    return ConfigurationError(f"{what} cannot be imported: {describe(error)}")


def make_sandbox(raw: object, where: str = "sandbox", folder: Path | None = None) -> SandboxProvider | None:
    """The sandbox that a suite names: `bubblewrap`, or `{bubblewrap: {network: gateway}}`; None for none.

    Paths in its arguments are relative to `folder`.
    """
    if raw is None or raw == "none":
        return None
    if isinstance(raw, str):
        raw = {raw: {}}
    if not isinstance(raw, Mapping) or len(raw) != 1:
        raise ConfigurationError(f"{where} must be a name, or a mapping from one name to its arguments, got {raw!r}")
    ((name, options),) = raw.items()
    try:
        kind = find("sandboxes", str(name))
    except ConfigurationError as error:
        raise ConfigurationError(f"{where}: {error}") from error
    if options is not None and not isinstance(options, Mapping):
        raise ConfigurationError(f"{where}.{name} takes a mapping of arguments, got {options!r}")
    given, known = dict(options or {}), takes(kind)
    if known is not None:
        reject_unknown(given, [option for option in known if option != "folder"], f"{where}.{name}")
        if folder is not None and "folder" in known:
            given["folder"] = folder
    try:
        made = kind(**given)
    except TypeError as error:
        raise ConfigurationError(f"{where}.{name}: {error}") from error
    if not isinstance(made, SandboxProvider):
        raise ConfigurationError(f"{where}.{name} is no sandbox: it needs check, start, reap and identity")
    return made
