"""Calibration of judges: how well one agrees with human labels, whether it is trusted, and the calibration file."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import msgspec

from steelyard.errors import ConfigurationError
from steelyard.stats.agreement import (
    Confusion,
    cohen_kappa,
    confusion,
    labels_needed,
    spearman,
    spearman_interval,
)
from steelyard.stats.formatting import counted
from steelyard.stats.intervals import Interval

CALIBRATION_VERSION = 1
MIN_SPEARMAN = 0.80
MIN_LOWER_END = 0.70
MIN_LABELS = 10
"""With fewer, a bootstrap means nothing: a coin gets three labels right once in eight."""

PASS_FROM = 0.5
"""Labels from this value on are a pass."""

_NEARLY_ONE = 1 - 1e-9


class Judged(msgspec.Struct, frozen=True, gc=False):
    """One answer, scored by a person (`label`) and by the judge (`score`, `passed`)."""

    label: float
    score: float
    passed: bool


class Agreement(msgspec.Struct, frozen=True, kw_only=True):
    """How well one judge agrees with the labels, and what follows from that."""

    judge: str
    by: str
    n: int
    unscored: int
    """Labelled answers for which the judge has no score; they count nowhere."""
    rho: float | None
    interval: Interval | None
    kappa: float | None
    confusion: Confusion
    """Rows for the label, columns for the judge; True is a pass."""
    min_spearman: float
    trusted: bool
    labels_needed: int | None
    """About how many more labels would settle a verdict that is open."""
    reason: str


class Calibration(msgspec.Struct, frozen=True, kw_only=True):
    """One judge's entry in a calibration file."""

    v: int = CALIBRATION_VERSION
    judge: str
    by: str
    rho: float | None
    interval: Interval | None
    kappa: float | None
    n: int
    trusted: bool
    min_spearman: float
    labels_digest: str
    created: str


_decode = msgspec.json.Decoder(Calibration | list[Calibration]).decode  # one judge is not put in a list


def agreement(
    judge: str, by: str, judged: Sequence[Judged], *, min_spearman: float = MIN_SPEARMAN, unscored: int = 0
) -> Agreement:
    """The judge's verdict on each answer, set against the people's, and whether that is good enough."""
    if not 0 <= min_spearman <= 1:
        raise ConfigurationError(f"min_spearman must be within 0..1, got {min_spearman}")
    labels, scores = [one.label for one in judged], [one.score for one in judged]
    good, passed = [one.label >= PASS_FROM for one in judged], [one.passed for one in judged]
    rho, interval = spearman(labels, scores), spearman_interval(labels, scores)
    trusted, needed, reason = _verdict(judged, rho, interval, min_spearman)
    return Agreement(
        judge=judge,
        by=by,
        n=len(judged),
        unscored=unscored,
        rho=rho,
        interval=interval,
        kappa=cohen_kappa(good, passed),
        confusion=confusion(good, passed),
        min_spearman=min_spearman,
        trusted=trusted,
        labels_needed=needed,
        reason=reason,
    )


def calibration(found: Agreement, *, labels_digest: str, created: str) -> Calibration:
    """What a calibration file keeps of an agreement."""
    return Calibration(
        judge=found.judge,
        by=found.by,
        rho=found.rho,
        interval=found.interval,
        kappa=found.kappa,
        n=found.n,
        trusted=found.trusted,
        min_spearman=found.min_spearman,
        labels_digest=labels_digest,
        created=created,
    )


