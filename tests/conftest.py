"""The browser that tests of pages share, and how properties are tried: the same examples each time, so that a red test
is always somebody's change.

`HYPOTHESIS_PROFILE=explore make unit` looks for new ones.
"""

from __future__ import annotations

import importlib.util
import os
import signal
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings

from tests.support.browser import browser

if TYPE_CHECKING:
    from playwright.sync_api import Browser

settings.register_profile("steady", deadline=None, derandomize=True)
settings.register_profile("explore", deadline=None, max_examples=1000, print_blob=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "steady"))


def pytest_configure() -> None:
    """Take back that signals are ignored, as they are below `nohup` and `&`: the programs under test inherit that."""
    for number in (signal.SIGINT, signal.SIGHUP):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what uses a browser, and skip what needs Ray where it is not installed."""
    no_ray = pytest.mark.skip(reason="Ray is not installed")
    has_ray = importlib.util.find_spec("ray") is not None
    for item in items:
        if "chromium" in getattr(item, "fixturenames", ()):
            item.add_marker("browser")
        if item.get_closest_marker("ray") is not None and not has_ray:
            item.add_marker(no_ray)


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    with browser() as started:
        yield started
