"""Agreement against scipy's figures, on random data with many ties; exact at the edges; the same in any order."""

from __future__ import annotations

import itertools
import math
import tracemalloc
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from scipy import stats as scipy_stats

from steelyard.stats.agreement import cohen_kappa, confusion, labels_needed, spearman, spearman_interval

few_values = st.sampled_from([0.0, 0.25, 0.5, 1.0, -3.0])
tied_pairs = st.lists(st.tuples(few_values, few_values | st.floats(-10, 10)), min_size=2, max_size=60)


def raters(seed, n, levels):
    """Two raters who mostly agree, on a scale of so many levels."""
    rng = np.random.default_rng(seed)
    truth = rng.random(n)
    return [np.round(np.clip(truth + rng.normal(0, 0.15, n), 0, 1) * levels) / levels for _ in range(2)]


def reference_kappa(a, b):
    """Kappa by its definition, label by label, in exact fractions."""
    n = len(a)
    observed = Fraction(sum(x == y for x, y in zip(a, b, strict=True)), n)
    labels = set(a) | set(b)
    expected = sum(Fraction(list(a).count(label), n) * Fraction(list(b).count(label), n) for label in labels)
    return None if expected == 1 else float((observed - expected) / (1 - expected))


@given(tied_pairs)
def test_spearman_is_scipys(pairs):
    x, y = zip(*pairs, strict=True)
    assume(len(set(x)) > 1 and len(set(y)) > 1)
    assert spearman(x, y) == pytest.approx(scipy_stats.spearmanr(x, y).statistic, abs=1e-12)


@pytest.mark.parametrize("levels", [1, 2, 5, 10_000])
def test_spearman_is_scipys_on_larger_data(levels):
    x, y = raters(4, 3000, levels)
    assert spearman(x, y) == pytest.approx(scipy_stats.spearmanr(x, y).statistic, abs=1e-12)


@pytest.mark.parametrize(("x", "y"), [([], []), ([1], [2]), ([1, 1, 1], [1, 2, 3]), ([1, 2, 3], [0, 0.0, -0.0])])
def test_spearman_is_none_where_it_is_undefined(x, y):
    assert spearman(x, y) is None
    assert spearman_interval(x, y) is None


def test_spearman_is_exact_where_the_order_is():
    x = [0.1, 0.2, 0.2, 5]
    assert spearman(x, [one**3 for one in x]) == 1.0
    assert spearman([1, 2, math.inf], [3, 2, -math.inf]) == -1.0
    assert spearman([True, False], [1, 0]) == 1.0


@pytest.mark.parametrize("call", [spearman, spearman_interval])
def test_pairs_that_are_none_are_refused(call):
    with pytest.raises(ValueError, match="as long as each other, got 2 and 3"):
        call([1, 2], [1, 2, 3])
    with pytest.raises(ValueError, match="must not hold NaN, got one at 1"):
        call([1, 2, 3], [1, math.nan, 3])


@pytest.mark.parametrize(("n", "levels"), [(25, 4), (60, 1000), (200, 2), (400, 10)])
def test_the_interval_is_near_scipys_bootstrap(n, levels):
    x, y = raters(n, n, levels)
    expected = scipy_stats.bootstrap(
        (x, y),
        lambda a, b: scipy_stats.spearmanr(a, b).statistic,
        paired=True,
        vectorized=False,
        n_resamples=1500,
        method="percentile",
        rng=np.random.default_rng(1),
    ).confidence_interval
    width = expected.high - expected.low
    assert spearman_interval(x, y, resamples=4000) == pytest.approx((expected.low, expected.high), abs=0.15 * width)


@given(tied_pairs, st.randoms(use_true_random=False))
def test_the_order_of_the_pairs_changes_no_bit(pairs, rng):
    shuffled = list(pairs)
    rng.shuffle(shuffled)
    one, other = (spearman_interval(*zip(*some, strict=True), resamples=40) for some in (pairs, shuffled))
    assert one == other
    assert spearman(*zip(*pairs, strict=True)) == spearman(*zip(*shuffled, strict=True))
    assert one is None or -1 <= one[0] <= one[1] <= 1


def test_resamples_without_a_rho_are_left_out():
    """With one odd pair in ten, a third of the resamples miss it and have no rho; none of those may turn into a 0."""
    x = y = [0.0] * 9 + [1.0]
    assert spearman_interval(x, y) == (1.0, 1.0)
    assert spearman_interval([0, 1], [0, 1], resamples=1, seed=2) in (None, (1.0, 1.0))


def test_a_seed_repeats_and_another_differs():
    x, y = raters(1, 50, 10)
    assert spearman_interval(x, y, seed=3) == spearman_interval(x, y, seed=3) != spearman_interval(x, y, seed=4)


def test_the_size_of_a_block_changes_nothing(monkeypatch):
    x, y = raters(2, 40, 10)
    whole = spearman_interval(x, y, resamples=100)
    monkeypatch.setattr("steelyard.stats.agreement._BLOCK_CELLS", 90)
    assert spearman_interval(x, y, resamples=100) == whole


def test_memory_is_bounded_whatever_the_number_of_resamples():
    x, y = raters(3, 2000, 10_000)
    tracemalloc.start()
    spearman_interval(x, y, resamples=1000)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 60e6


def test_a_higher_confidence_is_wider():
    x, y = raters(6, 60, 10)
    low, high = spearman_interval(x, y, confidence=0.99)
    inner_low, inner_high = spearman_interval(x, y, confidence=0.8)
    assert low < inner_low < spearman(x, y) < inner_high < high


