"""Planning a run: the first pass over a suite, and reading it again."""

from __future__ import annotations

import asyncio
import json
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from steelyard import EvalCase, EvalSet, Runner, SuiteError
from steelyard.errors import ConfigurationError
from steelyard.records import id_digest
from steelyard.run import plan
from steelyard.run import plan as plan_module
from steelyard.run.plan import CyclingPlan, _selector, cycling, make_plan
from steelyard.suite.identity import DigestColumn, as_hex, case_fingerprint, grading_fingerprint
from steelyard.suite.selection import Selection


def suite_of(*ids: str) -> EvalSet:
    return EvalSet("s", [EvalCase(id=id, prompt=f"prompt of {id}", expected=id) for id in ids])


def test_jobs_come_in_suite_order_with_a_cases_trials_together() -> None:
    plan = make_plan(suite_of("a", "b"), trials=2)
    assert (plan.cases, plan.slots) == (2, 4)
    assert [(job.index, job.case.id, job.trial) for job in plan.jobs()] == [
        (0, "a", 0),
        (0, "a", 1),
        (1, "b", 0),
        (1, "b", 1),
    ]


def test_jobs_skip_what_is_done() -> None:
    plan = make_plan(suite_of("a", "b", "c"), trials=2)
    jobs = plan.jobs(bytearray([0, 1, 2, 1, 1, 0]))
    assert [(job.case.id, job.trial) for job in jobs] == [("a", 0), ("c", 1)]


def test_done_must_have_a_byte_for_each_slot() -> None:
    with pytest.raises(ValueError, match="done must have 2 bytes, one a slot, got 1"):
        next(make_plan(suite_of("a", "b")).jobs(bytearray(1)))


def test_jobs_carry_the_fingerprints_of_their_case() -> None:
    suite = suite_of("a", "b")
    plan = make_plan(suite, scorers_digest=b"scorers", trials=2)
    for slot, job in enumerate(plan.jobs()):
        assert job.case_fp == plan.case_fp(slot) == as_hex(case_fingerprint(job.case))
        assert job.scored_by == plan.scored_by(slot) == as_hex(grading_fingerprint(b"scorers", job.case))


def test_without_scorers_nothing_is_scored_by() -> None:
    plan = make_plan(suite_of("a"))
    assert [job.scored_by for job in plan.jobs()] == [plan.scored_by(0)] == [""]


@pytest.mark.parametrize(
    ("match", "limit", "ids"),
    [
        (None, 2, ["fr", "de"]),
        (None, 9, ["fr", "de", "fr-2", "it"]),
        ("fr", None, ["fr", "fr-2"]),
        ("fr", 1, ["fr"]),
        ("fr-?", None, ["fr-2"]),
        ("*r", None, ["fr"]),
        ("[di]*", None, ["de", "it"]),
    ],
)
def test_match_and_limit_select_the_first_cases_that_fit(match: str | None, limit: int | None, ids: list[str]) -> None:
    every = ["fr", "de", "fr-2", "it"]
    plan = make_plan(suite_of(*every), match=match, limit=limit)
    jobs = list(plan.jobs())
    assert [job.case.id for job in jobs] == ids
    assert [job.index for job in jobs] == [every.index(id) for id in ids]
    assert plan.cases == len(ids)


def test_reading_stops_at_the_limit() -> None:
    def cases() -> Iterator[EvalCase]:
        yield from (EvalCase(prompt=text) for text in ("a", "a", "b"))
        raise AssertionError("read past the limit")

    plan = make_plan(EvalSet("s", cases), limit=3)
    assert [job.case.prompt for job in plan.jobs()] == ["a", "a", "b"]


def test_automatic_ids_can_be_matched_by_their_occurrence() -> None:
    plan = make_plan(EvalSet("s", [EvalCase(prompt="a")] * 3), match="*-2")
    assert [job.index for job in plan.jobs()] == [1]


