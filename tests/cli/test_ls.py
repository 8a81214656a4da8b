"""The list of runs: where the terminal is narrow, names of runs and figures are whole, and no row is broken."""

from __future__ import annotations

import pytest

from steelyard.cli.ls import ListRow, _table

NAME = "runs/capitals-20261118-164853"


def rows(*names: str) -> list[ListRow]:
    more = {"suite": "capitals", "model": "my-model", "created": "2026-11-18T16:48:53+00:00"}
    return [ListRow(run=name, state="complete", done=100, planned=200, pass_rate=0.925, **more) for name in names]


def test_at_80_columns_the_name_of_a_run_is_whole_and_no_row_is_broken() -> None:
    header, *lines = _table(rows(NAME, f"{NAME}-2"), 80).splitlines()
    assert header.split() == ["run", "state", "model", "done", "errors", "pass", "rate"]
    assert max(map(len, lines)) <= 80
    assert [line.split()[0] for line in lines] == [NAME, f"{NAME}-2"]
    assert all("100/200  0       92.5%" in line for line in lines)


def test_suite_and_model_are_cut_before_anything_is_left_out() -> None:
    run = ListRow(run="runs/a", state="complete", suite="s" * 40, model="m" * 30, created="2026-11-18T16:48:53+00:00")
    header, line = _table([run], 90).splitlines()
    assert "created" in header
    assert len(line) <= 90
    assert line.count("…") == 2


@pytest.mark.parametrize("columns", [20, 48, 60, 80, 90, 120])
def test_a_name_as_long_as_the_terminal_has_a_line_to_itself(columns: int) -> None:
    name = "runs/" + "x" * 70
    lines = _table(rows(name), columns).splitlines()
    assert name in [line.split("  ")[0] for line in lines]
    assert [line for line in lines if "92.5%" in line]
    assert columns < 48 or max(len(line) for line in lines if name not in line) <= columns


def test_a_note_below_the_list_is_broken_between_words() -> None:
    run = ListRow(run=NAME, state="complete", pass_rate=1.0, uncalibrated=["the judge is not calibrated " * 4])
    lines = _table([run], 80).splitlines()
    assert lines[2].startswith(f"* {NAME}: the judge is")
    assert max(map(len, lines)) <= 80


def test_elsewhere_everything_is_whole() -> None:
    (_, line) = _table(rows("runs/" + "x" * 120)).splitlines()
    assert "x" * 120 in line
    assert "2026-11-18" in line


def test_names_in_scripts_with_wide_characters_are_whole_and_aligned() -> None:
    wide, plain = _table(rows("runs/日本", "runs/a")).splitlines()[1:]
    assert wide.startswith("runs/日本  complete")
    assert plain.startswith("runs/a     complete")
