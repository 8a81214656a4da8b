"""An agent's trajectory, from its gateway's calls or from recorded turns: figures of each turn, text, a picture."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

import pytest

from steelyard import Result
from steelyard.report.case import OneCase, spoken
from steelyard.report.chart import chart_file
from steelyard.report.trajectory import AgentTrajectory, Span, read_trajectory, time_chart, time_line, trajectory_of
from tests.support.journal import a_record, write_journal
from tests.support.report import HOSTILE, a_call, worked_run, write_calls

ASKED = [{"role": "user", "content": "?"}]


def test_calls_become_turns_with_their_figures_and_tools_between(tmp_path: Path) -> None:
    run = worked_run(tmp_path)
    found = read_trajectory(run, "fixer", 0, 4.0)
    assert found is not None
    told = [(turn.message["role"], turn.thread, turn.figures.at, turn.figures.took) for turn in found.turns]
    assert told == [
        ("assistant", 1, 0.5, 1.0),
        ("user", 2, 1.5, 0.0),  # the sub-agent's question
        ("assistant", 2, 1.5, 1.0),
        ("tool", 1, 1.5, 1.5),  # from the reply that called it to the next request
        ("assistant", 1, 3.0, 0.5),
    ]
    first = found.turns[0].figures
    assert (first.model, first.first, first.input, first.output, first.cost) == ("large plain", 0.2, 10, 5, 0.5)
    assert found.turns[2].figures.waited == 0.5
    assert [found.seconds(part) for part in ("model", "waiting", "tools")] == [2.0, 0.5, 1.5]
    assert (found.total, found.calls, found.is_cut) == (4.0, 3, False)
    names = [(turn.role, turn.answers, turn.thread) for turn in spoken(found)]
    assert names[3] == ("tool", "t1", None)
    assert names[1] == ("user", None, 2)


def test_recorded_turns_take_from_the_one_before(tmp_path: Path) -> None:
    found = read_trajectory(worked_run(tmp_path), "printer", 0, 4.0)
    assert found is not None
    told = [(turn.message["role"], turn.figures.at, turn.figures.took) for turn in found.turns]
    assert told == [("assistant", 0.0, 1.0), ("tool", 1.0, 2.0), ("assistant", 3.0, 0.5)]
    assert [found.seconds(part) for part in ("model", "tools")] == [1.5, 2.5]  # the rest is the agent itself
    assert (found.turns[0].figures.input, found.turns[0].figures.cost) == (7, 0.25)


def test_a_request_that_moves_its_cache_mark_repeats_no_turn(tmp_path: Path) -> None:
    mark = {"type": "text", "text": "?", "cache_control": {"type": "ephemeral"}}
    plain = {"type": "text", "text": "?"}
    first = [{"role": "user", "content": [mark]}]
    said = {"role": "assistant", "content": "one"}
    second = [{"role": "user", "content": [plain]}, said, {"role": "user", "content": [{**mark, "text": "more"}]}]
    reply = {"messages": [said]}
    write_calls(tmp_path, "c", [a_call(1, 0.0, 1.0, first, **reply), a_call(2, 2.0, 1.0, second, **reply)])
    found = read_trajectory(tmp_path, "c", 0)
    assert found is not None
    assert [turn.text for turn in spoken(found)] == ["one", "more", "one"]


def test_the_last_attempt_counts_and_a_failed_call_is_told(tmp_path: Path) -> None:
    write_calls(tmp_path, "c", [a_call(1, 0.0, 9.0, ASKED)], is_ended=False)
    write_calls(tmp_path, "c", [a_call(1, 1.0, 2.0, ASKED, error="it broke", http_status=500)])
    found = read_trajectory(tmp_path, "c", 0)
    assert found is not None
    assert [(turn.figures.at, turn.figures.error) for turn in found.turns] == [(1.0, "it broke")]
    assert found.total == 3.0


def test_a_case_without_either_has_none(tmp_path: Path) -> None:
    write_journal(tmp_path, [a_record(id="c")])
    (record,) = Result.load(tmp_path).iter_responses()
    assert trajectory_of(tmp_path, record) is None
    assert "model" not in OneCase(tmp_path, "c").to_text()


def test_a_time_line_tells_models_waits_and_tools_apart() -> None:
    spans = [Span("waiting", 10.0, 15.0), Span("model", 15.0, 30.0), Span("model", 25.0, 40.0, 2)]
    line = time_line(AgentTrajectory([], spans, 60.0))
    assert line == "░" * 10 + "·" * 5 + "█" * 25 + "░" * 20


def test_the_text_of_a_case_has_its_calls_or_its_turns(tmp_path: Path) -> None:
    run = worked_run(tmp_path)
    text = OneCase(run, "fixer").to_text()
    assert "model calls: 3 in 4.00s; █ model 2.00s, · waiting 500ms, ░ tools 1.50s" in text
    assert "1.50s  (conversation 2)  small  took 1.00s  of it waiting 500ms  tokens 10 + 5  cost 0.5" in text
    assert f"patch: {run}/artifacts/fixer/0/workspace.patch (1 file changed)" in text
    assert f"log: {run}/logs/fixer/0.out (14 B)" in text
    assert f"kept: 2 files in {run}/artifacts/fixer/0" in text
    text = OneCase(run, "printer").to_text()
    assert "2 turns in 4.00s; █ model 1.50s, ░ tools 2.50s" in text
    assert "0s  took 1.00s  tokens 7 + 2  cost 0.25" in text


@pytest.mark.parametrize("text", HOSTILE)
def test_the_picture_is_well_formed_whatever_models_and_tools_are_called(tmp_path: Path, text: str) -> None:
    found = read_trajectory(worked_run(tmp_path, text), "fixer", 0, 4.0)
    assert found is not None
    chart, height = time_chart(found)
    root = ElementTree.fromstring(chart_file("Time line", "", [chart], 570, height))
    kinds = {element.tag.rpartition("}")[2] for element in root.iter()}
    assert kinds <= {"svg", "g", "style", "rect", "text", "title", "desc", "line", "circle"}
    assert "rect" in kinds
    assert not any(name.startswith("on") for element in root.iter() for name in element.attrib)


def test_lanes_are_few_and_bars_bounded_however_many_calls_there_are(tmp_path: Path) -> None:
    spans = [Span("model", float(number), number + 0.5, 1 + number % 50) for number in range(5_000)]
    many = [Span("tools", number + 0.5, number + 1.0) for number in range(5_000)]
    chart, height = time_chart(AgentTrajectory([], [*spans, *many], 5_000.0))
    assert len(chart.bars) <= 7 * 600
    assert len(chart.rows) == 7
    assert height < 300
    covered = sum(bar.end - bar.begin for bar in chart.bars if bar.kind == "span-tools")
    assert covered == pytest.approx(5_000, rel=0.02)  # joined, none lost


def test_a_result_gives_the_calls_of_a_case(tmp_path: Path) -> None:
    result = Result.load(worked_run(tmp_path))
    (session,) = result.calls("fixer")
    assert [one.body["model"] for one in session.calls] == ["large plain", "small", "m"]
    assert result.calls("printer") == []
