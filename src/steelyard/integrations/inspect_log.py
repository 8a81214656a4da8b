"""Logs of inspect_ai: `.eval` and `.json` files, read without the package."""

from __future__ import annotations

import hashlib
import json
import math
import re
import struct
import zipfile
from collections.abc import Callable, Iterable, Iterator
from datetime import datetime
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from steelyard.errors import ConfigurationError
from steelyard.records import EvalCase, FailedAttempt, InvocationResponse
from steelyard.run.imports import LogAbout, LogSample, LogScore, seconds_between

TOOL = "inspect_ai"
_ZSTD = 93
"""The method of a zip file's member that Python reads from 3.14 on."""
_MAX_MEMBER_BYTES = 1 << 30
_MAX_TRACEBACK_CHARS = 8_000
_ATTACHMENT = "attachment://"
_STOP_REASONS = {
    "time": "time_limit",
    "working": "time_limit",
    "token": "token_limit",
    "cost": "cost_limit",
    "message": "turn_limit",
    "turn": "turn_limit",
}
_TYPE = re.compile(r"^([A-Za-z_][\w.]*)\(")
_MEANS = ("accuracy", "mean")
"""Metrics that are the mean of a score over samples."""


class _Usage(msgspec.Struct):
    input_tokens: int = 0
    output_tokens: int = 0
    total_tokens: int = 0
    input_tokens_cache_write: int | None = None
    input_tokens_cache_read: int | None = None
    reasoning_tokens: int | None = None
    total_cost: float | None = None


class _Score(msgspec.Struct):
    value: Any = None
    explanation: str | None = None
    metadata: dict[str, Any] | None = None


class _Error(msgspec.Struct):
    message: str = ""
    traceback: str = ""


class _Limit(msgspec.Struct):
    type: str = ""


class _Choice(msgspec.Struct):
    message: dict[str, Any] = {}
    stop_reason: str | None = None


class _Output(msgspec.Struct):
    choices: list[_Choice] = []
    completion: str = ""
    time: float | None = None
    error: str | None = None


class _Sample(msgspec.Struct):
    id: int | str
    epoch: int = 1
    input: str | list[dict[str, Any]] = ""
    target: str | list[str] = ""
    choices: list[str] | None = None
    messages: list[dict[str, Any]] = []
    output: _Output = msgspec.field(default_factory=_Output)
    scores: dict[str, _Score] | None = None
    metadata: dict[str, Any] = {}
    model_usage: dict[str, _Usage] = {}
    started_at: datetime | None = None
    completed_at: datetime | None = None
    total_time: float | None = None
    working_time: float | None = None
    error: _Error | None = None
    error_retries: list[_Error] | None = None
    limit: _Limit | None = None
    attachments: dict[str, str] = {}


class _Metric(msgspec.Struct):
    value: float | None = None


class _EvalScore(msgspec.Struct):
    name: str
    scorer: str
    reducer: str | None = None
    metrics: dict[str, _Metric] = {}


class _Headline(msgspec.Struct):
    score: str | None = None


class _Results(msgspec.Struct):
    scores: list[_EvalScore] = []
    headline: _Headline | None = None


class _Stats(msgspec.Struct):
    started_at: str = ""
    """Empty before the evaluation began."""


class _Eval(msgspec.Struct):
    task: str
    model: str
    created: str | None = None
    packages: dict[str, str] = {}


class _Header(msgspec.Struct):
    version: int
    eval: _Eval
    status: str = "started"
    results: _Results | None = None
    stats: _Stats = msgspec.field(default_factory=_Stats)


class _Whole(_Header):
    samples: list[_Sample] | None = None


_Read = TypeVar("_Read", _Header, _Whole, _Sample)


def _decoded(data: bytes, kind: type[_Read], what: str) -> _Read:
    """A part of a log; inspect writes NaN and Infinity, which JSON does not have."""
    try:
        try:
            return msgspec.json.decode(data, type=kind)
        except msgspec.ValidationError:
            raise
        except msgspec.DecodeError:
            return msgspec.convert(json.loads(data), kind)
    except (ValueError, RecursionError) as error:
        raise ConfigurationError(f"{what} is not as inspect writes it: {error}") from error


