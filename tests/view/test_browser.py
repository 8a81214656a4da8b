"""The view in a real browser: it moves by itself, survives what happens to run and server, and shows all as text."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.support.axe import violations
from tests.support.browser import opened
from tests.support.cli import wait_until
from tests.support.journal import CountedModel, cases, run_in
from tests.support.report import agent_run, hostile_run, large_run
from tests.support.view import Served, SteppedRun, served

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

REPORT = "html[data-ready=report]"
LIVE = "html[data-ready=live]"


@pytest.fixture(scope="module")
def folder(chromium: Browser, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs to look at. Needs the browser, so that nothing is made where there is none."""
    runs = tmp_path_factory.mktemp("runs")
    agent_run(runs / "agents")
    hostile_run(runs / "hostile")
    large_run(runs / "large", 2_500)
    for name in ("one", "two"):
        run_in(runs / name, CountedModel(), cases(12))
    return runs


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Served]:
    with served(folder) as started:
        yield started


def marked(page: Page) -> None:
    """Leave a mark that a reload would wipe out."""
    page.evaluate("window.notReloaded = true")


def is_marked(page: Page) -> bool:
    return bool(page.evaluate("window.notReloaded === true"))


def counted(page: Page, count: int) -> None:
    page.locator("#tab-count", has_text=re.compile(f"^{count}$")).wait_for()


def test_a_live_page_moves_and_turns_into_the_report_without_a_reload(chromium: Browser, tmp_path: Path) -> None:
    with served(tmp_path) as server, SteppedRun(tmp_path / "steps", 4) as run:
        wait_until(lambda: "steps" in server.ids())
        with opened(chromium, f"{server.url}/run/{server.ids()['steps']}", ready=LIVE) as seen:
            page = seen.page
            marked(page)
            run.tell("right")
            counted(page, 1)
            assert "1 of 4 records" in page.locator(".progress").inner_text()
            run.tell("wrong", "error")
            counted(page, 3)
            page.locator(".newest-cases tbody tr").first.wait_for()
            names = page.locator(".newest-cases tbody tr td:nth-child(2)").all_inner_texts()
            assert [name.strip() for name in names] == ["c2", "c1", "c0"]
            assert page.locator(".head .pill").inner_text() == "running"
            run.tell("right")
            page.wait_for_selector(REPORT)
            assert page.locator(".head .pill").inner_text() == "complete"
            assert "Scores" in page.locator("#overview-view").inner_text()
            assert is_marked(page)
            assert seen.said == []


def test_a_live_page_survives_a_restart_of_the_server_and_catches_up(chromium: Browser, tmp_path: Path) -> None:
    with SteppedRun(tmp_path / "steps", 3) as run:
        with served(tmp_path) as first:
            wait_until(lambda: "steps" in first.ids())
            shown = opened(chromium, f"{first.url}/run/{first.ids()['steps']}", ready=LIVE)
            seen = shown.__enter__()
            marked(seen.page)
            run.tell("right")
            counted(seen.page, 1)
        try:
            seen.page.locator("#lost").wait_for(state="visible")
            run.tell("right")
            with served(tmp_path, first.port):
                counted(seen.page, 2)
                seen.page.locator("#lost").wait_for(state="hidden")
                run.tell("right")
                seen.page.wait_for_selector(REPORT)
                assert is_marked(seen.page)
        finally:
            shown.__exit__(None, None, None)


def test_the_newest_cases_open_and_the_table_says_how_much_came_since(chromium: Browser, tmp_path: Path) -> None:
    with served(tmp_path) as server, SteppedRun(tmp_path / "steps", 5) as run:
        wait_until(lambda: "steps" in server.ids())
        with opened(chromium, f"{server.url}/run/{server.ids()['steps']}", ready=LIVE) as seen:
            page = seen.page
            run.tell("right", "wrong")
            counted(page, 2)
            page.locator(".newest-cases tbody tr").first.click()
            page.locator("#drawer > header h2", has_text="c1").wait_for()
            assert rows(page) == ["c0", "c1"]
            run.tell("right")
            page.locator(".since", has_text="Show 1 more").click()
            page.locator(".row[data-id=c2]").wait_for()
            assert page.locator(".since").is_hidden()
            assert seen.said == []


