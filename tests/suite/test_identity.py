"""What makes a case the same case."""

from __future__ import annotations

import json
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from steelyard.records import EvalCase, id_digest
from steelyard.suite.identity import (
    MIN_BATCH,
    BadCase,
    Occurrences,
    as_hex,
    as_json,
    canonical,
    case_fingerprint,
    content_digest,
    grading_fingerprint,
)

any_text = st.text(st.characters(), max_size=8)  # lone surrogates included
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | any_text,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(any_text, inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(any_text, values, min_size=2, max_size=5), st.randoms(use_true_random=False))
def test_the_order_of_keys_does_not_change_the_canonical_bytes(mapping: dict, chance: random.Random) -> None:
    items = list(mapping.items())
    chance.shuffle(items)
    assert canonical(dict(items)) == canonical(mapping)


@given(values)
def test_canonical_bytes_are_json_of_the_value(value: object) -> None:
    assert json.loads(canonical(value).decode("utf-8", "surrogatepass")) == value


@given(values)
def test_json_text_reads_back_as_it_was(value: object) -> None:
    assert json.loads(as_json(value)) == value


@pytest.mark.parametrize("number", [float("nan"), float("inf"), -float("inf"), np.float64("nan")])
def test_nan_and_infinity_are_refused_and_not_written_as_null(number: float) -> None:
    for value in (number, {"a": [number]}, {"a": ["\ud800", number]}, {1: number}):
        with pytest.raises(BadCase, match="cannot be written as JSON"):
            canonical(value)


def test_null_itself_is_fine() -> None:
    assert canonical({"a": None, "b": "null"}) == b'{"a":null,"b":"null"}'


def test_numpy_values_are_as_good_as_python_ones() -> None:
    assert canonical({"a": np.int64(3), "b": np.array([1.5])}) == canonical({"a": 3, "b": [1.5]})


def test_what_json_cannot_hold_is_refused() -> None:
    endless: list[object] = []
    endless.append(endless)
    for value, message in ((object(), "object is not JSON"), (endless, "nested too deeply")):
        with pytest.raises(BadCase, match=message):
            canonical(value)


def test_numeric_keys_are_sorted_as_text() -> None:
    assert canonical({2: "b", 10: "a"}) == canonical({"10": "a", "2": "b"})


BASE = EvalCase(id="a", prompt="p", system_prompt="s", expected="e", metadata={"k": 1})


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("prompt", "q"),
        ("messages", [{"role": "user"}]),
        ("system_prompt", None),
        ("tools", [{"name": "t"}]),
        ("metadata", {"k": 2}),
    ],
)
def test_what_a_target_may_see_changes_the_case_fingerprint_alone(field: str, value: object) -> None:
    other = EvalCase(**{**BASE_FIELDS, field: value})
    assert case_fingerprint(other) != case_fingerprint(BASE)
    assert grading_fingerprint(b"s", other) == grading_fingerprint(b"s", BASE)


@pytest.mark.parametrize(("field", "value"), [("expected", "f"), ("expected_trajectory", ["t"])])
def test_what_a_scorer_compares_with_changes_the_grading_fingerprint_alone(field: str, value: object) -> None:
    other = EvalCase(**{**BASE_FIELDS, field: value})
    assert case_fingerprint(other) == case_fingerprint(BASE)
    assert grading_fingerprint(b"s", other) != grading_fingerprint(b"s", BASE)


def test_other_scorers_change_the_grading_fingerprint() -> None:
    assert grading_fingerprint(b"s", BASE) != grading_fingerprint(b"t", BASE)


def test_metadata_and_expected_leave_the_content_digest_alone() -> None:
    other = EvalCase(**{**BASE_FIELDS, "metadata": {}, "expected": None})
    assert content_digest(other) == content_digest(BASE) < 2**48


def test_fingerprints_stay_the_same_from_version_to_version() -> None:
    """Stored runs hold these values: changing them asks every case of every unfinished run again."""
    assert as_hex(id_digest("fr")) == "8a21d4952573d4bd"
    assert as_hex(case_fingerprint(BASE)) == "0ae84767dbcb7d89"
    assert as_hex(grading_fingerprint(b"s", BASE)) == "b83cfa9f42517172"


def test_digests_are_64_bits_in_16_hex_digits() -> None:
    digest = id_digest("\x00é")
    assert 0 <= digest < 2**64
    assert len(as_hex(digest)) == len(as_hex(0)) == 16


@given(st.lists(st.integers(0, 30), max_size=200))
def test_occurrences_are_numbered_from_one(digests: list[int]) -> None:
    occurrences = Occurrences()
    seen: dict[int, int] = {}
    for digest in digests:
        seen[digest] = seen.get(digest, 0) + 1
        assert occurrences.count(digest) == seen[digest]
    assert occurrences.repeated == {digest for digest, count in seen.items() if count > 1}
    again = Occurrences(occurrences.repeated)
    first = Occurrences()
    assert [again.count(digest) for digest in digests] == [first.count(digest) for digest in digests]


def test_occurrences_are_found_after_many_others() -> None:
    occurrences = Occurrences()
    digests = [id_digest(str(number)) for number in range(3 * MIN_BATCH)]
    assert {occurrences.count(digest) for digest in digests} == {1}
    assert {occurrences.count(digest) for digest in digests} == {2}


BASE_FIELDS = {name: getattr(BASE, name) for name in EvalCase.__struct_fields__}
