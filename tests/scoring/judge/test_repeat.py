"""Several samples become one score; no reason is lost and no failure counts as a zero."""

from __future__ import annotations

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st

from steelyard.records import Sample, Score
from steelyard.scoring.judge.judge import combine_samples
from tests.support.judge import judge

GOOD = st.builds(Sample, score=st.floats(0, 1), passed=st.none() | st.booleans(), reason=st.none() | st.text())
FAILED = st.builds(Sample, error=st.text(min_size=1))


def combine(*samples: float | bool | str | None, aggregate="mean", threshold=0.5) -> Score:
    """Numbers are scores, bools verdicts, texts errors."""
    samples = [
        Sample(error=one)
        if isinstance(one, str)
        else Sample(score=float(one or 0), passed=one if isinstance(one, bool) else None, reason=f"because {one}")
        for one in samples
    ]
    return combine_samples("judge", samples, aggregate=aggregate, threshold=threshold)


def test_three_runs_of_one_half_and_nought_have_mean_half_and_deviation_0_408() -> None:
    score = combine(1.0, 0.5, 0.0)
    assert (score.value, score.mean, score.passed) == (0.5, 0.5, True)
    assert score.std_dev == pytest.approx(0.408, abs=5e-4)
    assert score.samples == [1.0, 0.5, 0.0]
    assert score.reasons == ["because 1.0", "because 0.5", "because 0.0"]
    assert score.errors == []


def test_a_single_sample_keeps_its_reason_and_its_figures() -> None:
    score = combine(0.7)
    assert score == Score(
        "judge", 0.7, True, "because 0.7", samples=[0.7], mean=0.7, std_dev=0.0, reasons=["because 0.7"]
    )


@given(st.lists(GOOD | FAILED, min_size=1), st.sampled_from(["mean", "all", "any", "majority"]), st.floats(0, 1))
def test_the_figures_are_numpys_over_the_good_samples(samples, aggregate, threshold) -> None:
    score = combine_samples("judge", samples, aggregate=aggregate, threshold=threshold)
    good = [one for one in samples if one.score is not None]
    assert score.samples == [one.score for one in samples]
    assert score.reasons == [one.reason for one in samples]
    assert score.errors == [one.error for one in samples if one.score is None]
    if not good:
        assert (score.value, score.passed, score.mean, score.std_dev) == (None, None, None, None)
        return
    numbers = numpy.array([one.score for one in good])
    assert score.mean == pytest.approx(numbers.mean())
    assert score.std_dev == pytest.approx(numbers.std(), abs=1e-12)
    assert score.value is not None
    assert 0.0 <= score.value <= 1.0
    passes = [one.passed if one.passed is not None else one.score >= threshold for one in good]
    wanted = {
        "mean": score.mean >= threshold,
        "all": min(passes),
        "any": max(passes),
        "majority": numpy.mean(passes) > 0.5,
    }
    assert score.passed == wanted[aggregate]
    assert score.value == (score.mean if aggregate == "mean" else float(score.passed))


@pytest.mark.parametrize(
    ("aggregate", "samples", "passed", "reason"),
    [
        ("all", (True, True), True, "2 of 2 samples passed: because True"),
        ("all", (True, False), False, "1 of 2 samples passed: because False"),
        ("any", (True, False), True, "1 of 2 samples passed: because True"),
        ("any", (False, False), False, "0 of 2 samples passed: because False"),
        ("majority", (True, False, True), True, "2 of 3 samples passed: because True"),
        ("majority", (True, False), False, "1 of 2 samples passed, a tie, which is not a pass: because False"),
        (
            "majority",
            (True, False, "down"),
            False,
            "1 of 2 samples passed, a tie, which is not a pass, 1 failed: because False",
        ),
        ("mean", (1.0, 0.5, "down"), True, "mean 0.75 of 2 samples, 1 failed: because 1.0"),
        ("mean", (0.0, 0.8), False, "mean 0.4 of 2 samples: because 0.0"),
    ],
)
def test_the_reason_counts_the_samples_and_quotes_one_that_agrees(aggregate, samples, passed, reason) -> None:
    score = combine(*samples, aggregate=aggregate)
    assert (score.passed, score.reason) == (passed, reason)


def test_failed_samples_are_listed_and_not_averaged_in_as_zeros() -> None:
    score = combine(1.0, "judge is down", 0.8)
    assert (score.value, score.errors, score.samples) == (pytest.approx(0.9), ["judge is down"], [1.0, None, 0.8])


def test_a_judge_that_never_answered_gives_a_scoring_error_not_a_zero() -> None:
    score = combine("down", "still down")
    assert (score.value, score.passed, score.errors) == (None, None, ["down", "still down"])


def test_a_sample_that_says_passed_counts_as_passed_whatever_its_score() -> None:
    samples = [Sample(score=0.1, passed=True), Sample(score=0.9, passed=False)]
    assert combine_samples("j", samples, aggregate="any", threshold=0.5).passed is True
    assert combine_samples("j", samples, aggregate="all", threshold=0.05).passed is False


def test_nothing_cannot_be_combined() -> None:
    with pytest.raises(ValueError, match="no samples"):
        combine()


def test_a_judges_score_says_who_judged_and_how_it_came_to_be_asked() -> None:
    asked = judge(name="grader", aggregate="majority", threshold=0.9)
    score = asked.combine([Sample(score=0.8), Sample(score=0.95), Sample(score=1.0)], escalated=True)
    assert (score.name, score.passed, score.value) == ("grader", True, 1.0)
    assert (score.by, score.escalated, score.advisory) == (asked.by, True, False)
    asked.advisory = True
    assert asked.combine([Sample(score=1.0)]).advisory is True
