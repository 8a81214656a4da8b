"""The page of several runs, without a browser: what it holds, how much of it, and that none of it is markup."""

from __future__ import annotations

import base64
import hashlib
import re
from pathlib import Path

from steelyard import EvalCase, EvalSet
from steelyard.report.chart import draw
from steelyard.report.html import asset, join_scripts
from steelyard.report.matrix.leaderboard import rank
from steelyard.report.matrix.page import SCRIPTS, matrix_page, scatter_charts
from steelyard.report.matrix.table import VariantRuns, variants_of
from tests.support.compare import finished, outcome
from tests.support.matrix import matrix, matrix_of
from tests.support.report import HOSTILE, Elements, PageData, hostile_run


def page_of(variants: VariantRuns) -> PageData:
    return PageData("".join(matrix_page(variants)))


def test_a_row_holds_the_outcomes_and_the_answers_of_every_variant(tmp_path: Path) -> None:
    page = page_of(matrix(tmp_path, {"a": "pfe.", "b": "ppuf"}, response_text=None))
    assert [variant["name"] for variant in page.overview["variants"]] == ["a", "b"]
    assert page.columns("id") == ["c0", "c1", "c2", "c3"]
    assert [page._unpacked("columns")[0]["states"][place] for place in (0, 1)] == [
        ["1", "0", "3", ""],
        ["1", "1", "2", "0"],
    ]
    bodies = page.bodies()
    assert [[len(trials) for trials in body["variants"]] for body in bodies] == [[1, 1], [1, 1], [1, 1], [0, 1]]
    assert bodies[2]["variants"][0][0]["error"] == "TargetError: no"


def test_answers_that_differ_are_flagged_also_where_outcomes_do_not(tmp_path: Path) -> None:
    records = {name: [outcome("p", 0, response_text=name), outcome("p", 1, response_text="same")] for name in "ab"}
    assert page_of(matrix_of(tmp_path, records)).columns("flags") == [1, 0]


def test_trials_are_next_to_each_other_and_a_failed_one_is_the_preview(tmp_path: Path) -> None:
    trials = [outcome(letter, 0, trial=n, response_text=f"answer {n}") for n, letter in enumerate("pfp")]
    page = page_of(matrix_of(tmp_path, {"a": trials, "b": trials}))
    block = page._unpacked("columns")[0]
    assert block["states"] == [["101"], ["101"]]
    assert block["answers"] == [["answer 1"], ["answer 1"]]
    assert [one["answer"] for one in page.bodies()[0]["variants"][0]] == ["answer 0", "answer 1", "answer 2"]


def test_what_was_expected_and_the_metadata_are_those_of_the_case(tmp_path: Path) -> None:
    metadata = {"topic": "sums", "hard": True, "level": 3, "nested": {"a": 1}}
    records = {name: [outcome("p", 0, expected="yes", metadata=metadata)] for name in "ab"}
    body = page_of(matrix_of(tmp_path, records)).bodies()[0]
    assert body["expected"] == ["yes"]
    assert body["metadata"] == {"topic": "sums", "hard": "true", "level": "3"}
    assert "edited" not in body


def test_expected_answers_that_the_records_do_not_have_come_from_the_suite(tmp_path: Path) -> None:
    variants = matrix(tmp_path, {"a": "p", "b": "f"})
    suite = EvalSet("letters", [EvalCase(id="c0", prompt="0?", expected="from the suite")])
    page = PageData("".join(matrix_page(variants, suite)))
    assert page.bodies()[0]["expected"] == ["from the suite"]


def test_a_run_that_keeps_what_is_expected_to_itself_shows_none(tmp_path: Path) -> None:
    for name in "abc":
        finished(tmp_path / name, "pf", keep_expected=False)
    page = page_of(variants_of([tmp_path / name for name in "abc"]))
    assert "expected" not in page.bodies()[0]
    assert page.overview["about"]["suite_note"] == "left out of the records and of this page (keep_expected)"


