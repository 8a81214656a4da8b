"""The vocabulary that crosses steps: what is asked, what came back, what it scored, what is kept."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from datetime import datetime
from typing import Annotated, Any, Literal, SupportsIndex, overload

import msgspec

RECORD_VERSION = 2
MAX_NUMBER = 1e15
"""The largest number that a target may report: any sum and square of such numbers is finite."""

Status = Literal["ok", "error"]
Better = Literal["higher", "lower"]
CUT_OFF = "CutOff"
"""The `error_type` of an answer in `answers.jsonl` that the end of a run cut off: kept, and asked for again."""


class CaseLimits(msgspec.Struct, kw_only=True, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """How much an agent may use for one attempt at a case. Reaching a limit is an outcome: what there is, is scored."""

    time: float | None = None
    """Seconds of wall time, less what our own rate limits made it wait."""
    turns: int | None = None
    """Replies of the model."""
    tokens: int | None = None
    """Input and output tokens of all turns together."""
    cost: float | None = None
    output: int | None = None
    """Bytes that the agent may print."""

    @property
    def names(self) -> list[str]:
        """The limits that are set."""
        return [name for name in _LIMITS if getattr(self, name) is not None]

    def overridden(self, other: CaseLimits | None) -> CaseLimits:
        """These limits with those that the other sets in their place."""
        if other is None:
            return self
        own = {name: value for name in _LIMITS if (value := getattr(other, name)) is not None}
        return msgspec.structs.replace(self, **own)


_LIMITS = CaseLimits.__struct_fields__
STOP_REASONS = {
    "time": "time_limit",
    "turns": "turn_limit",
    "tokens": "token_limit",
    "cost": "cost_limit",
    "output": "output_limit",
}
"""The `stop_reason` of an answer that reached a limit, by the limit's name."""
TOKEN_FIELDS = (
    "num_tokens_input",
    "num_tokens_output",
    "num_tokens_input_cached",
    "num_tokens_output_reasoning",
    "num_tokens_input_cache_write",
)
"""The fields of a response that count tokens: of several calls, their sums."""


