"""Records have what their cases expected, and their metadata: a run can be read without its suite."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from steelyard import EvalCase, EvalSet, Result, Runner
from steelyard.records import MAX_KEPT_BYTES, bounded, is_digest
from tests.support.cli import Workshop, run_cli

LONG = "x" * MAX_KEPT_BYTES


def recorded(tmp_path: Path, *cases: EvalCase, **options: Any) -> list[dict[str, Any]]:
    """The lines of a run of these cases."""
    runner = Runner(lambda case: "x", EvalSet("s", list(cases)), progress="off", output_path=tmp_path, **options)
    runner.run_sync()
    assert Result.load(tmp_path).complete
    return [json.loads(line) for line in (tmp_path / "outputs.jsonl").read_bytes().splitlines()]


@pytest.mark.parametrize("expected", ["Paris", ["a", "b"], {"n": 1}, 3, 0.5, True, False, "x" * 10_000])
def test_a_record_has_what_was_expected_and_the_metadata(tmp_path: Path, expected: Any) -> None:
    (line,) = recorded(tmp_path, EvalCase(id="a", prompt="?", expected=expected, metadata={"topic": "é", "n": 1}))
    assert line["expected"] == expected
    assert line["metadata"] == {"topic": "é", "n": 1}
    (record,) = Result.load(tmp_path).load_responses()
    assert (record.expected, record.metadata) == (expected, {"topic": "é", "n": 1})


def test_a_case_without_them_has_neither_in_its_record(tmp_path: Path) -> None:
    (line,) = recorded(tmp_path, EvalCase(id="a", prompt="?"))
    assert not {"expected", "metadata"} & set(line)


def test_beyond_16_kb_only_the_digest_is_kept(tmp_path: Path) -> None:
    (line,) = recorded(tmp_path, EvalCase(id="a", prompt="?", expected=[LONG], metadata={"text": LONG}))
    assert is_digest(line["expected"])
    assert line["expected"]["bytes"] == MAX_KEPT_BYTES + 4
    assert is_digest(line["metadata"])


@pytest.mark.parametrize("value", ["\0" * 2_700, "\U0001f600" * 2_700, "é" * 9_000, '"' * 9_000])
def test_no_text_is_kept_that_is_longer_than_16_kb_as_json(value: str) -> None:
    kept = bounded(value)
    assert len(json.dumps(kept, ensure_ascii=False).encode()) <= MAX_KEPT_BYTES


def test_a_value_nested_beyond_reading_is_a_digest(tmp_path: Path) -> None:
    deep: Any = "x"
    for _ in range(80):
        deep = [deep]
    (line,) = recorded(tmp_path, EvalCase(id="a", prompt="?", expected=deep))
    assert is_digest(line["expected"])


def test_a_value_that_json_has_no_word_for_costs_no_record(tmp_path: Path) -> None:
    (line,) = recorded(tmp_path, EvalCase(id="a", prompt="?", expected=object(), metadata={"when": {1, 2}}))
    assert line["response_text"] == "x"
    assert any(note.startswith("expected") for note in line["notes"])


def test_one_option_leaves_them_out(tmp_path: Path) -> None:
    case = EvalCase(id="a", prompt="?", expected="Paris", metadata={"topic": "x"})
    (line,) = recorded(tmp_path, case, keep_expected=False)
    assert not {"expected", "metadata"} & set(line)


def test_a_case_is_shown_without_its_suite(tmp_path: Path) -> None:
    shop = Workshop(tmp_path)
    shop.failing("c1")
    shop.agent((shop.folder / "agent.py").read_text().replace("case.prompt.upper()", "'wrong'"))
    shop.by_command()
    (shop.folder / "suite.yaml").unlink()
    assert "expected:\n    C2" in run_cli(shop.folder, "report", "RUN", "--case", "c2").out
    assert "<code>C2</code>" in run_cli(shop.folder, "report", "RUN", "-f", "md", "-o", "-").out


def test_the_flag_is_kept_in_the_manifest(tmp_path: Path) -> None:
    shop = Workshop(tmp_path)
    words = ("run", "suite.yaml", "--out", "RUN", "--no-progress", "--no-expected")
    assert run_cli(shop.folder, *words).code == 0
    assert all("expected" not in line for line in shop.lines())
    assert json.loads((shop.run / "run.json").read_text())["options"]["keep_expected"] is False
