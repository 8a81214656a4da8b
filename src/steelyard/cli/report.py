"""`steelyard report RUN...`: the result of runs, finished or not, as text, a page, or data for other programs."""

from __future__ import annotations

import contextlib
import itertools
import os
import stat
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from steelyard.cli.click_types import Format
from steelyard.cli.output import discard, paint, show, show_json, shows_colour
from steelyard.errors import ConfigurationError, JournalError
from steelyard.journal.files import REPORT
from steelyard.plugins import BUILT_IN, find
from steelyard.report.formats import named_runs, report_metrics, report_pieces
from steelyard.stats.formatting import without_commands, xml_without_commands
from steelyard.stats.slices import parse_keys

if TYPE_CHECKING:
    from steelyard.suite.evalset import EvalSet


class _Format(Format):
    """A built-in report format, or one that a package adds: those are looked for when another name is given."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        if value in (*self.choices, "markdown"):
            return super().convert(value, param, ctx)
        try:
            find("reports", value)
        except ConfigurationError as error:
            self.fail(str(error), param, ctx)
        return str(value)


@click.command("report")
@click.argument("runs", metavar="RUN...", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option(
    "-f",
    "--format",
    "form",
    type=_Format(list(BUILT_IN["reports"])),
    default="text",
    help="How to show it, or a plugin's format [default: text].",
)
@click.option(
    "-o", "--output", help="Where to write it: a file, or - for stdout [default: stdout; html: RUN/report.html]."
)
@click.option("--case", "case_id", help="One case in full, all of its trials: text or json.")
@click.option("--suite", help="Suite file to take expected answers from [default: the run's own].")
@click.option(
    "--by", multiple=True, metavar="KEY", help="Also show results by these metadata keys: category,difficulty."
)
def command(
    runs: tuple[Path, ...], form: str, output: str | None, case_id: str | None, suite: str | None, by: tuple[str, ...]
) -> int:
    """Show the result of each RUN, finished or not.

    RUN may also be the folder of a matrix or, except for junit, of a sweep.

    html writes one file per run, which works offline. With several runs, -o names a folder for them.
    """
    cases = None if suite is None else cases_of(suite)
    keys = parse_keys(",".join(by), "--by") if by else ()
    if case_id is not None:
        return _show_case(runs, form, output, case_id, cases)
    if form == "html":
        return _write_pages(runs, output, cases, keys)
    if form == "json" and output in (None, "-"):
        show_json(report_metrics(runs, by=keys))
        return 0
    _write(report_pieces(runs, form, cases, by=keys), output, form)
    return 0


def _show_case(runs: tuple[Path, ...], form: str, output: str | None, case_id: str, cases: EvalSet | None) -> int:
    from steelyard.report.case import OneCase

    if form not in ("text", "json"):
        raise ConfigurationError(f"--case is shown as text or json, got -f {form}")
    if output is not None:
        raise ConfigurationError("--case goes to stdout: leave out -o")
    found = [(name, OneCase(run, case_id, cases)) for name, run in named_runs(runs)]
    if form == "json":
        shown = [one.to_json() if len(found) == 1 else {"run": name, **one.to_json()} for name, one in found]
        show_json(shown[0] if len(shown) == 1 else shown)
    else:
        show("\n\n".join(one.to_text("" if len(found) == 1 else f"{name}: ") for name, one in found))
    return 0


def _write_pages(runs: tuple[Path, ...], output: str | None, cases: EvalSet | None, by: tuple[str, ...]) -> int:
    if len(runs) > 1 and output is not None and not Path(output).is_dir():
        raise ConfigurationError(f"-o must name a folder that is there for {len(runs)} runs, got {output!r}")
    for run in runs:
        place = str(run / REPORT) if output is None else output
        if output not in (None, "-") and Path(place).is_dir():
            place = str(Path(place) / f"{run.resolve().name}.html")
        _write(report_pieces([run], "html", cases, by=by), place, "html")
        if place != "-":
            show(place)
    return 0


def _write(pieces: Iterable[str | bytes], place: str | None, form: str) -> None:
    """To stdout, or to a file that is there as a whole or not at all. A run that cannot be read comes before both."""
    pieces = iter(pieces)
    pieces = itertools.chain([next(pieces, "")], pieces)
    if place in (None, "-"):
        _to_stdout(_for_a_log(pieces, form))
        return
    from steelyard.report.formats import write_pieces

    write_pieces(Path(str(place)), pieces)


def _for_a_log(pieces: Iterable[str | bytes], form: str) -> Iterator[str | bytes]:
    """The pieces without what a CI system would obey. Where stdout is a file, as in `> cases.csv`, it is no log.

    XML has a way to write it that changes no value; the other formats get a blank.
    """
    is_file = False
    with contextlib.suppress(OSError, ValueError, AttributeError):
        is_file = stat.S_ISREG(os.fstat(sys.stdout.fileno()).st_mode)
    if is_file and form not in ("text", "junit"):
        yield from pieces
        return
    change = xml_without_commands if form == "junit" else without_commands
    in_colour = form == "text" and shows_colour(sys.stdout)
    for piece in pieces:
        text = change(piece.decode("utf-8", "replace") if isinstance(piece, bytes) else piece)
        yield paint(text) if in_colour else text


def _to_stdout(pieces: Iterable[str | bytes]) -> None:
    """All pieces, in UTF-8 whatever the terminal's encoding: XML and HTML say so themselves."""
    stream = getattr(sys.stdout, "buffer", None)
    for piece in pieces:
        try:
            if stream is None:
                sys.stdout.write(piece.decode("utf-8", "replace") if isinstance(piece, bytes) else piece)
            else:
                stream.write(piece if isinstance(piece, bytes) else piece.encode("utf-8", "replace"))
        except BrokenPipeError:  # the reader has gone (`| head`)
            discard(sys.stdout)
            return
        except OSError as error:
            discard(sys.stdout)
            raise JournalError(error.errno, f"cannot write the report to stdout: {error.strerror}") from error
    if stream is not None:
        stream.flush()


def cases_of(suite: str) -> EvalSet:
    """The cases of a suite that was named: its file is read, or its Python code run."""
    if Path(suite).suffix.lower() in (".yaml", ".yml"):
        from steelyard.suite.suite_file import read_suite_file

        return read_suite_file(suite).cases
    from steelyard.cli.run import load_suite

    return load_suite(suite, variant={})[0].suite