def test_slots_are_found_by_id_and_trial() -> None:
    plan = make_plan(suite_of("x", "a", "b", "y"), match="[abx]", trials=3)
    ids = ["b", "a", "x", "y", "nowhere", "b", "b"]
    digests = np.array([id_digest(id) for id in ids], dtype=np.uint64)
    trials = np.array([0, 2, 1, 0, 0, 3, -1])
    slots = plan.slot_of(digests, trials)
    assert slots.dtype == np.int64
    assert slots.tolist() == [6, 5, 1, -1, -1, -1, -1]
    assert plan.slot_of(digests[:0], trials[:0]).tolist() == []


@given(st.sets(st.text(min_size=1), min_size=1, max_size=20), st.integers(1, 3))
def test_every_job_finds_its_own_slot(ids: set[str], trials: int) -> None:
    plan = make_plan(suite_of(*ids), trials=trials)
    jobs = list(plan.jobs())
    digests = np.array([id_digest(job.case.id) for job in jobs], dtype=np.uint64)
    slots = plan.slot_of(digests, np.array([job.trial for job in jobs]))
    assert slots.tolist() == list(range(plan.slots))


# refusals


def test_two_cases_with_one_id_are_refused_with_both_lines(tmp_path: Path) -> None:
    path = tmp_path / "cases.jsonl"
    path.write_text("\n".join(json.dumps({"id": id, "prompt": id}) for id in ("a", "b", "c", "b")))
    with pytest.raises(SuiteError, match="the id 'b' is duplicated: line 2 and line 4") as caught:
        make_plan(EvalSet.from_jsonl(path))
    assert caught.value.line == 4
    assert make_plan(EvalSet.from_jsonl(path), limit=3).cases == 3


def test_two_cases_in_memory_with_one_id_are_refused_with_both_places() -> None:
    with pytest.raises(SuiteError, match=r"cases\[2\]: the id 'b' is duplicated: case 2 and case 3"):
        make_plan(suite_of("a", "b", "b"), match="a")


def test_an_explicit_id_that_equals_an_automatic_one_is_refused() -> None:
    case = EvalCase(prompt="p")
    (automatic,) = EvalSet("s", [case])
    with pytest.raises(SuiteError, match="is duplicated"):
        make_plan(EvalSet("s", [case, EvalCase(id=automatic.id, prompt="q")]))


def test_ids_whose_digests_clash_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "id_digest", lambda case_id: len(case_id))
    monkeypatch.setattr(DigestColumn, "numbers", lambda self: np.ones(len(self._bytes) // 8, dtype=np.uint64))
    with pytest.raises(SuiteError, match=r"the ids 'a' \(case 1\) and 'b' have the same digest"):
        make_plan(suite_of("a", "b"))


def test_equal_cases_without_ids_are_not_duplicates() -> None:
    assert make_plan(EvalSet("s", [EvalCase(prompt="p")] * 3)).cases == 3


def test_an_empty_suite_is_refused(tmp_path: Path) -> None:
    (tmp_path / "cases.jsonl").write_text("\n\n")
    for suite in (EvalSet("s", []), EvalSet.from_jsonl(tmp_path / "cases.jsonl", id="s")):
        with pytest.raises(SuiteError, match="suite 's' has no cases"):
            make_plan(suite)


def test_a_match_that_selects_nothing_is_refused() -> None:
    with pytest.raises(SuiteError, match=r"no case of suite 's' has an id that matches 'z\*': none of its 2 does"):
        make_plan(suite_of("a", "b"), match="z*")


@pytest.mark.parametrize(("option", "value"), [("limit", 0), ("limit", -1), ("trials", 0)])
def test_numbers_below_one_are_refused(option: str, value: int) -> None:
    with pytest.raises(ConfigurationError, match=f"{option} must be >= 1, got {value}"):
        make_plan(suite_of("a"), **{option: value})


def test_an_iterator_must_be_spooled_first(tmp_path: Path) -> None:
    suite = EvalSet("s", iter([EvalCase(prompt="p")]))
    with pytest.raises(ConfigurationError, match="spool"):
        make_plan(suite)
    assert make_plan(suite.spool(tmp_path / "cases.jsonl")).cases == 1


def test_a_value_that_is_not_json_is_refused_with_its_case() -> None:
    cases = [EvalCase(id="a", prompt="p"), EvalCase(id="b", prompt="p", expected=float("inf"))]
    with pytest.raises(SuiteError, match=r"cases\[1\]: a value cannot be written as JSON: .*\(case 'b'\)"):
        make_plan(EvalSet("s", cases), scorers_digest=b"s")


def test_the_check_is_called_as_rows_are_read_and_may_stop_it() -> None:
    class Stop(Exception):
        pass

    calls = iter([None, None, Stop()])

    def check() -> None:
        error = next(calls)
        if error is not None:
            raise error

    suite = EvalSet("s", lambda: (EvalCase(id=str(number), prompt="p") for number in range(20_000)))
    with pytest.raises(Stop):
        make_plan(suite, check=check)
    assert next(calls, "used up") == "used up"


# a suite that changes between the passes


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (["a", "b"], "it had 3 cases, now 2"),
        (["a", "b", "c", "d"], "it had 3 cases, now more"),
        (["a", "x", "c"], "the case 'x' is where another was"),
    ],
)
def test_a_file_that_changed_since_it_was_planned_is_an_error(tmp_path: Path, rows: list[str], message: str) -> None:
    path = tmp_path / "cases.jsonl"

    def write(ids: list[str]) -> None:
        path.write_text("".join(json.dumps({"id": id, "prompt": id}) + "\n" for id in ids))

    write(["a", "b", "c"])
    plan = make_plan(EvalSet.from_jsonl(path))
    write(rows)
    with pytest.raises(SuiteError, match=f"changed while it was being run: {message}"):
        list(plan.jobs())