def read_calibrations(path: str | Path) -> list[Calibration]:
    """The entries of a calibration file; an error that says why when it is none."""
    try:
        entries = _decode(Path(path).read_bytes())
    except (OSError, msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        cause = error.strerror if isinstance(error, OSError) else error
        raise ConfigurationError(f"{path} is not a calibration file: {cause}") from error
    return [entries] if isinstance(entries, Calibration) else entries


def calibration_of(path: str | Path, by: str) -> Calibration | None:
    """The entry of the judge with this `by`; None when the file is absent or does not have one.

    Where it has several for the same judge, one that failed comes first.
    """
    if not Path(path).exists():
        return None
    entries = [entry for entry in read_calibrations(path) if entry.by == by]
    return min(entries, key=lambda entry: entry.trusted, default=None)


def is_trusted(path: str | Path, by: str) -> tuple[bool, str]:
    """Whether a calibration file vouches for the judge with this `by`, and why or why not, in words."""
    try:
        entry = calibration_of(path, by)
        if entry is None:
            return False, _absent(path, by)
    except ConfigurationError as error:
        return False, str(error)
    shown = "undefined" if entry.rho is None else f"{entry.rho:.2f}"
    measured = f"rho {shown} on {entry.n:,} labels, {entry.created[:10]}"
    if entry.v > CALIBRATION_VERSION:
        return False, f"{path} was written by a newer Steelyard: version {entry.v}, known here: {CALIBRATION_VERSION}"
    if not entry.trusted:
        return False, f"{path}: {by} was calibrated and failed: {measured}"
    return True, f"{path}: {by} is calibrated: {measured}"


def _absent(path: str | Path, by: str) -> str:
    if not Path(path).exists():
        return f"there is no calibration file {path}; steelyard calibrate makes one"
    others = ", ".join(sorted({entry.by for entry in read_calibrations(path)})) or "no judge"
    return f"{path} is of {others}, not of {by}: the judge has changed since it was calibrated"


def _verdict(
    judged: Sequence[Judged], rho: float | None, interval: Interval | None, min_spearman: float
) -> tuple[bool, int | None, str]:
    """Trusted or not, how many more labels would settle it, and the reason."""
    n = len(judged)
    if n == 0:
        return False, MIN_LABELS, "it has no score for any labelled answer"
    if n < MIN_LABELS:
        more = MIN_LABELS - n
        return False, more, f"too few labels: {n} of at least {MIN_LABELS}; {counted(more, 'more label')} needed"
    if rho is None or interval is None:
        return False, None, _why_undefined(judged)
    if rho < min_spearman:
        return _below(rho, interval, n, min_spearman)
    low = interval[0]
    if low > MIN_LOWER_END:
        return True, None, f"rho {rho:.2f} is at least {_limit(min_spearman)}, its lower end above {MIN_LOWER_END:.2f}"
    if (more_labels := _to_raise(rho, low, n)) is None:
        return False, None, f"it disagrees too much: rho {_beside(rho, MIN_LOWER_END)} is not above {MIN_LOWER_END:.2f}"
    open_end = f"the lower end {_beside(low, MIN_LOWER_END)} is not above {MIN_LOWER_END:.2f}"
    return False, more_labels, f"{open_end}; about {counted(more_labels, 'more label')} would settle it"


def _below(rho: float, interval: Interval, n: int, min_spearman: float) -> tuple[bool, int | None, str]:
    """The verdict on a rho that is not enough: for good, or open as long as the interval reaches higher."""
    too_low = f"rho {_beside(rho, min_spearman)} is below {_limit(min_spearman)}"
    if interval[1] < min_spearman:
        return False, None, f"it disagrees too much: {too_low}, and so is its upper end {interval[1]:.2f}"
    # The upper end of rho's interval is the lower end of the mirrored one's.
    more = max(labels_needed(-rho, n, lower=-min_spearman) or 0, 1)
    return False, more, f"{too_low}; if it stays there, about {counted(more, 'more label')} would settle it"


def _to_raise(rho: float, low: float, n: int) -> int | None:
    """About how many more labels would bring the interval's lower end high enough; None when none would.

    The formula knows nothing of ties, which widen the bootstrap's interval. As that shrinks with the root of n
    (on Fisher's scale), its own width tells too; the larger number counts.
    """
    more = labels_needed(rho, n, lower=MIN_LOWER_END)
    if more is None:
        return None
    top = math.atanh(min(rho, _NEARLY_ONE))
    ratio = (top - math.atanh(max(low, -_NEARLY_ONE))) / (top - math.atanh(MIN_LOWER_END))
    return max(more, math.floor(n * ratio**2) + 1 - n)


def _why_undefined(judged: Sequence[Judged]) -> str:
    label, score = judged[0].label, judged[0].score
    if all(one.score == score for one in judged):
        return f"rho is undefined: the judge gave every labelled answer the same score, {score:g}"
    return f"rho is undefined: every label is the same, {label:g}; label answers of the other kind too"


def _beside(value: float, limit: float) -> str:
    """A figure with as many digits as it takes to tell it from the limit that it is compared with."""
    digits = 2
    while digits < 6 and value != limit and f"{value:.{digits}f}" == f"{limit:.{digits}f}":
        digits += 1
    return f"{value:.{digits}f}"


def _limit(value: float) -> str:
    """A limit as it was given, with two digits or more."""
    return f"{value:.2f}" if round(value, 2) == value else f"{value:g}"
