"""A real Chromium for tests of pages: found on the machine, driven by Playwright; without them the test is skipped."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
_FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-dev-shm-usage"]


def chromium_path() -> str | None:
    """The browser to use: CHROMIUM names one, else the first that is installed."""
    return os.environ.get("CHROMIUM") or next((path for name in _NAMES if (path := shutil.which(name))), None)


def why_no_browser() -> str | None:
    """Why pages cannot be tested here; None when they can."""
    try:
        import playwright.sync_api  # noqa: F401
    except ImportError:
        return "no browser tests: the package playwright is not installed"
    if chromium_path() is None:
        return "no browser tests: no Chromium is installed (apt-get install chromium, or CHROMIUM=/path/to/it)"
    return None


@contextlib.contextmanager
def browser() -> Iterator[Browser]:
    """A headless browser with a fresh profile, closed afterwards; skips the test where there is none."""
    if (reason := why_no_browser()) is not None:
        pytest.skip(reason)
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=chromium_path(), args=_FLAGS, timeout=60_000)
        try:
            yield started
        finally:
            started.close()


@dataclass
class Seen:
    """A page, and what it did beside being shown."""

    page: Page
    said: list[str] = field(default_factory=list)
    """What it wrote to the console, and errors that nobody caught."""
    asked_for: list[str] = field(default_factory=list)
    """The addresses that it requested."""


@contextlib.contextmanager
def opened(started: Browser, address: str, *, ready: str | None = None, **context: Any) -> Iterator[Seen]:
    """The page at an address in a context of its own, watched; once `ready`, a selector, is there."""
    shown = started.new_context(**{"viewport": {"width": 1280, "height": 860}, **context})
    shown.set_default_timeout(15_000)
    seen = Seen(shown.new_page())
    seen.page.on("console", lambda message: seen.said.append(f"{message.type}: {message.text}"))
    seen.page.on("pageerror", lambda error: seen.said.append(f"error: {error}"))
    seen.page.on("request", lambda request: seen.asked_for.append(request.url))
    try:
        seen.page.goto(address)
        if ready is not None:
            seen.page.wait_for_selector(ready, state="attached")
        yield seen
    finally:
        shown.close()


def keeps_theme(page: Page, theme: str, ready: str) -> bool:
    """Whether the page has that theme when it is loaded again.

    The browser writes down what a page stores a moment later, in another process: it may take a second look.
    """
    for _ in range(200):
        page.reload()
        page.wait_for_selector(ready, state="attached")
        if page.locator("html").get_attribute("data-theme") == theme:
            return True
        page.wait_for_timeout(50)
    return False
