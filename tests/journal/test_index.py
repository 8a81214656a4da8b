"""The index: a shortcut for readers that may be stale, absent or wrong, and never changes what they read."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from steelyard import EvalCase, InvocationResponse, Result, RunDamaged
from steelyard.journal.index import ROWS, IndexBuilder, id_digests, pack_row, read_index, winners
from steelyard.journal.reader import index_rows, iter_records
from steelyard.protocols import InvocationContext
from steelyard.records import Record, id_digest
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

COUNT = 12
HEADER = 8
A_CASE, EDITED = "00000000deadbeef", "00000000cafecafe"


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    without_syncs(monkeypatch)


def rows_of(*rows: tuple[int, int, int, int, bool], case_fps: dict[int, str] | None = None) -> np.ndarray:
    """Index rows of (offset, id, index, trial, ok), of one wording unless an offset has its own fingerprint."""
    fps = case_fps or {}
    packed = [
        pack_row(offset, id, 10, index, trial, ok, None, fps.get(offset, A_CASE))
        for offset, id, index, trial, ok in rows
    ]
    return np.frombuffer(b"".join(packed), dtype=ROWS)


def test_a_row_has_the_layout_that_numpy_reads() -> None:
    row = np.frombuffer(pack_row(2**40, 2**63 + 1, 20_000_000, 7, 3, True, False, A_CASE, 9), dtype=ROWS)[0]
    assert row.tolist() == (2**40, 2**63 + 1, 20_000_000, 7, 3, 1, 0, 0xDEADBEEF, 9, 0)


def test_the_last_ok_row_wins_and_an_error_only_where_there_is_no_ok() -> None:
    rows = rows_of(
        (0, 9, 1, 0, True), (10, 9, 1, 0, True), (20, 9, 1, 0, False), (30, 5, 0, 0, False), (40, 5, 0, 0, False)
    )
    assert winners(rows)["offset"].tolist() == [40, 10]


def test_trials_of_one_case_are_kept_apart_and_in_order() -> None:
    rows = rows_of((0, 9, 1, 1, True), (10, 9, 1, 0, True), (20, 4, 0, 0, True))
    assert winners(rows)["offset"].tolist() == [20, 10, 0]


def test_of_an_edited_case_only_rows_of_its_last_wording_count() -> None:
    rows = rows_of((0, 9, 0, 0, True), (10, 9, 0, 0, False), (20, 4, 1, 0, True), case_fps={10: EDITED})
    assert winners(rows)["offset"].tolist() == [10, 20]


def test_an_edited_cases_record_is_the_new_one_even_without_the_index(tmp_path: Path) -> None:
    run, asked = tmp_path / "run", cases(3)
    run_in(run, CountedModel(), asked)
    asked[1].prompt = "another question"
    reopen(run, (run / "outputs.jsonl").read_bytes())
    run_in(run, CountedModel(fails_by([True, False, True])), asked)
    statuses = [record.status for record in Result.load(run).load_responses()]
    (run / "outputs.idx").unlink()
    assert [record.status for record in Result.load(run).load_responses()] == statuses == ["ok", "error", "ok"]


def test_no_rows_have_no_winners() -> None:
    assert len(winners(rows_of())) == 0


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 5), st.integers(0, 2), st.booleans()), max_size=40),
    st.randoms(use_true_random=False),
)
def test_winners_are_those_of_a_plain_loop_in_any_order_of_rows(
    events: list[tuple[int, int, bool]], rng: random.Random
) -> None:
    best: dict[tuple[int, int], tuple[bool, int]] = {}
    rows = []
    for number, (index, trial, ok) in enumerate(events):
        rows.append((number * 10, index * 1000 + 7, index, trial, ok))
        if ok or not best.get((index, trial), (False, 0))[0]:
            best[index, trial] = (ok, number * 10)
    rng.shuffle(rows)
    expected = [offset for _, (_, offset) in sorted(best.items())]
    assert winners(rows_of(*rows))["offset"].tolist() == expected


@pytest.fixture
def finished(tmp_path: Path) -> Path:
    """A finished run, some of whose cases failed first and were asked again."""
    run_in(tmp_path / "run", CountedModel(fails_first), cases(COUNT))
    run_in(tmp_path / "run", CountedModel(), cases(COUNT), entry={"retry_errors": True})
    return tmp_path / "run"


def fails_first(case: EvalCase, context: InvocationContext) -> InvocationResponse:
    if case.id in ("c2", "c5", "c11"):
        raise ValueError("not yet")
    return drawn_answer(case, context)


def ids(run: Path) -> list[str]:
    records = Result.load(run).load_responses()
    assert all(record.status == "ok" for record in records)
    return [record.id for record in records]


def other_runs_index(run: Path) -> bytes:
    """A sound index, of a run of the same cases somewhere else."""
    other = run.parent / "other"
    run_in(other, CountedModel(lambda case, context: InvocationResponse(response_text="!")), cases(COUNT))
    return (other / "outputs.idx").read_bytes()


def with_zeroed_offset(run: Path) -> bytes:
    data = bytearray((run / "outputs.idx").read_bytes())
    data[-ROWS.itemsize : -ROWS.itemsize + 8] = bytes(8)
    return bytes(data)


def swapped_ids(run: Path) -> bytes:
    """An index in which two rows have each other's offsets."""
    data = bytearray((run / "outputs.idx").read_bytes())
    rows = np.frombuffer(data, dtype=ROWS, offset=HEADER)
    rows["offset"][[0, 1]] = rows["offset"][[1, 0]]
    return bytes(data)


