"""The page of several runs in a real browser, opened as a file: quiet, and usable with keys and pointer."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from steelyard.records import Record
from steelyard.report.matrix.page import matrix_page
from steelyard.report.matrix.table import VariantRuns, variants_of
from tests.support.axe import violations
from tests.support.browser import Seen, opened
from tests.support.compare import outcome
from tests.support.matrix import matrix_of
from tests.support.report import HOSTILE, hostile_run, worked_run

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

READY = "html[data-ready=cases]"
MANY = 3_000
GRADES = {"p": "right", "f": "wrong"}
TOPICS = ("sums", "capitals", "verse")


def answers(folder: Path) -> VariantRuns:
    """Three variants with two trials a case: alike on some cases, not on others."""

    def record(name: str, case: int, trial: int, letter: str) -> Record:
        return outcome(
            letter,
            case,
            trial=trial,
            id=f"case-{case}",
            input_prompt=f"Question {case}?",
            expected=f"The right answer to {case}",
            metadata={"topic": TOPICS[case % 3], "hard": case % 2 == 0},
            response_text=None
            if letter == "e"
            else f"The {'right' if letter == 'p' else 'wrong'} answer of {name} to {case}",
            num_tokens_output=7,
            cost=0.01,
        )

    letters = {"small": ["pp", "ff", "pf", "ee", "pp", "ff"], "large": ["pp", "pp", "pp", "pp", "pp", "ff"]}
    letters["odd <b>"] = ["pp", "fp", "pp", "pp", "pp"]
    return matrix_of(
        folder,
        {
            name: [record(name, case, n, one) for case, word in enumerate(words) for n, one in enumerate(word)]
            for name, words in letters.items()
        },
    )


def many(folder: Path) -> VariantRuns:
    records = {
        name: [
            outcome("pf"[number % step == 0], number, response_text=f"{name} says {number}") for number in range(MANY)
        ]
        for name, step in (("a", 10), ("b", 7), ("c", 4))
    }
    return matrix_of(folder, records)


@pytest.fixture(scope="module")
def pages(chromium: Browser, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The address of a page of each kind. Needs the browser, so that nothing is made where there is none."""
    folder = tmp_path_factory.mktemp("matrix")
    hostile = [hostile_run(folder / name) for name in ("<img src=x onerror='window.ran=9'>", "b", "c")]
    agents = [worked_run(folder / "agents" / name, text) for name, text in (("a", "plain"), ("b", " ".join(HOSTILE)))]
    shown = {"answers": answers(folder / "m"), "many": many(folder / "n")}
    shown |= {"hostile": variants_of(hostile), "agents": variants_of(agents)}
    for name, variants in shown.items():
        (folder / f"{name}.html").write_text("".join(matrix_page(variants)), encoding="utf-8")
    return {name: (folder / f"{name}.html").as_uri() for name in shown}


@pytest.fixture
def seen(chromium: Browser, pages: dict[str, str], request: pytest.FixtureRequest) -> Iterator[Seen]:
    """The page that the test names, open at its cases, and quiet to its end."""
    address = pages[request.param]
    with opened(chromium, address, ready=READY) as shown:
        shown.page.click("#tab-cases")
        yield shown
        assert shown.said == []
        assert {asked.split("#")[0] for asked in shown.asked_for} == {address}