def test_a_case_edited_since_it_was_planned_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "cases.jsonl"
    path.write_text('{"id": "a", "prompt": "before"}')
    plan = make_plan(EvalSet.from_jsonl(path))
    path.write_text('{"id": "a", "prompt": "after"}')
    with pytest.raises(SuiteError, match="the case 'a' is not what it was"):
        list(plan.jobs())


def large_file(path: Path, rows: int = 5_000) -> EvalSet:
    path.write_text("".join(f'{{"id": "case-{number}", "prompt": "before"}}\n' for number in range(rows)))
    return EvalSet.from_jsonl(path)


def test_cases_of_an_unchanged_file_are_not_fingerprinted_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = make_plan(large_file(tmp_path / "cases.jsonl"))
    monkeypatch.setattr(plan_module, "case_fingerprint", lambda case: pytest.fail(f"looked at {case.id} again"))
    assert len(list(plan.jobs())) == 5_000


def test_an_edit_far_ahead_of_what_is_being_read_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "cases.jsonl"
    plan = make_plan(large_file(path))
    jobs = plan.jobs()
    first = next(jobs)
    path.write_text(path.read_text().replace('"case-4990", "prompt": "before"', '"case-4990", "prompt": "behind"'))
    assert first is not None
    with pytest.raises(SuiteError, match="the case 'case-4990' is not what it was"):
        list(jobs)


def test_a_change_of_layout_alone_is_no_change_of_the_cases(tmp_path: Path) -> None:
    path = tmp_path / "cases.jsonl"
    plan = make_plan(large_file(path))
    path.write_text("\n" + path.read_text().replace('", "prompt"', '",  "prompt"'))
    assert len(list(plan.jobs())) == 5_000


@pytest.mark.parametrize("with_ids", [True, False])
def test_planning_keeps_few_bytes_a_case(with_ids: bool) -> None:
    count = 50_000

    def cases() -> Iterator[EvalCase]:
        return (EvalCase(id=f"case {n}" if with_ids else "", prompt=f"{n}") for n in range(count))

    tracemalloc.start()
    try:
        plan = make_plan(EvalSet("s", cases), scorers_digest=b"s")
        plan.slot_of(plan.id_digests[:1], np.zeros(1))
        kept, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert kept / count < 40
    assert peak / count < 60


# The event loop's turns ----------------------------------------------------------------------------------------------


COUNT = 20_000


def many() -> EvalSet:
    return EvalSet("many", lambda: (EvalCase(id=f"c{number:05}", prompt="?") for number in range(COUNT)))


