"""Metrics between their two forms: typed, and plain as in metrics.json."""

from __future__ import annotations

from typing import Any

import msgspec

from steelyard import Metrics


def plain(value: object) -> Any:
    """Typed figures as metrics.json has them."""
    return msgspec.json.decode(msgspec.json.encode(value))


def typed(metrics: dict[str, Any]) -> Metrics:
    """Figures as metrics.json has them, read by type."""
    return msgspec.convert(metrics, Metrics)
