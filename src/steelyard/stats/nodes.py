"""How each node of a cluster did: a machine that is slow or fails shows beside the others."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np

from steelyard.stats.blocks import LIMIT, Blocks


class Served(Protocol):
    """What is read of a response that came by a node."""

    @property
    def node(self) -> str | None: ...
    @property
    def error(self) -> str | None: ...
    @property
    def cached(self) -> bool: ...
    @property
    def time_to_last_token(self) -> float | None: ...


class NodeFigures:
    """What one node served."""

    def __init__(self) -> None:
        self.requests = 0
        self.failed = 0
        self.latencies = Blocks()


class NodeStats:
    """Requests, failures and latencies by node; 8 bytes a response, exact, in any order."""

    def __init__(self) -> None:
        self._nodes: dict[str, NodeFigures] = {}

    def __bool__(self) -> bool:
        return bool(self._nodes)

    def update(self, response: Served) -> None:
        """Count a response in, if a node served it."""
        if response.node is None:
            return
        figures = self._nodes.get(response.node)
        if figures is None:
            figures = self._nodes[response.node] = NodeFigures()
        figures.requests += 1
        latency = response.time_to_last_token
        if response.error is not None:
            figures.failed += 1
        elif latency is not None and not response.cached and -LIMIT < latency < LIMIT:
            figures.latencies.append(latency)

    def merge(self, other: NodeStats) -> None:
        """Take in another's figures."""
        for node, theirs in other._nodes.items():
            ours = self._nodes.setdefault(node, NodeFigures())
            ours.requests += theirs.requests
            ours.failed += theirs.failed
            ours.latencies.extend(theirs.latencies.joined())

    def seal(self) -> None:
        """Put recent values away; to be called every thousand responses or so."""
        for figures in self._nodes.values():
            figures.latencies.seal()

    def to_metrics(self) -> dict[str, dict[str, Any]]:
        """The same as it stands in metrics.json."""
        return {node: _described(figures) for node, figures in sorted(self._nodes.items())}


def _described(figures: NodeFigures) -> dict[str, Any]:
    latencies = figures.latencies.joined()
    p50, p99 = np.percentile(latencies, (50, 99)).tolist() if len(latencies) else (None, None)
    return {
        "requests": figures.requests,
        "failed": figures.failed,
        "time_to_last_token-p50": p50,
        "time_to_last_token-p99": p99,
    }
