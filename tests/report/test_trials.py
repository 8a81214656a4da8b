"""The lines on repeated trials: what they say, and that they fit a terminal whatever the names are."""

from __future__ import annotations

import random

import pytest
from tqdm.utils import disp_len

from steelyard.records import Score
from steelyard.report.summary import trial_lines as lines
from steelyard.stats.trials import TrialStats


def shown(rows, *, ids=None) -> str:
    """The lines for verdicts given as a row for each case."""
    stats = TrialStats(len(rows), len(rows[0]))
    for position, row in enumerate(rows):
        for trial, passed in enumerate(row):
            stats.update(position, trial, passed, [])
    return "\n".join(lines(stats.to_metrics(ids)))


def shown_scores(scores, *, trials) -> str:
    """The lines for the scores of one case, one for each trial."""
    stats = TrialStats(1, trials)
    for trial, score in enumerate(scores):
        stats.update(0, trial, None, [score])
    return "\n".join(lines(stats.to_metrics()))


def test_the_estimates_are_columns_by_k_and_flaky_cases_follow():
    rows = [[True, True, True], [False, False, False], [True, False, True], [False, True, False]]
    assert shown(rows, ids=lambda position: f"case-{position}").splitlines()[2:] == [
        "  k               1       2       3",
        "  pass@k      50.0%   66.7%   75.0%",
        "  pass^k      50.0%   33.3%   25.0%",
        "  flaky     2 of 4 cases passed in some trials, not in others:",
        "    2 of 3  case-2",
        "    1 of 3  case-3",
    ]


def test_the_pass_rate_stands_with_its_interval_and_the_spread():
    text = shown([[True, True], [True, False]])
    assert "2 trials of 2 cases, spread 0.25 between trials" in text
    assert "passed      75.0%  95 % CI 50.0% – 100.0%, clustered by case" in text


def test_five_flaky_cases_are_named_and_the_rest_counted():
    text = shown([[True, False]] * 12)
    assert text.count("1 of 2  ") == 5
    assert text.endswith("and 7 more")


def test_it_says_when_no_case_is_flaky():
    assert "flaky     none" in shown([[True, True], [False, False]])


@pytest.mark.parametrize(
    ("trials", "expected"),
    [
        (2, "1 2"),
        (8, "1 2 3 4 5 6 7 8"),
        (9, "1 2 4 8 9"),
        (100, "1 2 4 8 16 32 64 100"),
        (1000, "1 2 4 8 16 32 64 1000"),
    ],
)
def test_many_trials_are_shown_at_doubling_numbers_with_the_last(trials, expected):
    rows = [line for line in shown([[True] * trials]).splitlines() if line.startswith("  k ")]
    assert [row.split() for row in rows] == [["k", *expected.split()]]


def test_a_k_that_no_case_reached_shows_a_dash():
    text = shown([[True, None], [False, None]])
    assert "  pass@k      50.0%       –" in text
    assert "2 trials of 2 cases\n" in text


def test_a_deterministic_scorer_shows_its_spread_alone():
    text = shown_scores([Score("exact", 0.0), Score("exact", 1.0)], trials=2)
    assert text == "  score exact: spread 0.50 between trials"


def test_a_judge_is_followed_by_whose_variance_dominates():
    scores = [Score("judge", 0.05, samples=[0.0, 0.1]), Score("judge", 0.95, samples=[0.9, 1.0])]
    assert shown_scores(scores, trials=2).splitlines() == [
        "  score judge: spread 0.45 between trials",
        "    the agent varies more than the judge: std_dev 0.63 against 0.071: more",
        "    trials help, more judge runs do not",
    ]


def test_with_a_single_trial_only_the_judges_spread_is_told():
    text = shown_scores([Score("judge", 0.5, samples=[0.0, 1.0])], trials=1)
    assert text.startswith("  score judge\n    the judge varies between runs: std_dev 0.71")


@pytest.mark.parametrize("score", [Score("exact", 1.0, True), Score("judge", 1.0, True, by="model")])
def test_a_single_trial_without_repeats_has_nothing_to_tell(score):
    stats = TrialStats(1, 1)
    stats.update(0, 0, True, [score])
    assert lines(stats.to_metrics()) == []


def test_a_run_without_any_verdict_has_nothing_to_tell():
    assert lines(TrialStats(3, 4).to_metrics()) == []


@pytest.mark.parametrize("name", ["x" * 300, "判" * 300, "e\u0301" * 100], ids=["long", "wide", "combining"])
@pytest.mark.parametrize("steadiness", [0.0, 0.3, 1.0])
def test_no_line_is_wider_than_80_columns(name, steadiness):
    rng = random.Random(3)
    stats = TrialStats(20, 8)
    for position in range(20):
        for trial in range(8):
            agent = rng.random()
            samples = [steadiness * agent + (1 - steadiness) * rng.random() for _ in range(2)]
            score = Score(name, sum(samples) / 2, samples=samples)
            stats.update(position, trial, rng.random() < 0.5, [score])
    metrics = stats.to_metrics(lambda position: name + str(position))
    metrics.update(cases=98_765_432, flaky=98_765_432)
    found = lines(metrics)
    assert len(found) > 12
    assert max(map(disp_len, found)) <= 80


def test_names_from_elsewhere_cannot_steer_the_terminal():
    text = shown([[True, False]], ids=lambda position: "a\x1b[31m\nb")
    text += shown_scores([Score("j\x1b[2J\n", 0.0), Score("j\x1b[2J\n", 1.0)], trials=2)
    assert "\x1b" not in text
    assert "a�[31m�b" in text
    assert "score j�[2J�: spread" in text
