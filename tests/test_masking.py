"""Keys are found and masked in whatever form a server or a program repeats them."""

from __future__ import annotations

import base64
import json
from urllib.parse import quote, quote_plus

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from steelyard.masking import MASK, Masker, Secret

KEY = "sk-live/a+b c=d~1234567890"


def b64(text: str) -> str:
    return base64.b64encode(text.encode()).decode()


@pytest.mark.parametrize(
    "written",
    [
        KEY,
        KEY.upper(),
        quote(KEY, safe=""),
        quote_plus(KEY),
        quote(KEY, safe="").lower(),
        json.dumps(KEY)[1:-1],
        b64(KEY),
        b64(f"user:{KEY}"),
        b64(f"u:{KEY}:more"),
        b64(f"us:{KEY}"),
        base64.urlsafe_b64encode(f"user:{KEY}".encode()).decode(),
    ],
)
def test_a_key_is_masked_however_it_is_written(written: str) -> None:
    masked = Masker([KEY]).text(f"before {written} after")
    assert MASK in masked
    assert written not in masked
    assert KEY not in masked
    assert masked.startswith("before ")
    assert masked.endswith(" after")


def test_the_same_object_comes_back_where_there_is_nothing_to_mask() -> None:
    value = {"a": ["text", 1, None], "b": {"c": "more"}}
    assert Masker([KEY]).value(value) is value
    assert Masker([]).value(value) is value


def test_lists_mappings_and_their_keys_are_masked() -> None:
    masked = Masker([KEY]).value({"a": [f"x {KEY}", {KEY: KEY}], "n": 3})
    assert masked == {"a": [f"x {MASK}", {MASK: MASK}], "n": 3}


def test_short_texts_are_no_secrets() -> None:
    assert Masker(["abc"]).text("abc") == "abc"


@given(st.text(min_size=8, max_size=40), st.binary(max_size=5), st.binary(max_size=5))
def test_base64_of_anything_around_a_key_does_not_give_it_away(key: str, before: bytes, after: bytes) -> None:
    assume(not any(0xD800 <= ord(letter) <= 0xDFFF for letter in key))
    masked = Masker([key]).text(base64.b64encode(before + key.encode() + after).decode())
    assert MASK in masked


def test_a_secret_shows_nowhere() -> None:
    assert KEY not in repr(Secret(KEY)) + str(Secret(KEY)) + f"{Secret(KEY)}"


def test_a_quick_look_finds_every_form_that_is_masked() -> None:
    masker = Masker([KEY])
    for written in (KEY, KEY.upper(), quote(KEY, safe=""), quote(KEY, safe="").lower(), b64(f"user:{KEY}")):
        assert masker.finds(f"before {written} after")
    assert not masker.finds("short")
    assert not masker.finds("a long text in which there is no secret of any kind, in no form")


@pytest.mark.parametrize("written", [KEY[:20], b64(KEY)[:22], f"{KEY[:18]} and more", quote(KEY, safe="")[:25]])
def test_the_beginning_of_a_key_that_was_cut_is_masked_where_texts_are_shortened(written: str) -> None:
    masked = Masker([KEY], cut=True).text(f"the server said: {written}")
    assert MASK in masked
    assert written[:16] not in masked
