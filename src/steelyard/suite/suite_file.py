"""Suite files: cases, target, scorers and options in one YAML document, read and checked."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from steelyard.attachments import AttachmentFolder
from steelyard.errors import ConfigurationError, SuiteError, reject_unknown
from steelyard.suite.evalset import EvalSet, arrangement
from steelyard.suite.sources import (
    Arrange,
    CsvSource,
    JsonlSource,
    MemorySource,
    Source,
    by_name,
    found,
    grouped_by,
    open_file,
)

if TYPE_CHECKING:
    from yaml import SafeLoader as _BaseLoader
else:
    _BaseLoader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # libyaml's, where available

KEYS = (
    "id", "description", "target", "workspace", "solution", "case_limits", "system_prompt", "cases", "fields", "group",
    "attachments_from", "scorers", "run", "prices", "gate",
)  # fmt: skip
MAX_DEPTH = 100  # levels of nesting
_MAX_NODES = 1_000_000
"""Values that a suite file's aliases may stand for, written out; more where the file itself has as many."""
ENDINGS = {".jsonl": JsonlSource, ".csv": CsvSource}

_TAG = "tag:yaml.org,2002:"
_NUMBER_START = list("-+.0123456789")


@dataclass(frozen=True, kw_only=True)
class SuiteFile:
    """A suite file's content. What is not about its cases is as written, read by `run.config`."""

    path: Path
    id: str
    description: str | None = None
    target: str | dict[str, Any] | None = None
    workspace: dict[str, Any] | None = None
    solution: str | None = None
    """Where the cases' reference solutions are, for `steelyard check`."""
    case_limits: dict[str, Any] | None = None
    system_prompt: str | None = None
    cases: EvalSet
    scorers: list[Any] = field(default_factory=list)
    run: dict[str, Any] = field(default_factory=dict)
    prices: dict[str, Any] = field(default_factory=dict)
    gate: dict[str, Any] = field(default_factory=dict)


def read_suite_file(path: str | Path) -> SuiteFile:
    """Read a suite file and check its keys; SuiteError names the place of a mistake."""
    path = Path(path)
    document, lines = _load(path)
    reject_unknown(document, KEYS, file=path)
    try:
        return _suite_file(path, document, lines)
    except SuiteError:
        raise
    except ConfigurationError as error:
        raise SuiteError(str(error), path=path) from error


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
    root = value("attachments_from", str, "a folder's path")
    return SuiteFile(
        path=path,
        id=suite_id,
        description=value("description", str, "text"),
        target=_target(path, document.get("target")),
        workspace=value("workspace", dict, "a mapping"),
        solution=value("solution", str, "the path of a folder or a patch"),
        case_limits=value("case_limits", dict, "a mapping"),
        system_prompt=system_prompt,
        cases=EvalSet.from_source(suite_id, _cases(path, document.get("cases"), arrange, lines, root), system_prompt),
        scorers=value("scorers", list, "a list") or [],
        run=value("run", dict, "a mapping") or {},
        prices=value("prices", dict, "a mapping") or {},
        gate=value("gate", dict, "a mapping") or {},
    )


def _target(path: Path, target: Any) -> str | dict[str, Any] | None:
    if target is None or isinstance(target, str) or (isinstance(target, dict) and len(target) == 1):
        return target
    raise SuiteError(f"target must be a name or a mapping with one key, got {found(target)}", path=path)


def _cases(path: Path, cases: Any, arrange: Arrange, lines: list[int], attachments_from: str | None) -> Source:
    root = None if attachments_from is None else path.parent / attachments_from
    if root is not None and not root.is_dir():
        raise SuiteError(f"attachments_from is not a folder: {root}", path=path)
    if cases is None:
        raise SuiteError("has no cases: set `cases` to a list or to the path of a .jsonl or .csv file", path=path)
    if isinstance(cases, list):
        folder = AttachmentFolder(root or path.parent)
        return MemorySource(
            cases, arrange=None if arrange is by_name else arrange, path=path, lines=lines, folder=folder
        )
    if not isinstance(cases, str):
        raise SuiteError(f"cases must be a list or a file's path, got {found(cases)}", path=path)
    source = ENDINGS.get(Path(cases).suffix.lower())
    if source is None:
        raise SuiteError(f"cases must be a {' or '.join(ENDINGS)} file, got {cases!r}", path=path)
    place = path.parent / cases
    within = (place.parent, path.parent) if root is None else (root,)
    return source(place, arrange, AttachmentFolder(root or place.parent, within))


def _load(path: Path) -> tuple[dict[Any, Any], list[int]]:
    """Load a suite file's mapping, and the line that each inline case starts on."""
    with open_file(path) as file:
        content = file.read()
    try:
        return _document(path, content.decode("utf-8-sig"))
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


def _document(path: Path, text: str) -> tuple[dict[Any, Any], list[int]]:
    _refuse_depth(path, text)
    loader = _SuiteLoader(text)
    try:
        root = loader.get_single_node()
        if not isinstance(root, yaml.MappingNode):
            raise SuiteError(f"must be a mapping with the keys {', '.join(KEYS)}", path=path)
        _refuse_expansion(path, root)
        for line, key in _repeated_keys(root):
            raise SuiteError(f"the key {key!r} is duplicated in one mapping", path=path, line=line)
        lines = [
            item.start_mark.line + 1
            for key, value in root.value
            if key.value == "cases" and isinstance(value, yaml.SequenceNode)
            for item in value.value
        ]
        return loader.construct_document(root), lines
    finally:
        loader.dispose()


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
