"""Distribution functions that the intervals need: the beta and its quantiles, Student's t, weighted sums of gammas."""

from __future__ import annotations

import math
from collections.abc import Callable
from statistics import NormalDist
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

Floats: TypeAlias = npt.NDArray[np.float64]

_NORMAL = NormalDist()
_TINY = 1e-300
_PRECISE = 1e-15
_MAX_TERMS = 100_000
_STEP = 0.2
_MIN_STEP = 0.01
_CHUNK = 18
_MAX_CHUNKS = 60
_BLOCK = 8_192
_NEGLIGIBLE = 1e-13
_MAX_BEND = 1.0
_ROUGHLY_ALIKE = 1e-5
"""The trapezoid rule's error is squared when its step is halved: two that agree so far make the finer one exact."""


def normal_cdf(value: float) -> float:
    """The standard normal distribution function."""
    return _NORMAL.cdf(value)


def normal_quantile(p: float) -> float:
    """The standard normal quantile; infinite at 0 and 1."""
    if p <= 0:
        return -math.inf
    return math.inf if p >= 1 else _NORMAL.inv_cdf(p)


def beta_cdf(x: float, a: float, b: float) -> float:
    """The regularised incomplete beta function I_x(a, b), by its continued fraction."""
    if a < 0 or b < 0 or (a == 0 and b == 0):
        raise ValueError(f"a and b must be >= 0 and not both 0, got {a} and {b}")
    if x <= 0:
        return 1.0 if a == 0 and x == 0 else 0.0
    if x >= 1:
        return 1.0
    if a == 0 or b == 0:  # all of the mass is at one end
        return 1.0 if a == 0 else 0.0
    front = math.exp(a * math.log(x) + b * math.log1p(-x) - log_beta(a, b))
    if x < (a + 1) / (a + b + 2):
        return min(front * _beta_fraction(x, a, b) / a, 1.0)
    return max(1.0 - front * _beta_fraction(1 - x, b, a) / b, 0.0)


def beta_quantile(p: float, a: float, b: float) -> float:
    """The x with I_x(a, b) = p: Newton's steps on a bracket that only shrinks."""
    if not 0 <= p <= 1:
        raise ValueError(f"p must be within 0..1, got {p}")
    if p in (0, 1) or a == 0 or b == 0:
        return float(p if a and b else b == 0)
    low, high = 0.0, 1.0
    x = a / (a + b)
    constant = log_beta(a, b)
    for _ in range(200):
        miss = beta_cdf(x, a, b) - p
        if miss > 0:
            high = x
        else:
            low = x
        slope = math.exp((a - 1) * math.log(x) + (b - 1) * math.log1p(-x) - constant)
        guess = x - miss / slope if slope > _TINY else math.nan
        # A step that leaves the bracket is replaced by its middle; near 0 by the geometric one.
        if not low < guess < high:
            guess = math.sqrt(low * high) if low > 0 and high / low > 4 else (low + high) / 2
        if abs(guess - x) <= 4e-16 * guess or high - low <= 4e-16 * high:
            return guess
        x = min(max(guess, 5e-324), 1 - 1e-16)
    return x


def binomial_cdf(k: int, n: int, p: float) -> float:
    """The chance of at most `k` successes in `n` tries."""
    if k < 0:
        return 0.0
    return 1.0 if k >= n else beta_cdf(1 - p, n - k, k + 1)


def student_quantile(p: float, freedom: float) -> float:
    """The quantile of Student's t."""
    if freedom <= 0:
        raise ValueError(f"freedom must be > 0, got {freedom}")
    if p < 0.5:
        return -student_quantile(1 - p, freedom)
    x = beta_quantile(2 * (1 - p), freedom / 2, 0.5)
    return math.sqrt(freedom * (1 - x) / x) if x > 0 else math.inf


def log_beta(a: float, b: float) -> float:
    """The logarithm of the beta function."""
    return math.lgamma(a) + math.lgamma(b) - math.lgamma(a + b)


def gamma_sum_below_zero(slopes: Floats, shapes: Floats) -> float:
    """The chance that a sum of `slope` × Gamma(`shape`) over independent gammas is below 0, to some 12 digits.

    This is what decides where a Dirichlet-weighted mean lies: it is below t where the sum of w × (x − t) is below 0,
    and the weights' common total does not matter. The inverse of the moment generating function is integrated along
    the vertical line through its saddle point, where it falls fastest and never turns against itself.
    """
    moving = slopes != 0
    slopes, shapes = slopes[moving], shapes[moving]
    if not len(slopes) or slopes.min() > 0:
        return 0.0
    if slopes.max() < 0:
        return 1.0
    slopes = slopes / np.abs(slopes).max()
    if float(shapes @ slopes) >= 0:
        return _lower_tail(slopes, shapes)
    return 1.0 - _lower_tail(-slopes, shapes)


