"""The live display: what it says, how wide, how often, and that it never harms the terminal or the run."""

from __future__ import annotations

import fcntl
import io
import logging
import os
import pty
import re
import struct
import sys
import termios
import threading
import types

import pytest

from steelyard.errors import ConfigurationError
from steelyard.progress import display as display_module
from steelyard.progress.display import LiveDisplay, NotebookBar, PlainLines, TerminalBar, choose_output
from steelyard.protocols import InFlight
from steelyard.records import InvocationResponse
from steelyard.stats.running import RunningStats

BUSY = InFlight(50, "fr", 80.0)


class Clock:
    """A clock that goes where it is told."""

    now = 1000.0

    def __call__(self) -> float:
        return self.now


class Screen:
    """Just enough of a terminal: text, line feed, return, up, clear to the end of the line, delete lines."""

    def __init__(self) -> None:
        self.rows: list[str] = [""]
        self.row = self.column = 0

    def feed(self, text: str) -> None:
        for token in re.findall(r"\x1b\[\d*[A-Za-z]|.|\n", text):
            self._apply(token)

    def _apply(self, token: str) -> None:
        if token == "\n":
            self.row, self.column = self.row + 1, 0
            self.rows += [""] * (self.row + 1 - len(self.rows))
        elif token == "\r":
            self.column = 0
        elif token == "\x1b[A":
            self.row -= 1
        elif token == "\x1b[K":
            self.rows[self.row] = self.rows[self.row][: self.column]
        elif token == "\x1b[999M":
            del self.rows[self.row :]
            self.rows.append("")
        else:
            assert token.isprintable(), f"unexpected control {token!r}"
            line = self.rows[self.row].ljust(self.column)
            self.rows[self.row] = line[: self.column] + token + line[self.column + 1 :]
            self.column += 1


def some_stats(count: int = 20) -> RunningStats:
    stats = RunningStats()
    for _ in range(count):
        stats.update(
            InvocationResponse(
                time_to_first_token=0.25,
                time_to_last_token=1.5,
                time_per_output_token=0.0125,
                num_tokens_input=1000,
                num_tokens_output=321,
            )
        )
    stats.update_failed(2)
    return stats


def display(stream: io.StringIO, mode: str, clock: Clock | None = None, **more) -> LiveDisplay:
    settings = {"description": "capitals", "total": 200, "initial": 0, "spec": None} | more
    return LiveDisplay(mode=mode, stream=stream, clock=clock or Clock(), **settings)


def at_width(monkeypatch: pytest.MonkeyPatch, columns: int) -> None:
    monkeypatch.setattr(display_module._Stream, "columns", lambda self: columns)


def screen_of(stream: io.StringIO) -> list[str]:
    screen = Screen()
    screen.feed(stream.getvalue())
    return screen.rows


# --- the bar ---------------------------------------------------------------------------------------------


def test_a_wide_bar_shows_count_times_rate_and_every_figure(monkeypatch):
    at_width(monkeypatch, 200)
    stream, clock = io.StringIO(), Clock()
    shown = display(stream, "bar", clock)
    clock.now += 5.0
    shown.refresh(120, some_stats(), BUSY, 50)
    first, second = screen_of(stream)
    assert first.startswith("capitals  60%|███")
    assert first.endswith("| 120/200 [00:05<00:03, 24/s] 50 in flight")
    assert second == (
        "errors 2 · first token p50 250ms p90 250ms · last token p50 1.50s p90 1.50s · 80 tok/s"
        " · tokens in 20,000 out 6,420"
    )


@pytest.mark.parametrize("columns", [20, 40, 80, 120, 200])
@pytest.mark.parametrize("description", ["capitals", "a" * 300, "国" * 100, "{desc}{0}"])
def test_no_line_reaches_the_last_column(monkeypatch, columns, description):
    at_width(monkeypatch, columns)
    stream, clock = io.StringIO(), Clock()
    shown = display(stream, "bar", clock, description=description, total=1_000_000)
    clock.now += 61.0
    shown.refresh(0, some_stats(), InFlight(5000, "国" * 200, 61.0), 5000)
    shown.refresh(123_456, some_stats(), BUSY, 50)
    for line in screen_of(stream):
        assert display_module.trim(line, columns - 1) == line


def test_what_does_not_fit_is_left_out_whole(monkeypatch):
    at_width(monkeypatch, 80)
    stream = io.StringIO()
    display(stream, "bar").refresh(120, some_stats(), BUSY, 50)
    assert screen_of(stream)[1] == ("errors 2 · first token p50 250ms p90 250ms · last token p50 1.50s p90 1.50s …")