class InspectLog:
    """A log of inspect_ai. Of an `.eval` file one sample is in memory at a time, of a `.json` file all of them."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._archive = zipfile.is_zipfile(path)
        self._held: list[_Sample] | None = None
        with path.open("rb") as file:
            magic = file.read(4)
        if self._archive:
            header = self._from_archive()
        elif magic.startswith(b"PK"):
            raise ConfigurationError(f"{path} is cut off: its end, which lists what is in it, is missing")
        else:
            header = self._from_json()
        if header.version > 2:
            raise ConfigurationError(f"{path} is an inspect log of version {header.version}, known are 1 and 2")
        self._started = _time(header.stats.started_at)
        self._model = header.eval.model
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        self.about = LogAbout(
            tool=TOOL,
            tool_version=header.eval.packages.get("inspect_ai"),
            task=header.eval.task,
            model=header.eval.model,
            digest=digest,
            created=header.eval.created,
            decides=_headline(header.results),
            figures=_figures(header.results),
            unfinished=header.status != "success",
        )

    def samples(self) -> Iterator[LogSample]:
        """The samples in the order in which they ended, as far as the log has it."""
        for sample in self._members() if self._held is None else self._held:
            yield self._sample(sample)

    def _from_json(self) -> _Header:
        whole = _decoded(self._path.read_bytes(), _Whole, str(self._path))
        held = whole.samples or []
        self._held = sorted(
            held, key=lambda sample: "" if sample.completed_at is None else sample.completed_at.isoformat()
        )
        return whole

    def _from_archive(self) -> _Header:
        with zipfile.ZipFile(self._path) as archive:
            names = set(archive.namelist())
            name = next((name for name in ("header.json", "_journal/start.json") if name in names), None)
            if name is None:
                raise ConfigurationError(f"{self._path} is no inspect log: it has no header.json")
            return _decoded(_read_member(archive, name, self._path), _Header, f"{self._path}: {name}")

    def _members(self) -> Iterator[_Sample]:
        with zipfile.ZipFile(self._path) as archive:
            for name in archive.namelist():
                if name.startswith("samples/") and name.endswith(".json"):
                    yield _decoded(_read_member(archive, name, self._path), _Sample, f"{self._path}: {name}")

    def _sample(self, sample: _Sample) -> LogSample:
        put_back = _attached(sample.attachments)
        asked = put_back(sample.input) or ""
        target = put_back(sample.target)
        metadata = dict(put_back(sample.metadata))
        if sample.choices:
            metadata["choices"] = sample.choices
        case = EvalCase(
            id=str(sample.id),
            prompt=asked if isinstance(asked, str) else None,
            messages=None if isinstance(asked, str) else [_message(message) for message in asked],
            expected=target[0] if isinstance(target, list) and len(target) == 1 else target or None,
            metadata=metadata,
        )
        errors = sample.error_retries or []
        failed_at = sample.started_at or sample.completed_at or datetime.fromtimestamp(0).astimezone()
        return LogSample(
            case=case,
            trial=max(sample.epoch - 1, 0),
            response=self._response(sample, case, put_back),
            scores=dict(_scores(sample.scores or {}, put_back)),
            attempts=1 + len(errors),
            failures=[
                FailedAttempt(error_type=_error_type(one.message), error=one.message, time=failed_at) for one in errors
            ],
            elapsed=sample.total_time or seconds_between(sample.started_at, sample.completed_at),
            run_time=seconds_between(self._started, sample.completed_at),
        )

    def _response(self, sample: _Sample, case: EvalCase, put_back: Callable[[Any], Any]) -> InvocationResponse:
        output = sample.output
        choice = output.choices[0] if output.choices else _Choice()
        messages = [_message(message) for message in put_back(sample.messages)]
        turns = sum(message.get("role") == "assistant" for message in messages)
        text = put_back(output.completion) or _text(put_back(choice.message.get("content")))
        stop = choice.stop_reason
        if sample.limit is not None and sample.limit.type:
            stop = _STOP_REASONS.get(sample.limit.type, f"{sample.limit.type}_limit")
        response = InvocationResponse(
            response_text=text or ("" if sample.error is None else None),
            input_prompt=case.prompt,
            messages=messages or None,
            stop_reason=stop,
            time_to_last_token=_last_token(sample, turns),
            time_waiting=_waited(sample),
            request_time=sample.started_at,
            num_turns=turns or None,
            retries=len(sample.error_retries or []),
        )
        _count_tokens(response, sample.model_usage, self._model)
        if sample.error is not None:
            response.error, response.error_type = sample.error.message or "error", _error_type(sample.error.message)
            response.error_traceback = sample.error.traceback[-_MAX_TRACEBACK_CHARS:] or None
        return response


def _time(text: str) -> datetime | None:
    try:
        return datetime.fromisoformat(text)
    except ValueError:
        return None


def _headline(results: _Results | None) -> str | None:
    """The score that inspect shows first."""
    if results is None or not results.scores:
        return None
    named = results.headline.score if results.headline is not None else None
    first = next((one for one in results.scores if one.name == named), results.scores[0])
    return _name(first)


def _name(score: _EvalScore) -> str:
    return score.name if score.name == score.scorer else f"{score.scorer}.{score.name}"


def _figures(results: _Results | None) -> dict[str, float]:
    """The means that inspect computed: of scores that it reduced over epochs by their mean."""
    found: dict[str, float] = {}
    for score in results.scores if results is not None else ():
        value = next((score.metrics[name].value for name in _MEANS if name in score.metrics), None)
        if value is not None and not math.isnan(value) and score.reducer in (None, "mean"):
            found[_name(score)] = value
    return found


def _scores(scores: dict[str, _Score], put_back: Callable[[Any], Any]) -> Iterator[tuple[str, LogScore]]:
    """The scores of a sample; of one with several values each by its own name."""
    for name, score in scores.items():
        judged = f"inspect/{name}" if "grading" in (score.metadata or {}) else None
        reason = None if score.explanation is None else str(put_back(score.explanation))
        values = score.value if isinstance(score.value, dict) else {None: score.value}
        for key, value in values.items():
            own = name if key is None else f"{name}.{key}"
            if isinstance(value, float) and math.isnan(value):
                value = None
            if isinstance(value, list):
                value = msgspec.json.encode(value).decode()
            yield own, LogScore(value=value, reason=reason, by=judged)


def _last_token(sample: _Sample, turns: int) -> float | None:
    """How long the answer took: of one call its time, of several the time in which the sample was at work."""
    if turns <= 1 and sample.output.time is not None:
        return sample.output.time
    return sample.working_time if sample.working_time is not None else sample.total_time


def _waited(sample: _Sample) -> float | None:
    """How long a sample waited for others: for connections, or after an endpoint asked to slow down."""
    if sample.total_time is None or sample.working_time is None:
        return None
    waited = sample.total_time - sample.working_time
    return waited if waited > 0 else None


def _count_tokens(response: InvocationResponse, usage: dict[str, _Usage], model: str) -> None:
    """Add up the tokens of the model that was evaluated; a grader's are left out where it is another one."""
    used = [usage[model]] if model in usage else list(usage.values())
    if not used:
        return
    cached, written = (
        _sum(getattr(one, name) for one in used) for name in ("input_tokens_cache_read", "input_tokens_cache_write")
    )
    plain = sum(one.input_tokens for one in used)
    response.num_tokens_output = sum(one.output_tokens for one in used)
    # Some providers count cached tokens among the input, others apart; the total tells which.
    apart = sum(one.total_tokens for one in used) >= plain + response.num_tokens_output + (cached or 0) + (written or 0)
    response.num_tokens_input = plain + ((cached or 0) + (written or 0) if apart else 0)
    response.num_tokens_input_cached = cached
    response.num_tokens_input_cache_write = written
    response.num_tokens_output_reasoning = _sum(one.reasoning_tokens for one in used)
    costs = [one.total_cost for one in used if one.total_cost is not None]
    response.cost = sum(costs) if costs else None


