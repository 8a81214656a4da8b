"""Where to measure next, and when enough is known: the rules of a search for the parallelism that an endpoint sustains.

Nothing here sends a request. A search is given the latencies of blocks of requests and says what to measure next, so
that it runs the same against a server and in a simulation.

Latency, not throughput, tells where a closed loop is full. Up to there N calls at once take as long as one; beyond,
each waits its turn and ln(latency) grows as ln(N) does. The gain of a step from N₁ to N₂ is ln(N₂/N₁) less what the
mean ln(latency) grew by: all of ln(N₂/N₁) while there is room, 0 when there is none. Logarithms keep one slow answer
from deciding. "Grows" means a gain of a quarter at least, 19 % more throughput per doubling.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Sequence
from typing import Literal, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

from steelyard.stats.distributions import beta_cdf, student_quantile
from steelyard.stats.intervals import Floats, Interval, rate_lower, rate_upper

BATCHES = 5
"""Batches of a block; the spread of their means is the uncertainty of the block's mean."""
MAX_BLOCKS = 4
"""How many blocks a level is measured for at most, to settle a comparison that is open."""

_CONFIDENCE = 0.9
_GROWTH = 0.25
"""Growth is shown where the gain's lower end is above this share of what was promised."""
_FLAT = 0.5
"""There is none where the upper end is below this share."""
_MIDDLE = 0.35
"""Where it stays open, the estimate is cut here, and the result is marked undecided."""
_CLOSE = 1.3
"""Two levels nearer to each other than this factor need none in between."""
_PROPORTIONAL = 0.75
"""A step that brought this share of what was promised left no knee between its ends."""
_MAX_REQUESTS = 3_000
_MAX_TIMES = 2.0
"""Past these totals (requests, and multiples of each level's first block) no level gets another block."""


_MAX_PASSED_OVER = 3
"""How many levels in a row may say nothing of the endpoint before a search gives up."""


class Measure(msgspec.Struct, frozen=True):
    """Measure a block of `requests` requests with `level` calls in flight."""

    level: int
    requests: int


class Found(msgspec.Struct, frozen=True, kw_only=True):
    """The level to run at; None where not even the lowest can be used."""

    level: int | None
    decided: bool
    """Whether each comparison on the way was settled by its interval; else one was cut at its estimate."""
    highest: bool
    """Whether it still grew at the highest level allowed, so that the ceiling may be higher."""
    more_requests: int | None = None
    """About how many more requests would settle a comparison that was left open."""


Step: TypeAlias = Measure | Found
Flags: TypeAlias = npt.NDArray[np.bool_]
_Asks: TypeAlias = Generator[Measure, None, Found]


def block_of(level: int) -> int:
    """How many requests a block of this level has, those included that are left out while the level fills up."""
    return max(60, 10 * level)


class Gain(msgspec.Struct, frozen=True):
    """What a step between two levels brought, as the logarithm of throughput, with its standard error."""

    value: float
    error: float
    freedom: int
    promised: float
    """The logarithm of the levels' ratio: all that the step could bring."""

    @property
    def reach(self) -> float:
        """How far the one-sided 90 % ends lie from the value."""
        return student_quantile(_CONFIDENCE, self.freedom) * self.error