def test_after_a_resize_the_old_lines_are_removed_before_the_new_ones_are_drawn(monkeypatch):
    stream = io.StringIO()
    at_width(monkeypatch, 200)
    shown = display(stream, "bar")
    shown.refresh(10, some_stats(), BUSY, 50)
    shown.refresh(11, some_stats(), BUSY, 50)
    written = len(stream.getvalue())
    at_width(monkeypatch, 60)
    shown.refresh(12, some_stats(), BUSY, 50)
    assert stream.getvalue()[written:].startswith("\r\x1b[999M")
    assert stream.getvalue().count("\x1b[999M") == 2, "once at the first drawing, once at the resize"
    assert len(screen_of(stream)) == 2


def test_only_the_sittings_own_work_makes_the_rate(monkeypatch):
    at_width(monkeypatch, 120)
    stream, clock = io.StringIO(), Clock()
    shown = display(stream, "bar", clock, initial=100)
    clock.now += 10.0
    shown.refresh(120, some_stats(), BUSY, 50)
    assert "120/200 [00:10<00:40, 2/s]" in screen_of(stream)[0]


def test_fewer_in_flight_than_allowed_is_said(monkeypatch):
    at_width(monkeypatch, 120)
    stream = io.StringIO()
    display(stream, "bar").refresh(120, some_stats(), InFlight(7, "fr", 1.0), 50)
    assert screen_of(stream)[0].endswith("7 of 50 in flight")


def test_an_empty_spec_leaves_the_bar_alone_on_one_line(monkeypatch):
    at_width(monkeypatch, 80)
    stream = io.StringIO()
    display(stream, "bar", spec={}).refresh(120, some_stats(), BUSY, 50)
    assert len(screen_of(stream)) == 1


def test_closing_leaves_the_bar_and_nothing_else(monkeypatch):
    at_width(monkeypatch, 80)
    stream = io.StringIO()
    shown = display(stream, "bar")
    shown.refresh(120, some_stats(), BUSY, 50)
    shown.close(200, some_stats())
    shown.close(200, some_stats())
    rows = screen_of(stream)
    assert rows[0].startswith("capitals 100%|███")
    assert rows[1:] == [""]


def test_hostile_characters_in_the_description_and_the_ids_are_neutralised(monkeypatch):
    at_width(monkeypatch, 120)
    stream, clock = io.StringIO(), Clock()
    shown = display(stream, "bar", clock, description="a\x1b]0;owned\x07\n\u202eb\ud800")
    clock.now += 100.0
    shown.refresh(0, some_stats(), InFlight(1, "\x1b[31mid\r", 100.0), 1)
    first, second = screen_of(stream)
    assert first.startswith("a�]0;owned���b� ")
    assert "oldest '�[31mid�' for 100 s" in second


def test_no_thread_is_started(monkeypatch):
    at_width(monkeypatch, 80)
    before = set(threading.enumerate())
    shown = display(io.StringIO(), "bar")
    shown.refresh(120, some_stats(), BUSY, 50)
    assert set(threading.enumerate()) <= before
    shown.close(120, some_stats())


def test_the_width_is_asked_of_the_terminal_itself():
    leader, follower = pty.openpty()
    try:
        fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 93, 0, 0))
        with os.fdopen(follower, "w", encoding="utf-8") as stream:
            assert isinstance(choose_output("auto", stream), TerminalBar)
            assert display_module._Stream(stream).columns() == 93
    finally:
        os.close(leader)


# --- plain lines -----------------------------------------------------------------------------------------


def test_lines_come_at_first_then_every_five_seconds_then_at_the_end():
    stream, clock = io.StringIO(), Clock()
    shown = display(stream, "lines", clock, spec={"failed": "failed"})
    for tick in range(61):
        clock.now = 1000.0 + tick * 0.2
        shown.refresh(tick, some_stats(), BUSY, 50)
    shown.close(61, some_stats())
    assert stream.getvalue().splitlines() == [
        "capitals 0/200 0% \N{EN DASH}/s failed 2",
        "capitals 25/200 12% 5/s failed 2",
        "capitals 50/200 25% 5/s failed 2",
        "capitals 61/200 30% 5.08/s failed 2",
    ]


def test_an_unchanged_state_is_not_repeated():
    stream, clock = io.StringIO(), Clock()
    shown = display(stream, "lines", clock)
    for _ in range(10):
        clock.now += 5.0
        shown.refresh(3, some_stats(), BUSY, 50)
    shown.close(3, some_stats())
    assert len(stream.getvalue().splitlines()) == 1


