"""`steelyard check SUITE`: are the tasks of an agent's suite sound? Nothing is called."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from steelyard.cli.main import FAILED_GATE
from steelyard.cli.output import show, show_json
from steelyard.errors import ConfigurationError
from steelyard.stats.formatting import counted, format_seconds, safe_text, trim

if TYPE_CHECKING:
    from steelyard.run.check import CheckedTask

_SLOWEST = 3
_WIDTH = 78


@click.command("check")
@click.argument("suite")
@click.option(
    "--repeat", type=click.IntRange(1, 100), default=1, metavar="N", help="Grade N times, to find flaky tasks."
)
@click.option("-n", "--limit", type=click.IntRange(1), help="Only the first N cases.")
@click.option("-k", "--match", help="Only cases whose id contains this, or matches this glob.")
@click.option("-j", "--parallelism", type=click.IntRange(1), help="How many at a time.")
@click.option("--json", "as_json", is_flag=True, help="Print the findings as JSON.")
def command(suite: str, repeat: int, as_json: bool, **options: Any) -> int:
    """Grade each case of SUITE twice without its agent: with the reference solution, which must pass, and with the
    untouched workspace, which must fail. Exit 1 when a task is not sound.

    The suite's key `solution` says where the solutions are: a folder that is copied over the workspace, or a patch.
    """
    from steelyard.cli.run import load_suite
    from steelyard.run.check import Solution, check_suite
    from steelyard.suite.suite_file import read_suite_file

    if Path(suite).suffix.lower() not in (".yaml", ".yml"):
        raise ConfigurationError(f"steelyard check reads a suite file, got {suite}")
    file = read_suite_file(suite)
    if file.solution is None:
        raise ConfigurationError(f"{suite}: no `solution:` says where the reference solutions are")
    runner, _ = load_suite(suite, variant={})
    given = {name: value for name, value in options.items() if value is not None}
    runner = runner.with_changes(**given)
    place = Solution(file.solution, file.path.parent.resolve())
    tasks = asyncio.run(check_suite(runner, place, repeat=repeat))
    show_json(tasks) if as_json else show("\n".join(_lines(tasks)))
    return 0 if all(task.is_good for task in tasks) else FAILED_GATE


def _lines(tasks: list[CheckedTask]) -> list[str]:
    """What is wrong with each task that is not sound, then the counts and the slowest."""
    lines = []
    for task in tasks:
        if not task.is_good:
            lines.append(safe_text(f"{task.finding}: {task.id}"))
            lines += [trim(f"    {safe_text(line)}", _WIDTH) for line in task.why.splitlines()[:6]]
    counts = Counter(task.finding for task in tasks)
    others = ", ".join(f"{count:,} {finding}" for finding, count in counts.items() if finding != "good")
    lines.append(f"{counts['good']:,} of {counted(len(tasks), 'task')} sound" + (f"; {others}" if others else ""))
    slowest = sorted(tasks, key=lambda task: -task.seconds)[:_SLOWEST]
    shown = ", ".join(safe_text(f"{task.id} {format_seconds(task.seconds)}") for task in slowest)
    return [*lines, f"slowest: {shown}"] if shown else lines
