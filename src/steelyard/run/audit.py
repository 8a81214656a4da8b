"""Audits: answers drawn at random from each stratum of a run, for people to label, and the rate that follows."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec
from msgspec import UNSET

from steelyard.errors import ConfigurationError
from steelyard.journal.files import CORRECTION, read_json_object
from steelyard.protocols import derived_rng
from steelyard.records import Record, Score, verdict
from steelyard.stats.correction import (
    MIN_AUDIT,
    Correction,
    Stratum,
    corrected_rate,
    rogan_gladen,
    weighted_error_rates,
)
from steelyard.stats.metrics import Metrics

_DECIDED = {"passed": True, "failed": False, "judge overruled": True, "judge confirmed": False}
_ADVICE = {"advised pass": True, "advised fail": False}
STRATA = _DECIDED | _ADVICE | {f"{name}, {advice}": _DECIDED[name] for name in _DECIDED for advice in _ADVICE}
"""The ways an answer goes through the scorers, and whether it passes: without a `when: failed` judge the first two.

Where a judge only advises, what it says divides them further; where nothing else decides, it is all there is.
"""


class Drawn(msgspec.Struct, frozen=True):
    """An answer that was drawn for a label."""

    id: str
    trial: int
    stratum: str | None
    """None in a draw from answers that nothing has scored."""
    answer: str


def stratum_of(record: Record) -> str | None:
    """The stratum of a record; None for one without a verdict and without advice."""
    if record.status != "ok":
        return None
    passed, advice = verdict(record.scores), _advice(record.scores)
    if passed is None:
        is_open = not any(score.passed is not None or score.errors for score in record.scores if not score.advisory)
        return advice if is_open else None
    if any(score.escalated and score.value is not None and not score.advisory for score in record.scores):
        stratum = "judge overruled" if passed else "judge confirmed"
    else:
        stratum = "passed" if passed else "failed"
    return stratum if advice is None else f"{stratum}, {advice}"


def _advice(scores: Iterable[Score]) -> str | None:
    """What judges that decide nothing say of an answer together."""
    advice = [score.passed for score in scores if score.advisory and score.passed is not None]
    return None if not advice else "advised pass" if all(advice) else "advised fail"


def judge_strata(strata: Iterable[Stratum], *, advisory: bool, escalated: bool) -> list[Stratum]:
    """The strata as one judge divides them: those that it decided, or was heard in, by what it said."""
    if advisory:
        return [
            msgspec.structs.replace(stratum, passed=stratum.name.endswith("advised pass"))
            for stratum in strata
            if stratum.name.endswith(tuple(_ADVICE))
        ]
    return [stratum for stratum in strata if stratum.name.startswith("judge ")] if escalated else list(strata)


def draw(
    records: Iterable[Record], count: int, seed: int, *, unscored: bool = False
) -> tuple[list[Drawn], dict[str | None, int]]:
    """Draw `count` answers at random from each stratum, and count how large the strata are.

    The draw depends on the seed and on the answers' ids alone, not on their order; a larger one holds a smaller one.
    With `unscored`, answers without a verdict are a stratum too: None. Memory holds what is drawn.
    """
    if count < MIN_AUDIT:
        raise ConfigurationError(f"an audit draws at least {MIN_AUDIT} answers from each stratum, got {count}")
    sizes: Counter[str | None] = Counter()
    kept: dict[str | None, list[tuple[float, str, int, str]]] = {}
    for record in records:
        stratum = stratum_of(record)
        if stratum is None and not (unscored and record.status == "ok"):
            continue
        sizes[stratum] += 1
        # The answers with the smallest of these numbers are a random sample, whatever comes first.
        lot = derived_rng(seed, record.id, record.trial, "audit").random()
        heap = kept.setdefault(stratum, [])
        entry = (-lot, record.id, record.trial, record.response_text or "")
        if len(heap) < count:
            heapq.heappush(heap, entry)
        else:
            heapq.heappushpop(heap, entry)
    drawn = [
        Drawn(case_id, trial, stratum, answer) for stratum, heap in kept.items() for _, case_id, trial, answer in heap
    ]
    # In an independent order, so that the strata cannot be told apart while labelling: of a large stratum all drawn
    # numbers are small.
    drawn.sort(key=lambda one: derived_rng(seed, one.id, one.trial, "order").random())
    return drawn, dict(sizes)


def labelled_strata(sizes: Mapping[str, int], labels: Iterable[tuple[str, bool]]) -> list[Stratum]:
    """The strata of a run with what people said of the answers drawn from them: (stratum, right or not)."""
    seen: Counter[str] = Counter()
    right: Counter[str] = Counter()
    for stratum, is_right in labels:
        seen[stratum] += 1
        right[stratum] += is_right
    return [
        Stratum(name=name, passed=STRATA[name], size=size, labelled=seen[name], right=right[name])
        for name, size in sorted(sizes.items())
    ]


def correct(metrics: Metrics, strata: list[Stratum]) -> Correction:
    """The run's pass rate corrected by labels of an audit of this run's strata.

    Answers on which there is only advice are in no pass rate, and left out.
    """
    strata = [stratum for stratum in strata if stratum.name not in _ADVICE]
    found, errors = corrected_rate(strata), weighted_error_rates(strata)
    empty = ", ".join(stratum.name for stratum in strata if stratum.size and not stratum.labelled)
    why_not = None if found is not None else f"no labels yet: {empty}" if empty else "no answer has a verdict"
    return Correction(
        method="audit",
        raw=None if found is None else found.raw,
        rate=None if found is None else found.rate,
        ci95=None if found is None else found.ci95,
        why_not=why_not,
        labels=sum(stratum.labelled for stratum in strata),
        sensitivity=None if errors is None else errors.sensitivity,
        specificity=None if errors is None else errors.specificity,
        strata=strata,
        **_state(metrics),
    )


def correct_by_other(metrics: Metrics, strata: list[Stratum], *, drawn: bool, labels_of: str) -> Correction:
    """The run's pass rate corrected by the error rates that labels of another run show: Rogan and Gladen's.

    `strata` are the other run's. Labels `drawn` from each stratum are weighted by its size; others count as they are.
    """
    if not drawn:  # taken at random from all answers: each counts for itself
        strata = [msgspec.structs.replace(stratum, size=stratum.labelled) for stratum in strata]
    errors = weighted_error_rates(strata)
    found, why_not = None, None
    if errors is None:
        empty = ", ".join(stratum.name for stratum in strata if stratum.size and not stratum.labelled)
        why_not = f"no labels yet: {empty}" if empty else "no label is of an answer with a verdict"
    elif errors.sensitivity is None or errors.specificity is None:
        why_not = f"no label says {'pass' if errors.sensitivity is None else 'fail'}"
    else:
        right, wrong = (errors.right_n, errors.wrong_n) if drawn else _labelled_kinds(strata)
        found = rogan_gladen(
            metrics.passed,
            metrics.scored,
            right_passed=errors.sensitivity * right,
            right_labelled=right,
            wrong_failed=errors.specificity * wrong,
            wrong_labelled=wrong,
        )
        if found is None:
            why_not = "the verdict is no better than chance by these labels, or nothing was scored"
    return Correction(
        method="another run",
        raw=None if found is None else found.raw,
        rate=None if found is None else found.rate,
        ci95=None if found is None else found.ci95,
        why_not=why_not,
        assumes_same_errors=True,
        labels=sum(stratum.labelled for stratum in strata),
        labels_of=labels_of,
        sensitivity=None if errors is None else errors.sensitivity,
        specificity=None if errors is None else errors.specificity,
        strata=strata if drawn else [],
        **_state(metrics),
    )


def _labelled_kinds(strata: Iterable[Stratum]) -> tuple[float, float]:
    """How many labels say right, and how many wrong."""
    counts = [(stratum.right, stratum.labelled - stratum.right) for stratum in strata]
    return float(sum(right for right, _ in counts)), float(sum(wrong for _, wrong in counts))


def _state(metrics: Metrics) -> dict[str, Any]:
    """Which state of a run a correction is of."""
    lines = None if metrics.lines is UNSET else metrics.lines.total
    clustered = bool(metrics.groups) or bool(metrics.trials and metrics.trials.trials > 1)
    return {"scored": metrics.scored, "passed": metrics.passed, "lines": lines, "clustered": clustered}


def add_correction(metrics: Metrics, run: Path) -> Metrics:
    """The figures with what `correction.json` of their run says, where there is one."""
    try:
        written = read_json_object(run / CORRECTION)
        if written is None:
            return metrics
        found = msgspec.convert(written, Correction)
    except (OSError, msgspec.ValidationError):
        found = Correction(method="audit", why_not=f"{CORRECTION} cannot be read: run `steelyard calibrate` again")
    else:
        state = _state(metrics)
        if any(state[name] != getattr(found, name) for name in ("scored", "passed", "lines")):
            changed = "the run has changed since its labels corrected it: run `steelyard calibrate` again"
            found = msgspec.structs.replace(found, rate=None, ci95=None, why_not=changed)
    metrics.correction = found
    metrics.pass_rate_corrected, metrics.pass_rate_corrected_ci95 = found.rate, found.ci95
    return metrics
