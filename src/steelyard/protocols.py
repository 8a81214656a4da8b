"""The contracts between the steps: targets, scorers, judges, transports, permits and units of work."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeAlias, runtime_checkable

import msgspec

from steelyard.records import (
    CaseLimits,
    EncodedRecords,
    EvalCase,
    FailedAttempt,
    InvocationResponse,
    Job,
    Record,
    Sample,
    Score,
    StoredSample,
    UnscoredAnswer,
)

Identity: TypeAlias = Mapping[str, Any]
"""JSON-able facts that decide a target's or scorer's answers. Keys that start with `~` only warn when they change."""

ScoreResult: TypeAlias = Score | list[Score] | None
Emit: TypeAlias = Callable[[Record | UnscoredAnswer | StoredSample | EncodedRecords], None]
"""Receives what work produces: an answer before it is scored, each sample of a judge, and the finished record.

From workers, records come as they encoded them, several at once, if the work has a method `encode`."""


class Cancellation(Protocol):
    """What a target or engine may see of a CancellationToken."""

    @property
    def cancelled(self) -> bool: ...

    @property
    def reason(self) -> str | None: ...

    async def wait(self) -> str: ...


class Clock(Protocol):
    """A time limit that does not run while the call waits for something that is not the target's doing."""

    def stop(self) -> None: ...

    def start(self) -> None: ...


class StartedPrograms(Protocol):
    """Where a target writes down the programs that it starts, so that a later launch can end what was left of them."""

    def started(self, pid: int) -> None: ...

    def ended(self, pid: int) -> None: ...


class Session(msgspec.Struct, forbid_unknown_fields=True):
    """What a case begins with: whatever the target makes of `data`, and messages that come before the case's own."""

    data: dict[str, Any] = {}
    messages: list[dict[str, Any]] = []


class GatewayAddresses(msgspec.Struct, frozen=True):
    """Where an agent finds the models for one attempt, and the key that it is to use there."""

    url: str
    openai: str
    """The base URL that OpenAI's clients take, with `/v1`."""
    anthropic: str
    key: str

    def __repr__(self) -> str:
        return f"GatewayAddresses({self.url!r}, key=***)"


class Sandbox(Protocol):
    """Confines the programs of one attempt."""

    @property
    def disk(self) -> int | None:
        """Bytes that the attempt may write; None without a bound."""

    def wrap(self, argv: Sequence[str], env: Mapping[str, str], *, cwd: Path) -> tuple[list[str], dict[str, str]]:
        """What to start in place of a program, and with which environment: how a program is run inside."""

    async def copy_in(self, source: Path, destination: Path) -> None:
        """Copy a file or folder into the sandbox; `destination` is relative to its workspace."""

    async def copy_out(self, source: Path, destination: Path) -> None:
        """Copy a file or folder out of the sandbox; `source` is relative to its workspace."""

    async def destroy(self) -> None:
        """End everything that runs inside, and remove what was made for it."""


class SandboxPlace(msgspec.Struct, frozen=True, kw_only=True):
    """What a sandbox is for: one attempt at a case, or one grading of it."""

    label: str
    """Names the run, the case and the attempt, so that a later launch can find what was left."""
    workspace: Path
    writable: tuple[Path, ...]
    """Folders that its programs may write: the workspace among them."""
    gateway_socket: Path | None = None
    """A Unix socket that takes a listening socket, which the gateway then serves; None without a gateway."""
    gateway_port: int = 0


@runtime_checkable
class SandboxProvider(Protocol):
    """A kind of sandbox, as a suite names it: `bubblewrap`, or one of a plugin."""

    @property
    def wants_gateway(self) -> bool:
        """Whether its programs reach the gateway and nothing else."""

    def identity(self) -> Identity: ...

    def check(self, hidden: Sequence[Path] = ()) -> None:
        """Raise ConfigurationError where it cannot be used, or would show one of the hidden folders. Called first."""

    async def start(self, place: SandboxPlace) -> Sandbox: ...

    async def reap(self, label: str) -> None:
        """End and remove what an earlier launch left under labels that begin so."""


