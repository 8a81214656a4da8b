"""The pages that reports write, for readers without a mouse, without sight, or with little of it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from steelyard.report.compare.compare import compare_runs
from steelyard.report.compare.formats import compare_page
from steelyard.report.html import asset
from steelyard.report.page.page import page
from steelyard.report.sweep.page import sweep_page
from tests.support.axe import violations
from tests.support.browser import opened
from tests.support.compare import journal
from tests.support.report import agent_run, worked_run
from tests.support.sweep import mixed_sweep

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

THEMES = ("light", "dark")
CASES = "html[data-ready=cases]"
DOCUMENT = "html[data-theme]"


@pytest.fixture(scope="module")
def pages(chromium: Browser, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The address of a page of each kind. Needs the browser, so that nothing is made where there is none."""
    folder = tmp_path_factory.mktemp("pages")
    journal(folder / "a", "p" * 20 + "f" * 30 + "e")
    journal(folder / "b", "f" * 3 + "p" * 47 + "p")
    texts = {
        "report": "".join(page(agent_run(folder / "agents"))),
        "work": "".join(page(worked_run(folder / "worked"))),
        "compare": compare_page(compare_runs([folder / "a", folder / "b"])),
        "sweep": sweep_page(mixed_sweep(), "runs/x"),
    }
    for name, text in texts.items():
        (folder / f"{name}.html").write_text(text, encoding="utf-8")
    return {name: (folder / f"{name}.html").as_uri() for name in texts}


@pytest.mark.parametrize("theme", THEMES)
@pytest.mark.parametrize("name", ["compare", "sweep"])
def test_a_comparison_and_a_sweep_break_no_rule(
    chromium: Browser, pages: dict[str, str], name: str, theme: str
) -> None:
    with opened(chromium, pages[name], ready=DOCUMENT, color_scheme=theme) as seen:
        assert violations(seen.page) == []


@pytest.mark.parametrize("theme", THEMES)
def test_a_case_of_an_agent_breaks_no_rule(chromium: Browser, pages: dict[str, str], theme: str) -> None:
    with opened(chromium, pages["work"], ready=CASES, color_scheme=theme) as seen:
        seen.page.click("#tab-cases")
        seen.page.locator(".row[data-id=fixer]").click()
        seen.page.locator("#drawer svg.chart").wait_for()
        for summary in seen.page.locator("#drawer summary").all():
            summary.click()
        assert violations(seen.page) == []


@pytest.mark.parametrize("theme", THEMES)
def test_a_report_breaks_no_rule_in_any_of_its_views(chromium: Browser, pages: dict[str, str], theme: str) -> None:
    with opened(chromium, pages["report"], ready=CASES, color_scheme=theme) as seen:
        shown = seen.page
        shown.locator(".chart svg").first.wait_for()
        assert violations(shown) == []
        shown.click("#tab-cases")
        assert violations(shown) == []
        shown.locator(".row[data-id=flaky]").click()
        shown.locator("#drawer .part").first.wait_for()
        assert violations(shown) == []


@pytest.fixture
def report(chromium: Browser, pages: dict[str, str]) -> Iterator[Page]:
    with opened(chromium, pages["report"], ready=CASES) as seen:
        seen.page.locator(".chart svg").first.wait_for()
        yield seen.page
        assert seen.said == []


def test_the_values_of_a_chart_are_read_with_the_arrow_keys(report: Page) -> None:
    chart = report.get_by_label(re.compile("^Time to last token: median"))
    report.locator("#theme").focus()
    for _ in range(40):  # to the chart, as a reader without a mouse gets there
        if chart.evaluate("(box) => box === document.activeElement"):
            break
        report.keyboard.press("Tab")
    first = report.locator("#tip").inner_text()
    assert re.search(r"answers?, [\d.]+%", first)
    assert report.locator("#announcement").text_content() == first
    report.keyboard.press("ArrowRight")
    assert report.locator("#tip").inner_text() != first
    report.keyboard.press("Home")
    assert report.locator("#tip").inner_text() == first
    report.keyboard.press("Tab")
    assert first not in report.locator("#tip").all_inner_texts()


def test_a_point_of_the_timeline_opens_its_case_with_enter(report: Page) -> None:
    report.get_by_label(re.compile("^When each record finished")).focus()
    report.keyboard.press("ArrowRight")
    assert "after the start" in report.locator("#announcement").inner_text()
    report.keyboard.press("Enter")
    report.locator("#drawer .part").first.wait_for()


def test_the_levels_of_a_sweeps_chart_are_read_with_the_arrow_keys(chromium: Browser, pages: dict[str, str]) -> None:
    with opened(chromium, pages["sweep"], ready=DOCUMENT) as seen:
        seen.page.get_by_label(re.compile("^Answers a second")).focus()
        texts = []
        for key in ("Home", "ArrowRight", "End"):
            seen.page.keyboard.press(key)
            texts.append(seen.page.locator("#tip").inner_text())
        assert [text.split(" ")[0] for text in texts] == ["1", "4", "64"]
        assert seen.page.locator("#announcement").text_content() == texts[-1]
        seen.page.keyboard.press("Escape")
        assert not seen.page.locator("#tip").is_visible()


def test_expected_words_are_green_and_wrong_ones_red(report: Page) -> None:
    report.click("#tab-cases")
    report.locator(".row[data-id=wrong]").click()
    report.locator("#drawer mark").first.wait_for()
    color = "(mark) => getComputedStyle(mark).backgroundColor.match(/[0-9]+/g).slice(0, 3).map(Number)"
    red, green, _ = report.locator("mark.expected").first.evaluate(color)
    assert green > red
    red, green, _ = report.locator("mark.wrong").first.evaluate(color)
    assert red > green


def _luminance(color: str) -> float:
    parts = [int(color[place : place + 2], 16) / 255 for place in (1, 3, 5)]
    red, green, blue = (part / 12.92 if part <= 0.03928 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def _contrast(one: str, other: str) -> float:
    dark, light = sorted((_luminance(one), _luminance(other)))
    return (light + 0.05) / (dark + 0.05)


@pytest.mark.parametrize("theme", THEMES)
@pytest.mark.parametrize("text", ["ink", "soft", "faint", "accent", "passed", "failed", "error"])
def test_every_colour_of_text_has_a_contrast_of_4_5_on_every_ground(text: str, theme: str) -> None:
    light, dark = re.findall(r"\{(.*?)\n\}", asset("colors.css"), re.DOTALL)
    colors = dict(re.findall(r"--([\w-]+): (#\w{6})", light if theme == "light" else dark))
    grounds = ["ground", "card", "raised", *(name for name in colors if name.endswith("-soft"))]
    assert {ground for ground in grounds if _contrast(colors[text], colors[ground]) < 4.5} == set()