def test_jobs_give_a_sign_while_cases_are_passed_over() -> None:
    plan = make_plan(many(), match="c[01]999[09]")
    jobs = list(plan.jobs())
    assert [job.case.id for job in jobs if job is not None] == ["c09990", "c09999", "c19990", "c19999"]
    assert jobs.count(None) > 100


def test_a_call_is_not_timed_out_because_the_next_case_is_far_away() -> None:
    longest = 0.0

    async def answer(case: EvalCase) -> str:
        nonlocal longest
        loop = asyncio.get_running_loop()
        for _ in range(5):
            before = loop.time()
            await asyncio.sleep(0)
            longest = max(longest, loop.time() - before)
        return "yes"

    result = Runner(answer, many(), match="c[01]9999", parallelism=2, progress="off").run_sync()
    assert result.metrics["counts"]["ok"] == 2
    # The whole of the suite takes several times as long to read.
    assert longest < 0.05


# Load runs: cases in rounds ------------------------------------------------------------------------------------------


def plan_of(cases: int, *, match: str | None = None, **how: float | int | None) -> CyclingPlan:
    suite = EvalSet(id="s", cases=[EvalCase(id=f"c{n}", prompt=str(n)) for n in range(cases)])
    given = {"requests": None, "duration": None, **how}
    return cycling(make_plan(suite, match=match), **given)  # type: ignore[arg-type]


def handed_out(plan: CyclingPlan) -> list[tuple[str, int]]:
    return [(job.case.id, job.trial) for job in plan.jobs() if job is not None]


def test_cases_are_sent_round_after_round_until_all_requests_are_out() -> None:
    assert handed_out(plan_of(3, requests=7)) == [
        ("c0", 0), ("c1", 0), ("c2", 0), ("c0", 1), ("c1", 1), ("c2", 1), ("c0", 2),
    ]  # fmt: skip


def test_fewer_requests_than_cases_send_only_the_first() -> None:
    assert handed_out(plan_of(5, requests=2)) == [("c0", 0), ("c1", 0)]


@pytest.mark.parametrize("match", [None, "c[13]"])
def test_every_request_has_a_slot_of_its_own_in_order_of_sending(match: str | None) -> None:
    plan = plan_of(5, match=match, requests=23)
    jobs = [job for job in plan.jobs() if job is not None]
    assert [plan.slot_at(job.index, job.trial) for job in jobs] == list(range(23))
    assert [plan.index(slot) for slot in range(23)] == [job.index for job in jobs]
    positions, rounds = plan.places(np.arange(23))
    assert rounds.tolist() == [job.trial for job in jobs]
    assert [plan.indices[position] for position in positions.tolist()] == [job.index for job in jobs]
    digests = np.array([id_digest(job.case.id) for job in jobs], dtype=np.uint64)
    assert plan.slot_of(digests, rounds).tolist() == list(range(23))


def test_a_number_of_requests_is_planned_before_any_is_sent() -> None:
    assert plan_of(3, requests=7).slots == 7


def test_a_duration_plans_what_was_handed_out_until_the_time_was_up() -> None:
    now = 100.0
    plan = plan_of(2, duration=10.0)
    plan.clock = lambda: now
    jobs = plan.jobs()
    for _ in range(5):
        assert next(jobs) is not None
    assert plan.slots == 5
    now = 110.0
    assert next(jobs, None) is None
    assert plan.slots == 5


def test_with_both_whichever_comes_first_ends_it() -> None:
    plan = plan_of(2, duration=1000.0, requests=3)
    assert len(handed_out(plan)) == 3
    assert plan.slots == 3


def test_a_suite_too_large_to_keep_is_read_again_each_round(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "_MAX_KEPT", 2)
    assert handed_out(plan_of(3, requests=4))[-1] == ("c0", 1)


def test_the_fingerprints_are_those_of_the_cases() -> None:
    plan = plan_of(2, requests=4)
    fingerprints = [job.case_fp for job in plan.jobs() if job is not None]
    assert fingerprints[:2] == fingerprints[2:]
    assert fingerprints[0] != fingerprints[1]


def test_a_glob_with_many_stars_is_matched_in_time() -> None:
    selects = _selector("*a" * 40 + "b", Selection())
    assert selects is not None
    assert not selects(EvalCase(id="a" * 10_000))
