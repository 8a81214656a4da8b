"""Scorers for answers that are JSON: json_match compares by key, json_schema validates; JSON found in text."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from decimal import Decimal
from functools import cached_property, lru_cache
from typing import Any, TypeAlias

from steelyard.errors import ConfigurationError, suggestion
from steelyard.patterns import PATTERNS_VERSION, Pattern
from steelyard.protocols import Identity
from steelyard.records import EvalCase, InvocationResponse, Score
from steelyard.scoring.base import PlainScorer, as_text, check_flags, check_number, need_extra, shown
from steelyard.scoring.number import as_decimal, close, final_number

Rule: TypeAlias = tuple[str, Mapping[str, Any]]

_NAMED = 5
_ABSENT = object()

_OPTIONS: Mapping[str, tuple[str, ...]] = {
    "exact": ("ignore_case",),
    "number": ("tolerance", "relative_tolerance"),
    "contains": ("ignore_case",),
    "regex": ("ignore_case",),
    "ignore": (),
}

_BESIDE_PATTERNS = ("additionalProperties", "unevaluatedProperties")
_IN_PLACE = ("allOf", "anyOf", "oneOf", "if", "then", "else", "not")

# Each failed try counts the lines before it; text with more brackets than this is taken to hold no JSON.
_MAX_TRIES = 500
_CODE_BLOCK = re.compile(r"```[\w+-]{0,20}\s{0,20}(?=[\[{])")
_OPENING = re.compile(r'\{(?=\s{0,1000}["}])|\[(?=\s{0,1000}(?:["\[{\]\d-]|true|false|null))')


def _exact(wanted: Any, got: Any, *, ignore_case: bool = False) -> bool:
    if ignore_case and isinstance(wanted, str) and isinstance(got, str):
        return wanted.casefold() == got.casefold()
    return same_json(wanted, got)


def _contains(wanted: Any, got: Any, *, ignore_case: bool = False) -> bool:
    if isinstance(got, list):
        return any(_exact(wanted, item, ignore_case=ignore_case) for item in got)
    inner, outer = as_text(wanted), as_text(got)
    return inner.casefold() in outer.casefold() if ignore_case else inner in outer


def _regex(wanted: Any, got: Any, *, ignore_case: bool = False) -> bool:
    return Pattern(as_text(wanted), ignore_case=ignore_case).search(as_text(got)) is not None


def _number(wanted: Any, got: Any, *, tolerance: float = 0.0, relative_tolerance: float = 0.0) -> bool:
    left, right = _read_number(wanted), _read_number(got)
    if left is None:
        raise ValueError(f"expected holds no number: {shown(wanted)}")
    return right is not None and close(left, right, Decimal(repr(tolerance)), Decimal(repr(relative_tolerance)))


def _read_number(value: Any) -> Decimal | None:
    return final_number(value) if isinstance(value, str) else as_decimal(value)


def _ignore(wanted: Any, got: Any) -> bool:  # noqa: ARG001 - one of the rules
    return True


_COMPARE: Mapping[str, Callable[..., bool]] = {
    "exact": _exact,
    "number": _number,
    "contains": _contains,
    "regex": _regex,
    "ignore": _ignore,
}


@dataclass(frozen=True, kw_only=True)
class JsonMatch(PlainScorer):
    """The share of keys in the answer's JSON that are as expected.

    `rules` maps a key's path (`user.name`, `items.0.price`, `items.*.price`) to how it is compared: exact, number,
    contains, regex or ignore, or a mapping from one of these to its options. Keys without a rule must be equal.
    """

    name: str = "json_match"
    threshold: float = 1.0
    rules: Mapping[str, Any] = field(default_factory=dict)
    allow_extra: bool = False

    def _check(self) -> None:
        check_flags(self, "allow_extra")
        if not isinstance(self.rules, Mapping):
            raise ConfigurationError(f"rules must be a mapping from keys to rules, got {self.rules!r}")
        for path, rule in self.rules.items():
            _read_rule(str(path), rule)

    def identity(self) -> Identity:
        """Its arguments, and, where a rule matches patterns, which engine reads them."""
        if not any(name == "regex" for _, (name, _) in self._rules):
            return super().identity()
        return {**super().identity(), "patterns": PATTERNS_VERSION}

    @cached_property
    def _rules(self) -> list[tuple[list[str], Rule]]:
        return [(str(path).split("."), _read_rule(str(path), rule)) for path, rule in self.rules.items()]

    def score(self, case: EvalCase, response: InvocationResponse) -> Score | None:
        """Return the share of keys that match; None when the case expects nothing."""
        if case.expected is None:
            return None
        wanted = _expected_json(case.expected)
        try:
            got = read_json(response.response_text or "")
        except NoJson as error:
            return self._graded(0.0, f"{error}: {shown(response.response_text or '')}")
        mismatches = _Mismatches()
        total = sum(mismatches.note(kind, text) for kind, text in self._compared(wanted, got, ""))
        return self._graded((total - mismatches.count) / total if total else 1.0, mismatches.reason())

    def _compared(self, wanted: Any, got: Any, path: str) -> Iterator[tuple[str, str]]:
        """Yield (kind of mismatch or "", description) for every key, extra ones included."""
        rule = self._rule(path)
        if rule is None and wanted and isinstance(wanted, (dict, list)):
            there = _items(got) if type(got) is type(wanted) else {}
            for key, item in _items(wanted).items():
                yield from self._compared(item, there.get(key, _ABSENT), f"{path}.{key}" if path else key)
            yield from self._extra(there, _items(wanted), path)
            return
        name, options = rule or ("exact", {})
        if name == "ignore":
            return
        if got is _ABSENT:
            yield "missing", path
        elif _COMPARE[name](wanted, got, **options):
            yield "", path
        else:
            yield "wrong", f"{path or 'the answer'}: expected {shown(wanted)}, got {shown(got)} ({name})"

    def _extra(self, there: Mapping[str, Any], wanted: Mapping[str, Any], path: str) -> Iterator[tuple[str, str]]:
        if self.allow_extra:
            return
        for key in there:
            inner = f"{path}.{key}" if path else key
            if key not in wanted and self._rule(inner) is None:
                yield "extra", inner

    def _rule(self, path: str) -> Rule | None:
        """Return the first rule for a path."""
        if not self._rules:
            return None
        parts = path.split(".")
        for pattern, rule in self._rules:
            if len(pattern) == len(parts) and all(
                one in ("*", other) for one, other in zip(pattern, parts, strict=True)
            ):
                return rule
        return None


class _Mismatches:
    """Counts the mismatches and keeps the first few descriptions."""

    def __init__(self) -> None:
        self.count = 0
        self._words: dict[str, list[str]] = {"missing": [], "extra": [], "wrong": []}

    def note(self, kind: str, words: str) -> int:
        if kind:
            self.count += 1
            if len(self._words[kind]) < _NAMED:
                self._words[kind].append(words)
        return 1

    def reason(self) -> str | None:
        parts = [f"{kind}: {', '.join(self._words[kind])}" for kind in ("missing", "extra") if self._words[kind]]
        return "; ".join(parts + self._words["wrong"]) or None


def _items(value: Any) -> dict[str, Any]:
    """Return an object's items, or an array's by index."""
    if isinstance(value, dict):
        return {str(key): item for key, item in value.items()}
    return {str(index): item for index, item in enumerate(value)}


def _expected_json(expected: Any) -> Any:
    """Return the expected value; from a CSV file it comes as JSON text."""
    if not isinstance(expected, str):
        return expected
    try:
        return read_json(expected)
    except NoJson as error:
        raise ValueError(f"expected is not JSON: {shown(expected)}") from error


def _read_rule(path: str, raw: Any) -> Rule:
    """Return a rule's name and options, checked."""
    name, options = next(iter(raw.items())) if isinstance(raw, Mapping) and len(raw) == 1 else (raw, {})
    if not isinstance(name, str) or name not in _COMPARE or not isinstance(options, Mapping):
        raise ConfigurationError(f"rules.{path} must be one of {', '.join(_COMPARE)}, got {raw!r}")
    for option, value in options.items():
        if option not in _OPTIONS[name]:
            raise ConfigurationError(
                f"rules.{path}.{name} has no option {option!r}; {suggestion(option, _OPTIONS[name])}"
            )
        if option == "ignore_case" and not isinstance(value, bool):
            raise ConfigurationError(f"rules.{path}.{name}.ignore_case must be true or false, got {value!r}")
        if option != "ignore_case":
            check_number(f"rules.{path}.{name}.{option}", value)
    return name, dict(options)


