"""The page of a sweep in a real browser, from a file and as the view serves it, and how the view lists sweeps."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from steelyard.report.sweep.page import sweep_page
from tests.support.browser import Seen, opened
from tests.support.journal import CountedModel, cases, run_in
from tests.support.report import HOSTILE
from tests.support.sweep import hostile_sweep, mixed_sweep
from tests.support.view import Served, served

if TYPE_CHECKING:
    from playwright.sync_api import Browser

READY = "html[data-theme]"
PLACES = ("file", "view")
SWEEPS = {"mixed": mixed_sweep, "hostile": hostile_sweep}


@pytest.fixture(scope="module")
def folder(chromium: Browser, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sweeps with a run of one of their levels, and their pages. Needs the browser, as nothing is made without it."""
    runs = tmp_path_factory.mktemp("runs")
    for name, made in SWEEPS.items():
        run_in(runs / name / "level-16", CountedModel(), cases(4))
        (runs / name / "sweep.json").write_text(json.dumps(made()), encoding="utf-8")
        (runs / f"{name}.html").write_text(sweep_page(made(), name), encoding="utf-8")
    return runs


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Served]:
    with served(folder) as started:
        yield started


def sweep_ids(server: Served) -> dict[str, str]:
    return {sweep["name"]: sweep["id"] for sweep in server.get("/api/sweeps").json}


@pytest.fixture
def seen(chromium: Browser, folder: Path, server: Served, request: pytest.FixtureRequest) -> Iterator[Seen]:
    """The sweep that the test names, open, and quiet to its end: no console line, no request but for itself."""
    place, name = request.param
    served_at = f"{server.url}/sweep/{sweep_ids(server)[name]}"
    address = (folder / f"{name}.html").as_uri() if place == "file" else served_at
    with opened(chromium, address, ready=READY, color_scheme="light") as shown:
        yield shown
        assert shown.said == []
        assert {one.split("#")[0] for one in shown.asked_for} == {address}


def of(name: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("seen", [(place, name) for place in PLACES], indirect=True, ids=PLACES)


@of("mixed")
def test_the_advice_the_charts_and_the_levels_are_in_sight(seen: Seen) -> None:
    page = seen.page
    assert page.locator("h2.verdict").inner_text() == "Run at 16 calls in flight"
    assert page.locator("svg.chart").count() == 4
    assert page.locator("table.levels tbody tr").count() == 6
    assert "recommended" in page.locator("tr.best").inner_text()
    assert "client was the bottleneck" in page.locator("table.levels tbody tr").last.inner_text()
    for chart in page.locator("svg.chart").all():
        box = chart.bounding_box()
        assert box is not None
        assert box["width"] > 300


@of("mixed")
def test_labels_in_a_chart_do_not_cover_each_other(seen: Seen) -> None:
    seen.page.locator("svg.chart").first.wait_for()
    covered = """() => [...document.querySelectorAll("svg.chart")].some((chart) => {
        const boxes = [...chart.querySelectorAll("text")].map((text) => text.getBoundingClientRect());
        const apart = (one, other) => one.left >= other.right || other.left >= one.right
            || one.top + 2 >= other.bottom || other.top + 2 >= one.bottom;
        return boxes.some((one, index) => boxes.slice(index + 1).some((other) => !apart(one, other)));
    })"""
    assert seen.page.evaluate(covered) is False


@of("mixed")
def test_the_theme_switches_by_key_and_by_button(seen: Seen) -> None:
    page = seen.page
    ink = "getComputedStyle(document.querySelector('.chart text')).fill"
    light = page.evaluate(ink)
    page.keyboard.press("t")
    assert page.locator("html").get_attribute("data-theme") == "dark"
    assert page.evaluate(ink) != light
    page.click("#theme")
    assert page.locator("html").get_attribute("data-theme") == "light"


@of("hostile")
def test_nothing_that_a_sweep_says_runs_or_becomes_markup(seen: Seen) -> None:
    page = seen.page
    assert page.evaluate("window.ran") is None
    made = "document.querySelectorAll('main script, main img, main iframe, [onmouseover], [onerror]').length"
    assert page.evaluate(made) == 0
    assert page.locator("main a").count() == 0
    text = page.locator("main").inner_text()
    assert HOSTILE[0] in text
    assert not any(sign in text for sign in ("\x1b", "\u202e", "\u2066"))


def test_a_narrow_window_does_not_scroll_sideways(chromium: Browser, folder: Path) -> None:
    for name in SWEEPS:
        size = {"width": 400, "height": 800}
        with opened(chromium, (folder / f"{name}.html").as_uri(), ready=READY, viewport=size) as shown:
            assert not shown.page.evaluate("document.documentElement.scrollWidth > window.innerWidth")


def test_the_list_leads_to_a_sweep_and_the_sweep_to_its_levels(chromium: Browser, server: Served) -> None:
    with opened(chromium, server.url, ready="html[data-ready=runs]") as seen:
        page = seen.page
        assert page.locator("#sweeps tbody tr").count() == 2
        assert "recommended: 16" in page.locator("#sweeps tr", has_text="mixed").inner_text()
        page.locator("#sweeps a", has_text="mixed").press("Enter")
        page.wait_for_selector(".sweep .verdict")
        assert page.locator("main a").all_inner_texts() == ["16"]
        page.locator("main a").press("Enter")
        page.wait_for_selector("html[data-ready=report]")
        assert "mixed/level-16" in page.title()
        assert seen.said == []


def test_a_list_without_sweeps_does_not_speak_of_them(chromium: Browser, tmp_path: Path) -> None:
    run_in(tmp_path / "one", CountedModel(), cases(2))
    with served(tmp_path) as server, opened(chromium, server.url, ready="html[data-ready=runs]") as seen:
        assert not seen.page.locator("#sweeps").is_visible()


def test_a_sweep_made_meanwhile_appears(chromium: Browser, folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder / "mixed", tmp_path / "mixed")
    kept = (tmp_path / "mixed" / "sweep.json").rename(tmp_path / "kept.json")
    with served(tmp_path) as server, opened(chromium, server.url, ready="html[data-ready=runs]") as seen:
        assert not seen.page.locator("#sweeps").is_visible()
        shutil.copy(kept, tmp_path / "mixed" / "sweep.json")
        seen.page.locator("#sweeps a", has_text="mixed").wait_for()
