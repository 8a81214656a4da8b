"""`steelyard label RUN`: people's labels for a run's answers, a key each, without seeing the judges' verdicts."""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import sys
import unicodedata
from collections.abc import Iterator
from pathlib import Path

import click

from steelyard.cli.main import INTERRUPTED
from steelyard.cli.output import say, show
from steelyard.cli.report import cases_of
from steelyard.cli.view import serve, user_name
from steelyard.errors import ConfigurationError
from steelyard.journal.labels import DEFAULT_COUNT, MAX_GRADES, PASS_FAIL, LabelLog, parse_scale
from steelyard.report.formats import write_text
from steelyard.report.labels import LabelItem, LabelProgress, LabelSession
from steelyard.stats.correction import MIN_AUDIT
from steelyard.stats.formatting import counted, escape_invisible, trim, without_commands

_MIN_ROWS, _MIN_COLUMNS, _MAX_COLUMNS = 10, 80, 100
_FRAME = 4
"""Lines of a screen that are not text: heading, keys and the two rules."""
_DOWN, _UP = (" ", "j", "\x1b[B", "\x1bOB", "\x1b[6~"), ("b", "k", "\x1b[A", "\x1bOA", "\x1b[5~")
_QUIT = ("q", "\x04", "\x1b")


@click.command("label")
@click.argument("run", type=click.Path(path_type=Path))
@click.option("--labeller", metavar="NAME", help="Who labels; each has their own labels [default: the user's name].")
@click.option(
    "--scale",
    metavar="SCALE",
    help=f"The scale: pass/fail, numbers such as 1-5, or up to {MAX_GRADES} words from the worst to the best, "
    "such as bad,fair,good [default: pass/fail, or the scale used before].",
)
@click.option(
    "--count",
    type=click.IntRange(MIN_AUDIT),
    metavar="N",
    help="Answers drawn from each stratum (passed, failed, overruled or confirmed by a judge); a larger number later "
    f"adds some [default: {DEFAULT_COUNT}].",
)
@click.option("--seed", type=int, help="Seed of the draw [default: 0].")
@click.option("--suite", help="Suite file to take questions and expected answers from [default: the run's own].")
@click.option("--skipped", is_flag=True, help="Show skipped answers again.")
@click.option("--web", is_flag=True, help="Label in a browser, as `steelyard view RUN --label` does.")
@click.option("--status", is_flag=True, help="Only show how many labels there are, and how well the judges agree.")
@click.option(
    "--export",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Write all labels to a CSV file, as `steelyard calibrate --labels` reads them, and end.",
)
def command(
    run: Path,
    labeller: str | None,
    scale: str | None,
    count: int | None,
    seed: int | None,
    suite: str | None,
    skipped: bool,
    web: bool,
    status: bool,
    export: Path | None,
) -> int:
    """Label answers of RUN by hand, without seeing the verdicts of scorers and judges.

    The answers are drawn at random from each stratum and shown in random order. Each label is saved at once to
    RUN/labels.jsonl; the next start continues where this one ended. Then `steelyard calibrate RUN` compares the judges
    with the labels. Keys: p pass, f fail (or a digit for a grade), c comment, e expected, s skip, u undo, q quit.
    """
    if not run.is_dir():
        raise ConfigurationError(f"there is no run directory {run}", topic="not-a-run")
    if (status or export is not None) and not LabelLog(run).exists:
        raise ConfigurationError(f"{run} has no labels yet: `steelyard label {run}` asks for them")
    grades = None if scale is None else parse_scale(scale)
    name = labeller if labeller is not None else user_name()
    cases = None if suite is None else cases_of(suite)
    session = LabelSession(run, name, count=count, seed=seed, grades=grades, skipped=skipped, suite=cases)
    if export is not None:
        write_text(export, session.to_csv())
        say(f"the labels are in {export}: steelyard calibrate {run} --labels {export}")
        return 0
    if status:
        show(_ending(session))
        return 0
    if web:
        return serve(run, session.labeller)
    on_screen = sys.stdin.isatty() and sys.stdout.isatty() and os.environ.get("TERM") != "dumb"
    try:
        code = _on_screen(session) if on_screen else _line_by_line(session)
    except KeyboardInterrupt:
        code = INTERRUPTED
    show(_ending(session))
    if session.current is None:
        say(f"compare the judges with them: {shlex.join(['steelyard', 'calibrate', str(run)])}")
    else:
        say(f"resume with: {shlex.join(['steelyard', 'label', str(run), '--labeller', session.labeller])}", whole=True)
    return code


