"""Keys: the same for the same question in every process and version, another when anything that matters changes."""

from __future__ import annotations

import hashlib
import json
import math

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from steelyard import EvalCase
from steelyard.cache import CacheKey, CaseFingerprint, fingerprint_of, tool_set_hash

FULL = CaseFingerprint(
    case_id="fr",
    system_prompt="One word.",
    user_messages=[{"role": "user", "content": "Hauptstädte?"}, "Capital of France?"],
    initial_session={"data": {"user": 7}, "messages": []},
    tool_set_hash=tool_set_hash([{"name": "search"}]),
    agent_model="m-1",
    parameters={"temperature": 0, "top_p": 0.5},
    metadata={"level": "easy"},
    trial=2,
)
CHANGES = {
    "case_id": "de",
    "system_prompt": None,
    "user_messages": ["Capital of France?"],
    "initial_session": {"data": {"user": 8}, "messages": []},
    "tool_set_hash": tool_set_hash([{"name": "find"}]),
    "agent_model": "m-2",
    "parameters": {"temperature": 0.1, "top_p": 0.5},
    "metadata": {},
    "trial": 0,
    "workspace": "0a1b",
    "limits": {"time": 5.0},
    "attachments": [["a.png", "image/png", "0a1b"]],
}
GOLDEN_SMALL = "8a4d903c0c220843a0f1016a083d25e18bd0a7834e7bfa1cbe2a0e7d4110192f"
GOLDEN_FULL = "34486c6d6f7d8cd8c011d562cd02bfc7dff8b1a159da294bbea0ae0f36f9fccd"
json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**53), 2**53)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)


def reordered(value):
    """The same value with the keys of every object the other way round."""
    if isinstance(value, dict):
        return {key: reordered(value[key]) for key in reversed(value)}
    return [reordered(item) for item in value] if isinstance(value, list) else value


def changed(name, value):
    return msgspec.structs.replace(FULL, **{name: value})


def test_keys_are_those_that_caches_on_disk_were_written_with():
    assert CaseFingerprint(case_id="fr", agent_model="m").key == GOLDEN_SMALL
    assert FULL.key == GOLDEN_FULL


def test_a_key_is_the_sha256_of_sorted_utf8_json_with_the_schema_version_inside():
    material = {"v": 1, **msgspec.to_builtins(FULL)}
    spelled = json.dumps(material, sort_keys=True, ensure_ascii=False, separators=(",", ":"))
    assert FULL.key == hashlib.sha256(spelled.encode()).hexdigest()


def test_every_field_is_among_those_that_are_changed_here():
    assert set(CHANGES) == set(CaseFingerprint.__struct_fields__)


@pytest.mark.parametrize("name", CHANGES)
def test_each_field_changes_the_key(name):
    assert changed(name, CHANGES[name]).key != FULL.key


def test_trial_0_and_empty_metadata_are_left_out_so_that_older_keys_stand():
    plain = {"v": 1, "case_id": "fr", "system_prompt": None, "user_messages": [], "initial_session": None}
    plain |= {"tool_set_hash": "", "agent_model": "m", "parameters": {}}
    spelled = json.dumps(plain, sort_keys=True, separators=(",", ":")).encode()
    assert CaseFingerprint(case_id="fr", agent_model="m", trial=0).key == hashlib.sha256(spelled).hexdigest()


@given(st.sampled_from(["initial_session", "user_messages", "parameters", "metadata"]), json_values)
def test_the_order_of_keys_in_an_object_changes_nothing(name, value):
    held = {"x": value, "y": 1} if name in ("parameters", "metadata") else [value, {"b": 1, "a": value}]
    assert changed(name, held).key == changed(name, reordered(held)).key


@given(json_values, json_values)
def test_two_sessions_share_a_key_only_when_json_spells_them_alike(one, other):
    same = json.dumps(one, sort_keys=True) == json.dumps(other, sort_keys=True)
    assert (changed("initial_session", one).key == changed("initial_session", other).key) is same


