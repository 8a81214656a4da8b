"""What a journal says when it is read again: the last good word on each case, and figures as of one launch."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from steelyard import EvalCase, InvocationResponse, Result, RunningStats, RunRefused
from steelyard.journal import replay
from steelyard.protocols import InvocationContext
from steelyard.records import Record
from tests.support.crash import without_clocks
from tests.support.journal import (
    CountedModel,
    a_record,
    cases,
    drawn_answer,
    reopen,
    run_in,
    without_syncs,
    write_journal,
)

COUNT = 6


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    without_syncs(monkeypatch)


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> list[Record]:
    """The records of an undisturbed run, in case order."""
    run = tmp_path_factory.mktemp("originals") / "run"
    return run_in(run, CountedModel(), cases(COUNT)).load_responses()


def changed(record: Record, **changes: Any) -> Record:
    return msgspec.structs.replace(record, **changes)


def failed(record: Record, kind: str = "ValueError") -> Record:
    """The same case, asked in vain."""
    return changed(
        record,
        status="error",
        error=f"{kind}: no",
        error_type=kind,
        response_text=None,
        time_to_first_token=None,
        time_to_last_token=None,
        num_tokens_input=None,
        num_tokens_output=None,
        scores=[],
    )


def resumed(run: Path, records: list[Record], asked: list[EvalCase] | None = None) -> tuple[list[str], Result]:
    """Who is asked when a run goes on from these records, and its result."""
    write_journal(run, records)
    model = CountedModel()
    run_in(run, model, asked or cases(COUNT))
    return model.called, Result.load(run)


def test_the_last_ok_record_wins(tmp_path: Path, originals: list[Record]) -> None:
    later = changed(originals[0], response_text="later", num_tokens_output=1_000_000)
    called, result = resumed(tmp_path, [*originals, later])
    assert called == []
    assert result.load_responses()[0].response_text == "later"
    assert result.metrics["n"] == COUNT
    others = sum(record.num_tokens_output or 0 for record in originals[1:])
    assert result.stats["total_output_tokens"] == 1_000_000 + others


def test_an_error_after_an_ok_record_changes_nothing(tmp_path: Path, originals: list[Record]) -> None:
    called, result = resumed(tmp_path, [*originals, failed(originals[2])])
    assert called == []
    assert result.metrics["counts"]["error"] == 0
    assert result.metrics["errors"] == {}
    assert [record.response_text for record in result.load_responses()] == [r.response_text for r in originals]


def test_an_error_is_asked_again_and_then_leaves_the_counts(tmp_path: Path, originals: list[Record]) -> None:
    called, result = resumed(tmp_path, [failed(originals[0]), failed(originals[0]), *originals[1:]])
    assert called == ["c0"]
    assert result.metrics["counts"] == {"planned": COUNT, "ok": COUNT, "error": 0, "cancelled": 0, "not_started": 0}
    assert result.metrics["errors"] == {}
    assert result.stats["failed_requests"] == 0


def test_an_unfinished_runs_figures_leave_superseded_errors_out(tmp_path: Path, originals: list[Record]) -> None:
    """Read without the suite, whichever way round an error and an answer stand."""
    records = [
        failed(originals[0]),
        originals[0],
        originals[1],
        failed(originals[1], "KeyError"),
        failed(originals[2], "KeyError"),
        failed(originals[2], "TimeoutError"),
    ]
    write_journal(tmp_path, records)
    metrics = Result.load(tmp_path).metrics
    assert metrics["counts"]["ok"] == 2
    assert metrics["counts"]["error"] == 1
    assert metrics["errors"] == {"TimeoutError": 1}
    assert not metrics["complete"]


def test_types_of_error_beyond_counting_are_counted_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, originals: list[Record]
) -> None:
    monkeypatch.setattr(replay, "_MAX_KINDS", 3)
    write_journal(tmp_path, [failed(record, f"Kind{record.index}") for record in reversed(originals)])
    assert Result.load(tmp_path).metrics["errors"] == {"error": COUNT - 2, "Kind0": 1, "Kind1": 1}


def test_an_edited_case_is_asked_anew_and_its_old_record_left_out(tmp_path: Path, originals: list[Record]) -> None:
    asked = cases(COUNT)
    asked[3].prompt = "another question"
    called, result = resumed(tmp_path, originals, asked)
    assert called == ["c3"]
    assert result.metrics["left_out"] == 1
    assert result.metrics["n"] == COUNT
    assert len(result.load_responses()) == COUNT


def test_an_edited_case_that_now_fails_is_an_error_whatever_the_old_record_says(
    tmp_path: Path, originals: list[Record]
) -> None:
    asked = cases(COUNT)
    asked[3].prompt = "another question"
    write_journal(tmp_path, originals)
    run_in(tmp_path, CountedModel(only_fails), asked)
    result = Result.load(tmp_path)
    assert result.metrics["counts"]["error"] == 1
    assert [record.status for record in result.load_responses()] == ["ok"] * 3 + ["error"] + ["ok"] * 2


def only_fails(case: EvalCase, context: InvocationContext) -> InvocationResponse:
    raise ValueError("no")


def test_a_removed_case_is_left_out_of_figures_and_responses(tmp_path: Path, originals: list[Record]) -> None:
    called, result = resumed(tmp_path, originals, cases(COUNT)[:-1])
    assert called == []
    assert result.metrics["left_out"] == 1
    assert result.metrics["n"] == COUNT - 1 == len(result.load_responses())


def test_cases_in_another_order_keep_their_records_in_the_order_in_which_they_were_asked(
    tmp_path: Path, originals: list[Record]
) -> None:
    called, result = resumed(tmp_path, originals, cases(COUNT)[::-1])
    assert called == []
    assert [record.id for record in result.load_responses()] == [f"c{i}" for i in range(COUNT)]


def test_a_response_scored_in_another_way_is_scored_again_without_a_call(
    tmp_path: Path, originals: list[Record]
) -> None:
    stale = [changed(record, scored_by="0" * 16, scores=[]) for record in originals]
    called, result = resumed(tmp_path, stale)
    assert called == []
    assert result.metrics["scored"] == COUNT
    assert result.metrics["passed"] == sum(record.scores[0].passed is True for record in originals)
    assert result.stats["total_requests"] == COUNT
    assert [record.scores for record in result.load_responses()] == [record.scores for record in originals]


def test_a_record_of_a_newer_format_is_refused(tmp_path: Path) -> None:
    write_journal(tmp_path, [a_record(v=99)])
    with pytest.raises(RunRefused, match="newer Steelyard"):
        run_in(tmp_path, CountedModel(), cases(COUNT))


def test_active_time_accumulates_over_the_sittings(tmp_path: Path, originals: list[Record]) -> None:
    _, result = resumed(tmp_path, [changed(record, run_time=1000.0 + record.index) for record in originals])
    assert 1005.0 <= result.metrics["active_seconds"] < 1065.0


events = st.lists(st.tuples(st.integers(0, COUNT - 1), st.sampled_from(["ok", "error"])), max_size=25)
_numbers = itertools.count()


@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(events=events)
def test_any_history_ends_in_the_figures_of_an_undisturbed_run(
    events: list[tuple[int, str]], originals: list[Record], tmp_path: Path
) -> None:
    """Cases without an ok record are asked, once each; then every figure is the same, bit for bit."""
    history = [originals[number] if status == "ok" else failed(originals[number]) for number, status in events]
    done = {number for number, status in events if status == "ok"}
    called, result = resumed(tmp_path / f"{next(_numbers)}", history)
    assert sorted(called) == sorted(f"c{number}" for number in range(COUNT) if number not in done)
    undisturbed = run_in(tmp_path / f"{next(_numbers)}", CountedModel(), cases(COUNT))
    assert without_clocks(result.metrics) == without_clocks(Result.load(undisturbed.path or "").metrics)


@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(events=events.filter(bool), tokens=st.lists(st.integers(0, 10**6), min_size=25, max_size=25))
def test_an_unfinished_runs_figures_are_those_of_its_winning_records_alone(
    events: list[tuple[int, str]], tokens: list[int], originals: list[Record], tmp_path: Path
) -> None:
    best: dict[int, Record] = {}
    history = []
    for (number, status), count in zip(events, tokens, strict=False):
        record = changed(originals[number], num_tokens_output=count)
        record = record if status == "ok" else failed(record)
        history.append(record)
        if status == "ok" or number not in best or best[number].status == "error":
            best[number] = record
    run = tmp_path / f"{next(_numbers)}"
    write_journal(run, history)
    result = Result.load(run)
    expected = RunningStats()
    for record in best.values():
        expected.update(record)
    expected.active_seconds = max(record.run_time for record in history)
    assert result.stats == expected.to_stats()
    errors = sum(record.status == "error" for record in best.values())
    assert result.metrics["errors"] == ({"ValueError": errors} if errors else {})
    assert [record.id for record in result.load_responses()] == [best[number].id for number in sorted(best)]


def test_a_retried_runs_figures_are_those_of_a_run_that_never_failed(tmp_path: Path) -> None:
    run_in(tmp_path / "a", CountedModel(fails_even), cases(COUNT))
    run_in(tmp_path / "a", CountedModel(), cases(COUNT), entry={"retry_errors": True})
    run_in(tmp_path / "b", CountedModel(), cases(COUNT))
    retried, undisturbed = Result.load(tmp_path / "a"), Result.load(tmp_path / "b")
    assert without_clocks(retried.metrics) == without_clocks(undisturbed.metrics)


def fails_even(case: EvalCase, context: InvocationContext) -> InvocationResponse:
    if int(case.id[1:]) % 2 == 0:
        raise ValueError("no")
    return drawn_answer(case, context)


def test_a_journal_alone_is_enough_to_go_on(tmp_path: Path) -> None:
    """Without its manifest, index and figures a run is still resumed."""
    run_in(tmp_path, CountedModel(), cases(COUNT))
    for name in ("run.json", "outputs.idx"):
        (tmp_path / name).unlink()
    reopen(tmp_path, (tmp_path / "outputs.jsonl").read_bytes())
    model = CountedModel()
    assert run_in(tmp_path, model, cases(COUNT)).complete
    assert model.called == []