@dataclass(frozen=True, kw_only=True)
class JsonSchema(PlainScorer):
    """Passes when the JSON of the answer is valid by `schema`, or else by the case's `metadata["schema"]`.

    The draft is 2020-12 unless the schema names another. References are never fetched from a network.
    """

    name: str = "json_schema"
    schema: Mapping[str, Any] | None = None

    def _check(self) -> None:
        need_extra("jsonschema", "schema", "json_schema")
        if self.schema is None:
            return
        if not isinstance(self.schema, Mapping):
            raise ConfigurationError(f"schema must be a mapping, got {self.schema!r}")
        try:
            _validator(self._text)
        except (TypeError, ValueError) as error:  # YAML has dates and other types that JSON does not
            raise ConfigurationError(f"schema: {error}") from error

    @cached_property
    def _text(self) -> str:
        return json.dumps(self.schema)

    def identity(self) -> Identity:
        """Its arguments, and which engine reads the patterns of schemas."""
        return {**super().identity(), "patterns": PATTERNS_VERSION}

    def score(self, case: EvalCase, response: InvocationResponse) -> Score | None:
        """Return 1.0, or 0.0 with the first error and its path; None when there is no schema."""
        own = case.metadata.get("schema")
        if self.schema is None and own is None:
            return None
        validator = _validator(self._text if self.schema is not None else json.dumps(own))
        try:
            answer = read_json(response.response_text or "")
        except NoJson as error:
            return self._score(False, f"{error}: {shown(response.response_text or '')}")
        first = next(validator.iter_errors(answer), None)
        return self._score(first is None, first and f"{first.json_path}: {first.message}")


