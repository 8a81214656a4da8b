"""Slices: the figures of the cases that share a value in their metadata, by the procedures of the whole run."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
from msgspec import UNSET

from steelyard.errors import ConfigurationError, suggestion
from steelyard.records import Record, id_digest, is_digest, verdict
from steelyard.stats.errors import TIMEOUTS
from steelyard.stats.metrics import ScoreMetrics, SliceMetrics, TrialMetrics
from steelyard.stats.running import Timeouts, latency_metrics, timed_out_after
from steelyard.stats.scores import ScoreStats
from steelyard.stats.sketch import Blocks
from steelyard.stats.trials import TrialStats

MAX_SLICES = 100
"""Values of a key that have a slice each: the first ones in the suite's order. All others are one slice together."""
SMALL = 30
"""Fewer cases, or groups of them, than this are few: the slice says so."""
NONE, OTHER, NOT_KEPT = "(none)", "(other)", "(not kept)"
"""The slices of cases without the key, of values beyond the first ones, and of metadata too large for a record."""
_MAX_VALUE_CHARS = 200
_MAX_KEYS = 1_000
_SEAL_EVERY = 1024
_TIMES = ("time_to_first_token", "time_to_last_token")


def metadata_at(metadata: Mapping[str, Any], key: str) -> Any:
    """What metadata has under a key; `a.b` is also the key b of the mapping under a. None where there is nothing."""
    if key in metadata:
        return metadata[key]
    value: Any = metadata
    for part in key.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


def values_of(metadata: Mapping[str, Any], key: str) -> list[str]:
    """The slices that a case belongs to by a key: one, or each item of a list, or `(none)`."""
    value = metadata_at(metadata, key)
    if type(value) is str and len(value) <= _MAX_VALUE_CHARS:
        return [value]
    if value is None or value == []:
        return [NOT_KEPT] if is_digest(metadata) else [NONE]
    if isinstance(value, list):
        return list(dict.fromkeys(_as_text(item) for item in value))
    return [_as_text(value)]


def _as_text(value: Any) -> str:
    """A value as text, as JSON writes it where it is none; a long one is cut, and told from others by a digest."""
    text = value if isinstance(value, str) else msgspec.json.encode(value).decode()
    if len(text) <= _MAX_VALUE_CHARS:
        return text
    digest = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=4).hexdigest()
    return f"{text[: _MAX_VALUE_CHARS - 10]}…{digest}"


