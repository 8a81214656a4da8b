"""Calibration of judges: how well one agrees with human labels, whether it is trusted, and the calibration file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec

from steelyard.errors import ConfigurationError
from steelyard.stats.agreement import (
    MIN_RATE,
    Confusion,
    GradedAgreement,
    HumanCeiling,
    PassFailAgreement,
    Trust,
    confusion,
    graded_agreement,
    pass_fail_agreement,
    pass_fail_trust,
)
from steelyard.stats.correction import ErrorRates
from steelyard.stats.metrics import JudgeCalibration

CALIBRATION_VERSION = 2
"""Raised when files change. Version 1 decided by Spearman's rho alone, whatever the labels were."""

REQUIRED = "required"
"""A judge's `calibration` that names no file: `calibration.json` is looked for."""
DEFAULT_FILE = "calibration.json"

PASS_FROM = 0.5
"""Labels from this value on are a pass."""

LabelKind = Literal["pass/fail", "graded"]


class Judged(msgspec.Struct, frozen=True, gc=False):
    """One answer, labelled by people (`label`) and scored by the judge (`score`, `passed`)."""

    label: float
    score: float
    passed: bool
    case: str | None = None
    """Its case: several answers to one case are not new evidence. None where each answer is of another case."""


class Agreement(msgspec.Struct, frozen=True, kw_only=True):
    """How well one judge agrees with the labels, and what follows from that."""

    judge: str
    by: str
    labels: LabelKind
    n: int
    cases: int
    unscored: int
    """Labelled answers for which the judge has no score; they count nowhere."""
    pass_fail: PassFailAgreement
    graded: GradedAgreement | None
    """Only where the labels are grades."""
    confusion: Confusion
    """Rows for the label, columns for the judge; True is a pass."""
    ceiling: HumanCeiling | None = None
    min_agreement: float
    trusted: bool
    reason: str
    scarce: str | None = None
    """Which labels are missing most: of answers that "passed", that "failed", or "graded" ones."""
    labels_needed: int | None = None
    """About how many more labels of that kind would settle a verdict that is open."""


class Calibration(msgspec.Struct, frozen=True, kw_only=True):
    """One judge's entry in a calibration file."""

    v: int = CALIBRATION_VERSION
    judge: str
    by: str
    labels: LabelKind
    n: int
    cases: int
    pass_fail: PassFailAgreement
    graded: GradedAgreement | None
    ceiling: HumanCeiling | None = None
    trusted: bool
    reason: str
    min_agreement: float
    labels_digest: str
    created: str

    def summary(self) -> JudgeCalibration:
        """The figures that a run's metrics repeat."""
        return JudgeCalibration(
            labels=self.n,
            trusted=self.trusted,
            sensitivity=self.pass_fail.sensitivity.rate,
            specificity=self.pass_fail.specificity.rate,
            rho=None if self.graded is None else self.graded.rho,
            created=self.created,
        )


class _Version(msgspec.Struct, frozen=True):
    """What every version of an entry has."""

    v: int
    by: str


_decode_versions = msgspec.json.Decoder(_Version | list[_Version]).decode
_decode = msgspec.json.Decoder(Calibration | list[Calibration]).decode  # one judge is not put in a list


def agreement(
    judge: str,
    by: str,
    judged: Sequence[Judged],
    *,
    labels: LabelKind | None = None,
    min_agreement: float = MIN_RATE,
    unscored: int = 0,
    ceiling: HumanCeiling | None = None,
    weighted: ErrorRates | None = None,
) -> Agreement:
    """How the judge's verdicts agree with people's labels, and whether that is enough to let it decide.

    `labels` says what they are; by default grades, unless all are 0 or 1. `weighted` are the error rates where the
    labels were drawn by verdict: plain shares of such labels would say how they were drawn.
    """
    if not 0 <= min_agreement <= 1:
        raise ConfigurationError(f"min_agreement must be within 0..1, got {min_agreement}")
    if labels is None:
        labels = "pass/fail" if all(one.label in (0.0, 1.0) for one in judged) else "graded"
    cases = [number if one.case is None else one.case for number, one in enumerate(judged)]
    good, passed = [one.label >= PASS_FROM for one in judged], [one.passed for one in judged]
    pass_fail = pass_fail_agreement(good, passed, cases, bar=min_agreement)
    if weighted is not None:
        pass_fail = _weighted(pass_fail, weighted, min_agreement)
    graded = None
    if labels == "graded":
        grades, scores = [one.label for one in judged], [one.score for one in judged]
        graded = graded_agreement(grades, scores, cases, bar=min_agreement)
    trust = pass_fail.trust if graded is None else graded.trust
    if not judged:
        nothing = "it has no score for any labelled answer"
        trust = Trust(trusted=False, reason=nothing, scarce=trust.scarce, more=trust.more)
    return Agreement(
        judge=judge,
        by=by,
        labels=labels,
        n=len(judged),
        cases=len(set(cases)),
        unscored=unscored,
        pass_fail=pass_fail,
        graded=graded,
        confusion=confusion(good, passed),
        ceiling=ceiling,
        min_agreement=min_agreement,
        trusted=trust.trusted,
        reason=trust.reason,
        scarce=trust.scarce,
        labels_needed=trust.more,
    )


