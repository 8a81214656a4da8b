"""Pass rates corrected by people's labels: a random audit of each stratum, or error rates measured elsewhere."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import msgspec
import numpy as np
import numpy.typing as npt

from steelyard.stats.distributions import normal_quantile
from steelyard.stats.intervals import Floats, Interval

MIN_AUDIT = 20
"""The fewest labels to draw from each stratum: with fewer the interval says next to nothing."""

_DRAWS = 20_000


class Stratum(msgspec.Struct, frozen=True, kw_only=True):
    """The answers that went one way through the scorers, and what people said of some drawn at random from them."""

    name: str
    passed: bool
    """Whether these answers count as passed in the raw rate."""
    size: int
    labelled: int
    right: int
    """How many of the labelled ones people called right."""


class Corrected(msgspec.Struct, frozen=True, kw_only=True):
    """A pass rate as it was measured, and as it is once the measurer's errors are taken out."""

    raw: float
    rate: float
    ci95: Interval
    assumes_same_errors: bool
    """Whether the error rates were measured elsewhere, and are assumed to be the same here."""


class Correction(msgspec.Struct, frozen=True, kw_only=True):
    """What labels make of a run's pass rate, as `correction.json` holds it, and of which state of the run."""

    v: int = 1
    method: Literal["audit", "another run"]
    """Labels drawn from each stratum of the run itself, or error rates measured on another run."""
    raw: float | None = None
    rate: float | None = None
    ci95: Interval | None = None
    why_not: str | None = None
    """Why there is no corrected rate."""
    assumes_same_errors: bool = False
    clustered: bool = False
    """Whether trials or groups count as independent answers here, which they are not: the interval is too narrow."""
    labels: int = 0
    labels_of: str | None = None
    labels_digest: str = ""
    sensitivity: float | None = None
    """Of the run's verdict as a whole, scorers and judges together."""
    specificity: float | None = None
    strata: list[Stratum] = []
    scored: int = 0
    passed: int = 0
    lines: int | None = None
    """How many lines the run's journal had: with more it is another state of the run."""
    created: str = ""


class ErrorRates(msgspec.Struct, frozen=True, kw_only=True):
    """Sensitivity and specificity from labels drawn by verdict, weighted by how large the strata are."""

    sensitivity: float | None
    sensitivity_lower: float
    """The one-sided 95 % lower end."""
    specificity: float | None
    specificity_lower: float
    right_n: float = 0.0
    """How many labels of right answers, drawn plainly at random, would know the sensitivity as well."""
    wrong_n: float = 0.0
    """The same for wrong answers and the specificity."""


def corrected_rate(strata: Sequence[Stratum], *, confidence: float = 0.95, seed: int = 0) -> Corrected | None:
    """The true pass rate: each stratum's, weighted by its size; None where a stratum has no labels.

    The interval takes each stratum's rate from its Jeffreys posterior and the strata's shares from a Dirichlet.
    """
    strata = _checked(strata)
    if not strata or not all(stratum.labelled for stratum in strata):
        return None
    answers = sum(stratum.size for stratum in strata)
    weights, rates = _draw(strata, seed)
    tail = (1 - confidence) / 2
    low, high = np.quantile((weights * rates).sum(axis=1), (tail, 1 - tail)).tolist()
    rate = math.fsum(stratum.size / answers * stratum.right / stratum.labelled for stratum in strata)
    return Corrected(
        raw=sum(stratum.size for stratum in strata if stratum.passed) / answers,
        rate=rate,
        ci95=(min(low, rate), max(high, rate)),
        assumes_same_errors=False,
    )


def weighted_error_rates(strata: Sequence[Stratum], *, alpha: float = 0.05, seed: int = 0) -> ErrorRates | None:
    """How often right answers pass and wrong ones fail, where labels were drawn by verdict (Begg and Greenes 1983).

    Plain shares of such labels say how they were drawn, not how good the verdict is. None without labels in a stratum.
    """
    strata = _checked(strata)
    if not strata or not all(stratum.labelled for stratum in strata):
        return None
    passed = np.array([stratum.passed for stratum in strata])
    sizes = np.array([float(stratum.size) for stratum in strata])
    shares = np.array([stratum.right / stratum.labelled for stratum in strata])
    return ErrorRates(
        sensitivity=_share(sizes * shares, passed),
        sensitivity_lower=_share_lower(strata, passed, alpha, seed),
        specificity=_share(sizes * (1 - shares), ~passed),
        specificity_lower=_share_lower(_mirrored(strata), ~passed, alpha, seed),
        right_n=_effective_n(strata, passed, seed),
        wrong_n=_effective_n(_mirrored(strata), ~passed, seed),
    )


