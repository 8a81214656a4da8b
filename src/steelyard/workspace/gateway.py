"""The recording gateway: a loopback server between an agent and its models, with an address and key for each attempt.

It passes allowed calls on with the real key, which the agent never sees, and records, times, prices and limits each.
An attempt has its own port, so that its address has no path: some clients drop one.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
import os
import secrets
import socket
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from time import monotonic
from typing import Any

import msgspec

from steelyard.daemon_threads import DaemonThreads
from steelyard.errors import ConfigurationError, TargetError, TransportError, describe, reject_unknown
from steelyard.plugins import takes
from steelyard.protocols import GatewayAddresses, InvocationContext, LimitSignal, Target
from steelyard.records import STOP_REASONS, CaseLimits, InvocationResponse
from steelyard.stats.prices import PriceBook, Prices, cost_of
from steelyard.tokens import Count, count_input, count_words, estimate, load_counter
from steelyard.transport.http_server import Head, Request
from steelyard.workspace.agent_connections import JSON, AgentConnection, SandboxDoor
from steelyard.workspace.limits import NO_CALLS, CallTotals, GatewaySummary, TimeSplit
from steelyard.workspace.recording import (
    CALLS_VERSION,
    Body,
    CallFile,
    CallLine,
    EndLine,
    SessionLine,
    Threads,
    lost_cost,
)
from steelyard.workspace.upstream import (
    API_KINDS,
    Forwarded,
    ForwardedCase,
    Route,
    Upstream,
    failure,
    passed_headers,
    routes_at,
)

log = logging.getLogger("steelyard")

_HOST = "127.0.0.1"
_BACKLOG = 256
_COUNTED = ("system", "instructions", "input", "tools")
"""Fields besides the turns whose text a model reads."""
_FINAL = {**JSON, "x-should-retry": "false"}
"""Headers of a refusal that would be the same again: OpenAI's and Anthropic's clients heed the second."""


class Gateway:
    """Gives each attempt an address and a key, and passes its calls to the providers. One for each process of a run."""

    def __init__(self, apis: Mapping[str, Mapping[str, Any] | None]) -> None:
        check_apis(apis)
        self.upstreams = {name: Upstream(name, **(options or {})) for name, options in apis.items()}
        self._calls: dict[str, Target] = dict(self.upstreams)
        self._price_book = PriceBook()
        self._prices: dict[tuple[str, str | None], Prices | None] = {}
        self._threads = DaemonThreads()
        self._sessions: set[GatewaySession] = set()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_sessions": set(), "_threads": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._threads = DaemonThreads()

    def bind(self, limited: Callable[[Upstream], Target], prices: PriceBook) -> None:
        """Have every call sent through what `limited` makes of its provider: the run's rate limits; and priced."""
        self._calls = {name: limited(upstream) for name, upstream in self.upstreams.items()}
        self._price_book, self._prices = prices, {}

    def identity(self) -> dict[str, Any]:
        """Where each API's calls go."""
        return {name: dict(upstream.identity()) for name, upstream in self.upstreams.items()}

    async def session(
        self,
        case_id: str,
        trial: int = 0,
        attempt: int = 1,
        limits: CaseLimits | None = None,
        *,
        path: Path | None = None,
        signal: LimitSignal | None = None,
    ) -> GatewaySession:
        """Begin an attempt: listen for its agent. `path` is the file that its calls are appended to."""
        begun = GatewaySession(self, case_id, trial, attempt, limits or CaseLimits(), path, signal)
        await begun.open()
        self._sessions.add(begun)
        return begun

    async def close(self) -> None:
        """End every attempt that is still open."""
        for session in list(self._sessions):
            await session.end()

    def call_for(self, api: str) -> Target:
        """What an API's calls are sent through."""
        return self._calls[api]

    def forget(self, session: GatewaySession) -> None:
        self._sessions.discard(session)

    async def price_of(self, model: str | None, api: str) -> Prices | None:
        """What a model's tokens cost; None when that is not known. The public list is read in a thread, once."""
        if (api, model) not in self._prices:
            find = self._price_book.of_model
            self._prices[api, model] = await self._threads.run(find, model, self.upstreams[api].endpoint)
        return self._prices[api, model]

    def cost(self, response: InvocationResponse, model: str | None, api: str) -> float | None:
        """What a call cost: as its reply says, else by its model's price; None when that is not known."""
        prices = self._prices.get((api, model))
        return response.cost if response.cost is not None or prices is None else cost_of(response, prices)


