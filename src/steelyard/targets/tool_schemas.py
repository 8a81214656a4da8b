"""Tool definitions: from one API's shape to another's, and from a Python function's signature."""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal, TypeAlias

import msgspec

from steelyard.errors import ConfigurationError

ToolShape: TypeAlias = Literal["chat", "responses", "anthropic"]

_SCHEMA_KEYS = ("parameters", "input_schema")
_ANY_OBJECT: dict[str, Any] = {"type": "object", "properties": {}}


def merged_tools(shape: ToolShape, tools: Iterable[Mapping[str, Any]] | None) -> list[dict[str, Any]]:
    """The tools in an API's own shape. Of two with one name the later one stands."""
    if tools is not None and (isinstance(tools, str | Mapping) or not isinstance(tools, Iterable)):
        raise ConfigurationError(f"tools must be a list of tool definitions, got {tools!r:.200}")
    named: dict[Any, dict[str, Any]] = {}
    for number, tool in enumerate(tools or ()):
        if not isinstance(tool, Mapping):
            raise ConfigurationError(f"tools[{number}] must be a mapping, got {tool!r:.200}")
        named[tool_name(tool) or f"#{number}"] = in_shape(shape, tool)
    return list(named.values())


def tool_name(tool: Mapping[str, Any]) -> str | None:
    """The name in a definition of any shape."""
    inner = tool.get("function")
    name = inner.get("name") if isinstance(inner, Mapping) else tool.get("name")
    return name if isinstance(name, str) else None


def in_shape(shape: ToolShape, tool: Mapping[str, Any]) -> dict[str, Any]:
    """A function's definition in the wanted shape; a provider's own tool (`web_search`, say) as it is."""
    if tool.get("type", "function") not in ("function", "custom") or tool.get("format") is not None:
        return dict(tool)
    inner = tool.get("function")
    fields = dict(inner) if isinstance(inner, Mapping) else {key: tool[key] for key in tool if key != "type"}
    if "custom" in tool or not isinstance(fields.get("name"), str):
        return dict(tool)
    schema = next((fields.pop(key) for key in _SCHEMA_KEYS if key in fields), _ANY_OBJECT)
    if shape == "anthropic":
        fields.pop("strict", None)
        return {**fields, "input_schema": schema}
    if shape == "responses":
        return {"type": "function", **fields, "parameters": schema}
    return {"type": "function", "function": {**fields, "parameters": schema}}


def schema_of(name: str, function: Callable[..., Any]) -> dict[str, Any]:
    """A function as a tool: its docstring's first paragraph, its parameters, and their types where they are plain."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError) as error:
        raise ConfigurationError(f"functions[{name!r}] has no signature: give its schema in tools") from error
    hints = _hints(function)
    properties: dict[str, Any] = {}
    required = []
    for parameter in signature.parameters.values():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        if parameter.kind is parameter.POSITIONAL_ONLY:
            raise ConfigurationError(f"functions[{name!r}]: {parameter.name} cannot be given by name, as models do")
        properties[parameter.name] = _type_schema(hints.get(parameter.name, Any))
        if parameter.default is parameter.empty:
            required.append(parameter.name)
    described = (inspect.getdoc(function) or "").partition("\n\n")[0].replace("\n", " ").strip()
    schema = {"type": "object", "properties": properties, "required": required}
    return {"name": name, **({"description": described} if described else {}), "parameters": schema}


def _hints(function: Callable[..., Any]) -> dict[str, Any]:
    try:
        return typing.get_type_hints(function)
    except Exception:  # noqa: BLE001 - an annotation may name anything; without types the model sees names alone
        return {}


def _type_schema(hint: Any) -> dict[str, Any]:
    try:
        return {} if hint is Any else msgspec.json.schema(hint)
    except (TypeError, NotImplementedError):
        return {}