class LimitSignal(Protocol):
    """Tells the target of one attempt that a limit was reached."""

    @property
    def reached(self) -> str | None:
        """The `stop_reason` of the limit that was reached first; None as long as none was."""

    def reach(self, stop_reason: str) -> None:
        """Say that a limit was reached. Safe from any thread."""

    async def wait(self) -> str:
        """Wait until a limit is reached; its `stop_reason`."""

    def pause(self) -> None:
        """Stop the clock of the time limit: the agent waits for our own rate limits."""

    def resume(self) -> None:
        """Let it go on. Each pause needs its own."""


class RecordTurn(Protocol):
    """Writes down one turn of an agent, on disk at once, and counts it against the limits."""

    def __call__(
        self,
        message: Mapping[str, Any] | None = None,
        *,
        input_tokens: int | None = None,
        output_tokens: int | None = None,
        cost: float | None = None,
        at: float | None = None,
    ) -> None:
        """`at` is when the message came, in seconds since 1970: by default now."""


class WriteLog(Protocol):
    """Appends to the log of an attempt, `logs/ID/TRIAL.out` or, with stream="err", `.err`; secrets are masked."""

    def __call__(self, text: str | bytes, stream: str = "out") -> None: ...

    def mask(self, secrets: Iterable[str]) -> None:
        """Have these texts masked, too, in what is written from now on."""


class InvocationContext(msgspec.Struct):
    """What a target may know besides the case: which attempt this is, and a random generator for this case alone."""

    case_id: str
    trial: int = 0
    attempt: int = 1
    seed: int = 0
    token: Cancellation | None = None
    session: Session | None = None
    """A copy of the run's initial session, for this case alone."""
    waiting: float = 0.0
    """Rate-limit wait so far, in seconds."""
    backoff: float = 0.0
    """Retry backoff so far, in seconds."""
    failed: float = 0.0
    """What failed tries took so far, in seconds, without rate-limit waits."""
    spent: float = 0.0
    """What failed attempts have cost so far."""
    clock: Clock | None = None
    """The case's time limit: stopped while it waits for a send permit."""
    retry_errors: list[FailedAttempt] | None = None
    """The attempts so far that failed and were retried, the latest of them."""
    programs: StartedPrograms | None = None
    """Where to write down programs that are started for this case; None in a run without a directory."""
    workspace: Path | None = None
    """The folder of this attempt, fresh from its template; None in a run without workspaces, as are those below."""
    artifacts: Path | None = None
    """A folder for files to keep: under artifacts/ID/TRIAL/ of the run directory."""
    environment: Mapping[str, str] | None = None
    """HOME, TMPDIR, the XDG folders and more, fresh for this attempt, for programs that it starts."""
    log: WriteLog | None = None
    limits: CaseLimits | None = None
    limit_signal: LimitSignal | None = None
    record_turn: RecordTurn | None = None
    gateway: GatewayAddresses | None = None
    sandbox: Sandbox | None = None
    template_digest: str = ""
    """The content of the workspace's template: part of what a cached answer depends on."""

    @property
    def rng(self) -> random.Random:
        """A fresh generator derived from (seed, case id, trial): the same whatever else runs or was skipped."""
        return derived_rng(self.seed, self.case_id, self.trial)


def derived_rng(seed: int, case_id: str, trial: int, *more: Any) -> random.Random:
    """A generator that depends on these values alone."""
    material = msgspec.json.encode([seed, case_id.encode("utf-8", "surrogatepass").hex(), trial, *more])
    return random.Random(int.from_bytes(hashlib.blake2b(material, digest_size=8).digest()))