@pytest.mark.parametrize("value", [math.nan, math.inf, object(), np.array([math.nan])])
def test_what_json_cannot_hold_is_refused(value):
    with pytest.raises(ValueError, match="no cache key: a value cannot be written as JSON"):
        changed("parameters", {"temperature": value}).key  # noqa: B018 - asking is what fails


def test_a_value_nested_too_deeply_is_refused():
    deep: list = []
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(ValueError, match="no cache key"):
        changed("initial_session", deep).key  # noqa: B018 - asking is what fails


def test_lone_surrogates_have_keys_of_their_own():
    assert len({changed("case_id", text).key for text in ("\ud800", "\ud801", "?", "\ufffd")}) == 4


def test_a_set_is_its_members_in_order():
    """Its own order is another in every process."""
    assert changed("metadata", {"tags": set("hgfedcba")}).key == changed("metadata", {"tags": list("abcdefgh")}).key


def test_numpy_numbers_are_the_numbers_they_hold():
    assert changed("parameters", {"k": np.int64(5)}).key == changed("parameters", {"k": 5}).key


@pytest.mark.parametrize("text", ["", "a" * 63, "A" * 64, "../" + "a" * 61, "a" * 64 + "\n"])
def test_only_64_hex_digits_are_a_cache_key(text):
    with pytest.raises(ValueError, match="64 lower-case hex digits, got"):
        CacheKey(text)


@given(st.lists(st.dictionaries(st.text(max_size=3), json_values, max_size=3), max_size=4).flatmap(
    lambda tools: st.tuples(st.just(tools), st.permutations(tools))
))  # fmt: skip
def test_the_order_of_tools_changes_nothing(pair):
    tools, shuffled = pair
    assert tool_set_hash(tools) == tool_set_hash(shuffled)


def test_tools_are_told_apart_by_their_content_and_number():
    sets = [
        [],
        [{"name": "a"}],
        [{"name": "b"}],
        [{"name": "a"}, {"name": "a"}],
        [{"name": "a"}, {"name": "b"}],
        ["a\nb"],
    ]
    assert len({tool_set_hash(tools) for tools in sets}) == len(sets)
    assert tool_set_hash(None) == tool_set_hash([])


@pytest.mark.parametrize("model_id", [None, ""])
def test_without_a_known_model_there_is_no_fingerprint(model_id):
    assert fingerprint_of(EvalCase(id="a", prompt="?"), target_parameters={}, model_id=model_id) is None


def test_a_fingerprint_holds_what_the_target_would_see():
    case = EvalCase(
        id="a",
        prompt="And now?",
        messages=[{"role": "user", "content": "Hello"}],
        system_prompt="Be brief.",
        tools=[{"name": "search"}],
        expected="x",
        metadata={"user": 1},
    )
    found = fingerprint_of(
        case, session={"data": 1}, target_parameters={"temperature": 0}, model_id="m", tools=[{"name": "own"}], trial=3
    )
    assert found == CaseFingerprint(
        case_id="a",
        system_prompt="Be brief.",
        user_messages=[{"role": "user", "content": "Hello"}, "And now?"],
        initial_session={"data": 1},
        tool_set_hash=tool_set_hash([{"name": "search"}, {"name": "own"}]),
        agent_model="m",
        parameters={"temperature": 0},
        metadata={"user": 1},
        trial=3,
    )


@pytest.mark.parametrize("change", [{"expected": "y"}, {"expected_trajectory": ["search"]}])
def test_how_a_case_is_graded_does_not_change_its_key(change):
    keys = {
        fingerprint_of(EvalCase(id="a", prompt="?", **more), target_parameters={}, model_id="m").key
        for more in ({}, change)
    }
    assert len(keys) == 1


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"prompt": "x"}, {"messages": [{"role": "user", "content": "x"}]}),
        ({"prompt": "x"}, {"prompt": "x", "metadata": {"tier": 2}}),
        ({"prompt": None}, {"prompt": ""}),
        ({"system_prompt": None}, {"system_prompt": ""}),
    ],
)
def test_cases_that_a_function_can_tell_apart_have_different_keys(one, other):
    keys = {fingerprint_of(EvalCase(id="a", **it), target_parameters={}, model_id="m").key for it in (one, other)}
    assert len(keys) == 2
