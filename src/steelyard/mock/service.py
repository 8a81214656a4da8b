"""The mock's service: makes the reply to each request, applies the limits and keeps the statistics."""

from __future__ import annotations

import heapq
import math
import re
import time
from collections import Counter, deque
from collections.abc import Iterator
from time import monotonic
from typing import Any
from urllib.parse import parse_qs

import msgspec

from steelyard.errors import ConfigurationError
from steelyard.mock.answers import ParsedRequest, SimulatedAnswer, compose, read_answer_file
from steelyard.mock.dialects import Dialect, MockRoute, reason_phrase, route
from steelyard.mock.options import MockOptions, RequestOptions, Tear, default_request_options, request_options
from steelyard.mock.randomness import RandomNumbers, RandomSource, RequestRandomness, hits, pick
from steelyard.transport.http_server import BadRequest, Head, Request
from steelyard.units import parse_rate

JSON = b"application/json"
_start_cache: dict[tuple[int, bytes], bytes] = {}
_TEARS: tuple[Tear, ...] = ("cut", "end")
_OTHER_PATHS = "other"
_MAX_CACHED_OPTIONS = 1024
_KEY_HEADERS = (b"x-api-key", b"api-key", b"x-goog-api-key")
_AWS_KEY = re.compile(rb"\s*Credential=([^/]+)/")
"""The id of the key that a request was signed with; the signature itself is not checked."""
_MAX_TIMES = 100_000
_COUNTERS = (
    "dropped",
    "torn",
    "abandoned",
    "tokens_input",
    "tokens_output",
    "chunks",
    "connections",
    "connections_opened",
    "peak_connections",
    "bytes_received",
    "bytes_sent",
    "first_request_at",
    "last_request_at",
)


class Reply(msgspec.Struct, kw_only=True):
    """A reply ready to be sent: when, which bytes, and how it ends."""

    path: str
    """The path it is counted under; empty for the mock's own pages."""
    status: int
    delay: float = 0.0
    """Seconds from the request to the first byte."""
    start: bytes = b""
    """Bytes that are written first: the head of a stream, or the whole reply."""
    frames: Iterator[bytes] | None = None
    """The pieces of a stream, one for each step, and its ending."""
    steps: int = 0
    interval: float = 0.0
    chunked: bool = True
    torn_ending: bytes | None = None
    """What replaces the ending of a torn stream: nothing, or an error."""
    is_terminated: bool = True
    """Whether a stream's end is marked, as HTTP requires."""
    closes: bool = False
    """Whether the connection is closed after it."""
    is_admitted: bool = False
    """Whether it counts towards the concurrency until its last byte is written."""
    tokens: tuple[int, int] = (0, 0)
    """What its usage says, counted when all of it was written."""
    is_dropped: bool = False
    is_torn: bool = False
    includes_times: bool = False
    request_id: str = ""
    id: str | None = None


def reply_head(status: int, kind: bytes, length: int | None, request: Head | None, *more: tuple[bytes, bytes]) -> bytes:
    """Make a status line and headers; without a length the body is chunked, or ends when the connection closes."""
    start = _start(status, kind)
    headers = b"".join([b"%b: %b\r\n" % header for header in more])
    if length is not None and request is not None and request.keep_alive and not request.is_http_1_0:
        return b"%b%bcontent-length: %d\r\n\r\n" % (start, headers, length)
    framing = b"content-length: %d\r\n" % length if length is not None else b"transfer-encoding: chunked\r\n"
    if length is None and request is not None and request.is_http_1_0:
        framing = b"connection: close\r\n"
    elif request is None or not request.keep_alive:
        framing += b"connection: close\r\n"
    elif request.is_http_1_0:
        framing += b"connection: keep-alive\r\n"
    return b"%b%b%b\r\n" % (start, headers, framing)


def _start(status: int, kind: bytes) -> bytes:
    found = _start_cache.get((status, kind))
    if found is None:
        line = f"HTTP/1.1 {status} {reason_phrase(status)}\r\nserver: steelyard-mock\r\ncontent-type: "
        found = _start_cache[status, kind] = line.encode() + kind + b"\r\n"
    return found