def check_apis(apis: object, where: str = "gateway") -> None:
    """Refuse what is no mapping of APIs to the arguments of each, or has a name that is not known."""
    if not isinstance(apis, Mapping) or not apis:
        raise ConfigurationError(f"{where} must name an API, such as {{anthropic: {{}}}}, got {apis!r}")
    reject_unknown(apis, API_KINDS, where)
    known = [option for option in takes(Upstream) or () if option != "api"]
    for name, options in apis.items():
        if not isinstance(options, Mapping | None):
            raise ConfigurationError(f"{where}.{name} takes a mapping of arguments, got {options!r}")
        reject_unknown(options or {}, known, f"{where}.{name}")


class GatewaySession:
    """One attempt of one case: its address, its calls, its limits."""

    def __init__(
        self,
        gateway: Gateway,
        case_id: str,
        trial: int,
        attempt: int,
        limits: CaseLimits,
        path: Path | None,
        signal: LimitSignal | None,
    ) -> None:
        self._gateway = gateway
        self._case_id = case_id
        self._trial = trial
        self._attempt = attempt
        self._limits = limits
        self._signal = signal
        self._key = f"sk-steelyard-{secrets.token_hex(20)}"
        self._began = monotonic()
        self._lost_cost = 0.0 if path is None else lost_cost(path)
        name = secrets.token_hex(6)
        begin = SessionLine(
            v=CALLS_VERSION, id=case_id, trial=trial, attempt=attempt, session=name, time=datetime.now(UTC)
        )
        self._name = name
        self._file = CallFile(path, begin)
        self._threads = Threads()
        self._totals = CallTotals()
        self._split = TimeSplit(signal)
        self._servers: list[asyncio.Server] = []
        self._connections: set[AgentConnection] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self.under_way: list[Forwarded] = []
        """Calls that have not ended."""
        self._port = 0
        self._in_flight = 0
        self._call_ended = asyncio.Event()
        self._reached: str | None = None
        self._problem: str | None = None
        self._has_ended = False
        self._door: SandboxDoor | None = None

    @property
    def port(self) -> int:
        """The port of the address, the same inside a sandbox."""
        return self._port

    @property
    def addresses(self) -> GatewayAddresses:
        """What the agent is given."""
        url = f"http://{_HOST}:{self._port}"
        return GatewayAddresses(url, f"{url}/v1", url, self._key)

    def environment(self) -> dict[str, str]:
        """What keeps an agent's calls to the gateway from a proxy that the environment names."""
        names = {"NO_PROXY", "no_proxy"}
        return {name: ",".join(filter(None, (os.environ.get(name), _HOST, "localhost"))) for name in names}

    @property
    def waiting(self) -> float:
        """Seconds that the agent has waited for our own rate limits, while none of its calls was being answered."""
        return self._split.waiting

    async def open(self) -> None:
        """Listen on a free port of this machine; ConfigurationError where that is not possible."""
        listening = socket.socket()
        try:
            listening.bind((_HOST, 0))
            self._port = listening.getsockname()[1]
            await self.adopt(listening)
        except OSError as error:
            listening.close()
            raise ConfigurationError(f"the gateway cannot listen on {_HOST}: {error.strerror}") from error

    async def adopt(self, listening: socket.socket) -> None:
        """Serve another listening socket, too: one inside the agent's sandbox."""
        loop = asyncio.get_running_loop()
        listening.setblocking(False)
        self._servers.append(await loop.create_server(lambda: AgentConnection(self), sock=listening, backlog=_BACKLOG))

    def open_door(self) -> Path:
        """A Unix socket over which a sandbox hands out the listening socket that it opened inside."""
        if self._door is None:
            self._door = SandboxDoor(self)
        return self._door.path

    async def end(self) -> GatewaySummary:
        """Refuse everything from now on, and return what the attempt did."""
        if not self._has_ended:
            self._has_ended = True
            for server in self._servers:
                server.close()
            if self._door is not None:
                self._door.close()
            for connection in list(self._connections):
                connection.abort()
            for task in self._tasks:
                task.cancel()
            if self._tasks:
                await asyncio.wait(self._tasks)
            self._split.end()
            with contextlib.suppress(OSError):
                self._file.append(EndLine(session=self._name, calls=self._totals.calls, limit=self._reached))
            self._file.close()
            self._gateway.forget(self)
            if not self._totals.calls and self._reached is None:
                log.warning("case %s: %s", self._case_id, NO_CALLS)
        return self._totals.summary(self._split, limit=self._reached, problem=self._problem, lost_cost=self._lost_cost)

    def connected(self, connection: AgentConnection) -> None:
        if self._has_ended:
            connection.abort()
        else:
            self._connections.add(connection)

    def disconnected(self, connection: AgentConnection) -> None:
        self._connections.discard(connection)

    def take(self, request: Request, connection: AgentConnection) -> asyncio.Task[None] | None:
        """Serve a request: refused at once (None), or passed on by the task that is returned."""
        head = request.head
        api = "anthropic" if "/messages" in head.path or b"anthropic-version" in head.headers else "openai"
        if (refusal := self._refusal(head)) is not None:
            status, message, code = refusal
            connection.whole(status, _FINAL, failure(api, status, message, code))
            return None
        routes = routes_at(head.path)
        offered = [route for route in routes if route.api in self._gateway.upstreams]
        # Both providers have a list of models: who asks as Anthropic's clients do gets Anthropic's.
        found = sorted((route for route in offered if route.method == head.method), key=lambda one: one.api != api)
        if not found:
            status, message = _not_found(head, routes, offered)
            connection.whole(status, _FINAL, failure(api, status, message))
            return None
        task = asyncio.get_running_loop().create_task(self._serve(found[0], request, connection))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _refusal(self, head: Head) -> tuple[int, str, str | None] | None:
        headers = head.headers
        if b"upgrade" in headers:
            return 426, "the gateway speaks plain HTTP: no WebSocket or other upgrade", None
        host = headers.get(b"host", b"").decode("latin-1").lower()
        if host not in (f"{_HOST}:{self._port}", f"localhost:{self._port}"):
            return 421, "this host name is not the gateway's: use the address that the case was given", None
        if not self._has_key(headers):
            return 401, "Incorrect API key provided: use the key that this case was given", "invalid_api_key"
        if self._has_ended:
            return 403, "this case has ended: its key is no longer valid", "case_ended"
        return None

    def _has_key(self, headers: Mapping[bytes, bytes]) -> bool:
        scheme, _, token = headers.get(b"authorization", b"").partition(b" ")
        bearer = token.strip() if scheme.lower() == b"bearer" else b""
        given = (bearer, headers.get(b"x-api-key", b""), headers.get(b"api-key", b""))
        return any(hmac.compare_digest(one, self._key.encode()) for one in given)

    async def _serve(self, route: Route, request: Request, connection: AgentConnection) -> None:
        try:
            await self._answer(route, request, connection)
        finally:
            connection.finish()

    async def _answer(self, route: Route, request: Request, connection: AgentConnection) -> None:
        head = request.head
        fields = Body(request.body or b"{}")
        model = fields.value("model")
        line = CallLine(
            session=self._name,
            call=0,
            api=route.api,
            path=head.path.removeprefix("/v1"),
            model=model if isinstance(model, str) else None,
            at=monotonic() - self._began,
            elapsed=0.0,
            generates=route.generates,
        )
        if route.generates and (refusal := await self._admission(line)) is not None:
            connection.whole(400, _FINAL, failure(route.api, 400, *refusal))
            return
        headers = passed_headers(head.headers)
        call = Forwarded(route, head.path, head.query, headers, request.body, fields, connection, self._sent)
        self._in_flight += route.generates
        self.under_way.append(call)
        asyncio.get_running_loop().call_soon(self._wait, call)
        try:
            await self._forward(call, line, connection)
        finally:
            self.under_way.remove(call)
            self._split.change(waiting=-call.is_waiting, answering=-call.is_sent)
            call.is_sent = True
            self._in_flight -= route.generates
            self._call_ended.set()

    def _wait(self, call: Forwarded) -> None:
        """Note that a call waits for its send permit: one that did not get it at once."""
        if not call.is_sent:
            call.is_waiting = True
            self._split.change(waiting=1)

    def _sent(self, call: Forwarded) -> None:
        self._split.change(waiting=-call.is_waiting, answering=1)
        call.is_waiting, call.is_sent = False, True

    async def _forward(self, call: Forwarded, line: CallLine, connection: AgentConnection) -> None:
        """Send a call and record what became of it, before the agent learns that its reply is complete."""
        upstream = self._gateway.upstreams[line.api]
        context = InvocationContext(self._case_id, self._trial, self._attempt)
        case = ForwardedCase(id=self._case_id, prompt=call.body.decode("utf-8", "replace"), call=call)
        asked_at = datetime.now(UTC)
        try:
            response = await self._gateway.call_for(line.api).invoke(case, context)
        except TargetError as error:
            response = error.partial or InvocationResponse(request_time=asked_at)
            response.error, response.error_type = describe(error), type(error).__name__
        except asyncio.CancelledError:
            response = _read_so_far(call, upstream, asked_at)
            line.aborted = response.error is not None
            self._record(call, line, response, context.waiting, estimate)
            raise
        count: Count = estimate
        try:
            if line.generates and _lacks_tokens(response):
                count = await load_counter(line.model)
        finally:
            self._record(call, line, response, context.waiting, count)
        if response.error is not None:
            _pass_error(call, upstream, response, connection)

    def _record(
        self, call: Forwarded, line: CallLine, response: InvocationResponse, waited: float, count: Count
    ) -> None:
        """Count a call, price it and append it to the file."""
        response.time_waiting = waited or None
        if line.generates and _lacks_tokens(response):
            _count_tokens(call, response, count)
        line.call = self._totals.next_call()
        line.elapsed = monotonic() - self._began - line.at
        line.response = response
        line.request = self._threads.delta(call.fields)
        if line.generates:
            response.cost = self._gateway.cost(response, line.model, line.api)
            thread, known = self._threads.place(call.fields)
            line.thread = thread.number
            self._totals.add(line, call.fields, known)
            self._threads.hold(thread, call.fields, line.call, call.response_id)
        try:
            self._file.append(line)
        except OSError as error:
            self._problem = f"a model call could not be recorded: {error.strerror or error}"
            log.error("case %s: %s", self._case_id, self._problem)

    async def _admission(self, line: CallLine) -> tuple[str, str] | None:
        """Why a generation call may not be sent, and its code; None when it may.

        Near a limit calls are sent one at a time, so that several at once cannot pass it by more than one call.
        """
        prices = await self._gateway.price_of(line.model, line.api)
        while (reached := self._limit_reached()) is None and self._in_flight and self._is_near_limit():
            self._split.change(waiting=1)
            self._call_ended.clear()
            try:
                await self._call_ended.wait()
            finally:
                self._split.change(waiting=-1)
        if reached is not None:
            if self._reached is None:
                self._reached = reached
                if self._signal is not None:
                    self._signal.reach(reached)
            return f"this case has reached its {reached.replace('_', ' ')}: no more model calls", reached
        if self._limits.cost is not None and prices is None:
            self._problem = f"the cost limit cannot be kept: `prices` has none for model {line.model!r}"
            return self._problem, "unknown_price"
        return None

    def _limit_reached(self) -> str | None:
        limits, totals = self._limits, self._totals
        if limits.turns is not None and totals.turns >= limits.turns:
            return STOP_REASONS["turns"]
        if limits.tokens is not None and totals.tokens >= limits.tokens:
            return STOP_REASONS["tokens"]
        if limits.cost is not None and totals.cost >= limits.cost:
            return STOP_REASONS["cost"]
        return None

    def _is_near_limit(self) -> bool:
        """Whether the calls in flight may reach a limit: each as large as the largest so far, or of unknown size."""
        limits, totals, more = self._limits, self._totals, self._in_flight
        if limits.turns is not None and totals.turns + more >= limits.turns:
            return True
        if limits.tokens is not None and (
            not totals.turns or totals.tokens + more * totals.largest_tokens >= limits.tokens
        ):
            return True
        return limits.cost is not None and (not totals.turns or totals.cost + more * totals.largest_cost >= limits.cost)