class ScoringContext:
    """What a scorer that takes `context` may know besides the case and the response. Each scorer gets its own."""

    def __init__(
        self,
        case_id: str,
        trial: int,
        attempt: int,
        *,
        make_scratch: Callable[[], Path],
        make_workspace: Callable[[Path], Path] | None = None,
        make_artifacts: Callable[[], Path] | None = None,
        read_template: Callable[[str], bytes | None] | None = None,
        programs: StartedPrograms | None = None,
        sandbox: Sandbox | None = None,
    ) -> None:
        self.case_id = case_id
        self.trial = trial
        self.attempt = attempt
        self.programs = programs
        """Where to write down programs that are started, so that a later launch can end what is left of them."""
        self.sandbox = sandbox
        self._make_scratch = make_scratch
        self._make_workspace = make_workspace
        self._make_artifacts = make_artifacts
        self._read_template = read_template
        self._scratch: Path | None = None
        self._workspace: Path | None = None

    @property
    def scratch(self) -> Path:
        """An empty folder for this scorer alone, removed when the case is done."""
        if self._scratch is None:
            self._scratch = self._make_scratch()
        return self._scratch

    @property
    def workspace(self) -> Path | None:
        """A copy of the finished workspace, for this scorer alone; None in a run without workspaces.

        It is made when it is first asked for, which may take a while: an async scorer asks for it in a thread.
        """
        if self._workspace is None and self._make_workspace is not None:
            self._workspace = self._make_workspace(self.scratch)
        return self._workspace

    def new_folder(self) -> Path:
        """Another empty folder, removed when the case is done."""
        return self._make_scratch()

    def fresh_workspace(self) -> Path | None:
        """A new copy of the finished workspace each time: for a grader that is tried again."""
        return None if self._make_workspace is None else self._make_workspace(self.new_folder())

    def template_content(self, path: str) -> bytes | None:
        """What the workspace had at a path before the agent began, `/` between names; None where there was nothing."""
        return None if self._read_template is None else self._read_template(path)

    @property
    def artifacts(self) -> Path:
        """A folder for files to keep with the case; in a run without a directory they are removed with it."""
        return self._make_artifacts() if self._make_artifacts is not None else self.scratch


@runtime_checkable
class Target(Protocol):
    """Answers a case: a model endpoint, an agent, a function or a program."""

    @property
    def model_id(self) -> str | None: ...

    @property
    def default_parallelism(self) -> int: ...

    def identity(self) -> Identity: ...

    async def invoke(self, case: EvalCase, context: InvocationContext) -> InvocationResponse: ...


class TargetWrapper:
    """The base of a target that wraps another: passes on what the inner one reports about itself."""

    _target: Target

    @property
    def model_id(self) -> str | None:
        return self._target.model_id

    @property
    def default_parallelism(self) -> int:
        return self._target.default_parallelism

    @property
    def excess(self) -> int:
        """How many calls of the target outlived their timeout and still run in a thread."""
        return int(getattr(self._target, "excess", 0))

    @property
    def heeds_limits(self) -> bool:
        """Whether the target ends by itself when a limit of its case is reached, and answers with what there is."""
        return bool(getattr(self._target, "heeds_limits", False))

    def identity(self) -> Identity:
        return self._target.identity()


@runtime_checkable
class RemoteTarget(Target, Protocol):
    """A target at the other end of a connection, which a run opens and closes."""

    @property
    def endpoint(self) -> str:
        """What shares its rate limits: scheme, host and port."""

    def check(self) -> None:
        """Raise ConfigurationError when it cannot be called at all: without a key, for example. Called first."""

    async def open(self, parallelism: int) -> None:
        """Get ready for `parallelism` calls at once, on the running event loop."""

    async def close(self) -> None: ...


@runtime_checkable
class CallByCall(Target, Protocol):
    """A target that may call a model several times to answer one case."""

    def bound(self, wrap: Callable[[Target], Target]) -> Target:
        """The same target with `wrap` around each of those calls, which are targets of their own."""


class RequestSigning(msgspec.Struct, frozen=True):
    """What a request is signed with by AWS's Signature Version 4, as it is sent."""

    scope: str
    """`aws:amz:REGION:SERVICE`, as libcurl has it."""
    key_id: str
    secret: str

    def __repr__(self) -> str:
        return f"RequestSigning({self.scope!r}, ***)"


class HttpRequest(msgspec.Struct, frozen=True, gc=False):
    """One request, ready to be sent."""

    url: str
    headers: tuple[tuple[str, str], ...]
    body: bytes = b""
    method: str = "POST"
    signing: RequestSigning | None = None


