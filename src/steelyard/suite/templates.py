"""`fields`: sandboxed Jinja templates that build a case's fields from a row's columns.

Only the templates are evaluated, never the data. This module is imported when a suite has `fields`, as
Jinja is slow to import.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from jinja2 import StrictUndefined, TemplateSyntaxError, Undefined, meta, nodes
from jinja2.sandbox import SandboxedEnvironment

from steelyard.case_templates import bounded_environment
from steelyard.errors import ConfigurationError, reject_unknown
from steelyard.suite.identity import BadCase
from steelyard.suite.sources import CASE_FIELDS, JSON_FIELDS, CaseColumns, json_text

Render = Callable[[dict[str, Any]], Any]

_SOLE_EXPRESSION = re.compile(r"\{\{[-+]?(.*?)[-+]?\}\}", re.DOTALL)
_ALTERNATIVE = {"prompt": "messages", "messages": "prompt"}


class FieldTemplates:
    """Maps a row's columns to a case's fields by templates.

    A known column without a template still maps by its name; a column that no template mentions becomes
    metadata. `prompt` and `messages` are alternatives: a template for one leaves the other's column out.
    CaseColumns whose names are no identifiers are reached as `row["the name"]`.
    """

    def __init__(self, fields: Mapping[str, Any]) -> None:
        if not isinstance(fields, Mapping) or not fields:
            raise ConfigurationError(f"fields must map case fields to templates, got {fields!r}")
        environment = bounded_environment(undefined=StrictUndefined)
        self._renders: dict[str, Render] = {}
        self._mentioned: set[str] = set()
        reject_unknown(fields, CASE_FIELDS, "fields")
        for name, source in fields.items():
            self._renders[name] = self._compile(environment, name, source)
        left_out = {_ALTERNATIVE[name] for name in fields if name in _ALTERNATIVE}
        self._by_name = [name for name in CASE_FIELDS if name not in fields and name not in left_out]

    def __call__(self, row: dict[str, Any]) -> CaseColumns:
        """Map the row's columns; BadCase where a template cannot be rendered from them."""
        values = {name: row[name] for name in self._by_name if name in row}
        rest = {name: value for name, value in row.items() if name not in values and name not in self._mentioned}
        context = {"row": row, **row}
        for name, render in self._renders.items():
            values[name] = _rendered(name, render, context)
        return CaseColumns(values, rest)

    def _compile(self, environment: SandboxedEnvironment, name: str, source: Any) -> Render:
        if not isinstance(source, str):
            raise ConfigurationError(f"fields.{name} must be a template (text), got {source!r}")
        try:
            tree = environment.parse(source)
            self._mentioned |= meta.find_undeclared_variables(tree)
            expression = _SOLE_EXPRESSION.fullmatch(source.strip()) if _is_sole_expression(tree) else None
            if expression:
                return environment.compile_expression(expression[1], undefined_to_none=False)
            render = environment.from_string(source).render
        except TemplateSyntaxError as error:
            raise ConfigurationError(f"fields.{name} is not a template: {error} in {source!r}") from error
        if name in JSON_FIELDS:
            return lambda context: json_text(render(context), name)
        return render


def _is_sole_expression(tree: nodes.Template) -> bool:
    """Whether a template is one `{{ expression }}` and nothing else, so that it yields the value itself."""
    if len(tree.body) != 1 or not isinstance(tree.body[0], nodes.Output):
        return False
    parts = tree.body[0].nodes
    return len(parts) == 1 and not isinstance(parts[0], nodes.TemplateData)


def _rendered(name: str, render: Render, context: dict[str, Any]) -> Any:
    try:
        value = render(context)
        if isinstance(value, Undefined):
            str(value)  # StrictUndefined raises here, naming the column
        return list(value) if isinstance(value, Iterator) else value
    except BadCase:
        raise
    except Exception as error:  # a filter may raise anything
        raise BadCase(f"fields.{name} cannot be filled in: {error}") from error