def test_a_point_of_the_timeline_opens_its_case(chromium: Browser, server: Served) -> None:
    with opened(chromium, f"{server.url}/run/{server.ids()['large']}", ready=REPORT) as seen:
        seen.page.evaluate("go.openRecord(2001)")
        seen.page.locator("#drawer > header h2", has_text="case-002001").wait_for()
        seen.page.locator("#drawer", has_text="an answer of a few words 2001").wait_for()
        assert seen.said == []


def test_the_list_shows_all_runs_and_leads_to_a_run_and_to_a_comparison(chromium: Browser, server: Served) -> None:
    with opened(chromium, server.url, ready="html[data-ready=runs]") as seen:
        page = seen.page
        assert page.locator("#runs tr").count() == 5
        page.fill("#search", "two")
        assert page.locator("#runs tr").count() == 1
        page.fill("#search", "")
        for name in ("one", "two"):
            page.get_by_label(f"Pick {name}", exact=True).check()
        page.click("#compare")
        page.wait_for_selector(".compare .verdict")
        assert "12 paired cases" in page.locator("main").inner_text()
        page.click("a.home")
        page.wait_for_selector("html[data-ready=runs]")
        page.locator("#runs a", has_text="agents").click()
        page.wait_for_selector(REPORT)
        assert "pass^k" in page.locator("#overview-view").inner_text()
        assert seen.said == []


def test_the_list_refreshes_itself(chromium: Browser, tmp_path: Path) -> None:
    run_in(tmp_path / "first", CountedModel(), cases(2))
    with served(tmp_path) as server, opened(chromium, server.url, ready="html[data-ready=runs]") as seen:
        marked(seen.page)
        run_in(tmp_path / "second", CountedModel(), cases(2))
        seen.page.locator("#runs a", has_text="second").wait_for()
        assert is_marked(seen.page)


def rows(page: Page) -> list[str]:
    page.locator("#grid:not([aria-busy])").wait_for()
    shown: list[str] = page.locator(".row:not(.waiting)").evaluate_all("rows => rows.map(row => row.dataset.id)")
    return shown


def test_the_cases_of_a_large_run_are_filtered_sorted_searched_and_scrolled(chromium: Browser, server: Served) -> None:
    with opened(chromium, f"{server.url}/run/{server.ids()['large']}#cases", ready=".row:not(.waiting)") as seen:
        page = seen.page
        assert rows(page)[:2] == ["case-000000", "case-000001"]
        assert page.locator("#found").inner_text() == "2,500 cases"
        page.click("[data-chip=failed]")
        page.locator("#found", has_text="250 of 2,500").wait_for()
        assert rows(page)[:2] == ["case-000003", "case-000013"]
        page.click("[data-chip=failed]")
        page.locator("#found", has_text=re.compile("^2,500 cases$")).wait_for()
        page.click("[data-key=last] button")
        page.locator("[data-key=last][aria-sort=descending]").wait_for()
        wait_until(lambda: rows(page)[:1] == ["case-000088"])
        page.keyboard.press("/")
        page.keyboard.type("2499")
        page.locator("#found", has_text="1 of 2,500").wait_for()
        page.locator(".row").first.click()
        page.locator("#drawer .part").first.wait_for()
        assert "an answer of a few words 2499" in page.locator("#drawer").inner_text()
        page.keyboard.press("Escape")
        page.keyboard.press("Escape")
        page.locator("#found", has_text=re.compile("^2,500 cases$")).wait_for()
        page.keyboard.press("End")
        page.locator(".row.active:not(.waiting)").wait_for()
        assert page.locator(".row").count() < 60
        assert seen.said == []


def test_a_case_opens_with_its_trials_and_what_was_expected(chromium: Browser, server: Served) -> None:
    with opened(chromium, f"{server.url}/run/{server.ids()['agents']}#cases", ready=".row:not(.waiting)") as seen:
        page = seen.page
        page.locator(".row[data-id=flaky]").click()
        page.locator("#drawer .trial-bar button").first.wait_for()
        assert page.locator("#drawer .trial-bar button").count() == 3
        assert "Expected and actual" in page.locator("#drawer").inner_text()
        page.get_by_label("Trial 1: passed").click()
        page.locator("#drawer .pill.passed").wait_for()
        page.keyboard.press("j")
        page.locator("#drawer > header h2", has_text="errs").wait_for()
        assert seen.said == []