class Service:
    """What the connections of one server share."""

    def __init__(self, options: MockOptions) -> None:
        self.options = options
        self.stats = Stats()
        self.limits = Limits(options.max_concurrency, options.rate)
        self._queue = None if options.slots is None else Queue(options.slots)
        self._random = RandomSource(options.seed)
        self._answer_file = read_answer_file(options.answers) if options.answers is not None else None
        self._default_options = default_request_options(options)
        self._options_by_header: dict[bytes, RequestOptions] = {}

    def reply(self, request: Request) -> Reply:
        """Decide the reply to a request."""
        head = request.head
        found = route(head.path)
        if found is None:
            return _refused(head, 404, f"nothing is at {head.path}")
        if head.method not in found.methods:
            return _refused(head, 405, f"{head.path} takes {' and '.join(found.methods)}", allow=found.methods)
        if found.dialect is None:
            return self._page(head, found)
        return self._answer(request, found, found.dialect)

    def bad_request(self, error: BadRequest) -> Reply:
        """Make the last reply on a connection that sent a malformed request."""
        return _refused(None, error.status, str(error))

    def stats_report(self, *, with_times: bool = False) -> dict[str, Any]:
        """Make the content of `/stats`."""
        return self.stats.report(self.limits.current, self.limits.peak, with_times=with_times)

    def reset(self) -> None:
        """Set all counters to zero, and forget which requests came before."""
        self.stats.reset()
        self.limits.reset()
        self._random.reset()

    def _page(self, head: Head, found: MockRoute) -> Reply:
        if found.path == "/stats":
            report = self.stats_report(with_times=parse_qs(head.query).get("times", ["0"])[0] not in ("", "0"))
            return _json(head, 200, msgspec.json.encode(report))
        if found.path == "/stats/reset":
            self.reset()
            return _json(head, 200, b'{"reset":true}')
        if found.path == "/health":
            return _json(head, 200, b'{"status":"ok"}')
        if not self._has_key(head):
            return _refused(head, 401, "Incorrect API key provided")
        return self._models(head, found)

    def _models(self, head: Head, found: MockRoute) -> Reply:
        names = self.options.models or ("mock",)
        if found.model is None:
            page = {"object": "list", "data": [_model(name) for name in names], "has_more": False}
            return _json(head, 200, msgspec.json.encode(page))
        if self.options.models and found.model not in names:
            return _refused(head, 404, f"The model `{found.model}` does not exist")
        return _json(head, 200, msgspec.json.encode(_model(found.model)))

    def _answer(self, request: Request, found: MockRoute, dialect: Dialect) -> Reply:
        head, randomness = request.head, self._random.for_request(request.body)
        client_id = head.headers.get(b"x-mock-id")
        own_id = None if client_id is None else client_id.decode("latin-1")
        call = _Call(dialect, head, randomness, f"req_{randomness.id}", own_id)
        self.stats.received(request.size, randomness.digest if call.id is None else call.id)
        if self.options.key is not None and not self._has_key(head):
            return _failed(call, 401, "Incorrect API key provided")
        try:
            options = self._options_for(head)
            parsed = dialect.parse(request.body)
        except (msgspec.ValidationError, ConfigurationError) as error:
            return _failed(call, 400, str(error))
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            return _failed(call, 400, f"the body is not JSON: {error}")
        parsed.model = parsed.model or found.model
        if found.stream is not None:
            parsed.stream = found.stream
        if (wrong := self._problem(parsed)) is not None:
            return _failed(call, *wrong)
        if found.counts:
            body = msgspec.json.encode({"input_tokens": parsed.count_input_tokens()})
            return _json(head, 200, body, (dialect.id_header, call.request_id.encode()), path=found.path)
        refusal = self.limits.admit(monotonic())
        if refusal is not None:
            after = refusal.retry_after if options.retry_after is None else options.retry_after
            return _failed(call, 429, refusal.message, retry_after=after)
        try:
            reply = self._admitted(call, parsed, options)
        except BaseException:
            self.limits.release()
            raise
        reply.is_admitted = True
        return reply

    def _admitted(self, call: _Call, request: ParsedRequest, options: RequestOptions) -> Reply:
        numbers = call.randomness.numbers()
        delay = options.latency.draw(numbers.latency)
        if hits(numbers.slow_first, options.slow_first_rate):
            delay += options.slow_first.draw(numbers.latency)
        status = options.fail or (500 if hits(numbers.error, options.error_rate) else None)
        if status is not None:
            after = 1.0 if options.retry_after is None and status == 429 else options.retry_after
            return _failed(call, status, "The mock was told to fail", retry_after=after, delay=delay)
        if hits(numbers.drop, options.drop_rate):
            return Reply(path=call.dialect.path, status=0, delay=delay, is_dropped=True, closes=True)
        answer = compose(request, options, call.randomness, numbers, self._answer_file)
        tear = options.tear or (_torn(numbers) if hits(numbers.torn, options.torn_rate) else None)
        reply = _streamed(call, answer, tear) if request.stream else _whole(call, answer, tear)
        if answer.usage is not None:
            reply.tokens = (answer.usage.input, answer.usage.output)
        reply.interval = options.interval(numbers.pace)
        # An answer that is not streamed comes when its last token would have come.
        whole = delay + max(0, answer.steps - 1) * reply.interval
        reply.delay = delay if request.stream else whole
        if self._queue is not None:
            reply.delay += self._queue.wait(monotonic(), whole)
        return reply

    def _options_for(self, head: Head) -> RequestOptions:
        header = head.headers.get(b"x-mock")
        if header is None:
            return self._default_options
        options = self._options_by_header.get(header)
        if options is None:
            options = request_options(self.options, header.decode("latin-1"))
            if len(self._options_by_header) >= _MAX_CACHED_OPTIONS:
                self._options_by_header.clear()
            self._options_by_header[header] = options
        return options

    def _has_key(self, head: Head) -> bool:
        key = self.options.key
        sent = next((head.headers[name] for name in _KEY_HEADERS if head.headers.get(name)), None)
        if sent is None:
            scheme, _, sent = head.headers.get(b"authorization", b"").partition(b" ")
            signed = _AWS_KEY.match(sent) if scheme == b"AWS4-HMAC-SHA256" else None
            sent = signed[1] if signed else sent.strip() if scheme.lower() == b"bearer" else None
        return key is None or sent == key.encode()

    def _problem(self, request: ParsedRequest) -> tuple[int, str] | None:
        """Return why a request cannot be answered, in its provider's words; None if it can."""
        if not request.model:
            return 400, "you must provide a model parameter"
        if self.options.models and request.model not in self.options.models:
            return 404, f"The model `{request.model}` does not exist"
        if not request.turns:
            return 400, "there is nothing to answer: no messages and no input"
        return None


