"""The curves of a run: latency histograms, what happened when, tokens. Made from a few numbers kept of each record."""

from __future__ import annotations

import math
from array import array
from typing import Any

import numpy as np
import numpy.typing as npt

from steelyard.records import Record
from steelyard.report.records import STATES, state_of

Values = npt.NDArray[np.float64]

_BINS = 44
_SPREAD_FOR_LOG = 12.0
"""How many times the 1st percentile the 99th must be for a logarithmic scale to read better."""
_TIME_BINS = 60
_MAX_POINTS = 1_500
_ERROR = STATES.index("error")


class Curves:
    """Takes in records, keeps about 40 bytes of each, and draws up what the page's charts show."""

    def __init__(self) -> None:
        self._first, self._last, self._at = array("d"), array("d"), array("d")
        self._output = array("d")
        self._states = bytearray()
        self._measured = bytearray()
        self.cached_input = 0
        self.reasoning = 0

    def add(self, record: Record) -> None:
        """Take in one record. What came from the cache was not measured now and is only counted."""
        ok = record.status == "ok"
        self._states.append(STATES.index(state_of(record)))
        self._measured.append(ok and not record.cached)
        self._first.append(_number(record.time_to_first_token))
        self._last.append(_number(record.time_to_last_token if ok else record.elapsed))
        self._output.append(_number(record.num_tokens_output))
        self._at.append(_number(record.run_time))
        if ok and not record.cached:
            self.cached_input += record.num_tokens_input_cached or 0
            self.reasoning += record.num_tokens_output_reasoning or 0

    def to_page(self) -> dict[str, Any]:
        """All charts, JSON-able; None for one that has nothing to show."""
        measured = np.frombuffer(self._measured, dtype=np.uint8).astype(bool)
        states = np.frombuffer(self._states, dtype=np.uint8)
        first, last, at, output = (np.asarray(one) for one in (self._first, self._last, self._at, self._output))
        drawn = charts(first, last, output, at, states, measured)
        return {**drawn, "cached_input": self.cached_input, "reasoning": self.reasoning}


_LAST_WITH_HALVES = 2.0**52


def charts(
    first: Values,
    last: Values,
    output: Values,
    at: Values,
    states: npt.NDArray[np.uint8],
    measured: npt.NDArray[np.bool_],
) -> dict[str, Any]:
    """The charts of a run, from columns in case order; None for one that has nothing to show."""
    return {
        "first": histogram(first[measured]),
        "last": histogram(last[measured]),
        "output": histogram(output[measured]),
        "over_time": over_time(at, states),
        "points": points(at, last, states, measured | (states == _ERROR)),
    }


def histogram(values: Values) -> dict[str, Any] | None:
    """Counts between edges, evenly spaced in the value or, where it spans orders of magnitude, in its logarithm."""
    values = values[np.isfinite(values)]
    if len(values) < 2:
        return None
    low, high = float(values.min()), float(values.max())
    near, far = (float(one) for one in np.percentile(values, [1, 99]))
    # Beyond that a float has no room for the halves between two whole numbers.
    whole = bool((values == np.round(values)).all()) and high < _LAST_WITH_HALVES
    log = not whole and near > 0 and far / near > _SPREAD_FOR_LOG
    edges = _edges(low, high, near if log else None, whole)
    counts, _ = np.histogram(np.clip(values, edges[0], edges[-1]), bins=edges)
    p50, p90, p99 = np.percentile(values, [50, 90, 99])
    return {
        "edges": [_short(edge) for edge in edges],
        "counts": counts.tolist(),
        "log": log,
        "whole": whole,
        "n": len(values),
        "p50": _short(p50),
        "p90": _short(p90),
        "p99": _short(p99),
    }


def _edges(low: float, high: float, log_from: float | None, whole: bool) -> Values:
    if whole:  # a bar for each number, or for as many as make few enough bars: none of them falls between two
        width = math.ceil((high - low + 1) / _BINS)
        return np.arange(low - 0.5, high + width, width)
    if low == high:
        low, high = low * 0.9, high * 1.1
    if log_from is not None:
        return np.geomspace(max(low, log_from / 10), high, _BINS + 1)
    return np.linspace(low, high, _BINS + 1)


def over_time(at: Values, states: npt.NDArray[np.uint8]) -> dict[str, Any] | None:
    """How many records finished in each stretch of the run, and how many of them were errors."""
    known = np.isfinite(at)
    end = float(at[known].max()) if known.any() else 0.0
    if known.sum() < 2 or end <= 0:
        return None
    bins = int(min(_TIME_BINS, max(8, math.sqrt(known.sum()) * 2)))
    edges = np.linspace(0, end, bins + 1)
    errors = states[known] == _ERROR
    finished, _ = np.histogram(at[known], bins=edges)
    failed, _ = np.histogram(at[known][errors], bins=edges)
    return {"width": end / bins, "finished": finished.tolist(), "errors": failed.tolist()}


def points(
    at: Values, last: Values, states: npt.NDArray[np.uint8], shown: npt.NDArray[np.bool_]
) -> dict[str, Any] | None:
    """When each record finished and how long it took, thinned evenly, with the position of each among the records."""
    places = np.flatnonzero(shown & np.isfinite(at) & np.isfinite(last))
    if len(places) < 2:
        return None
    if len(places) > _MAX_POINTS:
        places = places[np.linspace(0, len(places) - 1, _MAX_POINTS).astype(np.int64)]
    return {
        "at": [_short(one) for one in at[places]],
        "last": [_short(one) for one in last[places]],
        "state": states[places].tolist(),
        "record": places.tolist(),
        "of": int(shown.sum()),
    }


def _number(value: float | None) -> float:
    return math.nan if value is None else value


def _short(value: float) -> float:
    return float(f"{value:.5g}")
