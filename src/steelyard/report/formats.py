"""The report formats by name: what each makes of runs and sweeps, piece by piece, in flat memory."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from steelyard.errors import ConfigurationError, JournalError, SteelyardError, describe
from steelyard.plugins import BUILT_IN, find
from steelyard.report.sweep.page import checked_sweep

if TYPE_CHECKING:
    from steelyard.suite.evalset import EvalSet

SUFFIXES = {"text": "txt", "md": "md", "html": "html", "json": "json", "csv": "csv", "junit": "xml"}
"""How a file of each format is named; one of a plugin's format has the format's name."""


def report_pieces(runs: Sequence[Path], form: str, cases: EvalSet | None = None) -> Iterator[str | bytes]:
    """The report on these runs in a format; `cases` are those to take expected answers from. Of html: one run's page.

    What only one format needs is imported when it is asked for.
    """
    if form not in BUILT_IN["reports"]:
        yield from _by_plugin(runs, form)
    elif form == "html":
        for run in runs:
            yield from _page(run, cases)
    elif form == "csv":
        yield from _rows(runs)
    elif form == "junit":
        yield from _tests(runs)
    elif form == "json":
        import msgspec

        yield msgspec.json.format(msgspec.json.encode(report_metrics(runs)), indent=2).decode() + "\n"
    else:
        for number, run in enumerate(runs):
            yield "\n" if number else ""
            yield from _one(run, form, cases)


def report_metrics(runs: Sequence[Path]) -> object:
    """The metrics of one run as they are, of several as a list."""
    from steelyard.run.result import Result

    found = [checked_sweep(run) or Result.load(run).metrics for run in runs]
    return found[0] if len(found) == 1 else found


def _by_plugin(runs: Sequence[Path], form: str) -> Iterator[str | bytes]:
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


def _rows(runs: Sequence[Path]) -> Iterator[str]:
    """A table of records, or of levels: not both, as their columns are others."""
    from steelyard.report.csv import table_csv
    from steelyard.report.sweep.table import sweep_csv

    sweeps = [(str(run), sweep) for run in runs if (sweep := checked_sweep(run)) is not None]
    if sweeps and len(sweeps) < len(runs):
        raise ConfigurationError(f"csv has other columns for a sweep than for a run: leave out {sweeps[0][0]}")
    yield from sweep_csv(sweeps) if sweeps else table_csv(runs)


def _tests(runs: Sequence[Path]) -> Iterator[str]:
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
    from steelyard.report.sweep.table import sweep_markdown, sweep_table

    return sweep_markdown(sweep, str(run)) if form == "md" else sweep_table(sweep, str(run)) + "\n"


def _page(run: Path, cases: EvalSet | None) -> Iterator[str]:
    if (sweep := checked_sweep(run)) is not None:
        from steelyard.report.sweep.page import sweep_page

        yield sweep_page(sweep, str(run))
    else:
        from steelyard.report.page.page import page

        yield from page(run, cases)


_NOT_A_DISK_FAILURE = (errno.ENOENT, errno.EACCES, errno.EISDIR, errno.ENOTDIR, errno.EROFS, errno.EPERM)


def write_text(path: Path, text: str) -> None:
    """Write a file in one step."""
    write_pieces(path, [text])


def write_pieces(path: Path, pieces: Iterable[str | bytes]) -> None:
    """Write a file that appears under its name once it is complete.

    A path that cannot be written is a configuration error, a full disk is not.
    """
    draft = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        try:
            with draft.open("wb") as file:
                for piece in pieces:
                    file.write(piece if isinstance(piece, bytes) else piece.encode("utf-8", "replace"))
            draft.replace(path)
        finally:
            draft.unlink(missing_ok=True)
    except OSError as error:
        message = f"cannot write {path}: {error.strerror or error}"
        if error.errno in _NOT_A_DISK_FAILURE:
            raise ConfigurationError(message) from error
        raise JournalError(error.errno, message) from error