def rogan_gladen(
    passed: int,
    n: int,
    *,
    right_passed: float,
    right_labelled: float,
    wrong_failed: float,
    wrong_labelled: float,
    confidence: float = 0.95,
) -> Corrected | None:
    """The true pass rate by error rates that were measured on other answers (Rogan and Gladen 1978).

    Of `right_labelled` answers that people called right, `right_passed` passed; of `wrong_labelled`, `wrong_failed`
    failed. The interval is Lang and Reiczigel's (2014). None where the verdict is no better than chance, so that it
    says nothing, or where there are no labels of a kind.
    """
    if not n or not right_labelled or not wrong_labelled:
        return None
    raw = passed / n
    sensitivity, specificity = right_passed / right_labelled, wrong_failed / wrong_labelled
    if sensitivity + specificity <= 1:
        return None
    rate = min(max((raw + specificity - 1) / (sensitivity + specificity - 1), 0.0), 1.0)
    z = normal_quantile((1 + confidence) / 2)
    # Their adjusted counts: z² pseudo-answers, and one label of each outcome for either kind.
    seen, n_seen = (passed + z * z / 2) / (n + z * z), n + z * z
    true_pass, n_right = (right_passed + 1) / (right_labelled + 2), right_labelled + 2
    true_fail, n_wrong = (wrong_failed + 1) / (wrong_labelled + 2), wrong_labelled + 2
    power = true_pass + true_fail - 1
    if power <= 0:
        return Corrected(raw=raw, rate=rate, ci95=(0.0, 1.0), assumes_same_errors=True)
    centre = (seen + true_fail - 1) / power
    of_right, of_wrong = true_pass * (1 - true_pass) / n_right, true_fail * (1 - true_fail) / n_wrong
    shift = 2 * z * z * (centre * of_right - (1 - centre) * of_wrong)
    variance = seen * (1 - seen) / n_seen + centre**2 * of_right + (1 - centre) ** 2 * of_wrong
    reach = z * math.sqrt(variance) / power
    low, high = min(max(centre + shift - reach, 0.0), 1.0), min(max(centre + shift + reach, 0.0), 1.0)
    return Corrected(raw=raw, rate=rate, ci95=(min(low, rate), max(high, rate)), assumes_same_errors=True)


def _checked(strata: Sequence[Stratum]) -> list[Stratum]:
    """The strata that hold answers."""
    for stratum in strata:
        if not 0 <= stratum.right <= stratum.labelled <= stratum.size:
            raise ValueError(
                f"stratum {stratum.name}: right <= labelled <= size must hold, "
                f"got {stratum.right}, {stratum.labelled} and {stratum.size}"
            )
    return [stratum for stratum in strata if stratum.size]


def _draw(strata: Sequence[Stratum], seed: int) -> tuple[Floats, Floats]:
    """Shares and rates of the strata as they may be, a row a draw."""
    rng = np.random.default_rng(seed)
    weights = rng.dirichlet([stratum.size + 0.5 for stratum in strata], _DRAWS)
    right = np.array([stratum.right + 0.5 for stratum in strata])
    wrong = np.array([stratum.labelled - stratum.right + 0.5 for stratum in strata])
    return weights, rng.beta(right, wrong, (_DRAWS, len(strata)))


def _share_lower(strata: Sequence[Stratum], chosen: npt.NDArray[np.bool_], alpha: float, seed: int) -> float:
    """The lower end of the chosen strata's share of all right answers.

    By melding exact bounds (Fay, Proschan and Brittain 2015): rates that help are drawn as their lower Clopper-Pearson
    bound is distributed, those that hurt as the upper one.
    """
    rng = np.random.default_rng(seed)
    weights = rng.dirichlet([stratum.size + 0.5 for stratum in strata], _DRAWS)
    right = np.array([float(stratum.right) for stratum in strata])
    wrong = np.array([float(stratum.labelled - stratum.right) for stratum in strata])
    a, b = np.where(chosen, right, right + 1), np.where(chosen, wrong + 1, wrong)
    rates = np.where(a == 0, 0.0, np.where(b == 0, 1.0, rng.beta(np.maximum(a, 1), np.maximum(b, 1), weights.shape)))
    masses = weights * rates
    total = masses.sum(axis=1)
    shares = np.divide(masses[:, chosen].sum(axis=1), total, out=np.zeros(_DRAWS), where=total > 0)
    return float(np.quantile(shares, alpha))


def _effective_n(strata: Sequence[Stratum], chosen: npt.NDArray[np.bool_], seed: int) -> float:
    """The number of trials of a binomial rate that spreads as far as the chosen strata's share of all right answers."""
    if not any(stratum.right for stratum in strata):
        return 0.0
    weights, rates = _draw(strata, seed)
    masses = weights * rates
    shares = masses[:, chosen].sum(axis=1) / masses.sum(axis=1)
    mean, variance = float(shares.mean()), float(shares.var())
    # A Jeffreys posterior of n trials has the variance mean * (1 - mean) / (n + 2).
    return max(mean * (1 - mean) / variance - 2, 1.0) if variance > 0 else float(sum(one.labelled for one in strata))


def _mirrored(strata: Sequence[Stratum]) -> list[Stratum]:
    """The same with right and wrong exchanged."""
    return [msgspec.structs.replace(stratum, right=stratum.labelled - stratum.right) for stratum in strata]


def _share(weights: Floats, chosen: npt.NDArray[np.bool_]) -> float | None:
    total = math.fsum(weights)
    return math.fsum(weights[chosen]) / total if total > 0 else None
