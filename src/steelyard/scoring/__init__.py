"""Scorers: they give a response a value from 0 to 1, pass or fail, and a reason."""

from __future__ import annotations

from typing import TYPE_CHECKING

from steelyard._lazy import lazy_exports

if TYPE_CHECKING:
    from steelyard.records import Sample
    from steelyard.scoring.base import FunctionScorer
    from steelyard.scoring.choice import Choice
    from steelyard.scoring.judge.calibration import calibration_of, is_trusted
    from steelyard.scoring.judge.judge import Judge
    from steelyard.scoring.judge.jury import Jury
    from steelyard.scoring.judge.prompts import Prompt
    from steelyard.scoring.latency import Latency, Tokens
    from steelyard.scoring.number import Number
    from steelyard.scoring.similarity import Bleu, RougeL, Similarity
    from steelyard.scoring.structured import JsonMatch, JsonSchema
    from steelyard.scoring.text import Contains, Exact, Regex
    from steelyard.scoring.trajectory import ToolCall, Trajectory

_HOMES = {
    "Bleu": "steelyard.scoring.similarity",
    "Choice": "steelyard.scoring.choice",
    "Contains": "steelyard.scoring.text",
    "Exact": "steelyard.scoring.text",
    "FunctionScorer": "steelyard.scoring.base",
    "JsonMatch": "steelyard.scoring.structured",
    "JsonSchema": "steelyard.scoring.structured",
    "Judge": "steelyard.scoring.judge.judge",
    "Jury": "steelyard.scoring.judge.jury",
    "Latency": "steelyard.scoring.latency",
    "Number": "steelyard.scoring.number",
    "Prompt": "steelyard.scoring.judge.prompts",
    "Regex": "steelyard.scoring.text",
    "RougeL": "steelyard.scoring.similarity",
    "Sample": "steelyard.records",
    "Similarity": "steelyard.scoring.similarity",
    "Tokens": "steelyard.scoring.latency",
    "ToolCall": "steelyard.scoring.trajectory",
    "Trajectory": "steelyard.scoring.trajectory",
    "calibration_of": "steelyard.scoring.judge.calibration",
    "is_trusted": "steelyard.scoring.judge.calibration",
}

__all__ = [
    "Bleu",
    "Choice",
    "Contains",
    "Exact",
    "FunctionScorer",
    "JsonMatch",
    "JsonSchema",
    "Judge",
    "Jury",
    "Latency",
    "Number",
    "Prompt",
    "Regex",
    "RougeL",
    "Sample",
    "Similarity",
    "Tokens",
    "ToolCall",
    "Trajectory",
    "calibration_of",
    "is_trusted",
]

# A run imports only the scorers that it uses.
__getattr__ = lazy_exports(__name__, _HOMES, globals())


def __dir__() -> list[str]:
    return sorted(__all__)
