"""One request and its answer on a libcurl handle, which is made once and used for many."""

from __future__ import annotations

import re
from functools import lru_cache
from time import perf_counter

import pycurl

from steelyard.contracts import HttpReply, HttpRequest
from steelyard.errors import TargetError
from steelyard.transport.faults import fault
from steelyard.transport.settings import Settings

_QUEUED = getattr(pycurl, "QUEUE_TIME_T", pycurl.PRETRANSFER_TIME_T)
_CONNECTED, _SECURED = pycurl.CONNECT_TIME_T, pycurl.APPCONNECT_TIME_T
_LAST_SENT = getattr(pycurl, "POSTTRANSFER_TIME_T", pycurl.PRETRANSFER_TIME_T)
"""When the request's last byte had been handed to the socket; libcurl before 8.10 only tells of the first."""
_SENT_AT_ONCE = 1 << 16
"""Bytes that a socket takes at once."""
_STATUS_LINE = re.compile(rb"HTTP/[0-9.]+ +([0-9]{3})")


class Exchange:
    """A libcurl handle that takes down what arrives, and when.

    libcurl stamps the sending of a request, but on its own clock and from a start that only it knows. It also stamps
    the first byte of the answer, and hands over the first header line in the same breath: there this clock is read,
    and the difference of libcurl's two stamps leads back to the moment of sending.

    That moment is when the connection was there, which for most requests is a few microseconds before their bytes go:
    libcurl's own stamps of sending are taken after it. Sending may wake up the server, and on a busy machine the
    server then runs, and answers, before the stamp is taken; the answer would look faster than it was. Only a long
    request, which takes its time to be sent, is timed from the last of those stamps.
    """

    __slots__ = (
        "_arrivals",
        "_body",
        "_chunks",
        "_head",
        "_headed",
        "_headers",
        "_long",
        "_method",
        "_read",
        "_url",
        "called",
        "handle",
    )

    def __init__(self, settings: Settings) -> None:
        self.handle = pycurl.Curl()
        self.called = 0.0
        self._long = False
        self._body = b""
        self._read = 0
        self._url = b""
        self._headers: list[bytes] = []
        self._method = ""
        self.clear()
        for option, value in settings.options():
            self.handle.setopt(option, value)
        self.handle.setopt(pycurl.HEADERFUNCTION, self._on_header)
        self.handle.setopt(pycurl.WRITEFUNCTION, self._on_body)
        self.handle.setopt(pycurl.READFUNCTION, self._next_of_body)

    def prepare(self, request: HttpRequest, url: bytes, headers: list[bytes], called: float) -> None:
        """Make the handle ready for a request; what is as it was for the last one is not set again."""
        setopt = self.handle.setopt
        if request.method != self._method:
            self._set_method(request.method)
        if url != self._url:
            setopt(pycurl.URL, url)
            self._url = url
        if headers is not self._headers:
            setopt(pycurl.HTTPHEADER, headers)
            self._headers = headers
        if request.method != "GET":
            setopt(pycurl.POSTFIELDSIZE_LARGE, len(request.body))
            self._body, self._read = request.body, 0
        self._long = len(request.body) > _SENT_AT_ONCE
        self.called = called

    def _set_method(self, method: str) -> None:
        self.handle.setopt(pycurl.HTTPGET if method == "GET" else pycurl.POST, 1)
        if method in ("GET", "POST"):
            self.handle.unsetopt(pycurl.CUSTOMREQUEST)
        else:
            self.handle.setopt(pycurl.CUSTOMREQUEST, method)
        self._method = method

    def _next_of_body(self, size: int) -> bytes:
        """The next bytes to be sent, each of them only once.

        libcurl would send a body that it holds a second time, and say nothing of it, when a kept connection closes
        without a byte of an answer. Yet the server may have read the first: that would be two calls counted as one.
        """
        start = self._read
        self._read = start + size
        return self._body[start : self._read]

    def _on_header(self, line: bytes) -> None:
        if not self._head:
            self._headed = perf_counter()
        self._head.append(line)

    def _on_body(self, data: bytes) -> None:
        self._arrivals.append(perf_counter())
        self._chunks.append(data)

    def clear(self) -> None:
        """Forget what came, so that the handle can be used again."""
        self._head: list[bytes] = []
        self._headed = 0.0
        self._chunks: list[bytes] = []
        self._arrivals: list[float] = []

    def fail(self, code: int, words: str, url: str) -> TargetError:
        """The error that ended the exchange."""
        return fault(code, words, url, self.reply(), proxy_status=self.handle.getinfo(pycurl.HTTP_CONNECTCODE))

    def reply(self) -> HttpReply | None:
        """What came, in full or as far as it got; None when not even a status did."""
        if not self._head:
            return None
        status, headers = read_head(self._head)
        getinfo = self.handle.getinfo
        first_byte = getinfo(pycurl.STARTTRANSFER_TIME_T)
        last_sent = getinfo(_LAST_SENT) if self._long else 0
        if not 0 < last_sent <= first_byte:  # all went at once, or it was answered before all was sent
            last_sent = max(getinfo(_QUEUED), getinfo(_CONNECTED), getinfo(_SECURED))
        sent = self._headed - max(0, first_byte - last_sent) / 1e6
        arrivals = [at - sent for at in self._arrivals]
        # libcurl's total also counts a GET's try on a connection that turned out to be dead: then this clock says it.
        ended = min((getinfo(pycurl.TOTAL_TIME_T) - last_sent) / 1e6, perf_counter() - sent)
        if arrivals and arrivals[-1] > ended:
            ended = arrivals[-1]
        return HttpReply(status, headers, self._chunks, arrivals, ended, max(0.0, sent - self.called))


def read_head(lines: list[bytes]) -> tuple[int, dict[str, str]]:
    """The last status in these lines (interim ones may come before it) and its headers, names in lower case."""
    status, within = 0, False
    headers: dict[str, str] = {}
    for line in lines:
        if not within and (found := _STATUS_LINE.match(line)):
            status, within, headers = int(found[1]), True, {}
        elif line in (b"\r\n", b"\n"):
            within = False  # what comes after the blank line are trailers
        elif within:
            name, value = _field(line)
            headers[name] = f"{headers[name]}, {value}" if name in headers else value
    return status, headers


@lru_cache(maxsize=512)
def _field(line: bytes) -> tuple[str, str]:
    """A header line's name and value; remembered, since most lines of an endpoint's answers are always the same."""
    name, _, value = line.decode("latin-1").partition(":")
    return name.lower(), value.strip()
