"""Answers that are JSON: found in what models write, compared by key, validated by a schema."""

from __future__ import annotations

import json
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from steelyard import patterns
from steelyard.errors import ConfigurationError
from steelyard.patterns import PatternTimeout
from steelyard.scoring import JsonMatch, JsonSchema
from steelyard.scoring.structured import NoJson, read_json, same_json
from tests.support.scorers import scored, scored_or_none

JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**53), 2**53)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)
CONTAINERS = st.lists(JSON, max_size=4) | st.dictionaries(st.text(max_size=8), JSON, max_size=4)


@pytest.mark.parametrize(
    "text",
    [
        '{"a": [1, 2]}',
        ' \n{"a": [1, 2]}\n',
        '```json\n{"a": [1, 2]}\n```',
        '```\n{"a": [1, 2]}\n```',
        'Here it is:\n\n```json\n{"a": [1, 2]}\n```\nAnything else?',
        'As [1] says:\n```json\n{"a": [1, 2]}\n```',
        '```JSON {"a": [1, 2]}',
        'The result is {"a": [1, 2]}, as asked.',
        'In {curly} and [square] words: {"a": [1, 2]}',
        r'With $\frac{1}{2}$ of it: {"a": [1, 2]}',
        '{"a": [1, 2]} and then {"b": 3}',
    ],
)
def test_json_is_found_alone_in_a_code_block_or_in_prose(text) -> None:
    assert read_json(text) == {"a": [1, 2]}


@pytest.mark.parametrize(
    "text",
    [
        "",
        "none",
        "{a: 1}",
        '{"a": {"b": 1}, "c": ',
        '{"a": [1, 2',
        "[" * 100_000,
        '{"a":' * 100_000,
        "[" + "9" * 10_000 + "]",
        "[NaN]",
        "Infinity",
        "{'a': 1}",
    ],
)
def test_what_is_not_json_or_was_cut_off_is_not_read(text) -> None:
    """The inside of a truncated object is not taken for the answer."""
    with pytest.raises(NoJson):
        read_json(text)
    result = scored(JsonMatch(), text, {"a": 1})
    assert result.value == 0.0
    assert result.reason is not None
    assert len(result.reason) < 1_100


@given(JSON)
def test_any_json_reads_back(value) -> None:
    assert same_json(read_json(json.dumps(value)), value)


@given(CONTAINERS, st.sampled_from(["Here: {}", "```json\n{}\n```", "I [think] so: {} (sure)", "{} That is all."]))
def test_any_object_or_array_reads_back_from_its_frame(value, frame) -> None:
    assert same_json(read_json(frame.format(json.dumps(value))), value)


@given(JSON, JSON)
def test_same_json_agrees_with_json_text_where_numbers_are_written_alike(left, right) -> None:
    assert same_json(left, left)
    assert same_json(left, right) == same_json(right, left)
    if json.dumps(left, sort_keys=True) == json.dumps(right, sort_keys=True):
        assert same_json(left, right)


@pytest.mark.parametrize(
    ("left", "right", "same"),
    [(1, 1.0, True), (True, 1, False), (0, False, False), ([1], [True], False), (None, 0, False), ("1", 1, False)],
)
def test_numbers_are_equal_by_value_but_true_is_not_one(left, right, same) -> None:
    assert same_json(left, right) is same
    assert same_json({"k": left}, {"k": right}) is same


@given(JSON.filter(lambda value: value is not None))
def test_every_value_matches_itself(value) -> None:
    expected = json.dumps(value) if isinstance(value, str) else value
    assert scored(JsonMatch(), json.dumps(value), expected).value == 1.0


