"""What a reader must know before the figures: said on top of the HTML and the Markdown report."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from steelyard.stats.wording import counted

_REPLAYED = "not finished"
"""What a run that was never closed says of why it stopped: no more than its title does."""


def notices(metrics: Mapping[str, Any]) -> list[dict[str, str]]:
    """Warnings first, then what is only good to know: each a level, a title and a text."""
    found = [
        _incomplete(metrics),
        _bottleneck(metrics),
        *_judges(metrics),
        _unscored(metrics),
        _cost(metrics),
        _source(metrics),
        _cached(metrics),
        _left_out(metrics),
    ]
    return [notice for notice in found if notice is not None]


def _notice(level: str, title: str, text: str) -> dict[str, str]:
    return {"level": level, "title": title, "text": text}


def _incomplete(metrics: Mapping[str, Any]) -> dict[str, str] | None:
    if metrics["complete"]:
        return None
    counts = metrics["counts"]
    text = f"{metrics['n']:,} of {counts['planned']:,} records are here."
    if metrics["stopped"] and metrics["stopped"] != _REPLAYED:
        text += f" Stopped: {metrics['stopped']}."
    return _notice("warning", "This run is not complete", f"{text} The figures may change when it is resumed.")


def _bottleneck(metrics: Mapping[str, Any]) -> dict[str, str] | None:
    client = metrics.get("client") or {}
    if not client.get("bottleneck"):
        return None
    reason = f"{client['reason']}. " if client.get("reason") else ""
    text = f"{reason}Latency and throughput tell of the machine that measured, not of what was measured."
    return _notice("warning", "The client was the bottleneck", text[:1].upper() + text[1:])


def _judges(metrics: Mapping[str, Any]) -> list[dict[str, str]]:
    advisory = [name for name, score in metrics["scores"].items() if score.get("advisory")]
    if not advisory:
        return []
    text = f"{', '.join(advisory)}: not calibrated against people's labels, so it decides nothing here."
    return [_notice("warning", "A judge is only advisory", text)]


def _unscored(metrics: Mapping[str, Any]) -> dict[str, str] | None:
    if not metrics["scoring_errors"]:
        return None
    text = f"A scorer broke down on {metrics['scoring_errors']:,} of them: --retry-errors scores them again."
    return _notice("warning", "Some answers could not be scored", text)


def _cost(metrics: Mapping[str, Any]) -> dict[str, str] | None:
    if metrics.get("cost") is not None or not metrics.get("cost_unknown_because"):
        return None
    return _notice("info", "The cost is unknown", f"{metrics['cost_unknown_because']}")


def _source(metrics: Mapping[str, Any]) -> dict[str, str] | None:
    if "scored_from" not in metrics:
        return None
    return _notice(
        "info", "Scored again", f"Answers and times are those of {metrics['scored_from']}; nothing was asked."
    )


def _cached(metrics: Mapping[str, Any]) -> dict[str, str] | None:
    if not metrics.get("cached"):
        return None
    text = f"{metrics['cached']:,} of {metrics['n']:,} answers were not asked for; their times and costs are left out."
    return _notice("info", "From the cache", text)


def _left_out(metrics: Mapping[str, Any]) -> dict[str, str] | None:
    if not metrics["left_out"]:
        return None
    left_out = counted(metrics["left_out"], "record")
    return _notice("info", "Left out", f"{left_out} of cases that are not in this run any more.")
