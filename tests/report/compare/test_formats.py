"""A comparison as text, Markdown and a page: nothing from a case, a model or a path is taken for markup."""

from __future__ import annotations

import html.parser
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from steelyard.records import Score
from steelyard.report.compare.compare import compare_runs as compare
from steelyard.report.compare.comparison import Comparison
from steelyard.report.compare.formats import compare_markdown, compare_page, compare_text
from tests.support.browser import Seen, keeps_theme, opened
from tests.support.cli import run_cli
from tests.support.compare import journal, outcome
from tests.support.journal import write_journal
from tests.support.report import HOSTILE
from tests.support.view import Served, served

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

HOSTILE_ID = (
    "<script>alert(1)</script>",
    "</script><img src=x onerror=alert(1)>",
    "<!-- --> ]]> {{x}} @@MAIN@@ @@SCRIPT@@",
    "a|b`c*d_e[f](javascript:alert(1)) @everyone #1",
    "\x1b[31mred\x1b[0m\x07\r\n| new | row |",
    "\u202egnp.exe \u200b \ud7ff \u2028 next",
)


@pytest.fixture
def hostile(tmp_path: Path) -> Comparison:
    """Ids, answers and score names of two runs that try to be something else."""
    for run, passed in (("a", True), ("b", False)):
        records = [
            outcome(
                "u", i, id=text, response_text=text, scores=[Score("exact", float(passed), passed), Score(text, 0.5)]
            )
            for i, text in enumerate(HOSTILE_ID)
        ]
        only = outcome("p", 90, id=f"{HOSTILE_ID[0]} only in {run}")
        write_journal(tmp_path / run, [*records, only])
    return compare([tmp_path / "a", tmp_path / "b"])