@pytest.mark.parametrize(
    ("rules", "expected", "got", "value"),
    [
        ({}, {"a": 1, "b": 2}, {"a": 1, "b": 2}, 1.0),
        ({}, {"a": 1, "b": 2}, {"a": 1, "b": 3}, 0.5),
        ({}, {"a": 1, "b": 2}, {"a": 1}, 0.5),
        ({}, {"a": 1}, {"a": 1, "b": 2}, 0.5),
        ({}, {"a": {"b": 1, "c": 2}, "d": 3}, {"a": {"b": 1, "c": 2}, "d": 4}, 2 / 3),
        ({}, {"a": {"b": 1, "c": 2}}, {"a": 5}, 0.0),
        ({}, {"a": [1, 2, 3, 4]}, {"a": [1, 2, 3, 5]}, 0.75),
        ({}, {"a": []}, {"a": []}, 1.0),
        ({}, {"a": []}, {"a": [1]}, 0.0),
        ({}, [1, 2], [1, 2], 1.0),
        ({"a": "ignore"}, {"a": 1, "b": 2}, {"b": 2}, 1.0),
        ({"x": "ignore"}, {"a": 1}, {"a": 1, "x": 5}, 1.0),
        ({"a": "number"}, {"a": 1234}, {"a": "$1,234"}, 1.0),
        ({"a": "number"}, {"a": 1234}, {"a": "many"}, 0.0),
        ({"a": {"number": {"tolerance": 0.1}}}, {"a": 1.0}, {"a": 1.05}, 1.0),
        ({"a": {"number": {"relative_tolerance": 0.1}}}, {"a": 100}, {"a": 111}, 0.0),
        ({"a": "contains"}, {"a": "Paris"}, {"a": "in Paris, France"}, 1.0),
        ({"a": "contains"}, {"a": "red"}, {"a": ["blue", "red"]}, 1.0),
        ({"a": {"contains": {"ignore_case": True}}}, {"a": "paris"}, {"a": "PARIS"}, 1.0),
        ({"a": "regex"}, {"a": r"^\d{4}$"}, {"a": "2024"}, 1.0),
        ({"a": "regex"}, {"a": r"^\d{4}$"}, {"a": 2024}, 1.0),
        ({"a": {"exact": {"ignore_case": True}}}, {"a": "x"}, {"a": "X"}, 1.0),
        ({"u.name": "ignore"}, {"u": {"name": "x", "age": 3}}, {"u": {"age": 3}}, 1.0),
        ({"i.*.p": "number"}, {"i": [{"p": 1}, {"p": 2}]}, {"i": [{"p": "1.0"}, {"p": "2"}]}, 1.0),
        ({"i.1.p": "ignore"}, {"i": [{"p": 1}, {"p": 2}]}, {"i": [{"p": 1}, {"p": 9}]}, 1.0),
        ({"a": "exact"}, {"a": {"b": 1, "c": 2}}, {"a": {"b": 1}}, 0.0),
        ({"a": "ignore"}, {"a": 1}, {}, 1.0),
    ],
)
def test_the_value_is_the_share_of_keys_that_match_by_their_rules(rules, expected, got, value) -> None:
    result = scored(JsonMatch(rules=rules), json.dumps(got), expected)
    assert result.value == pytest.approx(value)
    assert result.passed is (value == 1.0)
    assert (result.reason is None) is (value == 1.0)


def test_the_reason_names_missing_extra_and_wrong_keys() -> None:
    result = scored(JsonMatch(), '{"b": 3, "z": 0, "u": {"y": 1}}', {"a": 1, "b": 2, "u": {"x": 1}})
    assert result.reason == "missing: a, u.x; extra: u.y, z; b: expected 2, got 3 (exact)"


def test_extra_keys_can_be_allowed_and_the_threshold_lowered() -> None:
    assert scored(JsonMatch(allow_extra=True), '{"a": 1, "b": 2}', {"a": 1}).passed
    assert scored(JsonMatch(threshold=0.5), '{"a": 1, "b": 3}', {"a": 1, "b": 2}).passed