def _on_screen(session: LabelSession) -> int:
    """Label with single keys on a separate screen."""
    with _alternate_screen():
        shown = _Shown()
        while (item := session.current) is not None:
            columns, rows = shutil.get_terminal_size()
            click.clear()
            click.echo(screen(session, item, shown, columns, rows), nl=False)
            key = _read_key()
            if key in _QUIT:
                return 0
            if key == "c":
                click.echo("\r\x1b[2K comment: ", nl=False)
                shown.comment = input()
            elif not _act(session, item, shown, key):
                shown.move(key)
            else:
                shown = _Shown()
    return 0


def _act(session: LabelSession, item: LabelItem, shown: _Shown, key: str) -> bool:
    """Do what a key says about an answer; whether the next one is to be shown."""
    place = (item.id, item.trial)
    if key in session.keys:
        session.label(place, session.keys[key], shown.comment)
    elif key == "s":
        session.skip(place, shown.comment)
    elif key == "u":
        return session.undo()
    else:
        return False
    return True


class _Shown:
    """What of an answer is on the screen."""

    def __init__(self) -> None:
        self.page = 0
        self.comment = ""
        self.expected = self.conversation = False

    def move(self, key: str) -> None:
        """Turn a page, or show and hide what is shown on demand."""
        if key in _DOWN:
            self.page += 1
        elif key in _UP:
            self.page = max(self.page - 1, 0)
        elif key == "e":
            self.expected = not self.expected
        elif key == "t":
            self.conversation = not self.conversation


