"""Which nodes of a cluster served a run, and which of them did worse than the rest."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from typing import Any

from steelyard.stats.wording import counted, format_seconds, safe_text

_FEWEST = 20
"""Requests that a node must have served before it is called anything."""
_SLOWER = 1.5
_MORE_ERRORS = 0.02
_TWICE = 2.0


def lines(nodes: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """How many nodes there were, and a line for each that is slower or fails more often than the others."""
    if not nodes:
        return []
    said = [f"  served by {counted(len(nodes), 'node')}"]
    for name, figures in nodes.items():
        others = [other for node, other in nodes.items() if node != name]
        if others and (trouble := _trouble(figures, others)):
            said.append(f"  {safe_text(name)} stands out: {trouble}")
    return said


def _trouble(node: Mapping[str, Any], others: list[Mapping[str, Any]]) -> str:
    if node["requests"] < _FEWEST:
        return ""
    said = []
    rate = node["failed"] / node["requests"]
    elsewhere = sum(other["failed"] for other in others) / max(1, sum(other["requests"] for other in others))
    if rate > elsewhere * _TWICE and rate > elsewhere + _MORE_ERRORS:
        said.append(f"{rate:.1%} errors, {elsewhere:.1%} elsewhere")
    medians = [p50 for other in others if (p50 := other["time_to_last_token-p50"]) is not None]
    if medians and (own := node["time_to_last_token-p50"]) is not None and own > _SLOWER * statistics.median(medians):
        usual = format_seconds(statistics.median(medians))
        said.append(f"its median time to last token is {format_seconds(own)}, {usual} elsewhere")
    return "; ".join(said)
