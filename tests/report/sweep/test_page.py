"""A sweep as a page, Markdown and CSV: where to run, each level, and nothing in it that could do anything."""

from __future__ import annotations

import base64
import csv
import hashlib
import io
import itertools
import json
import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from steelyard.errors import ConfigurationError
from steelyard.journal.manifest import PLOTS
from steelyard.load.levels import Level
from steelyard.report.chart import Chart, draw, place_labels
from steelyard.report.html import environment
from steelyard.report.sweep.page import checked_sweep, error_rate_chart, latency_chart, sweep_page, write_charts
from steelyard.report.sweep.table import sweep_csv, sweep_markdown
from tests.support.cli import run_cli
from tests.support.journal import CountedModel, cases, run_in
from tests.support.report import HOSTILE, Elements
from tests.support.sweep import hostile_sweep, level, mixed_sweep, swept


def test_the_page_says_where_to_run_and_why() -> None:
    text = Elements(sweep_page(mixed_sweep(), "runs/x")).text
    assert "Run at 16 calls in flight" in text
    assert "At 32 the error rate is 20% (limit 1%)." in text
    assert "runs/x" in text


def test_a_sweep_without_a_level_to_run_at_says_so() -> None:
    text = Elements(sweep_page(swept([level(1, 10, errors=0.5)]), "x")).text
    assert "No level can be recommended" in text
    assert "At 1 the error rate is 50%" in text
    assert "Run at" not in text


def test_an_interrupted_sweep_without_levels_is_a_page_too() -> None:
    text = Elements(sweep_page(swept([], stopped="SIGINT"), "x")).text
    assert "not complete" in text
    assert "Not complete (SIGINT)" in text
    assert "**Not complete.** SIGINT" in sweep_markdown(swept([], stopped="SIGINT"), "x")


def test_each_level_is_a_row_with_its_marks() -> None:
    page = sweep_page(mixed_sweep(), "x")
    rows = [Elements(row).text for row in re.findall(r"<tr[^>]*><td.*?</tr>", page, re.S)]
    assert len(rows) == 6
    for row, words in zip(
        rows,
        ([], [], ["recommended"], ["objective broken"], ["not reached"], ["client was the bottleneck"]),
        strict=True,
    ):
        marks = ("recommended", "objective broken", "not reached", "client was the bottleneck")
        assert [mark for mark in marks if mark in row] == words
    assert "At most 24 were in flight" not in page  # in the middle of a sentence
    assert "at most 24 were in flight at once" in page
    assert "busy 97% of the time" in page


def svg(chart: Chart) -> str:
    """The chart as the page has it."""
    return str(environment("steelyard.report").get_template("chart.svg").module.chart_svg(draw(chart)))  # type: ignore[attr-defined]


def test_the_chart_has_a_point_a_level_hollow_where_it_says_little() -> None:
    drawn = Elements(svg(error_rate_chart(mixed_sweep()))).tags
    kinds = [attrs.get("class") for tag, attrs in drawn if tag == "circle"]
    assert kinds.count("level") == 4
    assert kinds.count("level weak") == 2
    assert kinds.count("ring") == 1
    assert [attrs.get("class") for tag, attrs in drawn if tag == "line"].count("limit") == 1


def test_more_errors_are_drawn_higher_and_more_throughput_further_right() -> None:
    levels = [level(1, 10, errors=0.0), level(2, 30, errors=0.1), level(3, 20, errors=0.4)]
    drawn = [attrs for tag, attrs in Elements(svg(error_rate_chart(swept(levels)))).tags if tag == "circle"]
    xs, ys = ([float(str(one[name])) for one in drawn if one["class"] == "level"] for name in ("cx", "cy"))
    assert xs[0] < xs[2] < xs[1]
    assert ys[0] > ys[1] > ys[2]


@pytest.mark.parametrize(("limit", "drawn"), [("0.3s", True), ("5s", False)])
def test_a_limit_far_above_what_was_measured_is_left_out(limit: str, drawn: bool) -> None:
    sweep = swept([level(1, 10, first=0.1), level(2, 20, first=0.1)], slo=f"ttft_p99<{limit}")
    chart = svg(latency_chart(sweep, "time_to_first_token"))
    assert ('class="limit"' in chart) == drawn
    assert ("limit of p99" in sweep_page(sweep, "x")) == drawn


