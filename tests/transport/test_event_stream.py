"""AWS event streams: frames however they are cut, their checksums, and what a damaged one leaves."""

from __future__ import annotations

import struct
import zlib

import pytest

from steelyard.transport.event_stream import DAMAGED, frame, frames, read_headers

ONE = frame(b'{"a":1}', event_type="first", content_type="application/json", message_type="event")
TWO = frame(b"", event_type="second", message_type="event")


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
