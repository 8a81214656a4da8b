"""Server-sent events out of raw bytes."""

from __future__ import annotations

import itertools
import struct
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from steelyard.transport import ServerSentEvent, events
from steelyard.transport.sse import DAMAGED, frame, frames, read_headers

ONE = frame(b'{"a":1}', event_type="first", content_type="application/json", message_type="event")
TWO = frame(b"", event_type="second", message_type="event")


def read(*chunks: bytes) -> list[ServerSentEvent]:
    """The events in these chunks, of which the first arrived at 0, the next at 1, and so on."""
    return events(chunks, [float(number) for number in range(len(chunks))])


def data_of(*chunks: bytes) -> list[bytes]:
    return [event.data for event in read(*chunks)]


def by_the_standard(body: bytes) -> list[tuple[bytes, str]]:
    """The events that the HTML standard's own steps find, one byte at a time; a last unfinished one left out."""
    body = body.removeprefix(b"\xef\xbb\xbf")
    found, data, name, line, position = [], [], b"", b"", 0
    while position < len(body):
        byte = body[position : position + 1]
        position += 1
        if byte not in (b"\r", b"\n"):
            line += byte
            continue
        if byte == b"\r" and body[position : position + 1] == b"\n":
            position += 1
        if not line:
            if data:
                found.append((b"\n".join(data), name.decode("utf-8", "replace") or "message"))
            data, name = [], b""
        elif not line.startswith(b":"):
            field, _, value = line.partition(b":")
            value = value[1:] if value[:1] == b" " else value
            if field == b"data":
                data.append(value)
            elif field == b"event":
                name = value
        line = b""
    return found


@pytest.mark.parametrize("end", [b"\n", b"\r\n", b"\r"])
def test_every_kind_of_line_end(end: bytes) -> None:
    assert data_of(b"data: one" + end + end + b"data: two" + end + end) == [b"one", b"two"]


@pytest.mark.parametrize(
    ("body", "data"),
    [
        (b"data:no space\n\n", [b"no space"]),
        (b"data:  two spaces\n\n", [b" two spaces"]),
        (b"data: a\ndata: b\ndata:\n\n", [b"a\nb\n"]),
        (b"data\n\n", [b""]),
        (b": comment\n\ndata: x\n: keep-alive\n\n:\n\n", [b"x"]),
        (b"\xef\xbb\xbfdata: after a mark\n\n", [b"after a mark"]),
        (b"id: 7\nretry: 100\nunknown: y\ndata: x\nDATA: no\ndatas: no\n\n", [b"x"]),
        (b"event: named but empty\n\ndata: x\n\n", [b"x"]),
        (b"\n\n\ndata: x\n\n\n\n", [b"x"]),
        (b'data: {"a": "b:c"}\n\n', [b'{"a": "b:c"}']),
        (b"", []),
        (b"<html>not a stream</html>", []),
    ],
)
def test_lines_are_read_by_the_standard(body: bytes, data: list[bytes]) -> None:
    assert data_of(body) == data


def test_an_event_has_its_name_or_the_default_one() -> None:
    named, plain = read(b"event: ping\ndata: {}\n\ndata: {}\n\n")
    assert (named.name, plain.name) == ("ping", "message")


@pytest.mark.parametrize("tail", [b"data: [DONE]", b"data: [DONE]\n", b"data: [DONE]\r"])
def test_a_last_event_without_its_blank_line_counts_but_is_marked(tail: bytes) -> None:
    first, last = read(b"data: x\n\n", tail)
    assert (first.terminated, first.at) == (True, 0.0)
    assert (last.data, last.terminated, last.at) == (b"[DONE]", False, 1.0)


def test_an_unfinished_event_arrived_with_the_last_chunk_even_if_that_was_empty() -> None:
    (last,) = read(b"data: x", b"")
    assert (last.data, last.terminated, last.at) == (b"x", False, 1.0)


def test_an_event_is_there_when_its_blank_line_is() -> None:
    early, late = read(b"data: early\n\nda", b"ta: la", b"te", b"\n", b"\n", b": more\n")
    assert (early.data, early.at) == (b"early", 0.0)
    assert (late.data, late.at) == (b"late", 4.0)


def test_the_second_half_of_a_line_end_adds_nothing() -> None:
    first, second = read(b"data: a\r\n\r", b"\ndata: b\r\n\r\n")
    assert (first.data, first.at) == (b"a", 0.0)
    assert (second.data, second.at) == (b"b", 1.0)


def test_a_character_split_between_chunks_stays_whole() -> None:
    word = "Zürich 🚋".encode()
    for cut in range(len(word) + 1):
        assert data_of(b"data: " + word[:cut], word[cut:] + b"\n\n") == [word]


def test_one_line_of_fifty_megabytes_in_many_chunks() -> None:
    piece = b"x" * 1_000
    chunks = [b"data: ", *([piece] * 50_000), b"\n\n"]
    (event,) = read(*chunks)
    assert len(event.data) == 50_000_000
    assert event.at == 50_001.0


