"""What the built-in scorers share: a name, a threshold, an identity made of their arguments, short reasons."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from steelyard.contracts import Identity
from steelyard.errors import ConfigurationError
from steelyard.records import Score
from steelyard.scoring.base import FunctionScorer

_SHOWN = 200
_LONGEST_REASON = 1_000


@dataclass(frozen=True, kw_only=True)
class PlainScorer:
    """A scorer whose fields are its arguments. A subclass gives `name` a default, which is also its kind.

    It passes from `threshold` on. Where there is only right (1.0) and wrong (0.0), every threshold above 0 says the
    same, and with 0 the score is a measurement that nobody fails.
    """

    name: str
    threshold: float = 0.5

    def __post_init__(self) -> None:
        check_share("threshold", self.threshold)
        if not isinstance(self.name, str) or not self.name:
            raise ConfigurationError(f"name must be a text that is not empty, got {self.name!r}")
        self._check()

    def _check(self) -> None:
        """Refuse arguments that no case could be scored with; each scorer's own."""

    def identity(self) -> Identity:
        """Its kind and every argument: whatever can change a score."""
        arguments = {field.name: _as_json(getattr(self, field.name)) for field in fields(self)}
        return {"kind": type(self).__dataclass_fields__["name"].default, **arguments}

    def _score(self, right: bool, reason: str | None = None) -> Score:
        """1.0 or 0.0; what is right needs no reason."""
        if right:
            return Score(self.name, 1.0, True)
        return Score(self.name, 0.0, self.threshold <= 0.0, _cut(reason))

    def _graded(self, value: float, reason: str | None = None) -> Score:
        return Score(self.name, value, value >= self.threshold, _cut(reason))


def check_number(name: str, value: object, *, least: float = 0.0, most: float | None = None) -> None:
    """Refuse what is not a number within its limits, saying which it was."""
    good = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not good or not least <= value or (most is not None and not value <= most):  # type: ignore[operator]
        allowed = f">= {least:g}" if most is None else f"within {least:g}..{most:g}"
        raise ConfigurationError(f"{name} must be a number {allowed}, got {value!r}")


def check_share(name: str, value: object) -> None:
    """Refuse what is not a number within 0..1."""
    check_number(name, value, most=1.0)


def check_choice(name: str, value: object, allowed: tuple[object, ...]) -> None:
    """Refuse a value that is not one of those allowed."""
    if value not in allowed:
        raise ConfigurationError(f"{name} must be one of {', '.join(map(repr, allowed))}, got {value!r}")


def check_flags(scorer: PlainScorer, *names: str) -> None:
    """Refuse an on/off argument that is neither: in YAML, `ignore_case: "no"` is a text, and would count as on."""
    for name in names:
        value = getattr(scorer, name)
        if not isinstance(value, bool):
            raise ConfigurationError(f"{name} must be true or false, got {value!r}")


def need_extra(module: str, extra: str, scorer: str) -> None:
    """Refuse to make a scorer whose library is not installed, saying what to install."""
    try:
        importlib.import_module(module)
    except ImportError as error:
        raise ConfigurationError(f"{scorer} needs {module}: pip install 'steelyard[{extra}]'") from error


def alternatives(expected: Any) -> list[Any]:
    """What a case accepts: a list holds alternatives, anything else is the only one."""
    return expected if isinstance(expected, list) else [expected]


def as_text(expected: object) -> str:
    """The text a model would write for an expected value: JSON's true, not Python's True."""
    if isinstance(expected, str):
        return expected
    if isinstance(expected, bool):
        return "true" if expected else "false"
    return str(expected)


def shown(value: object) -> str:
    """A value as a reason quotes it: its repr, cut."""
    if isinstance(value, str):
        return repr(value) if len(value) <= _SHOWN else f"{value[:_SHOWN]!r}…"
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"


def shown_any(values: list[Any]) -> str:
    """A few alternatives as a reason quotes them."""
    if len(values) == 1:
        return shown(as_text(values[0]))
    more = f" or {len(values) - 3} more" if len(values) > 3 else ""
    return " or ".join(shown(as_text(value)) for value in values[:3]) + more


def _cut(reason: str | None) -> str | None:
    return reason if reason is None or len(reason) <= _LONGEST_REASON else f"{reason[:_LONGEST_REASON]}…"


def _as_json(value: object) -> Any:
    """An argument as JSON has it; a function as where it lives and what it says."""
    if isinstance(value, Mapping):
        return {str(key): _as_json(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_as_json(item) for item in value]
    if callable(value):
        return dict(FunctionScorer(value).identity())
    return value