def test_the_expected_json_may_be_text_as_it_is_in_a_csv_file() -> None:
    assert scored(JsonMatch(), '{"a": 1}', '{"a": 1}').passed
    with pytest.raises(ValueError, match="expected is not JSON: 'a = 1'"):
        scored(JsonMatch(), '{"a": 1}', "a = 1")


def test_an_expected_value_that_its_rule_cannot_use_is_a_scoring_error() -> None:
    with pytest.raises(ValueError, match="expected holds no number"):
        scored(JsonMatch(rules={"a": "number"}), '{"a": 1}', {"a": "many"})


SCHEMA = {"type": "object", "properties": {"age": {"type": "integer", "minimum": 0}}, "required": ["age"]}


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ('{"age": 3}', None),
        ('Sure: {"age": 3}', None),
        ('{"age": "3"}', "$.age: '3' is not of type 'integer'"),
        ('{"age": -1}', "$.age: -1 is less than the minimum of 0"),
        ("{}", "$: 'age' is a required property"),
        ("three", "no JSON in it: 'three'"),
    ],
)
def test_an_answer_is_valid_or_the_reason_names_the_first_error_and_its_path(text, reason) -> None:
    for result in (scored(JsonSchema(schema=SCHEMA), text), scored(JsonSchema(), text, schema=SCHEMA)):
        assert (result.passed, result.reason) == (reason is None, reason)


def test_the_scorers_schema_is_used_before_the_cases() -> None:
    assert scored(JsonSchema(schema=SCHEMA), '{"age": 3}', schema={"type": "array"}).passed


def test_a_schema_keeps_the_draft_it_names() -> None:
    """`items` as a list of schemas was valid in draft 7 and is not in 2020-12."""
    old = {"$schema": "http://json-schema.org/draft-07/schema#", "items": [{"type": "integer"}]}
    assert not scored(JsonSchema(schema=old), '["x"]').passed
    with pytest.raises(ConfigurationError, match="not a schema"):
        JsonSchema(schema={"items": [{"type": "integer"}]})


def test_a_reference_to_the_network_is_a_scoring_error_and_is_not_fetched() -> None:
    with pytest.raises(Exception, match="Unresolvable"):
        scored(JsonSchema(schema={"$ref": "http://localhost:9/schema.json"}), "{}")


def test_a_reference_within_the_schema_is_followed() -> None:
    schema = {"$defs": {"n": {"type": "integer"}}, "items": {"$ref": "#/$defs/n"}}
    assert scored(JsonSchema(schema=schema), "[1]").passed
    assert not scored(JsonSchema(schema=schema), '["x"]').passed


@pytest.mark.parametrize("scorer", [JsonMatch(), JsonSchema()])
def test_a_case_with_nothing_to_compare_is_not_scored(scorer) -> None:
    assert scored_or_none(scorer, "{}") is None


@pytest.mark.parametrize(
    ("make", "result"),
    [
        (lambda: JsonMatch(rules={"a": "fuzzy"}), "rules.a must be one of exact, .*, got 'fuzzy'"),
        (lambda: JsonMatch(rules={"a": 3}), "rules.a must be one of .*, got 3"),
        (
            lambda: JsonMatch(rules={"a": {"number": {"tolerence": 1}}}),
            "no option 'tolerence'; did you mean 'tolerance'",
        ),
        (lambda: JsonMatch(rules={"a": {"number": {"tolerance": -1}}}), "rules.a.number.tolerance must be .*, got -1"),
        (lambda: JsonMatch(rules={"a": {"exact": {"ignore_case": "no"}}}), "must be true or false, got 'no'"),
        (lambda: JsonMatch(rules=["a"]), "rules must be a mapping"),  # type: ignore[arg-type]
        (lambda: JsonMatch(allow_extra=1), "allow_extra must be true or false, got 1"),  # type: ignore[arg-type]
        (lambda: JsonMatch(threshold=2), "threshold must be a number within 0..1, got 2"),
        (lambda: JsonSchema(schema={"type": "integr"}), r"not a schema at \$.type"),
        (lambda: JsonSchema(schema="schema.json"), "schema must be a mapping, got 'schema.json'"),  # type: ignore[arg-type]
        (lambda: JsonSchema(schema={"const": {1, 2}}), "schema: .*not JSON serializable"),
    ],
)
def test_a_bad_argument_is_refused_with_its_value(make, result) -> None:
    with pytest.raises(ConfigurationError, match=result):
        make()