def _sum(counts: Iterable[int | None]) -> int | None:
    known = [count for count in counts if count is not None]
    return sum(known) if known else None


def _message(message: dict[str, Any]) -> dict[str, Any]:
    """A message in the form of OpenAI's API, as our own targets write them."""
    made: dict[str, Any] = {"role": message.get("role", ""), "content": message.get("content")}
    if isinstance(calls := message.get("tool_calls"), list) and calls:
        made["tool_calls"] = [
            {
                "id": call.get("id"),
                "type": "function",
                "function": {
                    "name": call.get("function"),
                    "arguments": msgspec.json.encode(call.get("arguments")).decode(),
                },
            }
            for call in calls
            if isinstance(call, dict)
        ]
    if message.get("tool_call_id") is not None:
        made["tool_call_id"] = message["tool_call_id"]
    if message.get("error") is not None:
        made["error"] = message["error"]
    return made


def _text(content: Any) -> str:
    """The words of a message's content."""
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else []
    return "".join(part["text"] for part in parts if isinstance(part, dict) and isinstance(part.get("text"), str))


def _error_type(message: str) -> str:
    found = _TYPE.match(message)
    return found[1].rpartition(".")[2] if found else "SampleError"


def _attached(attachments: dict[str, str]) -> Callable[[Any], Any]:
    """Put long texts back that inspect keeps apart from where they belong."""

    def put_back(value: Any) -> Any:
        if isinstance(value, str):
            found = value.removeprefix(_ATTACHMENT) if value.startswith(_ATTACHMENT) else None
            return attachments.get(found, value) if found is not None else value
        if isinstance(value, list):
            return [put_back(one) for one in value]
        if isinstance(value, dict):
            return {key: put_back(one) for key, one in value.items()}
        return value

    return put_back