def _not_found(head: Head, routes: list[Route], offered: list[Route]) -> tuple[int, str]:
    """The status and message for a request that is not passed on."""
    if not routes:
        return 404, f"the gateway does not pass on {head.path}"
    if not offered:
        return 404, f"{head.path} is of an API that the suite's `gateway` does not name: {routes[0].api}"
    return 405, f"{head.path} takes {' and '.join(sorted({route.method for route in offered}))}"


def _pass_error(call: Forwarded, upstream: Upstream, response: InvocationResponse, connection: AgentConnection) -> None:
    """Give the agent what its provider said, without the key; or say that there was no reply."""
    exchange = call.exchange
    if exchange is None or not exchange.status:
        message = f"the gateway got no reply from {upstream.endpoint}: {response.error}"
        connection.whole(502, JSON, failure(upstream.api, 502, message))
    elif not exchange.is_passed_on:
        headers = exchange.passed_headers(filtered=True)
        connection.whole(exchange.status, headers, upstream.masked(b"".join(exchange.chunks)))
    elif not exchange.is_whole:
        connection.abort()


def _read_so_far(call: Forwarded, upstream: Upstream, asked_at: datetime) -> InvocationResponse:
    """The response of a call that the agent hung up on: whole when only the end of its connection was missing."""
    hung_up = TransportError("the agent hung up before its reply was complete")
    reply = None if call.exchange is None else call.exchange.so_far()
    try:
        if reply is None:
            raise hung_up
        return upstream.read(call, reply, hung_up, asked_at)
    except TargetError as error:
        response = error.partial or InvocationResponse(request_time=asked_at)
        response.error, response.error_type = str(hung_up), "Aborted"
        return response


def _lacks_tokens(response: InvocationResponse) -> bool:
    """Whether something was generated of which the provider did not say how much."""
    known = response.num_tokens_input is not None and response.num_tokens_output is not None
    return response.http_status == 200 and not known


def _count_tokens(call: Forwarded, response: InvocationResponse, count: Count) -> None:
    """Estimate the token counts that the provider did not report."""
    body = call.fields
    if response.num_tokens_input is None:
        rest = " ".join(body.fields[name].decode("utf-8", "replace") for name in _COUNTED if name in body.fields)
        turns = [turn for raw in body.turns if isinstance(turn := msgspec.json.decode(raw), dict)]
        response.num_tokens_input = count_input(turns, rest, count)
    if response.num_tokens_output is None:
        response.num_tokens_output = count_words(response.messages, count)
    response.tokens_estimated = True
