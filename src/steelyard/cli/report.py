"""`steelyard report RUN`: the result of a run, finished or not."""

from __future__ import annotations

from pathlib import Path

import click

from steelyard.cli.output import show, show_json
from steelyard.report.summary import summary
from steelyard.result import Result


@click.command("report")
@click.argument("run", type=click.Path(path_type=Path))
@click.option(
    "-f",
    "--format",
    "form",
    type=click.Choice(["text", "json"]),
    default="text",
    help="How to show it [default: text].",
)
def command(run: Path, form: str) -> int:
    """Show the result in the directory RUN. An unfinished run is read as far as it has come."""
    metrics = Result.load(run).metrics
    if form == "json":
        show_json(metrics)
    else:
        show(summary(metrics, str(run)))
    return 0