class LevelSearch:
    """Finds the lowest parallelism that fills an endpoint: doubles while it grows, then closes in from both sides.

    `step` says what to do. After a `Measure`, hand the block's latencies to `add`, in the order of completion, with
    what came while the level filled up: the first N are left out here. A level that broke an objective, or that this
    client could not keep up with, is reported to `reject`: nothing at or above it is recommended. Blocks may be
    handed over beforehand, as when a sweep is resumed; they are used before more are asked for.
    """

    def __init__(
        self,
        highest: int = 128,
        *,
        lowest: int = 1,
        sizes: Sequence[int] = (),
        requests: int | None = None,
        max_blocks: int = MAX_BLOCKS,
    ) -> None:
        """With `sizes` just these levels are measured and compared, with `requests` each block has that many."""
        if not 1 <= lowest <= highest:
            raise ValueError(f"1 <= lowest <= highest must hold, got {lowest} and {highest}")
        self._lowest, self._highest = lowest, highest
        self._sizes, self._block_requests, self._max_blocks = sorted(sizes), requests, max_blocks
        self._listing = False
        self._skipped: set[int] = set()
        self._levels: dict[int, _Level] = {}
        self._handed: dict[int, list[Floats]] = {}
        self._rejected: int | None = None
        self._open: list[tuple[int, int, bool, int]] = []
        """Comparisons cut at their estimate: the levels, whether taken for growth, and how many requests would tell."""
        self._requests = self._first_requests = 0
        self._search = self._compare() if self._sizes else self._run()
        self._step: Step | None = None

    @property
    def step(self) -> Step:
        """What to measure next, or what was found."""
        while self._step is None or (isinstance(self._step, Measure) and self._ready(self._step.level)):
            try:
                self._step = next(self._search)
            except StopIteration as end:
                self._step = end.value
        return self._step

    @property
    def requests(self) -> int:
        """How many requests were used so far."""
        return self._requests

    def add(self, level: int, latencies: Sequence[float] | Floats) -> None:
        """Take in a block of this level: all latencies, timeouts with their limit, in the order of completion."""
        self._handed.setdefault(level, []).append(np.asarray(latencies, dtype=np.float64))

    def reject(self, level: int) -> None:
        """Rule out this level and all above it."""
        self._rejected = level if self._rejected is None else min(level, self._rejected)

    def skip(self, level: int) -> None:
        """Leave this level out: it says nothing of the endpoint, and nothing of the levels above it."""
        self._skipped.add(level)

    def gain(self, low: int, high: int) -> Gain | None:
        """What the step between two measured levels brought; None where one has no figures."""
        below, above = self._levels.get(low), self._levels.get(high)
        if below is None or above is None or not (below.usable and above.usable):
            return None
        return gain_of(below, above)

    def _ready(self, level: int) -> bool:
        if self._handed.get(level) or level in self._skipped:
            return True
        return not self._listing and self._is_rejected(level)

    def _is_rejected(self, level: int) -> bool:
        return self._rejected is not None and level >= self._rejected

    def _block(self, level: _Level) -> Generator[Measure, None, None]:
        while not self._ready(level.size):
            yield Measure(level.size, self._block_requests or block_of(level.size))
        if self._handed.get(level.size):
            latencies = self._handed[level.size].pop(0)
            self._requests += len(latencies)
            self._first_requests += 0 if level.blocks else len(latencies)
            level.add(latencies)

    def _at(self, size: int) -> Generator[Measure, None, _Level | None]:
        """The level, measured once at least; None where it was ruled out."""
        level = self._levels.setdefault(size, _Level(size))
        if not level.blocks and not self._is_rejected(size):
            yield from self._block(level)
        return None if self._is_rejected(size) or size in self._skipped or not level.usable else level

    def _grows(self, low: _Level, high: _Level) -> Generator[Measure, None, bool]:
        """Whether the higher level brings enough more; asks for more blocks while that is open."""
        while True:
            if self._is_rejected(high.size):
                return False
            gain = gain_of(low, high)
            # One block may be flat by chance, and a search that stops too low is never put right: until both levels
            # have two, no growth must be twice as clear.
            clearly = 1 if min(low.blocks, high.blocks) >= 2 else 2
            if gain.value - gain.reach > _GROWTH * gain.promised:
                # Nor may it come from fast answers alone while slow ones get slower: the plain mean has a veto.
                plain = gain_of(low, high, of_logs=False)
                if plain.value + plain.reach >= _FLAT * plain.promised:
                    return True
                if plain.value + clearly * plain.reach < _FLAT * plain.promised:
                    return False
            elif gain.value + clearly * gain.reach < _FLAT * gain.promised:
                return False
            noisier = sorted((low, high), key=lambda level: -level.log_error)
            more = next((level for level in noisier if level.blocks < self._max_blocks), None)
            if more is None or self._requests >= max(_MAX_REQUESTS, _MAX_TIMES * self._first_requests):
                grew = gain.value > _MIDDLE * gain.promised
                self._open.append((low.size, high.size, grew, _to_settle(low, high, gain)))
                return grew
            before = more.blocks
            yield from self._block(more)
            if more.blocks == before:  # ruled out meanwhile
                return False

    def _compare(self) -> _Asks:
        """Measure the levels that were given, all of them, and climb while they grow."""
        self._listing = True
        for size in self._sizes:
            yield from self._block(self._levels.setdefault(size, _Level(size)))
        self._listing = False
        best: _Level | None = None
        for size in self._sizes:
            level = yield from self._at(size)
            if level is not None and (best is None or (yield from self._grows(best, level))):
                best = level
        if best is None:
            return Found(level=None, decided=True, highest=False)
        return self._found(best.size, highest=best.size == self._sizes[-1])

    def _may_pass_over(self, size: int, in_a_row: int) -> bool:
        """Whether doubling goes on past a level that was left out: a busy client is no better higher up."""
        return size in self._skipped and not self._is_rejected(size) and in_a_row < _MAX_PASSED_OVER

    def _run(self) -> _Asks:
        best = yield from self._at(self._lowest)
        tried, passed_over = self._lowest, 0
        below: _Level | None = None
        above: int | None = None
        while tried < self._highest and above is None:  # double
            if best is None and not self._may_pass_over(tried, passed_over):
                break
            tried = min(2 * tried, self._highest)
            after = yield from self._at(tried)
            if after is None and tried < self._highest and self._may_pass_over(tried, passed_over + 1):
                passed_over += 1  # it says nothing of the endpoint: the next may
            elif after is not None and (best is None or (yield from self._grows(best, after))):
                below, best, passed_over = best, after, 0
            else:
                above = tried
        if best is None:
            return Found(level=None, decided=True, highest=False)
        while above is not None and _apart(best.size, above):  # close in from above
            size = _between(best.size, above)
            middle = yield from self._at(size)
            if middle is not None and (yield from self._grows(best, middle)):
                below, best = best, middle
            else:
                above = size
        while below is not None and _apart(below.size, best.size):  # did the last step go past the knee?
            gain = gain_of(below, best)
            if gain.value > _PROPORTIONAL * gain.promised:
                break
            middle = yield from self._at(_between(below.size, best.size))
            if middle is None:
                break
            if (yield from self._grows(middle, best)):
                below = middle
            else:
                best = middle
        return self._found(best.size, highest=above is None)

    def _found(self, level: int, *, highest: bool) -> Found:
        """The result; undecided where an open comparison, taken the other way, would have led somewhere else."""
        if self._is_rejected(level) or level in self._skipped:
            # Ruled out after it had been measured: the highest that is left.
            usable = (size for size, one in self._levels.items() if one.usable and size not in self._skipped)
            left = [size for size in usable if not self._is_rejected(size)]
            return Found(level=max(left, default=None), decided=True, highest=False)
        more = [
            requests
            for low, high, grew, requests in self._open
            if (level == high and high / low > _CLOSE if grew else high / level > _CLOSE)
        ]
        return Found(level=level, decided=not more, highest=highest, more_requests=max(more, default=None))


