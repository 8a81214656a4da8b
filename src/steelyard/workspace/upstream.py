"""The providers behind the gateway: which routes are passed on, with which headers and key, and how replies are read.

Routes and headers are allow lists. A reply is passed to the agent chunk by chunk as it is read; replies with
an error status are held until they are whole, as the key is masked in them. Nothing is retried: agents do that. Two
requests are sent a second time because of what the gateway itself added: one whose key has expired, and one whose
server refuses `stream_options`, by which a chat stream is asked for its token counts.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from time import perf_counter
from typing import TYPE_CHECKING, Any, Protocol, cast

import msgspec

from steelyard.errors import TargetError, TransportError
from steelyard.masking import Masker, Secret
from steelyard.protocols import HttpReply, HttpRequest, Identity, InvocationContext
from steelyard.records import EvalCase, InvocationResponse
from steelyard.targets.anthropic import AnthropicMessages, read_anthropic_stream, read_anthropic_whole
from steelyard.targets.auth import Address, Auth, Headers, check_switches, check_texts
from steelyard.targets.conversation import ModelAnswer, partial_of, raise_if_incomplete, response_of
from steelyard.targets.endpoint import Connections, EndpointConnection, EndpointTarget
from steelyard.targets.keys import KeyFunction, is_access_token
from steelyard.targets.openai_chat import OpenAIChat, read_chat_stream, read_chat_whole, refuses_usage
from steelyard.targets.openai_responses import read_response_stream, read_response_whole
from steelyard.targets.wire import UNREADABLE, form_of, unreadable
from steelyard.transport.errors import request_id, status_error
from steelyard.transport.sse import ServerSentEvent, events
from steelyard.workspace.recording import Body

if TYPE_CHECKING:
    from steelyard.transport.client import CurlTransport
    from steelyard.transport.plain import PlainTransport

_PASSED_HEADERS = frozenset({"accept", "content-type", "idempotency-key", "user-agent"})
_PASSED_PREFIXES = ("anthropic-", "openai-", "x-stainless-")
_KEPT_BACK = frozenset(
    {
        "alt-svc", "connection", "content-encoding", "keep-alive", "proxy-authenticate", "set-cookie", "server",
        "strict-transport-security", "trailer", "transfer-encoding", "upgrade",
    }
)  # fmt: skip
"""Headers of a reply that are about the connection to the provider, not about the reply."""
_CONNECTIONS_PER_AGENT = 8
_NO_ANSWER = ModelAnswer(complete=False, terminated=False)
_USAGE_CHUNK = re.compile(rb'"choices"\s*:\s*\[\s*\]')
_USAGE = re.compile(rb'"usage"\s*:\s*\{')
_RESPONSE_ID = re.compile(rb'"id"\s*:\s*"(resp_[^"]+)"')
_MAX_SEARCHED = 65_536
_EVENT_END = re.compile(rb"\r?\n\r?\n")


class Route(msgspec.Struct, frozen=True):
    """A request that is passed on."""

    api: str
    method: str
    path: str
    """Without a leading `/v1`; `*` at its end stands for one name."""
    generates: bool = False
    read_whole: Callable[[bytes], ModelAnswer] | None = None
    read_stream: Callable[[list[ServerSentEvent]], ModelAnswer] | None = None


ROUTES = (
    Route("openai", "POST", "/chat/completions", True, read_chat_whole, read_chat_stream),
    Route("openai", "POST", "/responses", True, read_response_whole, read_response_stream),
    Route("openai", "GET", "/models"),
    Route("openai", "GET", "/models/*"),
    Route("anthropic", "POST", "/messages", True, read_anthropic_whole, read_anthropic_stream),
    Route("anthropic", "POST", "/messages/count_tokens"),
    Route("anthropic", "GET", "/models"),
    Route("anthropic", "GET", "/models/*"),
)


def routes_at(path: str) -> list[Route]:
    """The routes of any method at a path, with or without its leading `/v1`."""
    place = path.removeprefix("/v1")
    parent, _, name = place.rpartition("/")
    named = f"{parent}/*" if name and name not in (".", "..") else None
    return [route for route in ROUTES if route.path in (place, named)]


class Sink(Protocol):
    """Where a reply goes: the agent's connection."""

    def begin(self, status: int, headers: Mapping[str, str]) -> None: ...

    def chunk(self, data: bytes) -> None: ...


