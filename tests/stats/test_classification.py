"""Label metrics against scikit-learn, and how often their intervals hold the truth."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from steelyard.stats.classification import MAX_LABELS, Predictions, majority_share
from steelyard.stats.intervals import clopper_pearson

sklearn = pytest.importorskip("sklearn.metrics")

pairs = st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from("abcxy")), min_size=1, max_size=60)


def figures(observed, labels=None, clusters=None):
    predictions = Predictions(labels)
    for number, (truth, predicted) in enumerate(observed):
        predictions.add(truth, predicted, number if clusters is None else clusters[number])
    return predictions.to_figures()


@given(pairs, st.booleans())
def test_figures_are_those_of_scikit_learn(observed, named):
    truths, predicted = [one for one, _ in observed], [one for _, one in observed]
    labels = ["a", "b"] if named else sorted(set(truths))
    found = figures(observed, labels if named else None)
    if not named:
        assert found["accuracy"].value == pytest.approx(sklearn.accuracy_score(truths, predicted))
    for average in ("macro", "micro", "weighted"):
        if average == "weighted" and not any(truth in labels for truth in truths):
            continue
        expected = sklearn.precision_recall_fscore_support(
            truths, predicted, labels=labels, average=average, zero_division=0
        )[:3]
        got = [found[f"{kind}.{average}"].value or 0.0 for kind in ("precision", "recall", "f1")]
        assert got == pytest.approx(expected)
    for kind, values in zip(
        ("precision", "recall", "f1"),
        sklearn.precision_recall_fscore_support(truths, predicted, labels=labels, zero_division=0)[:3],
        strict=True,
    ):
        assert [found[f"label.{label}.{kind}"].value or 0.0 for label in labels] == pytest.approx(values)
    for one in found.values():
        if one.ci95 is not None:
            assert one.ci95[0] - 1e-9 <= one.value <= one.ci95[1] + 1e-9


def test_intervals_of_a_label_are_exact():
    found = figures([("a", "a")] * 8 + [("a", "b")] * 2 + [("b", "a")] * 1)
    assert found["label.a.recall"].ci95 == clopper_pearson(8, 10)
    assert found["label.a.precision"].ci95 == clopper_pearson(8, 9)
    low, high = clopper_pearson(8, 11)
    assert found["label.a.f1"].value == pytest.approx(2 * 8 / (2 * 8 + 2 + 1))
    assert found["label.a.f1"].ci95 == pytest.approx((2 * low / (1 + low), 2 * high / (1 + high)))
    assert found["label.b.precision"].n == 2


def test_a_perfect_run_has_intervals_that_are_not_points():
    found = figures([("a", "a")] * 20 + [("b", "b")] * 20)
    assert found["f1.macro"].value == 1.0
    assert found["f1.macro"].ci95[0] < 0.95


def test_repeated_predictions_widen_the_intervals():
    once = figures([("a", "a"), ("b", "a"), ("a", "b"), ("b", "b")] * 10)
    again = figures(
        [pair for pair in [("a", "a"), ("b", "a"), ("a", "b"), ("b", "b")] * 10 for _ in range(5)],
        clusters=[number for number in range(40) for _ in range(5)],
    )
    for name in ("accuracy", "label.a.f1", "f1.macro"):
        assert again[name].value == pytest.approx(once[name].value)
        assert again[name].ci95 == pytest.approx(once[name].ci95, abs=0.02)


@pytest.mark.parametrize(("truth", "right"), [([0.5, 0.3, 0.2], 0.8), ([0.34, 0.33, 0.33], 0.6), ([0.9, 0.1], 0.95)])
def test_intervals_of_means_over_labels_hold_the_truth(truth, right):
    """500 draws of 120 answers: the true macro F1 is in the interval about 95 times in 100, or more."""
    rng, labels = np.random.default_rng(5), "abc"[: len(truth)]
    wrong = (1 - right) / (len(truth) - 1)
    table = np.array([[p * (right if i == j else wrong) for j in range(len(truth))] for i, p in enumerate(truth)])
    hits, rows, columns = table.diagonal(), table.sum(axis=1), table.sum(axis=0)
    macro = float(np.mean(2 * hits / (rows + columns)))
    held = 0
    cells = [(a, b) for a in labels for b in labels]
    for _ in range(500):
        drawn = rng.multinomial(120, table.ravel())
        found = figures([cell for cell, count in zip(cells, drawn, strict=True) for _ in range(count)])["f1.macro"]
        low, high = found.ci95
        held += low <= macro <= high
    assert held / 500 >= 0.95 - 3 * math.sqrt(0.95 * 0.05 / 500)


def test_more_true_labels_than_can_be_told_apart_are_refused():
    with pytest.raises(ValueError, match="more than 100 true labels"):
        figures([(str(number), "x") for number in range(MAX_LABELS + 1)])


@pytest.mark.parametrize(
    ("answers", "passed", "share"),
    [("aab", [1, 1, 0], 1.0), ("abb", [1, 0, 0], 0.0), ("ab", [1, 0], 0.5), ("aabbc", [1, 1, 0, 0, 1], 0.5)],
)
def test_the_majority(answers, passed, share):
    assert majority_share(answers, [bool(one) for one in passed]) == share
