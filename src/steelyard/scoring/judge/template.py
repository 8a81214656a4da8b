"""A judge's templates: sandboxed Jinja in which each `{{ … }}` leaves a slot, filled with escaped text afterwards.

While a template is rendered, no text of a case is in its output: nothing there can be mistaken for the template's
words. This module is imported when a judge is created, as Jinja is slow to import.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from jinja2 import StrictUndefined, Template, TemplateError, TemplateSyntaxError, Undefined, meta, nodes, pass_context
from jinja2.runtime import Context

from steelyard.case_templates import bounded_environment
from steelyard.errors import ConfigurationError, suggestion
from steelyard.scoring.judge.escape import fill, holds_slot_marks, slot

VARIABLES = ("question", "answer", "expected", "system_prompt", "messages", "metadata", "context")
"""What a template may use of a case and its answer."""

_TEXTS = "_texts"
_STATEMENTS = (nodes.Output, nodes.If, nodes.For, nodes.Assign, nodes.With)


class TemplateFailed(ValueError):
    """A template that cannot be filled in for a case."""


def check_template(source: object) -> None:
    """Refuse a template with bad syntax, unknown variables, or without the answer."""
    if not isinstance(source, str):
        raise ConfigurationError(f"template must be a text, got {source!r}")
    if holds_slot_marks(source):
        raise ConfigurationError("template holds a NUL character")
    try:
        _compiled(source)
        tree = _ENVIRONMENT.parse(source)
    except TemplateSyntaxError as error:
        raise ConfigurationError(f"template is not Jinja: {error.message} (line {error.lineno})") from error
    _check_statements(tree)
    used = meta.find_undeclared_variables(tree)
    for name in sorted(used - set(VARIABLES)):
        raise ConfigurationError(f"template: there is no variable {name!r}; {suggestion(name, VARIABLES)}")
    if not used & {"answer", "messages"}:
        raise ConfigurationError("template uses neither answer nor messages: the judge would not see what it judges")


def render(source: str, variables: Mapping[str, Any]) -> str:
    """Render the message with each value escaped separately; TemplateFailed when it cannot be rendered."""
    texts: list[str] = []
    try:
        message = _compiled(source).render({**variables, _TEXTS: texts})
    except TemplateError as error:
        raise TemplateFailed(f"the template cannot be filled in: {error}") from error
    except Exception as error:  # a filter may raise anything
        raise TemplateFailed(f"the template cannot be filled in: {type(error).__name__}: {error}") from error
    return fill(message, texts)


def _check_statements(tree: nodes.Template) -> None:
    """Allow only statements that write a value once: a macro's text could be written again inside another value."""
    for statement in tree.find_all(nodes.Stmt):
        if not isinstance(statement, _STATEMENTS) or getattr(statement, "recursive", False):
            kind = type(statement).__name__.lower()
            raise ConfigurationError(
                f"template: {kind} in line {statement.lineno} cannot be used here; for, if, set and with can"
            )


@pass_context
def _leave_slot(context: Context, value: Any) -> str:
    texts: list[str] = context[_TEXTS]
    texts.append(_as_text(value))
    return slot(len(texts) - 1)


def _as_text(value: Any) -> str:
    """Return a value as a judge reads it: text unchanged, anything else as JSON."""
    if isinstance(value, (str, Undefined)):
        return str(value)  # StrictUndefined raises here, naming what is missing
    if value is None:
        return "(none)"
    return json.dumps(value, ensure_ascii=False, default=str)


@lru_cache(maxsize=64)
def _compiled(source: str) -> Template:
    return _ENVIRONMENT.from_string(source)


# Jinja's globals are removed: prompts do not need `lipsum` or `cycler`, and find_undeclared_variables would call them
# unknown.
_ENVIRONMENT = bounded_environment(
    undefined=StrictUndefined, finalize=_leave_slot, trim_blocks=True, lstrip_blocks=True
)
_ENVIRONMENT.globals.clear()
