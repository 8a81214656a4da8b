"""Several samples of one judge, made one score: nothing that was said is thrown away, no failure counts as a zero."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, TypeAlias

import msgspec

from steelyard.records import Sample, Score

Aggregate: TypeAlias = Literal["mean", "all", "any", "majority"]
AGGREGATES: tuple[Aggregate, ...] = ("mean", "all", "any", "majority")


class Spread(msgspec.Struct, frozen=True):
    """The middle and the width of some scores; the deviation is the population's."""

    mean: float
    std_dev: float


def spread_of(scores: Sequence[float]) -> Spread:
    """Mean and population standard deviation of at least one score."""
    mean = math.fsum(scores) / len(scores)
    return Spread(mean, math.sqrt(math.fsum((score - mean) ** 2 for score in scores) / len(scores)))


def combine_samples(name: str, samples: Sequence[Sample], *, aggregate: Aggregate, threshold: float) -> Score:
    """One score of all samples, in their order. Those that failed are listed in `errors` and count for nothing."""
    if not samples:
        raise ValueError(f"{name}: there are no samples to combine")
    good = [sample for sample in samples if sample.score is not None]
    score = Score(
        name,
        samples=[sample.score for sample in samples],
        errors=[sample.error or "no score" for sample in samples if sample.score is None],
        reasons=[sample.reason for sample in samples],
    )
    if not good:
        return score
    spread = spread_of([sample.score for sample in good if sample.score is not None])
    score.mean, score.std_dev = spread.mean, spread.std_dev
    passes = [_passed(sample, threshold) for sample in good]
    if aggregate == "mean":
        score.value, score.passed = spread.mean, spread.mean >= threshold
    else:
        score.passed = _agreed(aggregate, passes)
        score.value = float(score.passed)
    score.reason = _reason(aggregate, samples, good, passes, score)
    return score


def _passed(sample: Sample, threshold: float) -> bool:
    return sample.passed if sample.passed is not None else sample.score is not None and sample.score >= threshold


def _agreed(aggregate: Aggregate, passes: Sequence[bool]) -> bool:
    if aggregate == "majority":
        return 2 * sum(passes) > len(passes)
    return all(passes) if aggregate == "all" else any(passes)


def _reason(
    aggregate: Aggregate, samples: Sequence[Sample], good: Sequence[Sample], passes: Sequence[bool], score: Score
) -> str | None:
    """What the only sample said; of several the count, and what the first one that agrees with the outcome said."""
    if len(samples) == 1:
        return good[0].reason
    if aggregate == "mean":
        said = f"mean {score.mean:.3g} of {len(good)} samples"
    else:
        said = f"{sum(passes)} of {len(good)} samples passed"
        if aggregate == "majority" and 2 * sum(passes) == len(passes):
            said += ", a tie, which is not a pass"
    if len(good) < len(samples):
        said += f", {len(samples) - len(good)} failed"
    agreeing = (sample.reason for sample, passed in zip(good, passes, strict=True) if passed == score.passed)
    first = next((reason for reason in agreeing if reason), None)
    return f"{said}: {first}" if first else said
