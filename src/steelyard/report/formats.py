"""The report formats by name: what each makes of runs, sweeps and matrices, piece by piece, in flat memory."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from steelyard.errors import ConfigurationError, JournalError, SteelyardError, describe
from steelyard.plugins import BUILT_IN, find
from steelyard.report.sweep.page import checked_sweep
from steelyard.run.matrix import is_matrix, read_matrix

if TYPE_CHECKING:
    from steelyard.report.matrix.leaderboard import Leaderboard
    from steelyard.suite.evalset import EvalSet

SUFFIXES = {"text": "txt", "md": "md", "html": "html", "json": "json", "csv": "csv", "junit": "xml"}
"""How a file of each format is named; one of a plugin's format has the format's name."""


def report_pieces(
    runs: Sequence[Path], form: str, cases: EvalSet | None = None, *, by: Sequence[str] = ()
) -> Iterator[str | bytes]:
    """The report on these runs in a format; `cases` are those to take expected answers from. Of html: one run's page.

    `by` names metadata keys whose slices are shown besides those of the run, in text, md, html and json.
    What only one format needs is imported when it is asked for.
    """
    _refuse_slices(runs, by)
    if form not in BUILT_IN["reports"]:
        yield from _by_plugin(runs, form)
    elif form == "html":
        for run in runs:
            yield from _page(run, cases, by)
    elif form == "csv":
        yield from _rows(runs)
    elif form == "junit":
        yield from _tests(runs)
    elif form == "json":
        import msgspec

        yield msgspec.json.format(msgspec.json.encode(report_metrics(runs, by=by)), indent=2).decode() + "\n"
    else:
        for number, run in enumerate(runs):
            yield "\n" if number else ""
            yield from _one(run, form, cases, by)


def report_metrics(runs: Sequence[Path], *, by: Sequence[str] = ()) -> object:
    """The metrics of one run as they are, of several as a list."""
    from steelyard.run.result import Result

    _refuse_slices(runs, by)
    found = [
        _leaderboard(run) if is_matrix(run) else checked_sweep(run) or Result.load(run, by=by).metrics for run in runs
    ]
    return found[0] if len(found) == 1 else found


def _refuse_slices(runs: Sequence[Path], by: Sequence[str]) -> None:
    """ConfigurationError where slices are wanted of what has none: a leaderboard or a sweep would leave them out."""
    for run in runs if by else ():
        if is_matrix(run):
            names = ", ".join(str(one) for one in single_runs([run])) or "none has begun"
            raise ConfigurationError(f"{run} is a matrix, and slices are of one run: name a variant ({names})")
        if checked_sweep(run) is not None:
            raise ConfigurationError(f"{run} is a sweep, and slices are of one run: name a level below it")


def single_runs(runs: Sequence[Path]) -> list[Path]:
    """The runs, with those of its variants that have begun in place of a matrix."""
    return [run for _, run in named_runs(runs)]


def named_runs(runs: Sequence[Path]) -> list[tuple[str, Path]]:
    """The same, each with its name: that of the variant in a single matrix, else the path of its folder."""
    found: list[tuple[str, Path]] = []
    for run in runs:
        variants = read_matrix(run).runs(run) if is_matrix(run) else {str(run): run}
        found += [
            (name if len(runs) == 1 else str(one), one) for name, one in variants.items() if one == run or one.is_dir()
        ]
    return found


def _leaderboard(folder: Path) -> Leaderboard:
    from steelyard.report.matrix.leaderboard import leaderboard

    return leaderboard(folder)


def _by_plugin(runs: Sequence[Path], form: str) -> Iterator[str | bytes]:
    """What a package's own format makes of each run: text or bytes."""
    from steelyard.run.result import Result

    report = find("reports", form)
    if not callable(report):
        raise ConfigurationError(f"the report format {form!r} must be a function of a Result, got {report!r:.100}")
    for run in runs:
        if checked_sweep(run) is not None:
            raise ConfigurationError(f"{run} is a sweep: the format {form!r} shows runs; report one of its levels")
        if is_matrix(run):
            raise ConfigurationError(f"{run} is a matrix: the format {form!r} shows runs; report one of its variants")
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
    """A table of records, of levels or of variants: not of several kinds, as their columns are others."""
    from steelyard.report.csv import table_csv
    from steelyard.report.matrix.text import leaderboard_csv
    from steelyard.report.sweep.table import sweep_csv

    sweeps = [(str(run), sweep) for run in runs if (sweep := checked_sweep(run)) is not None]
    matrices = [run for run in runs if is_matrix(run)]
    for kind, first, count in (
        ("sweep", [name for name, _ in sweeps], len(sweeps)),
        ("matrix", matrices, len(matrices)),
    ):
        if 0 < count < len(runs):
            raise ConfigurationError(f"csv has other columns for a {kind} than for a run: leave out {first[0]}")
    if matrices:
        yield from leaderboard_csv([_leaderboard(folder) for folder in matrices])
    else:
        yield from sweep_csv(sweeps) if sweeps else table_csv(runs)


def _tests(runs: Sequence[Path]) -> Iterator[str]:
    from steelyard.report.junit import junit

    for run in runs:
        if checked_sweep(run) is not None:
            raise ConfigurationError(f"{run} is a sweep, which has no tests: report one of its levels as junit")
    yield from junit(single_runs(runs))


def _one(run: Path, form: str, cases: EvalSet | None, by: Sequence[str]) -> Iterator[str]:
    sweep = checked_sweep(run)
    if sweep is not None:
        yield _one_sweep(run, sweep, form)
    elif is_matrix(run):
        yield from _one_matrix(run, form)
    elif form == "md":
        from steelyard.report.markdown import markdown

        yield from markdown(run, cases, by=by)
    else:
        from steelyard.report.summary import summary
        from steelyard.run.result import Result

        yield summary(Result.load(run, by=by).typed_metrics, str(run)) + "\n"


def _one_sweep(run: Path, sweep: dict[str, Any], form: str) -> str:
    from steelyard.report.sweep.table import sweep_markdown, sweep_table

    return sweep_markdown(sweep, str(run)) if form == "md" else sweep_table(sweep, str(run)) + "\n"


def _one_matrix(run: Path, form: str) -> Iterator[str]:
    from steelyard.report.matrix.leaderboard import rank
    from steelyard.report.matrix.table import variants_in
    from steelyard.report.matrix.text import leaderboard_markdown, leaderboard_text

    variants = variants_in(run)
    board = rank(variants)
    if form == "md":
        yield from leaderboard_markdown(board, variants)
    else:
        yield leaderboard_text(board) + "\n"


def _page(run: Path, cases: EvalSet | None, by: Sequence[str]) -> Iterator[str]:
    if (sweep := checked_sweep(run)) is not None:
        from steelyard.report.sweep.page import sweep_page

        yield sweep_page(sweep, str(run))
    elif is_matrix(run):
        from steelyard.report.matrix.page import matrix_page
        from steelyard.report.matrix.table import variants_in

        yield from matrix_page(variants_in(run), cases)
    else:
        from steelyard.report.page.page import page

        yield from page(run, cases, by=by)


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