def test_json_schema_without_its_library_says_what_to_install(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "jsonschema", None)
    with pytest.raises(ConfigurationError, match=r"json_schema needs jsonschema: pip install 'steelyard\[schema\]'"):
        JsonSchema()


BACKTRACKING = "(a|aa)+$"
UNLUCKY = "a" * 60 + "b"


@pytest.mark.parametrize(
    ("scorer", "answer", "expected"),
    [
        (JsonMatch(rules={"q": "regex"}), {"q": UNLUCKY}, {"q": BACKTRACKING}),
        (JsonSchema(schema={"properties": {"q": {"pattern": BACKTRACKING}}}), {"q": UNLUCKY}, None),
        (JsonSchema(schema={"patternProperties": {BACKTRACKING: {}}}), {UNLUCKY: 1}, None),
        (
            JsonSchema(schema={"additionalProperties": False, "patternProperties": {BACKTRACKING: {}}}),
            {UNLUCKY: 1},
            None,
        ),
        (
            JsonSchema(schema={"unevaluatedProperties": False, "allOf": [{"patternProperties": {BACKTRACKING: {}}}]}),
            {UNLUCKY: 1},
            None,
        ),
    ],
)
def test_a_pattern_that_backtracks_is_a_scoring_error_that_names_it(monkeypatch, scorer, answer, expected) -> None:
    monkeypatch.setattr(patterns, "MATCH_SECONDS", 0.05)
    with pytest.raises(PatternTimeout, match="ran for more than"):
        scored(scorer, json.dumps(answer), expected)


@pytest.mark.parametrize(
    ("schema", "answer", "passed"),
    [
        ({"pattern": "^a+$"}, "aaa", True),
        ({"pattern": "^a+$"}, "ab", False),
        ({"pattern": "^a+$"}, 3, True),
        ({"patternProperties": {"^n_": {"type": "integer"}}}, {"n_x": 1, "other": "x"}, True),
        ({"patternProperties": {"^n_": {"type": "integer"}}}, {"n_x": "1"}, False),
        ({"additionalProperties": False, "patternProperties": {"^n_": {}}, "properties": {"a": {}}}, {"n_x": 1}, True),
        ({"additionalProperties": False, "patternProperties": {"^n_": {}}}, {"m_x": 1}, False),
        ({"additionalProperties": {"type": "integer"}, "patternProperties": {"^n_": {}}}, {"n_": "x", "b": "y"}, False),
        ({"unevaluatedProperties": False, "patternProperties": {"^n_": {}}}, {"n_x": 1}, True),
        ({"unevaluatedProperties": False, "allOf": [{"patternProperties": {"^n_": {}}}]}, {"n_x": 1}, True),
        ({"unevaluatedProperties": False, "allOf": [{"patternProperties": {"^n_": {}}}]}, {"m_x": 1}, False),
    ],
)
def test_patterns_in_schemas_mean_what_the_draft_says(schema, answer, passed) -> None:
    assert scored(JsonSchema(schema=schema), json.dumps(answer)).passed is passed


def test_only_scorers_that_match_patterns_have_the_engine_in_their_identity() -> None:
    assert JsonMatch(rules={"a": {"regex": {"ignore_case": True}}}).identity()["patterns"] == patterns.PATTERNS_VERSION
    assert "patterns" not in JsonMatch(rules={"a": "exact"}).identity()
