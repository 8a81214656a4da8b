"""The list of runs: names are cut where the terminal is narrow, figures never."""

from __future__ import annotations

from steelyard.cli.ls import ListRow, _table


def rows() -> list[ListRow]:
    long = "runs/" + "x" * 60
    return [
        ListRow(run=long, state="complete", suite="s" * 40, model="m" * 30, done=200, planned=200, pass_rate=0.925),
        ListRow(run="runs/b", state="interrupted", suite="capitals", model=None, done=1_000, planned=20_000),
    ]


def test_a_narrow_terminal_cuts_names_and_no_figure() -> None:
    lines = _table(rows(), 90).splitlines()
    assert max(map(len, lines)) <= 90
    assert "200/200" in lines[1]
    assert "92.5%" in lines[1]
    assert "…" in lines[1]
    assert "1,000/20,000" in lines[2]


def test_elsewhere_names_are_whole() -> None:
    assert "x" * 60 in _table(rows())