@lru_cache(maxsize=64)
def _validator(schema: str) -> Any:
    """Return the validator of a schema, cached as cases often share theirs. ValueError when it is not a schema."""
    from jsonschema import Draft202012Validator, SchemaError
    from jsonschema.validators import validator_for
    from referencing.jsonschema import EMPTY_REGISTRY

    plain = json.loads(schema)
    kind = validator_for(plain, default=Draft202012Validator)
    try:
        kind.check_schema(plain)
    except SchemaError as error:
        raise ValueError(f"not a schema at {error.json_path}: {error.message[:300]}") from error
    return _with_time_limits(kind)(plain, registry=EMPTY_REGISTRY)


@lru_cache(maxsize=16)
def _with_time_limits(kind: Any) -> Any:
    """Return the validator class with a schema's patterns matched within a time limit."""
    from jsonschema import ValidationError
    from jsonschema.validators import extend

    def pattern(validator: Any, wanted: str, instance: Any, _: Any) -> Iterator[ValidationError]:
        if validator.is_type(instance, "string") and not Pattern(wanted).search(instance):
            yield ValidationError(f"{instance!r} does not match {wanted!r}")

    def pattern_properties(validator: Any, wanted: Any, instance: Any, _: Any) -> Iterator[ValidationError]:
        if validator.is_type(instance, "object"):
            for source, subschema in wanted.items():
                for key in _matching(source, instance):
                    yield from validator.descend(instance[key], subschema, path=key, schema_path=source)

    def without_patterns(keyword: str) -> Callable[..., Iterator[ValidationError]]:
        """The library's keyword on a schema that names the properties which its patterns match."""
        original = kind.VALIDATORS[keyword]

        def check(validator: Any, wanted: Any, instance: Any, schema: Any) -> Iterator[ValidationError]:
            if validator.is_type(instance, "object"):
                schema = _patterns_as_names(schema, instance)
            yield from original(validator, wanted, instance, schema)

        return check

    named = {name: without_patterns(name) for name in _BESIDE_PATTERNS if name in kind.VALIDATORS}
    return extend(kind, {"pattern": pattern, "patternProperties": pattern_properties, **named})  # type: ignore[no-untyped-call]


