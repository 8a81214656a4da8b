"""The HTML report in a real browser, opened as a file: quiet, without a request, and usable with keys and pointer."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from steelyard import EvalCase, EvalSet, InvocationResponse, Runner, Score
from steelyard.report.page.page import page
from steelyard.stats.formatting import escape_invisible
from tests.support.browser import Seen, keeps_theme, opened
from tests.support.journal import a_record, write_journal
from tests.support.report import HOSTILE, agent_run, hostile_run, large_run, worked_run

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

READY = "html[data-ready=cases]"
COUNT = 3_000


@pytest.fixture(scope="module")
def reports(chromium: Browser, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A report of each kind of run. Needs the browser, so that nothing is made where there is none."""
    folder = tmp_path_factory.mktemp("reports")
    write_journal(folder / "empty", [])
    write_journal(folder / "cut", [a_record(id="it's long", response_text="word " * 40_000)])
    runs = [agent_run(folder / "agents"), hostile_run(folder / "hostile"), large_run(folder / "large", COUNT)]
    written = {}
    runs += [worked_run(folder / "worked"), worked_run(folder / "vicious", " ".join(HOSTILE))]
    runs.append(sliced_run(folder / "sliced"))
    for run in [*runs, folder / "empty", folder / "cut"]:
        written[run.name] = folder / f"{run.name}.html"
        written[run.name].write_text("".join(page(run)), encoding="utf-8")
    return written


def sliced_run(folder: Path) -> Path:
    """Cases of three categories, with a measurement and a label beside the verdict, and a metric of the whole run."""

    def shape(case: EvalCase, response: InvocationResponse) -> list[Score]:
        return [
            Score("steps", 3 + int(case.id) % 5, unit="steps"),
            Score("tone", label=f"<i>{case.metadata['level']}</i>"),
        ]

    cases = [
        EvalCase(
            id=str(n),
            prompt="?",
            expected="x",
            metadata={"category": ["math", "law", "two words"][n % 3], "level": n % 2},
        )
        for n in range(60)
    ]
    Runner(
        lambda case: "x" if int(case.id) % 4 else "y",
        EvalSet("sliced", cases),
        ["exact", shape],
        run_metrics=["accuracy"],
        by=("category",),
        progress="off",
        output_path=folder,
    ).run_sync()
    return folder


@pytest.fixture
def seen(chromium: Browser, reports: dict[str, Path], request: pytest.FixtureRequest) -> Iterator[Seen]:
    """The report that the test names, open, and quiet to its end: no console line, no request but for itself."""
    name = request.param
    with opened(chromium, reports[name].as_uri(), ready=READY) as shown:
        yield shown
        assert shown.said == []
        assert [address.split("#")[0] for address in shown.asked_for] == [reports[name].as_uri()]


