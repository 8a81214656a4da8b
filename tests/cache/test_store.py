"""What both stores promise."""

from __future__ import annotations

import logging
import pickle
import threading
from datetime import UTC, datetime, timedelta, timezone

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from steelyard import InvocationResponse
from steelyard.cache import EvaluationDataStore, ManagedStore, StoreError, StoreInfo, is_cacheable
from tests.support.cache import AWKWARD, STORES, an_answer, key_of, open_store

NOT_NORMAL = [
    {"error": "boom"},
    {"error": ""},
    {"error_type": "TimeoutError"},
    {"response_text": None},
    *({"stop_reason": reason} for reason in ("length", "max_tokens", "MAX_TOKENS", "content_filter", "content-filter")),
    *({"stop_reason": reason} for reason in ("max_output_tokens", "incomplete", "cancelled", "timeout", "pause_turn")),
]


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
