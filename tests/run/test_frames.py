"""Records as tables of pandas, polars and Arrow."""

from __future__ import annotations

import sys
from datetime import UTC, datetime

import pytest

from steelyard import ConfigurationError, EvalCase, EvalSet, InvocationResponse, Result, Runner
from steelyard.run.frames import table_columns, to_pandas

CASES = [
    EvalCase(id="0123", prompt="1", expected="1"),
    EvalCase(id="no", prompt="2", expected="1"),
    EvalCase(id="bad", prompt="3", expected="1"),
]
TIME = datetime(2026, 1, 2, tzinfo=UTC)


async def answer(case: EvalCase) -> InvocationResponse:
    if case.id == "bad":
        raise KeyError("missing")
    calls = [{"role": "assistant", "content": ["mixed", 1]}] if case.id == "no" else None
    return InvocationResponse(
        response_text="1" if case.id == "0123" else "007", num_tokens_output=3, messages=calls, request_time=TIME
    )


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> Result:
    place = tmp_path_factory.mktemp("frames") / "run"
    return Runner(answer, EvalSet("s", CASES), ["exact", "contains"], output_path=place, progress="off").run_sync()


def test_pandas_keeps_ids_and_answers_as_text(result: Result) -> None:
    pytest.importorskip("pandas")
    table = result.to_pandas()
    assert table["id"].tolist() == ["0123", "no", "bad"]
    assert table["response_text"].tolist() == ["1", "007", None]
    assert table["score.exact"].tolist()[:2] == [1.0, 0.0]
    assert table["passed"].tolist()[:2] == [True, False]
    assert table["passed"].isna().tolist() == [False, False, True]
    assert str(table["num_tokens_output"].dtype) == "Int64"
    assert table["request_time"][0] == TIME
    assert table["messages"][1] == [{"role": "assistant", "content": ["mixed", 1]}]


@pytest.mark.parametrize("library", ["polars", "pyarrow"])
def test_polars_and_arrow_have_the_same_rows(result: Result, library: str) -> None:
    pytest.importorskip(library)
    rows = result.to_polars().to_dicts() if library == "polars" else result.to_arrow().to_pylist()
    assert [row["id"] for row in rows] == ["0123", "no", "bad"]
    assert [row["passed"] for row in rows] == [True, False, None]
    assert [row["score.contains.passed"] for row in rows] == [True, False, None]
    assert rows[1]["messages"] == '[{"role":"assistant","content":["mixed",1]}]'
    assert rows[2]["error"] == "KeyError: 'missing'"
    assert rows[0]["request_time"] == TIME


def test_the_first_columns_tell_which_case_and_how_it_went(result: Result) -> None:
    names = list(table_columns(result.iter_responses()))
    assert names[:6] == ["id", "trial", "status", "passed", "score.exact", "score.exact.passed"]
    assert len(names) == len(set(names))


def test_no_records_make_an_empty_table() -> None:
    pytest.importorskip("pandas")
    assert len(to_pandas([])) == 0
    assert "id" in to_pandas([]).columns


def test_a_library_that_is_absent_is_named(result: Result, monkeypatch: pytest.MonkeyPatch) -> None:

    monkeypatch.setitem(sys.modules, "polars", None)
    with pytest.raises(ConfigurationError, match="pip install polars"):
        result.to_polars()