def _matching(source: str, instance: Mapping[str, Any]) -> list[str]:
    pattern = Pattern(source)
    return [key for key in instance if pattern.search(key)]


def _patterns_as_names(schema: Any, instance: Mapping[str, Any]) -> Any:
    """Return the schema, with those of its parts that apply to the same object, without `patternProperties`."""
    if isinstance(schema, list):
        return [_patterns_as_names(item, instance) for item in schema]
    if not isinstance(schema, dict):
        return schema
    plain = {key: _patterns_as_names(item, instance) if key in _IN_PLACE else item for key, item in schema.items()}
    for source, subschema in plain.pop("patternProperties", {}).items():
        names = dict.fromkeys(_matching(source, instance), subschema)
        plain["properties"] = {**names, **plain.get("properties", {})}
    return plain


class NoJson(ValueError):
    """A text without readable JSON."""


def _refuse(constant: str) -> Any:
    raise NoJson(f"{constant} is not JSON")


_DECODER = json.JSONDecoder(parse_constant=_refuse)


def read_json(text: str) -> Any:
    """Read a text that is JSON, else its first code block that is, else its first whole object or array.

    Time is linear in the text: after a failure the search continues where the failed value broke off, so that the
    inside of a truncated object is not taken for the answer either.
    """
    text = text.strip()
    try:
        return _whole(text)
    except json.JSONDecodeError:
        pass
    except (RecursionError, ValueError) as error:
        raise NoJson(f"the JSON cannot be read: {error}") from error
    for pattern in (_CODE_BLOCK, _OPENING):
        found, value = _first(pattern, text)
        if found:
            return value
    raise NoJson("no JSON in it")


def _whole(text: str) -> Any:
    value, end = _DECODER.raw_decode(text)
    if end != len(text):
        raise json.JSONDecodeError("more after it", text, end)
    return value


def _first(pattern: re.Pattern[str], text: str) -> tuple[bool, Any]:
    """Return whether a value could be read at a match of the pattern, and the first such value."""
    position = 0
    for _ in range(_MAX_TRIES):
        match = pattern.search(text, position)
        if match is None:
            break
        start = match.end() if pattern is _CODE_BLOCK else match.start()
        try:
            return True, _DECODER.raw_decode(text, start)[0]
        except json.JSONDecodeError as error:
            position = max(error.pos, start + 1)
        except (RecursionError, ValueError):  # too deep, a number without end, NaN
            break
    return False, None


def same_json(left: Any, right: Any) -> bool:
    """Whether two values are equal as JSON: 1 is 1.0, but true is not 1."""
    if isinstance(left, bool) or isinstance(right, bool):
        return left is right
    if isinstance(left, dict) and isinstance(right, dict):
        return left.keys() == right.keys() and all(same_json(item, right[key]) for key, item in left.items())
    if isinstance(left, (list, tuple)) and isinstance(right, (list, tuple)):
        return len(left) == len(right) and all(map(same_json, left, right))
    return bool(left == right)
