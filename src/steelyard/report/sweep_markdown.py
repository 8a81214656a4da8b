"""A sweep as Markdown, fit for a comment on a pull request."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from steelyard._version import __version__
from steelyard.report.markdown import code, markdown_table, words
from steelyard.report.sweep_table import level_cells, level_notes

_HEADINGS = ("level", "answers/s", "errors", "first token p50", "p90", "p99", "last token p50", "p90", "p99")


def sweep_markdown(sweep: Mapping[str, Any], place: str) -> str:
    """Where to run, a row for each level, and what is to be known of some."""
    levels, best = sweep["levels"], sweep["recommendation"]["level"]
    named = " on ".join(code(name) for name in (sweep["suite"], sweep["model_id"]) if name)
    advice = "no level can be recommended" if best is None else f"run at {best:,}"
    parts = [f"## {named}: {advice}", words(sweep["recommendation"]["says"])]
    if sweep["stopped"]:
        parts.append(f"> [!WARNING]\n> **Not complete.** {words(sweep['stopped'])}")
    if levels:
        head = [*_HEADINGS, "tokens/s", "passed"]
        parts.append(
            markdown_table(
                head, (_marked(level_cells(level), level["level"] == best) for level in levels), numbers=True
            )
        )
    told = [f"- **{level['level']:,}**: {words('; '.join(notes))}" for level in levels if (notes := level_notes(level))]
    parts += ["\n".join(told)] if told else []
    return "\n\n".join([*parts, f"<sub>{code(place)}, Steelyard {__version__}</sub>"]) + "\n"


def _marked(cells: list[str], recommended: bool) -> list[str]:
    return [f"**{cell}**" for cell in cells] if recommended else cells