def test_a_line_has_every_figure_and_no_control_codes():
    stream, clock = io.StringIO(), Clock()
    shown = display(stream, "lines", clock)
    clock.now += 5.0
    shown.refresh(120, some_stats(), BUSY, 50)
    lines = stream.getvalue().splitlines()
    assert lines[0].startswith("capitals 120/200 60% 24/s errors 2 · first token p50 250ms p90 250ms · ")
    assert all(line.isprintable() for line in lines)


# --- silence ---------------------------------------------------------------------------------------------


def test_silence_is_reported_once_a_minute_in_lines_until_something_comes_back():
    stream, clock = io.StringIO(), Clock()
    shown = display(stream, "lines", clock, spec={})
    shown.refresh(10, some_stats(), BUSY, 50)
    for second in range(1, 190):
        clock.now = 1000.0 + second
        shown.refresh(10, some_stats(), InFlight(50, "fr", second + 5.0), 50)
    clock.now += 1.0
    shown.refresh(11, some_stats(), BUSY, 50)
    clock.now += 59.0
    shown.refresh(11, some_stats(), BUSY, 50)
    lines = stream.getvalue().splitlines()
    assert lines[1:4] == [
        f"capitals no answer for {second} s: 50 in flight, oldest 'fr' for {second + 5} s" for second in (60, 120, 180)
    ]
    assert [line.split()[1] for line in lines] == ["10/200", "no", "no", "no", "11/200"]


def test_in_the_bar_silence_takes_the_second_line_and_leaves_it_again(monkeypatch):
    at_width(monkeypatch, 100)
    stream, clock = io.StringIO(), Clock()
    shown = display(stream, "bar", clock, silence_after=10.0)
    clock.now += 9.0
    shown.refresh(0, some_stats(), BUSY, 50)
    assert screen_of(stream)[1].startswith("errors")
    clock.now += 1.0
    shown.refresh(0, some_stats(), BUSY, 50)
    assert screen_of(stream)[1] == "no answer for 10 s: 50 in flight, oldest 'fr' for 80 s"
    shown.refresh(1, some_stats(), BUSY, 50)
    assert screen_of(stream)[1].startswith("errors")


def test_silence_with_nothing_in_flight_names_no_oldest(monkeypatch):
    at_width(monkeypatch, 100)
    stream, clock = io.StringIO(), Clock()
    shown = display(stream, "bar", clock)
    clock.now += 75.0
    shown.refresh(0, some_stats(), InFlight(0, None, 0.0), 50)
    assert screen_of(stream)[1] == "no answer for 75 s: 0 in flight"


# --- choosing, and streams that misbehave ----------------------------------------------------------------


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("mode", "stream", "term", "expected"),
    [
        ("auto", Terminal(), "xterm", TerminalBar),
        ("auto", Terminal(), "dumb", PlainLines),
        ("auto", io.StringIO(), "xterm", PlainLines),
        ("bar", io.StringIO(), "xterm", TerminalBar),
        ("lines", Terminal(), "xterm", PlainLines),
        ("off", Terminal(), "xterm", type(None)),
    ],
)
def test_auto_draws_a_bar_only_where_one_can_be_seen(monkeypatch, mode, stream, term, expected):
    monkeypatch.setenv("TERM", term)
    assert type(choose_output(mode, stream)) is expected


def pretend_notebook(monkeypatch: pytest.MonkeyPatch, *, config: dict, widgets: bool) -> None:
    shell = types.SimpleNamespace(config=config)
    monkeypatch.setitem(sys.modules, "IPython", types.SimpleNamespace(get_ipython=lambda: shell))
    monkeypatch.setitem(sys.modules, "ipywidgets", types.ModuleType("ipywidgets") if widgets else None)


def test_a_notebook_with_widgets_gets_the_widget(monkeypatch):
    pretend_notebook(monkeypatch, config={"IPKernelApp": {}}, widgets=True)
    assert isinstance(choose_output("auto", io.StringIO()), NotebookBar)


@pytest.mark.parametrize(("config", "widgets"), [({"IPKernelApp": {}}, False), ({}, True)])
def test_a_notebook_without_widgets_and_a_plain_ipython_get_lines(monkeypatch, config, widgets):
    pretend_notebook(monkeypatch, config=config, widgets=widgets)
    assert isinstance(choose_output("auto", io.StringIO()), PlainLines)


def test_off_says_nothing():
    stream = io.StringIO()
    shown = display(stream, "off")
    shown.refresh(1, some_stats(), BUSY, 50)
    shown.close(2, some_stats())
    assert stream.getvalue() == ""


def test_an_unknown_mode_is_refused():
    with pytest.raises(ConfigurationError, match="auto, bar, lines, off, got 'loud'"):
        display(io.StringIO(), "loud")