class EvalCase(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One thing to ask, and what a good answer looks like."""

    id: str = ""
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    system_prompt: str | None = None
    tools: list[dict[str, Any]] | None = None
    expected: Any = None
    expected_trajectory: Any = None
    metadata: dict[str, Any] = {}
    group: str | None = None
    """What it shares with other cases, such as a document: figures count cases of a group together."""
    limits: CaseLimits | None = None
    """Limits of this case, in place of the suite's `case_limits`."""
    attachments: list[Any] = []
    """Files that go with the prompt: paths or URLs; each an `Attachment` once the suite has read the case."""


def id_digest(case_id: str) -> int:
    """A case id as 64 bits: what plans and indexes hold instead of a million strings."""
    return int.from_bytes(hashlib.blake2b(case_id.encode(), digest_size=8).digest())


class Score(msgspec.Struct, omit_defaults=True, gc=False):
    """What one scorer said of one response. `value` is None when it could not be scored (`errors` says why).

    A value lies within 0..1, unless it is a measurement: a number with a `unit`, or that says which direction is
    `better`. A `label` needs no value. Only a score with `passed` decides whether a case passed.
    """

    name: str
    value: float | None = None
    passed: bool | None = None
    reason: str | None = None
    samples: list[float | None] | None = None
    mean: float | None = None
    std_dev: float | None = None
    errors: list[str] = []
    reasons: list[str | None] | None = None
    """What was said in each sample, in their order."""
    by: str | None = None
    """Who judged: model, prompt and its version; None for a deterministic scorer."""
    escalated: bool = False
    """Asked only because the scorers before it failed the answer; where it passes, its verdict replaces theirs."""
    overruled: bool = False
    """Failed, but an escalated judge passed the answer: kept for the record, decides nothing."""
    advisory: bool = False
    """From a judge that is not calibrated: shown, but it decides nothing."""
    retries: int = 0
    """How often the scorer was called again after a fault that may pass."""
    calibrated: bool = False
    """From a judge whose calibration was asked for and is good."""
    votes: dict[str, bool | None] | None = None
    """Of a jury: what each model said, by its name; None for one that gave no verdict."""
    error_traceback: str | None = None
    """Where the scorer failed, in the user's code; None for an error that came from elsewhere."""
    label: str | None = None
    """What kind of answer it is, in a word: reports count each label and give its share."""
    unit: str | None = None
    """Of a measurement: what it is measured in, such as `steps`."""
    better: Better | None = None
    """Of a measurement: which direction is better; None where neither is."""
    extracted: str | None = None
    """What was scored instead of the whole answer, where the scorer has an `extract`; its beginning."""
    combines: list[str] | None = None
    """Of a combined score: the names of the scores that it is made of."""

    @property
    def is_number(self) -> bool:
        """Whether it is a measurement, whose value has no bounds."""
        return self.unit is not None or self.better is not None

    @property
    def is_lacking(self) -> bool:
        """Whether it could not be made, in whole or in part: it is made again when the run is resumed."""
        return bool(self.errors) or (self.value is None and self.label is None)

    @property
    def shown_value(self) -> float | str | None:
        """Its value or, where it has none, its label."""
        return self.label if self.value is None else self.value


class Scores(list[Score]):
    """The scores of a record, in the scorers' order; by position as in any list, or by name: `scores["exact"]`."""

    @overload
    def __getitem__(self, key: SupportsIndex) -> Score: ...
    @overload
    def __getitem__(self, key: slice) -> list[Score]: ...
    @overload
    def __getitem__(self, key: str) -> Score: ...
    def __getitem__(self, key: Any) -> Any:
        if not isinstance(key, str):
            return super().__getitem__(key)
        for score in self:
            if score.name == key:
                return score
        raise KeyError(f"no score {key!r}; there are: {', '.join(score.name for score in self) or 'none'}")

    def __contains__(self, item: object) -> bool:
        if isinstance(item, str):
            return any(score.name == item for score in self)
        return super().__contains__(item)


def verdict(scores: Iterable[Score]) -> bool | None:
    """Whether a case passed: every score that decides must have passed.

    None, for "unscored", when no score decides or when one could not be made. A score without `passed` is only
    a measurement and decides nothing; nor does one that was overruled, or an advisory one. A judge that was asked only
    because the others had failed the answer, and gave no verdict, leaves it failed.
    """
    passes: bool | None = None
    for score in scores:
        if score.overruled or score.advisory:
            continue
        if score.value is None and score.errors:
            if score.escalated:
                continue
            return None
        passed = score.passed
        if passed is not None and passes is not False:
            passes = passed
    return passes


def overrules(score: Score) -> bool:
    """Whether it is the verdict of an escalated judge that passes what the scorers before it had failed."""
    return score.escalated and not score.advisory and score.passed is True


class FailedAttempt(msgspec.Struct, kw_only=True, omit_defaults=True, gc=False):
    """One attempt that failed and was retried."""

    error_type: str
    error: str
    time: datetime
    """When it failed."""
    http_status: int | None = None


class Sample(msgspec.Struct, kw_only=True, omit_defaults=True, gc=False):
    """What a judge said when it was asked once; `score` is None when it could not be asked or understood."""

    score: float | None = None
    passed: bool | None = None
    reason: str | None = None
    error: str | None = None


_NONE = type(None)


class ResponseFields(msgspec.Struct, kw_only=True, omit_defaults=True):
    """The fields of a response: the one list from which responses, records and the journal's entries derive.

    Those with a default factory are written even when they are None, so that a table read from a journal has these
    columns. Times are seconds from the moment the request was sent. The fields that most answers have come first, up
    to `LAST_COMMON_FIELD`: a check of the rest is short.
    """

    response_text: str | None = msgspec.field(default_factory=_NONE)
    time_to_first_token: float | None = msgspec.field(default_factory=_NONE)
    time_to_last_token: float | None = msgspec.field(default_factory=_NONE)
    time_per_output_token: float | None = msgspec.field(default_factory=_NONE)
    num_tokens_input: int | None = msgspec.field(default_factory=_NONE)
    num_tokens_output: int | None = msgspec.field(default_factory=_NONE)
    request_time: datetime | None = msgspec.field(default_factory=_NONE)
    stop_reason: str | None = msgspec.field(default_factory=_NONE)
    error: str | None = msgspec.field(default_factory=_NONE)
    input_prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    http_status: int | None = None
    request_id: str | None = None
    """The provider's name for the call, for its support to look up."""
    time_queued: float | None = None
    """Seconds from asking the client to send until the bytes were handed to the socket: connecting, mostly."""
    cost: float | None = None
    """What the answer cost, in the currency of the prices; of a cached one: nothing more."""
    num_tokens_input_cached: int | None = None
    num_tokens_output_reasoning: int | None = None
    time_to_first_content_token: float | None = None
    time_between_tokens_p50: float | None = None
    """Of a streamed answer: seconds between a piece that brings a token and the next one."""
    time_between_tokens_p99: float | None = None
    time_between_tokens_max: float | None = None
    input_payload: Any = None
    retries: int = 0
    error_type: str | None = None
    cached: bool = False
    """Not asked for: from the cache, or from a call that another case made. Its times are of the call back then."""
    time_to_first_reasoning_token: float | None = None
    stalls: int = 0
    """How many of these gaps lasted half a second or longer."""
    time_waiting: float | None = None
    """Seconds spent waiting for permission to send: a rate, a token budget, an endpoint that asked all to slow down."""
    time_in_backoff: float | None = None
    """Seconds between a failed try and the next one, all tries together."""
    time_in_failed_tries: float | None = None
    """Seconds that the tries took which failed and were retried, without their rate-limit waits."""
    time_in_model: float | None = None
    """Of an agent with a gateway: seconds in which a model was answering at least one of its calls."""
    time_in_tools: float | None = None
    """Of an agent with a gateway: seconds in which no call was under way, the agent's own work and its tools'."""
    time_from_planned: float | None = None
    """Open loop: seconds from the planned moment of sending to the end of the answer."""
    tokens_estimated: bool = False
    """The server reported no usage: the token counts are an estimate."""
    node: str | None = None
    """Which machine of a cluster the case was asked from; None when it was this process."""
    num_tokens_input_cache_write: int | None = None
    """Those of the input tokens that the provider wrote to its prompt cache, which some ask more for."""
    resent: int = 0
    """How often a request was sent again because its kept-alive connection was closed before anyone read it: no try."""
    reasoning_in_text: bool = False
    """The text began with a block of reasoning, `<think>…</think>`, which is only in `messages`."""
    fields_left_out: list[str] | None = None
    """Fields of the model's own turns that the endpoint refused to take back in this call."""
    error_traceback: str | None = None
    """Where the target failed, in the user's code; None for an error that came from elsewhere."""
    stderr: str | None = None
    """The end of what a program wrote to stderr."""
    num_turns: int | None = None
    """How often an agent's model replied."""
    exit_code: int | None = None
    """How an agent's program ended; of one that a signal ended, the signal's negative number."""
    cpu_seconds: float | None = None
    """CPU time of an agent's program and of those that it started and waited for."""
    peak_memory: int | None = None
    """Bytes that the largest process of an agent's program held at once."""
    disk_used: int | None = None
    """Bytes of an agent's workspace when it had ended."""
    workspace_patch: str | None = None
    """What an agent changed, of an answer in the cache; a run keeps it under artifacts/ instead."""


LAST_COMMON_FIELD = "time_between_tokens_max"


class InvocationResponse(ResponseFields, kw_only=True, omit_defaults=True, gc=False):
    """What came back for one case. Times are seconds from the moment the request was sent."""

    id: str = ""


class _RecordHead(ResponseFields, omit_defaults=True, gc=False):
    """What a record says of its case before the response's fields."""

    v: int
    id: str
    trial: Annotated[int, msgspec.Meta(ge=0, lt=1 << 16)]
    index: Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]
    status: Status
    attempts: int
    elapsed: float
    case_fp: str
    scored_by: str
    run_time: float


