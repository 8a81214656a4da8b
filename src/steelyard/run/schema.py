"""JSON Schemas for editors and other programs: of a suite file, of a record, and of metrics.json.

Everything is derived from the types that read and write these files, so that a new key, option, target or scorer is in
the schema as soon as it exists.
"""

from __future__ import annotations

import collections.abc
import inspect
import types
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import msgspec

from steelyard.plugins import BUILT_IN, Kind, find
from steelyard.records import CaseLimits, EvalCase, Record
from steelyard.run.config import EngineChoice, Gate
from steelyard.run.options import OptionField, RunOptions, options_of
from steelyard.scoring.base import LIMIT_NAMES
from steelyard.stats.metrics import Metrics
from steelyard.suite.prompts import EXAMPLE_KEYS, PROMPT_KEYS
from steelyard.suite.suite_file import KEYS
from steelyard.workspace.template import Workspace

Schema = dict[str, Any]

_DRAFT = "https://json-schema.org/draft/2020-12/schema"
_PLAIN: Mapping[Any, Schema] = {
    str: {"type": "string"},
    int: {"type": "integer"},
    float: {"type": "number"},
    bool: {"type": "boolean"},
    types.NoneType: {"type": "null"},
}
_NOT_IN_A_FILE = ("folder", "function", "transport")
"""Arguments that a suite file's reader gives by itself."""
_VARIABLE: Schema = {"type": "string", "pattern": r"\$\{"}
"""`${NAME}` may be written in place of a number."""
_MAPPING: Schema = {"type": "object"}
_ANYTHING: Schema = {}


def suite_schema() -> Schema:
    """The schema of a suite file."""
    keys: dict[str, Schema] = {
        "id": {"type": ["string", "number"], "description": "The suite's name, in results and folders."},
        "description": {"type": "string", "description": "For readers; not used."},
        "target": _named("targets", "What answers."),
        "targets": _described(_each(_named("targets", "A target.")), "Of a matrix: targets by name, not `target`."),
        "prompts": _described(_each(_prompt()), "Of a matrix: prompts by name."),
        "params": _described(_each({"type": "array", "minItems": 1}), "Of a matrix: the values of each parameter."),
        "run_metrics": {
            "type": "array",
            "items": _named("run_metrics", "A figure over all records."),
            "description": "Figures of the whole run.",
        },
        "by": _described(_of_type(str | list[str]), "Metadata keys whose values are slices."),
        "workspace": _workspace(),
        "solution": _described({"type": ["string", "object"]}, "Reference solutions, for `steelyard check`."),
        "case_limits": _case_limits(),
        "system_prompt": {"type": "string", "description": "For every case that does not set one."},
        "cases": {
            "description": "A list of cases, the path of a file, or a mapping such as `hf`.",
            "anyOf": [{"type": "array", "items": _case()}, {"type": "string"}, _MAPPING],
        },
        "fields": _described(
            {"type": "object", "additionalProperties": {"type": "string"}}, "Case fields as templates over columns."
        ),
        "group": {"type": "string", "description": "The column that says which cases belong together."},
        "examples": _described(_closed(dict.fromkeys(EXAMPLE_KEYS, _ANYTHING)), "Few-shot examples."),
        "attachments_from": {"type": "string", "description": "The folder of the files that cases attach."},
        "scorers": {"type": "array", "items": _named("scorers", "A scorer."), "description": "Who rates the answers."},
        "run": _described(
            _closed({**_options(RunOptions), **_options(EngineChoice)}), "Options of the run; flags override them."
        ),
        "prices": _described(_MAPPING, "What tokens cost, by model."),
        "gate": _gate(),
        "hooks": {"type": "array", "items": _named("hooks", "A hook."), "description": "Code called during a run."},
    }
    described = {key: keys.get(key, _ANYTHING) for key in KEYS}
    return {
        "$schema": _DRAFT,
        "title": "Steelyard suite",
        **_closed(described),
        "required": ["cases"],
    }


def metrics_schema() -> Schema:
    """The schema of metrics.json."""
    return {"$schema": _DRAFT, "title": "Steelyard metrics", **msgspec.json.schema(Metrics)}


def record_schema() -> Schema:
    """The schema of a line of outputs.jsonl."""
    return {"$schema": _DRAFT, "title": "Steelyard record", **msgspec.json.schema(Record)}


SCHEMAS: Mapping[str, Callable[[], Schema]] = {
    "suite": suite_schema,
    "metrics": metrics_schema,
    "record": record_schema,
}


def _closed(properties: Mapping[str, Schema]) -> Schema:
    return {"type": "object", "properties": dict(properties), "additionalProperties": False}


def _each(schema: Schema) -> Schema:
    """A mapping of any names."""
    return {"type": "object", "minProperties": 1, "additionalProperties": schema}


def _prompt() -> Schema:
    return {"anyOf": [{"type": "string"}, _closed({key: {"type": "string"} for key in PROMPT_KEYS})]}


