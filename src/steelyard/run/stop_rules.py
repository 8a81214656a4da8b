"""When to stop a run early: every first call fails for one lasting reason, too many calls fail, or it is decided."""

from __future__ import annotations

import hashlib
import math
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import msgspec
import numpy as np

from steelyard.errors import ConfigurationError
from steelyard.journal.reader import iter_records
from steelyard.protocols import InFlight
from steelyard.records import Job, Record, verdict
from steelyard.run.options import RunOptions
from steelyard.run.plan import Plan
from steelyard.stats.formatting import counted
from steelyard.stats.metrics import DecidedMetrics, DecidedRule
from steelyard.stats.rules import (
    BaselineRule,
    Decision,
    Rule,
    SuiteRateRule,
    ThresholdRule,
    decide_at_the_end,
    passes_needed,
    read_rule,
)
from steelyard.stats.running import RunningStats
from steelyard.transport import errors

_LASTING_STATUSES = frozenset({401, 402, 403, 404, 405})
"""A wrong key, an unpaid bill, a model or a path that does not exist."""
_BAD_REQUEST_STATUSES = frozenset({400, 422})
"""Often the fault of one case; of all cases where the endpoint words it the same each time: a wrong model, a wrong
option."""
_VARYING = re.compile(r"[0-9a-f-]{8,}|\d+", re.IGNORECASE)
"""What differs between two messages of one fault: request ids, numbers."""
_NO_CONNECTION = frozenset(
    kind.__name__
    for kind in (
        errors.CannotConnect,
        errors.CannotResolve,
        errors.CertificateRefused,
        errors.ProxyFailed,
        errors.ProxyRefused,
        errors.TimedOut,
        errors.TlsFailed,
        ConnectionRefusedError,
    )
)
_UNREACHED = "no connection"
_BAD_REQUEST = "bad request"
_WAIT_FACTOR = 10
"""How many times the limit may fail while an older call could still be answered."""
_MIN_REQUESTS = 50
"""Before this many, an error rate says too little to stop a run."""
_RISING, _FALLING = ("pass_rate", "pass_rate_all"), ("error_rate", "failure_rate")
_ALPHA = 0.05
_ALPHA_WHOLE, _ALPHA_PARTIAL = 0.04, 0.01
"""Of 5 %: what the exact rule may use, and what is left where a case brings no verdict and the exact one is dropped."""
_PENDING, _ERROR, _UNSCORED, _FAILED, _PASSED = range(5)


class StopRules:
    """Checks each record of a run as it comes, and cancels the run when a rule says so."""

    def __init__(self, options: RunOptions, in_flight: Callable[[], InFlight], cancel: Callable[[str], None]) -> None:
        self._first = FirstErrors(options.stop_first_errors)
        self._max_error_rate = options.stop_error_rate
        self._in_flight = in_flight
        self._cancel = cancel

    def check(self, record: Record, stats: RunningStats) -> bool:
        """Take one more record into account; False when no later record could stop the run."""
        if not self._first.is_over:
            now = time.monotonic()  # before the age is asked for: a pause in between must not make the call seem later
            reason = self._first.take(record, now - self._in_flight().oldest_seconds)
            if reason is not None:
                self._cancel(reason)
        if self._max_error_rate is None:
            return not self._first.is_over
        self._stop_above(self._max_error_rate, stats)
        return True

    def _stop_above(self, limit: float, stats: RunningStats) -> None:
        if stats.total_requests >= _MIN_REQUESTS:
            rate = stats.failed_requests / stats.total_requests
            if rate > limit:
                self._cancel(f"error rate {rate:.1%} is above stop_error_rate {limit:.1%}")