class Record(_RecordHead, kw_only=True, omit_defaults=True, gc=False):
    """One line of `outputs.jsonl`: which case, how it went, the response's fields flat, its scores."""

    scores: list[Score]
    notes: list[str] = []
    retry_errors: list[FailedAttempt] = []
    """The attempts before the last one, the latest of them."""
    group: str | None = None
    """The group that the case belongs to: figures count cases of a group together."""
    expected: Any = None
    """What the case expected when it was asked; of more than 16 KB only its digest, as of `metadata`."""
    metadata: dict[str, Any] = {}
    time_scoring: float | None = None
    """Seconds that scorers took which can wait: judges, functions, tests. Those of the others are microseconds."""
    files_not_kept: int = 0
    """Files of an agent's workspace that were to be kept, and were not: `max_disk` was used up."""
    bytes_not_kept: int = 0

    @property
    def passed(self) -> bool | None:
        """Whether the case passed; None when no score decides, or when it has no answer."""
        return None if self.error is not None else verdict(self.scores)

    @property
    def response(self) -> InvocationResponse:
        """The response alone, as the target gave it."""
        return InvocationResponse(**{name: getattr(self, name) for name in InvocationResponse.__struct_fields__})


MAX_KEPT_BYTES = 16 << 10
_MAX_PLAIN_CHARS = MAX_KEPT_BYTES // 6 - 2
"""So long a text is within the limit however it is escaped."""
_MAX_KEPT_DEPTH = 50
_DIGEST_KEYS = {"sha256", "bytes"}
_encode = msgspec.json.Encoder(order="sorted").encode