SPOILT: dict[str, Callable[[Path], bytes | None]] = {
    "absent": lambda run: None,
    "empty": lambda run: b"",
    "text": lambda run: b"not an index at all, but longer than its header",
    "zeros": lambda run: bytes(4096),
    "only a header": lambda run: (run / "outputs.idx").read_bytes()[:HEADER],
    "without its last row": lambda run: (run / "outputs.idx").read_bytes()[: -ROWS.itemsize],
    "cut within a row": lambda run: (run / "outputs.idx").read_bytes()[:-5],
    "a row that points elsewhere": with_zeroed_offset,
    "two rows that have changed places": swapped_ids,
    "of another run": other_runs_index,
    "beyond the end": lambda run: (run / "outputs.idx").read_bytes() + pack_row(10**9, 1, 10, 0, 0, True, None, A_CASE),
    "with a gap": lambda run: (
        (run / "outputs.idx").read_bytes()[: HEADER + ROWS.itemsize]
        + (run / "outputs.idx").read_bytes()[-ROWS.itemsize :]
    ),
}


@pytest.mark.parametrize("spoilt", SPOILT)
def test_a_reader_with_a_bad_index_reads_every_record_in_case_order(spoilt: str, finished: Path) -> None:
    data = SPOILT[spoilt](finished)
    (finished / "outputs.idx").unlink()
    if data is not None:
        (finished / "outputs.idx").write_bytes(data)
    assert ids(finished) == [case.id for case in cases(COUNT)]


def test_a_killed_runs_whole_last_line_without_its_newline_is_read(finished: Path) -> None:
    data = (finished / "outputs.jsonl").read_bytes()
    reopen(finished, data[:-1])
    result = Result.load(finished)
    assert len(result.load_responses()) == result.metrics["n"] == COUNT


def test_a_killed_runs_torn_last_line_is_not_read(finished: Path) -> None:
    reopen(finished, (finished / "outputs.jsonl").read_bytes()[:-9])
    result = Result.load(finished)
    assert len(result.load_responses()) == result.metrics["n"]


def test_a_reader_names_a_line_that_it_cannot_read(tmp_path: Path) -> None:
    data = write_journal(tmp_path, [a_record(id="a"), a_record(id="b", index=1), a_record(id="c", index=2)])
    lines = data.splitlines(keepends=True)
    lines[1] = lines[1].replace(b'"attempts":1', b'"messages":[1],"attempts":"1"')
    (tmp_path / "outputs.jsonl").write_bytes(b"".join(lines))
    with pytest.raises(RunDamaged) as caught:
        list(iter_records(tmp_path))
    assert (caught.value.line, caught.value.byte) == (2, len(lines[0]))


