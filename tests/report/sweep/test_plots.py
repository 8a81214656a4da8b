"""The plots of a sweep: legible with many levels, the same bytes each time, and optional."""

from __future__ import annotations

import itertools
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from steelyard.journal.manifest import PLOTS
from steelyard.load.levels import Level
from steelyard.report.sweep.plots import error_rate_plot, latency_plot, write_plots
from tests.support.sweep import level, swept

matplotlib = pytest.importorskip("matplotlib")


def twelve_levels() -> list[Level]:
    """What a search for a knee at 40 may measure, the last ones not valid or not reached."""
    numbers = (1, 2, 4, 8, 16, 32, 38, 45, 64, 128, 256, 512)
    return [
        level(n, min(n, 40) * 5, errors=max(0.0, 0.5 - 20 / n), first=0.1 + n / 100, busy=n == 512, reached=n != 256)
        for n in numbers
    ]


def labels(sweep: dict[str, Any]) -> dict[str, Any]:
    """Each label of the first plot, and the box that it covers."""
    figure = error_rate_plot(sweep)
    figure.canvas.draw()
    (axes,) = figure.axes
    renderer = figure.canvas.get_renderer()  # type: ignore[attr-defined]
    texts = [text for text in axes.texts if text.get_text() and text.get_text() != sweep_name(sweep)]
    assert all(text.get_window_extent(renderer).width for text in texts)
    return {text.get_text(): text.get_window_extent(renderer) for text in texts}


def sweep_name(sweep: dict[str, Any]) -> str:
    return f"{sweep['suite']} on {sweep['model_id']}"


def test_every_plot_is_written_as_png_and_svg(tmp_path: Path) -> None:
    paths = write_plots(swept(twelve_levels()), tmp_path)
    assert [path.name for path in paths] == list(PLOTS)
    for path in paths:
        head = path.read_bytes()[:200]
        assert head.startswith(b"\x89PNG" if path.suffix == ".png" else b"<?xml")


def test_the_same_sweep_gives_the_same_bytes_without_a_date(tmp_path: Path) -> None:
    for name in ("once", "again"):
        (tmp_path / name).mkdir()
        write_plots(swept(twelve_levels()), tmp_path / name)
    for name in PLOTS:
        assert (tmp_path / "once" / name).read_bytes() == (tmp_path / "again" / name).read_bytes()
    assert b"<dc:date>" not in (tmp_path / "once" / "latency.svg").read_bytes()


def test_the_labels_of_twelve_levels_do_not_cover_each_other() -> None:
    boxes = labels(swept(twelve_levels()))
    assert set(boxes) == {"1", "2", "4", "8", "16", "32", "38", "45", "64", "128", "256", "512"}
    assert not [(a, b) for (a, one), (b, other) in itertools.combinations(boxes.items(), 2) if one.overlaps(other)]


def test_levels_at_the_very_same_place_are_all_labelled() -> None:
    boxes = labels(swept([level(n, 100) for n in (50, 100, 200, 400)]))
    assert set(boxes) == {"50", "100", "200", "400"}
    assert not any(one.overlaps(other) for one, other in itertools.combinations(boxes.values(), 2))


def test_levels_that_say_little_are_told_apart_and_the_recommended_one_is_named() -> None:
    sweep = swept(twelve_levels(), slo="ttft_p99<500ms,error_rate<2%")
    _, named = error_rate_plot(sweep).axes[0].get_legend_handles_labels()
    assert named == [
        "limit 2%",
        "level: calls in flight",
        "not reached",
        "not valid: client was the bottleneck",
        "recommended",
    ]
    _, latencies = latency_plot(sweep).axes[0].get_legend_handles_labels()
    assert latencies == [
        "p50", "p90", "p99", "hollow: not reached, or not valid", "limit for p99: 500 ms", "recommended: 38",
    ]  # fmt: skip


@pytest.mark.parametrize(
    "levels",
    [[], [level(5, 20)], [level(5, 0, errors=1.0, first=None)], [level(1, 1, first=0.01), level(2, 2, first=50.0)]],
    ids=["nothing", "one level", "only errors", "a wide range"],
)
def test_a_sweep_with_little_to_show_is_drawn_all_the_same(levels: list[Level], tmp_path: Path) -> None:
    assert len(write_plots(swept(levels, slo="ttft_p99<1s,error_rate<1%"), tmp_path)) == 4


def test_a_name_is_text_and_not_a_formula(tmp_path: Path) -> None:
    assert write_plots(swept([level(1, 1)], suite=r"$\frac{1$ \x1b[31m 首都"), tmp_path)


def test_drawing_changes_no_setting_of_matplotlib(tmp_path: Path) -> None:
    before = dict(matplotlib.rcParams)
    write_plots(swept([level(1, 1)]), tmp_path)
    assert dict(matplotlib.rcParams) == before


def test_without_matplotlib_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ValueError, match=r"plots need matplotlib: pip install 'steelyard\[plot\]'"):
        write_plots(swept([level(1, 1)]), tmp_path)


def test_matplotlib_is_imported_when_something_is_drawn_and_not_before() -> None:
    code = "import sys, steelyard.load.sweep, steelyard.report.sweep.plots; print('matplotlib' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "False\n"