def bounded(value: Any) -> Any:
    """The value, or `{"sha256": ..., "bytes": ...}` where it is larger than 16 KB as JSON, or nested too deep."""
    if type(value) is str and len(value) <= _MAX_PLAIN_CHARS:
        return value
    try:
        data = _encode(value)
    except Exception:  # noqa: BLE001 - the writer makes something of it that can be written
        return value
    if len(data) <= MAX_KEPT_BYTES and data.count(b"[") + data.count(b"{") <= _MAX_KEPT_DEPTH:
        return value
    return {"sha256": hashlib.sha256(data).hexdigest(), "bytes": len(data)}


def is_digest(value: Any) -> bool:
    """Whether a record has only the digest of this value."""
    return isinstance(value, dict) and value.keys() == _DIGEST_KEYS


class StoredSample(msgspec.Struct, kw_only=True, omit_defaults=True, gc=False):
    """One line of `answers.jsonl`: what a judge said of an answer, written down as soon as it was paid for."""

    id: str
    trial: int
    answer_fp: str
    """The fingerprint of all it depends on: a sample about another answer, or of another judge, is of no use."""
    by: str
    run: int
    sample: Sample


class UnscoredAnswer(msgspec.Struct, frozen=True, gc=False):
    """An answer that is about to be scored: kept first, so that a crash costs its scores and not the answer."""

    record: Record


class EncodedRecord(msgspec.Struct, frozen=True, gc=False):
    """A finished record as a worker encoded it: a line of the journal without its checksum, its `run_time` still 0."""

    id: str
    trial: int
    line: bytes


class EncodedRecords(msgspec.Struct, frozen=True, gc=False):
    """Several of them, which came at once: written by one call of the kernel."""

    records: list[EncodedRecord]


class Job(msgspec.Struct, gc=False):
    """One (case, trial) for the engine: to be asked, or, with a stored response, only to be scored."""

    index: int
    trial: int
    case: EvalCase
    case_fp: str
    scored_by: str
    stored: Record | None = None
    samples: tuple[StoredSample, ...] = ()
    planned_at: float | None = None
    """Open loop: the reading of `time.monotonic()` at which it was to be sent."""