class Forwarded(msgspec.Struct):
    """A request on its way to a provider."""

    route: Route
    path: str
    query: str
    headers: Headers
    body: bytes
    fields: Body
    sink: Sink
    on_sent: Callable[[Forwarded], None]
    """Called when the call has its send permit."""
    exchange: Exchange | None = None
    is_waiting: bool = False
    """Whether it waits for its send permit."""
    is_sent: bool = False

    @property
    def response_id(self) -> str | None:
        """The id of a reply of the responses API, by which a later request may continue it."""
        if self.exchange is None or self.route.path != "/responses":
            return None
        found = _RESPONSE_ID.search(b"".join(self.exchange.chunks[:4])[:_MAX_SEARCHED])
        return None if found is None else found[1].decode("utf-8", "replace")

    @property
    def wants_usage(self) -> bool:
        """Whether it is a chat stream that does not ask for its token counts."""
        if self.route.path != "/chat/completions" or self.fields.value("stream") is not True:
            return False
        options = self.fields.value("stream_options")
        return not (isinstance(options, dict) and options.get("include_usage"))

    def body_with_usage(self) -> bytes:
        """The body with a request for the token counts; everything else is as it was sent."""
        options = self.fields.value("stream_options")
        asked = {**(options if isinstance(options, dict) else {}), "include_usage": True}
        added = b'"stream_options":' + msgspec.json.encode(asked)
        if "stream_options" not in self.fields.fields:
            return self.body.replace(b"{", b"{" + added + b",", 1)
        fields = {name: msgspec.Raw(raw) for name, raw in self.fields.fields.items() if name != "stream_options"}
        turns = {} if self.fields.field is None else {self.fields.field: [msgspec.Raw(t) for t in self.fields.turns]}
        return msgspec.json.encode({**fields, **turns, "stream_options": asked})


class ForwardedCase(EvalCase, kw_only=True):
    """What the rate limits see of a call: its body, to estimate its tokens."""

    call: Forwarded


class Exchange:
    """Passes one reply to the agent as it arrives, and keeps it to be read."""

    def __init__(self, call: Forwarded, masker: Masker, *, without_usage: bool) -> None:
        self._call = call
        self._masker = masker
        self._filter = UsageFilter() if without_usage else None
        self._began = perf_counter()
        self.status = 0
        self.headers: dict[str, str] = {}
        self.chunks: list[bytes] = []
        self.arrivals: list[float] = []
        self.is_passed_on = False
        self.is_whole = False

    def on_head(self, status: int, headers: dict[str, str]) -> None:
        self.status, self.headers = status, headers
        if 200 <= status < 300:
            self.is_passed_on = True
            if self._filter is not None and not headers.get("content-type", "").startswith("text/event-stream"):
                self._filter = None
            self._call.sink.begin(status, self.passed_headers(filtered=self._filter is not None))

    def on_chunk(self, data: bytes) -> None:
        self.chunks.append(data)
        self.arrivals.append(perf_counter() - self._began)
        if self.is_passed_on:
            passed = data if self._filter is None else self._filter.feed(data)
            if passed:
                self._call.sink.chunk(passed)

    def ended(self, *, whole: bool) -> None:
        """Pass on what is left of an unterminated last event."""
        self.is_whole = whole
        if self._filter is not None and (rest := self._filter.rest()):
            self._call.sink.chunk(rest)

    def passed_headers(self, *, filtered: bool = False) -> dict[str, str]:
        """The reply's headers for the agent; the length only where the body is passed on byte by byte."""
        dropped = _KEPT_BACK | ({"content-length"} if filtered or "content-encoding" in self.headers else set())
        return {
            name: value
            for name, value in self.headers.items()
            if name not in dropped and self._masker.text(value) == value
        }

    def so_far(self) -> HttpReply | None:
        """What has arrived of a reply that was broken off; None before its head."""
        if not self.status:
            return None
        return HttpReply(self.status, self.headers, self.chunks, self.arrivals, perf_counter() - self._began, 0.0)


class UsageFilter:
    """Takes the token counts, which the agent did not ask for, out of a chat stream.

    Only an event that is not yet complete is held, as nobody could read it.
    """

    def __init__(self) -> None:
        self._held = b""

    def feed(self, data: bytes) -> bytes:
        data = self._held + data
        passed, start = [], 0
        for end in _EVENT_END.finditer(data):
            event = data[start : end.end()]
            start = end.end()
            if not (_USAGE_CHUNK.search(event) and _USAGE.search(event)):
                passed.append(event)
        self._held = data[start:]
        return b"".join(passed)

    def rest(self) -> bytes:
        rest, self._held = self._held, b""
        return rest


