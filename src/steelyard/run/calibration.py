"""The judges of a run compared with labels by people, and its pass rate corrected by them."""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import msgspec
import numpy as np

from steelyard.errors import ConfigurationError, SuiteError, suggestion
from steelyard.journal.manifest import now
from steelyard.records import Record, Score
from steelyard.run.audit import STRATA, correct, correct_by_other, judge_strata, labelled_strata, stratum_of
from steelyard.run.labels import Label, Labels, is_undecided, label_kind, quoted
from steelyard.run.result import Result
from steelyard.scoring.judge.calibration import PASS_FROM, Agreement, Judged, LabelKind, agreement
from steelyard.stats.agreement import MIN_RATE, HumanCeiling, human_ceiling
from steelyard.stats.correction import Correction, ErrorRates, Stratum, weighted_error_rates
from steelyard.stats.metrics import Metrics


class Calibrated(msgspec.Struct, frozen=True, kw_only=True):
    """What labels say of a run: of each of its judges, and of its pass rate."""

    judges: list[Agreement]
    correction: Correction | None
    """None where the labels are grades, or were not drawn from the run's strata."""
    undecided: int
    """Answers on which people are evenly split."""


def calibrated(
    run: Path,
    labels: Labels,
    path: Path,
    *,
    labels_of: Path | None = None,
    judge: str | None = None,
    min_agreement: float = MIN_RATE,
    judges_needed: bool = True,
) -> Calibrated:
    """Compare the judges of a run, or the one named, with labels from `path`; nothing is written.

    `labels_of` is the run that the labels are of, where it is another one. A run without judges is refused if the
    labels do not correct its rate either, unless none is needed.
    """
    kind = label_kind(labels)
    labelled = labels_of or run
    drawn = kind == "pass/fail" and all(label.stratum is not None for label in labels.values())
    strata = _audited(labelled, labels, path) if drawn else None
    correction = _corrected(run, labels_of, labels, path, strata) if kind == "pass/fail" else None
    needed = judges_needed and (correction is None or judge is not None)
    pairs = _judged(labelled, labels, path, judge, kind, needed=needed)
    ceiling = _ceiling(labels, kind)
    undecided = sum(is_undecided(label, kind) for label in labels.values())
    found = [
        agreement(
            key.name,
            key.by,
            judged,
            labels=kind,
            min_agreement=min_agreement,
            unscored=len(labels) - undecided - len(judged),
            ceiling=ceiling,
            weighted=None if strata is None else _weighted(labelled, strata, key),
        )
        for key, judged in sorted(pairs.items())
    ]
    return Calibrated(judges=found, correction=correction, undecided=undecided)


class JudgeKey(msgspec.Struct, frozen=True, order=True):
    """One judge of a run: the score's name, and who gave it."""

    name: str
    by: str


def _corrected(
    run: Path, labels_of: Path | None, labels: Labels, path: Path, strata: list[Stratum] | None
) -> Correction | None:
    """What the labels make of the run's pass rate; None where they are its own and not drawn from its verdicts."""
    metrics = Result.load(run).typed_metrics
    if labels_of is not None:
        _refuse_other_judges(metrics, Result.load(labels_of).typed_metrics, run, labels_of)
        of_other = _plain_strata(labels_of, labels) if strata is None else strata
        found = correct_by_other(metrics, of_other, drawn=strata is not None, labels_of=str(labels_of))
    elif strata is not None and metrics.scored:
        found = correct(metrics, strata)
    else:
        return None
    return msgspec.structs.replace(found, labels_digest=file_digest(path), created=now())


def _refuse_other_judges(metrics: Metrics, other: Metrics, run: Path, labels_of: Path) -> None:
    """Refuse labels of a run that was scored in another way: its error rates say nothing of this one's."""
    ways = [
        {name: sorted(score.by or []) for name, score in one.scores.items() if not score.advisory}
        for one in (metrics, other)
    ]
    for name in sorted(ways[0].keys() | ways[1].keys()):
        if ways[0].get(name) != ways[1].get(name):
            shown = [" ".join(way[name]) or "a scorer" if name in way else "nothing" for way in ways]
            raise ConfigurationError(
                f"{quoted(name)} is scored by {shown[0]} in {run} and by {shown[1]} in {labels_of}: "
                f"error rates measured there are not those of this run; label answers of {run} instead"
            )


def _plain_strata(run: Path, labels: Labels) -> list[Stratum]:
    """How many of the labelled answers passed and failed there, and what people said of them."""
    met: list[tuple[str, bool]] = []
    for record in Result.load(run).iter_responses():
        label, stratum = labels.get((record.id, record.trial)), stratum_of(record)
        if label is not None and stratum is not None and label.value != PASS_FROM:
            met.append(("passed" if STRATA[stratum] else "failed", label.value > PASS_FROM))
    return labelled_strata(Counter(stratum for stratum, _ in met), met)