@pytest.mark.parametrize("confidence", [0, 1, 95])
def test_a_confidence_outside_0_to_1_is_refused(confidence):
    with pytest.raises(ValueError, match=f"confidence must be between 0 and 1, got {confidence}"):
        spearman_interval([1, 2], [1, 2], confidence)
    with pytest.raises(ValueError, match=f"confidence must be between 0 and 1, got {confidence}"):
        labels_needed(0.9, 10, confidence=confidence)


def test_without_resamples_there_is_no_bootstrap():
    with pytest.raises(ValueError, match="resamples must be >= 1, got 0"):
        spearman_interval([1, 2], [1, 2], resamples=0)


@given(st.integers(1, 5).flatmap(lambda k: st.lists(st.tuples(st.integers(0, k), st.integers(0, k)), min_size=1)))
def test_kappa_is_its_definition(pairs):
    a, b = zip(*pairs, strict=True)
    expected = reference_kappa(a, b)
    assert cohen_kappa(a, b) == (None if expected is None else pytest.approx(expected, abs=1e-12))


def test_kappa_of_cohens_own_kind_of_table():
    """Values as statsmodels 0.15 and scikit-learn give them for the same tables."""
    binary = [(1, 1)] * 20 + [(1, 0)] * 5 + [(0, 1)] * 10 + [(0, 0)] * 15
    assert cohen_kappa(*zip(*binary, strict=True)) == pytest.approx(0.4)
    three = [("a", "a")] * 44 + [("a", "b")] * 5 + [("a", "c")] * 1 + [("b", "a")] * 7 + [("b", "b")] * 20
    three += [("b", "c")] * 3 + [("c", "a")] * 9 + [("c", "b")] * 5 + [("c", "c")] * 6
    assert cohen_kappa(*zip(*three, strict=True)) == pytest.approx(0.4915254237288136, abs=1e-12)


def test_kappa_at_its_edges():
    assert cohen_kappa([True, False, True], [True, False, True]) == 1.0
    assert cohen_kappa([0, 1], [1, 0]) == -1.0
    assert cohen_kappa([0, 0, 1, 1], [0, 1, 0, 1]) == 0.0
    assert cohen_kappa(["yes"] * 3, ["no"] * 3) == 0.0
    assert cohen_kappa([], []) is None
    assert cohen_kappa(["yes"] * 3, ["yes"] * 3) is None


def test_the_table_has_the_first_rater_in_its_rows():
    table = confusion([True, True, False, True], [True, False, False, False])
    assert table.labels == (False, True)
    assert table.counts == ((1, 0), (2, 1))
    assert table.n == 4


def test_labels_that_have_no_order_are_put_in_one():
    tables = {confusion(labels, ["x", None, 3]) for labels in itertools.permutations(["x", None, 3])}
    assert {table.labels for table in tables} == {(None, 3, "x")}


@pytest.mark.parametrize("call", [confusion, cohen_kappa])
def test_raters_must_have_labelled_the_same_cases(call):
    with pytest.raises(ValueError, match="got 1 and 2 labels"):
        call([1], [1, 2])


def lower_end(rho, n, confidence=0.95):
    """Fisher's z interval for Spearman's rho, with the variance of Bonett and Wright."""
    reach = scipy_stats.norm.ppf((1 + confidence) / 2) * math.sqrt((1 + rho**2 / 2) / (n - 3))
    return math.tanh(math.atanh(rho) - reach)


@pytest.mark.parametrize("confidence", [0.8, 0.95, 0.99])
@pytest.mark.parametrize("rho", [0.71, 0.75, 0.8, 0.85, 0.95, 0.999])
def test_the_labels_needed_are_the_fewest_that_lift_the_lower_end(rho, confidence):
    total = labels_needed(rho, 0, confidence=confidence)
    assert lower_end(rho, total, confidence) > 0.70
    assert total == 4 or lower_end(rho, total - 1, confidence) <= 0.70
    assert labels_needed(rho, total - 1, confidence=confidence) == 1
    assert labels_needed(rho, total, confidence=confidence) == labels_needed(rho, 10**6, confidence=confidence) == 0


@pytest.mark.parametrize("rho", [-1, 0, 0.5, 0.70])
def test_no_number_of_labels_lifts_a_rho_that_is_too_low_itself(rho):
    assert labels_needed(rho, 100) is None


def test_a_perfect_rho_needs_the_four_labels_without_which_there_is_no_interval():
    assert labels_needed(1.0, 0) == 4
    assert labels_needed(1.0, 3) == 1


def test_the_estimate_agrees_with_the_bootstrap_on_plain_data():
    """Near the number that is asked for, the bootstrap's lower end is near the wanted one."""
    rng = np.random.default_rng(0)
    rho = 0.8
    n = labels_needed(rho, 0)
    lows = []
    for _ in range(30):
        x = rng.normal(size=n)
        y = 0.816 * x + math.sqrt(1 - 0.816**2) * rng.normal(size=n)  # a correlation of .816 has a rho of .80
        lows.append(spearman_interval(x, y, resamples=300)[0])
    assert np.mean(lows) == pytest.approx(0.70, abs=0.04)


@pytest.mark.parametrize(
    ("arguments", "message"), [((1.1, 5), "rho must be within"), ((0.9, -1), "n must be >= 0, got -1")]
)
def test_impossible_arguments_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        labels_needed(*arguments)
