"""What a run found: its figures in memory, its responses in memory or on disk."""

from __future__ import annotations

import functools
from array import array
from collections.abc import Collection, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import numpy.typing as npt

from steelyard._version import __version__
from steelyard.errors import ConfigurationError, RunVersionError
from steelyard.journal.answers import AnswerLog
from steelyard.journal.files import (
    MANIFEST,
    METRICS,
    OUTPUTS,
    PARTIAL,
    RunState,
    read_json_object,
    read_metrics,
    run_state,
    written_at,
)
from steelyard.journal.manifest import Manifest, read_manifest
from steelyard.journal.reader import Entry, iter_records, left_out_offsets
from steelyard.journal.replay import Replay, SlotState
from steelyard.records import Record, Scores, id_digest, verdict
from steelyard.run.analysis import add_slices, asked_of
from steelyard.run.audit import add_correction
from steelyard.run.metrics import Errors, RunCounts, compose
from steelyard.stats.metrics import JournalLines, Metrics, SliceMetrics, TrialMetrics, marked_pass_rate
from steelyard.stats.prices import Spending, read_prices
from steelyard.stats.slices import parse_keys
from steelyard.stats.trials import TrialStats

if TYPE_CHECKING:
    from steelyard.report.gate import Gated
    from steelyard.workspace.recording import RecordedSession


