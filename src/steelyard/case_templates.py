"""Sandboxed Jinja templates over a case: the words of a program's command line, its environment, paths.

A template sees the case (`{{ id }}`, `{{ prompt }}`, `{{ metadata.x }}`) and what its user adds, such as
`{{ workspace }}`. Only templates are evaluated, never the data. What a case is compared with is left out: a program
must not be told the expected answer.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

from steelyard.errors import ConfigurationError, suggestion
from steelyard.records import EvalCase

CASE_NAMES = ("id", "prompt", "messages", "system_prompt", "tools", "metadata")
"""What every template sees of a case."""


class CaseTemplate:
    """A text with `{{ … }}` in it. `where` names it in messages; `names` are those it may use besides the case's."""

    def __init__(self, source: str, where: str, names: Collection[str] = ()) -> None:
        if not isinstance(source, str):
            raise ConfigurationError(f"{where} must be text, got {source!r}")
        if "\0" in source:
            raise ConfigurationError(f"{where} must not contain NUL characters")
        self.source = source
        self._where = where
        self._names = tuple(names)
        self._render: Callable[..., Any] | None = None
        self._is_path = False
        if "{{" in source or "{%" in source or "{#" in source:
            self._render = self._compiled(source)

    def __reduce__(self) -> tuple[Any, ...]:
        return (type(self), (self.source, self._where, self._names))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.source!r})"

    @property
    def is_constant(self) -> bool:
        """Whether it is the same text for every case."""
        return self._render is None

    def render(self, case: EvalCase, **more: Any) -> str:
        """The text for a case; ConfigurationError where it cannot be filled in."""
        value = self._evaluate(case, more)
        text = value if isinstance(value, str) else str(value)
        if "\0" in text:
            raise ConfigurationError(f"{self._where} has a NUL character for case {case.id!r:.100}")
        return text

    def _evaluate(self, case: EvalCase, more: Mapping[str, Any]) -> Any:
        if self._render is None:
            return self.source
        known = {name: getattr(case, name) for name in CASE_NAMES}
        known["prompt"] = known["prompt"] or ""
        try:
            return self._render({**known, **more})
        except ConfigurationError:
            raise
        except Exception as error:  # a filter may raise anything
            message = f"{self._where} cannot be filled in for case {case.id!r:.100}: {error}"
            raise ConfigurationError(message) from error

    def _compiled(self, source: str) -> Callable[..., Any]:
        from jinja2 import TemplateSyntaxError, meta

        environment = self._environment()
        try:
            used = meta.find_undeclared_variables(environment.parse(source))
            compiled = environment.from_string(source)
        except TemplateSyntaxError as error:
            raise ConfigurationError(f"{self._where} is not a template: {error} in {source!r}") from error
        known = (*CASE_NAMES, *self._names)
        for name in sorted(used):
            if name not in known:
                raise ConfigurationError(f"{self._where} uses the unknown name {name!r}; {suggestion(name, known)}")
        render: Callable[..., Any] = compiled.render
        return render

    def _environment(self) -> Any:
        from jinja2 import StrictUndefined
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        return ImmutableSandboxedEnvironment(
            undefined=StrictUndefined, keep_trailing_newline=True, finalize=self._finalize
        )

    def _finalize(self, value: Any) -> Any:
        """What an expression yields: null is empty, and booleans are written as JSON has them."""
        if value is None:
            return ""
        return {True: "true", False: "false"}[value] if isinstance(value, bool) else value


class PathTemplate(CaseTemplate):
    """A template of a path: what a case fills in can only name things below the folder that the template names."""

    def _finalize(self, value: Any) -> Any:
        text = str(super()._finalize(value))
        if not text or text.startswith("/") or any(part in ("", ".", "..") for part in text.split("/")):
            raise ConfigurationError(
                f"{self._where}: {text!r:.100} in a path could lead elsewhere: it must be a name, or names joined by /"
            )
        return text

    def render(self, case: EvalCase, **more: Any) -> str:
        """The path for a case; ConfigurationError for one that would lead out of the folder that the template names."""
        text = super().render(case, **more)
        if text.split("/").count("..") != _literal_parents(self.source) or (
            text.startswith("/") and not self.source.startswith("/")
        ):
            raise ConfigurationError(f"{self._where}: the path {text!r:.100} of case {case.id!r:.100} leads elsewhere")
        return text


class ValueTemplate(CaseTemplate):
    """A template that is one `{{ expression }}` and yields its value: a mapping, a list, a number."""

    def _compiled(self, source: str) -> Callable[..., Any]:
        inner = source.strip()
        if not (inner.startswith("{{") and inner.endswith("}}")) or inner.count("{{") != 1:
            raise ConfigurationError(f"{self._where} must be one expression, such as {{{{ metadata.x }}}}")
        super()._compiled(source)  # for its checks
        compiled: Callable[..., Any] = self._environment().compile_expression(
            inner[2:-2].strip("-+ "), undefined_to_none=False
        )
        return compiled

    def value(self, case: EvalCase, **more: Any) -> Any:
        """The value for a case; ConfigurationError where it has none."""
        from jinja2 import Undefined

        value = self._evaluate(case, more)
        if isinstance(value, Undefined):
            raise ConfigurationError(f"{self._where}: case {case.id!r:.100} has no such value: {self.source}")
        return value


def _literal_parents(source: str) -> int:
    """How many `..` a template's own text has; those within expressions do not count."""
    outside, rest = "", source
    while rest:
        before, found, rest = rest.partition("{{")
        outside += before + ("x" if found else "")
        rest = rest.partition("}}")[2] if found else rest
    return outside.split("/").count("..")
