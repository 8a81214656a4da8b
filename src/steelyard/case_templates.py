"""Sandboxed Jinja templates over a case: the words of a program's command line, its environment, paths.

A template sees the case (`{{ id }}`, `{{ prompt }}`, `{{ metadata.x }}`) and what its user adds, such as
`{{ workspace }}`. Only templates are evaluated, never the data. What a case is compared with is left out: a program
must not be told the expected answer.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Any

from steelyard.errors import ConfigurationError, suggestion
from steelyard.records import EvalCase

if TYPE_CHECKING:
    from jinja2.sandbox import SandboxedEnvironment

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

        return bounded_environment(undefined=StrictUndefined, keep_trailing_newline=True, finalize=self._finalize)

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


MAX_TEXT = 10_000_000
"""Characters of a text, or items of a list, that one step of a template may make."""
_MAX_BITS = 10_000
_WIDTH = re.compile(r"\d{8,}")
"""A width or precision in a format that is larger than the limit."""
_WITH_SIZES = frozenset({"ljust", "rjust", "center", "zfill", "expandtabs", "indent", "batch", "slice", "tojson"})
"""Methods and filters whose numbers are sizes."""
_SIZED = (str, bytes, list, tuple)


def bounded_environment(**options: Any) -> SandboxedEnvironment:
    """A sandboxed environment whose templates cannot fill the memory in one step: `{{ "a" * 10 ** 9 }}` is refused."""
    environment: SandboxedEnvironment = _bounded_class()(**options)
    return environment


@functools.cache
def _bounded_class() -> Any:
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class BoundedEnvironment(ImmutableSandboxedEnvironment):
        intercepted_binops = frozenset({"*", "**", "%", "+"})

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            for name in (*_WITH_SIZES, "format", "replace"):
                if name in self.filters:
                    self.filters[name] = _checked(name, self.filters[name])

        def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
            _check_operands(operator, left, right)
            return super().call_binop(context, operator, left, right)

        def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805 - as jinja2 has it
            owner = getattr(__obj, "__self__", None)
            if isinstance(owner, str | bytes):
                _check_sizes(getattr(__obj, "__name__", ""), owner, (*args, *kwargs.values()))
            return super().call(__context, __obj, *args, **kwargs)

        def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
            wrapped = super().wrap_str_format(value)
            owner = getattr(value, "__self__", "")
            return None if wrapped is None else functools.partial(_format, wrapped, owner)

    return BoundedEnvironment


def _format(wrapped: Callable[..., str], owner: str, *args: Any, **kwargs: Any) -> str:
    _check_sizes("format", owner, (*args, *kwargs.values()))
    return wrapped(*args, **kwargs)


def _checked(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """The filter, called only with arguments that keep its result small."""

    @functools.wraps(function)  # with the marks by which jinja2 knows what else to pass
    def checked(*args: Any, **kwargs: Any) -> Any:
        place = next((number for number, one in enumerate(args) if isinstance(one, _SIZED)), 0)
        _check_sizes(name, args[place], (*args[place + 1 :], *kwargs.values()))
        return function(*args, **kwargs)

    return checked


def _check_operands(operator: str, left: Any, right: Any) -> None:
    numbers = [one for one in (left, right) if isinstance(one, int)]
    sized = [one for one in (left, right) if isinstance(one, _SIZED)]
    if operator == "*" and numbers and sized:
        _refuse_beyond(len(sized[0]) * numbers[0], MAX_TEXT)
    elif operator == "*" and len(numbers) == 2:
        _refuse_beyond(left.bit_length() + right.bit_length(), _MAX_BITS)
    elif operator == "**" and len(numbers) == 2:
        _refuse_beyond(left.bit_length() * right, _MAX_BITS)
    elif operator == "+" and len(sized) == 2:
        _refuse_beyond(len(left) + len(right), MAX_TEXT)
    elif operator == "%" and isinstance(left, str | bytes):
        _check_sizes("format", left, tuple(right) if isinstance(right, tuple | list) else (right,))


def _check_sizes(name: str, value: Any, args: tuple[Any, ...]) -> None:
    """Refuse a call of a method or a filter on a value whose result would be too large."""
    largest = max((one for one in args if isinstance(one, int)), default=0)
    if name in _WITH_SIZES:
        lines = value.count("\n") + 1 if name == "indent" and isinstance(value, str) else 1
        tabs = max(1, value.count("\t")) if name == "expandtabs" else 1
        _refuse_beyond(largest * lines * tabs, MAX_TEXT)
    elif name in ("format", "format_map"):
        text = value.decode("latin-1") if isinstance(value, bytes) else str(value)
        if _WIDTH.search(text) or (largest > MAX_TEXT and ("*" in text or ":{" in text)):
            _refuse_beyond(MAX_TEXT + 1, MAX_TEXT)
    elif name == "replace" and len(args) > 1 and isinstance(value, str) and isinstance(args[1], str):
        found = value.count(str(args[0])) if args[0] else len(value) + 1
        _refuse_beyond(len(value) + found * len(args[1]), MAX_TEXT)
    elif name == "join" and args and hasattr(args[0], "__len__"):
        _refuse_beyond(len(value) * len(args[0]), MAX_TEXT)


def _refuse_beyond(size: int, limit: int) -> None:
    if size > limit:
        from jinja2.exceptions import SecurityError

        raise SecurityError(f"a template may make at most {MAX_TEXT:,} characters or items in one step")
