"""A model behind an HTTP API: connections per event loop, requests, replies read into responses, the tool loop.

`EndpointTarget` is what all APIs share; openai_chat, openai_responses and anthropic add what each differs in.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, ClassVar

import msgspec

from steelyard._version import __version__
from steelyard.attachments import file_url, has_attachments, with_contents, without_contents
from steelyard.daemon_threads import DaemonThreads
from steelyard.errors import ConfigurationError, TargetError, TransportError
from steelyard.masking import Secret
from steelyard.protocols import HttpReply, HttpRequest, Identity, InvocationContext, Target, Transport
from steelyard.records import EvalCase, InvocationResponse
from steelyard.shutdown import READ_CUT_SECONDS
from steelyard.targets.auth import (
    Address,
    Auth,
    Headers,
    check_counts,
    check_switches,
    check_texts,
    checked_params,
    checked_tags,
)
from steelyard.targets.conversation import (
    Call,
    Conversation,
    ModelAnswer,
    encoded,
    filtered_answer,
    partial_of,
    raise_if_incomplete,
    refused_field,
    response_of,
    separate_thinking,
    time_per_output_token,
)
from steelyard.targets.keys import KeyFunction, KeySource
from steelyard.targets.tools import (
    Functions,
    ModelTurn,
    OneTurn,
    ToolResult,
    ToolShape,
    TurnByTurn,
    TurnCase,
    merged_tools,
    run_loop,
)
from steelyard.targets.wire import UNREADABLE, form_of, unreadable
from steelyard.tokens import Count, count_input, count_words, known_counter, load_counter
from steelyard.transport.errors import content_filter_message, status_error
from steelyard.transport.sse import ServerSentEvent, events

_NO_ANSWER = ModelAnswer(complete=False, terminated=False)

DEFAULT_REASONING_TAGS = ("think",)

_FILE_THREADS = DaemonThreads()

log = logging.getLogger("steelyard")


class EndpointConnection(msgspec.Struct):
    """A transport (a pool of connections) and the headers of every request over it."""

    transport: Transport
    headers: Headers
    is_ours: bool
    """Whether it was created here, and so must be closed here."""
    key: Secret | None = None
    """The key in the headers, where it is one that expires."""
    users: int = 0


class Connections:
    """Opens one connection per event loop and closes it after its last user. Different loops share nothing."""

    def __init__(self, make: Callable[[int], EndpointConnection]) -> None:
        self._make = make
        self._of_loop: dict[asyncio.AbstractEventLoop, EndpointConnection] = {}

    def open(self, parallelism: int) -> None:
        """Prepare for `parallelism` calls at once on this event loop; each `open` needs its `close`."""
        self.here(parallelism).users += 1

    def here(self, parallelism: int) -> EndpointConnection:
        """Return this event loop's connection; one for `parallelism` calls at once is created if none is open."""
        loop = asyncio.get_running_loop()
        connection = self._of_loop.get(loop)
        if connection is None:
            self._forget_closed_loops()
            connection = self._of_loop[loop] = self._make(parallelism)
        return connection

    async def close(self) -> None:
        """Release one use; the last one closes this event loop's connection."""
        loop = asyncio.get_running_loop()
        connection = self._of_loop.get(loop)
        if connection is None:
            return
        connection.users = max(0, connection.users - 1)
        if not connection.users:
            del self._of_loop[loop]
            if connection.is_ours:
                await connection.transport.close()

    def _forget_closed_loops(self) -> None:
        """Drop connections of closed loops: a caller that never called `open` does not call `close` either."""
        for loop in [loop for loop in tuple(self._of_loop) if loop.is_closed()]:
            self._of_loop.pop(loop, None)


