"""What goes to stdout and stderr: names that are no text, for programs; colour, for people."""

from __future__ import annotations

import io
import json
import logging
import os
import re
import sys
from pathlib import Path

import click
import pytest

from steelyard.cli.output import say, show
from steelyard.cli.run_control import log_to_stderr
from tests.support.cli import alone, run_cli
from tests.support.compare import finished

NO_TEXT = os.fsdecode(b"run \xff")


@pytest.fixture
def odd(tmp_path: Path) -> Path:
    try:
        (tmp_path / "runs" / NO_TEXT).mkdir(parents=True)
    except OSError:
        pytest.skip("this file system takes no such names")
    finished(tmp_path / "plain", "pp")
    finished(tmp_path / "runs" / NO_TEXT, "pp")
    return tmp_path


@pytest.mark.parametrize(
    "words",
    [
        ["ls", "--json"],
        ["gate", f"runs/{NO_TEXT}", "--rule", "n==2", "--json"],
        ["compare", "plain", f"runs/{NO_TEXT}", "-f", "json"],
    ],
    ids=lambda words: words[0],
)
def test_a_name_that_is_no_text_comes_back_as_it_was(odd: Path, words: list[str]) -> None:
    ended = run_cli(odd, *words)
    assert ended.code == 0, ended.err
    ended.out.encode()
    assert f"runs/{NO_TEXT}" in strings(json.loads(ended.out))


def test_the_same_in_a_file(odd: Path) -> None:
    assert run_cli(odd, "compare", "plain", f"runs/{NO_TEXT}", "-f", "json", "-o", "out.json").code == 0
    assert f"runs/{NO_TEXT}" in strings(json.loads((odd / "out.json").read_bytes()))


def strings(value: object) -> set[str]:
    """All texts within a JSON value."""
    if isinstance(value, dict):
        return strings(list(value.values()))
    if isinstance(value, list):
        return set().union(*map(strings, value)) if value else set()
    return {value} if isinstance(value, str) else set()


class Screen(io.StringIO):
    """A terminal, as far as colour goes."""

    def isatty(self) -> bool:
        return True


_SUMMARY = """capitals: 20 of 20 done, complete

  passed        92.5%  185 of 200  95 % CI 87.9% – 95.7%
  errors         1.0%    2 of 200
broken  pass_rate>=0.95: 0.925
            c1:   errors 9.9%"""


@pytest.mark.parametrize(
    ("variables", "screen", "coloured"),
    [
        ({}, True, True),
        ({}, False, False),
        ({"NO_COLOR": "1"}, True, False),
        ({"NO_COLOR": "1", "FORCE_COLOR": "1"}, True, False),
        ({"FORCE_COLOR": "1"}, False, True),
        ({"TERM": "dumb"}, True, False),
    ],
)
def test_colour_is_for_terminals_that_may_show_it(monkeypatch, variables, screen, coloured) -> None:
    for name in ("NO_COLOR", "FORCE_COLOR", "TERM"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    stream = Screen() if screen else io.StringIO()
    monkeypatch.setattr(sys, "stdout", stream)
    show(_SUMMARY, in_colour=True)
    assert ("\x1b[" in stream.getvalue()) is coloured
    assert click.unstyle(stream.getvalue()) == _SUMMARY + "\n"


def test_verdicts_are_coloured_and_nothing_else(monkeypatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    stream = Screen()
    monkeypatch.setattr(sys, "stdout", stream)
    show(_SUMMARY, in_colour=True)
    painted = re.findall(r"\x1b\[(\d+)m([^\x1b]+)\x1b\[0m", stream.getvalue())
    assert painted == [
        ("32", "complete"),
        ("1", "  passed        92.5%"),
        ("31", "  errors         1.0%    2 of 200"),
        ("31", "broken"),
    ]


def test_no_errors_are_not_red(monkeypatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("FORCE_COLOR", "1")
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stdout", stream)
    show("  errors         0.0%    0 of 200", in_colour=True)
    assert "\x1b" not in stream.getvalue()


def test_a_broken_gate_is_red_on_a_terminal(monkeypatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    stream = Screen()
    monkeypatch.setattr(sys, "stderr", stream)
    say("gate: cost<2: 3 USD", bad=True)
    assert stream.getvalue() == "\x1b[31msteelyard: gate: cost<2: 3 USD\x1b[0m\n"


def stderr_on_terminal(monkeypatch: pytest.MonkeyPatch) -> Screen:
    """A terminal of 80 columns, as stderr."""
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "80")
    stream = Screen()
    monkeypatch.setattr(sys, "stderr", stream)
    return stream


def test_a_warning_during_a_run_removes_the_bar_that_it_is_written_over(monkeypatch, tmp_path: Path) -> None:
    terminal = stderr_on_terminal(monkeypatch)
    with alone(tmp_path):
        log_to_stderr(quiet=False, verbose=False)
        logging.getLogger("steelyard").warning("judge could not score xx")
    assert terminal.getvalue() == "\r\x1b[999Msteelyard: warning: judge could not score xx\n"


def test_a_long_message_is_broken_between_words_on_a_terminal(monkeypatch) -> None:
    terminal = stderr_on_terminal(monkeypatch)
    say(
        "error rate, scoring errors included, 100.0% is above 0.0% (--max-error-rate); --retry-errors scores them again"
    )
    assert terminal.getvalue().splitlines() == [
        "steelyard: error rate, scoring errors included, 100.0% is above 0.0%",
        "  (--max-error-rate); --retry-errors scores them again",
    ]


def test_a_command_is_left_whole_for_copying(monkeypatch) -> None:
    terminal = stderr_on_terminal(monkeypatch)
    command = "steelyard run suite.yaml " + "--set target.model=my-model " * 4
    say(f"runs/a is complete with 3 errors. This retries them:\n  {command}")
    say(f"resume with: {command}", whole=True)
    assert terminal.getvalue().count(command) == 2


def test_elsewhere_a_message_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    say("word " * 100)
    assert len(stream.getvalue().splitlines()) == 1


def test_a_usage_error_is_broken_between_words_too(monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setenv("COLUMNS", "55")
    monkeypatch.setattr("tests.support.cli.io.StringIO", Screen)
    ended = run_cli(tmp_path, "gate", "runs/a", "--max-regression", "pass_rate=0.1")
    assert ended.code == 2
    assert ended.err.startswith("steelyard: --max-regression and --max-slowdown need a\n  --baseline\nMore: ")
