"""What both stores promise."""

from __future__ import annotations

import hashlib
import json
import logging
import math
import pickle
import threading
from datetime import UTC, datetime, timedelta, timezone

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from steelyard import EvalCase, InvocationResponse
from steelyard.cache import (
    CacheKey,
    CaseFingerprint,
    EvaluationDataStore,
    ManagedStore,
    StoreError,
    StoreInfo,
    fingerprint_of,
    is_cacheable,
    tool_set_hash,
)
from tests.support.cache import AWKWARD, STORES, an_answer, key_of, open_store

NOT_NORMAL = [
    {"error": "boom"},
    {"error": ""},
    {"error_type": "TimeoutError"},
    {"response_text": None},
    *({"stop_reason": reason} for reason in ("length", "max_tokens", "MAX_TOKENS", "content_filter", "content-filter")),
    *({"stop_reason": reason} for reason in ("max_output_tokens", "incomplete", "cancelled", "timeout", "pause_turn")),
]
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


@pytest.fixture(params=STORES)
def store(request, tmp_path):
    opened = open_store(request.param, tmp_path)
    yield opened
    opened.close()


def test_both_are_stores(store):
    assert isinstance(store, EvaluationDataStore)
    assert isinstance(store, ManagedStore)


def test_what_was_put_is_got_by_exactly_its_set_case_and_key(store):
    full = InvocationResponse(
        id="r1",
        response_text="héllo \u2028 \0 😀",
        input_prompt="p",
        input_payload={"messages": [1, 2.5, None, True, {"deep": ["x"]}]},
        messages=[{"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]}],
        time_to_first_token=0.1,
        time_to_last_token=3,
        time_per_output_token=0.01,
        num_tokens_input=1,
        num_tokens_output=2,
        num_tokens_input_cached=3,
        num_tokens_output_reasoning=4,
        request_time=datetime(2026, 1, 2, 3, 4, 5, 678901, tzinfo=timezone(timedelta(hours=2))),
        retries=1,
        stop_reason="end_turn",
    )
    store.put("set", "case", key_of(1), full)
    assert store.get("set", "case", key_of(1)) == full
    assert store.get("other", "case", key_of(1)) is None
    assert store.get("set", "other", key_of(1)) is None
    assert store.get("set", "case", key_of(2)) is None


def test_a_second_put_replaces_the_first(store):
    store.put("set", "case", key_of(), an_answer("old"))
    store.put("set", "case", key_of(), an_answer("new"))
    assert store.get("set", "case", key_of()) == an_answer("new")
    assert store.info().entries == 1


@pytest.mark.parametrize("change", NOT_NORMAL, ids=str)
def test_a_response_that_did_not_complete_normally_is_refused(store, change):
    response = msgspec.structs.replace(an_answer(), **change)
    assert not is_cacheable(response)
    with pytest.raises(StoreError, match="only a response that completed normally may be stored, got"):
        store.put("set", "case", key_of(), response)
    assert store.get("set", "case", key_of()) is None


def test_something_that_is_no_response_is_refused(store):
    assert not is_cacheable("Paris")
    with pytest.raises(StoreError, match="got str"):
        store.put("set", "case", key_of(), "Paris")


@pytest.mark.parametrize("reason", [None, "stop", "end_turn", "tool_calls", "stop_sequence", "eos", "whatever-else"])
def test_a_normal_end_is_cacheable(reason):
    assert is_cacheable(an_answer(stop_reason=reason))
    assert is_cacheable(InvocationResponse(messages=[{"role": "assistant", "tool_calls": []}], stop_reason=reason))
    assert is_cacheable(an_answer("", stop_reason=reason))


@pytest.mark.parametrize(
    "response",
    [
        an_answer("\ud800"),
        an_answer(time_to_first_token=float("nan")),
        an_answer(input_payload={"x": float("nan")}),
        an_answer(input_payload=float("inf")),
        an_answer(input_payload=b"bytes"),
        an_answer(input_payload=(1, 2)),
        an_answer(input_payload={1: "a key that is no text"}),
        an_answer(input_payload=object()),
        an_answer(input_payload=np.arange(3)),
        an_answer(messages=[{"content": "\udc00"}]),
        an_answer(num_tokens_output="12"),
    ],
    ids=lambda response: repr(response)[18:80],
)
def test_a_response_that_would_not_read_back_the_same_is_not_stored_and_says_so(store, response, caplog):
    store.put("set", "case", key_of(), response)
    assert store.get("set", "case", key_of()) is None
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert "the response to case 'case' is not stored" in caplog.text


def test_awkward_ids_do_not_mix(store, monkeypatch):
    monkeypatch.setattr("os.fsync", lambda descriptor: None)
    writable = [identifier for identifier in AWKWARD if identifier.isprintable() or "\0" in identifier]
    for place in range(2):
        for identifier in writable:
            ids = ("set", identifier) if place else (identifier, "case")
            store.put(*ids, key_of(), an_answer(repr(ids)))
    for place in range(2):
        for identifier in writable:
            ids = ("set", identifier) if place else (identifier, "case")
            assert store.get(*ids, key_of()) == an_answer(repr(ids))
    assert store.info().entries == 2 * len(writable)


def test_an_id_that_is_not_unicode_is_never_served_another_ones_answer(store):
    store.put("set", "?", key_of(), an_answer())
    store.put("set", "\ud800", key_of(), an_answer("mine"))
    try:
        found = store.get("set", "\ud800", key_of())
    except StoreError:
        found = None
    assert found is None


@pytest.mark.parametrize("key", ["", "../" * 20 + "etc", "A" * 64])
def test_a_key_that_is_none_is_refused(store, key):
    with pytest.raises(ValueError, match="64 lower-case hex digits"):
        store.get("set", "case", key)
    with pytest.raises(ValueError, match="64 lower-case hex digits"):
        store.put("set", "case", key, an_answer())


def test_info_counts_entries_and_bytes(store):
    assert store.info().entries == 0
    for number in range(5):
        store.put("set", f"c{number}", key_of(number), an_answer("x" * 1000))
    found = store.info()
    assert isinstance(found, StoreInfo)
    assert found.entries == 5
    assert found.bytes >= 5000


def test_clear_removes_one_set_or_everything_and_counts(store):
    for set_id in ("a", "A", "b"):
        for number in range(3):
            store.put(set_id, f"c{number}", key_of(number), an_answer(set_id))
    assert store.clear("a") == 3
    assert store.get("a", "c0", key_of(0)) is None
    assert store.get("A", "c0", key_of(0)) == an_answer("A")
    assert store.clear() == 6
    assert store.info().entries == 0
    assert store.clear() == store.clear("a") == 0
    store.put("a", "c0", key_of(0), an_answer("again"))
    assert store.get("a", "c0", key_of(0)) == an_answer("again")


def test_a_store_travels_to_another_process_by_its_place(store):
    store.put("set", "case", key_of(), an_answer())
    copy = pickle.loads(pickle.dumps(store))
    assert copy.get("set", "case", key_of()) == an_answer()
    copy.close()


def test_threads_may_share_a_store(store, monkeypatch):
    monkeypatch.setattr("os.fsync", lambda descriptor: None)
    failures = []

    def work(thread):
        try:
            for number in range(40):
                store.put("set", "case", key_of(number), an_answer("x" * number))
                assert store.get("set", "case", key_of(number)) == an_answer("x" * number)
        except BaseException as error:
            failures.append((thread, error))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert store.info().entries == 40


response_texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=50)
payloads = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63)
    | st.floats(allow_nan=False, allow_infinity=False)
    | response_texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(response_texts, inner, max_size=3),
    max_leaves=6,
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(response_texts, payloads, st.datetimes(timezones=st.just(UTC)))
def test_any_response_that_json_can_hold_comes_back_as_it_was(store, text, payload, moment):
    response = an_answer(text * 100, input_payload=payload, messages=[{"content": payload}], request_time=moment)
    store.put("set", "case", key_of(), response)
    assert store.get("set", "case", key_of()) == response


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