def _audited(run: Path, labels: Labels, path: Path) -> list[Stratum]:
    """The strata of the run with the labels that were drawn from them."""
    sizes = Counter(stratum_of(record) for record in Result.load(run).iter_responses())
    for label in labels.values():
        if label.stratum_size is not None and label.stratum_size != sizes[label.stratum]:
            message = f"stratum {label.stratum!r} had {label.stratum_size:,} answers when it was drawn from, and has "
            raise SuiteError(f"{message}{sizes[label.stratum]:,} now: draw again", path=path, line=label.line)
    known = {name: size for name, size in sizes.items() if name is not None}
    labelled = [(label.stratum or "", label.value > PASS_FROM) for label in labels.values() if label.value != PASS_FROM]
    return labelled_strata(known, labelled)


def _weighted(run: Path, strata: list[Stratum], key: JudgeKey) -> ErrorRates | None:
    """A judge's error rates over the strata that it decided, or advised in."""
    score = Result.load(run).typed_metrics.scores[key.name]
    return weighted_error_rates(judge_strata(strata, advisory=bool(score.advisory), escalated=bool(score.escalated)))


def _ceiling(labels: Labels, kind: LabelKind) -> HumanCeiling | None:
    """How well people agree with each other; None where nobody labelled what somebody else did."""
    columns = sorted({name for label in labels.values() for name in label.votes})
    if len(columns) < 2:
        return None
    table = np.array([[label.votes.get(name, math.nan) for name in columns] for label in labels.values()])
    return human_ceiling(table, pass_from=PASS_FROM, graded=kind == "graded")


def _judged(
    run: Path, labels: Labels, path: Path, judge: str | None, kind: LabelKind, *, needed: bool
) -> dict[JudgeKey, list[Judged]]:
    """For each judge of the run the labelled answers that it scored; the run is read a record at a time.

    A run without judges is refused where one is `needed`.
    """
    result = Result.load(run)
    pairs: dict[JudgeKey, list[Judged]] = {}
    unmet = dict(labels)
    for record in result.iter_responses():
        label = _label_of(record, labels, path)
        unmet.pop((record.id, record.trial), None)
        for key, score in _judges(record.scores):
            judged = pairs.setdefault(key, [])
            if label is None or is_undecided(label, kind):
                continue
            if (pair := _pair(record.id, label, score)) is not None:
                judged.append(pair)
    if unmet:
        _refuse_unknown(unmet, path, run, complete=result.complete)
    return _selected(pairs, judge, run) if pairs or needed else {}


def _label_of(record: Record, labels: Labels, path: Path) -> Label | None:
    if record.trial:
        of_first = labels.get((record.id, 0))
        if of_first is not None and not of_first.names_trial:
            message = f"case {quoted(record.id)} was asked several times: say in `trial` which answer this is of"
            raise SuiteError(message, path=path, line=of_first.line)
    return labels.get((record.id, record.trial))


def _judges(scores: Iterable[Score]) -> Iterable[tuple[JudgeKey, Score]]:
    """The scores that a model gave, one for each judge; what a deterministic scorer says needs no calibration."""
    return {JudgeKey(score.name, score.by): score for score in scores if score.by is not None}.items()


def _pair(case_id: str, label: Label, score: Score) -> Judged | None:
    value = score.value if score.mean is None else score.mean
    if value is None:
        return None
    return Judged(label.value, value, value >= PASS_FROM if score.passed is None else score.passed, case_id)


def _refuse_unknown(unmet: Labels, path: Path, run: Path, *, complete: bool) -> None:
    (case_id, trial), label = next(iter(unmet.items()))
    which = f"case {quoted(case_id)}" + (f", trial {trial}," if label.names_trial else "")
    others = f" (nor are {len(unmet) - 1:,} others)" if len(unmet) > 1 else ""
    hint = "" if complete else "; the run is not complete"
    raise SuiteError(f"{which} is not in the run {run}{others}{hint}", path=path, line=label.line)


def _selected(pairs: dict[JudgeKey, list[Judged]], judge: str | None, run: Path) -> dict[JudgeKey, list[Judged]]:
    if not pairs:
        raise ConfigurationError(f"{run} has no scores of a judge; deterministic scorers are not calibrated")
    if judge is None:
        return pairs
    chosen = {key: judged for key, judged in pairs.items() if key.name == judge}
    if not chosen:
        names = sorted({key.name for key in pairs})
        raise ConfigurationError(f"{run} has no judge named {judge!r}; {suggestion(judge, names)}")
    return chosen


def file_digest(path: Path) -> str:
    """SHA-256 of a file of labels."""
    return hashlib.sha256(path.read_bytes()).hexdigest()
