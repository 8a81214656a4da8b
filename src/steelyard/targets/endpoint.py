"""A target's connections: one transport for each event loop that asks it, for as long as anybody there uses it."""

from __future__ import annotations

import asyncio
import json
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, ClassVar

import msgspec

from steelyard._version import __version__
from steelyard.errors import TargetError, TransportError
from steelyard.masking import Secret
from steelyard.protocols import HttpReply, HttpRequest, Identity, InvocationContext, Target, Transport
from steelyard.records import EvalCase, InvocationResponse
from steelyard.targets.auth import Address, Auth, Headers, check_counts, check_switches, check_texts, checked_params
from steelyard.targets.tools import Functions, OneTurn, ToolShape, Turn, TurnByTurn, TurnCase, merged_tools, run_loop
from steelyard.targets.wire import (
    UNREADABLE,
    Answer,
    Call,
    Conversation,
    encoded,
    form_of,
    partial_of,
    raise_if_wanting,
    response_of,
    time_per_output_token,
    unreadable,
)
from steelyard.tokens import count_input, count_words, load_counter
from steelyard.transport.errors import failure
from steelyard.transport.sse import Event, events


class Link(msgspec.Struct):
    """A transport with the headers that go with every request over it."""

    transport: Transport
    headers: Headers
    is_ours: bool
    """Whether it was made here, and so is to be closed here."""
    users: int = 0


class Connections:
    """Makes a link where there is none and closes it after its last user. Runs on different loops share nothing."""

    def __init__(self, make: Callable[[int], Link]) -> None:
        self._make = make
        self._of_loop: dict[asyncio.AbstractEventLoop, Link] = {}

    def open(self, parallelism: int) -> None:
        """Make ready for so many calls at once on this event loop; each `open` wants its `close`."""
        self.here(parallelism).users += 1

    def here(self, parallelism: int) -> Link:
        """The link of this event loop; one for so many calls at once is made when nobody opened any."""
        loop = asyncio.get_running_loop()
        link = self._of_loop.get(loop)
        if link is None:
            self._forget_closed_loops()
            link = self._of_loop[loop] = self._make(parallelism)
        return link

    async def close(self) -> None:
        """One user less; with the last one of this event loop its connections are closed."""
        loop = asyncio.get_running_loop()
        link = self._of_loop.get(loop)
        if link is None:
            return
        link.users = max(0, link.users - 1)
        if not link.users:
            del self._of_loop[loop]
            if link.is_ours:
                await link.transport.close()

    def _forget_closed_loops(self) -> None:
        """Let go of what nobody closed while there was time: whoever asks without opening does not close either."""
        for loop in [loop for loop in tuple(self._of_loop) if loop.is_closed()]:
            self._of_loop.pop(loop, None)


_NOTHING = Answer(complete=False, terminated=False)