def test_the_index_a_run_wrote_is_the_one_a_scan_makes(finished: Path) -> None:
    """Of a run with a single launch all rows are equal; of a resumed one, those that count."""
    written, covered = read_index(finished)
    assert covered == os.path.getsize(finished / "outputs.jsonl")
    (finished / "outputs.idx").unlink()
    assert winners(written).tolist() == winners(index_rows(finished)).tolist()


@settings(deadline=None, max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    launches=st.lists(st.lists(st.booleans(), min_size=6, max_size=6), min_size=1, max_size=4), cut=st.integers(0, 60)
)
def test_after_any_sittings_the_index_agrees_with_a_scan(
    launches: list[list[bool]], cut: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Each launch says which cases answer; before each the journal's end may be torn off."""
    run = tmp_path_factory.mktemp("launches") / "run"
    for answers in launches:
        if (run / "outputs.jsonl").exists():
            data = (run / "outputs.jsonl").read_bytes()
            reopen(run, data[: len(data) - cut])
        run_in(run, CountedModel(fails_by(answers)), cases(6))
    written, _ = read_index(run)
    (run / "outputs.idx").unlink()
    scanned = index_rows(run)
    assert winners(written).tolist() == winners(scanned).tolist()
    assert len(winners(scanned)) == 6


def fails_by(answers: list[bool]) -> Callable[[EvalCase, InvocationContext], InvocationResponse]:
    def answer(case: EvalCase, context: InvocationContext) -> InvocationResponse:
        if not answers[int(case.id[1:])]:
            raise ValueError("no")
        return drawn_answer(case, context)

    return answer


def test_an_abandoned_index_leaves_the_old_one(tmp_path: Path) -> None:
    (tmp_path / "outputs.idx").write_bytes(b"old")
    builder = IndexBuilder(tmp_path)
    builder.add(pack_row(0, 1, 10, 0, 0, True, None, A_CASE))
    builder.abandon()
    assert [path.name for path in tmp_path.iterdir()] == ["outputs.idx"]
    assert (tmp_path / "outputs.idx").read_bytes() == b"old"


def test_a_built_index_is_read_back(tmp_path: Path) -> None:
    data = write_journal(tmp_path, [a_record()])
    builder = IndexBuilder(tmp_path)
    row = index_rows(tmp_path)
    builder.add(row.tobytes())
    builder.finish()
    rows, covered = read_index(tmp_path)
    assert covered == len(data)
    assert rows.tolist() == row.tolist()
    assert len(rows) == 1


def test_an_index_that_cannot_be_put_in_place_does_not_fail_a_run(tmp_path: Path) -> None:
    (tmp_path / "run" / "outputs.idx").mkdir(parents=True)
    result = run_in(tmp_path / "run", CountedModel(), cases(COUNT))
    assert result.complete
    assert ids(tmp_path / "run") == [case.id for case in cases(COUNT)]


def test_a_resumed_run_whose_index_could_not_be_rebuilt_adds_nothing_to_the_old_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows after a gap would claim to cover it."""
    run = tmp_path / "run"
    run_in(run, CountedModel(), cases(COUNT))
    old = (run / "outputs.idx").read_bytes()[: -3 * ROWS.itemsize]
    (run / "outputs.idx").write_bytes(old)
    reopen(run, b"".join((run / "outputs.jsonl").read_bytes().splitlines(keepends=True)[:-1]))
    monkeypatch.setattr(os, "replace", no_index_rename(os.replace))
    run_in(run, CountedModel(), cases(COUNT))
    assert ids(run) == [case.id for case in cases(COUNT)]


def no_index_rename(original: Callable[..., None]) -> Callable[..., None]:
    def replace(source: Path, target: Path) -> None:
        if Path(target).name == "outputs.idx":
            raise OSError(28, "no space")
        original(source, target)

    return replace


def test_records_are_read_one_at_a_time(finished: Path) -> None:
    records = iter_records(finished)
    assert isinstance(next(records), Record)
    records.close()  # type: ignore[attr-defined]


@given(st.lists(st.text(st.characters(exclude_categories=["Cs"])), max_size=20))
def test_digests_of_many_ids_are_those_of_each(ids: list[str]) -> None:
    assert id_digests(ids).tolist() == [id_digest(case_id) for case_id in ids]
