"""Which of several runs is best, how sure that is, and what is said where it cannot be told."""

from __future__ import annotations

from functools import cache
from itertools import combinations
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from steelyard.errors import ConfigurationError, RunRefused
from steelyard.records import Score
from steelyard.report import Leaderboard, leaderboard
from steelyard.report.compare.compare import compare_runs
from steelyard.report.matrix.leaderboard import Standing, pareto_front, rank
from steelyard.report.matrix.page import _row
from steelyard.report.matrix.table import variants_of
from steelyard.report.matrix.text import mark_of
from steelyard.run.matrix import Matrix, make_variants, write_matrix
from steelyard.run.result import Result
from steelyard.stats.intervals import clopper_pearson
from steelyard.stats.paired import holm, paired_difference
from tests.support.compare import finished, journal, outcome
from tests.support.journal import write_journal
from tests.support.matrix import matrix, matrix_of


def by_name(board: Leaderboard) -> dict[str, Standing]:
    return {one.name: one for one in board.variants}


def places(board: Leaderboard) -> dict[str, str]:
    return {one.name: one.place for one in board.variants}


def test_the_best_is_first_and_the_others_are_worse_or_cannot_be_told_from_it(tmp_path: Path) -> None:
    board = rank(matrix(tmp_path, {"low": "p" * 40 + "f" * 60, "top": "p" * 97 + "fff", "near": "p" * 95 + "f" * 5}))
    assert places(board) == {"top": "best", "near": "not distinguishable", "low": "worse"}
    assert [one.rank for one in board.variants] == [1, 2, 3]
    assert board.best == "top"
    assert board.not_distinguishable == ["near"]
    assert board.verdict == "top passed most: 97.0%; near cannot be told from it; low is shown to be worse"


def test_each_rate_and_interval_is_that_of_the_runs_own_summary(tmp_path: Path) -> None:
    variants = matrix(tmp_path, {"a": "ppfe" * 10, "b": "pppp" * 10})
    board = by_name(rank(variants))
    for variant in variants.runs:
        metrics, one = Result.load(variant.run).typed_metrics, board[variant.name]
        assert (one.pass_rate, one.pass_rate_ci95) == (metrics.pass_rate, metrics.pass_rate_ci95)
        assert (one.pass_rate_all, one.pass_rate_all_ci95) == (metrics.pass_rate_all, metrics.pass_rate_all_ci95)
    assert board["a"].pass_rate_all_ci95 == pytest.approx(clopper_pearson(20, 40))
    assert board["a"].pass_rate == pytest.approx(20 / 30)


def test_errors_count_against_a_variant(tmp_path: Path) -> None:
    board = rank(matrix(tmp_path, {"right but absent": "p" * 20 + "e" * 40, "there": "p" * 40 + "f" * 20}))
    assert board.best == "there"
    assert places(board)["right but absent"] == "worse"


def test_a_difference_is_that_of_a_comparison_of_the_two_runs(tmp_path: Path) -> None:
    journal(tmp_path / "a", "p" * 50 + "f" * 14)
    journal(tmp_path / "b", "f" * 25 + "p" * 35 + "ffff")
    journal(tmp_path / "c", "f" * 64)
    board = leaderboard([tmp_path / name for name in "abc"])
    pair = compare_runs([tmp_path / "a", tmp_path / "b"]).against[0].pass_rate
    against = by_name(board)["b"].against_best
    assert against is not None
    assert pair is not None
    assert (against.change.difference, against.change.ci95, against.change.p) == (pair.difference, pair.ci95, pair.p)


def test_p_is_raised_for_all_pairs_as_the_best_was_found_in_the_same_cases(tmp_path: Path) -> None:
    rng = np.random.default_rng(3)
    words = {
        name: "".join(rng.choice(["p", "f"], 60, p=[rate, 1 - rate]))
        for name, rate in zip("wxyz", (0.9, 0.7, 0.6, 0.8), strict=True)
    }
    board = rank(matrix(tmp_path, words))
    passed = {name: np.array([letter == "p" for letter in word], dtype=float) for name, word in words.items()}
    pairs = list(combinations(words, 2))
    found = [paired_difference(passed[a] - passed[b]) for a, b in pairs]
    adjusted = dict(zip(map(frozenset, pairs), holm([one.p for one in found if one is not None]), strict=True))
    assert board.pairs_tested == 6
    for one in board.variants[1:]:
        assert one.against_best is not None
        assert one.against_best.change.p_adjusted == pytest.approx(adjusted[frozenset((board.best, one.name))])


