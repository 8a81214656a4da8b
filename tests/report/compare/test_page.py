"""A comparison in a real browser, from a file and as the view serves it: quiet, inert, usable with keys."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from steelyard.records import Score
from steelyard.report.compare.compare import compare_runs as compare
from steelyard.report.compare.page import compare_page
from tests.support.browser import Seen, keeps_theme, opened
from tests.support.compare import journal, outcome
from tests.support.journal import write_journal
from tests.support.report import HOSTILE
from tests.support.view import Served, served

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

READY = "html[data-theme]"
PLACES = ("file", "view")


@pytest.fixture(scope="module")
def folder(chromium: Browser, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two pairs of runs, and the page of each. Needs the browser, so that nothing is made where there is none."""
    runs = tmp_path_factory.mktemp("runs")
    journal(runs / "flips-a", "p" * 20 + "f" * 30 + "e")
    journal(runs / "flips-b", "f" * 3 + "p" * 47 + "p")
    for name, passed in (("hostile-a", True), ("hostile-b", False)):
        scores = [[Score("exact", float(passed), passed), Score(text, 0.5, passed, text)] for text in HOSTILE]
        records = [
            outcome("u", number, id=f"{number} {text}", response_text=text, input_prompt=text, scores=scores[number])
            for number, text in enumerate(HOSTILE)
        ]
        write_journal(runs / name, [*records, outcome("p", 90, id=f"{HOSTILE[0]} only in {name}")])
    for kind in ("flips", "hostile"):
        text = compare_page(compare([runs / f"{kind}-a", runs / f"{kind}-b"]))
        (runs / f"{kind}.html").write_text(text, encoding="utf-8")
    return runs


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Served]:
    with served(folder) as started:
        yield started


@pytest.fixture
def seen(chromium: Browser, folder: Path, server: Served, request: pytest.FixtureRequest) -> Iterator[Seen]:
    """The comparison that the test names, open, and quiet to its end: no console line, no request but for itself."""
    place, kind = request.param
    ids = server.ids()
    served_at = f"{server.url}/compare?run={ids[f'{kind}-a']}&run={ids[f'{kind}-b']}"
    address = (folder / f"{kind}.html").as_uri() if place == "file" else served_at
    with opened(chromium, address, ready=READY, color_scheme="light") as shown:
        yield shown
        assert shown.said == []
        assert {one.split("#")[0] for one in shown.asked_for} == {address}


def of(kind: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("seen", [(place, kind) for place in PLACES], indirect=True, ids=PLACES)


def theme(page: Page) -> str | None:
    return page.locator("html").get_attribute("data-theme")


@of("flips")
def test_the_verdict_the_figures_and_the_flipped_cases_are_shown(seen: Seen) -> None:
    page = seen.page
    verdict = page.locator("h2.verdict").inner_text()
    assert verdict.startswith("1 of 51 fail no longer; errors −2.0 points")
    assert "flips-b is better: passed +54.0 points" in verdict
    assert "better on 30 cases, worse on 3" in verdict
    assert page.locator(".section-head .pill").inner_text() == "better"
    assert "51 paired cases" in page.locator("main").inner_text()
    assert page.locator("svg.whisker.good").count() >= 1
    better, worse = (
        page.locator("details", has=page.locator("summary", has_text=word)) for word in ("better", "worse")
    )
    assert better.locator("td.case").all_inner_texts() == [f"c{number}" for number in range(20, 40)]
    assert "and 10 more" in better.inner_text()
    assert worse.locator("td.case").all_inner_texts() == ["c0", "c1", "c2"]
    assert "passed → failed" in worse.locator("tbody tr").first.inner_text()


@of("flips")
def test_keys_fold_the_lists_skip_to_the_content_and_switch_the_theme(seen: Seen) -> None:
    page = seen.page
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.className") == "skip"
    page.keyboard.press("Enter")
    assert page.url.endswith("#main")
    summary = page.locator("summary", has_text="worse on 3")
    summary.focus()
    page.keyboard.press("Enter")
    assert not page.get_by_text("c0", exact=True).is_visible()
    page.keyboard.press("Enter")
    assert page.get_by_text("c0", exact=True).is_visible()
    page.keyboard.press("t")
    assert theme(page) == "dark"
    page.keyboard.press("Control+t")
    assert theme(page) == "dark"


@of("flips")
def test_the_theme_is_the_systems_until_the_reader_chooses_and_then_stays(seen: Seen) -> None:
    page = seen.page
    shade = "getComputedStyle(document.documentElement).backgroundColor"
    assert theme(page) == "light"
    page.emulate_media(color_scheme="dark")
    page.locator("html[data-theme=dark]").wait_for(state="attached")
    dark = page.evaluate(shade)
    page.click("#theme")
    assert theme(page) == "light"
    assert page.evaluate(shade) != dark
    assert keeps_theme(page, "light", READY)


@of("hostile")
def test_nothing_that_a_case_or_an_answer_says_runs_or_becomes_markup(seen: Seen) -> None:
    page = seen.page
    while (folded := page.locator("details:not([open]) > summary")).count():
        folded.first.click()
    assert page.evaluate("window.ran") is None
    made = "document.querySelectorAll('main script, main img, main a, main iframe, [onmouseover], [onerror]').length"
    assert page.evaluate(made) == 0
    text = page.locator("main").inner_text()
    assert "<script>window.ran = 1</script>" in text
    assert "⟨U+202E⟩" in text
    assert not any(sign in text for sign in ("\x1b", "\u202e", "\u2066", "\u2028"))


def test_a_narrow_window_does_not_scroll_sideways(chromium: Browser, folder: Path) -> None:
    for kind in ("flips", "hostile"):
        address = (folder / f"{kind}.html").as_uri()
        with opened(chromium, address, ready=READY, viewport={"width": 400, "height": 800}) as shown:
            assert not shown.page.evaluate("document.documentElement.scrollWidth > window.innerWidth")


def test_a_file_whose_script_was_changed_does_not_run(chromium: Browser, folder: Path, tmp_path: Path) -> None:
    changed = tmp_path / "changed.html"
    text = (folder / "flips.html").read_text(encoding="utf-8")
    changed.write_text(text.replace("</body>", "<script>window.ran = 1</script></body>"), encoding="utf-8")
    with opened(chromium, changed.as_uri(), ready=READY) as shown:
        assert shown.page.evaluate("window.ran") is None
        assert any("Content Security Policy" in line for line in shown.said)


def test_without_scripts_the_whole_comparison_is_there(chromium: Browser, folder: Path) -> None:
    with opened(chromium, (folder / "flips.html").as_uri(), java_script_enabled=False) as shown:
        assert "worse on 3" in shown.page.locator("main").inner_text()


def test_the_views_comparison_leads_back_to_the_list(chromium: Browser, server: Served) -> None:
    ids = server.ids()
    address = f"{server.url}/compare?run={ids['flips-a']}&run={ids['flips-b']}"
    with opened(chromium, address, ready=READY) as shown:
        shown.page.get_by_label("All runs").press("Enter")
        shown.page.wait_for_selector("html[data-ready=runs]")