def test_long_answers_are_cut_so_that_the_page_can_be_opened(tmp_path: Path) -> None:
    variants = matrix(tmp_path, {"a": "p", "b": "p"}, response_text="x" * 200_000)
    begun, length = page_of(variants).bodies()[0]["variants"][0][0]["answer"]
    assert len(begun) == 50_000
    assert length == 200_000


def test_the_page_has_no_element_but_its_own(tmp_path: Path) -> None:
    runs = [hostile_run(tmp_path / name) for name in ("<script>alert(1)</script>", "b", "c")]
    text = "".join(matrix_page(variants_of(runs)))
    seen = Elements(text)
    assert not [name for _, attributes in seen.tags for name in attributes if name.startswith("on")]
    assert "img" not in {tag for tag, _ in seen.tags}
    assert {attributes.get("type") for tag, attributes in seen.tags if tag == "script"} == {
        None,
        "application/json",
        "application/octet-stream",
    }
    for word in (HOSTILE[0], "\x1b", "\u202e"):
        assert word not in text
    script = join_scripts(map(asset, SCRIPTS))
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = re.search(r'http-equiv="Content-Security-Policy" content="([^"]+)"', text)
    assert policy is not None
    assert f"script-src 'sha256-{digest}'" in policy[1]


def test_without_scripts_the_leaderboard_is_there_all_the_same(tmp_path: Path) -> None:
    text = "".join(matrix_page(matrix(tmp_path, {"a": "p" * 30, "b": "f" * 30})))
    assert "a passed most: 100.0%; b is shown to be worse" in Elements(text).text


def test_the_foot_of_the_leaderboard_speaks_of_its_columns_alone(tmp_path: Path) -> None:
    plain = Elements("".join(matrix_page(matrix(tmp_path / "plain", {"a": "pf", "b": "ff"})))).text
    assert "Time: to last token, the median." in plain
    assert "Costs" not in plain
    paid = Elements("".join(matrix_page(matrix(tmp_path / "paid", {"a": "pf", "b": "ff"}, cost=0.01)))).text
    assert "Costs in USD, judges included." in paid


def test_the_front_goes_from_the_cheapest_to_the_best(tmp_path: Path) -> None:
    figures = {"good": ("p" * 10, 0.3), "cheap": ("pppppfffff", 0.01), "poor": ("ppppffffff", 0.2)}
    records = {
        name: [outcome(one, n, cost=cost, time_to_last_token=1 - cost) for n, one in enumerate(word)]
        for name, (word, cost) in figures.items()
    }
    cost, latency = scatter_charts(rank(matrix_of(tmp_path, records)))
    assert (cost.title, latency.title) == ("Pass rate against cost", "Pass rate against latency")
    assert [mark.label for mark in cost.series[0].marks] == ["cheap", "good"]
    assert [mark.label for series in cost.series[1:] for mark in series.marks] == ["poor"]
    assert [mark.label for mark in latency.series[0].marks] == ["good"]
    assert cost.x.log
    assert cost.series[0].marks[1].text == "good: 100.0% passed (95 % CI 69.2% – 100.0%), cost 0.30 USD"
    assert cost.series[0].marks[1].ringed


def test_every_point_lies_within_the_chart(tmp_path: Path) -> None:
    for folder, rates in {"none": ("f" * 9, "f" * 9), "all": ("p" * 9, "p" * 9), "both": ("p" * 9, "f" * 9)}.items():
        board = rank(matrix(tmp_path / folder, dict(zip("ab", rates, strict=True)), cost=0.0, time_to_last_token=0.5))
        for chart in scatter_charts(board):
            drawing = draw(chart)
            for mark in drawing["marks"]:
                assert drawing["left"] <= mark["x"] <= drawing["right"]
                assert drawing["top"] <= mark["y"] <= drawing["bottom"]
            assert len(drawing["y_ticks"]) >= 2


def test_what_was_not_measured_is_not_drawn(tmp_path: Path) -> None:
    board = rank(matrix(tmp_path, {"a": "pf", "b": "pp"}, time_to_last_token=None, time_to_first_token=None))
    assert scatter_charts(board) == []
