"""`steelyard schema`: the JSON Schema of a suite file, a record or metrics.json."""

from __future__ import annotations

import click

from steelyard.cli.output import show_json

NAMES = ("suite", "metrics", "record")


@click.command("schema")
@click.argument("name", type=click.Choice(NAMES), default="suite")
def command(name: str) -> int:
    """Print the JSON Schema of a suite file (the default), of metrics.json, or of a line of outputs.jsonl.

    Editors check and complete suite files with it.
    """
    from steelyard.run.schema import SCHEMAS

    show_json(SCHEMAS[name]())
    return 0