def test_runs_in_which_no_case_differs_count_for_no_pair(tmp_path: Path) -> None:
    board = rank(matrix(tmp_path, {"a": "ppf" * 9, "b": "ppf" * 9, "c": "f" * 27}))
    assert board.pairs_tested == 2
    assert places(board) == {"a": "tied", "b": "tied", "c": "worse"}
    assert [one.rank for one in board.variants] == [1, 1, 3]


def test_variants_that_passed_equally_many_are_tied_and_none_passed_most(tmp_path: Path) -> None:
    variants = matrix(tmp_path, {"a": "pppp", "b": "pppp", "c": "pppf"})
    board = rank(variants)
    assert places(board) == {"a": "tied", "b": "tied", "c": "not distinguishable"}
    assert board.verdict == (
        "No variant is shown to be better than another: a and b passed equally many: 100.0%, "
        "and c cannot be told from them by 4 cases"
    )
    assert board.not_distinguishable == ["b", "c"], "from a, with which they are compared"
    assert [mark_of(one) for one in board.variants] == ["=", "=", "="]
    assert [row["best"] for row in (_row(board, one, None) for one in board.variants)] == [False] * 3
    assert rank(matrix(tmp_path / "two", {"a": "pf", "b": "fp"})).verdict == "a and b passed equally many: 50.0%"
    assert rank(matrix(tmp_path / "none", {"a": "ff", "b": "ff"})).verdict == "No variant passed any case"
    assert rank(matrix(tmp_path / "one", {"a": "pf"})).verdict == "a passed 50.0%"


def test_few_cases_show_nothing_and_how_many_would_is_said(tmp_path: Path) -> None:
    board = rank(matrix(tmp_path, {"a": "ppppf", "b": "pppff", "c": "pppff"}))
    assert board.verdict == (
        "No variant is shown to be better than another: a passed most: 80.0%, "
        "and b and c cannot be told from it by 5 cases"
    )
    against = by_name(board)["b"].against_best
    assert against is not None
    assert against.cases_needed is not None
    assert against.cases_needed > 20


def test_trials_of_a_case_are_one_case(tmp_path: Path) -> None:
    def repeated(letters: str, trials: int) -> list:
        return [outcome(one, number, trial=trial) for number, one in enumerate(letters) for trial in range(trials)]

    board = rank(matrix_of(tmp_path, {"a": repeated("pppp", 25), "b": repeated("pfff", 25), "c": repeated("pfff", 25)}))
    assert places(board) == {"a": "best", "b": "not distinguishable", "c": "not distinguishable"}
    assert by_name(board)["a"].trials == 25


def test_groups_of_cases_widen_what_is_known(tmp_path: Path) -> None:
    single = rank(matrix(tmp_path / "single", {"a": "p" * 40, "b": "p" * 28 + "f" * 12, "c": "p" * 40}))
    grouped = rank(matrix(tmp_path / "grouped", {"a": "p" * 40, "b": "p" * 28 + "f" * 12, "c": "p" * 40}, group="one"))
    assert places(single)["b"] == "worse"
    assert places(grouped)["b"] == "not distinguishable"


def test_a_run_that_has_just_begun_is_listed_but_not_ranked(tmp_path: Path) -> None:
    board = rank(matrix(tmp_path, {"late": "p", "a": "p" * 20 + "f" * 20, "b": "f" * 40}))
    assert board.best == "a"
    assert board.cases_in_common == 40
    late = by_name(board)["late"]
    assert (late.rank, late.place) == (None, "not ranked")
    assert "not ranked: too few of the cases are done" in late.notes
    assert board.variants[-1] is late


def test_unfinished_runs_are_ranked_by_the_cases_that_all_have(tmp_path: Path) -> None:
    board = rank(matrix(tmp_path, {"a": "pppppp....", "b": "fppppppppp", "c": "fffffppppp"}))
    assert board.cases_in_common == 6
    assert [one.name for one in board.variants] == ["a", "b", "c"]
    assert "compared on the 6 cases that it shares with the best" in by_name(board)["b"].notes


