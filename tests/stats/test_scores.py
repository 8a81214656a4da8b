"""ScoreStats: when a case passes, what is unscored, and figures that balance."""

from __future__ import annotations

import json
import math
import pickle
import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from steelyard.records import Score, verdict
from steelyard.stats.intervals import bounded_mean_interval, clopper_pearson
from steelyard.stats.scores import ScoreStats
from tests.support.metrics import plain

PASS, FAIL = Score("exact", 1.0, True), Score("number", 0.0, False)
BROKEN = Score("judge", errors=["no JSON in the answer"])
MEASURED = Score("similarity", 0.4)

scores = st.builds(
    Score,
    st.sampled_from(["exact", "number", "judge"]),
    st.none() | st.floats(0, 1),
    st.none() | st.booleans(),
    errors=st.just([]) | st.just(["parse error"]),
)
records = st.lists(st.tuples(st.lists(scores, max_size=3), st.booleans()), max_size=25)


def stats_of(items) -> ScoreStats:
    stats = ScoreStats()
    for record_scores, failed in items:
        stats.update(record_scores, failed)
    return stats


@pytest.mark.parametrize(
    ("given_scores", "expected"),
    [
        ([PASS], True),
        ([PASS, PASS], True),
        ([PASS, FAIL], False),
        ([], None),
        ([MEASURED], None),
        ([MEASURED, PASS], True),
        ([PASS, BROKEN], None),
        ([FAIL, BROKEN], None),
        ([Score("judge", 0.5, True, errors=["one sample of three failed"])], True),
    ],
)
def test_a_case_passes_when_every_score_that_decides_passed(given_scores, expected):
    assert verdict(given_scores) is expected


def test_the_example_of_a_scoring_error_is_the_same_in_whatever_order_they_come():
    one, other = ([Score("judge", errors=["timed out"])], False), ([BROKEN], False)
    split = stats_of([one])
    split.merge(stats_of([other]))
    found = [plain(stats.to_metrics())["judge"] for stats in (stats_of([one, other]), stats_of([other, one]), split)]
    assert [score["error_example"] for score in found] == ["no JSON in the answer"] * 3


def test_an_error_record_is_never_scored():
    stats = stats_of([([PASS], True)])
    assert (stats.n, stats.errors, stats.scored, stats.unscored) == (1, 1, 0, 0)
    assert plain(stats.to_metrics()) == {}


def test_a_scoring_error_is_unscored_and_neither_passed_nor_failed():
    stats = stats_of([([PASS, BROKEN], False), ([PASS], False)])
    assert (stats.scored, stats.passed, stats.unscored, stats.scoring_errors) == (1, 1, 1, 1)
    assert stats.pass_rate == 1.0
    judge = plain(stats.to_metrics())["judge"]
    assert judge == {
        "n": 0,
        "mean": None,
        "mean_ci95": None,
        "passed": 0,
        "pass_rate": None,
        "pass_rate_ci95": None,
        "errors": 1,
        "error_example": "no JSON in the answer",
    }


def test_rates_divide_by_what_their_names_say():
    stats = stats_of([([PASS], False), ([FAIL], False), ([], False), ([], True)])
    assert (stats.pass_rate, stats.pass_rate_all, stats.error_rate) == (0.5, 0.25, 0.25)
    assert stats.pass_rate_ci95 == clopper_pearson(1, 2)


def test_nothing_seen_gives_none_not_zero():
    stats = ScoreStats()
    assert [stats.pass_rate, stats.pass_rate_all, stats.error_rate, stats.pass_rate_ci95] == [None] * 4


def test_each_name_has_its_mean_rate_and_intervals():
    values = [0.2, 0.9, 0.7]
    stats = stats_of([([Score("judge", value, value > 0.5), MEASURED], False) for value in values])
    assert plain(stats.to_metrics())["judge"] == {
        "n": 3,
        "mean": math.fsum(values) / 3,
        "mean_ci95": list(bounded_mean_interval(values)),
        "passed": 2,
        "pass_rate": 2 / 3,
        "pass_rate_ci95": list(clopper_pearson(2, 3)),
        "errors": 0,
    }
    measured = plain(stats.to_metrics())["similarity"]
    assert (measured["n"], measured["mean"], measured["pass_rate"]) == (3, 0.4, None)


