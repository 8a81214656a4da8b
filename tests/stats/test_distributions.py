"""Distribution functions against scipy's."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import special, stats

from steelyard.stats.distributions import (
    beta_cdf,
    beta_quantile,
    binomial_cdf,
    gamma_sum_below_zero,
    increasing_root,
    normal_quantile,
    student_quantile,
)

shapes = st.floats(0.3, 5_000)


@given(st.floats(0.0, 1.0), shapes, shapes)
def test_the_beta_distribution_is_scipys(x: float, a: float, b: float) -> None:
    assert beta_cdf(x, a, b) == pytest.approx(special.betainc(a, b, x), rel=1e-9, abs=1e-12)


@given(st.sampled_from([0.0005, 0.005, 0.025, 0.05, 0.5, 0.8, 0.975, 0.9995]), shapes, shapes)
def test_its_quantile_is_scipys(p: float, a: float, b: float) -> None:
    assert beta_quantile(p, a, b) == pytest.approx(special.betaincinv(a, b, p), rel=1e-9)


def test_a_beta_without_one_shape_is_at_an_end() -> None:
    assert beta_quantile(0.3, 0, 5) == 0.0
    assert beta_quantile(0.3, 5, 0) == 1.0
    assert (beta_cdf(0.5, 0, 5), beta_cdf(0.5, 5, 0), beta_cdf(0, 2, 2), beta_cdf(1, 2, 2)) == (1.0, 0.0, 0.0, 1.0)
    with pytest.raises(ValueError, match="a and b must be >= 0"):
        beta_cdf(0.5, -1, 2)
    with pytest.raises(ValueError, match=r"p must be within 0\.\.1"):
        beta_quantile(2, 1, 1)


@given(st.integers(-1, 300), st.integers(1, 300), st.floats(0.01, 0.99))
def test_the_binomial_is_scipys(k: int, n: int, p: float) -> None:
    assert binomial_cdf(k, n, p) == pytest.approx(stats.binom.cdf(k, n, p), rel=1e-9, abs=1e-13)


@pytest.mark.parametrize("freedom", [1, 2, 4.5, 8, 30, 1_000])
@pytest.mark.parametrize("p", [0.01, 0.1, 0.5, 0.9, 0.975])
def test_students_quantile_is_scipys(p: float, freedom: float) -> None:
    assert student_quantile(p, freedom) == pytest.approx(stats.t.ppf(p, freedom), rel=1e-9, abs=1e-9)


def test_the_normal_quantile_reaches_both_ends() -> None:
    assert (normal_quantile(0.0), normal_quantile(1.0)) == (-math.inf, math.inf)
    assert normal_quantile(0.975) == pytest.approx(1.959964, abs=1e-6)


@given(st.integers(1, 3_000), st.floats(0.001, 0.999), st.floats(-4, 4))
def test_two_gammas_are_a_beta(n: int, share: float, away: float) -> None:
    """Gamma(a) (1 − t) < Gamma(b) t exactly where a Beta(a, b) is below t."""
    a = max(round(n * share), 1)
    b = n - a + 1
    at = min(max(a / (n + 1) + away * math.sqrt(a * b / (n + 1) ** 3), 1e-4), 1 - 1e-4)
    found = gamma_sum_below_zero(np.array([1 - at, -at]), np.array([a, b], dtype=float))
    assert found == pytest.approx(special.betainc(a, b, at), rel=1e-6, abs=1e-9)


@pytest.mark.parametrize("seed", range(4))
def test_many_gammas_are_as_drawn(seed: int) -> None:
    rng = np.random.default_rng(seed)
    slopes, counts = rng.normal(0.15, 1, 12), rng.integers(1, 4, 12).astype(float)
    drawn = (rng.gamma(counts, size=(200_000, 12)) @ slopes < 0).mean()
    assert gamma_sum_below_zero(slopes, counts) == pytest.approx(drawn, abs=0.006)
    assert gamma_sum_below_zero(-slopes, counts) == pytest.approx(1 - gamma_sum_below_zero(slopes, counts), abs=1e-9)


def test_gammas_of_one_sign_are_certain() -> None:
    ones = np.ones(3)
    assert gamma_sum_below_zero(np.array([0.0, 1.0, 2.0]), ones) == 0.0
    assert gamma_sum_below_zero(np.array([0.0, -1.0, -2.0]), ones) == 1.0
    assert gamma_sum_below_zero(np.zeros(3), ones) == 0.0


def test_a_root_is_found_from_a_bad_guess() -> None:
    assert increasing_root(lambda x: x**3 - 0.2, 0.0, 1.0, 0.999, 100.0) == pytest.approx(0.2 ** (1 / 3), abs=1e-10)
    assert increasing_root(lambda x: x - 0.5, 0.0, 1.0, 7.0, 0.0) == pytest.approx(0.5)