def _weighted(found: PassFailAgreement, rates: ErrorRates, bar: float) -> PassFailAgreement:
    """The agreement with rates weighted by how large the strata are (Begg and Greenes)."""
    replace = msgspec.structs.replace
    sensitivity = replace(found.sensitivity, rate=rates.sensitivity, lower=rates.sensitivity_lower)
    specificity = replace(found.specificity, rate=rates.specificity, lower=rates.specificity_lower)
    known = rates.sensitivity is not None and rates.specificity is not None
    return replace(
        found,
        sensitivity=sensitivity,
        specificity=specificity,
        balanced_accuracy=((rates.sensitivity or 0.0) + (rates.specificity or 0.0)) / 2 if known else None,
        kappa=None,
        trust=pass_fail_trust(sensitivity, specificity, bar),
    )


def calibration(found: Agreement, *, labels_digest: str, created: str) -> Calibration:
    """What a calibration file keeps of an agreement."""
    kept = {name: getattr(found, name) for name in Calibration.__struct_fields__ if hasattr(found, name)}
    return Calibration(**kept, labels_digest=labels_digest, created=created)


def read_calibrations(path: str | Path) -> list[Calibration]:
    """The entries of a calibration file; an error that says why when it is none, or one of another version."""
    try:
        data = Path(path).read_bytes()
        versions = _decode_versions(data)
        for entry in [versions] if isinstance(versions, _Version) else versions:
            _check_version(path, entry.v)
        entries = _decode(data)
    except (OSError, msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        cause = error.strerror if isinstance(error, OSError) else error
        raise ConfigurationError(f"{path} is not a calibration file: {cause}") from error
    return [entries] if isinstance(entries, Calibration) else entries


class OldCalibration(ConfigurationError):
    """A calibration file of an older version, which may be written over."""


def _check_version(path: str | Path, version: int) -> None:
    if version > CALIBRATION_VERSION:
        raise ConfigurationError(
            f"{path} was written by a newer Steelyard: version {version}, known here: {CALIBRATION_VERSION}"
        )
    if version < CALIBRATION_VERSION:
        raise OldCalibration(
            f"{path} is a calibration of version {version}, which did not look at sensitivity and specificity: "
            f"make it again with `steelyard calibrate RUN --labels FILE -o {path}`"
        )


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
    measured = f"{error_rates_text(entry)} on {entry.n:,} labels, {entry.created[:10]}"
    if not entry.trusted:
        return False, f"{path}: {by} was calibrated and is not trusted: {entry.reason} ({measured})"
    return True, f"{path}: {by} is calibrated: {measured}"


def error_rates_text(entry: Calibration | Agreement) -> str:
    """The figures that decided, in words: sensitivity and specificity, or rho."""
    if entry.graded is not None:
        return f"rho {_shown(entry.graded.rho)}"
    found = entry.pass_fail
    return f"sensitivity {_shown(found.sensitivity.rate)}, specificity {_shown(found.specificity.rate)}"


def _shown(rate: float | None) -> str:
    return "undefined" if rate is None else f"{rate:.2f}"


def calibration_file(demanded: Any, folder: Path | None = None) -> Path:
    """The file that a judge's `calibration` names, relative to a folder; `required` is `calibration.json` there."""
    if not isinstance(demanded, str | Path) or not str(demanded):
        raise ConfigurationError(f"calibration must be a file's path or {REQUIRED!r}, got {demanded!r}")
    path = Path(DEFAULT_FILE) if demanded == REQUIRED else Path(demanded)
    return path if folder is None else folder / path


def _absent(path: str | Path, by: str) -> str:
    if not Path(path).exists():
        return f"there is no calibration file {path}; steelyard calibrate makes one"
    others = ", ".join(sorted({entry.by for entry in read_calibrations(path)})) or "no judge"
    return f"{path} is of {others}, not of {by}: the judge has changed since it was calibrated"