class Upstream:
    """A provider's API: its address, its key, and the calls that the gateway passes to it."""

    default_parallelism = 50
    model_id = None

    def __init__(
        self,
        api: str,
        *,
        base_url: str | None = None,
        api_key: str | Secret | KeyFunction | None = None,
        api_key_env: str | None = None,
        api_key_command: Sequence[str] | None = None,
        api_key_life: str | float | None = None,
        headers: Mapping[str, str] | None = None,
        proxy: str | None = None,
        ca_bundle: str | None = None,
        verify: bool = True,
    ) -> None:
        kind = API_KINDS[api]
        check_texts(model=api, api_key_env=api_key_env, proxy=proxy, ca_bundle=ca_bundle)
        check_switches(verify=verify)
        self.api = api
        self._address = Address(_usual_base_url(kind) if base_url is None else base_url)
        self._auth = Auth(
            self._address,
            kind.key_variables,
            api_key=api_key,
            api_key_env=api_key_env,
            headers=headers,
            api_key_command=api_key_command,
            api_key_life=api_key_life,
        )
        self._connection_options: dict[str, Any] = {"proxy": proxy, "ca_bundle": ca_bundle, "verify": verify}
        self._usage_refused = False
        self._masking: tuple[tuple[str, ...], Masker] | None = None
        self._connections = Connections(self._make_connection)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name not in ("_connections", "_masking")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._masking = None
        self._connections = Connections(self._make_connection)

    @property
    def endpoint(self) -> str:
        """Scheme, host and port."""
        return self._address.endpoint

    def identity(self) -> Identity:
        """Where the calls go: the models are the agent's choice."""
        return {"api": self.api, "base_url": self._address.shown}

    def check(self) -> None:
        """Raise ConfigurationError when a public endpoint has no key, or the certificate file does not exist."""
        from steelyard.transport.settings import Settings

        self._auth.check()
        Settings(**self._connection_options)

    async def open(self, parallelism: int) -> None:
        """Prepare for the calls of `parallelism` agents on this event loop; each `open` needs its `close`."""
        self._connections.open(parallelism)

    async def close(self) -> None:
        await self._connections.close()

    async def invoke(self, case: EvalCase, context: InvocationContext) -> InvocationResponse:  # noqa: ARG002
        """Pass a call on; its response, or the error that its reply means, with the response as `partial`."""
        assert isinstance(case, ForwardedCase)
        call = case.call
        call.on_sent(call)
        asked_at = datetime.now(UTC)
        reply: HttpReply | None = None
        try:
            reply, broken = await self._send(call)
            return self.read(call, reply, broken, asked_at)
        except TargetError as error:
            self._auth.remove_secrets(error)
            if error.partial is None:
                error.partial = partial_of(_NO_ANSWER, reply, asked_at, None)
            raise

    def read(
        self, call: Forwarded, reply: HttpReply, broken: TransportError | None, asked_at: datetime
    ) -> InvocationResponse:
        """Read a reply as the API's own target would; a TargetError carries what could be read."""
        route = call.route
        if not 200 <= reply.status < 300:
            raise status_error(reply)
        if route.read_whole is None or route.read_stream is None:
            if broken is not None:
                raise broken
            last = reply.arrivals[-1] if reply.arrivals else reply.ended
            return InvocationResponse(
                request_time=asked_at,
                time_to_last_token=last,
                time_queued=reply.queued,
                http_status=reply.status,
                request_id=request_id(reply.headers),
            )
        answer = _NO_ANSWER
        try:
            if form_of(reply) == "stream":
                answer = route.read_stream(events(reply.chunks, reply.arrivals))
            else:
                answer = route.read_whole(reply.body)
            raise_if_incomplete(answer, broken)
        except UNREADABLE as error:
            raise broken or unreadable("the answer", reply.body, error) from error
        except TargetError as error:
            error.partial = partial_of(answer, reply, asked_at, None)
            raise
        return response_of(answer, reply, asked_at, None)

    async def _send(self, call: Forwarded) -> tuple[HttpReply, TransportError | None]:
        connection = self._connections.here(self.default_parallelism)
        adds_usage = call.wants_usage and not self._usage_refused
        body = call.body_with_usage() if adds_usage else call.body
        source = self._auth.source
        key = None if source is None else await source.key()
        reply, broken = await self._send_once(connection, call, body, key, without_usage=adds_usage)
        if source is not None and key is not None:
            if reply.status != 401:
                source.accepted(key)
            elif (key := await source.another(key)) is not None:
                reply, broken = await self._send_once(connection, call, body, key, without_usage=adds_usage)
        if adds_usage and refuses_usage(reply):
            self._usage_refused = True
            return await self._send_once(connection, call, call.body, key, without_usage=False)
        return reply, broken

    async def _send_once(
        self, connection: EndpointConnection, call: Forwarded, body: bytes, key: Secret | None, *, without_usage: bool
    ) -> tuple[HttpReply, TransportError | None]:
        headers = self._headers(call, key)
        exchange = call.exchange = Exchange(call, self._masker(key), without_usage=without_usage)
        request = HttpRequest(self._url(call), headers, body, call.route.method)
        transport = cast("CurlTransport | PlainTransport", connection.transport)
        try:
            reply: HttpReply = await transport.send(request, exchange)
            broken: TransportError | None = None
        except TransportError as error:
            if error.reply is None or not error.reply.status:
                raise
            reply, broken = error.reply, error
        exchange.ended(whole=broken is None)
        return reply, broken

    def masked(self, body: bytes) -> bytes:
        """An error's body without the key, which some servers repeat."""
        text = body.decode("utf-8", "surrogateescape")
        found = self._masker(None).text(text)
        return body if found is text or found == text else found.encode("utf-8", "surrogateescape")

    def _masker(self, key: Secret | None) -> Masker:
        """What hides the keys, made again only when there is a new one."""
        source = self._auth.source
        known = [*self._address.secrets, *(() if source is None else source.known)]
        known += [secret for secret in (key, self._auth.find_key(), self._address.authorization) if secret is not None]
        texts = tuple(secret.reveal() for secret in known)
        if self._masking is None or self._masking[0] != texts:
            self._masking = (texts, Masker(texts))
        return self._masking[1]

    def _url(self, call: Forwarded) -> str:
        path = call.path.removeprefix("/v1")
        if self.api == "anthropic" and not self._address.path.endswith("/v1"):
            path = f"/v1{path}"
        return self._address.url(path, call.query)

    def _headers(self, call: Forwarded, key: Secret | None) -> Headers:
        return self._auth.headers(call.headers, self._key_header, key)

    def _key_header(self, key: str) -> tuple[str, str]:
        if self.api == "anthropic" and not is_access_token(key):
            return ("x-api-key", key)
        if self._address.is_azure and not is_access_token(key):
            return ("api-key", key)
        return ("authorization", f"Bearer {key}")

    def _make_connection(self, parallelism: int) -> EndpointConnection:
        from steelyard.transport.client import new_transport

        most = parallelism * _CONNECTIONS_PER_AGENT
        transport = new_transport(self._address.url(""), most, **self._connection_options)
        return EndpointConnection(transport, (), is_ours=True)