class Result:
    """The outcome of a run: `metrics` as in metrics.json, and its records."""

    def __init__(
        self, *, metrics: Metrics, path: Path | None, responses: list[Record], cancelled: bool = False
    ) -> None:
        self.typed_metrics = metrics
        """The figures as a `Metrics`, by attribute."""
        self.path = path
        self.responses = [_with_named_scores(record) for record in responses]
        """The records in case order; empty after a low-memory run or `Result.load`: see `load_responses`."""
        self.cancelled = cancelled

    @functools.cached_property
    def metrics(self) -> dict[str, Any]:
        """The figures as in metrics.json."""
        plain: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(self.typed_metrics))
        return plain

    @property
    def stats(self) -> dict[str, Any]:
        """Latency, tokens, throughput and failures, flat."""
        stats: dict[str, Any] = self.metrics["stats"]
        return stats

    @property
    def complete(self) -> bool:
        """Whether every planned case has a record."""
        return self.typed_metrics.complete

    @property
    def pass_rate(self) -> float | None:
        """The share of the scored cases that passed; None when nothing was scored."""
        return self.typed_metrics.pass_rate

    def slices(self, key: str) -> dict[str, SliceMetrics]:
        """The figures of the cases by their value of a metadata key; read from the records unless the run has them."""
        metrics = self.typed_metrics
        if self.path is not None and not any(one.key == key for one in metrics.slices or ()):
            metrics = Result.load(self.path, by=[key]).typed_metrics
        found = {one.value: one for one in metrics.slices or () if one.key == key}
        if not found:
            raise ConfigurationError(f"there are no slices by {key!r}: a run without a directory needs by=({key!r},)")
        return found

    def load_responses(self) -> list[Record]:
        """All records, in case order: from memory if they are there, else from disk."""
        return list(self.iter_responses())

    def iter_responses(self) -> Iterator[Record]:
        """The same, one at a time."""
        if self.responses or self.path is None:
            return iter(self.responses)
        return map(_with_named_scores, iter_records(self.path))

    def iter_failures(self, *, errors: bool = True) -> Iterator[Record]:
        """The records of cases that did not pass: failed or, unless `errors` is False, without an answer."""
        for record in self.iter_responses():
            if record.passed is False or (errors and record.error is not None):
                yield record

    def failures(self, *, errors: bool = True) -> list[Record]:
        """The same as a list."""
        return list(self.iter_failures(errors=errors))

    def calls(self, case_id: str, trial: int = 0) -> list[RecordedSession]:
        """The model calls of an agent with a gateway, attempt by attempt, each with its request whole again."""
        if self.path is None:
            raise ConfigurationError("a run without a directory keeps no calls")
        from steelyard.journal.files import CALLS
        from steelyard.workspace.places import safe_name
        from steelyard.workspace.recording import read_calls

        return read_calls(self.path / CALLS / safe_name(case_id) / f"{trial}.jsonl")

    def to_pandas(self) -> Any:
        """All records as a pandas.DataFrame, a row each: ids and text stay text, `score.NAME` for each score."""
        from steelyard.report.notebook import to_pandas

        return to_pandas(self.iter_responses())

    def to_polars(self) -> Any:
        """All records as a polars.DataFrame; lists and objects are JSON text."""
        from steelyard.report.notebook import to_polars

        return to_polars(self.iter_responses())

    def to_arrow(self) -> Any:
        """All records as a pyarrow.Table; lists and objects are JSON text."""
        from steelyard.report.notebook import to_arrow

        return to_arrow(self.iter_responses())

    def summary(self) -> str:
        """What the command line prints at the end of a run."""
        from steelyard.report.summary import summary

        return summary(self.typed_metrics, None if self.path is None else str(self.path))

    def report(self, form: str = "html", output: str | Path | None = None, *, by: Sequence[str] = ()) -> Path:
        """Write a report and return where it is: html, md, text, json, csv, junit, or a plugin's format.

        It goes to `output`, by default to a file `report.…` in the run directory. `by` names metadata keys whose slices
        it is to show besides those of the run.
        """
        from steelyard.report.formats import SUFFIXES, report_pieces, write_pieces

        if self.path is None:
            raise ConfigurationError("a report is made of a run directory: give the run an output_path")
        place = self.path / f"report.{SUFFIXES.get(form, form)}" if output is None else Path(output)
        write_pieces(place, report_pieces([self.path], form, by=parse_keys(by, "by")))
        return place

    def gate(self, *rules: str, baseline: str | Path | Result | None = None, allow: Collection[str] = ()) -> Gated:
        """Check rules such as `pass_rate>=0.8`, and that it is not worse than a baseline: true when all are kept.

        `print` shows each rule and what was found. `allow` names conditions that may pass, such as "truncated".
        """
        from steelyard.report.gate import hold_to, parse_rule, parse_waivers

        if not rules and baseline is None:
            raise ConfigurationError('nothing to check: give a rule such as "pass_rate>=0.8", or a baseline')
        other = baseline.path if isinstance(baseline, Result) else None if baseline is None else Path(baseline)
        if baseline is not None and (other is None or self.path is None):
            raise ConfigurationError("a run is compared with a baseline by their directories: give both an output_path")
        parsed, allowed = [parse_rule(rule) for rule in rules], parse_waivers(allow)
        return hold_to(self.path or self.typed_metrics, parsed, baseline=other, allowed=allowed)

    def _repr_html_(self) -> str:
        """What a notebook shows."""
        from steelyard.report.notebook import result_html

        return result_html(self)

    @classmethod
    def load(cls, path: str | Path, *, by: Sequence[str] = ()) -> Result:
        """The result in a run directory. A complete run's figures are read, an unfinished one's are replayed.

        `by` names metadata keys whose slices are wanted besides those that the run has: records are read for them.
        """
        run = Path(path)
        metrics = load_metrics(run)
        if metrics is None:
            if run_state(run) is RunState.FRESH:
                reason = "it has neither run.json nor outputs.jsonl" if run.exists() else "there is no such folder"
                raise ConfigurationError(f"{run} is not a run directory: {reason}", topic="not-a-run")
            metrics = add_correction(_unfinished_metrics(run), run)
        if by:
            add_slices(metrics, run, read_manifest(run), parse_keys(by, "by"))
        return cls(metrics=metrics, path=run, responses=[])

    def __repr__(self) -> str:
        metrics = self.typed_metrics
        state = "complete" if self.complete else "incomplete"
        rate = "" if metrics.pass_rate is None else f" pass_rate={marked_pass_rate(metrics)}"
        counted = f"n={metrics.n} ok={metrics.counts.ok} error={metrics.counts.error}"
        return f"<Result {state}{rate} {counted} path={self.path}>"


def _with_named_scores(record: Record) -> Record:
    """The same record, its scores by name too: `record.scores["exact"]`."""
    record.scores = Scores(record.scores)
    return record