def test_a_value_that_is_not_a_number_stays_out_of_the_mean():
    stats = stats_of([([Score("x", math.nan, False)], False), ([Score("x", 0.5, True)], False)])
    assert plain(stats.to_metrics())["x"]["mean"] == 0.5


@given(records)
def test_the_counts_balance(items):
    stats = stats_of(items)
    assert stats.n == stats.errors + stats.scored + stats.unscored
    assert 0 <= stats.passed <= stats.scored
    assert stats.scoring_errors <= stats.unscored


@given(records, st.randoms(use_true_random=False))
def test_the_order_of_records_changes_no_bit(items, rng):
    shuffled = list(items)
    rng.shuffle(shuffled)
    one, other = plain(stats_of(items).to_metrics()), plain(stats_of(shuffled).to_metrics())
    assert json.dumps(one, allow_nan=False) == json.dumps(other, allow_nan=False)


@given(records, st.integers(0, 25))
def test_merged_parts_equal_the_whole(items, cut):
    left, right = stats_of(items[:cut]), stats_of(items[cut:])
    left.merge(pickle.loads(pickle.dumps(right)))
    assert plain(left.to_metrics()) == plain(stats_of(items).to_metrics())


def test_the_figures_of_many_scores_hold_them_twice_at_most():
    stats, count = ScoreStats(), 400_000
    for _ in range(count // 1000):
        stats.take_all([[PASS], [Score("exact", 0.0, False)]] * 500)
    tracemalloc.start()
    try:
        figures = stats.to_metrics()["exact"]
        assert tracemalloc.get_traced_memory()[1] < 16 * count
    finally:
        tracemalloc.stop()
    assert figures.mean == figures.pass_rate == 0.5
    assert figures.mean_ci95 == pytest.approx(figures.pass_rate_ci95)


numbers = st.lists(st.floats(-1e6, 1e6, width=32), min_size=1, max_size=60)


@given(numbers)
def test_a_measurement_has_a_mean_with_students_interval_and_its_range(values):
    scipy = pytest.importorskip("scipy.stats")
    stats = stats_of(([Score("steps", value, unit="steps", better="lower")], False) for value in values)
    found = stats.to_metrics()["steps"]
    assert (found.n, found.unit, found.better) == (len(values), "steps", "lower")
    assert found.mean == pytest.approx(np.mean(values), abs=1e-6)
    assert (found.min, found.p50, found.max) == pytest.approx((min(values), np.median(values), max(values)))
    assert (stats.unscored, stats.scoring_errors, found.pass_rate) == (len(values), 0, None)
    error = scipy.sem(values) if len(values) > 1 else 0.0
    if found.mean_ci95 is None:
        assert error <= 1e-8 * max(map(abs, values))
    else:
        expected = scipy.t.interval(0.95, len(values) - 1, np.mean(values), error)
        assert found.mean_ci95 == pytest.approx(expected, rel=1e-6, abs=1e-6 * max(map(abs, values)))


@given(st.lists(st.sampled_from(["formal", "casual", "rude"]), min_size=1, max_size=60))
def test_labels_are_counted_as_pandas_counts_them(labels):
    pandas = pytest.importorskip("pandas")
    half = len(labels) // 2
    stats = stats_of(([Score("tone", label=label), PASS], False) for label in labels[:half])
    stats.merge(stats_of(([Score("tone", label=label), PASS], False) for label in labels[half:]))
    found, counts = stats.to_metrics()["tone"], pandas.Series(labels).value_counts()
    assert found.labels == counts.to_dict()
    assert found.shares == pytest.approx((counts / len(labels)).to_dict())
    assert list(found.labels.values()) == sorted(found.labels.values(), reverse=True)
    assert found.shares_ci95 == {label: clopper_pearson(int(n), len(labels)) for label, n in counts.items()}
    assert (found.mean, found.pass_rate, stats.passed) == (None, None, len(labels))


def test_rare_labels_count_together():
    stats = stats_of(([Score("id", label=f"{number % 150:03}")], False) for number in range(450))
    found = stats.to_metrics()["id"]
    assert len(found.labels) == 101
    assert found.labels["(other)"] == 150
    assert sum(found.shares.values()) == pytest.approx(1)


def test_measurements_and_labels_beside_a_verdict_change_nothing_of_it():
    found = stats_of([([PASS, Score("steps", 7.0, unit="steps"), Score("tone", label="rude")], False)])
    assert (found.scored, found.passed, found.unscored) == (1, 1, 0)