class _Level:
    """The measurements of one level: batch means of log latency and of latency."""

    def __init__(self, size: int) -> None:
        self.size, self.blocks, self.requests = size, 0, 0
        self._logs: list[float] = []
        self._means: list[float] = []

    def add(self, latencies: Floats) -> None:
        self.blocks += 1
        self.requests += len(latencies)
        steady = latencies[self.size :] if len(latencies) > self.size + 2 * BATCHES else latencies
        steady = steady[steady > 0]
        if len(steady) < BATCHES:
            return
        for batch in np.array_split(steady, BATCHES):
            self._logs.append(float(np.log(batch).mean()))
            self._means.append(float(batch.mean()))

    @property
    def usable(self) -> bool:
        return len(self._logs) >= BATCHES

    @property
    def log_error(self) -> float:
        return self.log_throughput()[1]

    def log_throughput(self, of_logs: bool = True) -> tuple[float, float, int]:
        """An estimate, its standard error and degrees of freedom."""
        values = np.array(self._logs if of_logs else self._means)
        mean, error = float(values.mean()), float(values.std(ddof=1)) / math.sqrt(len(values))
        if of_logs:
            return math.log(self.size) - mean, error, len(values) - 1
        return math.log(self.size) - math.log(mean), error / mean, len(values) - 1


def gain_of(low: _Level, high: _Level, of_logs: bool = True) -> Gain:
    """What the step from one level to another brought."""
    (a, error_a, freedom_a), (b, error_b, freedom_b) = low.log_throughput(of_logs), high.log_throughput(of_logs)
    return Gain(b - a, math.hypot(error_a, error_b), freedom_a + freedom_b, math.log(high.size / low.size))


def _to_settle(low: _Level, high: _Level, gain: Gain) -> int:
    """About how many more requests would settle a comparison, if its estimate stays as it is."""
    used = low.requests + high.requests
    room = max(gain.value - _GROWTH * gain.promised, _FLAT * gain.promised - gain.value)
    return max(1, math.ceil(used * ((gain.reach / room) ** 2 - 1)))


def _apart(low: int, high: int) -> bool:
    return high - low >= 2 and high / low > _CLOSE


def _between(low: int, high: int) -> int:
    return min(max(round(math.sqrt(low * high)), low + 1), high - 1)


class Throughput(msgspec.Struct, frozen=True, kw_only=True):
    """Answers per second while a level was full, and where that lies with 95 % confidence."""

    rate: float
    ci95: Interval
    answers: int
    """How many of those that count ended in the steady state."""
    seconds: float


