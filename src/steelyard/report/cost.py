"""What a run cost, as lines of the text report: the whole, its parts, and what is not in it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from steelyard.stats.spending import format_money
from steelyard.stats.wording import counted, safe_text

_PARTS = {"cost_judges": "judges", "cost_errors": "failed calls"}
_UNKNOWN = {
    "cost_unknown": ("answer", "answers"),
    "cost_unknown_errors": ("failed call", "failed calls"),
    "cost_unknown_judges": ("call of judges", "calls of judges"),
}


def lines(metrics: Mapping[str, Any]) -> list[str]:
    """The cost of the run; that it is unknown, where a price was to be expected; nothing where nothing is sold."""
    cost = metrics.get("cost")
    if cost is None:
        because = metrics.get("cost_unknown_because")
        return [f"  cost unknown: {safe_text(because)}"] if because else []
    if not cost:
        return []
    if "scored_from" in metrics:
        return [_scored(metrics), *_details(metrics)]
    shares = [
        f"{_money(metrics, key)} per {label}"
        for key, label in {"cost_per_1000_cases": "1,000 cases", "cost_per_passed_case": "passed case"}.items()
        if metrics[key] is not None
    ]
    return [f"  cost {_money(metrics, 'cost')}: {', '.join(shares)}", *_of_it(metrics), *_details(metrics)]


def _scored(metrics: Mapping[str, Any]) -> str:
    """Answers that are only scored again were paid for by the run that they come from."""
    judges = f"; judges now {_money(metrics, 'cost_judges')}" if metrics["cost_judges"] else ""
    return f"  the answers cost {_money(metrics, 'cost_answers')} back then{judges}"


def _of_it(metrics: Mapping[str, Any]) -> list[str]:
    parts = [f"{label} {_money(metrics, key)}" for key, label in _PARTS.items() if metrics[key]]
    return [f"    of it {', '.join(parts)}"] if parts else []


def _details(metrics: Mapping[str, Any]) -> list[str]:
    missing = [counted(metrics[key], *names) for key, names in _UNKNOWN.items() if metrics[key]]
    found = [f"    not in it, as their cost is unknown: {', '.join(missing)}"] if missing else []
    if metrics["cost_estimated"]:
        found.append(f"    by an estimated number of tokens: {counted(metrics['cost_estimated'], 'answer')}")
    return found


def _money(metrics: Mapping[str, Any], key: str) -> str:
    return format_money(metrics[key], safe_text(metrics["currency"]))