def test_an_objective_of_no_errors_at_all_is_drawn() -> None:
    slo = "error_rate<=0%"
    chart = svg(error_rate_chart(swept([level(1, 10, slo=slo), level(2, 20, slo=slo)], slo=slo)))
    drawn = Elements(chart).tags
    assert [attrs.get("class") for tag, attrs in drawn if tag == "line"].count("limit") == 1
    assert [attrs.get("class") for tag, attrs in drawn if tag == "circle"].count("level") == 2


def test_a_time_that_was_not_measured_has_no_chart() -> None:
    sweep = swept([level(1, 0, errors=1.0, first=None, pass_rate=None)])
    assert latency_chart(sweep, "time_to_first_token").series == []
    assert "<h2>Time to first token</h2>" not in sweep_page(sweep, "x")


NUMBERS = st.floats(0, 1e6, allow_nan=False)


@settings(deadline=None)
@given(st.lists(st.tuples(NUMBERS, st.floats(0, 1), st.floats(1e-6, 1e4)), min_size=1, max_size=12))
def test_whatever_was_measured_is_drawn_within_the_frame(figures: list[tuple[float, float, float]]) -> None:
    levels = [level(2**n, rate, errors=error, first=first) for n, (rate, error, first) in enumerate(figures)]
    sweep = swept(levels)
    for chart in (error_rate_chart(sweep), latency_chart(sweep, "time_to_last_token")):
        for tag, attrs in Elements(svg(chart)).tags:
            if tag == "circle":
                assert 0 <= float(str(attrs["cx"])) <= 500
                assert 0 <= float(str(attrs["cy"])) <= 270


@settings(deadline=None)
@given(st.lists(st.tuples(st.floats(10, 290), st.floats(10, 190)), max_size=25))
def test_labels_cover_neither_each_other_nor_a_point(points: list[tuple[float, float]]) -> None:
    size, frame = (20.0, 12.0), (0.0, 0.0, 300.0, 200.0)
    places = [place for place in place_labels(points, [size] * len(points), [5.0] * len(points), frame) if place]
    for (x, y), (other_x, other_y) in itertools.combinations(places, 2):
        assert abs(x - other_x) >= 19.99 or abs(y - other_y) >= 11.99
    for (x, y), (point_x, point_y) in itertools.product(places, points):
        assert abs(x - point_x) >= 14.99 or abs(y - point_y) >= 10.99


def test_nothing_in_a_sweep_becomes_markup() -> None:
    page = sweep_page(hostile_sweep(), HOSTILE[0])
    tags = Elements(page).tags
    names = [tag for tag, _ in tags]
    assert names.count("script") == 1
    assert {"img", "a"}.isdisjoint(names[names.index("main") :])
    assert not [name for _, attrs in tags for name in attrs if name.startswith("on")]
    assert [attrs["href"] for tag, attrs in tags if "href" in attrs and tag != "link"] == ["#main"]
    assert [attrs["rel"] for tag, attrs in tags if tag == "link"] == ["icon"]
    assert not any(sign in page for sign in ("\x1b", "\u202e", "\u2028", "\x00"))


def test_the_page_allows_exactly_its_own_script_and_style() -> None:
    page = sweep_page(hostile_sweep(), "x")
    for tag, rule in (("script", "script-src"), ("style", "style-src")):
        (text,) = re.findall(rf"<{tag}>(.*?)</{tag}>", page, re.S)
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert f"{rule} 'sha256-{digest}'" in page
    assert "default-src 'none'" in page
    assert " style=" not in page


def test_markdown_has_the_advice_a_row_a_level_and_the_notes() -> None:
    text = sweep_markdown(mixed_sweep(), "runs/x")
    assert text.startswith("## <code>capitals</code> on <code>gpt-4&#46;1</code>: run at 16\n")
    rows = [line for line in text.splitlines() if line.startswith("|")]
    assert len(rows) == 2 + 6
    assert {row.count("|") for row in rows} == {13}
    assert rows[4].startswith("| **16** | **144** | **±5%** |")
    assert "- **64**: not valid&#58; this client was the bottleneck" in text


def test_markdown_takes_nothing_for_markup() -> None:
    text = sweep_markdown(hostile_sweep(), "x")
    for sign in ("<script", "<img", "<!--", "](", "`tick`", "@everyone", "\x1b", "\u202e"):
        assert sign not in text