def load_metrics(run: Path) -> Metrics | None:
    """The figures of a complete run; None when it is not complete. RunVersionError when they cannot be read by type.

    Whether a run is complete is for `read_metrics` to say, which looks at less: a run that another version wrote
    stays complete, or it would be asked and paid for again.
    """
    found = read_metrics(run)
    if found is None:
        return None
    try:
        return add_correction(msgspec.convert(found, Metrics), run)
    except msgspec.ValidationError as error:
        raise RunVersionError(
            f"{run / METRICS} was written by {_writer_of(run)} and cannot be read by this one, {__version__}: {error}. "
            f"The run is complete; read it with the version that wrote it",
            path=run,
        ) from error


def _writer_of(run: Path) -> str:
    """Which version of Steelyard wrote to a run last, as far as its manifest tells."""
    manifest = read_json_object(run / MANIFEST) or {}
    launches = manifest.get("launches")
    last = launches[-1] if isinstance(launches, list) and launches else None
    version = last.get("steelyard") if isinstance(last, dict) else None
    return f"Steelyard {version}" if isinstance(version, str) else "another version of Steelyard"


def read_partial(run: Path) -> Metrics | None:
    """The figures that an interrupted run wrote; None if it was resumed since, or its journal has grown."""
    partial = written_at(run / PARTIAL)
    if partial is None or any((written_at(run / name) or 0) > partial for name in (OUTPUTS, MANIFEST)):
        return None
    try:
        return msgspec.convert(read_json_object(run / PARTIAL), Metrics)
    except msgspec.ValidationError:  # none, torn, or written by another version: the journal has it all
        return None


def _unfinished_metrics(run: Path) -> Metrics:
    """The figures of an unfinished run: what it wrote when it was interrupted, where that is of the same records.

    Only the run itself knew why it stopped, what was cancelled and how long it took.
    """
    replayed, partial = _replayed_metrics(run), read_partial(run)
    if partial is None or partial.complete or not _same_records(replayed, partial):
        return replayed
    partial.slices = partial.slices or replayed.slices
    return partial


def _same_records(one: Metrics, other: Metrics) -> bool:
    return (one.lines, one.counts.ok, one.counts.error) == (other.lines, other.counts.ok, other.counts.error)


REPLAYED = "not finished"
"""What a run that was never closed says of why it stopped: no more than that it is not complete."""


def _replayed_metrics(run: Path) -> Metrics:
    """The figures of an unfinished run, from its journal alone."""
    manifest = read_manifest(run)
    slots = _AsRecorded(_trials_of(manifest))
    replay = Replay(run, slots, slots.states, on_done=slots.count, left_out=left_out_offsets(run))
    if (run / OUTPUTS).exists():
        replay.read()
    errored = replay.states.count(SlotState.ERRORED)
    replay.stats.update_failed(errored)
    replay.stats.update_timeouts(replay.timeouts())
    for _ in range(errored):
        replay.scores.update([], failed=True)
    replay.stats.active_seconds = replay.run_time
    done = replay.states.count(SlotState.DONE)
    planned = max(manifest.planned if manifest is not None else 0, done + errored)
    counts = RunCounts(planned=planned, ok=done, error=errored, cancelled=0, not_started=planned - done - errored)
    errors = Errors()
    errors.counts.update(replay.errors)
    metrics = compose(
        about=about_run(manifest, run),
        counts=counts,
        stats=replay.stats,
        scores=replay.scores,
        errors=errors,
        left_out=replay.left_out,
        lines=JournalLines(total=replay.lines, left_out=replay.left_out_lines),
        stopped=REPLAYED,
        spending=_spending(run, replay, manifest),
        load=manifest is not None and manifest.load is not None,
        trials=slots.trial_metrics(),
        repeated=slots.stats.trials > 1,
        slices=asked.of(partial(iter_records, run)).slices if (asked := asked_of(manifest)) else None,
    )
    # Every record may be there and the metrics not: until they are written the run is not complete.
    metrics.complete = False
    return metrics


