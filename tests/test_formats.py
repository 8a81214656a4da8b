"""docs/formats.md tells of every file and every field that a run writes."""

from __future__ import annotations

import json
import re
from pathlib import Path

import msgspec
import pytest

from steelyard import EvalCase, EvalSet, InvocationContext, Judge, Metrics, Record, Runner, Score
from steelyard.journal import files
from steelyard.journal.answers import JudgeCall
from steelyard.journal.labels import GivenLabel, LabelSettings
from steelyard.journal.lock import Holder
from steelyard.journal.manifest import Launch, Manifest
from steelyard.records import Sample, StoredSample
from steelyard.targets import CallableTarget
from steelyard.workspace.recording import CallLine, EndLine, RequestDelta, SessionLine

PAGE = (Path(__file__).parent.parent / "docs" / "formats.md").read_text(encoding="utf-8")


def section(title: str) -> str:
    """The part of the page under a heading, down to the next one."""
    _, found, rest = PAGE.partition(f"# {title}\n")
    assert found, title
    return re.split(r"^#+ ", rest, maxsplit=1, flags=re.M)[0]


def rows(text: str) -> set[str]:
    """The names in the first column of the tables."""
    cells = re.findall(r"^\| (`.+?`) \|", text, flags=re.M)
    return {name for cell in cells for name in re.findall(r"`(\w+)`", cell)}


def named(kind: type[msgspec.Struct], text: str) -> None:
    missing = [field for field in kind.__struct_fields__ if f"`{field}`" not in text]
    assert not missing


def test_every_file_of_a_run_is_named() -> None:
    names = [value for name, value in vars(files).items() if name.isupper() and isinstance(value, str)]
    assert len(names) > 10
    assert [name for name in names if f"`{name}" not in PAGE] == []


def test_the_fields_of_the_manifest_are_those_on_the_page() -> None:
    assert rows(section("`run.json`")) == set(Manifest.__struct_fields__)
    named(Launch, section("`run.json`"))


def test_the_fields_of_a_record_are_those_on_the_page() -> None:
    assert rows(section("`outputs.jsonl`")) == {*Record.__struct_fields__, "crc32"}


def test_the_fields_of_a_score_are_those_on_the_page() -> None:
    assert rows(section("A score")) == set(Score.__struct_fields__)


@pytest.mark.parametrize(
    ("kind", "title"),
    [
        (EvalCase, "`cases.jsonl`"),
        (StoredSample, "`answers.jsonl`"),
        (Sample, "`answers.jsonl`"),
        (JudgeCall, "`answers.jsonl`"),
        (LabelSettings, "`labels.jsonl`"),
        (GivenLabel, "`labels.jsonl`"),
        (Holder, "What is promised"),
        *((kind, "Calls") for kind in (SessionLine, CallLine, EndLine, RequestDelta)),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_the_fields_of_the_other_files_are_on_the_page(kind: type[msgspec.Struct], title: str) -> None:
    named(kind, section(title))


def test_a_run_writes_no_file_that_the_page_does_not_know(tmp_path: Path) -> None:
    async def verdict(case: EvalCase, context: InvocationContext) -> str:
        return json.dumps({"reason": "good", "score": 1, "passed": True})

    judge = Judge(model="wise", target=CallableTarget(verdict))
    cases = (EvalCase(id=str(number), prompt="?", expected="x") for number in range(3))
    Runner(lambda case: "x", EvalSet("s", cases), [judge], progress="off", output_path=tmp_path).run_sync()
    found = {path.name for path in tmp_path.iterdir()}
    expected = {"run.json", "outputs.jsonl", "outputs.idx", "answers.jsonl", "metrics.json", "cases.jsonl", ".lock"}
    assert found == expected
    for line in (tmp_path / "outputs.jsonl").read_text().splitlines():
        assert set(json.loads(line)) <= rows(section("`outputs.jsonl`"))


def test_the_fields_of_the_metrics_are_those_on_the_page_of_statistics() -> None:
    page = (Path(__file__).parent.parent / "docs" / "statistics.md").read_text(encoding="utf-8")
    _, _, rest = page.partition("## `metrics.json`\n")
    table = re.split(r"^#+ ", rest, maxsplit=1, flags=re.M)[0]
    told = {name for row in re.findall(r"^\| .*$", table, flags=re.M) for name in re.findall(r"`(\w+)`", row)}
    assert [name for name in Metrics.__struct_fields__ if name not in told] == []
