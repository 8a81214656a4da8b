"""Suite files: cases, target, scorers and options in one YAML document, read and checked."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from steelyard.attachments import AttachmentFolder
from steelyard.errors import ConfigurationError, SuiteError, reject_unknown
from steelyard.suite.data_files import FORMATS, HuggingFaceSource, file_source, harbor_cases, swebench_cases
from steelyard.suite.evalset import EvalSet, arrangement
from steelyard.suite.prompts import CasePrompt, read_examples, read_prompts
from steelyard.suite.sources import Arrange, MemorySource, Source, by_name, found, grouped_by, open_file

if TYPE_CHECKING:
    from yaml import SafeLoader as _BaseLoader
else:
    _BaseLoader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # libyaml's, where available

KEYS = (
    "id", "description", "target", "targets", "prompts", "params", "workspace", "solution", "case_limits",
    "system_prompt", "cases", "fields", "group", "examples", "attachments_from", "scorers", "run", "prices", "gate",
    "hooks", "by", "run_metrics",
)  # fmt: skip
MAX_DEPTH = 100  # levels of nesting
_MAX_NODES = 1_000_000
"""Values that a suite file's aliases may stand for, written out; more where the file itself has as many."""
_EXPANDED = (
    "id", "target", "targets", "params", "workspace", "solution", "case_limits", "cases", "examples",
    "attachments_from", "scorers", "run", "prices", "gate", "hooks", "run_metrics",
)  # fmt: skip
"""The keys in which `${NAME}` is replaced; not in the words of prompts and inline cases, which may have their own."""
_index = re.compile(r"\[(\d+)\]")
_more_of_a_key = re.compile(r"[\w\-\[/]|\.\w")
"""What follows a key's name where the message names a longer one."""
_MAX_PARTS = 4
_variable = re.compile(r"\$\$(?=\{)|\$\{([A-Za-z_][A-Za-z0-9_]*)(:-((?:[^{}]|\{[^{}]*\})*))?\}|\$\{[^}]*\}?")

_TAG = "tag:yaml.org,2002:"
_NUMBER_START = list("-+.0123456789")


@dataclass(frozen=True, kw_only=True)
class SuiteFile:
    """A suite file's content. What is not about its cases is as written, read by `run.config`."""

    path: Path
    id: str
    description: str | None = None
    target: str | dict[str, Any] | None = None
    targets: dict[str, Any] | None = None
    """Of a matrix: targets by their names, in place of `target`."""
    prompts: dict[str, CasePrompt] | None = None
    params: dict[str, list[Any]] | None = None
    """Of a matrix: the values of each parameter."""
    workspace: dict[str, Any] | None = None
    solution: str | dict[str, Any] | None = None
    """Where the cases' reference solutions are, for `steelyard check`."""
    case_limits: dict[str, Any] | None = None
    system_prompt: str | None = None
    cases: EvalSet
    scorers: list[Any] = field(default_factory=list)
    run: dict[str, Any] = field(default_factory=dict)
    prices: dict[str, Any] = field(default_factory=dict)
    gate: dict[str, Any] = field(default_factory=dict)
    hooks: list[Any] = field(default_factory=list)
    run_metrics: list[Any] = field(default_factory=list)
    by: list[Any] = field(default_factory=list)
    """The metadata keys whose slices reports show."""
    settings: tuple[str, ...] = ()
    """What took the place of values in the file, like `run.parallelism=5`."""

    @property
    def is_matrix(self) -> bool:
        """Whether it describes several runs."""
        return any(axis is not None for axis in (self.targets, self.prompts, self.params))

    def cases_of(self, variant: Mapping[str, str]) -> EvalSet:
        """The cases as a variant of the matrix asks them."""
        prompt = (self.prompts or {}).get(variant.get("prompt", ""))
        return self.cases if prompt is None else self.cases.with_prompt(prompt)