def _trials_of(manifest: Manifest | None) -> int:
    """How often each case was to be asked; 1 for a load run, whose rounds have no end."""
    trials = 1 if manifest is None or manifest.load is not None else manifest.options.get("trials")
    return trials if isinstance(trials, int) and trials > 0 else 1


def _spending(run: Path, replay: Replay, manifest: Manifest | None) -> Spending:
    """What an unfinished run has spent, its judges included."""
    spending = replay.spending
    answers = AnswerLog(run)
    answers.read(lambda _id, _trial: None, lambda _slot, _case_fp: False)
    spending.merge(answers.spending)
    if manifest is not None:
        spending.currency = read_prices(manifest.options.get("prices"), manifest.model_id).currency
    return spending


def about_run(manifest: Manifest | None, run: Path | None) -> dict[str, Any]:
    """What a run's metrics say of where they come from."""
    if manifest is None:
        return {"suite": run.name if run is not None else "", "target": {}, "model_id": None, "seed": 0}
    return {
        "suite": manifest.suite,
        "target": manifest.target,
        "model_id": manifest.model_id,
        "seed": manifest.seed,
        "calibrations": manifest.calibrations,
        **({"scored_from": manifest.scored_from} if manifest.scored_from is not None else {}),
    }


class _AsRecorded:
    """Slots numbered as they are met, for a reader that has the journal but not the suite.

    Where cases were to be asked several times, or have groups, it counts by case.
    """

    def __init__(self, trials: int) -> None:
        self.states = bytearray()
        self.stats = TrialStats(0, trials)
        self._groups = array("Q")
        self._numbers: dict[tuple[int, int], int] = {}
        self._cases: dict[int, int] = {}
        self._fingerprints: dict[int, str] = {}

    def slot_of(
        self,
        id_digests: npt.NDArray[np.uint64],
        trials: npt.NDArray[np.int64],
        recorded: npt.NDArray[np.int64],  # noqa: ARG002 - numbered as they are met, wherever they stood
    ) -> npt.NDArray[np.int64]:
        pairs = zip(id_digests.tolist(), trials.tolist(), strict=True)
        numbers = [self._numbers.setdefault(pair, len(self._numbers)) for pair in pairs]
        self.states.extend(bytes(len(self._numbers) - len(self.states)))
        return np.array(numbers, dtype=np.int64)

    def count(self, slot: int, entry: Entry) -> None:  # noqa: ARG002 - a case is found by its id
        """Count an answer by its case and group."""
        self._put(id_digest(entry.id), entry.trial, verdict(entry.scores), entry)

    def _put(self, digest: int, trial: int, passed: bool | None, entry: Entry | None) -> None:
        if trial >= self.stats.trials:
            return
        position = self._cases.setdefault(digest, len(self._cases))
        if position >= self.stats.cases:
            self.stats.extend(max(2 * self.stats.cases, 64))
        group = None if entry is None else entry.group
        if group or self._groups:
            self._groups.frombytes(bytes(8 * (len(self._cases) - len(self._groups))))
            self._groups[position] = id_digest(group) if group else self._groups[position]
        self.stats.update(position, trial, passed, [] if entry is None else entry.scores)

    def trial_metrics(self) -> TrialMetrics | None:
        """The figures by case; None where each case counts for itself, once."""
        for (digest, trial), slot in self._numbers.items():
            if self.states[slot] == SlotState.ERRORED:
                self._put(digest, trial, None, None)
        if self._groups:
            groups = np.zeros(self.stats.cases, dtype=np.uint64)
            groups[: len(self._groups)] = self._groups
            self.stats.set_groups(groups)
        return self.stats.to_metrics() if self._groups or self.stats.trials > 1 else None

    def same_case(self, slot: int, case_fp: str) -> bool:
        """Whether this is the case as it was asked last: a journal is read from its end."""
        return self._fingerprints.setdefault(slot, case_fp) == case_fp

    def all_current(self, slots: npt.NDArray[np.int64], case_fps: list[str], scored_bys: list[str]) -> bool:  # noqa: ARG002
        """Never sure: what is current is learned entry by entry."""
        return False

    def needs_scoring(self, slot: int, scored_by: str, has_errors: bool) -> bool:  # noqa: ARG002 - nothing is re-scored
        return False
