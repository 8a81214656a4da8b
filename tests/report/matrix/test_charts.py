"""Pass rate against cost and latency, and the front of those that are best for what they cost."""

from __future__ import annotations

from pathlib import Path

from steelyard.report.chart import draw
from steelyard.report.matrix.charts import scatter_charts
from steelyard.report.matrix.leaderboard import rank
from tests.support.compare import outcome
from tests.support.matrix import matrix, matrix_of


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
