"""Samples of lm-evaluation-harness: the file that `--log_samples` writes for a task, and the results beside it."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from datetime import UTC, datetime
from hashlib import sha256
from pathlib import Path
from typing import Any, Literal

import msgspec

from steelyard.errors import ConfigurationError
from steelyard.records import EvalCase, InvocationResponse
from steelyard.run.imports import LogAbout, LogSample, LogScore

TOOL = "lm_eval"
_NAME = re.compile(r"samples_(?P<task>.+)_(?P<time>\d{4}-\d\d-\d\dT\d\d-\d\d-\d\d[.\d]*)\.jsonl$")


class _Line(msgspec.Struct):
    doc_id: int | str
    doc: Any = None
    target: Any = None
    arguments: Any = None
    resps: list[Any] = []
    filtered_resps: list[Any] = []
    filter: str = "none"
    metrics: list[str] | None = None


class _Results(msgspec.Struct):
    """What is used of `results_….json`."""

    results: dict[str, dict[str, Any]] = {}
    higher_is_better: dict[str, dict[str, bool | None]] = {}
    model_name: str | None = None
    lm_eval_version: str | None = None
    date: float | None = None
    total_evaluation_time_seconds: float | str | None = None
    config: dict[str, Any] = {}


_decode_line = msgspec.json.Decoder(_Line).decode
_decode_results = msgspec.json.Decoder(_Results).decode


class LmEvalLog:
    """A file of samples. The lines of a case, one for each filter, are read together: memory holds where they begin."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._places: dict[str, dict[str, int]] = {}
        digest = sha256()
        for number, offset, line in self._lines():
            digest.update(line)
            one = self._decoded(line, number)
            filters = self._places.setdefault(str(one.doc_id), {})
            if one.filter in filters:
                raise ConfigurationError(
                    f"{path}:{number}: doc_id {one.doc_id} is duplicated for filter {one.filter!r}"
                )
            filters[one.filter] = offset
        self._several = len({name for filters in self._places.values() for name in filters}) > 1
        named = _NAME.search(path.name)
        task = named["task"] if named else path.stem
        found = self._results(named["time"] if named else None)
        self._seconds = _seconds(found.total_evaluation_time_seconds)
        better: dict[str, Literal["higher", "lower"]] = {}
        for metric, higher in found.higher_is_better.get(task, {}).items():
            if higher is not None:
                better |= dict.fromkeys(self._names_of(metric), "higher" if higher else "lower")
        self.about = LogAbout(
            tool=TOOL,
            tool_version=found.lm_eval_version,
            task=task,
            model=_model(found),
            digest=digest.hexdigest(),
            created=None if found.date is None else datetime.fromtimestamp(found.date, UTC).isoformat(),
            figures=self._figures(found.results.get(task, {})),
            better=better,
        )

    def samples(self) -> Iterator[LogSample]:
        """The documents in their order."""
        with self._path.open("rb") as file:
            for case_id, filters in self._places.items():
                lines = {}
                for name, offset in filters.items():
                    file.seek(offset)
                    lines[name] = file.readline()
                yield self._sample(case_id, lines)

    def _sample(self, case_id: str, lines: dict[str, bytes]) -> LogSample:
        scores: dict[str, LogScore] = {}
        first = _decode_line(next(iter(lines.values())))
        asked, choices = _asked(first.arguments)
        if asked is None:  # an older version, or an unusual task: the document is what is known
            asked = msgspec.json.encode(first.doc).decode()
        text = _answer(first, choices)
        for name, line in lines.items():
            raw, one = msgspec.json.decode(line), _decode_line(line)
            filtered = _first(one.filtered_resps)
            extracted = filtered if isinstance(filtered, str) and filtered != text else None
            for metric in one.metrics or _numbers_in(raw):
                value = raw.get(metric)
                if isinstance(value, int | float | bool) and not (isinstance(value, float) and math.isnan(value)):
                    score = f"{metric},{name}" if self._several else metric
                    scores[score] = LogScore(value=value, extracted=extracted)
        metadata = dict(first.doc) if isinstance(first.doc, dict) else {"doc": first.doc}
        if len(first.resps) == 1 and isinstance(first.resps[0], list) and len(first.resps[0]) > 1:
            metadata["resps"] = first.resps[0]
        case = EvalCase(
            id=case_id,
            prompt=asked if isinstance(asked, str) else None,
            messages=asked if isinstance(asked, list) else None,
            expected=_expected(first.target, choices),
            metadata=metadata,
        )
        response = InvocationResponse(response_text=text, input_prompt=case.prompt)
        # The harness writes all samples when it has ended.
        return LogSample(case=case, response=response, scores=scores, run_time=self._seconds)

    def _lines(self) -> Iterator[tuple[int, int, bytes]]:
        offset = 0
        with self._path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    yield number, offset, line
                offset += len(line)

    def _decoded(self, line: bytes, number: int) -> _Line:
        try:
            return _decode_line(line)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise ConfigurationError(f"{self._path}:{number}: is no sample of lm-eval: {error}") from error

    def _results(self, time: str | None) -> _Results:
        """The results that were written with these samples, where they are beside them."""
        place = self._path.with_name(f"results_{time}.json")
        if time is None or not place.is_file():
            return _Results()
        try:
            return _decode_results(place.read_bytes())
        except (OSError, msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise ConfigurationError(f"{place} is not as lm-eval writes it: {error}") from error

    def _names_of(self, metric: str) -> list[str]:
        filters = {name for one in self._places.values() for name in one}
        return [f"{metric},{name}" for name in sorted(filters)] if self._several else [metric]

    def _figures(self, results: dict[str, Any]) -> dict[str, float]:
        """The figures of the scores, by our names for them; of a single filter that is the metric's alone."""
        found = {}
        for key, value in results.items():
            metric, comma, _ = key.partition(",")
            if comma and isinstance(value, int | float) and not metric.endswith("_stderr"):
                found[key if self._several else metric] = float(value)
        return found


def _seconds(given: float | str | None) -> float:
    try:
        return float(given or 0.0)
    except ValueError:
        return 0.0


def _model(found: _Results) -> str | None:
    """The model's name, where the harness was given one."""
    given = found.config.get("model_args")
    if isinstance(given, dict):
        named = given.get("model") or given.get("pretrained")
    else:
        named = next(
            (
                part.partition("=")[2]
                for part in str(given or "").split(",")
                if part.startswith(("model=", "pretrained="))
            ),
            None,
        )
    return str(named) if named else found.config.get("model") or found.model_name


def _asked(arguments: Any) -> tuple[str | list[dict[str, Any]] | None, list[str]]:
    """What the model was given, and the continuations that it had to choose from."""
    calls = list(arguments.values()) if isinstance(arguments, dict) else list(arguments or [])
    pairs = [
        (call.get("arg_0"), call.get("arg_1")) if isinstance(call, dict) else (*call, None, None)[:2] for call in calls
    ]
    if not pairs:
        return None, []
    asked = pairs[0][0]
    if isinstance(asked, list | tuple) and len(asked) == 1:  # of a chat: the messages as one JSON text
        asked = asked[0]
    if isinstance(asked, str) and asked.startswith("["):
        try:
            messages = msgspec.json.decode(asked, type=list[dict[str, Any]])
        except (msgspec.DecodeError, msgspec.ValidationError):
            messages = []
        if messages and all("role" in message for message in messages):
            asked = messages
    choices = [str(choice).strip() for _, choice in pairs if isinstance(choice, str)] if len(pairs) > 1 else []
    return asked if isinstance(asked, str | list) else None, choices


def _answer(line: _Line, choices: list[str]) -> str:
    """The text that came, or the choice that is the likeliest."""
    if not choices:
        first = _first(_first(line.resps))
        return first if isinstance(first, str) else msgspec.json.encode(first).decode()
    likelihoods = [_likelihood(one) for one in line.filtered_resps]
    best = max(range(len(likelihoods)), key=likelihoods.__getitem__, default=0)
    return choices[best] if best < len(choices) else ""


def _likelihood(response: Any) -> float:
    try:
        return float(_first(response))
    except (TypeError, ValueError):
        return -math.inf


def _expected(target: Any, choices: list[str]) -> Any:
    """What is right: of choices the text of the one that is numbered."""
    number = int(target) if isinstance(target, int) or (isinstance(target, str) and target.isdecimal()) else None
    return choices[number] if number is not None and number < len(choices) else target


def _first(values: Any) -> Any:
    return values[0] if isinstance(values, list | tuple) and values else values


def _numbers_in(raw: dict[str, Any]) -> list[str]:
    """The scores of a line of an older version, which does not list them."""
    known = {*_Line.__struct_fields__, "doc_hash", "prompt_hash", "target_hash"}
    return [name for name, value in raw.items() if name not in known and isinstance(value, int | float)]
