"""Logs of other tools as run directories: their answers, times and scores, as if the run had been ours.

A reader of a log (`integrations/`) gives its samples one at a time, as often as it is asked. They are read twice: once
to see which cases and kinds of scores there are, once to write the records.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any, Literal, Protocol

import msgspec

from steelyard.errors import ConfigurationError, RunRefused, suggestion
from steelyard.journal.files import (
    CASES,
    MANIFEST,
    METRICS,
    OUTPUTS,
    RunState,
    create,
    disk_errors,
    run_state,
    write_json,
)
from steelyard.journal.lock import RunLock
from steelyard.journal.manifest import Launch, Manifest, now, versions, write_manifest
from steelyard.journal.writer import AppendOnlyFile, encode_record
from steelyard.records import (
    RECORD_VERSION,
    EvalCase,
    FailedAttempt,
    InvocationResponse,
    Record,
    Score,
    bounded,
)
from steelyard.run.result import Result
from steelyard.suite.evalset import EvalSet
from steelyard.suite.identity import as_hex, case_fingerprint

NOT_IN_LOG = "NotInLog"
"""The `error_type` of a trial that other cases have in the log, and this one has not."""
MAX_DIFFERENCE = 1e-6
"""How far a figure may be from the one in the log before it is another one."""
_GRADES = {"C": 1.0, "P": 0.5, "I": 0.0, "N": 0.0}
"""What inspect writes for correct, partly correct, incorrect, and no answer."""
_NO_FIELDS = {"id"}

Value = float | bool | str | None


class LogScore(msgspec.Struct, frozen=True, kw_only=True):
    """A score as a log has it."""

    value: Value
    reason: str | None = None
    by: str | None = None
    """Of a judge: who judged."""
    extracted: str | None = None


class LogSample(msgspec.Struct, frozen=True, kw_only=True):
    """One answer of a log, with its case and its scores."""

    case: EvalCase
    trial: int = 0
    response: InvocationResponse
    scores: dict[str, LogScore] = {}
    attempts: int = 1
    failures: list[FailedAttempt] = []
    elapsed: float = 0.0
    run_time: float = 0.0
    """Seconds from the start of the evaluation to the end of this answer."""


class LogAbout(msgspec.Struct, frozen=True, kw_only=True):
    """What a log is of."""

    tool: str
    tool_version: str | None = None
    task: str
    model: str | None = None
    digest: str
    """Of the file."""
    created: str | None = None
    decides: str | None = None
    """The score that the tool shows first, where it says so."""
    figures: dict[str, float] = {}
    """The mean of each score over cases, as the tool computed it."""
    better: dict[str, Literal["higher", "lower"]] = {}
    unfinished: bool = False


class Log(Protocol):
    """What reads a file of another tool."""

    @property
    def about(self) -> LogAbout: ...

    def samples(self) -> Iterator[LogSample]: ...


class Check(msgspec.Struct, frozen=True, kw_only=True):
    """A figure as the log has it, and as the imported records give it."""

    score: str
    theirs: float
    ours: float | None

    @property
    def same(self) -> bool:
        return self.ours is not None and math.isclose(self.theirs, self.ours, rel_tol=0, abs_tol=MAX_DIFFERENCE)


class Imported(msgspec.Struct, frozen=True, kw_only=True):
    """What an import made."""

    about: LogAbout
    records: int
    missing: int
    """Trials that the log does not have; they are errors."""
    decides: str | None
    checks: list[Check]


class _Kind:
    """What the values of one score are, once all of them have been seen."""

    def __init__(self) -> None:
        self.is_label = False
        """Whether any value is a word: then all of them are."""
        self._plain = True
        self.least, self.most = math.inf, -math.inf

    def add(self, value: Value) -> None:
        """Take one more value into account."""
        if isinstance(value, str) and value not in _GRADES:
            self.is_label = True
        elif value is not None:
            number = _number(value)
            self._plain = self._plain and (isinstance(value, str) or number in (0.0, 1.0))
            self.least, self.most = min(self.least, number), max(self.most, number)

    @property
    def is_share(self) -> bool:
        """Whether all values lie within 0..1."""
        return not self.is_label and self.least >= 0 and self.most <= 1

    @property
    def can_decide(self) -> bool:
        """Whether each value says pass or fail by itself."""
        return self.is_share and self._plain


def _number(value: float | bool | str) -> float:
    return _GRADES[value] if isinstance(value, str) else float(value)


class _Seen:
    """What the first reading of a log found."""

    def __init__(self) -> None:
        self.indices: dict[str, int] = {}
        self.trials = 0
        self.places: set[tuple[str, int]] = set()
        self.kinds: dict[str, _Kind] = {}

    def cases(self, log: Log) -> Iterator[EvalCase]:
        """The cases of a log, each once, while all else is noted."""
        for sample in log.samples():
            place = (sample.case.id, sample.trial)
            if not sample.case.id:
                raise ConfigurationError("the log has a sample without an id")
            if place in self.places:
                raise ConfigurationError(f"the log has two samples of {sample.case.id!r}, trial {sample.trial + 1}")
            self.places.add(place)
            self.trials = max(self.trials, sample.trial + 1)
            for name, score in sample.scores.items():
                self.kinds.setdefault(name, _Kind()).add(score.value)
            if sample.case.id not in self.indices:
                self.indices[sample.case.id] = len(self.indices)
                yield sample.case


def import_log(log: Log, run: Path, *, decides: str | None = None, pass_from: float | None = None) -> Imported:
    """Write a log as a complete run directory.

    The score named `decides` says which answers pass: from `pass_from` on, by default only those with full marks.
    Without a name it is the one that the tool shows first, else the first that says pass or fail by itself.
    """
    # An import that was killed leaves cases and some records, without a manifest: it may be repeated.
    was_killed = (run / CASES).exists() and not (run / MANIFEST).exists()
    if run_state(run) is RunState.COMPLETE or (run_state(run) is RunState.INCOMPLETE and not was_killed):
        raise RunRefused(f"{run} holds a run already: ", "use {out}", path=run)
    is_new = not run.exists()
    create(run)
    try:
        return _import(log, run, decides, pass_from)
    except BaseException:
        if is_new:
            shutil.rmtree(run, ignore_errors=True)
        raise


def _import(log: Log, run: Path, decides: str | None, pass_from: float | None) -> Imported:
    with RunLock(run), disk_errors(run):
        seen = _Seen()
        suite = EvalSet(log.about.task, seen.cases(log))
        suite.spool(run / CASES)
        if not seen.places:
            raise ConfigurationError("the log has no samples")
        writer = _Writer(log.about, seen, _deciding(log.about, seen.kinds, decides, pass_from), pass_from)
        writer.write(log, run)
        write_manifest(run, writer.manifest())
        metrics = Result.load(run).typed_metrics
        metrics.complete, metrics.stopped = True, None
        write_json(run / METRICS, metrics)
    return writer.imported()


def _deciding(about: LogAbout, kinds: dict[str, _Kind], asked: str | None, pass_from: float | None) -> str | None:
    """The score that decides which answers pass."""
    if asked is not None:
        if asked not in kinds:
            raise ConfigurationError(f"the log has no score {asked!r}; {suggestion(asked, list(kinds))}")
        if kinds[asked].is_label:
            raise ConfigurationError(f"the score {asked!r} is a word: it cannot decide which answers pass")
        if not kinds[asked].can_decide and pass_from is None:
            least, most = kinds[asked].least, kinds[asked].most
            raise ConfigurationError(
                f"the score {asked!r} goes from {least:g} to {most:g}: say with --pass-from where a pass begins"
            )
        return asked
    usable = [name for name, kind in kinds.items() if kind.can_decide or (pass_from is not None and not kind.is_label)]
    return about.decides if about.decides in usable else usable[0] if usable else None


class _Writer:
    """Writes the records of a log."""

    def __init__(self, about: LogAbout, seen: _Seen, decides: str | None, pass_from: float | None) -> None:
        self._about, self._seen, self._decides = about, seen, decides
        self._pass_from = 1.0 if pass_from is None else pass_from
        self._sums: dict[str, dict[str, list[float]]] = {}
        self._fingerprints: dict[str, str] = {}

    def write(self, log: Log, run: Path) -> None:
        """Write a record for each sample, and one for each trial that is missing."""
        (run / OUTPUTS).unlink(missing_ok=True)
        file = AppendOnlyFile(run / OUTPUTS)
        last = 0.0
        try:
            for sample in log.samples():
                last = max(last, sample.run_time)
                file.append(encode_record(self._record(sample)))
            for case_id, trial in self._missing():
                message = f"the log has no sample of trial {trial + 1}"
                lost = LogSample(
                    case=EvalCase(id=case_id),
                    trial=trial,
                    response=InvocationResponse(error=message, error_type=NOT_IN_LOG),
                    run_time=last,
                )
                file.append(encode_record(self._record(lost)))
        finally:
            file.close()

    def _missing(self) -> Iterator[tuple[str, int]]:
        for case_id in self._seen.indices:
            for trial in range(self._seen.trials):
                if (case_id, trial) not in self._seen.places:
                    yield case_id, trial

    def _record(self, sample: LogSample) -> Record:
        case, response = sample.case, sample.response
        if case.id not in self._fingerprints:
            self._fingerprints[case.id] = as_hex(case_fingerprint(case))
        fields = {name: getattr(response, name) for name in response.__struct_fields__ if name not in _NO_FIELDS}
        given = {} if response.error is not None else sample.scores
        # What has no value says nothing, unless it was to decide: then the answer is unscored.
        scores = [
            self._score(name, one) for name, one in given.items() if one.value is not None or name == self._decides
        ]
        for score in scores:
            if score.value is not None:
                self._sums.setdefault(score.name, {}).setdefault(case.id, []).append(score.value)
        return Record(
            RECORD_VERSION,
            case.id,
            sample.trial,
            self._seen.indices[case.id],
            "ok" if response.error is None else "error",
            sample.attempts,
            sample.elapsed,
            self._fingerprints[case.id],
            "",
            sample.run_time,
            scores=scores,
            retry_errors=sample.failures,
            expected=bounded(case.expected),
            metadata=bounded(case.metadata),
            **fields,
        )

    def _score(self, name: str, given: LogScore) -> Score:
        kind, value = self._seen.kinds[name], given.value
        score = Score(name, reason=given.reason, by=given.by, extracted=given.extracted)
        if value is None:
            score.errors = [given.reason or "the log has no value"]
        elif kind.is_label:
            score.label = str(value)
        else:
            score.value = _number(value)
            if not kind.is_share:
                score.unit, score.better = "", self._about.better.get(name)
            if name == self._decides:
                score.passed = score.value >= self._pass_from
        return score

    def manifest(self) -> Manifest:
        """What the run is of."""
        about = self._about
        target: dict[str, Any] = {
            "kind": "imported", "tool": about.tool, "tool_version": about.tool_version, "model": about.model,
            "sha256": about.digest,
        }  # fmt: skip
        return Manifest(
            suite=about.task,
            target=target,
            model_id=about.model,
            planned=len(self._seen.indices) * self._seen.trials,
            scorers=[{"kind": "imported", "name": name} for name in self._seen.kinds],
            options={"trials": self._seen.trials},
            versions=versions(),
            created=about.created or now(),
            launches=[Launch(started=about.created or now(), done_before=0)],
        )

    def imported(self) -> Imported:
        """What was made, with the log's own figures beside those of the records."""
        return Imported(
            about=self._about,
            records=len(self._seen.places),
            missing=len(list(self._missing())),
            decides=self._decides,
            checks=[
                Check(score=name, theirs=theirs, ours=self._mean(name)) for name, theirs in self._about.figures.items()
            ],
        )

    def _mean(self, name: str) -> float | None:
        """The mean over cases of each one's mean over trials."""
        cases = [math.fsum(values) / len(values) for values in self._sums.get(name, {}).values()]
        return math.fsum(cases) / len(cases) if cases else None


def seconds_between(start: datetime | None, end: datetime | None) -> float:
    """How long after the first the second was; 0 where that is not known."""
    return 0.0 if start is None or end is None else max((end - start).total_seconds(), 0.0)