def _read_member(archive: zipfile.ZipFile, name: str, path: Path) -> bytes:
    """The content of a member, also where it is compressed by zstd."""
    info = archive.getinfo(name)
    if info.file_size > _MAX_MEMBER_BYTES:
        raise ConfigurationError(f"{path}: {name} has {info.file_size:,} bytes, more than {_MAX_MEMBER_BYTES:,}")
    try:
        if info.compress_type != _ZSTD:
            return archive.read(name)
        return _decompress(_raw(path, info), info.file_size, path)
    except (zipfile.BadZipFile, OSError, EOFError, ValueError, struct.error) as error:
        raise ConfigurationError(f"{path}: {name} cannot be read: {error}") from error


def _raw(path: Path, info: zipfile.ZipInfo) -> bytes:
    """The bytes of a member as they are in the file."""
    with path.open("rb") as file:
        file.seek(info.header_offset)
        head = file.read(30)
        name_length, extra_length = struct.unpack("<HH", head[26:30])
        file.seek(name_length + extra_length, 1)
        return file.read(info.compress_size)


def _decompress(data: bytes, size: int, path: Path) -> bytes:
    """Decompress by zstd, which Python has from 3.14 on and the package zstandard before."""
    try:
        from compression import zstd  # type: ignore[import-not-found,unused-ignore]
    except ImportError:
        try:
            import zstandard
        except ImportError as error:
            raise ConfigurationError(
                f"{path} is compressed with zstd: pip install 'steelyard[inspect]', "
                f"or make a JSON log of it: inspect log convert {path.name} --to json --output-dir DIR",
                topic="extra",
            ) from error
        try:
            return zstandard.ZstdDecompressor().decompress(data, max_output_size=size)
        except zstandard.ZstdError as error:
            raise ValueError(str(error)) from error
    try:
        content: bytes = zstd.decompress(data)
    except zstd.ZstdError as error:
        raise ValueError(str(error)) from error
    return content
