"""Audits: answers drawn at random from each stratum of a run, for people to label, and the rate that follows."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterable, Mapping

import msgspec

from steelyard.errors import ConfigurationError
from steelyard.protocols import derived_rng
from steelyard.records import Record, verdict
from steelyard.stats.correction import MIN_AUDIT, Stratum

STRATA = {"passed": True, "failed": False, "judge overruled": True, "judge confirmed": False}
"""The ways an answer goes through the scorers, and whether it passes: without a `when: failed` judge the first two."""


class Drawn(msgspec.Struct, frozen=True):
    """An answer that was drawn for a label."""

    id: str
    trial: int
    stratum: str
    answer: str


def stratum_of(record: Record) -> str | None:
    """The stratum of a record; None for one without a verdict."""
    passed = verdict(record.scores) if record.status == "ok" else None
    if passed is None:
        return None
    if any(score.escalated and score.value is not None and not score.advisory for score in record.scores):
        return "judge overruled" if passed else "judge confirmed"
    return "passed" if passed else "failed"


def draw(records: Iterable[Record], count: int, seed: int) -> tuple[list[Drawn], dict[str, int]]:
    """Draw `count` answers at random from each stratum, and count how large the strata are.

    The draw depends on the seed and on the answers' ids alone, not on their order. Memory holds what is drawn.
    """
    if count < MIN_AUDIT:
        raise ConfigurationError(f"an audit draws at least {MIN_AUDIT} answers from each stratum, got {count}")
    sizes: Counter[str] = Counter()
    kept: dict[str, list[tuple[float, str, int, str]]] = {}
    for record in records:
        stratum = stratum_of(record)
        if stratum is None:
            continue
        sizes[stratum] += 1
        # The answers with the smallest of these numbers are a random sample, whatever comes first.
        lot = derived_rng(seed, record.id, record.trial, "audit").random()
        heap = kept.setdefault(stratum, [])
        entry = (-lot, record.id, record.trial, record.response_text or "")
        if len(heap) < count:
            heapq.heappush(heap, entry)
        else:
            heapq.heappushpop(heap, entry)
    drawn = [
        (lot, Drawn(case_id, trial, stratum, answer))
        for stratum, heap in kept.items()
        for lot, case_id, trial, answer in heap
    ]
    # In random order, so that the strata cannot be told apart while labelling.
    return [one for _, one in sorted(drawn, key=lambda pair: pair[0])], dict(sizes)


def labelled_strata(sizes: Mapping[str, int], labels: Iterable[tuple[str, bool]]) -> list[Stratum]:
    """The strata of a run with what people said of the answers drawn from them: (stratum, right or not)."""
    seen: Counter[str] = Counter()
    right: Counter[str] = Counter()
    for stratum, is_right in labels:
        seen[stratum] += 1
        right[stratum] += is_right
    return [
        Stratum(name=name, passed=STRATA[name], size=size, labelled=seen[name], right=right[name])
        for name, size in sorted(sizes.items())
    ]