def increasing_root(function: Callable[[float], float], low: float, high: float, guess: float, slope: float) -> float:
    """Where an increasing function is 0 between `low` and `high`, by secants kept in a bracket that shrinks."""
    accuracy = 1e-12 * max(abs(low), abs(high), 1e-3)
    at = guess if low < guess < high else (low + high) / 2
    previous: tuple[float, float] | None = None
    width, stalled = high - low, 0
    for _ in range(200):
        value = function(at)
        if value == 0:
            return at
        if value > 0:
            high = at
        else:
            low = at
        if previous is not None and value != previous[1]:
            slope = (value - previous[1]) / (at - previous[0])
        previous = (at, value)
        # Secants may creep along one side of the root: then the bracket is halved instead.
        stalled = 0 if high - low <= width / 2 else stalled + 1
        width = high - low if stalled == 0 else width
        after = at - value / slope if slope > 0 and stalled < 3 else math.nan
        if not low < after < high:
            after, stalled = (low + high) / 2, 0
        if abs(after - at) <= accuracy or high - low <= accuracy:
            return after
        at = after
    return at


def _beta_fraction(x: float, a: float, b: float) -> float:
    """The continued fraction of the incomplete beta function (Lentz's method)."""
    c, d = 1.0, 1.0 - (a + b) * x / (a + 1)
    d = 1.0 / (d if abs(d) > _TINY else _TINY)
    value = d
    for m in range(1, _MAX_TERMS):
        for term in (
            m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m)),
            -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1)),
        ):
            d = 1.0 + term * d
            d = 1.0 / (d if abs(d) > _TINY else _TINY)
            c = 1.0 + term / c
            c = c if abs(c) > _TINY else _TINY
            value *= c * d
        if abs(c * d - 1.0) < _PRECISE:
            break
    return value


def _lower_tail(slopes: Floats, shapes: Floats) -> float:
    """P(sum < 0) where the sum's mean is not below 0, so that the tail is the smaller one."""
    at = _saddle_point(slopes, shapes)
    ratio = slopes / (1.0 - at * slopes)
    squares = ratio * ratio
    curvature = float(shapes @ squares) + 1.0 / at**2
    width = 1.0 / math.sqrt(curvature)
    # The path of steepest descent leaves the saddle point upright and bends by its third derivative.
    bend = (float(shapes @ (squares * ratio)) - 1.0 / at**3) * 2 * width**3 / 3
    bend = min(max(bend, -_MAX_BEND), _MAX_BEND)

    def integrand(v: Floats) -> Floats:
        """What is added at each point of the path, relative to the height of the saddle point."""
        away = width * (bend * (np.cosh(v) - 1.0) + 1j * np.sinh(v))
        along = width * (bend * np.sinh(v) + 1j * np.cosh(v))
        logs = _log_products(ratio, shapes, away)
        values: Floats = (np.exp(logs) / (at + away) * along).imag
        return values

    step = _STEP
    nodes = _sum_until_negligible(integrand, step, 0.0)
    rough, fine = float(nodes[::2].sum()) * 2 * step, float(nodes.sum()) * step
    while abs(fine - rough) > _ROUGHLY_ALIKE * abs(fine) and step > _MIN_STEP:
        between = _sum_until_negligible(integrand, step, step / 2)
        rough, fine = fine, (fine + float(between.sum()) * step) / 2
        step /= 2
    height = math.exp(-float(shapes @ np.log1p(-at * slopes)))
    return min(max(-height * fine / math.pi, 0.0), 1.0)


def _sum_until_negligible(integrand: Callable[[Floats], Floats], step: float, start: float) -> Floats:
    """The integrand at steps from `start` on until it has died away; at 0 half of it, for the half that is mirrored."""
    parts: list[Floats] = []
    largest = 0.0
    for chunk in range(_MAX_CHUNKS):
        values = integrand(start + step * np.arange(chunk * _CHUNK, (chunk + 1) * _CHUNK, dtype=np.float64))
        if chunk == 0 and start == 0:
            values[0] /= 2
        parts.append(values)
        largest = max(largest, float(np.abs(values).max()))
        if np.abs(values[-4:]).max() <= _NEGLIGIBLE * largest:
            break
    return np.concatenate(parts)


def _log_products(ratio: Floats, shapes: Floats, away: npt.NDArray[np.complex128]) -> npt.NDArray[np.complex128]:
    """The logarithm of the generating function at points of the path; a block of gammas at a time."""
    logs = np.zeros(len(away), dtype=np.complex128)
    for start in range(0, len(ratio), _BLOCK):
        block = slice(start, start + _BLOCK)
        real = 1.0 - np.multiply.outer(ratio[block], away.real)
        imaginary = np.multiply.outer(-ratio[block], away.imag)
        logs.imag -= shapes[block] @ np.arctan2(imaginary, real)
        logs.real -= shapes[block] @ np.log(real * real + imaginary * imaginary) / 2
    return logs


def _saddle_point(slopes: Floats, shapes: Floats) -> float:
    """Where K(s) − log(−s) is least for s between 1 / (the least slope) and 0, roughly: only speed depends on it."""
    low, high = 1.0 / float(slopes.min()), 0.0
    at = low / 2
    for _ in range(60):
        ratio = slopes / (1.0 - at * slopes)
        steepness = float(shapes @ ratio) - 1.0 / at
        curvature = float(shapes @ ratio**2) + 1.0 / at**2
        if steepness > 0:
            high = at
        else:
            low = at
        after = at - steepness / curvature
        if not low < after < high:
            after = (low + high) / 2
        if abs(after - at) < 1e-3 * abs(at):
            return after
        at = after
    return at
