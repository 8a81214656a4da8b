"""A load run goes round its cases: every request has a slot of its own."""

from __future__ import annotations

import numpy as np
import pytest

from steelyard import EvalCase, EvalSet
from steelyard.records import id_digest
from steelyard.run import plan
from steelyard.run.plan import CyclingPlan, cycling, make_plan


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
    monkeypatch.setattr(plan, "_MOST_KEPT", 2)
    assert handed_out(plan_of(3, requests=4))[-1] == ("c0", 1)


def test_the_fingerprints_are_those_of_the_cases() -> None:
    plan = plan_of(2, requests=4)
    fingerprints = [job.case_fp for job in plan.jobs() if job is not None]
    assert fingerprints[:2] == fingerprints[2:]
    assert fingerprints[0] != fingerprints[1]
