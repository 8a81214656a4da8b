"""The charts of a sweep as files: legible with many levels, the same bytes each time, and inert."""

from __future__ import annotations

import itertools
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest

from steelyard.journal.manifest import PLOTS
from steelyard.load.levels import Level
from steelyard.report.chart import draw
from steelyard.report.sweep.charts import error_rate_chart, latency_chart, write_charts
from tests.support.report import HOSTILE
from tests.support.sweep import hostile_sweep, level, swept

SVG = "{http://www.w3.org/2000/svg}"


def twelve_levels() -> list[Level]:
    """What a search for a knee at 40 may measure, the last ones not valid or not reached."""
    numbers = (1, 2, 4, 8, 16, 32, 38, 45, 64, 128, 256, 512)
    return [
        level(n, min(n, 40) * 5, errors=max(0.0, 0.5 - 20 / n), first=0.1 + n / 100, busy=n == 512, reached=n != 256)
        for n in numbers
    ]


def label_boxes(sweep: dict[str, Any]) -> dict[str, tuple[float, float, float, float]]:
    """Each label of the first chart, and the box that it covers in the file."""
    found = draw(error_rate_chart(sweep), 720, 400)["labels"]
    boxes = {}
    for label in found:
        half = len(label["text"]) * 6.6 / 2
        boxes[label["text"]] = (label["x"] - half, label["y"] - 6, label["x"] + half, label["y"] + 6)
    return boxes


def overlapping(boxes: dict[str, tuple[float, float, float, float]]) -> list[tuple[str, str]]:
    return [
        (a, b)
        for (a, one), (b, other) in itertools.combinations(boxes.items(), 2)
        if one[0] < other[2] - 0.2 and other[0] < one[2] - 0.2 and one[1] < other[3] - 0.2 and other[1] < one[3] - 0.2
    ]


def texts(path: Path) -> list[str]:
    return [element.text or "" for element in ElementTree.parse(path).iter(f"{SVG}text")]


def test_every_chart_is_written_as_svg(tmp_path: Path) -> None:
    paths = write_charts(swept(twelve_levels()), tmp_path)
    assert [path.name for path in paths] == list(PLOTS)
    for path in paths:
        assert path.read_bytes().startswith(b"<?xml")
        assert ElementTree.parse(path).getroot().tag == f"{SVG}svg"


def test_the_same_sweep_gives_the_same_bytes(tmp_path: Path) -> None:
    for name in ("once", "again"):
        (tmp_path / name).mkdir()
        write_charts(swept(twelve_levels()), tmp_path / name)
    for name in PLOTS:
        assert (tmp_path / "once" / name).read_bytes() == (tmp_path / "again" / name).read_bytes()


def test_the_labels_of_twelve_levels_do_not_cover_each_other() -> None:
    boxes = label_boxes(swept(twelve_levels()))
    assert set(boxes) == {"1", "2", "4", "8", "16", "32", "38", "45", "64", "128", "256", "512"}
    assert overlapping(boxes) == []


def test_levels_at_the_very_same_place_are_all_labelled() -> None:
    boxes = label_boxes(swept([level(n, 100) for n in (50, 100, 200, 400)]))
    assert set(boxes) == {"50", "100", "200", "400"}
    assert overlapping(boxes) == []


def test_levels_that_say_little_are_told_apart_and_the_recommended_one_is_named(tmp_path: Path) -> None:
    sweep = swept(twelve_levels(), slo="ttft_p99<500ms,error_rate<2%")
    assert [entry.text for entry in error_rate_chart(sweep).legend] == [
        "level, by its calls in flight",
        "recommended",
        "not reached, or the client was the bottleneck",
        "limit 2%",
    ]
    assert [entry.text for entry in latency_chart(sweep, "time_to_first_token").legend] == [
        "p50", "p90", "p99", "limit of p99 500 ms", "recommended",
    ]  # fmt: skip
    error_rate, latency = write_charts(sweep, tmp_path)
    assert {"limit 2%", "recommended", "Error rate against throughput"} <= set(texts(error_rate))
    assert {"p99", "limit of p99 500 ms", "Time to first token", "Time to last token"} <= set(texts(latency))


@pytest.mark.parametrize(
    "levels",
    [[], [level(5, 20)], [level(5, 0, errors=1.0, first=None)], [level(1, 1, first=0.01), level(2, 2, first=50.0)]],
    ids=["nothing", "one level", "only errors", "a wide range"],
)
def test_a_sweep_with_little_to_show_is_drawn_all_the_same(levels: list[Level], tmp_path: Path) -> None:
    paths = write_charts(swept(levels, slo="ttft_p99<1s,error_rate<1%"), tmp_path)
    assert len(paths) == 2
    assert texts(paths[1]).count("not measured") == (2 if not levels or levels[0].requests_per_second == 0 else 0)


def test_names_are_text_and_nothing_else(tmp_path: Path) -> None:
    assert write_charts(swept([level(1, 1)], suite=r"$\frac{1$ \x1b[31m 首都"), tmp_path)
    for path in write_charts(hostile_sweep(), tmp_path):
        drawn = path.read_text(encoding="utf-8")
        assert {element.tag.removeprefix(SVG) for element in ElementTree.fromstring(drawn).iter()} <= {
            "svg", "style", "rect", "text", "g", "line", "polyline", "circle", "title",
        }  # fmt: skip
        assert not any(sign in drawn for sign in ("\x1b", "\u202e", "<script", HOSTILE[0]))


def test_a_file_needs_no_style_sheet_and_no_variables(tmp_path: Path) -> None:
    for path in write_charts(swept(twelve_levels()), tmp_path):
        assert "var(" not in path.read_text(encoding="utf-8")
