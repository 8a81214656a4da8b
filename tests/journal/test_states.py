"""The index is a cache: in every state of a run directory all outputs are the same with it, without it, or spoilt."""

from __future__ import annotations

import csv
import errno
import io
import json
import os
import random
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from steelyard import Result
from tests.support.cli import Workshop, run_cli
from tests.support.journal import without_syncs

HEADER, ROW = 8, 40


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    without_syncs(monkeypatch)


@pytest.fixture
def shop(tmp_path: Path) -> Workshop:
    return Workshop(tmp_path)


def csv_rows(shop: Workshop) -> list[dict[str, str]]:
    ended = run_cli(shop.folder, "report", "RUN", "-f", "csv", "-o", "-")
    return list(csv.DictReader(io.StringIO(ended.out)))


# The defects that were found: each line failed when the index said what counts.


def test_rows_of_cases_that_are_not_selected_any_more_are_not_reported_without_the_index(shop: Workshop) -> None:
    shop.failing("c1")
    shop.by_command()
    shop.by_command(limit=2, retry_errors=True)
    (shop.run / "outputs.idx").unlink()
    assert [row["id"] for row in csv_rows(shop)] == ["c0", "c1"]
    assert shop.metrics()["n"] == 2
    assert shop.metrics()["lines"] == {"total": 7, "left_out": "3-6"}


def test_a_disk_that_refuses_the_index_changes_no_report(shop: Workshop, monkeypatch: pytest.MonkeyPatch) -> None:
    shop.by_command()
    replace = os.replace

    def full(source: Path, target: Path) -> None:
        if Path(target).name == "outputs.idx":
            raise OSError(errno.ENOSPC, "no space left")
        replace(source, target)

    monkeypatch.setattr(os, "replace", full)
    assert shop.by_command(limit=2, update=True).code == 0
    assert not (shop.run / "outputs.idx").exists()
    assert [row["id"] for row in csv_rows(shop)] == ["c0", "c1"]


def test_a_case_edited_and_edited_back_has_its_first_answer_without_the_index(shop: Workshop) -> None:
    shop.by_command()
    edit_and_edit_back(shop)
    shop.asked()
    (shop.run / "outputs.idx").unlink()
    assert [record.response_text for record in Result.load(shop.run).load_responses()][1] == "C1"


def edit_and_edit_back(shop: Workshop) -> None:
    shop.suite(prompts={"c1": "another"})
    shop.by_command(update=True)
    shop.suite()
    shop.by_command(update=True)


# Every state of a directory


def complete(shop: Workshop) -> None:
    shop.by_command()


def with_errors(shop: Workshop) -> None:
    shop.failing("c1 c4")
    shop.by_command()


def retried(shop: Workshop) -> None:
    with_errors(shop)
    shop.failing("c4")
    shop.by_command(retry_errors=True)


def fewer_selected(shop: Workshop) -> None:
    with_errors(shop)
    shop.by_command(match="c[123]", update=True)


def fewer_selected_then_killed(shop: Workshop) -> None:
    with_errors(shop)
    shop.by_command(match="c[123]", update=True)
    (shop.run / "metrics.json").unlink()


def edited_case(shop: Workshop) -> None:
    with_errors(shop)
    shop.suite(prompts={"c1": "another", "c2": "and another"})
    shop.by_command(update=True)


def edited_case_then_killed(shop: Workshop) -> None:
    edited_case(shop)
    shop.cut_back(lines=7)


def edited_back(shop: Workshop) -> None:
    complete(shop)
    edit_and_edit_back(shop)


def edited_back_then_killed(shop: Workshop) -> None:
    edited_back(shop)
    (shop.run / "metrics.json").unlink()


def removed_case(shop: Workshop) -> None:
    complete(shop)
    shop.suite("c0 c2 c4 c6")
    shop.by_command(update=True)


def other_order(shop: Workshop) -> None:
    complete(shop)
    shop.suite("c5 c9 c3 c1 c0 c2 c4")
    shop.by_command(update=True)


def other_scorers(shop: Workshop) -> None:
    with_errors(shop)
    shop.suite(scorers=["exact", {"python": "agent.py:shout"}])
    shop.unscorable("c3")
    shop.by_command(update=True)


def several_trials(shop: Workshop) -> None:
    shop.failing("c1")
    shop.by_command(trials=3)
    shop.failing("")
    shop.by_command(trials=2, retry_errors=True)


def killed(shop: Workshop) -> None:
    with_errors(shop)
    shop.cut_back(lines=4)


def torn(shop: Workshop) -> None:
    killed(shop)
    with (shop.run / "outputs.jsonl").open("ab") as file:
        file.write(b'{"v":2,"id":"c')


def without_last_newline(shop: Workshop) -> None:
    killed(shop)
    outputs = shop.run / "outputs.jsonl"
    outputs.write_bytes(outputs.read_bytes()[:-1])


def blank_lines(shop: Workshop) -> None:
    killed(shop)
    outputs = shop.run / "outputs.jsonl"
    outputs.write_bytes(b"\n" + outputs.read_bytes().replace(b"\n", b"\n\n"))


def interrupted(shop: Workshop) -> None:
    with_errors(shop)
    metrics = json.loads((shop.run / "metrics.json").read_text())
    shop.cut_back(lines=4)
    (shop.run / "partial.json").write_text(json.dumps({**metrics, "complete": False, "stopped": "SIGINT"}))


def salvaged(shop: Workshop) -> None:
    fewer_selected(shop)
    spoil_line(shop, 3, lambda line: b"x" * len(line))
    shop.by_command(match="c[123]", update=True, salvage=True)