def test_chunks_and_arrivals_must_match() -> None:
    with pytest.raises(ValueError):
        events([b"data: x\n\n"], [])


WORDS = [b"data:", b"data", b" ", b"event: e", b":", b"\n", b"\n\n", b"x", "é".encode(), b"\xff", b"\xef\xbb\xbf"]
BODIES = st.one_of(
    *(st.lists(st.sampled_from(words), max_size=40).map(b"".join) for words in (WORDS, [*WORDS, b"\r", b"\r\n"]))
)


@given(BODIES, st.lists(st.integers(0, 200), max_size=10))
def test_any_split_gives_what_the_standard_says(body: bytes, cuts: list[int]) -> None:
    """Whole events are the standard's, however the bytes were cut; arrivals never run backwards."""
    places = sorted({min(cut, len(body)) for cut in cuts} | {0, len(body)})
    chunks = [body[start:end] for start, end in itertools.pairwise(places)]
    whole, split = read(body), read(*chunks)
    assert [(event.data, event.name, event.terminated) for event in split] == [
        (event.data, event.name, event.terminated) for event in whole
    ]
    assert [(event.data, event.name) for event in split if event.terminated] == by_the_standard(body)
    assert [event.at for event in split] == sorted(event.at for event in split)


@given(BODIES, st.data())
def test_an_event_is_never_dated_before_its_bytes(body: bytes, data: st.DataObject) -> None:
    """Cut off after the chunk that an event is dated at, the stream already holds that event."""
    cuts = sorted(data.draw(st.sets(st.integers(0, len(body)), max_size=6)) | {0, len(body)})
    chunks = [body[start:end] for start, end in itertools.pairwise(cuts)]
    found = [event for event in read(*chunks) if event.terminated]
    for number, event in enumerate(found, 1):
        upto = [each for each in read(*chunks[: int(event.at) + 1]) if each.terminated]
        before = [each for each in read(*chunks[: int(event.at)]) if each.terminated]
        assert len(upto) >= number > len(before)


def test_frames_are_read_however_their_bytes_arrive_each_when_it_is_complete() -> None:
    data = ONE + TWO
    for size in (1, 3, 7, len(ONE), len(data)):
        chunks = [data[at : at + size] for at in range(0, len(data), size)]
        first, second = frames(chunks, [float(number) for number in range(len(chunks))])
        assert (first.name, first.data, first.at) == ("first", b'{"a":1}', float((len(ONE) - 1) // size))
        assert (second.name, second.data, second.at) == ("second", b"", float(len(chunks) - 1))


def test_a_cut_frame_is_left_out() -> None:
    for missing in (1, 5, len(TWO) - 1):
        assert [event.name for event in frames([ONE + TWO[:-missing]], [0.0])] == ["first"]
    assert frames([], []) == []


@pytest.mark.parametrize("place", [0, 5, 9, 14, -6, -1])
def test_a_flipped_bit_anywhere_is_found_and_what_came_before_is_kept(place: int) -> None:
    damaged = bytearray(TWO)
    damaged[place] ^= 0x10
    first, last, *none = frames([ONE + bytes(damaged) + ONE], [0.0])
    assert (first.name, last.name, none) == ("first", DAMAGED, [])
    assert b"checksum" in last.data


def test_impossible_lengths_are_damage_not_a_wait() -> None:
    for total, headers in ((10, 0), (100, 95), (1 << 30, 0)):
        lengths = struct.pack(">II", total, headers)
        data = lengths + struct.pack(">I", zlib.crc32(lengths)) + bytes(100)
        (event,) = frames([data], [0.0])
        assert (event.name, b"impossible length" in event.data) == (DAMAGED, True)


def test_exceptions_are_marked_and_headers_of_all_types_are_read_over() -> None:
    (event,) = frames([frame(b"{}", exception_type="throttlingException", message_type="exception")], [0.0])
    assert event.name == "!throttlingException"
    (event,) = frames([frame(b"", error_code="oops", message_type="error")], [0.0])
    assert event.name == "!oops"
    sizes = {0: 0, 1: 0, 2: 1, 3: 2, 4: 4, 5: 8, 8: 8, 9: 16}
    data = b"".join(b"\x01x" + bytes([kind]) + bytes(size) for kind, size in sizes.items())
    data += b"\x01b\x06\x00\x02ab" + b"\x01t\x07\x00\x02ok"
    assert read_headers(data) == {"t": "ok"}


def test_headers_that_cannot_be_read_are_damage() -> None:
    good = frame(b"", x="y")
    headers = bytearray(good[12:-4])
    headers[3] = 99  # no such type
    body = good[:12] + bytes(headers)
    (event,) = frames([body + struct.pack(">I", zlib.crc32(body))], [0.0])
    assert event.name == DAMAGED


def test_frames_are_those_of_botocore() -> None:
    eventstream = pytest.importorskip("botocore.eventstream")
    buffer = eventstream.EventStreamBuffer()
    buffer.add_data(ONE + TWO)
    first, second = list(buffer)
    assert (first.headers[":event-type"], first.payload) == ("first", b'{"a":1}')
    assert second.headers[":event-type"] == "second"