def _described(schema: Schema, text: str) -> Schema:
    return {"description": text, **schema}


def _named(kind: Kind, text: str) -> Schema:
    """A name, or a mapping from one name to its arguments. Names of plugins are allowed, with any arguments."""
    own = BUILT_IN[kind]
    arguments = {name: _arguments(kind, name) for name in own}
    one = {"type": "object", "minProperties": 1, "maxProperties": 1, "properties": arguments}
    known: Schema = {"type": "string", "examples": list(own)}
    return {"description": text, "anyOf": [known, one]}


def _arguments(kind: Kind, name: str) -> Schema:
    """What a built-in target, scorer or hook takes: its own short form where it has one, or its arguments."""
    made = find(kind, name)
    schema: Schema = {"description": _first_line(made)}
    if name == "python":
        return schema | {"anyOf": [{"type": "string", "description": "file.py:Name or package.module:Name"}, _MAPPING]}
    properties = {
        argument: _of_type(hint) for argument, hint in _signature(made).items() if argument not in _NOT_IN_A_FILE
    }
    if kind == "scorers":
        properties |= {limit: _ANYTHING for limit in LIMIT_NAMES if limit not in properties}
    if name == "judge":
        properties |= {"models": {"type": "array", "items": {"type": "string"}}}
    mapping = {**_closed(properties), "additionalProperties": True} if kind == "scorers" else _closed(properties)
    short: list[Schema] = [{"type": "null"}]
    if name in ("command", "agent", "answers"):
        short.append({"type": ["string", "array"]})
    return schema | {"anyOf": [mapping, *short]}


def _signature(made: Any) -> dict[str, Any]:
    """The arguments of a class or function, each with its type."""
    function = made.__init__ if inspect.isclass(made) else made
    try:
        hints = get_type_hints(function)
    except (NameError, TypeError):  # a type that is imported for type checkers alone
        hints = {}
    by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    parameters = inspect.signature(made).parameters.values()
    return {one.name: hints.get(one.name, Any) for one in parameters if one.kind in by_name}


def _workspace() -> Schema:
    properties = {
        "from" if name == "template" else name: _of_type(hint)
        for name, hint in _signature(Workspace).items()
        if name not in _NOT_IN_A_FILE
    }
    return _described(_closed(properties), "A folder for each attempt at a case.")


def _case_limits() -> Schema:
    hints = get_type_hints(CaseLimits)
    properties = {
        name: {"type": ["number", "string", "null"]} for name in hints if name in CaseLimits.__struct_fields__
    }
    return _described(_closed(properties), "Limits of each attempt: an outcome when reached, and scored.")


def _case() -> Schema:
    hints = get_type_hints(EvalCase)
    properties = {name: _of_type(hints[name]) for name in EvalCase.__struct_fields__ if name not in ("id", "limits")}
    properties |= {"id": {"type": ["string", "number"]}, "limits": _case_limits()}
    return {"anyOf": [_closed(properties), {"type": "object", "description": "With `fields`: any columns."}]}


def _gate() -> Schema:
    hints = get_type_hints(Gate)
    properties = {name: _of_type(hints[name]) for name in Gate.__struct_fields__}
    return _described(_closed(properties), "What a run must reach for exit code 0.")


def _options(kind: type[msgspec.Struct]) -> dict[str, Schema]:
    return {name: _option(field) for name, field in options_of(kind).items() if field.option.in_suite}


def _option(field: OptionField) -> Schema:
    schema = _of_type(field.type)
    if field.option.parse is not None:  # it is read from text too: `2m`, `60/min`, `auto`
        schema = {"anyOf": [schema, {"type": ["string", "number"]}]}
    if isinstance(field.default, (str, int, float, bool)):
        schema = {**schema, "default": field.default}
    return _described(schema, field.option.help)


def _of_type(hint: Any) -> Schema:
    """The schema of a Python type; anything, where JSON has no word for it."""
    origin, parts = get_origin(hint), get_args(hint)
    if hint in _PLAIN:
        return dict(_PLAIN[hint]) if hint not in (int, float, bool) else {"anyOf": [_PLAIN[hint], _VARIABLE]}
    if origin is Annotated:
        return _of_type(parts[0])
    if origin is Literal:
        return {"enum": list(parts)}
    if origin in (Union, types.UnionType):
        found = [_of_type(part) for part in parts]
        return _ANYTHING if _ANYTHING in found else {"anyOf": found}
    if origin in (list, tuple, collections.abc.Sequence, collections.abc.Iterable):
        inner = [part for part in parts if part is not Ellipsis]
        return {"type": "array", "items": _of_type(inner[0])} if inner else {"type": "array"}
    if origin in (dict, collections.abc.Mapping):
        return {"type": "object", "additionalProperties": _of_type(parts[1])} if len(parts) == 2 else dict(_MAPPING)
    return dict(_ANYTHING)


def _first_line(made: Any) -> str:
    return (inspect.getdoc(made) or "").partition("\n")[0]