def edits_accepted(shop: Workshop) -> None:
    fewer_selected(shop)
    spoil_line(shop, 2, lambda line: line.replace(b'"C2"', b'"a longer one"'))
    shop.by_command(match="c[123]", update=True, accept_edits=True)


def flipped_line(shop: Workshop) -> None:
    complete(shop)
    spoil_line(shop, 2, lambda line: line.replace(b'"C2"', b'"B2"'))


def flipped_line_that_does_not_count(shop: Workshop) -> None:
    retried(shop)
    spoil_line(shop, 1, lambda line: line.replace(b"told to fail on c1", b"tole to fail on c1"))


def line_that_is_no_record(shop: Workshop) -> None:
    killed(shop)
    spoil_line(shop, 1, lambda line: b"garbage")


def edited_line(shop: Workshop) -> None:
    complete(shop)
    spoil_line(shop, 4, lambda line: line.replace(b'"C4"', b'"rewritten by somebody"'))


def lost_line(shop: Workshop) -> None:
    complete(shop)
    outputs = shop.run / "outputs.jsonl"
    outputs.write_bytes(b"".join(outputs.read_bytes().splitlines(keepends=True)[:-1]))


def spoil_line(shop: Workshop, number: int, spoil: Callable[[bytes], bytes]) -> None:
    outputs = shop.run / "outputs.jsonl"
    lines = outputs.read_bytes().splitlines()
    before, lines[number] = lines[number], spoil(lines[number])
    assert lines[number] != before
    outputs.write_bytes(b"\n".join(lines) + b"\n")


STATES: list[Callable[[Workshop], None]] = [
    complete,
    with_errors,
    retried,
    fewer_selected,
    fewer_selected_then_killed,
    edited_case,
    edited_case_then_killed,
    edited_back,
    edited_back_then_killed,
    removed_case,
    other_order,
    other_scorers,
    several_trials,
    killed,
    torn,
    without_last_newline,
    blank_lines,
    interrupted,
    salvaged,
    edits_accepted,
    flipped_line,
    flipped_line_that_does_not_count,
    line_that_is_no_record,
    edited_line,
    lost_line,
]


def spoilt_indexes(index: bytes) -> Iterator[tuple[str, bytes | None]]:
    yield "as it is", index
    yield "removed", None
    yield "emptied", b""
    yield "cut", index[: -ROW - 5]
    rng = random.Random(0)
    for field in (0, 8, 16, 20, 26, 27, 28, 32, 36):  # one bit in each field of some row, and one in the header
        spoilt = bytearray(index)
        row = rng.randrange(max((len(index) - HEADER) // ROW, 1))
        place = min(HEADER + row * ROW + field, len(index) - 1)
        spoilt[place] ^= 1 << rng.randrange(2)
        yield f"bit of field {field} flipped", bytes(spoilt)
    yield "header flipped", bytes([index[0] ^ 1]) + index[1:]


def outputs(shop: Workshop) -> dict[str, object]:
    """All that can be asked of the run without changing it."""
    shown: dict[str, object] = {}
    for words in (
        ("report", "RUN"),
        ("report", "RUN", "-f", "csv", "-o", "-"),
        ("report", "RUN", "-f", "json"),
        ("report", "RUN", "-f", "md", "-o", "-"),
        ("report", "RUN", "-f", "junit", "-o", "-"),
        ("report", "RUN", "--case", "c1"),
        ("compare", "BASE", "RUN", "-f", "json"),
        ("gate", "RUN", "pass_rate>=0.5"),
        ("ls", ".", "--json"),
    ):
        ended = run_cli(shop.folder, *words)
        said = "".join(line for line in ended.err.splitlines(keepends=True) if "outputs.idx" not in line)
        shown[" ".join(words)] = (ended.code, ended.out, said)
    return shown


def resumed(shop: Workshop) -> tuple[object, ...]:
    """What continuing the run asks and ends in; on a copy."""
    kept = shop.folder / "kept"
    shutil.copytree(shop.run, kept)
    shop.asked()
    outcome = shop.by_command(update=True)
    rows = [[row[name] for name in ("id", "trial", "status", "response_text")] for row in csv_rows(shop)]
    said = [line for line in outcome.said.splitlines() if "outputs.idx" not in line]
    found = (outcome.code, re.sub(r"[0-9.]+ ?m?s\b", "", "\n".join(said)), shop.asked(), rows)
    shutil.rmtree(shop.run)
    kept.rename(shop.run)
    return found


@pytest.mark.parametrize("state", STATES, ids=lambda state: state.__name__)
def test_in_every_state_all_outputs_are_the_same_whatever_became_of_the_index(
    state: Callable[[Workshop], None], shop: Workshop
) -> None:
    shop.by_command()
    shop.run.rename(shop.folder / "BASE")
    state(shop)
    index = shop.run / "outputs.idx"
    found = {}
    for name, data in spoilt_indexes(index.read_bytes()):
        index.unlink(missing_ok=True)
        if data is not None:
            index.write_bytes(data)
        found[name] = (
            outputs(shop),
            resumed(shop) if name.startswith(("as", "removed", "emptied", "bit of field 0")) else None,
        )
    read, continued = found["as it is"]
    for name, (others, goes_on) in found.items():
        for command, shown in others.items():
            assert shown == read[command], f"{command} with the index {name}"
        if goes_on is not None:
            assert goes_on == continued, f"resumed with the index {name}"