def keys_of(metadata: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """The keys of metadata by which a slice can be named, those of inner mappings as `a.b`."""
    for key, value in metadata.items():
        if isinstance(value, Mapping):
            yield from keys_of(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}"


class KnownKeys:
    """The metadata keys that cases have, for the message about one that none has."""

    def __init__(self, wanted: Iterable[str]) -> None:
        self._missing = set(wanted)
        self._seen: set[str] = set()

    def add(self, metadata: Mapping[str, Any]) -> None:
        """Look at a case; costs next to nothing once every key that is wanted was seen."""
        if not self._missing or is_digest(metadata):
            return
        self._missing = {key for key in self._missing if metadata_at(metadata, key) is None}
        if self._missing and len(self._seen) < _MAX_KEYS:
            self._seen.update(keys_of(metadata))

    def refuse_missing(self, what: str, where: str) -> None:
        """ConfigurationError for a key that no case has."""
        for key in sorted(self._missing):
            known = f"; {suggestion(key, sorted(self._seen))}" if self._seen else ": no case there has any"
            raise ConfigurationError(f"{what}: no case of {where} has the metadata {key!r}{known}")


class _Slice:
    """The records of one slice."""

    def __init__(self, trials: int, by_case: bool) -> None:
        self.scores = ScoreStats()
        self.cases = 0
        self._trials = TrialStats(0, trials) if by_case else None
        self._groups: list[int] = []
        self._last: str | None = None
        self._times = {name: (Blocks(), Timeouts()) for name in _TIMES}
        self._cost = 0.0
        self._costs = self._output = self._outputs = 0

    def add(self, record: Record) -> None:
        """Take in a record; those of a case come one after another."""
        if record.id != self._last:
            self._last, self.cases = record.id, self.cases + 1
            self._groups.append(id_digest(record.group) if record.group else 0)
        ok = record.status == "ok"
        passed = verdict(record.scores) if ok else None
        if ok:
            self.scores.take(record.scores, passed)
        else:
            self.scores.update([], failed=True)
        self._measure(record)
        if self._trials is not None and record.trial < self._trials.trials:
            if self.cases > self._trials.cases:
                self._trials.extend(max(2 * self._trials.cases, 64))
            self._trials.update(self.cases - 1, record.trial, passed, record.scores if ok else [])

    def _measure(self, record: Record) -> None:
        """Count times, tokens and cost: those of answers that were asked for, and timeouts as longer than they took."""
        if record.cost is not None and not record.cached:
            self._cost, self._costs = self._cost + record.cost, self._costs + 1
        if record.error is None and record.cached:
            return
        seconds = timed_out_after(record) if record.error is not None and record.error_type in TIMEOUTS else None
        for name, (values, timeouts) in self._times.items():
            value = getattr(record, name)
            known = value is not None and (record.error is None or (name == _TIMES[0] and seconds is not None))
            if known:
                values.append(value)
                if len(values) % _SEAL_EVERY == 0:
                    values.seal()
            elif seconds is not None:
                timeouts.append(seconds, 0)
        if record.error is None and record.num_tokens_output is not None:
            self._output, self._outputs = self._output + record.num_tokens_output, self._outputs + 1

    def to_metrics(self, key: str, value: str, *, load: bool, is_grouped: bool) -> SliceMetrics:
        trials = self._trial_metrics(is_grouped)
        rates: ScoreStats | TrialMetrics = self.scores if trials is None else trials
        scores, times = self.scores, {}
        for name, (values, timeouts) in self._times.items():
            if len(values) or len(timeouts):
                times[name] = latency_metrics(values.joined(), timeouts, load=load)
        independent = trials.groups if trials is not None and trials.groups else self.cases
        return SliceMetrics(
            key=key,
            value=value,
            n=scores.n,
            cases=self.cases,
            groups=UNSET if trials is None else trials.groups,
            scored=scores.scored,
            passed=scores.passed,
            unscored=scores.unscored,
            scoring_errors=scores.scoring_errors,
            errors=scores.errors,
            pass_rate=rates.pass_rate,
            pass_rate_ci95=rates.pass_rate_ci95,
            pass_rate_all=rates.pass_rate_all,
            pass_rate_all_ci95=rates.pass_rate_all_ci95,
            error_rate=scores.error_rate,
            small=independent < SMALL,
            scores=over_cases(scores.to_metrics(), trials),
            latency=times,
            output_tokens=self._output / self._outputs if self._outputs else None,
            cost=self._cost if self._costs else None,
        )

    def _trial_metrics(self, is_grouped: bool) -> TrialMetrics | None:
        """The figures by case; None where each case counts for itself, once."""
        if self._trials is None or not (is_grouped or self._trials.trials > 1):
            return None
        if is_grouped:
            groups = np.zeros(self._trials.cases, dtype=np.uint64)
            groups[: len(self._groups)] = self._groups
            self._trials.set_groups(groups)
        return self._trials.to_metrics()


def over_cases(scores: dict[str, ScoreMetrics], trials: TrialMetrics | None) -> dict[str, ScoreMetrics]:
    """The figures of each scorer; over cases or groups where these count together."""
    found = {} if trials is None else trials.scores
    for name in found.keys() & scores.keys():
        score, over = scores[name], found[name]
        score.mean, score.mean_ci95 = over.mean, over.mean_ci95
        score.pass_rate, score.pass_rate_ci95 = over.pass_rate, over.pass_rate_ci95
        if score.shares is not UNSET:
            score.shares, score.shares_ci95 = over.shares, over.shares_ci95
    return scores


class Slices:
    """The slices of a run by some keys of the cases' metadata. Records are given in case order.

    With `by_case` the trials of a case and the cases of a group count together, as in the figures of the whole run.
    What is held is some bytes for each record and key.
    """

    def __init__(
        self,
        keys: Sequence[str],
        *,
        trials: int = 1,
        by_case: bool = True,
        load: bool = False,
    ) -> None:
        self._by_key: dict[str, dict[str, _Slice]] = {key: {} for key in keys}
        self._trials, self._load = trials, load
        self._by_case = by_case
        self._is_grouped = False
        self._known = KnownKeys(keys)

    def add(self, record: Record) -> None:
        """Take in a record."""
        metadata = record.metadata
        self._known.add(metadata)
        self._is_grouped = self._is_grouped or record.group is not None
        for key, slices in self._by_key.items():
            values = values_of(metadata, key)
            if len(values) == 1:
                self._slice(slices, values[0]).add(record)
            else:  # several of them may be among the others, where the record counts once
                for one in {id(found): found for found in (self._slice(slices, value) for value in values)}.values():
                    one.add(record)

    def _slice(self, slices: dict[str, _Slice], value: str) -> _Slice:
        found = slices.get(value)
        if found is None:
            if value not in (NONE, NOT_KEPT) and len(slices) >= MAX_SLICES:
                value = OTHER
            found = slices.get(value) or slices.setdefault(value, _Slice(self._trials, self._by_case))
        return found

    def refuse_missing(self, where: str) -> None:
        """ConfigurationError for a key that no record has."""
        self._known.refuse_missing("by", where)

    def to_metrics(self) -> list[SliceMetrics]:
        """The figures of each slice, key by key, values in their natural order and what has none last."""
        grouped = self._is_grouped and self._by_case
        return [
            slices[value].to_metrics(key, value, load=self._load, is_grouped=grouped)
            for key, slices in self._by_key.items()
            for value in sorted(slices, key=_order)
        ]


def _order(value: str) -> tuple[int, float, str]:
    """Numbers by size, then texts, then the slices that are no value."""
    if value in (NONE, OTHER, NOT_KEPT):
        return 2, 0.0, value
    try:
        number = float(value)
    except ValueError:
        number = math.nan
    return (1, 0.0, value) if math.isnan(number) else (0, number, value)


def parse_keys(given: object, name: str) -> tuple[str, ...]:
    """Keys as they are written: a list, or text with commas between them."""
    parts = given.split(",") if isinstance(given, str) else given
    if not isinstance(parts, Iterable):
        raise ConfigurationError(f"{name} must be a list of metadata keys, got {given!r}")
    keys = [part.strip() if isinstance(part, str) else part for part in parts]
    if not all(isinstance(key, str) and key for key in keys):
        raise ConfigurationError(f"{name} must be a list of metadata keys, got {given!r}")
    return tuple(dict.fromkeys(keys))