class EndpointTarget(ABC):
    """A model behind an HTTP API. What the APIs differ in is left to the classes below this one."""

    kind: ClassVar[str]
    default_base_url: ClassVar[str]
    base_url_variables: ClassVar[tuple[str, ...]]
    key_variables: ClassVar[tuple[str, ...]]
    path: ClassVar[str]
    turns_field: ClassVar[bytes]
    reserved: ClassVar[tuple[str, ...]]
    """Fields of the body that have a place of their own, and so none in `params`."""
    tool_shape: ClassVar[ToolShape]

    def __init__(
        self,
        model: str,
        *,
        base_url: str | None = None,
        api_key: str | Secret | None = None,
        api_key_env: str | None = None,
        api_version: str | None = None,
        stream: bool = True,
        params: Mapping[str, Any] | None = None,
        headers: Mapping[str, str] | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        functions: Mapping[str, Callable[..., Any]] | None = None,
        max_turns: int = 10,
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
        self.params = checked_params(params, self.reserved)
        self._address = Address(self._usual_base_url() if base_url is None else base_url)
        self._entrance = Auth(
            self._address, self._key_names(), api_key=api_key, api_key_env=api_key_env, headers=headers
        )
        self._connection: dict[str, Any] = {"proxy": proxy, "ca_bundle": ca_bundle, "verify": verify}
        self._functions = Functions(functions or {})
        described = merged_tools(self.tool_shape, tools)
        self._tools = merged_tools(self.tool_shape, [*described, *self._functions.undescribed(described)])
        self._encoded_tools = self._encode_tools(self._tools)
        self._given_transport = transport
        self._url = self._make_url()
        self._prefix = self._make_prefix()
        self._links = Connections(self._make_link)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.model_id!r}, base_url={self._address.shown!r})"

    def __getstate__(self) -> dict[str, Any]:
        """All but the live connection and what was read from the environment; a key that was given travels along."""
        return {name: value for name, value in self.__dict__.items() if name not in ("_links", "_given_transport")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._given_transport = None
        self._links = Connections(self._make_link)

    @property
    def endpoint(self) -> str:
        """Scheme, host and port."""
        return self._address.endpoint

    @property
    def base_url(self) -> str:
        """Where it is asked, without what may be secret in the URL."""
        return self._address.shown

    @property
    def excess(self) -> int:
        """How many calls of tools outlived their timeout and still run in a thread."""
        return self._functions.excess

    def identity(self) -> Identity:
        """What decides an answer. Of headers only the names; keys are no part of it."""
        facts: dict[str, Any] = {
            "kind": self.kind,
            "model": self.model_id,
            "base_url": self._address.shown,
            "params": self.params,
            "~stream": self.stream,
        }
        if self.api_version is not None:
            facts["api_version"] = self.api_version
        if names := self._entrance.header_names:
            facts["headers"] = names
        if self._tools:
            facts["tools"] = self._tools
        if self._functions:
            facts |= {"functions": self._functions.identity(), "max_turns": self.max_turns}
        return facts

    def check(self) -> None:
        """ConfigurationError when there is no key for an endpoint out in the world, or no file of certificates."""
        self._entrance.check()
        if self._given_transport is None:
            from steelyard.transport.settings import Settings

            Settings(**self._connection)

    async def open(self, parallelism: int) -> None:
        """Make ready for so many calls at once on this event loop; each `open` wants its `close`."""
        self._links.open(parallelism)

    async def close(self) -> None:
        """Close the connections of this event loop, after the last user there."""
        await self._links.close()

    def bound(self, wrap: Callable[[Target], Target]) -> Target:
        """The target with this around each call to the model, of which a tool loop makes several in one case."""
        return TurnByTurn(self, wrap(OneTurn(self))) if self._functions else wrap(self)

    async def invoke(self, case: EvalCase, context: InvocationContext) -> InvocationResponse:
        """The model's answer; where it asks for a tool that has a function, the answer after that."""
        if self._functions:
            return await self.converse(case, context, OneTurn(self))
        return (await self._take_turn(self._opening(case), case)).response

    async def converse(self, case: EvalCase, context: InvocationContext, call: Target) -> InvocationResponse:
        """The model's last answer in a tool loop, each of its turns asked for through `call`."""
        conversation = self._opening(case)
        taken = Turn(InvocationResponse())

        async def take() -> InvocationResponse:
            nonlocal taken
            taken = await self._take_turn(conversation, case)
            return taken.response

        async def take_turn(additions: list[dict[str, Any]]) -> Turn:
            conversation.turns.extend(additions)
            wanted = time.monotonic()
            asked = TurnCase(id=case.id, messages=conversation.turns, tools=case.tools, take=take)
            response = await call.invoke(asked, context)
            return Turn(response, taken.calls, taken.began, waited=taken.began - wanted)

        return await run_loop(take_turn, self._functions, self._results, context, max_turns=self.max_turns)

    async def _take_turn(self, conversation: Conversation, case: EvalCase) -> Turn:
        """Ask once and read the answer; whatever is wrong is raised with the part that did come."""
        asked_at = datetime.now(UTC)
        reply: HttpReply | None = None
        answer = _NOTHING
        try:
            link = self._links.here(self.default_parallelism)
            body = self._body(conversation)
            called_at = time.monotonic()
            reply, broken = await self._send(link, body)
            answer = self._read(reply, broken)
            raise_if_wanting(answer, broken)
        except TargetError as error:
            self._entrance.keep_secrets(error)
            error.partial = partial_of(answer, reply, asked_at, case.prompt)
            raise
        response = response_of(answer, reply, asked_at, case.prompt)
        if response.num_tokens_input is None or response.num_tokens_output is None:
            await self._estimate_tokens(response, conversation)
        if self.store_payload:
            response.input_payload = json.loads(body)  # which takes the escaped surrogates that msgspec refuses
        return Turn(response, answer.calls, called_at + reply.queued)

    async def _send(self, link: Link, body: bytes) -> tuple[HttpReply, TransportError | None]:
        """The reply; one that broke off comes with the error that tells how."""
        try:
            return await link.transport.send(HttpRequest(self._url, link.headers, body)), None
        except TransportError as error:
            if error.reply is None or not error.reply.status:
                raise
            return error.reply, error

    def _read(self, reply: HttpReply, broken: TransportError | None) -> Answer:
        if not 200 <= reply.status < 300:
            raise failure(reply)
        try:
            if form_of(reply) == "stream":
                return self._read_stream(events(reply.chunks, reply.arrivals))
            return self._read_whole(reply.body)
        except UNREADABLE as error:
            raise broken or unreadable("the answer", reply.body, error) from error
        except TargetError as error:
            if broken is not None:
                raise broken from error
            raise

    async def _estimate_tokens(self, response: InvocationResponse, conversation: Conversation) -> None:
        """Fill in what the server did not tell."""
        count = await load_counter(self.model_id)
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
        """The part of every body that never changes, without its closing brace."""
        return encoded(self._fixed_fields())[:-1]

    def _fixed_fields(self) -> dict[str, Any]:
        return {"model": self.model_id, "stream": self.stream, **self.params}

    def _tools_of(self, case: EvalCase) -> bytes:
        """The tools as a field of the body: the target's own, joined by the case's."""
        if not case.tools:
            return self._encoded_tools
        return self._encode_tools(merged_tools(self.tool_shape, [*self._tools, *case.tools]))

    def _encode_tools(self, tools: list[dict[str, Any]]) -> bytes:
        return b',"tools":' + encoded(tools) if tools else b""

    def _make_link(self, parallelism: int) -> Link:
        headers = self._make_headers()
        if self._given_transport is not None:
            return Link(self._given_transport, headers, is_ours=False)
        from steelyard.transport.client import CurlTransport

        return Link(CurlTransport(parallelism, **self._connection), headers, is_ours=True)

    def _make_headers(self) -> Headers:
        return self._entrance.headers(
            [
                ("content-type", "application/json"),
                ("accept", "text/event-stream, application/json" if self.stream else "application/json"),
                ("user-agent", f"steelyard/{__version__}"),
                *self._own_headers(),
            ],
            self._key_header,
        )

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
        """The case as this API is asked it."""

    @abstractmethod
    def _read_stream(self, stream: list[Event]) -> Answer: ...

    @abstractmethod
    def _read_whole(self, body: bytes) -> Answer: ...

    @abstractmethod
    def _results(self, results: Sequence[tuple[Call, str, bool]]) -> list[dict[str, Any]]:
        """What tools gave, as turns of this API: each call with its text and whether it failed."""