def read_suite_file(path: str | Path, settings: Sequence[str] = ()) -> SuiteFile:
    """Read a suite file and check its keys; SuiteError names the place of a mistake.

    `settings` like `run.parallelism=5` take the place of what the file says.
    """
    path = Path(path)
    document, lines = _load(path)
    for setting in settings:
        _set(document, setting)
        if setting.startswith("cases"):
            lines = []
    with locating(path, settings):
        reject_unknown(document, KEYS)
        return replace(_suite_file(path, document, lines), settings=tuple(settings))


@contextmanager
def locating(path: Path, settings: Sequence[str] = ()) -> Iterator[None]:
    """Name this suite file in errors about what it says, and the line of the key that their messages begin with.

    `settings` take the place of what the file says: a value of theirs has no line.
    """
    try:
        yield
    except SuiteError as error:
        if error.line is None and error.path in (None, str(path)):
            error.set_place(path, _line_of(path, error.message, settings))
        raise
    except ConfigurationError as error:
        raise SuiteError(str(error), path=path, line=_line_of(path, str(error), settings)) from error


def _line_of(path: Path, message: str, settings: Sequence[str]) -> int | None:
    """The line of the key that a message is about: `gate.rules[0]: …`, `unknown key run.paralelism; …`.

    None where the message begins with no key of the file, or with one that is set by a flag.
    """
    with open_file(path) as file:
        root = yaml.compose(file.read().decode("utf-8-sig"), Loader=_SuiteLoader)
    # `scorers[0].judge: examples[1]: …` is about `scorers[0].judge.examples[1]`.
    parts = message.replace("unknown key ", "").split(": ")
    abouts = [".".join(parts[: number + 1]) for number in range(min(len(parts), _MAX_PARTS))]
    named = [
        (where, line)
        for where, line in _key_lines(root)
        if any(about.startswith(where) and not _more_of_a_key.match(about, len(where)) for about in abouts)
    ]
    given = tuple(setting.partition("=")[0] for setting in settings)
    if any(_index.sub(r".\1", about).startswith(given) for about in abouts):
        return None
    return max(named, key=lambda one: len(one[0]), default=("", None))[1]


def _key_lines(root: yaml.Node | None) -> Iterator[tuple[str, int]]:
    """Yield the place of each key and each item of a list, such as `scorers[0].judge`, and its line."""
    waiting: list[tuple[str, yaml.Node | None]] = [("", root)]
    visited: set[int] = set()
    while waiting:
        place, node = waiting.pop()
        if id(node) in visited:
            continue
        visited.add(id(node))
        if isinstance(node, yaml.SequenceNode):
            for number, item in enumerate(node.value):
                yield f"{place}[{number}]", item.start_mark.line + 1
                waiting.append((f"{place}[{number}]", item))
        elif isinstance(node, yaml.MappingNode):
            for key, value in node.value:
                where = f"{place}.{key.value}" if place else str(key.value)
                yield where, key.start_mark.line + 1
                waiting.append((where, value))


