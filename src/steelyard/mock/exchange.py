"""One reply on its way out: at its moment, token by token."""

from __future__ import annotations

from itertools import islice
from time import monotonic_ns
from typing import Protocol

from steelyard.mock.reply import Reply
from steelyard.mock.service import Service
from steelyard.mock.stats import Times


class Line(Protocol):
    """What an exchange needs of its connection."""

    is_paused: bool

    def write(self, data: bytes) -> None: ...

    def ended(self, *, closes: bool) -> None: ...


class Exchange:
    """Plays one reply. Ends once: when its last byte is written, or when the client has gone."""

    __slots__ = ("_first_ns", "_line", "_received_ns", "_reply", "_service", "_step", "is_over", "is_stalled")

    def __init__(self, line: Line, service: Service, reply: Reply, received_ns: int) -> None:
        self._line = line
        self._service = service
        self._reply = reply
        self._received_ns = received_ns
        self._first_ns = 0
        self._step = 0
        self.is_over = False
        self.is_stalled = False
        """Whether a piece was due while the client had too much to read: to be played when it has caught up."""

    def play(self, due: float) -> float | None:
        """Write what is due; the moment of the next piece, or None when that was the last."""
        self.is_stalled = self._line.is_paused
        if self.is_over or self.is_stalled:
            return None
        reply = self._reply
        if reply.frames is None:
            self._first_ns = monotonic_ns()
            if not reply.is_dropped:
                self._line.write(reply.start)
            self._end()
            return None
        step = self._step
        if step + 1 < reply.steps and reply.interval > 0:
            self._write(next(reply.frames), due, is_first=step == 0)
            self._step = step + 1
            return due + reply.interval
        self._play_rest(due)
        self._end()
        return None

    def abandon(self) -> None:
        """The client has gone: nothing more is written."""
        if not self.is_over:
            self._service.stats.abandoned += 1
            self._release()

    def _write(self, data: bytes, due: float, *, is_first: bool) -> None:
        reply = self._reply
        now = monotonic_ns()
        if reply.tells_times:
            data = b": sent_ns=%d due_ns=%d\n%b" % (now, due * 1e9, data)
        if reply.chunked:
            data = b"%x\r\n%b\r\n" % (len(data), data)
        if is_first:
            self._first_ns = now
            data = reply.start + data
        self._service.stats.chunks += 1
        self._line.write(data)

    def _play_rest(self, due: float) -> None:
        """Write all that is left as one: the last token with the ending, or a stream whose tokens come all at once."""
        reply = self._reply
        assert reply.frames is not None
        left = max(0, reply.steps - self._step)
        data = b"".join(islice(reply.frames, left))
        data += b"".join(reply.frames) if reply.torn_ending is None else reply.torn_ending
        self._service.stats.chunks += max(0, left - 1)
        if data:
            self._write(data, due, is_first=self._step == 0)
        if reply.chunked and reply.is_terminated:
            self._line.write(b"0\r\n\r\n")

    def _end(self) -> None:
        self._release()
        reply, stats = self._reply, self._service.stats
        if reply.is_dropped:
            stats.dropped += 1
        elif reply.path:
            stats.torn += reply.is_torn
            stats.answers[reply.path, reply.status] += 1
        if reply.request_id:
            times = Times(reply.request_id, reply.id, self._received_ns, self._first_ns, monotonic_ns())
            stats.times.append(times)
        self._line.ended(closes=reply.closes)

    def _release(self) -> None:
        """Make room for the next request."""
        self.is_over = True
        if self._reply.is_admitted:
            self._service.limits.release()