def steady_throughput(
    blocks: Sequence[tuple[Floats, Floats]],
    *,
    ramp: int,
    open_loop: bool = False,
    counts: Sequence[Flags | Floats] | None = None,
    batches: int = 10,
) -> Throughput | None:
    """The throughput between the ramp and the drain; None where too little is left to tell.

    Each block is given as the times at which its requests were sent and ended, in the order in which they ended. The
    first `ramp` that ended are left out, and all that ended after the last one was sent; in open loop, where answers
    follow the calls at a distance, as many at the end as at the beginning. `counts` says which answers count (goodput:
    those that keep every objective), or what each counts for (its tokens).

    In a closed loop an answer counts for the share of its time that lies between ramp and drain. By their ends alone,
    answers that come in step would count a round too many. The interval is Student's over the ends in equal stretches
    of time, as neighbouring answers are not independent.
    """
    rates: list[Floats] = []
    answers, total, seconds = 0, 0.0, 0.0
    for place, (sent, ended) in enumerate(blocks):
        if len(ended) <= ramp:
            continue
        start, until = float(ended[ramp]), float(ended[-1 - ramp] if open_loop else sent.max())
        inside = (ended > start) & (ended <= until)
        if int(inside.sum()) < 2 * batches:
            continue
        weights = np.ones(len(ended)) if counts is None else counts[place].astype(np.float64)
        edges = np.linspace(start, until, batches + 1)
        rates.append(np.histogram(ended[inside], edges, weights=weights[inside])[0] / (edges[1] - edges[0]))
        answers += int(np.count_nonzero(weights[inside]))
        total += float(weights @ (inside if open_loop else _shares(sent, ended, start, until)))
        seconds += until - start
    if not rates:
        return None
    stretches = np.concatenate(rates)
    mean = total / seconds
    reach = student_quantile(0.975, len(stretches) - 1) * float(stretches.std(ddof=1)) / math.sqrt(len(stretches))
    return Throughput(rate=mean, ci95=(max(mean - reach, 0.0), mean + reach), answers=answers, seconds=seconds)


def _shares(sent: Floats, ended: Floats, start: float, until: float) -> Floats:
    """What share of the time of each request lies between two moments; of one that took none, whether it does."""
    taken = ended - sent
    overlap = np.clip(until, sent, ended) - np.clip(start, sent, ended)
    shares = ((ended > start) & (ended <= until)).astype(np.float64)
    np.divide(overlap, taken, out=shares, where=taken > 0)
    return shares


class SloVerdict(msgspec.Struct, frozen=True, kw_only=True):
    """Whether a share of requests above an objective is small enough for its percentile."""

    outcome: Literal["kept", "broken", "cannot tell"]
    above: int
    n: int
    interval: Interval
    """Of the share above the objective, as sure as this look may be."""
    more_requests: int | None
    """About how many more would settle it, if the share stays as it is; None where it is settled or none would."""


def decide_slo(
    above: int,
    n: int,
    percent: float,
    *,
    looks: int = MAX_BLOCKS,
    alpha: float = 0.05,
    effective_n: float | None = None,
) -> SloVerdict:
    """Whether "p<percent> is within the objective" holds, when `above` of `n` requests took longer (timeouts included).

    Kept where the share above is shown to be at most 1 − percent/100 by Clopper and Pearson's one-sided bound, broken
    where it is shown to be more. A level that is looked at up to `looks` times shares alpha between them. With an
    effective n, answers that are alike because they came together count for less.
    """
    if not 0 <= above <= n:
        raise ValueError(f"above must be within 0..{n}, got {above}")
    if not 0 < percent < 100:
        raise ValueError(f"percent must be between 0 and 100, got {percent}")
    allowed, each = 1 - percent / 100, alpha / max(looks, 1)
    shrink = 1.0 if effective_n is None or not n else min(1.0, effective_n / n)
    interval = rate_lower(above * shrink, n * shrink, each), rate_upper(above * shrink, n * shrink, each)
    outcome: Literal["kept", "broken", "cannot tell"] = "cannot tell"
    if interval[1] <= allowed:
        outcome = "kept"
    elif interval[0] > allowed:
        outcome = "broken"
    more = _more_requests(above * shrink, n * shrink, allowed, each) if outcome == "cannot tell" else None
    return SloVerdict(
        outcome=outcome,
        above=above,
        n=n,
        interval=interval,
        more_requests=None if more is None else math.ceil(more / shrink),
    )


def _more_requests(above: float, n: float, allowed: float, alpha: float) -> int | None:
    """How many more requests settle it if the share above stays as it is; None where it is just what is allowed."""
    share = above / n if n else 0.0
    if abs(share - allowed) < 1e-9:
        return None

    def settled(total: float) -> bool:
        if share < allowed:
            return beta_cdf(allowed, share * total + 1, total * (1 - share)) >= 1 - alpha
        return beta_cdf(allowed, share * total, total * (1 - share) + 1) <= alpha

    low, high = n, max(2 * n, 16.0)
    while not settled(high):
        low, high = high, 2 * high
        if high > 1e9:
            return None
    while high - low > max(1.0, low * 1e-3):
        middle = (low + high) / 2
        low, high = (low, middle) if settled(middle) else (middle, high)
    return max(1, math.ceil(high - n))