def _suite_file(path: Path, document: dict[Any, Any], lines: list[int]) -> SuiteFile:
    def value(key: str, kind: type, described: str) -> Any:
        content = document.get(key)
        if content is not None and not isinstance(content, kind):
            raise SuiteError(f"{key} must be {described}, got {found(content)}", path=path)
        return content

    identifier = document.get("id")
    if isinstance(identifier, bool) or not isinstance(identifier, str | int | float | None):
        raise SuiteError(f"id must be text or a number, got {found(identifier)}", path=path)
    suite_id = path.stem if identifier is None else str(identifier)
    system_prompt = value("system_prompt", str, "text")
    fields = value("fields", dict, "a mapping of case fields to templates")
    group = value("group", str, "the name of a column")
    arrange = arrangement(fields) if group is None else grouped_by(group, arrangement(fields))
    examples = value("examples", dict, "a mapping with from and n")
    root = value("attachments_from", str, "a folder's path")
    return SuiteFile(
        path=path,
        id=suite_id,
        description=value("description", str, "text"),
        target=_target(path, document.get("target")),
        targets=_targets(path, document),
        prompts=None if document.get("prompts") is None else read_prompts(document["prompts"], path.parent),
        params=_params(path, document.get("params")),
        workspace=value("workspace", dict, "a mapping"),
        solution=_solution(path, document.get("solution")),
        case_limits=value("case_limits", dict, "a mapping"),
        system_prompt=system_prompt,
        cases=EvalSet.from_source(
            suite_id,
            _cases(path, document.get("cases"), arrange, lines, root),
            system_prompt,
            None if examples is None else read_examples(path, examples),
        ),
        scorers=value("scorers", list, "a list") or [],
        run=value("run", dict, "a mapping") or {},
        prices=value("prices", dict, "a mapping") or {},
        gate=value("gate", dict, "a mapping") or {},
        hooks=value("hooks", list, "a list") or [],
        by=value("by", list, "a list of metadata keys") or [],
        run_metrics=value("run_metrics", list, "a list") or [],
    )


def _solution(path: Path, solution: Any) -> str | dict[str, Any] | None:
    if solution is None or isinstance(solution, str | dict):
        return solution
    raise SuiteError(f"solution must be a path, or a mapping with `patch`, got {found(solution)}", path=path)


def _target(path: Path, target: Any, where: str = "target") -> str | dict[str, Any] | None:
    if isinstance(target, str) or (isinstance(target, dict) and len(target) == 1):
        return target
    if target is None and where == "target":
        return None
    raise SuiteError(f"{where} must be a name or a mapping with one key, got {found(target)}", path=path)


def _targets(path: Path, document: dict[Any, Any]) -> dict[str, Any] | None:
    targets = document.get("targets")
    if targets is None:
        return None
    if document.get("target") is not None:
        raise SuiteError("has target and targets: give one of them", path=path)
    if not isinstance(targets, dict) or not targets:
        raise SuiteError(f"targets must be a mapping of names to targets, got {found(targets)}", path=path)
    return {str(name): _target(path, target, f"targets.{name}") for name, target in targets.items()}


def _params(path: Path, params: Any) -> dict[str, list[Any]] | None:
    if params is None:
        return None
    if not isinstance(params, dict) or not params:
        raise SuiteError(f"params must be a mapping of parameters to lists of values, got {found(params)}", path=path)
    for name, values in params.items():
        if not isinstance(values, list) or not values:
            message = f"params.{name} must be a list of values, such as [0, 0.7], got {found(values)}"
            raise SuiteError(message, path=path)
        if name in ("target", "prompt"):
            raise SuiteError(f"params.{name}: a parameter cannot be called like another axis", path=path)
    return {str(name): values for name, values in params.items()}


def _cases(path: Path, cases: Any, arrange: Arrange, lines: list[int], attachments_from: str | None) -> Source:
    root = None if attachments_from is None else path.parent / attachments_from
    if root is not None and not root.is_dir():
        raise SuiteError(f"attachments_from is not a folder: {root}", path=path)
    if cases is None:
        raise SuiteError("has no cases: set `cases` to a list or to the path of a file, such as .jsonl", path=path)
    if isinstance(cases, list):
        folder = AttachmentFolder(root or path.parent)
        return MemorySource(
            cases, arrange=None if arrange is by_name else arrange, path=path, lines=lines, folder=folder
        )
    if isinstance(cases, dict) and list(cases) == ["hf"] and isinstance(cases["hf"], dict):
        folder = AttachmentFolder(root or path.parent, (root or path.parent,))
        return HuggingFaceSource(path, cases["hf"], arrange, folder)
    if isinstance(cases, dict) and (task_format := next((name for name in FORMATS if name in cases), None)):
        return MemorySource(partial(_tasks, path, task_format, cases), path=path, folder=AttachmentFolder(path.parent))
    if not isinstance(cases, str):
        known = ", ".join(("hf", *FORMATS))
        message = f"cases must be a list, a file's path, or a mapping with one of {known}, got {found(cases)}"
        raise SuiteError(message, path=path)
    place = path.parent / cases
    within = (place.parent, path.parent) if root is None else (root,)
    try:
        return file_source(place, arrange, AttachmentFolder(root or place.parent, within))
    except SuiteError as error:
        if error.path is not None:
            raise
        raise SuiteError(str(error), path=path) from error