def test_runs_without_verdicts_are_not_ranked(tmp_path: Path) -> None:
    board = rank(matrix(tmp_path, {"a": "uuu", "b": "uuu"}))
    assert board.best is None
    assert board.verdict.startswith("Nothing can be ranked")
    assert {one.place for one in board.variants} == {"not ranked"}


def test_a_run_of_errors_alone_is_worst_not_unknown(tmp_path: Path) -> None:
    assert places(rank(matrix(tmp_path, {"a": "p" * 30, "b": "e" * 30})))["b"] == "worse"


def test_runs_that_share_no_case_are_not_ranked(tmp_path: Path) -> None:
    board = rank(matrix(tmp_path, {"a": "pp..", "b": "..pp"}))
    assert board.best is None
    assert board.cases_in_common == 0


def test_costs_are_by_case_asked_and_by_case_passed(tmp_path: Path) -> None:
    board = rank(matrix(tmp_path, {"a": "ppff" * 5, "b": "pppp" * 5}, cost=0.02))
    a = by_name(board)["a"]
    assert a.cost == pytest.approx(0.4)
    assert a.cost_per_case == pytest.approx(0.02)
    assert a.cost_per_passed_case == pytest.approx(0.04)


def test_answers_from_the_cache_do_not_make_a_variant_cheap(tmp_path: Path) -> None:
    records = [outcome("p", n, cost=0.02, cached=n < 9) for n in range(10)]
    a = by_name(rank(matrix_of(tmp_path, {"a": records, "b": records})))["a"]
    assert a.cost_per_case == pytest.approx(0.02)
    assert "9 of 10 answers came from the cache: times and costs are of the others" in a.notes


def test_of_equally_good_ones_the_cheaper_is_first(tmp_path: Path) -> None:
    records = {
        name: [outcome("p", number, cost=cost) for number in range(5)] for name, cost in (("dear", 0.2), ("cheap", 0.1))
    }
    assert rank(matrix_of(tmp_path, records)).best == "cheap"


def test_a_judge_that_is_not_calibrated_is_named_with_the_rate_without_it(tmp_path: Path) -> None:
    scores = [Score("exact", 0.0, False, overruled=True), Score("judge", 1.0, True, by="model x")]
    records = [outcome("u", n, scores=scores) for n in range(10)]
    a = by_name(rank(matrix_of(tmp_path, {"a": records, "b": records})))["a"]
    assert a.uncalibrated == ["the judge is not calibrated; the pass rate without it is 0.0%"]


def test_a_matrix_says_which_variants_have_not_begun(tmp_path: Path) -> None:
    matrix(tmp_path, {"a": "pf"})
    variants = make_variants({"target": ["a", "b"]})
    write_matrix(tmp_path, Matrix(suite="letters", axes={"target": ["a", "b"]}, variants=variants))
    board = leaderboard(tmp_path)
    assert board.not_begun == ["b"]
    assert [one.name for one in board.variants] == ["a"]


def test_a_matrix_of_which_nothing_has_begun_is_refused(tmp_path: Path) -> None:
    write_matrix(tmp_path, Matrix(suite="x", axes={"target": ["a"]}, variants=make_variants({"target": ["a"]})))
    with pytest.raises(ConfigurationError, match=r"no variant of the matrix in .* has begun"):
        leaderboard(tmp_path)
    with pytest.raises(RunRefused, match="holds no matrix"):
        leaderboard(tmp_path / "elsewhere")


def test_cases_that_a_prompt_changes_are_compared_in_a_matrix_and_left_out_of_other_runs(tmp_path: Path) -> None:
    """A prompt of a matrix changes only the cases that have no system prompt of their own, perhaps few of them."""
    other = "b" * 16
    records = {
        "a": [outcome("p", number) for number in range(10)],
        "b": [outcome("f", n, **({"case_fp": other} if n < 3 else {})) for n in range(10)],
    }
    variants = matrix_of(tmp_path, records)
    as_a_matrix = by_name(rank(variants))["b"].against_best
    as_runs = by_name(leaderboard([one.run for one in variants.runs]))["b"]
    assert as_a_matrix is not None
    assert as_runs.against_best is not None
    assert (as_a_matrix.change.cases, as_runs.against_best.change.cases) == (10, 7)
    assert "3 of 10 cases were edited in between and are left out" in as_runs.notes


