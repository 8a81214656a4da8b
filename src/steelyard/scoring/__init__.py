"""Scorers: what weighs a response."""

from __future__ import annotations

from steelyard.scoring.base import FunctionScorer
from steelyard.scoring.text import Exact

__all__ = ["Exact", "FunctionScorer"]