def test_nothing_that_a_model_says_runs(chromium: Browser, server: Served) -> None:
    with opened(chromium, f"{server.url}/run/{server.ids()['hostile']}", ready=REPORT) as seen:
        page = seen.page
        page.click("#tab-cases")
        page.locator(".row:not(.waiting)").first.wait_for()
        for place in range(page.locator(".row").count()):
            page.locator(".row").nth(place).click()
            page.locator("#drawer .part").first.wait_for()
        assert page.evaluate("window.ran") is None
        assert seen.said == []
        assert {address.split("/")[2] for address in seen.asked_for} == {f"127.0.0.1:{server.port}"}


def test_keys_switch_the_theme_and_it_stays(chromium: Browser, server: Served) -> None:
    with opened(chromium, server.url, ready="html[data-ready=runs]", color_scheme="light") as seen:
        seen.page.keyboard.press("t")
        assert seen.page.locator("html").get_attribute("data-theme") == "dark"
        seen.page.goto(f"{server.url}/run/{server.ids()['one']}")
        seen.page.wait_for_selector(REPORT)
        assert seen.page.locator("html").get_attribute("data-theme") == "dark"


AGENTS = """
import sys
from steelyard import EvalCase, EvalSet, Runner, Workspace

def agent(case, context):
    for number, line in enumerate(sys.stdin):
        if line == "end\\n":
            break
        context.log(line)
        context.record_turn({"role": "assistant", "content": f"turn {number}: {line}"}, input_tokens=3)
    (context.workspace / "made.txt").write_text("x")
    return "done"

suite = EvalSet("agents", [EvalCase(id="busy", prompt="?"), EvalCase(id="next", prompt="?")])
Runner(agent, suite, parallelism=1, output_path=sys.argv[1], progress="off", workspace=Workspace()).run_sync()
"""


def test_a_running_case_shows_its_log_and_turns_as_they_come(
    chromium: Browser, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STEELYARD_WORK", str(tmp_path / "work"))
    runs = tmp_path / "runs"
    runs.mkdir()
    command = [sys.executable, "-c", AGENTS, str(runs / "agents")]
    with served(runs) as server, subprocess.Popen(command, stdin=subprocess.PIPE, text=True) as run:
        try:
            wait_until(lambda: (runs / "agents" / "running").exists())
            with opened(chromium, f"{server.url}/run/{server.ids()['agents']}", ready=LIVE) as seen:
                page = seen.page

                def say(line: str) -> None:
                    assert run.stdin is not None
                    run.stdin.write(f"{line}\n")
                    run.stdin.flush()

                say("<script>window.ran = 1</script>")
                page.locator(".running-cases td", has_text="window.ran = 1").wait_for()
                page.locator(".running-cases tbody tr").click()
                page.locator("#running-drawer .log", has_text="window.ran = 1").wait_for()
                say("second line")
                page.locator("#running-drawer .log", has_text="second line").wait_for()
                page.locator("#running-drawer", has_text="turn 1: second line").wait_for()
                assert page.locator("#running-drawer svg.chart rect").count() >= 1
                assert violations(page) == []
                for number in range(60):
                    say(f"line {number}")
                page.locator("#running-drawer .log", has_text="line 59").wait_for()
                at_end = "(box) => box.scrollTop + box.clientHeight >= box.scrollHeight - 1"
                assert page.locator("#running-drawer .log").evaluate(at_end)  # a reader at the end stays there
                link = page.locator("#running-drawer a").first.get_attribute("href") or ""
                assert b"second line" in server.get(link).body
                say("end")
                page.locator("#running-drawer .pill", has_text="done").wait_for()
                page.locator("#running-drawer button", has_text="Show it among the cases").click()
                page.locator(".row[data-id=busy]").click()
                page.locator("#drawer .patch", has_text="made.txt").wait_for()
                assert page.evaluate("window.ran") is None
                say("end")
                page.click("#tab-overview")
                page.wait_for_selector(REPORT)
                assert [one for one in seen.said if "404" not in one] == []  # that of the case that was done
        finally:
            run.kill()