class FirstErrors:
    """Detects that the first `limit` calls of a launch all failed for one lasting reason; 0 switches it off.

    Each attempt of a case counts. The first answer, or an error of another kind, shows that the endpoint works: from
    then on a case that fails fails alone. Bad requests (400, 422) count only while their messages are the same, too.
    A refusal comes sooner than an answer: while a call is in flight that was
    sent before the first of them failed, it is waited for, until ten times as many have failed.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._calls = self._cases = 0
        self._reason = ""
        self._since = math.inf
        """When the first of them failed."""
        self.is_over = limit == 0
        """Whether no later record can change the outcome."""

    def take(self, record: Record, oldest: float = math.inf) -> str | None:
        """Return why the run should stop, if it should; `oldest` is when the oldest call in flight was sent."""
        if self.is_over or record.cached:  # an answer from the cache says nothing about the endpoint
            return None
        reason = _lasting_reason(record)
        if reason is None:
            self.is_over = True
            return None
        if reason != self._reason:
            if self._reason and _BAD_REQUEST in (reason[: len(_BAD_REQUEST)], self._reason[: len(_BAD_REQUEST)]):
                self.is_over = True  # refused in another way than the calls before: each request is looked at
                return None
            self._calls = self._cases = 0
            self._reason, self._since = reason, time.monotonic()
        self._calls, self._cases = self._calls + record.attempts, self._cases + 1
        if self._calls < self._limit or (oldest < self._since and self._calls < _WAIT_FACTOR * self._limit):
            return None
        self.is_over = True
        found = "nothing answers there" if reason == _UNREACHED else "every call is refused"
        retries = ", retries included," if self._calls > self._cases else ""
        calls = f"the first {counted(self._calls, 'call')}{retries} all failed"
        return f"{found}: {calls}, the last with {record.error} (stop_first_errors)"


def _lasting_reason(record: Record) -> str | None:
    """Name the fault that the next call would meet as well; None for an answer or a fault of this case alone."""
    if record.status == "ok":
        return None
    if record.error_type in _NO_CONNECTION:
        return _UNREACHED
    if record.http_status in _BAD_REQUEST_STATUSES:
        return f"{_BAD_REQUEST} {record.http_status}: {_VARYING.sub('#', record.error or '')}"
    return f"HTTP {record.http_status}" if record.http_status in _LASTING_STATUSES else None


class Unit(msgspec.Struct, frozen=True):
    """What the records of a group, or of a single case, came to."""

    size: int
    passed: int
    scored: int
    failures: int
    """Records without an answer, or without a verdict."""
    errors: int


class RateRule:
    """A rule on a share of the suite, such as `pass_rate>=90%`, decided as units come in."""

    def __init__(self, rule: Rule, sizes: Sequence[int]) -> None:
        self.rule = rule
        rising = rule.name in _RISING
        allowed = (">=", ">") if rising else ("<=", "<")
        if rule.name not in (*_RISING, *_FALLING) or rule.operator not in allowed:
            raise ConfigurationError(
                f"stop_when: decided cannot settle {rule.text!r} before the end: it settles rules such as "
                "pass_rate>=90%, pass_rate_all>=90%, error_rate<=5% and failure_rate<=5%"
            )
        threshold = rule.limit if rising else 1 - rule.limit
        strict = rule.operator in (">", "<")
        self._exact: ThresholdRule | None = None
        if max(sizes) == 1:
            needed = passes_needed(threshold, len(sizes), strict=strict)
            alpha = _ALPHA if self._is_of_all else _ALPHA_WHOLE
            self._exact = ThresholdRule(len(sizes), needed, alpha=alpha)
        alpha = _ALPHA if self._exact is None else _ALPHA_PARTIAL
        self._rate = SuiteRateRule(threshold, list(sizes), strict=strict, alpha=alpha)
        self.decision: Decision | None = self._exact.decision if self._exact is not None else self._rate.decision

    @property
    def _is_of_all(self) -> bool:
        """Whether every record counts, so that each case is for or against it."""
        return self.rule.name != "pass_rate"

    def update(self, unit: Unit) -> None:
        """Count in the next unit of the order; what comes after a decision changes nothing."""
        if self.decision is not None:
            return
        good, count = self._counts(unit)
        self._rate.update(good, count, unit.size)
        if self._exact is not None and count == unit.size:
            self.decision = self._exact.update(bool(good))
            return
        self._exact = None  # a case without a verdict: how many there will be to judge is no longer known
        self.decision = self._rate.decision

    def _counts(self, unit: Unit) -> tuple[int, int]:
        match self.rule.name:
            case "pass_rate":
                return unit.passed, unit.scored
            case "pass_rate_all":
                return unit.passed, unit.size
            case "error_rate":
                return unit.size - unit.errors, unit.size
            case _:
                return unit.size - unit.failures, unit.size

    def finish(self) -> Decision | None:
        return self.decision


class RegressionRule:
    """Whether a drop of the pass rate by more than a margin against a baseline run is ruled out, or shown."""

    def __init__(self, margin: float, baseline: Mapping[str, float], ids: Sequence[Sequence[str]], label: str) -> None:
        self.text = f"pass_rate not worse than {label} by more than {margin:g}"
        self._baseline, self._ids = baseline, ids
        paired = [sum(case in baseline for case in unit) for unit in ids]
        if not any(paired):
            raise ConfigurationError(f"stop_when: decided: no case of this suite has a verdict in the baseline {label}")
        self._rule = BaselineRule(margin, largest_group=max(paired))
        self._margin = margin
        self._differences: list[float] = []
        self._groups: list[int] = []
        self.decision: Decision | None = None

    def update(self, place: int, rates: Mapping[str, float]) -> None:
        """Count in the next unit: the pass rate of each of its cases that has one."""
        both = [
            rates[case] - self._baseline[case] for case in self._ids[place] if case in rates and case in self._baseline
        ]
        if not both:
            return
        self._differences += both
        self._groups += [place] * len(both)
        if self.decision is None:
            self.decision = self._rule.update(float(np.mean(both)), len(both))

    def finish(self) -> Decision | None:
        """The verdict; where nothing was settled early, that of all cases by the bound for the end."""
        if self.decision is None and self._differences:
            found = decide_at_the_end(self._differences, self._margin, self._groups, plan=False)
            if found is not None and found.outcome != "cannot tell":
                return "pass" if found.outcome == "kept" else "fail"
        return self.decision


class DecidedStop:
    """Hands out a run's jobs in a random order until every rule is settled."""

    def __init__(
        self,
        plan: Plan,
        rules: Sequence[str],
        *,
        seed: int,
        baseline: Path | None = None,
        max_regression: float | None = None,
    ) -> None:
        self._plan = plan
        self._states = bytearray(plan.slots)
        units: dict[str, list[int]] = {}
        names: dict[int, str] = {}
        for job in plan.jobs():
            if job is not None:
                slot = plan.slot_at(job.index, job.trial)
                key = f"case {job.case.id}" if job.case.group is None else f"group {job.case.group}"
                units.setdefault(key, []).append(slot)
                names[slot] = job.case.id
        keys = sorted(units, key=lambda key: _draw(seed, key))
        self._units = [units[key] for key in keys]
        self._names = names
        self._place_of = {slot: place for place, slots in enumerate(self._units) for slot in slots}
        self._left = [len(slots) for slots in self._units]
        self._next = 0
        parsed = [_read(rule) for rule in rules]
        self._rules = [RateRule(rule, [len(slots) for slots in self._units]) for rule in parsed]
        self._regression: RegressionRule | None = None
        if baseline is not None:
            ids = [list(dict.fromkeys(names[slot] for slot in slots)) for slots in self._units]
            self._regression = RegressionRule(max_regression or 0.0, pass_rates_of(baseline), ids, baseline.name)
        if not self._rules and self._regression is None:
            raise ConfigurationError(
                "stop_when: decided needs a rule to decide: min_pass_rate or rules under `gate` in the suite, "
                "--min-pass-rate, or --baseline"
            )

    @property
    def settled(self) -> bool:
        """Whether every rule is settled."""
        regression = self._regression
        return all(rule.decision is not None for rule in self._rules) and (
            regression is None or regression.decision is not None
        )

    def ordered(self, jobs: Iterator[Job | None]) -> Iterator[Job | None]:
        """The jobs in the order of the draw, until all is settled; the cases are held in memory."""
        waiting: list[Job] = []
        for job in jobs:
            if job is None:
                yield None
            else:
                waiting.append(job)
        waiting.sort(key=lambda job: self._place_of[self._plan.slot_at(job.index, job.trial)])
        for job in waiting:
            if self.settled:
                return
            yield job

    def take(self, slot: int, ok: bool, passed: bool | None) -> None:
        """Note what a record came to, and let the rules see the units whose turn it is."""
        place = self._place_of.get(slot)
        if place is None or self._states[slot] != _PENDING:
            return
        self._states[slot] = _ERROR if not ok else _UNSCORED if passed is None else _PASSED if passed else _FAILED
        self._left[place] -= 1
        while self._next < len(self._units) and not self._left[self._next]:
            self._enter(self._next)
            self._next += 1

    def _enter(self, place: int) -> None:
        slots = self._units[place]
        states = [self._states[slot] for slot in slots]
        passed, failed, errors = states.count(_PASSED), states.count(_FAILED), states.count(_ERROR)
        scored = passed + failed
        unit = Unit(len(slots), passed, scored, len(slots) - scored, errors)
        for rule in self._rules:
            rule.update(unit)
        if self._regression is not None:
            self._regression.update(place, self._rates(slots))

    def _rates(self, slots: Sequence[int]) -> dict[str, float]:
        """The pass rate of each case that has a verdict."""
        found: dict[str, list[bool]] = {}
        for slot in slots:
            if self._states[slot] in (_PASSED, _FAILED):
                found.setdefault(self._names[slot], []).append(self._states[slot] == _PASSED)
        return {name: sum(verdicts) / len(verdicts) for name, verdicts in found.items()}

    def to_metrics(self, not_asked: int) -> DecidedMetrics:
        """What became of each rule, and how many records that saved."""
        rules = [DecidedRule(rule=each.rule.text, outcome=_word(each.finish())) for each in self._rules]
        if (regression := self._regression) is not None:
            rules.append(DecidedRule(rule=regression.text, outcome=_word(regression.finish())))
        return DecidedMetrics(
            settled=self.settled, rules=rules, asked=self._plan.slots - not_asked, not_asked=not_asked
        )


