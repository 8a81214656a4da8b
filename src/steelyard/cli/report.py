"""`steelyard report RUN...`: the result of runs, finished or not, as text, a page, or data for other programs."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from steelyard.cli.output import discard, show, show_json
from steelyard.errors import ConfigurationError, JournalError, SteelyardError, describe
from steelyard.journal.files import REPORT
from steelyard.plugins import BUILT_IN, find
from steelyard.report.sweep.page import checked_sweep

if TYPE_CHECKING:
    from steelyard.suite.evalset import EvalSet


class _Format(click.Choice[str]):
    """A built-in report format, or one that a package adds: those are looked for when another name is given."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        if value not in self.choices:
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
def command(runs: tuple[Path, ...], form: str, output: str | None, case_id: str | None, suite: str | None) -> int:
    """Show the result in each directory RUN. An unfinished run is read as far as it has come.

    RUN may be the folder of a sweep, in every format but junit.

    html is one file a run that needs no network; where several runs are reported, -o names a folder for them.
    """
    cases = None if suite is None else _cases_of(suite)
    if case_id is not None:
        return _show_case(runs, form, output, case_id, cases)
    if form == "html":
        return _write_pages(runs, output, cases)
    if form == "json" and output in (None, "-"):
        show_json(_metrics(runs))
        return 0
    pieces = _pieces(runs, form, cases) if form in BUILT_IN["reports"] else _by_plugin(runs, form)
    _write(pieces, output)
    return 0


def _by_plugin(runs: tuple[Path, ...], form: str) -> Iterator[str | bytes]:
    """What a package's own format makes of each run: text or bytes."""
    from steelyard.run.result import Result

    report = find("reports", form)
    if not callable(report):
        raise ConfigurationError(f"the report format {form!r} must be a function of a Result, got {report!r:.100}")
    for run in runs:
        if checked_sweep(run) is not None:
            raise ConfigurationError(f"{run} is a sweep: the format {form!r} shows runs; report one of its levels")
        try:
            made = report(Result.load(run))
        except SteelyardError:
            raise
        except Exception as error:
            raise ConfigurationError(f"the report format {form!r} failed on {run}: {describe(error)}") from error
        if not isinstance(made, (str, bytes)):
            raise ConfigurationError(f"the report format {form!r} must return text or bytes, got {type(made).__name__}")
        yield made


def _pieces(runs: tuple[Path, ...], form: str, cases: EvalSet | None) -> Iterator[str]:
    """The report in a format other than HTML, piece by piece; imported when it is asked for."""
    if form == "csv":
        yield from _rows(runs)
    elif form == "junit":
        yield from _tests(runs)
    elif form == "json":
        import msgspec

        yield msgspec.json.format(msgspec.json.encode(_metrics(runs)), indent=2).decode() + "\n"
    else:
        for number, run in enumerate(runs):
            yield "\n" if number else ""
            yield from _one(run, form, cases)


def _rows(runs: tuple[Path, ...]) -> Iterator[str]:
    """A table of records, or of levels: not both, as their columns are others."""
    from steelyard.report.csv import table_csv
    from steelyard.report.sweep.table import sweep_csv

    sweeps = [(str(run), sweep) for run in runs if (sweep := checked_sweep(run)) is not None]
    if sweeps and len(sweeps) < len(runs):
        raise ConfigurationError(f"csv has other columns for a sweep than for a run: leave out {sweeps[0][0]}")
    yield from sweep_csv(sweeps) if sweeps else table_csv(runs)


def _tests(runs: tuple[Path, ...]) -> Iterator[str]:
    from steelyard.report.junit import junit

    for run in runs:
        if checked_sweep(run) is not None:
            raise ConfigurationError(f"{run} is a sweep, which has no tests: report one of its levels as junit")
    yield from junit(runs)


def _one(run: Path, form: str, cases: EvalSet | None) -> Iterator[str]:
    sweep = checked_sweep(run)
    if sweep is not None:
        yield _one_sweep(run, sweep, form)
    elif form == "md":
        from steelyard.report.markdown import markdown

        yield from markdown(run, cases)
    else:
        from steelyard.report.summary import summary
        from steelyard.run.result import Result

        yield summary(Result.load(run).typed_metrics, str(run)) + "\n"


def _one_sweep(run: Path, sweep: dict[str, Any], form: str) -> str:
    if form == "md":
        from steelyard.report.sweep.table import sweep_markdown

        return sweep_markdown(sweep, str(run))
    from steelyard.report.sweep.table import sweep_table

    return sweep_table(sweep, str(run)) + "\n"


def _metrics(runs: tuple[Path, ...]) -> object:
    """The metrics of one run as they are, of several as a list."""
    from steelyard.run.result import Result

    found = [checked_sweep(run) or Result.load(run).metrics for run in runs]
    return found[0] if len(found) == 1 else found


def _show_case(runs: tuple[Path, ...], form: str, output: str | None, case_id: str, cases: EvalSet | None) -> int:
    from steelyard.report.case import OneCase

    if form not in ("text", "json"):
        raise ConfigurationError(f"--case is shown as text or json, got -f {form}")
    if output is not None:
        raise ConfigurationError("--case goes to stdout: leave out -o")
    found = [OneCase(run, case_id, cases) for run in runs]
    if form == "json":
        show_json(found[0].to_json() if len(found) == 1 else [one.to_json() for one in found])
    else:
        show("\n\n".join(one.to_text() for one in found))
    return 0


def _write_pages(runs: tuple[Path, ...], output: str | None, cases: EvalSet | None) -> int:
    if len(runs) > 1 and output is not None and not Path(output).is_dir():
        raise ConfigurationError(f"-o must name a folder that is there for {len(runs)} runs, got {output!r}")
    for run in runs:
        place = str(run / REPORT) if output is None else output
        if output not in (None, "-") and Path(place).is_dir():
            place = str(Path(place) / f"{run.resolve().name}.html")
        _write(_page(run, cases), place)
        if place != "-":
            show(place)
    return 0


def _page(run: Path, cases: EvalSet | None) -> Iterator[str]:
    if (sweep := checked_sweep(run)) is not None:
        from steelyard.report.sweep.page import sweep_page

        yield sweep_page(sweep, str(run))
    else:
        from steelyard.report.page.page import page

        yield from page(run, cases)


def _write(pieces: Iterable[str | bytes], place: str | None) -> None:
    """To stdout, or to a file that is there as a whole or not at all. A run that cannot be read comes before both."""
    pieces = iter(pieces)
    pieces = itertools.chain([next(pieces, "")], pieces)
    if place in (None, "-"):
        _to_stdout(pieces)
        return
    from steelyard.cli.output import write_pieces

    write_pieces(Path(str(place)), pieces)


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


def _cases_of(suite: str) -> EvalSet:
    """The cases of a suite that was named: its file is read, or its Python code run."""
    if Path(suite).suffix.lower() in (".yaml", ".yml"):
        from steelyard.suite.suite_file import read_suite_file

        return read_suite_file(suite).cases
    from steelyard.cli.run import load_suite

    return load_suite(suite)[0].suite