def _tasks(path: Path, task_format: str, given: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The tasks of another tool, as cases."""
    options = ("skip_containers",) if task_format == "harbor" else ()
    reject_unknown(given, (task_format, *options), "cases", file=path)
    if not isinstance(given[task_format], str):
        raise SuiteError(f"cases.{task_format} must be a path, got {found(given[task_format])}", path=path)
    place = path.parent / given[task_format]
    if task_format == "harbor":
        return harbor_cases(place, skip_containers=given.get("skip_containers") is True)
    return swebench_cases(place)


def _load(path: Path, kind: type[yaml.Node] = yaml.MappingNode) -> tuple[Any, list[int]]:
    """Load a suite file's mapping, or a list of cases, and the line that each case starts on."""
    with open_file(path) as file:
        content = file.read()
    try:
        return _document(path, content.decode("utf-8-sig"), kind)
    except SuiteError:
        raise
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise SuiteError(f"is not UTF-8: byte {content[error.start]:#04x}", path=path, line=line) from error
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        message = f"is not valid YAML: {getattr(error, 'problem', None) or error}"
        raise SuiteError(message, path=path, line=mark.line + 1 if mark else None) from error
    except (ValueError, TypeError) as error:  # a scalar that does not fit its tag: `!!int x`
        raise SuiteError(f"is not valid YAML: {error}", path=path) from error


def load_list(path: Path) -> tuple[list[Any], list[int]]:
    """Load a YAML file that is a list, and the line that each item starts on."""
    rows, lines = _load(path, yaml.SequenceNode)
    return rows, lines


def _document(path: Path, text: str, kind: type[yaml.Node]) -> tuple[Any, list[int]]:
    _refuse_depth(path, text)
    loader = _SuiteLoader(text)
    try:
        root = loader.get_single_node()
        if not isinstance(root, kind):
            is_suite = kind is yaml.MappingNode
            wanted = "a mapping with keys such as target, cases and scorers" if is_suite else "a list of cases"
            hint = "; steelyard init writes a suite to start from" if is_suite and root is None else ""
            raise SuiteError(f"{'is empty: it ' if root is None else ''}must be {wanted}{hint}", path=path)
        _refuse_expansion(path, root)
        for line, key in _repeated_keys(root):
            raise SuiteError(f"the key {key!r} is duplicated in one mapping", path=path, line=line)
        if isinstance(root, yaml.SequenceNode):
            return loader.construct_document(root), [item.start_mark.line + 1 for item in root.value]
        assert isinstance(root, yaml.MappingNode)
        _expand(path, root, loader)
        lines = [
            item.start_mark.line + 1
            for key, value in root.value
            if key.value == "cases" and isinstance(value, yaml.SequenceNode)
            for item in value.value
        ]
        return loader.construct_document(root), lines
    finally:
        loader.dispose()


def _expand(path: Path, root: yaml.MappingNode, loader: _SuiteLoader) -> None:
    """Replace `${NAME}` and `${NAME:-default}` by what the environment has; `$${` is a plain `${`.

    A plain value is then read as YAML, so that `parallelism: ${N:-5}` is a number; a quoted one stays text.
    """
    for key, value in root.value:
        inline = key.value == "cases" and isinstance(value, yaml.SequenceNode)
        for node in _scalars(value) if key.value in _EXPANDED and not inline else ():
            if "${" not in node.value:
                continue
            line = node.start_mark.line + 1
            node.value = _variable.sub(partial(_value_of, path, line), node.value)
            if not node.style:  # plain
                node.tag = loader.resolve(yaml.ScalarNode, node.value, (True, False))  # type: ignore[no-untyped-call]


def _value_of(path: Path, line: int, match: re.Match[str]) -> str:
    if match[0] == "$$":
        return "$"
    name, default = match[1], match[3]
    if name is None:
        message = f"{match[0]!r} is not a variable: write ${{NAME}} or ${{NAME:-default}}, or $${{ for the characters"
        raise SuiteError(message, path=path, line=line)
    value = os.environ.get(name)
    if value or (value is not None and match[2] is None):
        return value
    if default is None:
        message = f"${{{name}}} is not set: set it in the environment, or give a default, ${{{name}:-…}}"
        raise SuiteError(message, path=path, line=line)
    return default


def _scalars(root: yaml.Node) -> Iterator[yaml.ScalarNode]:
    waiting, visited = [root], set()
    while waiting:
        node = waiting.pop()
        if id(node) in visited:
            continue
        visited.add(id(node))
        if isinstance(node, yaml.ScalarNode):
            yield node
        elif isinstance(node, yaml.SequenceNode):
            waiting.extend(node.value)
        elif isinstance(node, yaml.MappingNode):
            waiting.extend(value for _, value in node.value)


def _set(document: dict[Any, Any], setting: str) -> None:
    """Set one value of a suite: `key.path=value`, the value in YAML; a number is a place in a list."""
    place, equals, text = setting.partition("=")
    keys = place.split(".")
    if not equals or not all(keys):
        raise ConfigurationError(f"--set takes key.path=value, such as run.parallelism=5, got {setting!r}")
    try:
        value = yaml.load(text, Loader=_SuiteLoader)
    except yaml.YAMLError as error:
        raise ConfigurationError(f"--set {place}: the value is not valid YAML: {text!r}") from error
    node: Any = document
    for depth, key in enumerate(keys[:-1]):
        node = _inner(node, key, ".".join(keys[: depth + 1]))
    last = keys[-1]
    if isinstance(node, list):
        node[_place_in(node, last, place)] = value
    elif isinstance(node, dict):
        node[last] = value
    else:
        raise ConfigurationError(f"--set {place}: {'.'.join(keys[:-1])} is {found(node)}, which has no parts")


def _inner(node: Any, key: str, place: str) -> Any:
    if isinstance(node, list):
        return node[_place_in(node, key, place)]
    if not isinstance(node, dict):
        raise ConfigurationError(f"--set {place}: what is there is {found(node)}, which has no parts")
    if node.get(key) is None:
        node[key] = {}
    return node[key]


def _place_in(items: list[Any], key: str, place: str) -> int:
    if not key.isdecimal() or int(key) >= len(items):
        raise ConfigurationError(f"--set {place}: {key!r} is no place in a list of {len(items)}: the first is 0")
    return int(key)


def _refuse_depth(path: Path, text: str) -> None:
    """Refuse nesting so deep that libyaml's composer, which recurses in C, would crash."""
    depth = 0
    for event in yaml.parse(text, Loader=_BaseLoader):
        if isinstance(event, yaml.CollectionStartEvent):
            depth += 1
            if depth > MAX_DEPTH:
                mark = event.start_mark
                message = f"is nested too deeply: more than {MAX_DEPTH} levels"
                raise SuiteError(message, path=path, line=mark.line + 1 if mark else None)
        elif isinstance(event, yaml.CollectionEndEvent):
            depth -= 1


def _refuse_expansion(path: Path, root: yaml.Node) -> None:
    """Refuse aliases that stand for very much, or for themselves: written out they would fill the memory."""
    sizes: dict[int, int] = {}
    depths: dict[int, int] = {}
    entered: set[int] = set()
    waiting: list[yaml.Node] = [root]
    while waiting:
        node = waiting[-1]
        if id(node) in sizes:
            waiting.pop()
            continue
        parts = _parts(node)
        if id(node) not in entered:
            entered.add(id(node))
            for part in parts:
                if id(part) in entered and id(part) not in sizes:
                    raise SuiteError("has an alias that contains itself", path=path, line=part.start_mark.line + 1)
                waiting.append(part)
            continue
        waiting.pop()
        sizes[id(node)] = 1 + sum(sizes[id(part)] for part in parts)
        depths[id(node)] = 1 + max((depths[id(part)] for part in parts), default=0)
        if sizes[id(node)] > max(_MAX_NODES, 10 * len(sizes)) or depths[id(node)] > MAX_DEPTH + 1:
            message = f"has aliases that stand for more than {_MAX_NODES:,} values, or for more than {MAX_DEPTH} levels"
            raise SuiteError(message, path=path, line=node.start_mark.line + 1)


def _parts(node: yaml.Node) -> list[yaml.Node]:
    if isinstance(node, yaml.SequenceNode):
        return list(node.value)
    return [part for pair in node.value for part in pair] if isinstance(node, yaml.MappingNode) else []


def _repeated_keys(root: yaml.Node) -> Iterator[tuple[int, str]]:
    """Yield duplicated keys of mappings, with their lines; PyYAML would silently use the last.

    Checked on nodes, before merge keys (`<<`) add keys that the mapping may rightly override.
    """
    waiting, visited = [root], set()
    while waiting:
        node = waiting.pop()
        if id(node) in visited:
            continue
        visited.add(id(node))
        if isinstance(node, yaml.SequenceNode):
            waiting.extend(node.value)
        elif isinstance(node, yaml.MappingNode):
            keys: set[tuple[str, str]] = set()
            for key, value in node.value:
                if isinstance(key, yaml.ScalarNode):
                    if (key.tag, key.value) in keys:
                        yield key.start_mark.line + 1, key.value
                    keys.add((key.tag, key.value))
                waiting.append(value)


class _SuiteLoader(_BaseLoader):
    """YAML as YAML 1.2's core schema reads it: `no`, `on`, `12:30` and dates are text.

    Numbers with leading zeros stay text too, as their zeros would be lost (`id: 007`).
    """

    yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012 - PyYAML's own way to leave out 1.1's rules


def _integer(loader: yaml.SafeLoader, node: yaml.ScalarNode) -> int:
    text = loader.construct_scalar(node)
    base = {"0x": 16, "0o": 8}.get(text[:2], 10)
    return int(text, base)


_SuiteLoader.add_implicit_resolver(_TAG + "null", re.compile(r"^(?:~|null|Null|NULL|)$"), ["~", "n", "N", ""])


_SuiteLoader.add_implicit_resolver(_TAG + "bool", re.compile(r"^(?:true|True|TRUE|false|False|FALSE)$"), list("tTfF"))


_SuiteLoader.add_implicit_resolver(
    _TAG + "int", re.compile(r"^(?:[-+]?(?:0|[1-9][0-9]*)|0o[0-7]+|0x[0-9a-fA-F]+)$"), _NUMBER_START
)


_SuiteLoader.add_implicit_resolver(
    _TAG + "float",
    re.compile(
        r"^(?:[-+]?(?:\.[0-9]+|(?:0|[1-9][0-9]*)\.[0-9]*)(?:[eE][-+]?[0-9]+)?|[-+]?(?:0|[1-9][0-9]*)[eE][-+]?[0-9]+"
        r"|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$"
    ),
    _NUMBER_START,
)


_SuiteLoader.add_implicit_resolver(_TAG + "merge", re.compile(r"^<<$"), ["<"])


_SuiteLoader.add_constructor(_TAG + "int", _integer)