def pass_rates_of(run: Path) -> dict[str, float]:
    """The share of a run's trials of each case that passed, of those with a verdict."""
    found: dict[str, list[bool]] = {}
    for record in iter_records(run):
        if record.status == "ok" and (passed := verdict(record.scores)) is not None:
            found.setdefault(record.id, []).append(passed)
    return {name: sum(verdicts) / len(verdicts) for name, verdicts in found.items()}


def expected_share(rule: str, cases: int, rate: float, *, draws: int = 20, seed: int = 0) -> float:
    """The share of a suite that is asked on average until a rule is settled, where this share of its cases is good."""
    rng, good = np.random.default_rng(seed), round(rate * cases)
    asked = 0
    for _ in range(draws):
        decided = RateRule(_read(rule), [1] * cases)
        for one in (rng.permutation(cases) < good).tolist():
            asked += 1
            decided.update(Unit(1, int(one), 1, int(not one), int(not one)))
            if decided.decision is not None:
                break
    return asked / (draws * cases)


def _read(text: str) -> Rule:
    rule = read_rule(text)
    if rule is None:
        raise ConfigurationError(f"stop_when: decided: cannot read the rule {text!r}")
    return rule


def _draw(seed: int, key: str) -> bytes:
    """A unit's place in the random order: of the seed and its name alone."""
    return hashlib.blake2b(f"{seed}\0{key}".encode(), digest_size=16).digest()


def _word(decision: Decision | None) -> str:
    return {"pass": "holds", "fail": "broken", None: "cannot tell"}[decision]