class _Call(msgspec.Struct):
    """One request to one of the APIs."""

    dialect: Dialect
    head: Head
    randomness: RequestRandomness
    request_id: str
    id: str | None


def _torn(numbers: RandomNumbers) -> Tear:
    return _TEARS[pick(numbers.tear, len(_TEARS))]


def _whole(call: _Call, answer: SimulatedAnswer, tear: Tear | None) -> Reply:
    body = call.dialect.whole(answer)
    length = len(body)
    if tear == "error":
        body = call.dialect.failure(500, "The mock was told to fail", call.request_id)
        length = len(body)
    elif tear is not None:
        body = body[: length // 2]
        length = len(body) if tear == "end" else length
    start = reply_head(200, JSON, length, call.head, (call.dialect.id_header, call.request_id.encode()))
    return Reply(
        path=call.dialect.path,
        status=200,
        start=start + body,
        closes=tear == "cut" or not call.head.keep_alive,
        is_torn=tear is not None,
        request_id=call.request_id,
        id=call.id,
    )


def _streamed(call: _Call, answer: SimulatedAnswer, tear: Tear | None) -> Reply:
    id_header = (call.dialect.id_header, call.request_id.encode())
    reply = Reply(
        path=call.dialect.path,
        status=200,
        request_id=call.request_id,
        id=call.id,
        start=reply_head(200, call.dialect.stream_type, None, call.head, id_header),
        frames=call.dialect.frames(answer),
        steps=answer.steps,
        chunked=not call.head.is_http_1_0,
        closes=call.head.is_http_1_0 or not call.head.keep_alive,
        includes_times=b"x-mock-times" in call.head.headers,
    )
    if tear is not None:
        reply.is_torn = True
        reply.steps = math.ceil(answer.steps / 2)
        reply.torn_ending = call.dialect.broken("The mock was told to fail") if tear == "error" else b""
        if tear == "cut":
            reply.closes, reply.is_terminated = True, False
    return reply


def _failed(call: _Call, status: int, message: str, *, retry_after: float | None = None, delay: float = 0.0) -> Reply:
    body = call.dialect.failure(status, message, call.request_id)
    more = [(call.dialect.id_header, call.request_id.encode())]
    if retry_after is not None:
        more.append((b"retry-after", f"{retry_after:.3f}".rstrip("0").rstrip(".").encode()))
        more.append((b"retry-after-ms", f"{retry_after * 1000:.0f}".encode()))
    start = reply_head(status, JSON, len(body), call.head, *more)
    return Reply(
        path=call.dialect.path,
        status=status,
        delay=delay,
        start=start + body,
        closes=not call.head.keep_alive,
        request_id=call.request_id,
        id=call.id,
    )


def _refused(head: Head | None, status: int, message: str, allow: tuple[str, ...] = ()) -> Reply:
    body = msgspec.json.encode({"error": {"message": message, "type": "invalid_request_error"}})
    more = [(b"allow", ", ".join(allow).encode())] if allow else []
    return _json(head, status, body, *more, path=_OTHER_PATHS)


def _json(head: Head | None, status: int, body: bytes, *more: tuple[bytes, bytes], path: str = "") -> Reply:
    start = reply_head(status, JSON, len(body), head, *more)
    is_head = head is not None and head.method == "HEAD"
    closes = head is None or not head.keep_alive
    return Reply(path=path, status=status, start=start if is_head else start + body, closes=closes)


def _model(name: str) -> dict[str, Any]:
    """Describe a model with the fields of both providers."""
    openai = {"id": name, "object": "model", "created": 0, "owned_by": "steelyard"}
    return {**openai, "type": "model", "display_name": name, "created_at": "1970-01-01T00:00:00Z"}


class Refusal(msgspec.Struct, frozen=True):
    """Why a request is refused, and the seconds after which to retry."""

    message: str
    retry_after: float


class Queue:
    """A number of slots that requests are served in, first come first served."""

    def __init__(self, slots: int) -> None:
        self._free_at = [0.0] * slots

    def wait(self, now: float, seconds: float) -> float:
        """Take the first slot that is free for that many seconds; how long that has to be waited for."""
        starts = max(now, self._free_at[0])
        heapq.heapreplace(self._free_at, starts + seconds)
        return starts - now


class Limits:
    """Counts the requests that are being answered, and refuses those above a limit.

    The rate is a bucket that holds one unit's worth (600 for `600/min`, 10 for `10/s`) and fills evenly.
    """

    def __init__(self, max_concurrency: int | None = None, rate: str | None = None) -> None:
        self._max = max_concurrency
        limit = parse_rate(rate) if rate else None
        self._capacity = max(1.0, limit.count) if limit else 0.0
        self._per_second = limit.per_second if limit else 0.0
        self._left = self._capacity
        self._filled_at = 0.0
        self.current = 0
        self.peak = 0

    def admit(self, now: float) -> Refusal | None:
        """Admit a request, which `release` must end; or return why not."""
        if self._max is not None and self.current >= self._max:
            return Refusal(f"Rate limit reached: {self._max} requests at once are allowed", 1.0)
        if self._capacity and (refusal := self._spend(now)):
            return refusal
        self.current += 1
        if self.current > self.peak:
            self.peak = self.current
        return None

    def release(self) -> None:
        self.current -= 1

    def reset(self) -> None:
        """Forget the peak. Requests that are being answered stay counted, and the rate's bucket is unchanged."""
        self.peak = self.current

    def _spend(self, now: float) -> Refusal | None:
        self._left = min(self._capacity, self._left + (now - self._filled_at) * self._per_second)
        self._filled_at = now
        if self._left < 1:
            return Refusal("Rate limit reached: too many requests", (1 - self._left) / self._per_second)
        self._left -= 1
        return None


class Times(msgspec.Struct, gc=False):
    """When a request was received and its answer written, in nanoseconds of the system's monotonic clock."""

    request_id: str
    id: str | None
    """Its `x-mock-id`, if it had one."""
    received_ns: int
    first_ns: int
    """The moment before the first token, or the whole answer, was written."""
    last_ns: int

    def report(self) -> dict[str, Any]:
        delay = (self.first_ns - self.received_ns) / 1e9
        return {**msgspec.structs.asdict(self), "first_token_delay_s": delay}


class Stats:
    """Counters of one server, since it started or was reset."""

    def __init__(self) -> None:
        self.connections = 0
        self.reset()

    def reset(self) -> None:
        """Set all counters to zero; open connections stay counted."""
        self.connections_opened = self.connections
        self.peak_connections = self.connections
        self.requests = 0
        self.answers: Counter[tuple[str, int]] = Counter()
        self.dropped = 0
        self.torn = 0
        self.abandoned = 0
        self.tokens_input = 0
        self.tokens_output = 0
        self.chunks = 0
        self.bytes_received = 0
        self.bytes_sent = 0
        self.first_request_at: float | None = None
        self.last_request_at: float | None = None
        self.ids: Counter[str | bytes] = Counter()
        self.times: deque[Times] = deque(maxlen=_MAX_TIMES)

    def opened(self) -> None:
        self.connections += 1
        self.connections_opened += 1
        self.peak_connections = max(self.peak_connections, self.connections)

    def received(self, size: int, identity: str | bytes) -> None:
        """Count a complete request to one of the APIs."""
        self.requests += 1
        self.bytes_received += size
        self.last_request_at = now = time.time()
        if self.first_request_at is None:
            self.first_request_at = now
        self.ids[identity] += 1

    def report(self, current: int, peak: int, *, with_times: bool) -> dict[str, Any]:
        """Return all figures, for JSON."""
        by_path: dict[str, Counter[str]] = {}
        by_status: Counter[str] = Counter()
        for (path, status), count in self.answers.items():
            by_path.setdefault(path, Counter())[str(status)] += count
            by_status[str(status)] += count
        report = {
            "requests": self.requests,
            "by_status": by_status,
            "by_path": by_path,
            "unique_ids": len(self.ids),
            "repeated_ids": sum(count > 1 for count in self.ids.values()),
            "peak_concurrency": peak,
            "current_concurrency": current,
            **{name: getattr(self, name) for name in _COUNTERS},
        }
        if with_times:
            report["times"] = [times.report() for times in self.times]
        return report