def of(name: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("seen", [name], indirect=True)


def ids(shown: Page) -> list[str]:
    return [row.get_attribute("data-id") or "" for row in shown.locator(".row").all()]


def title(shown: Page) -> str:
    return shown.locator("#drawer > header h2").inner_text()


def opened_case(shown: Page, row: int) -> None:
    """Wait until the case of that row is shown."""
    shown.locator(f"#drawer[data-record='{row}']").wait_for()


@of("answers")
def test_the_first_view_has_the_verdict_the_leaderboard_and_the_charts(seen: Seen) -> None:
    seen.page.click("#tab-overview")
    text = seen.page.locator("#overview-view").inner_text()
    assert "passed most" in text
    assert "odd <b>" in text
    assert seen.page.locator("table.board tbody tr").count() == 3
    assert seen.page.locator("#overview-view svg.chart").count() >= 1


@of("answers")
def test_the_cases_where_the_variants_differ_and_those_that_failed_in_any(seen: Seen) -> None:
    page = seen.page
    assert len(ids(page)) == 6
    page.keyboard.press("d")
    assert ids(page) == ["case-1", "case-2", "case-3"]
    page.keyboard.press("f")
    assert ids(page) == ["case-1", "case-2", "case-5"]
    page.keyboard.press("e")
    assert ids(page) == ["case-3"]
    page.keyboard.press("a")
    page.click("[data-chip=never]")
    assert ids(page) == ["case-5"]
    assert page.locator("#found").inner_text() == "1 of 6 cases"
    page.keyboard.press("Escape")
    assert len(ids(page)) == 6


@of("answers")
def test_metadata_outcomes_by_variant_and_words_narrow_the_cases(seen: Seen) -> None:
    page = seen.page
    page.get_by_label("topic").select_option("capitals")
    assert ids(page) == ["case-1", "case-4"]
    page.get_by_label("hard").select_option("true")
    assert ids(page) == ["case-4"]
    assert page.locator("#search").input_value() == "topic=capitals hard=true"
    page.locator("#grid").focus()
    page.keyboard.press("Escape")
    page.click("text=By variant")
    page.get_by_label("small", exact=True).select_option(label="failed")
    page.get_by_label("large", exact=True).select_option(label="passed")
    assert ids(page) == ["case-1", "case-2"]
    page.get_by_label("odd <b>", exact=True).select_option(label="passed")
    assert ids(page) == ["case-2"]
    page.locator("#grid").focus()
    page.keyboard.press("Escape")
    page.keyboard.press("/")
    page.keyboard.type("wrong SMALL")
    assert ids(page) == ["case-1", "case-2", "case-5"]
    assert page.locator("#search").input_value() == "wrong SMALL"


@of("answers")
def test_a_cell_has_the_verdict_the_trials_and_the_answer(seen: Seen) -> None:
    cells = seen.page.locator(".row[data-id=case-2] .variant-cell")
    assert "The wrong answer of small to 2" in cells.nth(0).inner_text()
    assert cells.nth(0).locator(".sign-mark.failed").count() == 1
    assert cells.nth(0).locator(".trials i").count() == 2
    assert cells.nth(1).locator(".sign-mark.passed").count() == 1
    assert "no record" in seen.page.locator(".row[data-id=case-5]").inner_text()


@of("answers")
def test_a_case_shows_all_answers_next_to_each_other_with_what_was_expected(seen: Seen) -> None:
    page = seen.page
    page.locator(".row[data-id=case-2]").click()
    opened_case(page, 2)
    text = page.locator("#drawer").inner_text()
    for words in (
        "Question 2?",
        "The right answer to 2",
        "topic: verse",
        "answer of small to 2",
        "answer of large to 2",
    ):
        assert words in text
    assert page.locator(".variant").count() == 3
    boxes = [page.locator(".variant").nth(place).bounding_box() for place in range(3)]
    assert all(box is not None for box in boxes)
    tops = {round(box["y"]) for box in boxes if box is not None}
    assert len(tops) == 1
    assert page.url.endswith("#case=case-2")


@of("answers")
def test_arrows_go_from_case_to_case_within_what_is_filtered(seen: Seen) -> None:
    page = seen.page
    page.keyboard.press("d")
    page.locator("#grid").focus()
    page.keyboard.press("ArrowDown")
    page.keyboard.press("Enter")
    opened_case(page, 1)
    page.keyboard.press("ArrowRight")
    opened_case(page, 2)
    assert title(page) == "case-2"
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")  # the last one
    opened_case(page, 3)
    page.keyboard.press("ArrowLeft")
    opened_case(page, 2)
    page.keyboard.press("k")
    opened_case(page, 1)
    assert page.locator("#drawer > header .found").inner_text() == "1 of 3"
    page.keyboard.press("Escape")
    assert not page.locator("#drawer").is_visible()


@of("answers")
def test_the_words_in_which_two_answers_differ_are_marked_and_stay_chosen(seen: Seen) -> None:
    page = seen.page
    page.locator(".row[data-id=case-1]").click()
    opened_case(page, 1)
    choices = page.locator(".compare-words select")
    choices.nth(0).select_option(label="small")
    choices.nth(1).select_option(label="large")
    assert page.locator(".difference mark.wrong").all_inner_texts() == ["wrong", "small"]
    assert page.locator(".difference mark.expected").all_inner_texts() == ["right", "large"]
    choices.nth(1).select_option(label="expected")
    assert page.locator(".difference mark.wrong").all_inner_texts() == ["wrong", "of small"]
    page.locator("#drawer > header h2").focus()
    page.keyboard.press("ArrowRight")
    opened_case(page, 2)
    assert page.locator(".difference mark.wrong").all_inner_texts() == ["wrong", "of small"]
    choices.nth(0).focus()
    page.keyboard.press("ArrowLeft")  # a list of choices has its own use for the arrows
    assert title(page) == "case-2"
    choices.nth(0).select_option(label="small")
    page.locator("#drawer > header h2").focus()
    page.keyboard.press("ArrowRight")
    opened_case(page, 3)
    assert "no answer" in page.locator(".difference").inner_text()


@of("answers")
def test_each_trial_of_a_variant_can_be_looked_at(seen: Seen) -> None:
    page = seen.page
    page.locator(".row[data-id=case-2]").click()
    opened_case(page, 2)
    small = page.locator(".variant").nth(0)
    assert "wrong answer" in small.inner_text()
    small.get_by_label("Trial 1: passed").click()
    assert "right answer" in small.inner_text()
    assert small.get_by_label("Trial 1: passed").evaluate("(one) => one === document.activeElement")


@of("hostile")
def test_what_models_and_folders_say_is_shown_as_text(seen: Seen) -> None:
    page = seen.page
    for number in range(len(HOSTILE)):
        page.evaluate(f"openCase({number}, {number})")
        opened_case(page, number)
    page.click("#tab-overview")
    assert page.evaluate("window.ran") is None


@of("agents")
def test_what_agents_did_is_shown_by_variant(seen: Seen) -> None:
    page = seen.page
    page.locator(".row").first.click()
    opened_case(page, 0)
    for number in range(2):
        text = page.locator(".variant").nth(number).inner_text()
        for part in ("Time line", "Changes", "Artifacts", "Trajectory"):
            assert part in text
    assert page.evaluate("window.ran") is None


@of("many")
def test_only_the_rows_in_sight_are_in_the_document(seen: Seen) -> None:
    page = seen.page
    assert page.locator("#tab-count").inner_text() == "3,000"
    assert page.locator(".row").count() < 60
    page.locator("#grid").focus()
    page.keyboard.press("End")
    page.locator(f".row[data-id=c{MANY - 1}]").wait_for()
    assert page.locator(".row").count() < 60
    page.keyboard.press("Enter")
    opened_case(page, MANY - 1)
    assert f"a says {MANY - 1}" in page.locator("#drawer").inner_text()


def test_a_link_to_a_case_opens_it(chromium: Browser, pages: dict[str, str]) -> None:
    with opened(chromium, f"{pages['answers']}#case=case-4", ready=READY) as shown:
        opened_case(shown.page, 4)


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_the_page_breaks_no_rule_of_accessibility(chromium: Browser, pages: dict[str, str], theme: str) -> None:
    with opened(chromium, pages["answers"], ready=READY, color_scheme=theme) as seen:
        assert violations(seen.page) == []
        seen.page.click("#tab-cases")
        assert violations(seen.page) == []
        seen.page.locator(".row[data-id=case-3]").click()
        opened_case(seen.page, 3)
        seen.page.locator(".compare-words select").nth(0).select_option(label="small")
        assert violations(seen.page) == []


def test_a_narrow_screen_keeps_the_case_in_sight(chromium: Browser, pages: dict[str, str]) -> None:
    with opened(chromium, pages["answers"], ready=READY, viewport={"width": 400, "height": 800}) as seen:
        page = seen.page
        page.click("#tab-cases")
        left = page.evaluate(
            """() => { table.grid.scrollLeft = 400; table.paint();
            return document.querySelector(".row[data-id=case-1] .id").getBoundingClientRect().left; }"""
        )
        assert -1 <= left <= 30
        assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