@pytest.mark.parametrize("mode", ["bar", "lines"])
def test_a_stream_that_is_closed_or_broken_does_not_end_the_run(mode):
    closed = io.StringIO()
    shown = display(closed, mode)
    closed.close()
    shown.refresh(1, some_stats(), BUSY, 50)
    shown.close(2, some_stats())

    class Broken(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError

    display(Broken(), mode).refresh(1, some_stats(), BUSY, 50)


@pytest.mark.parametrize("mode", ["bar", "lines"])
def test_a_stream_that_knows_only_ascii_gets_ascii(mode):
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding="ascii", errors="strict")
    shown = display(stream, mode, description="città")
    shown.refresh(120, RunningStats(), BUSY, 50)
    shown.close(200, some_stats())
    text = raw.getvalue().decode("ascii")
    assert "citt?" in text
    assert "200/200" in text


def test_a_run_of_a_duration_is_shown_as_far_as_its_time_has_gone() -> None:
    stream, clock = io.StringIO(), Clock()
    shown = display(stream, "lines", clock, total=0, initial=0, duration=60.0)
    clock.now += 15.0
    shown.refresh(100, RunningStats(), BUSY, 50)
    clock.now += 50.0
    shown.close(430, RunningStats())
    first, last = stream.getvalue().splitlines()[-2:]
    assert "100/400 25%" in first
    assert "430/430 100%" in last


def test_the_pass_rate_and_the_cost_are_shown_where_they_are_known(monkeypatch):
    at_width(monkeypatch, 200)
    stream = io.StringIO()
    outcomes = {"pass_rate": "92.5% (88%–96%)", "cost": "0.12 USD"}
    display(stream, "bar").refresh(120, some_stats(), BUSY, 50, outcomes)
    assert "errors 2 · passed 92.5% (88%–96%) · cost 0.12 USD · first token" in stream.getvalue()


def test_without_scorers_and_prices_neither_is_shown(monkeypatch):
    at_width(monkeypatch, 200)
    stream = io.StringIO()
    display(stream, "bar").refresh(120, some_stats(), BUSY, 50)
    assert "passed" not in stream.getvalue()
    assert "cost" not in stream.getvalue()


# --- log lines while a bar is shown ----------------------------------------------------------------------


OUR_LOG = logging.getLogger("steelyard")


def without_handlers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Our log as a program has it that configures no logging. Not a fixture: pytest adds its handlers after those."""
    for logger in (OUR_LOG, logging.root):
        monkeypatch.setattr(logger, "handlers", [])


def logged(monkeypatch: pytest.MonkeyPatch, displays: int = 1) -> list[str]:
    """What is on the screen after a warning and a notice during a run, and another warning after it."""
    at_width(monkeypatch, 80)
    screen = io.StringIO()
    monkeypatch.setattr(sys, "stderr", screen)
    shown = [display(screen, "bar", total=10) for _ in range(displays)]
    shown[0].refresh(5, some_stats(), BUSY, 50)
    OUR_LOG.warning("the cache is full")
    OUR_LOG.info("5 cases are left")
    shown[0].refresh(6, some_stats(), BUSY, 50)
    for one in shown:
        one.close(10, some_stats())
    OUR_LOG.warning("done")
    return screen_of(screen)


def test_a_warning_has_a_line_of_its_own_above_the_bar(monkeypatch):
    without_handlers(monkeypatch)
    rows = logged(monkeypatch)
    assert (rows[0], rows[2:]) == ("the cache is full", ["done", ""])
    assert rows[1].startswith("capitals 100%|")
    assert OUR_LOG.handlers == []


@pytest.mark.parametrize("name", ["steelyard", None])
def test_the_programs_own_handler_writes_each_line_once_above_the_bar(monkeypatch, name):
    without_handlers(monkeypatch)
    screen = types.SimpleNamespace(write=lambda text: sys.stderr.write(text), flush=lambda: None)
    handler = logging.StreamHandler(screen)
    handler.setFormatter(logging.Formatter("LOG %(message)s"))
    logging.getLogger(name).addHandler(handler)
    rows = logged(monkeypatch)
    assert (rows[0], rows[2:]) == ("LOG the cache is full", ["LOG done", ""])
    assert rows[1].startswith("capitals 100%|")


def test_two_bars_at_once_write_a_warning_once(monkeypatch):
    without_handlers(monkeypatch)
    rows = logged(monkeypatch, displays=2)
    assert rows.count("the cache is full") == 1


@pytest.mark.parametrize("mode", ["lines", "off"])
def test_the_log_is_left_alone_where_there_is_no_bar(monkeypatch, mode):
    without_handlers(monkeypatch)
    shown = display(io.StringIO(), mode)
    assert OUR_LOG.handlers == []
    shown.close(0, RunningStats())