class EndpointTarget(ABC):
    """A model behind an HTTP API. Subclasses define what the APIs differ in."""

    kind: ClassVar[str]
    default_base_url: ClassVar[str]
    base_url_variables: ClassVar[tuple[str, ...]]
    key_variables: ClassVar[tuple[str, ...]]
    path: ClassVar[str]
    turns_field: ClassVar[bytes]
    reserved: ClassVar[tuple[str, ...]]
    """Fields of the body that have their own argument, and so are not allowed in `params`."""
    tool_shape: ClassVar[ToolShape]
    stream_type: ClassVar[str] = "text/event-stream"
    takes_back_all: ClassVar[bool] = False
    """Whether this API takes back every field of its turns, so that none is left out when one is refused."""
    takes_attachments: ClassVar[bool] = True
    signs_requests: ClassVar[bool] = False
    takes_file_urls: ClassVar[bool] = True
    """Whether this API fetches other files than images from a URL."""

    def __init__(
        self,
        model: str,
        *,
        base_url: str | None = None,
        api_key: str | Secret | KeyFunction | None = None,
        api_key_env: str | None = None,
        api_key_command: Sequence[str] | None = None,
        api_key_life: str | float | None = None,
        api_version: str | None = None,
        stream: bool = True,
        params: Mapping[str, Any] | None = None,
        headers: Mapping[str, str] | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        functions: Mapping[str, Callable[..., Any]] | None = None,
        max_turns: int = 10,
        reasoning_tags: Sequence[str] = DEFAULT_REASONING_TAGS,
        proxy: str | None = None,
        ca_bundle: str | None = None,
        verify: bool = True,
        store_payload: bool = False,
        parallelism: int = 50,
        transport: Transport | None = None,
    ) -> None:
        check_texts(model=model, api_version=api_version, api_key_env=api_key_env, proxy=proxy, ca_bundle=ca_bundle)
        check_counts(parallelism=parallelism, max_turns=max_turns)
        check_switches(stream=stream, verify=verify, store_payload=store_payload)
        self.model_id = model
        self.default_parallelism = parallelism
        self.stream = stream
        self.max_turns = max_turns
        self.api_version = api_version
        self.store_payload = store_payload
        self.reasoning_tags = checked_tags(reasoning_tags)
        self.params = checked_params(params, self.reserved)
        self._address = Address(self._usual_base_url() if base_url is None else base_url)
        self._auth = Auth(
            self._address,
            self._key_names(),
            api_key=api_key,
            api_key_env=api_key_env,
            headers=headers,
            api_key_command=api_key_command,
            api_key_life=api_key_life,
        )
        self._connection_options: dict[str, Any] = {"proxy": proxy, "ca_bundle": ca_bundle, "verify": verify}
        self._functions = Functions(functions or {})
        self._has_functions = bool(functions)
        described = merged_tools(self.tool_shape, tools)
        self._tools = merged_tools(self.tool_shape, [*described, *self._functions.undescribed(described)])
        self._encoded_tools = self._encode_tools(self._tools)
        self._given_transport = transport
        self._url = self._make_url()
        self._prefix = self._make_prefix()
        self._refused_fields: tuple[str, ...] = ()
        """Fields of turns sent back that this endpoint has refused."""
        self._warned: set[str] = set()
        self._cut_until = 0.0
        """Until when parts of answers are read that were cut off by the end of the run."""
        self._connections = Connections(self._make_connection)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.model_id!r}, base_url={self._address.shown!r})"

    def __getstate__(self) -> dict[str, Any]:
        """Leave out live connections and what was read from the environment; a key passed as an argument is kept."""
        return {
            name: value for name, value in self.__dict__.items() if name not in ("_connections", "_given_transport")
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._given_transport = None
        self._connections = Connections(self._make_connection)

    @property
    def endpoint(self) -> str:
        """Scheme, host and port."""
        return self._address.endpoint

    @property
    def base_url(self) -> str:
        """The base URL, without its possible secrets."""
        return self._address.shown

    @property
    def excess(self) -> int:
        """Number of tool calls that outlived their timeout and still run in a thread."""
        return self._functions.excess

    @property
    def enforces(self) -> frozenset[str]:
        """The limits of a case that hold while it is asked: those of turns, tokens and cost in the tool loop."""
        return frozenset({"time", "turns", "tokens", "cost"}) if self._functions else frozenset({"time"})

    def identity(self) -> Identity:
        """Everything that decides an answer: of headers only the names, and no key."""
        facts: dict[str, Any] = {
            "kind": self.kind,
            "model": self.model_id,
            "base_url": self._address.shown,
            "params": self.params,
            "~stream": self.stream,
        }
        if self.api_version is not None:
            facts["api_version"] = self.api_version
        if names := self._auth.header_names:
            facts["headers"] = names
        if self._tools:
            facts["tools"] = self._tools
        if self.reasoning_tags != DEFAULT_REASONING_TAGS:
            facts["reasoning_tags"] = list(self.reasoning_tags)
        if self._functions:
            facts |= {"functions": self._functions.identity(), "max_turns": self.max_turns}
        return facts

    def check(self) -> None:
        """Raise ConfigurationError when a public endpoint has no key, or the certificate file does not exist."""
        try:
            self._check_credentials()
        except ConfigurationError as error:
            raise ConfigurationError(f"{self.kind}, model {self.model_id}: {error}", topic=error.topic) from error
        if self._given_transport is None:
            from steelyard.transport.settings import Settings

            Settings(**self._connection_options)

    def _check_credentials(self) -> None:
        self._auth.check()

    async def open(self, parallelism: int) -> None:
        """Prepare for `parallelism` calls at once on this event loop; each `open` needs its `close`."""
        self._cut_until = 0.0
        self._connections.open(parallelism)

    async def close(self) -> None:
        """Close this event loop's connections after its last user."""
        await self._connections.close()

    def bound(self, wrap: Callable[[Target], Target]) -> Target:
        """Return the target with `wrap` applied to each call to the model; a tool loop makes several per case."""
        return TurnByTurn(self, wrap(OneTurn(self))) if self._functions else wrap(self)

    async def invoke(self, case: EvalCase, context: InvocationContext) -> InvocationResponse:
        """Ask the model; tool calls that have a function are carried out until it answers without one."""
        if self._has_functions:
            return await self.converse(case, context, OneTurn(self))
        is_plain = not case.attachments and case.messages is None
        conversation = self._opening(case) if is_plain else await self._opened(case)
        return (await self._take_turn(conversation, case, context)).response

    async def converse(self, case: EvalCase, context: InvocationContext, call: Target) -> InvocationResponse:
        """Run the tool loop and return the model's last answer; each turn is requested through `call`."""
        conversation = await self._opened(case)
        taken = ModelTurn(InvocationResponse())

        async def take() -> InvocationResponse:
            nonlocal taken
            taken = await self._take_turn(conversation, case, context)
            return taken.response

        async def take_turn(given: list[dict[str, Any]], results: list[dict[str, Any]]) -> ModelTurn:
            conversation.echo(given, self._refused_fields)
            conversation.turns.extend(results)
            wanted = time.monotonic()
            asked = TurnCase(id=case.id, messages=conversation.turns, tools=case.tools, take=take)
            response = await call.invoke(asked, context)
            return ModelTurn(response, taken.calls, taken.began, waited=taken.began - wanted)

        def as_turns(results: Sequence[ToolResult]) -> list[dict[str, Any]]:
            masked: list[dict[str, Any]] = self._auth.masked(self._results(results))
            return masked

        return await run_loop(take_turn, self._functions, as_turns, context, max_turns=self.max_turns)

    async def _opened(self, case: EvalCase) -> Conversation:
        """Return the case as this API's conversation; files are read in a thread, as others are being timed."""
        if not has_attachments(case):
            return self._opening(case)
        if not self.takes_attachments:
            raise TargetError(f"{self.kind} takes no attachments, and the case has some: use openai-chat")
        loaded = await _FILE_THREADS.run(with_contents, case)
        if not self.takes_file_urls and (url := file_url(loaded)) is not None:
            raise TargetError(f"{self.kind} fetches only images from a URL: download {url} and attach its path")
        return self._opening(loaded)

    async def _take_turn(self, conversation: Conversation, case: EvalCase, context: InvocationContext) -> ModelTurn:
        """Send one request and read the answer; an error carries the part that was received."""
        asked_at = datetime.now(UTC)
        reply: HttpReply | None = None
        answer = _NO_ANSWER
        left_out: list[str] = []
        try:
            connection = self._connections.here(self.default_parallelism)
            body = self._body(conversation)
            called_at = time.monotonic()
            reply, broken = await self._send(connection, body)
            while conversation.echoes and (refused := self._refused_field(reply, conversation)) is not None:
                self._leave_out(refused)
                left_out.append(refused)
                conversation.drop(refused)
                body = self._body(conversation)
                called_at = time.monotonic()
                reply, broken = await self._send(connection, body)
            answer = self._read(reply, broken)
            if answer.oddities:
                self._warn_of(answer)
            separate_thinking(answer, self.reasoning_tags)
            raise_if_incomplete(answer, broken)
        except TargetError as error:
            self._auth.remove_secrets(error)
            error.partial = self._partial(answer, reply, asked_at, case.prompt, conversation)
            raise
        except asyncio.CancelledError as error:  # the case's time is up, or the run ends: keep what came
            reply = getattr(error, "reply", None)
            answer = self._read_cut(reply, context)
            error.partial = self._partial(  # type: ignore[attr-defined]
                answer, reply, asked_at, case.prompt, conversation
            )
            raise
        response = response_of(answer, reply, asked_at, case.prompt)
        response.fields_left_out = left_out or None
        if response.num_tokens_input is None or response.num_tokens_output is None:
            await self._estimate_tokens(response, conversation)
        self._auth.mask_response(response)
        if self.store_payload:
            # json accepts the escaped surrogates that msgspec refuses
            response.input_payload = without_contents(json.loads(body))
        return ModelTurn(response, answer.calls, called_at + reply.queued)

    def _refused_field(self, reply: HttpReply, conversation: Conversation) -> str | None:
        return None if self.takes_back_all else refused_field(reply, conversation, self.params)

    def _leave_out(self, name: str) -> None:
        """Remember a field that this endpoint sends and does not take back."""
        if name not in self._refused_fields:
            self._refused_fields = (*self._refused_fields, name)
            shown = self._auth.masked(name)
            log.warning("%s refuses the field %s that its own answers have: it is left out", self.endpoint, shown)

    def _warn_of(self, answer: ModelAnswer) -> None:
        """Warn, once for each, of what was odd in an answer and was read around."""
        for oddity in answer.oddities:
            place = oddity.partition(" ")[0]
            if place not in self._warned:
                self._warned.add(place)
                shown = self._auth.masked(oddity)
                log.warning("%s answers in an odd shape, which is read around: %s", self.endpoint, shown)

    async def _send(self, connection: EndpointConnection, body: bytes) -> tuple[HttpReply, TransportError | None]:
        """Return the reply; one that broke off comes with its error. Fields that a server refuses are left out."""
        broken: TransportError | None = None
        source = self._auth.source
        try:
            if source is None:
                reply = await connection.transport.send(self._request(connection, connection.headers, body))
            else:
                reply = await self._send_with_key(source, connection, body)
        except TransportError as error:
            if error.reply is None or not error.reply.status:
                raise
            reply, broken = error.reply, error
        if reply.status in (400, 422) and (accepted := self._without_refused(reply, body)) is not None:
            return await self._send(connection, accepted)
        return reply, broken

    async def _send_with_key(self, source: KeySource, connection: EndpointConnection, body: bytes) -> HttpReply:
        """Send with a key that may expire: one that is refused is replaced, once."""
        key = await source.key()
        reply = await connection.transport.send(self._request(connection, self._headers_with(connection, key), body))
        if not self._refuses_key(reply):
            source.accepted(key)
            return reply
        another = await source.another(key)
        if another is None:
            return reply
        return await connection.transport.send(self._request(connection, self._headers_with(connection, another), body))

    def _without_refused(self, reply: HttpReply, body: bytes) -> bytes | None:  # noqa: ARG002
        """Return the body without an optional field of this API that the server refuses; None where it is not that."""
        return None

    def _headers_with(self, connection: EndpointConnection, key: Secret) -> Headers:
        """Return the headers with this key; they are made again only when it is a new one."""
        if connection.key is not key:
            connection.headers, connection.key = self._make_headers(key), key
        return connection.headers

    def _refuses_key(self, reply: HttpReply) -> bool:
        """Whether the reply says that the key is not valid, or no longer."""
        return reply.status == 401

    def _request(self, connection: EndpointConnection, headers: Headers, body: bytes) -> HttpRequest:  # noqa: ARG002
        return HttpRequest(self._url, headers, body)

    def _read(self, reply: HttpReply, broken: TransportError | None) -> ModelAnswer:
        if not 200 <= reply.status < 300:
            if (message := content_filter_message(reply)) is not None:
                return filtered_answer(message)
            raise status_error(reply)
        try:
            if self._is_stream(reply):
                return self._read_stream(self._events(reply))
            return self._read_whole(reply.body)
        except UNREADABLE as error:
            raise broken or unreadable("the answer", reply.body, error) from error
        except TargetError as error:
            if broken is not None:
                raise broken from error
            raise

    def _read_cut(self, reply: HttpReply | None, context: InvocationContext) -> ModelAnswer:
        """Read what had arrived of an answer when its call was cancelled; with the whole run, only for a while."""
        if reply is None:
            return _NO_ANSWER
        if context.token is not None and context.token.cancelled:
            now = time.monotonic()
            self._cut_until = self._cut_until or now + READ_CUT_SECONDS
            if now > self._cut_until:
                return _NO_ANSWER
        try:
            answer = self._read(reply, None)
        except (TargetError, *UNREADABLE):
            return _NO_ANSWER
        separate_thinking(answer, self.reasoning_tags)
        return answer

    def _partial(
        self,
        answer: ModelAnswer,
        reply: HttpReply | None,
        asked_at: datetime,
        prompt: str | None,
        conversation: Conversation,
    ) -> InvocationResponse:
        """Return what is kept of a failed turn; tokens that were not reported are estimated."""
        response = partial_of(answer, reply, asked_at, prompt)
        if response.messages and (response.num_tokens_input is None or response.num_tokens_output is None):
            self._count_tokens(response, conversation, known_counter(self.model_id))
        self._auth.mask_response(response)
        return response

    def _is_stream(self, reply: HttpReply) -> bool:
        return form_of(reply) == "stream"

    def _events(self, reply: HttpReply) -> list[ServerSentEvent]:
        return events(reply.chunks, reply.arrivals)

    async def _estimate_tokens(self, response: InvocationResponse, conversation: Conversation) -> None:
        """Estimate the token counts that the server did not report."""
        try:
            count = await load_counter(self.model_id)
        except asyncio.CancelledError:  # the answer is whole, and paid for: it is not thrown away for its count
            count = known_counter(self.model_id)
        self._count_tokens(response, conversation, count)

    def _count_tokens(self, response: InvocationResponse, conversation: Conversation, count: Count) -> None:
        if response.num_tokens_input is None:
            response.num_tokens_input = count_input(conversation.turns, conversation.rest.decode(), count)
        if response.num_tokens_output is None:
            response.num_tokens_output = count_words(response.messages, count)
        response.time_per_output_token = time_per_output_token(
            response.time_to_first_token, response.time_to_last_token, response.num_tokens_output
        )
        response.tokens_estimated = True

    def _body(self, conversation: Conversation) -> bytes:
        return b"".join((self._prefix, self.turns_field, encoded(conversation.turns), conversation.rest, b"}"))

    def _make_prefix(self) -> bytes:
        """Encode the part that all bodies share, without its closing brace."""
        return encoded(self._fixed_fields())[:-1]

    def _fixed_fields(self) -> dict[str, Any]:
        return {"model": self.model_id, "stream": self.stream, **self.params}

    def _tools_of(self, case: EvalCase) -> bytes:
        """Return the tools as a field of the body: the target's and the case's."""
        if not case.tools:
            return self._encoded_tools
        return self._encode_tools(merged_tools(self.tool_shape, [*self._tools, *case.tools]))

    def _encode_tools(self, tools: list[dict[str, Any]]) -> bytes:
        return b',"tools":' + encoded(tools) if tools else b""

    def _make_connection(self, parallelism: int) -> EndpointConnection:
        headers = self._make_headers() if self._auth.source is None else ()
        if self._given_transport is not None:
            return EndpointConnection(self._given_transport, headers, is_ours=False)
        from steelyard.transport.client import new_transport

        transport = new_transport(self._url, parallelism, signs=self.signs_requests, **self._connection_options)
        return EndpointConnection(transport, headers, is_ours=True)

    def _make_headers(self, fetched: Secret | None = None) -> Headers:
        return self._auth.headers(self._plain_headers(), self._key_header, fetched)

    def _plain_headers(self) -> list[tuple[str, str]]:
        return [
            ("content-type", "application/json"),
            ("accept", f"{self.stream_type}, application/json" if self.stream else "application/json"),
            ("user-agent", f"steelyard/{__version__}"),
            *self._own_headers(),
        ]

    def _key_names(self) -> tuple[str, ...]:
        return self.key_variables

    def _usual_base_url(self) -> str:
        found = (os.environ.get(name, "").strip() for name in self.base_url_variables)
        return next((url for url in found if url), self.default_base_url)

    def _make_url(self) -> str:
        return self._address.url(self.path)

    def _own_headers(self) -> list[tuple[str, str]]:
        return []

    def _key_header(self, key: str) -> tuple[str, str]:
        return ("authorization", f"Bearer {key}")

    @abstractmethod
    def _opening(self, case: EvalCase) -> Conversation:
        """Return the case as this API's conversation."""

    @abstractmethod
    def _read_stream(self, stream: list[ServerSentEvent]) -> ModelAnswer: ...

    @abstractmethod
    def _read_whole(self, body: bytes) -> ModelAnswer: ...

    @abstractmethod
    def _results(self, results: Sequence[tuple[Call, str, bool]]) -> list[dict[str, Any]]:
        """Return tool results as turns of this API: each call with its text and whether it failed."""
