"""Labelling in a browser: a session and its resumption, what it looks like, and who may send a label."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from steelyard import EvalCase, EvalSet, Runner
from steelyard.errors import ConfigurationError
from steelyard.journal.labels import LabelLog
from steelyard.view.server import ViewServer
from tests.support.audited import audited_run, right
from tests.support.axe import violations
from tests.support.browser import opened
from tests.support.view import Served, served

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

HOSTILE = "<img src=x onerror=alert(1)> \u202eevil \x1b[31m"


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Served]:
    audited_run(tmp_path)
    with served(tmp_path / "RUN", labeller="anna") as started:
        yield started


def item_of(page: Page) -> str:
    """The id of the answer on the page."""
    return str(page.locator("html").get_attribute("data-ready")).partition("/")[0]


def press(page: Page, key: str) -> None:
    """Press a key and wait for the next answer."""
    before = page.locator("html").get_attribute("data-ready")
    page.keyboard.press(key)
    page.wait_for_function("before => document.documentElement.dataset.ready !== before", arg=before)


def test_a_session_with_the_keyboard_and_its_resumption(chromium: Browser, server: Served) -> None:
    with opened(chromium, server.address, ready="html[data-ready]") as seen:
        page = seen.page
        assert "token" not in page.url
        assert page.locator("#progress").inner_text().startswith("0 of 76 done")
        assert page.get_by_role("heading", name="Expected").count() == 0
        page.keyboard.press("e")
        page.get_by_role("heading", name="Expected").wait_for()
        first = item_of(page)
        press(page, "p")
        second = item_of(page)
        page.keyboard.press("c")
        page.keyboard.type("pf: not sure")
        page.keyboard.press("Escape")
        press(page, "f")
        third = item_of(page)
        press(page, "s")
        assert page.locator("#progress").inner_text().split("\n") == ["3 of 76 done", "1 pass", "1 fail", "1 skipped"]
        press(page, "u")
        assert item_of(page) == third
        press(page, "s")
        page.get_by_role("button", name="Agreement so far").click()
        page.locator("#ending li").first.wait_for()
        assert "not trusted yet" in page.locator("#ending").inner_text()
        assert seen.said == []
    said = LabelLog(server.folder).current["anna"]
    assert [(place[0], one.action, one.grade, one.comment) for place, one in said.items()] == [
        (first, "label", "pass", None),
        (second, "label", "fail", "pf: not sure"),
        (third, "skip", None, None),
    ]
    with opened(chromium, server.address, ready="html[data-ready]") as seen:
        assert seen.page.locator("#progress").inner_text().startswith("3 of 76 done")
        assert item_of(seen.page) not in (first, second, third)
        seen.page.get_by_label("Labeller").fill("bob")
        press(seen.page, "Enter")
        assert item_of(seen.page) == first, "each has their own"
        press(seen.page, "f")
    assert [one.grade for one in LabelLog(server.folder).current["bob"].values()] == ["fail"]


def test_to_the_end_and_what_the_judge_said_is_never_on_the_page(chromium: Browser, server: Served) -> None:
    with opened(chromium, server.address, ready="html[data-ready]") as seen:
        page, bodies = seen.page, []
        page.on("response", lambda reply: bodies.append(reply.text()) if "/label" in reply.url else None)
        for _ in range(76):
            press(page, "p" if right(item_of(page)) else "f")
        page.locator("#ending li").first.wait_for()
        assert "All answers are labelled" in page.locator("#ending").inner_text()
        assert "corrected" in page.locator("#ending").inner_text()
        for word in ("stratum", "overruled", "score", "passed", "judge"):
            assert not any(word in body for body in bodies), word
        press(page, "u")
        assert page.locator("#tools").is_visible()


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_the_page_breaks_no_rule_and_shows_everything_as_text(chromium: Browser, tmp_path: Path, theme: str) -> None:
    cases = [EvalCase(id=f"c{n}", prompt=HOSTILE, expected=HOSTILE) for n in range(2)]
    Runner(
        lambda case: HOSTILE, EvalSet("s", cases), ["exact"], output_path=tmp_path / "RUN", progress="off"
    ).run_sync()
    with (
        served(tmp_path / "RUN", labeller="anna") as server,
        opened(chromium, server.address, ready="html[data-ready]", color_scheme=theme) as seen,
    ):
        seen.page.keyboard.press("e")
        seen.page.get_by_role("heading", name="Expected").wait_for()
        assert "⟨U+202E⟩evil ␛[31m" in seen.page.locator("#item").inner_text()
        assert seen.page.locator("#item img").count() == 0
        assert violations(seen.page) == []
        press(seen.page, "p")
        press(seen.page, "f")
        seen.page.locator("#ending li").first.wait_for()
        assert violations(seen.page) == []
        assert seen.said == []
        seen.page.goto(server.url + "/")
        seen.page.get_by_role("link", name="Label answers").click()
        seen.page.wait_for_selector("html[data-ready=done]")


def test_in_a_folder_each_run_has_a_link_to_its_labels(chromium: Browser, tmp_path: Path) -> None:
    audited_run(tmp_path / "runs")
    with (
        served(tmp_path / "runs", labeller="anna") as server,
        opened(chromium, server.address, ready="html[data-ready=runs]") as seen,
    ):
        seen.page.get_by_role("link", name="RUN").click()
        seen.page.get_by_role("link", name="Label answers").click()
        seen.page.wait_for_selector("html[data-ready]")
        press(seen.page, "p")
        assert seen.page.locator("#progress").inner_text().startswith("1 of 76 done")


class Client:
    """A browser as far as the server can tell, with the token's cookie and the page's secret."""

    def __init__(self, server: Served) -> None:
        self._server = server
        path = server.address.removeprefix(server.url)
        self._cookie = self.send("GET", path)[1]["set-cookie"].partition(";")[0]
        self.path = path.partition("?")[0]
        _, _, page = self.send("GET", self.path)
        about = page.partition('id="about">')[2].partition("</script>")[0]
        self.csrf = json.loads(about)["csrf"]
        self.api = self.path.replace("/run/", "/api/runs/")
        self.sound = {"content-type": "application/json", "x-steelyard-csrf": self.csrf, "origin": server.url}

    def send(self, method: str, path: str, body: Any = None, **headers: str) -> tuple[int, dict[str, str], str]:
        connection = http.client.HTTPConnection("127.0.0.1", self._server.port, timeout=20)
        try:
            sent = {"cookie": getattr(self, "_cookie", ""), **headers}
            connection.request(method, path, body if body is None or isinstance(body, str) else json.dumps(body), sent)
            reply = connection.getresponse()
            return reply.status, {name.lower(): value for name, value in reply.getheaders()}, reply.read().decode()
        finally:
            connection.close()


def test_a_label_is_taken_from_a_page_of_its_own_alone(server: Served) -> None:
    client = Client(server)
    item = json.loads(client.send("GET", f"{client.api}?labeller=anna")[2])["item"]
    label = {"labeller": "anna", "action": "label", "id": item["id"], "trial": 0, "grade": 1}

    def status(**changes: Any) -> int:
        headers = {**client.sound, **changes}
        return client.send(
            "POST", client.api, label, **{name: value for name, value in headers.items() if value is not None}
        )[0]

    assert status(origin="http://evil.test") == 403
    assert status(origin=None) == 403
    assert status(**{"x-steelyard-csrf": "guess"}) == 403
    assert status(**{"x-steelyard-csrf": None}) == 403
    assert status(**{"content-type": "text/plain"}) == 403
    assert status(**{"sec-fetch-site": "cross-site"}) == 403
    assert status(cookie="") == 401
    assert status(host="evil.test") == 421
    assert LabelLog(server.folder).current == {}
    assert status() == 200
    assert len(LabelLog(server.folder).current["anna"]) == 1


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ("{", 400),
        ({"labeller": "anna", "action": "label", "id": "nobody", "grade": 1}, 400),
        ({"labeller": "anna", "action": "delete"}, 400),
        ({"labeller": "anna", "action": "label", "id": "c00", "grade": 7}, 400),
        ({"labeller": "\x1b", "action": "undo"}, 409),
        ({"labeller": "anna", "action": "undo", "path": "/etc"}, 400),
        ("x" * 70_000, 413),
    ],
)
def test_what_is_no_label_is_refused(server: Served, body: Any, status: int) -> None:
    client = Client(server)
    assert client.send("POST", client.api, body, **client.sound)[0] == status
    assert not LabelLog(server.folder).current.get("anna")


def test_nothing_else_can_be_written_to(server: Served) -> None:
    client = Client(server)
    for path in (client.path, client.api + "/", "/", client.api.replace("/label", "/case")):
        assert client.send("POST", path, {}, **client.sound)[0] == 405
    for method in ("PUT", "DELETE", "PATCH", "OPTIONS"):
        assert client.send(method, client.api, {}, **client.sound)[0] == 405


def test_without_the_token_nothing_is_shown_and_without_a_labeller_nothing_is_taken(tmp_path: Path) -> None:
    audited_run(tmp_path)
    with served(tmp_path / "RUN", labeller="anna") as server:
        assert server.get("/").status == 401
    with served(tmp_path / "RUN") as server:
        run = server.get("/").headers["location"]
        assert server.get(f"{run}/label").status == 404
        assert server.get(f"/api/runs/{run.removeprefix('/run/')}/label", "POST").status == 405


def test_labels_are_taken_on_this_machine_alone(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"labels are taken on this machine alone, and 0\.0\.0\.0"):
        ViewServer(tmp_path, host="0.0.0.0", labeller="anna")
    with pytest.raises(ConfigurationError, match="a labeller's name"):
        ViewServer(tmp_path, labeller="")