class HttpReply(msgspec.Struct, gc=False):
    """What came back, piece by piece, with a monotonic clock's reading at each arrival.

    Times are seconds from the moment when the request's bytes were handed to the socket; `queued` is how long that
    took from the call of `send`.
    """

    status: int
    headers: dict[str, str]
    """Names in lower case."""
    chunks: list[bytes]
    arrivals: list[float]
    """When each chunk was there."""
    ended: float
    """When the body was whole, or broke off."""
    queued: float
    resent: int = 0
    """How often the request was sent again because its kept-alive connection was closed before anyone read it."""

    @property
    def body(self) -> bytes:
        return b"".join(self.chunks)


class ReplyReceiver(Protocol):
    """Gets a reply as it arrives. Called while the transport reads: it must neither raise nor call the transport."""

    def on_head(self, status: int, headers: dict[str, str]) -> None: ...

    def on_chunk(self, data: bytes) -> None: ...


class Transport(Protocol):
    """Sends requests over pooled connections; raises TransportError when no whole answer comes.

    An answer with an error status is an answer: what it means is for the target to say.
    """

    async def send(self, request: HttpRequest) -> HttpReply: ...

    async def close(self) -> None: ...


@runtime_checkable
class Scorer(Protocol):
    """Scores a response. None means: does not apply to this case.

    Its `score` may take a third argument, `context`, a ScoringContext.
    """

    @property
    def name(self) -> str: ...

    def identity(self) -> Identity: ...

    def score(self, case: EvalCase, response: InvocationResponse) -> ScoreResult | Awaitable[ScoreResult]: ...


@runtime_checkable
class RepeatedJudge(Protocol):
    """A scorer that asks a model, and may be asked several times about one response."""

    @property
    def name(self) -> str: ...

    @property
    def by(self) -> str: ...

    @property
    def when(self) -> str: ...

    def identity(self) -> Identity: ...

    def applies(self, case: EvalCase) -> bool: ...

    def fingerprint(self, case: EvalCase, response: InvocationResponse) -> str: ...

    def bound(self, wrap: Callable[[Target], Target]) -> RepeatedJudge: ...

    async def sample(self, case: EvalCase, response: InvocationResponse, context: InvocationContext) -> Sample: ...

    def combine(self, samples: Sequence[Sample], *, escalated: bool = False) -> Score: ...


class Work(Protocol):
    """Runs and scores one (case, trial), and passes its record to `emit`. What it raises ends the run."""

    async def __call__(self, job: Job, emit: Emit) -> None: ...


class InFlight(msgspec.Struct, frozen=True):
    """What an engine is waiting for: how many calls, and the one that has waited longest."""

    count: int
    oldest_id: str | None
    oldest_seconds: float


class Tally(msgspec.Struct, kw_only=True):
    """What an engine did with the jobs that it took."""

    started: int = 0
    finished: int = 0
    cancelled: int = 0
    peak_in_flight: int = 0
    interrupted_by: str | None = None
    """The case whose target or scorer raised KeyboardInterrupt, which ended the work."""
    unused: tuple[Job, ...] = ()
    """Jobs that were taken for a planned time and not started, when that had passed; `started` is without them."""


class Permits(Protocol):
    """How many calls may be in flight: a number that may change while a run goes on."""

    @property
    def allowed(self) -> int: ...

    def on_change(self, callback: Callable[[], None]) -> None:
        """Have this called whenever `allowed` has changed."""


class Pace(Protocol):
    """Says when the next call is to be sent, whatever became of those before it."""

    async def next_send(self) -> float | None:
        """Wait for the next planned time and return it, by `time.monotonic()`; None when there are no more.

        Returns at once when that time has passed. Awaited by one worker at a time.
        """


class DriverCallback:
    """A callback that always runs in the driver. On a worker, calling it sends a message to the driver."""

    def __init__(self, callback: Callable[..., None]) -> None:
        self._callback = callback

    def __call__(self, *args: Any) -> None:
        self._callback(*args)