def test_csv_has_a_row_a_level_and_runs_nothing() -> None:
    rows = list(csv.DictReader(io.StringIO("".join(sweep_csv([("runs/x", mixed_sweep())])))))
    assert [row["level"] for row in rows] == ["1", "4", "16", "32", "48", "64"]
    assert [row["recommended"] for row in rows] == ["false", "false", "true", "false", "false", "false"]
    assert (rows[3]["error_rate"], rows[4]["reached"], rows[5]["invalid"][:14]) == ("0.2", "false", "its event loop")
    assert rows[0]["time_to_first_token-p99"] == "0.2"
    for row in csv.reader(io.StringIO("".join(sweep_csv([("=x", hostile_sweep())])))):
        assert not [cell for cell in row if cell.startswith(("=", "+", "@", "\t", "\r"))]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a sweep, and a run beside it."""
    (tmp_path / "swept").mkdir()
    (tmp_path / "swept" / "sweep.json").write_text(json.dumps(mixed_sweep()), encoding="utf-8")
    run_in(tmp_path / "run", CountedModel(), cases(3))
    return tmp_path


def test_a_sweep_is_reported_in_every_format_but_junit(folder: Path) -> None:
    ended = run_cli(folder, "report", "swept", "-f", "html")
    assert (ended.code, ended.out.strip()) == (0, str(Path("swept/report.html")))
    assert "Run at 16 calls" in (folder / "swept/report.html").read_text(encoding="utf-8")
    assert run_cli(folder, "report", "swept", "-f", "md").out == sweep_markdown(mixed_sweep(), "swept")
    assert run_cli(folder, "report", "swept", "-f", "csv").out == "".join(sweep_csv([("swept", mixed_sweep())]))
    refused = run_cli(folder, "report", "swept", "-f", "junit")
    assert (refused.code, refused.out) == (2, "")
    assert "swept is a sweep, which has no tests" in refused.err


def test_a_sweep_is_reported_as_far_as_it_has_come(folder: Path) -> None:
    (folder / "swept/sweep.json").unlink()
    so_far = swept([level(1, 10)], stopped="not finished")
    (folder / "swept/sweep.partial.json").write_text(json.dumps(so_far), encoding="utf-8")
    assert run_cli(folder, "report", "swept", "-f", "html").code == 0
    assert "Not complete (not finished)" in (folder / "swept/report.html").read_text(encoding="utf-8")


def test_sweeps_and_runs_are_reported_together_where_that_makes_sense(folder: Path) -> None:
    (folder / "pages").mkdir()
    ended = run_cli(folder, "report", "run", "swept", "-f", "html", "-o", "pages")
    assert ended.code == 0
    assert sorted(path.name for path in (folder / "pages").iterdir()) == ["run.html", "swept.html"]
    refused = run_cli(folder, "report", "run", "swept", "-f", "csv", "-o", "all.csv")
    assert refused.code == 2
    assert "leave out swept" in refused.err
    assert not (folder / "all.csv").exists()


def test_a_sweep_that_cannot_be_understood_is_named(folder: Path) -> None:
    (folder / "swept/sweep.json").write_text(json.dumps({**mixed_sweep(), "levels": [{"level": "many"}]}))
    for form in ("text", "html", "md", "csv", "json"):
        refused = run_cli(folder, "report", "swept", "-f", form)
        assert refused.code == 2
        assert "the sweep in swept cannot be understood" in refused.err


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("levels.0.level", 0),
        ("levels.0.level", -4),
        ("levels.0.level", 10**30),
        ("levels.0.requests_per_second", -1.0),
        ("levels.0.requests_per_second", 1.79e308),
        ("levels.0.error_rate", 1.5),
        ("levels.0.time_to_first_token", {"p50": 0.1, "p90": None, "p99": 0.2}),
        ("levels.0.time_to_last_token.p99", -0.1),
        ("levels.0.error_kinds", ["429"]),
        ("levels.0.error_kinds", {"429": "many"}),
        ("levels.0.error_kinds", None),
        ("recommendation.level", 0),
        ("objectives.1.limit", 1e308),
        ("asked.duration", "long"),
    ],
)
def test_figures_that_no_sweep_has_are_refused_and_not_drawn(folder: Path, path: str, value: object) -> None:
    sweep = mixed_sweep()
    *above, name = [int(part) if part.isdigit() else part for part in path.split(".")]
    place: Any = sweep
    for part in above:
        place = place[part]
    place[name] = value
    (folder / "swept/sweep.json").write_text(json.dumps(sweep), encoding="utf-8")
    with pytest.raises(ConfigurationError, match="cannot be understood"):
        checked_sweep(folder / "swept")


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