def of(name: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("seen", [name], indirect=True)


def ids(shown: Page) -> list[str]:
    """The rows in sight, by their ids."""
    return [row.get_attribute("data-id") or "" for row in shown.locator(".row").all()]


def found(shown: Page) -> str:
    return shown.locator("#found").inner_text()


def drawer_text(shown: Page, title: str) -> str:
    """What the drawer says, once it shows the case of that id."""
    shown.locator("#drawer > header h2", has_text=re.compile(f"^{re.escape(title)}$")).wait_for()
    shown.locator("#drawer .part").first.wait_for()
    return shown.locator("#drawer").inner_text()


@pytest.mark.parametrize("seen", ["agents", "hostile", "large", "empty", "cut"], indirect=True)
def test_a_report_opens_from_a_file_without_a_word_or_a_request(seen: Seen) -> None:
    assert seen.page.locator("#overview-view h1").inner_text()
    seen.page.click("#tab-cases")
    assert seen.page.locator("#grid").is_visible()


@of("agents")
def test_the_overview_shows_the_headline_the_scores_and_the_charts(seen: Seen) -> None:
    text = seen.page.locator("#overview-view").inner_text()
    for word in (
        "Pass rate",
        "95\u00a0%\u00a0CI",
        "Errors by kind",
        "TargetError",
        "judge",
        "Trials",
        "pass^k",
        "Cost",
        "complete",
    ):
        assert word in text
    assert seen.page.locator(".chart svg").count() >= 6


@of("agents")
def test_a_case_with_several_trials_is_one_row_and_flaky_ones_are_marked(seen: Seen) -> None:
    seen.page.click("#tab-cases")
    assert ids(seen.page) == ["right", "wrong", "flaky", "errs", "rescued", "plain"]
    row = seen.page.locator(".row[data-id=flaky]")
    assert row.locator(".trials i").count() == 3
    assert "flaky" in row.inner_text()
    assert "flaky" not in seen.page.locator(".row[data-id=plain]").inner_text()


@of("agents")
def test_a_row_of_several_trials_shows_the_mean_of_their_scores(seen: Seen) -> None:
    seen.page.click("#tab-cases")
    column = seen.page.locator(".grid-head > div").all_inner_texts().index("exact")
    shown = {name: seen.page.locator(f".row[data-id={name}] > div").nth(column) for name in ("right", "wrong", "flaky")}
    assert {name: cell.inner_text() for name, cell in shown.items()} == {
        "right": "1.00",
        "wrong": "0.00",
        "flaky": "0.67",
    }


@of("agents")
def test_chips_filter_and_add_up(seen: Seen) -> None:
    seen.page.click("#tab-cases")
    seen.page.click("[data-chip=errored]")
    assert ids(seen.page) == ["errs"]
    assert found(seen.page) == "1 of 6 cases"
    seen.page.click("[data-chip=passed]")
    assert ids(seen.page) == ["right", "errs", "rescued", "plain"]
    seen.page.click("[data-chip=errored]")
    seen.page.click("[data-chip=passed]")
    assert len(ids(seen.page)) == 6


@of("agents")
def test_search_looks_at_ids_questions_answers_and_errors(seen: Seen) -> None:
    seen.page.keyboard.press("/")
    for words, expected in {
        "rescued": ["rescued"],
        "the FLAKY question": ["flaky"],
        "gave up": ["errs"],
        "something": ["wrong", "flaky", "rescued"],
        "nothing like it": [],
    }.items():
        seen.page.fill("#search", words)
        assert ids(seen.page) == expected, words
    assert "No cases match" in seen.page.locator(".empty").inner_text()
    seen.page.keyboard.press("Escape")
    assert len(ids(seen.page)) == 6


@of("large")
def test_sorting_by_a_column_orders_all_cases_and_a_third_click_restores_the_suite(seen: Seen) -> None:
    seen.page.click("#tab-cases")
    head = seen.page.locator("[data-key=last] button")
    head.click()
    assert seen.page.locator("[data-key=last]").get_attribute("aria-sort") == "descending"
    assert {int(one[5:]) % 89 for one in ids(seen.page)[:5]} == {88}
    head.click()
    assert {int(one[5:]) % 89 for one in ids(seen.page)[:5]} == {0}
    head.click()
    assert ids(seen.page)[:2] == ["case-000000", "case-000001"]


@of("large")
def test_only_rows_in_sight_are_in_the_document_and_the_end_can_be_reached(seen: Seen) -> None:
    seen.page.click("#tab-cases")
    assert seen.page.locator(".row").count() < 60
    seen.page.keyboard.press("End")
    seen.page.locator(f".row[data-id=case-{COUNT - 1:06}]").wait_for()
    assert seen.page.locator(".row").count() < 60
    assert seen.page.locator("#grid").get_attribute("aria-rowcount") == str(COUNT + 1)


@of("large")
def test_bodies_of_any_chunk_are_found(seen: Seen) -> None:
    seen.page.keyboard.press("/")
    for number in (0, 255, 256, 1_777, COUNT - 1):
        seen.page.fill("#search", f"case-{number:06}")
        seen.page.locator(".row").first.click()
        text = drawer_text(seen.page, f"case-{number:06}")
        assert f"words {number}" in text or "TimeoutError" in text


@of("agents")
def test_the_drawer_shows_the_conversation_the_tools_the_difference_and_each_score(seen: Seen) -> None:
    seen.page.click("#tab-cases")
    seen.page.click(".row[data-id=wrong]")
    text = drawer_text(seen.page, "wrong")
    for word in (
        "The wrong question?",
        "look_up",
        "found it",
        "Be brief.",
        "escalated",
        "±",
        "outputs.jsonl at byte",
    ):
        assert word in text
    assert seen.page.locator("mark.expected").all_inner_texts() == ["The", "answer is Paris"]
    assert seen.page.locator("mark.wrong").all_inner_texts() == ["Something else about"]
    assert seen.page.locator(".samples > div").count() == 3
    assert "overruled" not in text, "the judge confirmed the failure"


@of("agents")
def test_the_drawer_says_which_score_a_judge_overruled(seen: Seen) -> None:
    seen.page.click("#tab-cases")
    seen.page.click(".row[data-id=rescued]")
    assert "overruled" in drawer_text(seen.page, "rescued")


@of("agents")
def test_the_drawer_opens_the_trial_that_failed_and_switches_between_them(seen: Seen) -> None:
    seen.page.click("#tab-cases")
    seen.page.click(".row[data-id=flaky]")
    drawer_text(seen.page, "flaky")
    trials = seen.page.locator(".trial-bar button")
    assert [one.get_attribute("aria-pressed") for one in trials.all()] == ["false", "true", "false"]
    trials.nth(2).click()
    seen.page.locator("#drawer .pill.passed").wait_for()
    assert "identical" in drawer_text(seen.page, "flaky")


@of("cut")
def test_a_text_that_was_cut_says_where_the_rest_is(seen: Seen) -> None:
    seen.page.click("#tab-cases")
    seen.page.locator(".row").first.click()
    text = drawer_text(seen.page, "it's long")
    assert "The first 50,000 of 200,000 characters." in text
    assert "--case='it'\\''s long' -f json" in text


@of("agents")
def test_the_keyboard_is_enough(seen: Seen) -> None:
    shown = seen.page
    shown.keyboard.press("a")
    shown.keyboard.press("j")
    shown.keyboard.press("j")
    assert shown.locator(".row.active").get_attribute("data-id") == "wrong"
    shown.keyboard.press("Enter")
    drawer_text(shown, "wrong")
    assert shown.evaluate("document.activeElement.closest('#drawer') !== null")
    shown.keyboard.press("j")
    drawer_text(shown, "flaky")
    shown.keyboard.press("k")
    drawer_text(shown, "wrong")
    shown.keyboard.press("Escape")
    assert not shown.locator("#drawer").is_visible()
    assert shown.evaluate("document.activeElement.id") == "grid"
    shown.keyboard.press("e")
    assert ids(shown) == ["errs"]
    shown.keyboard.press("Escape")
    assert len(ids(shown)) == 6
    shown.keyboard.press("/")
    shown.keyboard.type("jk/f")
    assert shown.locator("#search").input_value() == "jk/f", "keys are letters while one types"


@of("agents")
def test_focus_can_be_seen(seen: Seen) -> None:
    seen.page.keyboard.press("Tab")
    seen.page.keyboard.press("Tab")
    assert seen.page.evaluate("getComputedStyle(document.activeElement).outlineStyle") != "none"


@of("agents")
def test_the_overview_leads_to_the_cases_that_it_counts(seen: Seen) -> None:
    seen.page.locator(".legend button", has_text="errored").click()
    assert ids(seen.page) == ["errs"]
    seen.page.click("#tab-overview")
    seen.page.locator(".legend button", has_text="flaky").first.click()
    drawer_text(seen.page, "flaky")
    assert seen.page.url.endswith("#case=flaky")


def test_an_address_with_a_case_opens_it(chromium: Browser, reports: dict[str, Path]) -> None:
    with opened(chromium, reports["agents"].as_uri() + "#case=rescued", ready=READY) as shown:
        assert "rescued question" in drawer_text(shown.page, "rescued")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_theme_follows_the_system_until_the_reader_chooses(
    chromium: Browser, reports: dict[str, Path], scheme: str
) -> None:
    other = {"light": "dark", "dark": "light"}[scheme]
    with opened(chromium, reports["agents"].as_uri(), ready=READY, color_scheme=scheme) as shown:
        theme = "document.documentElement.dataset.theme"
        assert shown.page.evaluate(theme) == scheme
        shade = "getComputedStyle(document.body.parentElement).backgroundColor"
        before = shown.page.evaluate(shade)
        shown.page.click("#theme")
        assert shown.page.evaluate(theme) == other
        assert shown.page.evaluate(shade) != before
        assert keeps_theme(shown.page, other, READY)
        assert shown.said == []


@of("hostile")
def test_nothing_that_a_model_wrote_runs_or_becomes_markup(seen: Seen) -> None:
    shown = seen.page
    shown.click("#tab-cases")
    for number, text in enumerate(HOSTILE):
        shown.evaluate("table.showAll()")
        shown.evaluate(f"go.openRecord({number})")
        shown.wait_for_selector(f"#drawer[data-record='{number}']")
        assert (
            shown.evaluate(
                "document.querySelectorAll('#drawer script, #drawer img, #drawer a, #grid img, #grid a').length"
            )
            == 0
        )
        if "\u202e" in text or "\x1b" in text:
            assert shown.locator("#drawer .sign").count() > 0
        assert not re.search("[\x00\x1b\u202a-\u202e\u2066-\u2069]", shown.locator("body").inner_text())
    assert shown.evaluate("window.ran") is None
    assert shown.evaluate("document.querySelectorAll('[onmouseover], [onerror]').length") == 0


@of("empty")
def test_the_page_shows_unseen_characters_by_the_same_signs_as_the_other_formats(seen: Seen) -> None:
    plane = [chr(code) for code in range(0x10000) if not 0xD800 <= code <= 0xDFFF]
    texts = [
        *HOSTILE,
        "a\r\nb",
        *map("".join, zip(*[iter(plane)] * 512, strict=False)),
        "".join(map(chr, range(0xE0000, 0xE0100))),
    ]
    expected = [escape_invisible(text) for text in texts]
    assert seen.page.evaluate("texts => texts.map(escapeInvisible)", texts) == expected
    shown = "texts => texts.map(text => el('div', {}, rich(text)).textContent)"
    assert seen.page.evaluate(shown, texts) == expected


def test_a_narrow_window_does_not_scroll_sideways(chromium: Browser, reports: dict[str, Path]) -> None:
    with opened(chromium, reports["agents"].as_uri(), ready=READY, viewport={"width": 400, "height": 800}) as shown:
        wider = "document.documentElement.scrollWidth > window.innerWidth"
        assert not shown.page.evaluate(wider)
        shown.page.click("#tab-cases")
        assert not shown.page.evaluate(wider)
        shown.page.click(".row[data-id=wrong]")
        drawer_text(shown.page, "wrong")
        assert not shown.page.evaluate(wider)


def test_a_file_whose_script_was_changed_does_not_run(
    chromium: Browser, reports: dict[str, Path], tmp_path: Path
) -> None:
    """The policy holds the script's digest: what is smuggled in is refused, and the browser says so."""
    changed = tmp_path / "changed.html"
    text = reports["agents"].read_text(encoding="utf-8")
    changed.write_text(text.replace("</body>", "<script>window.ran = 1</script></body>"), encoding="utf-8")
    with opened(chromium, changed.as_uri(), ready=READY) as shown:
        assert shown.page.evaluate("window.ran") is None
        assert any("Content Security Policy" in line for line in shown.said)


def test_without_scripts_the_summary_is_there_as_text(chromium: Browser, reports: dict[str, Path]) -> None:
    with opened(chromium, reports["agents"].as_uri(), java_script_enabled=False) as shown:
        assert "18 of 18 done, complete" in shown.page.locator("noscript").inner_text()


@of("worked")
def test_an_agents_case_shows_its_time_line_turns_changes_logs_and_files(seen: Seen) -> None:
    page = seen.page
    page.click("#tab-cases")
    page.locator(".row[data-id=fixer]").click()
    text = drawer_text(page, "fixer")
    for part in ("Time line", "3 model calls", "Changes", "Trajectory", "Logs", "Artifacts", "files/page.html"):
        assert part in text, part
    assert "1 file, 1 added, 1 removed" in text
    assert "large plain" in text
    assert "took 1.00 s" in text
    assert "10 + 5 tokens" in text
    bars = page.locator("#drawer svg.chart rect")
    assert bars.count() == 3 + 1 + 3  # calls, a wait, tools before, between and after
    first, last = bars.first.bounding_box(), bars.last.bounding_box()
    assert first is not None
    assert last is not None
    assert 4 < first["height"] < 30
    assert last["x"] > first["x"]
    assert page.locator("#drawer a").count() == 0  # opened from a file, an artifact could run as a page
    page.locator("#drawer summary", has_text="stdout").click()
    page.locator("#drawer details[open]", has_text="printed plain").wait_for()  # filled once it is open
    page.keyboard.press("j")
    text = drawer_text(page, "printer")
    assert "run plain" in text
    assert "7 + 2 tokens" in text


@of("vicious")
def test_what_agents_leave_is_shown_as_text(seen: Seen) -> None:
    page = seen.page
    page.click("#tab-cases")
    for name in ("fixer", "printer"):
        page.locator(f".row[data-id={name}]").click()
        drawer_text(page, name)
        for summary in page.locator("#drawer summary").all():
            summary.click()
        page.locator("#drawer svg.chart rect").first.wait_for()
        assert escape_invisible(HOSTILE[0]) in page.locator("#drawer .patch").inner_text()
        assert page.evaluate("window.ran") is None
        assert page.locator("#drawer script, #drawer img").count() == 0


@of("sliced")
def test_slices_lead_to_their_cases_and_metadata_narrows_them(seen: Seen) -> None:
    page = seen.page
    overview = page.locator("#overview-view").inner_text()
    for part in ("By category", "two words", "small", "Metrics of the whole run", "accuracy", "3 to 7", "<i>1</i>"):
        assert part in overview, part
    page.get_by_role("button", name="two words").click()
    assert found(page) == "20 of 60 cases"
    assert page.locator("#search").input_value() == 'category="two words"'
    assert page.locator("select[data-key=category]").input_value() == "two words"
    page.locator("#search").fill('category="two words" level=1')
    assert found(page) == "10 of 60 cases"
    page.locator("select[data-key=category]").select_option("law")
    assert page.locator("#search").input_value() == "level=1 category=law"
    assert found(page) == "10 of 60 cases"
    page.locator(".row").first.click()
    text = drawer_text(page, "1")
    for part in ("4 steps", "<i>1</i>", "category", "law"):
        assert part in text, part
    page.keyboard.press("Escape")
    page.keyboard.press("Escape")
    assert found(page) == "60 cases"
    assert page.locator("select[data-key=category]").input_value() == ""