def test_other_suites_and_scorers_are_noted(tmp_path: Path) -> None:
    finished(tmp_path / "a", "pppp")
    finished(tmp_path / "b", "ppff", scorers=("contains",))
    board = rank(variants_of([tmp_path / "a", tmp_path / "b"]))
    assert "scored by other scorers than the best" in by_name(board)["b"].notes


def test_the_leaderboard_is_the_same_when_it_is_read_back_from_json(tmp_path: Path) -> None:
    board = rank(matrix(tmp_path, {"a": "ppf", "b": "fpe"}))
    assert msgspec.json.decode(msgspec.json.encode(board), type=Leaderboard) == board


def test_a_notebook_shows_the_verdict_and_escapes_names(tmp_path: Path) -> None:
    write_journal(tmp_path / "<b>bold", [outcome("p", 0)])
    write_journal(tmp_path / "plain", [outcome("f", 0)])
    shown = leaderboard([tmp_path / "<b>bold", tmp_path / "plain"])._repr_html_()
    assert "&lt;b&gt;bold passed most" in shown
    assert "<b>bold" not in shown


Points = st.lists(st.tuples(*[st.integers(0, 4)] * 3), min_size=1, max_size=12)


@given(Points)
def test_the_front_holds_exactly_the_points_that_no_other_beats(points: list[tuple[int, int, int]]) -> None:
    def beats(one: tuple[int, ...], other: tuple[int, ...]) -> bool:
        return all(a <= b for a, b in zip(one, other, strict=True)) and one != other

    expected = [not any(beats(other, one) for other in points) for one in points]
    assert pareto_front(np.array(points, dtype=float)) == expected


def test_variants_on_the_front_of_rate_cost_and_latency_are_marked(tmp_path: Path) -> None:
    figures = {"good": ("p" * 10, 0.3), "cheap": ("pppppfffff", 0.1), "neither": ("ppppffffff", 0.2)}
    board = rank(
        matrix_of(
            tmp_path,
            {
                name: [outcome(letter, n, cost=cost, time_to_last_token=cost) for n, letter in enumerate(word)]
                for name, (word, cost) in figures.items()
            },
        )
    )
    assert board.pareto_by == ["pass rate", "cost", "latency"]
    assert {one.name: one.pareto for one in board.variants} == {"good": True, "cheap": True, "neither": False}


@cache
def flip_p(better: int, worse: int, n: int) -> float:
    found = paired_difference(np.repeat([1.0, -1.0, 0.0], [better, worse, n - better - worse]))
    assert found is not None
    return found.p


def alarms(k: int, n: int, rate: float, rounds: int, rng: np.random.Generator) -> tuple[float, float]:
    """How often equal variants are called different: by all pairs, and by the pairs with the best one alone."""
    ours = naive = 0
    for _ in range(rounds):
        passed = rng.random((k, n)) < rate
        best = int(np.argmax(passed.sum(axis=1)))
        p = {}
        for one, other in combinations(range(k), 2):
            flips = int((passed[one] & ~passed[other]).sum()), int((passed[other] & ~passed[one]).sum())
            p[one, other] = flip_p(max(flips), min(flips), n)
        with_best = [pair for pair in p if best in pair]
        adjusted = dict(zip(p, holm(list(p.values())), strict=True))
        ours += min(adjusted[pair] for pair in with_best) < 0.05
        naive += min(holm([p[pair] for pair in with_best])) < 0.05
    return ours / rounds, naive / rounds


def test_equal_variants_are_called_different_at_most_one_time_in_twenty() -> None:
    """As which of them is best is found in the same cases, the pairs with it alone would be too few to count."""
    ours, naive = alarms(8, 60, 0.5, 1000, np.random.default_rng(5))
    assert ours <= 0.05
    assert naive > 0.07


def test_a_variant_whose_scorer_failed_says_so(tmp_path: Path) -> None:
    scores = [Score("exact", 0.0, False), Score("judge", errors=["no JSON in the reply"])]
    board = rank(matrix_of(tmp_path, {"a": [outcome("p", 0)], "b": [outcome("f", 0, scores=scores)]}))
    note = "a scorer failed on 1 of 1 answer"
    assert {one.name: note in one.notes for one in board.variants} == {"a": False, "b": True}