def screen(session: LabelSession, item: LabelItem, shown: _Shown, columns: int, rows: int) -> str:
    """One answer on a terminal of that size: nothing in it can steer the terminal."""
    width = min(columns, _MAX_COLUMNS) - 1
    text = _text(item, shown, width - 2)
    height = max(rows, _MIN_ROWS) - _FRAME - 1
    pages = max(-(-len(text) // height), 1)
    shown.page = min(shown.page, pages - 1)
    part = text[shown.page * height : (shown.page + 1) * height]
    rule = "─" * width
    where = f" page {shown.page + 1} of {pages} (space, b) " if pages > 1 else ""
    lower = rule[: width - len(where) - 2] + where + "──" if where else rule
    progress = session.progress
    left, right = f" {safe_line(session.labeller)}", f"{_so_far(progress)} "
    heading = trim(f"{left:<{max(width - len(right), 0)}}{right}", width)
    filled = [*part, *[""] * (height - len(part))]
    return "\n".join([_bold(heading), rule, *filled, lower, trim(_keys(session, item, shown), width)])


def _text(item: LabelItem, shown: _Shown, width: int) -> list[str]:
    """The lines of an answer."""
    parts = [("Question", item.question or "(not in the records: --suite names the suite)")]
    if shown.conversation and item.conversation is not None:
        parts = [("Conversation", item.conversation)]
    parts.append(("Answer", item.answer or "(the answer is empty)"))
    if shown.expected:
        parts.append(("Expected", "(nothing is expected)" if item.expected is None else item.expected))
    if shown.comment:
        parts.append(("Your comment", shown.comment))
    lines: list[str] = []
    for title, text in parts:
        lines += [*([""] if lines else []), _bold(f" {title}")]
        lines += [f"   {line}" for line in wrapped(escape_invisible(text), width - 2)]
    return lines


def _so_far(progress: LabelProgress) -> str:
    counts = [(safe_line(grade), count) for grade, count in reversed(progress.counts.items()) if count]
    if list(progress.counts) == list(PASS_FAIL):
        parts = [f"{count:,} {grade}" for grade, count in counts]
    else:
        parts = [f"{grade} ×{count:,}" for grade, count in counts]
    parts += [f"{progress.skipped:,} skipped"] if progress.skipped else []
    return f"{progress.labelled + progress.skipped:,} of {progress.total:,}" + (
        f": {', '.join(parts)}" if parts else ""
    )


def _keys(session: LabelSession, item: LabelItem, shown: _Shown) -> str:
    if session.grades == PASS_FAIL:
        grades = ["p pass", "f fail"]
    else:
        given = {key: safe_line(session.grades[number]) for key, number in session.keys.items()}
        first, *_, last = given
        plain = all(key == grade for key, grade in given.items())
        grades = [f"{first}–{last} grade"] if plain else [f"{key} {grade}" for key, grade in given.items()]
    more = ["e hide expected" if shown.expected else "e expected"]
    more += ["t conversation"] if item.conversation is not None else []
    return " " + "  ".join([*grades, "c comment", *more, "s skip", "u undo", "q quit"])


def wrapped(text: str, width: int) -> list[str]:
    """The text in lines of at most that many columns, broken at blanks where there are some."""
    lines: list[str] = []
    for paragraph in text.expandtabs(4).split("\n"):
        line, columns, blank = "", 0, -1
        for character in paragraph:
            wide = _columns(character)
            if columns + wide > width:
                kept = line[: blank + 1] if blank > 0 and character != " " else line
                lines.append(kept.rstrip())
                line = line[len(kept) :]
                columns, blank = sum(map(_columns, line)), -1
                if character == " ":
                    continue
            if character == " ":
                blank = len(line)
            line += character
            columns += wide
        lines.append(line)
    return lines


def _columns(character: str) -> int:
    if unicodedata.combining(character):
        return 0
    return 2 if unicodedata.east_asian_width(character) in ("W", "F") else 1


def safe_line(text: str) -> str:
    """A short text on one line of a terminal."""
    return escape_invisible(text.replace("\n", " "))


def _bold(text: str) -> str:
    return text if "NO_COLOR" in os.environ or not sys.stdout.isatty() else click.style(text, bold=True)


@contextlib.contextmanager
def _alternate_screen() -> Iterator[None]:
    """A screen that is gone afterwards, with all that was on the old one back."""
    click.echo("\x1b[?1049h", nl=False)
    try:
        yield
    finally:
        click.echo("\x1b[?1049l", nl=False)


def _read_key() -> str:
    """The key that was pressed. What was typed after it would be for an answer that nobody has seen: it is dropped."""
    typed = click.getchar()
    return typed if typed.startswith("\x1b") else typed[:1]


def _line_by_line(session: LabelSession) -> int:
    """Label where there is no terminal: one line of input for each key, with a comment after it if wanted."""
    while (item := session.current) is not None:
        shown = _Shown()
        show("\n".join([_so_far(session.progress), *map(without_commands, _text(item, shown, _MIN_COLUMNS - 2))]))
        while True:
            show(_keys(session, item, shown).replace("  c comment", ""))
            line = sys.stdin.readline()
            key, _, shown.comment = line.strip().partition(" ")
            if not line or key in _QUIT:
                return 0
            if _act(session, item, shown, key):
                break
            shown.move(key)
            if key in ("e", "t"):
                show("\n".join(map(without_commands, _text(item, shown, _MIN_COLUMNS - 2))))
            else:
                say(f"{safe_line(key)!r} is none of the keys")
    return 0


def _ending(session: LabelSession) -> str:
    """How far the labels are, and what they say so far."""
    progress = session.progress
    lines = [f"{safe_line(session.labeller)}: {_so_far(progress)}"]
    left = progress.total - progress.labelled - progress.skipped
    lines.append("all answers of the sample are labelled" if not left else f"{counted(left, 'answer')} left")
    lines.append("agreement so far, by all labels:")
    for line in session.agreement():
        margin = " " * (2 + len(line) - len(line.lstrip()))
        lines += [f"{margin}{part}" for part in wrapped(escape_invisible(line.lstrip()), _MIN_COLUMNS - len(margin))]
    return "\n".join(lines)
