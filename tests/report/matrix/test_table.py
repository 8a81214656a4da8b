"""The cases of several runs in one order, by id and trial."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from steelyard.report.matrix.table import AlignedCases, lead_of
from steelyard.report.records import STATES
from tests.support.compare import outcome
from tests.support.journal import write_journal
from tests.support.matrix import matrix, matrix_of

LETTERS = {"p": "passed", "f": "failed", "u": "unscored", "e": "error"}
Runs = st.lists(
    st.dictionaries(st.integers(0, 6), st.text("pfue", min_size=1, max_size=3), max_size=6), min_size=1, max_size=4
)


@settings(deadline=None, max_examples=40)
@given(Runs)
def test_every_record_is_found_at_its_case_and_trial(
    tmp_path_factory: pytest.TempPathFactory, runs: list[dict[int, str]]
) -> None:
    folder = tmp_path_factory.mktemp("runs")
    for number, cases in enumerate(runs):
        records = [
            outcome(letter, case, trial=trial, response_text=f"{number} {case} {trial}")
            for case, letters in cases.items()
            for trial, letter in enumerate(letters)
        ]
        write_journal(folder / str(number), records)
    aligned = AlignedCases([folder / str(number) for number in range(len(runs))])
    ids = []
    for case, found in aligned.read():
        case_id = next(trials[0][1].id for trials in found if trials)
        ids.append(case_id)
        for number, trials in enumerate(found):
            letters = runs[number].get(int(case_id[1:]), "")
            assert [record.trial for _, record in trials] == list(range(len(letters)))
            assert {record.id for _, record in trials} <= {case_id}
            assert [STATES[state] for state in aligned.states(number, case)] == [LETTERS[one] for one in letters]
    assert sorted(ids) == sorted({f"c{case}" for cases in runs for case in cases})
    assert aligned.records == sum(len(letters) for cases in runs for letters in cases.values())


def test_the_order_is_that_of_the_first_run_that_has_each_case(tmp_path: Path) -> None:
    variants = matrix(tmp_path, {"a": ".p.p.", "b": "ppppp"})
    aligned = AlignedCases([one.run for one in variants.runs])
    ids = [next(trials[0][1].id for trials in found if trials) for _, found in aligned.read()]
    assert ids == ["c1", "c3", "c0", "c2", "c4"]


def test_cases_differ_where_the_share_that_passed_does(tmp_path: Path) -> None:
    variants = matrix(tmp_path, {"a": "ppfue.", "b": "pffufp", "c": "ppfpe."})
    aligned = AlignedCases([one.run for one in variants.runs])
    assert aligned.differing().tolist() == [1]


def test_cases_that_pass_as_often_in_more_trials_do_not_differ(tmp_path: Path) -> None:
    trials = {
        name: [outcome(letter, 0, trial=n) for n, letter in enumerate(word)]
        for name, word in {"a": "pf", "b": "fppf"}.items()
    }
    aligned = AlignedCases([one.run for one in matrix_of(tmp_path, trials).runs])
    assert aligned.differing().tolist() == []


def test_a_failed_trial_stands_for_its_case_then_an_error() -> None:
    assert lead_of(["passed", "error", "failed", "failed"]) == 2
    assert lead_of(["passed", "unscored", "error"]) == 2
    assert lead_of(["passed", "passed"]) == 0


def test_no_answer_is_held_in_memory(tmp_path: Path) -> None:
    variants = matrix(tmp_path, {"a": "p" * 50, "b": "f" * 50}, response_text="x" * 10_000)
    aligned = AlignedCases([one.run for one in variants.runs])
    held = sum(value.nbytes for value in vars(aligned).values() if isinstance(value, np.ndarray))
    assert held < 10_000
