"""What a response's times add up to."""

from __future__ import annotations


def time_per_output_token(first: float | None, last: float | None, output_tokens: int | None) -> float | None:
    """Seconds per token after the first, or None where that cannot be known."""
    if first is None or last is None or output_tokens is None or output_tokens < 2:
        return None
    return (last - first) / (output_tokens - 1)