API_KINDS: Mapping[str, type[EndpointTarget]] = {"openai": OpenAIChat, "anthropic": AnthropicMessages}


def _usual_base_url(kind: type[EndpointTarget]) -> str:
    found = (os.environ.get(name, "").strip() for name in kind.base_url_variables)
    return next((url for url in found if url), kind.default_base_url)


def passed_headers(headers: Mapping[bytes, bytes]) -> Headers:
    """The headers of an agent's request that its provider gets."""
    named = ((name.decode("latin-1"), value.decode("latin-1")) for name, value in headers.items())
    return tuple(
        (name, value)
        for name, value in named
        if (name in _PASSED_HEADERS or name.startswith(_PASSED_PREFIXES)) and value.isprintable()
    )


_OPENAI_ERRORS = {401: "invalid_request_error", 403: "permission_error", 404: "invalid_request_error"}
_ANTHROPIC_ERRORS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
}


def failure(api: str, status: int, message: str, code: str | None = None) -> bytes:
    """An error's body in the provider's own shape."""
    if api == "anthropic":
        kind = _ANTHROPIC_ERRORS.get(status, "api_error" if status >= 500 else "invalid_request_error")
        return msgspec.json.encode({"type": "error", "error": {"type": kind, "message": message}})
    kind = _OPENAI_ERRORS.get(status, "server_error" if status >= 500 else "invalid_request_error")
    return msgspec.json.encode({"error": {"message": message, "type": kind, "param": None, "code": code}})
