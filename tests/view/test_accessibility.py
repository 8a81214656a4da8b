"""The pages of the view break no rule of WCAG 2 A and AA: the list, a live run, its report, its cases."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.support.axe import violations
from tests.support.browser import opened
from tests.support.cli import wait_until
from tests.support.journal import CountedModel, cases, run_in
from tests.support.report import agent_run
from tests.support.view import SteppedRun, served

if TYPE_CHECKING:
    from playwright.sync_api import Browser

THEMES = ("light", "dark")


@pytest.mark.parametrize("theme", THEMES)
def test_the_list_and_a_run_break_no_rule(chromium: Browser, tmp_path: Path, theme: str) -> None:
    agent_run(tmp_path / "agents")
    run_in(tmp_path / "one", CountedModel(), cases(12))
    with served(tmp_path) as server:
        with opened(chromium, server.url, ready="html[data-ready=runs]", color_scheme=theme) as seen:
            seen.page.get_by_label("Pick one").check()
            assert violations(seen.page) == []
        address = f"{server.url}/run/{server.ids()['agents']}"
        with opened(chromium, address, ready="html[data-ready=report]", color_scheme=theme) as seen:
            assert violations(seen.page) == []
            seen.page.click("#tab-cases")
            seen.page.locator(".row[data-id=flaky]").click()
            seen.page.locator("#drawer .part").first.wait_for()
            assert violations(seen.page) == []


@pytest.mark.parametrize("theme", THEMES)
def test_a_live_run_breaks_no_rule(chromium: Browser, tmp_path: Path, theme: str) -> None:
    with served(tmp_path) as server, SteppedRun(tmp_path / "steps", 4) as run:
        wait_until(lambda: "steps" in server.ids())
        address = f"{server.url}/run/{server.ids()['steps']}"
        with opened(
            chromium, address, ready="html[data-ready=live]", color_scheme=theme, reduced_motion="reduce"
        ) as seen:
            run.tell("right", "wrong", "error")
            seen.page.locator(".newest-cases tbody tr").nth(2).wait_for()
            seen.page.wait_for_timeout(2_000)  # the newest rows fade in
            assert violations(seen.page) == []
            run.tell("right")
