"""`steelyard compare A B`: runs against a baseline, case by case."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from steelyard.cli.output import json_text, show, show_json

if TYPE_CHECKING:
    from steelyard.report.compare.comparison import Comparison


@click.command("compare")
@click.argument("baseline", metavar="A", type=click.Path(path_type=Path))
@click.argument("runs", metavar="B...", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option(
    "-f",
    "--format",
    "form",
    type=click.Choice(["text", "md", "html", "json"]),
    default="text",
    help="How to show it [default: text].",
)
@click.option("-o", "--output", type=click.Path(path_type=Path), help="Write it to this file [default: stdout].")
@click.option("--all", "list_all", is_flag=True, help="List all cases that changed, not only the first 20.")
@click.option("--with-edited", is_flag=True, help="Pair cases that were edited in between, too.")
def command(
    baseline: Path, runs: tuple[Path, ...], form: str, output: Path | None, list_all: bool, with_edited: bool
) -> int:
    """Compare each run B with the baseline A, case by case: what is better, what is worse, and how sure that is.

    Unfinished runs are compared as far as they have come.
    """
    from steelyard.report.compare.compare import MAX_LISTED, compare_runs

    comparison = compare_runs([baseline, *runs], with_edited=with_edited, most=None if list_all else MAX_LISTED)
    if form == "json" and output is None:
        show_json(comparison)
        return 0
    text = _written(comparison, form)
    if output is None:
        show(text.removesuffix("\n"))
    else:
        from steelyard.report.formats import write_text

        write_text(output, text)
    return 0


def _written(comparison: Comparison, form: str) -> str:
    if form == "json":
        return json_text(comparison) + "\n"
    if form == "html":
        from steelyard.report.compare.page import compare_page

        return compare_page(comparison)
    if form == "md":
        from steelyard.report.compare.text import compare_markdown

        return compare_markdown(comparison)
    from steelyard.report.compare.text import compare_text

    return compare_text(comparison) + "\n"
