"""Whether more calls at once brought more answers a second, as far as latencies can tell."""

from __future__ import annotations

import math


class Sample:
    """The answers at one level: how many, and mean and spread of the logarithms of their latencies."""

    __slots__ = ("_beside", "_squares", "allowed", "answers", "confirmed", "judged", "mean", "most_in_use")

    def __init__(self) -> None:
        self.answers = 0
        self.mean = 0.0
        self.most_in_use = 0
        self.allowed = 0
        """How many calls were allowed, when a cut was made for what this sample shows."""
        self.confirmed = False
        """Whether an earlier cut for latency had proved right by then."""
        self.judged = False
        self._squares = 0.0
        self._beside = 0

    def add(self, latency: float, beside: int) -> None:
        """Take in an answer that was sent when so many calls were on the wire."""
        self.answers += 1
        logarithm = math.log(latency)
        off = logarithm - self.mean
        self.mean += off / self.answers
        self._squares += off * (logarithm - self.mean)
        self._beside += beside
        self.most_in_use = max(self.most_in_use, beside)

    @property
    def level(self) -> float:
        """How many calls were on the wire, on average."""
        return self._beside / self.answers

    def variance_with(self, other: Sample) -> float:
        """Of the logarithms, in both samples together; without end when there are too few to tell."""
        freedom = self.answers + other.answers - 2
        return (self._squares + other._squares) / freedom if freedom >= 4 else math.inf


def throughput_gain(lower: Sample, higher: Sample) -> tuple[float, float]:
    """The power of the parallelism with which throughput grew from the lower level to the higher, and its error.

    1 when twice as many calls bring twice as many answers, 0 when they only wait twice as long. By Little's law
    answers a second are calls on the wire over their latency, so that latencies tell, and no clock runs through the
    gaps in which nothing was sent.
    """
    growth = math.log(higher.level / lower.level)
    if growth <= 0:
        return 1.0, math.inf
    error = math.sqrt(lower.variance_with(higher) * (1 / lower.answers + 1 / higher.answers))
    return 1 - (higher.mean - lower.mean) / growth, error / growth
