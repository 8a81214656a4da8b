"""`steelyard label`: a key each on a terminal, a line each without one."""

from __future__ import annotations

import fcntl
import io
import os
import pty
import select
import struct
import subprocess
import termios
import time
import unicodedata
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from steelyard import EvalCase, EvalSet, Runner
from steelyard.cli.label import _Shown, screen, wrapped
from steelyard.journal.labels import LabelLog
from steelyard.report.labels import LabelItem, LabelSession
from tests.support.audited import audited_run, right
from tests.support.cli import STEELYARD, Ended, run_cli

HOSTILE = "\x1b[31mred\x1b]0;title\x07 \u202eevil\r\n::error::x\t<b>\x9b2J"


@pytest.fixture
def place(tmp_path: Path) -> Path:
    return audited_run(tmp_path)


def typed(monkeypatch: pytest.MonkeyPatch, folder: Path, text: str, *words: str) -> Ended:
    monkeypatch.setattr("sys.stdin", io.StringIO(text))
    return run_cli(folder, "label", "RUN", *words)


def columns(line: str) -> int:
    return sum(0 if unicodedata.combining(one) else 1 + (unicodedata.east_asian_width(one) in "WF") for one in line)


def test_without_a_terminal_each_line_is_a_key_and_a_comment(
    place: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    ended = typed(monkeypatch, tmp_path, "p well said\ne\nf\nx\ns\nu\nq\n", "--labeller", "anna")
    assert ended.code == 0, ended.err
    assert ended.out.count(" Answer") == 6, "four answers, one of them again for `e` and one that came back"
    assert "Expected\n   yes" in ended.out
    assert "'x' is none of the keys" in ended.err
    assert "anna: 2 of 76: 1 pass, 1 fail\n74 answers left\nagreement so far, by all labels:" in ended.out
    assert "resume with: steelyard label RUN --labeller anna" in ended.err
    first, _ = LabelLog(place).current["anna"].values()
    assert (first.grade, first.comment) == ("pass", "well said")
    again = typed(monkeypatch, tmp_path, "", "--labeller", "anna")
    assert "2 of 76: 1 pass, 1 fail" in again.out


def test_all_of_them_labelled_exported_and_calibrated(
    place: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    session = LabelSession(place, "anna", count=20)
    while (item := session.current) is not None:
        ended = typed(monkeypatch, tmp_path, "p\n" if right(item.id) else "f\n", "--labeller", "anna")
        assert ended.code == 0, ended.err
        if session.progress.labelled == 5:
            break
    while (item := session.current) is not None:
        session.label((item.id, item.trial), int(right(item.id)))
    assert (
        "compare the judges with them: steelyard calibrate RUN"
        in typed(monkeypatch, tmp_path, "", "--labeller", "anna").err
    )
    status = run_cli(tmp_path, "label", "RUN", "--status", "--labeller", "anna")
    assert "all answers of the sample are labelled" in status.out
    exported = run_cli(tmp_path, "label", "RUN", "--export", "labels.csv")
    assert "the labels are in labels.csv: steelyard calibrate RUN --labels labels.csv" in exported.err
    by_file = run_cli(tmp_path, "calibrate", "RUN", "--labels", "labels.csv")
    assert by_file.out == run_cli(tmp_path, "calibrate", "RUN").out
    assert "corrected" in by_file.out
    assert "corrected" in run_cli(tmp_path, "report", "RUN").out


def test_grades_have_their_keys(place: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    ended = typed(monkeypatch, tmp_path, "5\n2\n6\n", "--labeller", "anna", "--scale", "1-5")
    assert "1–5 grade" in ended.out
    assert "anna: 2 of 76: 5 ×1, 2 ×1" in ended.out
    assert [one.label for one in LabelLog(place).current["anna"].values()] == [1.0, 0.25]
    other = typed(monkeypatch, tmp_path, "", "--scale", "pass/fail")
    assert other.code == 2
    assert "has labels on the scale 1,2,3,4,5, not pass/fail" in other.err


def test_a_screen_fits_80_columns_and_nothing_steers_the_terminal(tmp_path: Path) -> None:
    text = HOSTILE + "\n" + "many words " * 200 + "日本語" * 60 + "x" * 300
    cases = [EvalCase(id=f"c{n}", prompt=text, expected="\x1b[2J") for n in range(3)]
    Runner(lambda case: text, EvalSet("s", cases), ["exact"], output_path=tmp_path / "RUN", progress="off").run_sync()
    session = LabelSession(tmp_path / "RUN", "Ännå " + "x" * 30)
    item = session.current
    assert item is not None
    shown = _Shown()
    shown.expected, shown.comment = True, HOSTILE
    pages = []
    for number in range(30):
        shown.page = number
        page = screen(session, item, shown, 80, 24)
        lines = page.split("\n")
        assert len(lines) == 23
        assert max(map(columns, lines)) <= 79
        assert not any(unicodedata.category(one) in ("Cc", "Cf") for line in lines for one in line)
        pages.append(page)
    assert "page 1 of " in pages[0]
    seen = "".join(dict.fromkeys("".join(page.split("\n")[2:-2]) for page in pages))
    for part in ("␛[31mred␛]0;title␇", "many words", "日本語", "Expected", "␛[2J", "Your comment"):
        assert part in seen


@given(st.text(alphabet=st.sampled_from("ab 日\u0301\n"), max_size=200), st.integers(2, 30))
def test_wrapping_keeps_every_character_but_blanks_and_never_exceeds_the_width(text: str, width: int) -> None:
    lines = wrapped(text, width)
    assert all(columns(line) <= width for line in lines)
    assert "".join(lines).replace(" ", "") == text.replace("\n", "").replace(" ", "")


def test_an_item_without_a_question_says_where_to_get_it(place: Path) -> None:
    session = LabelSession(place, "anna")
    item = LabelItem(id="a", trial=0, question="", answer="", expected=None, conversation=None)
    assert "--suite names the suite" in (page := screen(session, item, _Shown(), 80, 24))
    assert "(the answer is empty)" in page


class Terminal:
    """A real terminal of 80 by 24 with the command in it."""

    def __init__(self, folder: Path, *words: str) -> None:
        self._own, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
        environment = {**os.environ, "TERM": "xterm", "PYTHONUTF8": "1"}
        environment.pop("COLUMNS", None)
        self.process = subprocess.Popen(
            [STEELYARD, *words], cwd=folder, stdin=theirs, stdout=theirs, stderr=theirs, env=environment,
            start_new_session=True, preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        )  # fmt: skip
        os.close(theirs)
        self._seen = b""

    def until(self, text: str) -> str:
        """What came since, up to and with this text."""
        wanted, deadline = text.encode(), time.monotonic() + 30
        while wanted not in self._seen:
            ready, _, _ = select.select([self._own], [], [], max(deadline - time.monotonic(), 0))
            assert ready, f"no {text!r} in {self._seen!r}"
            try:
                self._seen += os.read(self._own, 65_536)
            except OSError as error:
                raise AssertionError(f"ended without {text!r}: {self._seen!r}") from error
        before, _, self._seen = self._seen.partition(wanted)
        return (before + wanted).decode("utf-8", "replace")

    def is_reading(self) -> bool:
        """Whether the command waits for a key: only then is the terminal raw."""
        return not termios.tcgetattr(self._own)[3] & termios.ICANON

    def press(self, keys: str) -> None:
        """Press a key once the command waits for one: what is typed earlier is dropped."""
        deadline = time.monotonic() + 30
        while not self.is_reading():
            assert time.monotonic() < deadline
            time.sleep(0.005)
        os.write(self._own, keys.encode())

    def close(self) -> int:
        code = self.process.wait(30)
        os.close(self._own)
        return code


@pytest.mark.slow
def test_a_session_on_a_terminal(place: Path, tmp_path: Path) -> None:
    terminal = Terminal(tmp_path, "label", "RUN", "--labeller", "anna")
    terminal.until("0 of 76")
    terminal.until("q quit")
    terminal.press("p")
    terminal.until("1 of 76: 1 pass")
    terminal.until("q quit")
    terminal.press("e")
    terminal.until("e hide expected")
    terminal.until("q quit")
    terminal.press("c")
    terminal.until("comment: ")
    os.write(terminal._own, b"too vague\r")
    terminal.until("Your comment")
    terminal.until("q quit")
    terminal.press("f")
    terminal.until("2 of 76: 1 pass, 1 fail")
    terminal.until("q quit")
    terminal.press("u")
    terminal.until("1 of 76: 1 pass")
    terminal.until("q quit")
    terminal.press("s")
    terminal.until("1 skipped")
    terminal.until("q quit")
    terminal.press("q")
    terminal.until("\x1b[?1049l")
    assert "agreement so far" in terminal.until("resume with")
    assert terminal.close() == 0
    actions = [one.action for one in LabelLog(place).current["anna"].values()]
    assert actions == ["label", "skip"]
    again = Terminal(tmp_path, "label", "RUN", "--labeller", "anna")
    again.until("2 of 76: 1 pass, 1 skipped")
    again.until("q quit")
    again.press("\x03")
    again.until("resume with")
    assert again.close() == 130
