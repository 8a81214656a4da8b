"""A row of a file, with whatever columns it has, made into an EvalCase; or a BadCase that says why not."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from copy import copy
from math import isfinite
from reprlib import Repr
from typing import Any, NamedTuple, NoReturn

import msgspec

from steelyard.errors import nearest
from steelyard.records import EvalCase
from steelyard.suite.identity import BadCase

CASE_FIELDS: tuple[str, ...] = EvalCase.__struct_fields__
JSON_FIELDS = ("messages", "tools", "expected_trajectory", "metadata")
"""The fields whose text, in a CSV cell or from a template, is JSON."""

SHOWN = 60  # characters of a value that an error quotes

_short = Repr()  # unlike repr(), safe for what is huge or deeply nested
_short.maxlevel, _short.maxstring, _short.maxother = 3, SHOWN, SHOWN


class _Row(msgspec.Struct, forbid_unknown_fields=True, gc=False):
    """A row with the columns of a case and no others, of the types that they have in one."""

    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    id: str = ""
    system_prompt: str | None = None
    tools: list[dict[str, Any]] | None = None
    expected: Any = None
    expected_trajectory: Any = None
    metadata: dict[str, Any] = {}


_decode_row = msgspec.json.Decoder(_Row).decode


class Columns(NamedTuple):
    """A row sorted into the values of a case's fields and the columns that are left for its metadata."""

    values: dict[str, Any]
    rest: dict[str, Any]


Arrange = Callable[[dict[str, Any]], Columns]


def by_name(row: dict[str, Any]) -> Columns:
    """Columns named like a case's fields are these; all others are metadata."""
    values = {name: row[name] for name in CASE_FIELDS if name in row}
    return Columns(values, {name: value for name, value in row.items() if name not in values})


def from_cells(columns: Columns) -> Columns:
    """The values of a CSV row: an empty cell is an absent value, and some fields hold JSON."""
    values = {name: value for name, value in columns.values.items() if value != ""}
    for name in JSON_FIELDS:
        if isinstance(values.get(name), str):
            values[name] = json_text(values[name], name)
    return Columns(values, columns.rest)


def case_from(columns: Columns) -> EvalCase:
    """The case in a row, checked."""
    values = dict(columns.values)
    own = values.pop("metadata", None)
    if own is not None and not isinstance(own, dict):
        raise BadCase(f"metadata must be an object, got {found(own)}")
    metadata = {**columns.rest, **own} if own else columns.rest
    return checked(EvalCase(**values, metadata=metadata))


def plain_case(text: bytes) -> EvalCase | None:
    """The case in a row of JSON that has a case's columns and no others; None where there is more to be looked at."""
    try:
        row = _decode_row(text)
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return None
    if row.prompt is None and not row.messages:
        return None
    return EvalCase(
        id=row.id,
        prompt=row.prompt,
        messages=row.messages,
        system_prompt=row.system_prompt,
        tools=row.tools,
        expected=row.expected,
        expected_trajectory=row.expected_trajectory,
        metadata=row.metadata,
    )


def checked(case: EvalCase) -> EvalCase:
    """The case, its id as text, if every field holds what it may."""
    plain = type(case.id) is type(case.prompt) is str and case.id.isascii() and type(case.metadata) is dict
    if (
        plain
        and case.messages is None is case.tools
        and (case.system_prompt is None or type(case.system_prompt) is str)
    ):
        return case  # as nearly all are: looked at once, not field by field
    if type(case.id) is not str:
        case = copy(case)
        case.id = _id_text(case.id)
    if not case.id.isascii():
        _check_unicode(case.id)
    for name in ("prompt", "system_prompt"):
        value = getattr(case, name)
        if value is not None and not isinstance(value, str):
            raise BadCase(f"{name} must be text, got {found(value)}")
    _check_objects("messages", case.messages)
    _check_objects("tools", case.tools)
    if not isinstance(case.metadata, dict):
        raise BadCase(f"metadata must be an object, got {found(case.metadata)}")
    if case.prompt is None and not case.messages:
        raise BadCase("has neither prompt nor messages")
    return case


def _id_text(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise BadCase(f"id must be text or a number, got {found(value)}")
    if isinstance(value, float) and not isfinite(value):
        raise BadCase(f"id must be text or a number, got {value}")
    return str(value)


def _check_unicode(case_id: str) -> None:
    """Refuse an id that cannot be written as UTF-8: its records could never be found again."""
    try:
        case_id.encode()
    except UnicodeEncodeError:
        raise BadCase(f"id must be Unicode text, got {case_id!r} with a lone surrogate") from None


def _check_objects(name: str, value: Any) -> None:
    if value is None:
        return
    if not isinstance(value, list):
        raise BadCase(f"{name} must be a list of objects, got {found(value)}")
    for place, item in enumerate(value):
        if not isinstance(item, dict):
            raise BadCase(f"{name} must be a list of objects, got {found(item)} as {name}[{place}]")


def described(error: BadCase, row: Mapping[str, Any]) -> str:
    """What is wrong with a row, the columns it has, and the one that may be meant."""
    names = [str(name) for name in row]
    shown = ", ".join(names[:20]) + (f" and {len(names) - 20} more" if len(names) > 20 else "")
    message = f"{error}; columns: {shown or 'none'}"
    for name in names:
        meant = None if name in CASE_FIELDS else nearest(name, CASE_FIELDS)
        if meant and meant not in names:
            return f"{message}; is {name!r} meant as {meant!r}? Rename it, or map it with `fields`"
    return message if "prompt" in names else f"{message}; `fields` maps other columns"


def found(value: Any) -> str:
    """A value as an error shows it: its JSON kind and how it begins."""
    kinds = {bool: "a boolean", int: "a number", float: "a number", str: "text", list: "a list", dict: "an object"}
    if value is None:
        return "null"
    return f"{kinds.get(type(value), type(value).__name__)} ({_short.repr(value)})"


def json_text(text: str | bytes, name: str = "") -> Any:
    """The value that JSON text stands for; BadCase where it is not JSON, or holds NaN or an infinity."""
    try:
        return msgspec.json.decode(text)
    except RecursionError:
        raise BadCase(f"{name} is nested too deeply".strip()) from None
    except (msgspec.DecodeError, UnicodeError):  # the stricter decoder; lone surrogates are its only false alarm
        return _json_with_surrogates(text, name)


def _json_with_surrogates(text: str | bytes, name: str) -> Any:
    try:
        plain = text if isinstance(text, str) else text.decode("utf-8")
        return json.loads(plain.rstrip(), parse_constant=_no_constant, parse_float=_finite)
    except UnicodeDecodeError as error:
        raise BadCase(f"is not UTF-8: byte {error.object[error.start]:#04x} at byte {error.start + 1}") from None
    except json.JSONDecodeError as error:
        raise BadCase(f"{name} is not valid JSON: {error.msg} at column {error.pos + 1}".strip()) from None
    except RecursionError:
        raise BadCase(f"{name} is nested too deeply".strip()) from None
    except ValueError as error:
        raise BadCase(f"{name} is not valid JSON: {error}".strip()) from None


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _finite(text: str) -> float:
    number = float(text)
    if not isfinite(number):
        raise ValueError(f"the number {text[:SHOWN]} is out of range")
    return number