class Elements(html.parser.HTMLParser):
    """Which elements and attributes a page has."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes |= {name for name, _ in attrs}


def test_the_page_has_no_element_but_its_own(hostile: Comparison) -> None:
    page = compare_page(hostile)
    seen = Elements()
    seen.feed(page)
    assert seen.tags.count("script") == 1
    assert "img" not in seen.tags
    assert not [name for name in seen.attributes if name.startswith("on")]
    assert page.count("default-src 'none'") == 1
    assert "http://" not in page
    assert "https://" not in page
    assert "\x1b" not in page
    assert "\u202e" not in page


def test_the_page_allows_exactly_its_own_script_and_style(hostile: Comparison) -> None:
    import base64
    import hashlib

    page = compare_page(hostile)
    for tag, rule in (("script", "script-src"), ("style", "style-src")):
        text = re.search(rf"<{tag}>(.*?)</{tag}>", page, re.S)
        assert text is not None
        digest = base64.b64encode(hashlib.sha256(text[1].encode()).digest()).decode()
        assert f"{rule} &#x27;sha256-{digest}&#x27;" in page or f"{rule} 'sha256-{digest}'" in page


def test_markdown_takes_nothing_for_markup(hostile: Comparison) -> None:
    text = compare_markdown(hostile)
    for sign in ("<script", "<img", "<!--", "](", "`", "@everyone", "\x1b", "\u202e"):
        assert sign not in text
    rows = [line for line in text.splitlines() if line.startswith("|")]
    widths = {line.count(" | ") for line in rows if not line.startswith("|---")}
    assert widths == {5, 3}  # figures have six columns, changed cases four


def test_text_cannot_steer_a_terminal(hostile: Comparison) -> None:
    text = compare_text(hostile)
    for sign in ("\x1b", "\x07", "\r", "\u202e", "\u2028"):
        assert sign not in text


def test_text_tells_the_verdict_the_figures_and_the_cases(tmp_path: Path) -> None:
    journal(tmp_path / "a", "p" * 30)
    journal(tmp_path / "b", "f" * 25 + "p" * 5)
    ended = run_cli(tmp_path, "compare", "a", "b")
    assert ended.code == 0
    lines = ended.out.splitlines()
    verdict = "b is worse: passed −83.3 points, 95 % CI −94.4 – −57.8, p < 0.001; worse on 25 cases, better on 0"
    assert verdict in ended.out.replace("\n", " ")
    (passed,) = [line.split() for line in lines if line.startswith("  passed")]
    assert passed[:5] == ["passed", "100.0%", "16.7%", "−83.3", "points"]
    assert passed[-1] == "worse"
    assert "  c0  hello → hello" in lines
    assert "  and 5 more (--all lists them)" in lines
    assert "more" not in run_cli(tmp_path, "compare", "a", "b", "--all").out


def test_the_columns_of_the_text_stand_below_one_another(tmp_path: Path) -> None:
    """Even where one is as wide as −100.0 points."""
    journal(tmp_path / "a", "p" * 30)
    journal(tmp_path / "b", "f" * 30)
    lines = run_cli(tmp_path, "compare", "a", "b").out.splitlines()
    (head,) = [line for line in lines if "30 paired cases" in line]
    ends = {line.rindex(" points") + 7 for line in lines if " points " in line}
    assert ends == {head.index("change") + 6}


def test_runs_that_are_named_by_their_time_are_told_apart_in_the_head(tmp_path: Path) -> None:
    journal(tmp_path / "capitals-20261116-031756", "pf")
    journal(tmp_path / "capitals-20261116-031807", "fp")
    lines = run_cli(tmp_path, "compare", "capitals-20261116-031756", "capitals-20261116-031807").out.splitlines()
    (head,) = [line for line in lines if "2 paired cases" in line]
    assert head.split()[3:5] == ["…-031756", "…-031807"]


def test_no_line_of_the_text_is_wider_than_80_columns_and_no_figure_is_left_out(tmp_path: Path) -> None:
    name = "a score with a rather long name that says what it is"
    for run, passed in (("a-run-with-a-long-name", True), ("another-run-with-a-long-name", False)):
        records = [
            outcome("u", i, scores=[Score("exact", float(passed), passed), Score(name, 0.25 + passed / 2)])
            for i in range(30)
        ]
        write_journal(tmp_path / run, [*records, outcome("e", 99)])
    lines = run_cli(tmp_path, "compare", "a-run-with-a-long-name", "another-run-with-a-long-name").out.splitlines()
    assert max(map(len, lines)) <= 80
    place = lines.index(f"  score {name}")
    assert lines[place + 1].split()[:3] == ["0.750", "0.250", "−0.500"]
    assert lines[place + 1].split()[-1] == "worse"
    (passed_row,) = [line.split() for line in lines if "100.0%" in line]
    assert passed_row[-5] == "points"


def test_trials_are_shown_as_how_many_passed(tmp_path: Path) -> None:
    write_journal(tmp_path / "a", [outcome("f", 0, trial=k) for k in range(3)])
    write_journal(tmp_path / "b", [outcome("ppf"[k], 0, trial=k) for k in range(3)])
    comparison = compare([tmp_path / "a", tmp_path / "b"])
    for text in (compare_text(comparison), compare_markdown(comparison), compare_page(comparison)):
        assert "0 of 3 → 2 of 3" in text


@pytest.mark.parametrize("form", ["text", "md", "html"])
def test_each_format_goes_to_a_file_on_request(tmp_path: Path, form: str) -> None:
    journal(tmp_path / "a", "pf")
    journal(tmp_path / "b", "pp")
    shown = run_cli(tmp_path, "compare", "a", "b", "-f", form)
    ended = run_cli(tmp_path, "compare", "a", "b", "-f", form, "-o", "c.out")
    assert (ended.code, ended.out) == (0, "")
    assert (tmp_path / "c.out").read_text(encoding="utf-8").strip() == shown.out.strip()
    refused = run_cli(tmp_path, "compare", "a", "b", "-o", "nowhere/c.out")
    assert refused.code == 2
    assert "cannot write nowhere/c.out" in refused.err


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
