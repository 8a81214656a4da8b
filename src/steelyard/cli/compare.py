"""`steelyard compare A B`: runs against a baseline, case by case; three or more side by side."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import click

from steelyard.cli.click_types import Format
from steelyard.cli.output import json_text, show, show_json
from steelyard.run.matrix import is_matrix

if TYPE_CHECKING:
    from steelyard.report.matrix.table import VariantRuns


@click.command("compare")
@click.argument("baseline", metavar="A", type=click.Path(path_type=Path))
@click.argument("runs", metavar="B...", nargs=-1, type=click.Path(path_type=Path))
@click.option(
    "-f",
    "--format",
    "form",
    type=Format(["text", "md", "html", "json"]),
    default="text",
    help="How to show it [default: text].",
)
@click.option("-o", "--output", type=click.Path(path_type=Path), help="Write it to this file [default: stdout].")
@click.option("--all", "list_all", is_flag=True, help="List all cases that changed, not only the first 20.")
@click.option("--with-edited", is_flag=True, help="Also pair cases that were edited in between.")
def command(
    baseline: Path, runs: tuple[Path, ...], form: str, output: Path | None, list_all: bool, with_edited: bool
) -> int:
    """Compare the run B with the baseline A, case by case: what is better, what is worse, and how certain that is.

    Three or more runs get a leaderboard: the best, which runs cannot be told apart from it, and all of them side by
    side. The folder of a matrix means its variants.

    Unfinished runs are compared as far as they are.
    """
    if not runs and not is_matrix(baseline):
        raise click.UsageError("name a run to compare with it; only the folder of a matrix can be compared alone")
    comparison = _compared(baseline, runs, list_all=list_all, with_edited=with_edited)
    if form == "json" and output is None:
        show_json(comparison.found)
        return 0
    pieces = iter([json_text(comparison.found) + "\n"]) if form == "json" else comparison.written(form)
    if output is None:
        show("".join(pieces).removesuffix("\n"))
    else:
        from steelyard.report.formats import write_pieces

        write_pieces(output, pieces)
    return 0


def _compared(baseline: Path, runs: tuple[Path, ...], *, list_all: bool, with_edited: bool) -> _Pair | _Several:
    from steelyard.report.formats import single_runs
    from steelyard.report.matrix.table import variants_in, variants_of

    if not runs:
        return _Several(variants_in(baseline), list_all=list_all, with_edited=with_edited)
    compared = single_runs([baseline, *runs])
    if len(compared) == 2:
        return _Pair(compared, list_all=list_all, with_edited=with_edited)
    return _Several(variants_of(compared), list_all=list_all, with_edited=with_edited)


class _Pair:
    """A run against a baseline."""

    def __init__(self, runs: list[Path], *, list_all: bool, with_edited: bool) -> None:
        from steelyard.report.compare.compare import MAX_LISTED, compare_runs

        self.found = compare_runs(runs, with_edited=with_edited, most=None if list_all else MAX_LISTED)

    def written(self, form: str) -> Iterator[str]:
        if form == "html":
            from steelyard.report.compare.formats import compare_page

            yield compare_page(self.found)
            return
        from steelyard.report.compare.formats import compare_markdown, compare_text

        yield compare_markdown(self.found) if form == "md" else compare_text(self.found) + "\n"


class _Several:
    """Three runs or more, side by side."""

    def __init__(self, variants: VariantRuns, *, list_all: bool, with_edited: bool) -> None:
        from steelyard.report.matrix.leaderboard import rank
        from steelyard.report.matrix.text import MAX_DIFFERING

        self._variants = variants
        self._most = None if list_all else MAX_DIFFERING
        self.found = rank(self._variants, with_edited=with_edited)

    def written(self, form: str) -> Iterator[str]:
        if form == "html":
            from steelyard.report.matrix.page import matrix_page

            return matrix_page(self._variants, board=self.found)
        from steelyard.report.matrix.text import leaderboard_markdown, leaderboard_text

        if form == "md":
            return leaderboard_markdown(self.found, self._variants, self._most)
        return iter([leaderboard_text(self.found) + "\n"])
