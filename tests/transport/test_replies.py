"""How replies are read from bytes, and how they reach their callers."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import zlib

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from steelyard.errors import TransportError
from steelyard.protocols import HttpReply
from steelyard.transport.replies import BadReply, Handover, ReplyReader

LIMIT = 1_000_000
SIZED = b"HTTP/1.1 200 OK\r\nContent-Length: 11\r\nX-A: b\r\n\r\nhello world"
CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nX-A: b\r\n\r\n5\r\nhello\r\n6;x=y\r\n world\r\n0\r\n"
GZIPPED = gzip.compress(b"hello world", mtime=0)
WHOLE = {
    "sized": SIZED,
    "chunked": CHUNKED + b"\r\n",
    "with trailers": CHUNKED + b"X-A: trailer\r\nX-B: c\r\n\r\n",
    "after interim ones": b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Hints\r\nX-A: hint\r\n\r\n" + SIZED,
    "with bare line ends": SIZED.replace(b"\r\n", b"\n"),
    "chunked with bare line ends": (CHUNKED + b"\r\n").replace(b"\r\n", b"\n"),
    "compressed": b"HTTP/1.1 200 OK\r\nX-A: b\r\nContent-Encoding: gzip\r\nContent-Length: %d\r\n\r\n%b"
    % (len(GZIPPED), GZIPPED),
    "compressed in chunks": b"HTTP/1.1 200 OK\r\nX-A: b\r\nContent-Encoding: deflate\r\n"
    + b"Transfer-Encoding: chunked\r\n\r\n"
    + b"".join(b"1\r\n%b\r\n" % bytes([byte]) for byte in zlib.compress(b"hello world"))
    + b"0\r\n\r\n",
}


def read(*pieces: bytes, limit: int = LIMIT) -> tuple[ReplyReader, bool]:
    """What a reader makes of these pieces, which arrive a second after each other; whether the reply is whole."""
    reader = ReplyReader(limit)
    whole = False
    for at, piece in enumerate(pieces):
        assert not whole, "bytes after the end"
        whole = reader.feed(piece, float(at))
    return reader, whole


@given(
    name=st.sampled_from(list(WHOLE)),
    cuts=st.lists(st.integers(1, 200), max_size=12, unique=True).map(sorted),
)
@example(name="chunked", cuts=list(range(1, 120)))
@example(name="with bare line ends", cuts=list(range(1, 60)))
def test_wherever_a_reply_is_cut_it_reads_the_same(name: str, cuts: list[int]) -> None:
    data = WHOLE[name]
    ends = [cut for cut in cuts if cut < len(data)]
    pieces = [data[start:end] for start, end in zip([0, *ends], [*ends, len(data)], strict=True)]
    reader, whole = read(*pieces)
    assert whole
    assert reader.keeps_connection
    assert (reader.status, b"".join(reader.chunks), reader.headers["x-a"]) == (200, b"hello world", "b")
    assert len(reader.arrivals) == len(reader.chunks)
    assert reader.arrivals == sorted(reader.arrivals)
    assert "x-b" not in reader.headers


@given(data=st.binary(max_size=300), name=st.sampled_from(list(WHOLE)), at=st.integers(0, 200))
def test_no_bytes_break_the_reader(data: bytes, name: str, at: int) -> None:
    """Whatever comes is read, or refused with a reason."""
    reader = ReplyReader(LIMIT)
    whole = WHOLE[name]
    with contextlib.suppress(BadReply):
        if not reader.feed(whole[:at] + data + whole[at:], 0.0):
            reader.end()
        assert reader.status


def test_each_chunk_has_the_time_of_its_arrival() -> None:
    reader, whole = read(CHUNKED[:-3], b"", b"3\r\none\r\n3\r\ntwo\r\n", b"0\r\n\r\n")
    assert whole
    assert reader.chunks == [b"hello", b" world", b"one", b"two"]
    assert reader.arrivals == [0.0, 0.0, 2.0, 2.0]
    reply = reader.reply(-1.0, -1.5, 0)
    assert reply is not None
    assert (reply.arrivals[0], reply.ended, reply.queued) == (1.0, 4.0, 0.5)


@pytest.mark.parametrize(
    ("head", "keeps"),
    [
        (b"HTTP/1.1 200 OK\r\nContent-Length: 0", True),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\nConnection: close", False),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\nConnection: Keep-Alive, Close", False),
        (b"HTTP/1.0 200 OK\r\nContent-Length: 0", False),
        (b"HTTP/1.0 200 OK\r\nContent-Length: 0\r\nConnection: keep-alive", True),
        (b"HTTP/1.1 204 None\r\nContent-Length: 7", True),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 0, 0", True),
    ],
)
def test_headers_say_whether_the_connection_is_kept(head: bytes, keeps: bool) -> None:
    reader, whole = read(head + b"\r\n\r\n")
    assert whole
    assert reader.keeps_connection is keeps


@pytest.mark.parametrize("surplus", [b"HTTP/1.1 200 OK\r\n", b"x"])
@pytest.mark.parametrize("name", ["sized", "chunked"])
def test_a_connection_on_which_more_than_the_reply_came_is_not_kept(name: str, surplus: bytes) -> None:
    reader, whole = read(WHOLE[name] + surplus)
    assert whole
    assert b"".join(reader.chunks) == b"hello world"
    assert not reader.keeps_connection


def test_folded_and_repeated_headers_are_joined() -> None:
    reader, _ = read(b"HTTP/1.1 200 OK\r\nX-A: one,\r\n  two\r\nx-b: 1\r\nX-B: 2\r\nContent-Length: 0\r\n\r\n")
    assert reader.headers == {"x-a": "one, two", "x-b": "1, 2", "content-length": "0"}


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"SSH-2.0", "HTTP/0.9"),
        (b"HTTP/1.1 two hundred\r\n\r\n", "not a status line"),
        (b"HTTP/1.1 200 OK\r\nno colon\r\n\r\n", "not a header"),
        (b"HTTP/1.1 200 OK\r\nname : x\r\n\r\n", "not a header"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: -5\r\n\r\n", "content-length"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 5, 6\r\n\r\n", "content-length"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: br\r\n\r\n", "transfer encoding"),
        (b"HTTP/1.1 200 OK\r\nContent-Encoding: br\r\n\r\n", "content encoding"),
        (b"HTTP/1.1 200 OK\r\nX-A: " + b"a" * 400_000, "headers are longer"),
        (CHUNKED[:-3] + b"0x5\r\n", "size of a chunk"),
        (CHUNKED[:-3] + b"-5\r\n", "size of a chunk"),
        (CHUNKED[:-3] + b"5\r\nhelloo\r\n", "chunk does not end"),
        (CHUNKED[:-3] + b"5;" + b"x" * 20_000, "never ends"),
    ],
)
def test_what_is_not_http_is_refused_with_what_is_wrong(data: bytes, words: str) -> None:
    with pytest.raises(BadReply, match=words):
        read(data)


@pytest.mark.parametrize(
    "data",
    [
        b"HTTP/1.1 200 OK\r\nContent-Length: 1001\r\n\r\n",
        b"HTTP/1.1 200 OK\r\n\r\n" + b"x" * 1001,
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nfff\r\n" + b"x" * 1001,
        b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\n\r\n" + gzip.compress(bytes(10_000_000)),
    ],
    ids=["sized", "unsized", "chunked", "a bomb"],
)
def test_what_is_too_long_is_refused_before_it_is_held(data: bytes) -> None:
    with pytest.raises(BadReply) as bad:
        read(data, limit=1000)
    assert bad.value.code == 63


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "Empty reply"),
        (b"HTTP/1.1 200 OK\r\nX-A", "within the headers"),
        (SIZED[:-1], "outstanding read data"),
        (CHUNKED, "outstanding read data"),
        (b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\n\r\n" + GZIPPED[:-9], "not whole"),
    ],
)
def test_a_connection_that_ends_too_early_says_where(data: bytes, words: str) -> None:
    reader = ReplyReader(LIMIT)
    if data:
        reader.feed(data, 0.0)
    with pytest.raises(BadReply, match=words):
        reader.end()


def test_a_reply_without_a_length_ends_with_its_connection() -> None:
    reader, whole = read(b"HTTP/1.1 200 OK\r\n\r\nsome ", b"text")
    assert not whole
    reader.end()
    assert reader.chunks == [b"some ", b"text"]


# How replies reach their callers


def reply(chunks: int) -> HttpReply:
    return HttpReply(200, {}, [b"x"] * chunks, [0.0] * chunks, 0.0, 0.0)


async def handed(*outcomes: HttpReply | TransportError) -> tuple[Handover, list[asyncio.Future[HttpReply]]]:
    loop = asyncio.get_running_loop()
    handover = Handover(loop)
    waiting: list[asyncio.Future[HttpReply]] = [loop.create_future() for _ in outcomes]
    for done, outcome in zip(waiting, outcomes, strict=True):
        handover.give(done, outcome)
    return handover, waiting


def test_long_streams_are_handed_over_one_a_turn() -> None:
    async def main() -> list[int]:
        _, waiting = await handed(reply(256), reply(256), reply(256))
        settled = []
        for _ in waiting:
            settled.append(sum(one.done() for one in waiting))
            await asyncio.sleep(0)
        return settled

    assert asyncio.run(main()) == [1, 2, 3]


def test_a_few_short_streams_share_a_turn() -> None:
    async def main() -> int:
        _, waiting = await handed(*[reply(64)] * 10)
        return sum(one.done() for one in waiting)

    assert asyncio.run(main()) == 4


def test_whole_answers_are_handed_over_at_once() -> None:
    async def main() -> bool:
        _, waiting = await handed(*[reply(1)] * 20)
        return all(one.done() for one in waiting)

    assert asyncio.run(main())


def test_a_new_turn_has_room_again() -> None:
    async def main() -> bool:
        handover, _ = await handed(reply(256))
        await asyncio.sleep(0)
        late: asyncio.Future[HttpReply] = asyncio.get_running_loop().create_future()
        handover.give(late, reply(1))
        return late.done()

    assert asyncio.run(main())


def test_a_failure_waits_its_turn_and_is_raised() -> None:
    async def main() -> str:
        _, (_, failed) = await handed(reply(256), TransportError("cut off"))
        assert not failed.done()
        try:
            await failed
        except TransportError as error:
            return str(error)
        return "nothing was raised"

    assert asyncio.run(main()) == "cut off"


def test_one_that_nobody_waits_for_is_passed_over() -> None:
    async def main() -> list[bool]:
        _, (first, second, third) = await handed(reply(256), reply(256), reply(256))
        second.cancel()
        await asyncio.sleep(0)
        return [first.done(), second.cancelled(), third.done()]

    assert asyncio.run(main()) == [True, True, True]


def test_closing_hands_over_all_that_is_left() -> None:
    async def main() -> bool:
        handover, waiting = await handed(*[reply(256)] * 5)
        handover.close()
        return all(one.done() for one in waiting)

    assert asyncio.run(main())
