"""Who may ask the view: no other site's page, under no other name, for nothing but the runs of its folder."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from starlette.responses import PlainTextResponse

from steelyard.view.security import Guard, is_loopback
from tests.support.journal import a_record, write_journal
from tests.support.report import HOSTILE, hostile_run
from tests.support.view import Served, served

PORT = 8123
MINE = f"127.0.0.1:{PORT}"


def asked(method: str = "GET", path: str = "/", query: str = "", token: str | None = None, **headers: Any) -> Any:
    """The status and headers that a guard before an open door gives."""
    host = headers.pop("_bound", "127.0.0.1")
    guard = Guard(PlainTextResponse("in"), host=host, port=PORT, token=token)
    sent = [(name.replace("_", "-").encode(), one.encode("latin-1")) for name, value in headers.items()
            for one in (value if isinstance(value, list) else [value])]  # fmt: skip
    scope = {"type": "http", "method": method, "path": path, "query_string": query.encode(), "headers": sent}
    said: list[Any] = []

    async def receive() -> Any:
        return {"type": "http.request"}

    async def send(message: Any) -> None:
        said.append(message)

    asyncio.run(guard(scope, receive, send))
    return said[0]["status"], {name.decode(): value.decode() for name, value in said[0]["headers"]}


@pytest.mark.parametrize("host", [MINE, f"localhost:{PORT}", f"[::1]:{PORT}", f"LocalHost:{PORT}"])
def test_its_own_names_are_let_in(host: str) -> None:
    assert asked(host=host)[0] == 200


@pytest.mark.parametrize(
    "host",
    [
        "evil.test",
        f"evil.test:{PORT}",
        "127.0.0.1",
        "127.0.0.1:80",
        "localhost",
        f"127.0.0.1.evil.test:{PORT}",
        f"localhost.evil.test:{PORT}",
        f"evil.test@127.0.0.1:{PORT}",
        f"127.0.0.1:{PORT}@evil.test",
        f"0.0.0.0:{PORT}",
        f"127.0.0.1:{PORT}0",
        f"127.0.0.1:+{PORT}",
        f"127.0.0.1: {PORT}",
        f"127.0.0.2:{PORT}",
        f"::1:{PORT}",
        "",
        ":",
        f":{PORT}",
        "[::1]",
        f"192.168.0.1:{PORT}",
        [MINE, MINE],
        [MINE, "evil.test"],
        [],
    ],
)
def test_other_names_are_not_as_a_site_can_point_its_own_name_here(host: Any) -> None:
    assert asked(host=host)[0] == 421


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 200),
        ({"origin": f"http://{MINE}"}, 200),
        ({"origin": "http://evil.test"}, 403),
        ({"origin": "null"}, 403),
        ({"origin": ""}, 403),
        ({"origin": f"https://{MINE}"}, 403),
        ({"origin": f"http://localhost:{PORT}"}, 403),
        ({"origin": f"http://127.0.0.1:{PORT + 1}"}, 403),
        ({"origin": f"http://{MINE}.evil.test"}, 403),
        ({"origin": [f"http://{MINE}", "http://evil.test"]}, 403),
        ({"sec_fetch_site": "same-origin"}, 200),
        ({"sec_fetch_site": "none", "sec_fetch_mode": "navigate"}, 200),
        ({"sec_fetch_site": "cross-site", "sec_fetch_mode": "navigate", "sec_fetch_dest": "document"}, 200),
        ({"sec_fetch_site": "cross-site", "sec_fetch_mode": "navigate", "sec_fetch_dest": "iframe"}, 403),
        ({"sec_fetch_site": "cross-site", "sec_fetch_mode": "no-cors", "sec_fetch_dest": "script"}, 403),
        ({"sec_fetch_site": "same-site", "sec_fetch_mode": "cors", "sec_fetch_dest": "empty"}, 403),
        ({"sec_fetch_site": "cross-site"}, 403),
    ],
)
def test_a_page_of_another_origin_reads_nothing(headers: dict[str, Any], status: int) -> None:
    assert asked(host=MINE, **headers)[0] == status


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "CONNECT", "get"])
def test_nothing_but_reading_is_served(method: str) -> None:
    status, headers = asked(method, host=MINE)
    assert (status, headers["allow"]) == (405, "GET, HEAD")


def test_where_others_can_reach_it_a_token_is_asked_for() -> None:
    more = {"token": "s3cret", "_bound": "192.168.0.7", "host": f"192.168.0.7:{PORT}"}
    assert asked(**more)[0] == 401
    assert asked(query="token=wrong", **more)[0] == 401
    assert asked(query="token=", **more)[0] == 401
    status, headers = asked(path="/run/ab", query="token=s3cret", **more)
    assert (status, headers["location"]) == (303, "/run/ab")
    cookie = headers["set-cookie"]
    assert "HttpOnly" in cookie
    assert "samesite=strict" in cookie.lower()
    assert asked(cookie=cookie.split(";")[0], **more)[0] == 200
    assert asked(cookie=cookie.split("=")[0] + "=wrong", **more)[0] == 401
    assert asked(path="//evil.test", query="token=s3cret", **more)[1]["location"] == "/evil.test"
    assert asked(token="s3cret", _bound="0.0.0.0", host=f"10.0.0.9:{PORT}")[0] == 401
    assert asked(token="s3cret", _bound="0.0.0.0", host=f"evil.test:{PORT}")[0] == 421


@pytest.mark.parametrize(
    ("host", "expected"),
    [("127.0.0.1", True), ("127.9.9.9", True), ("::1", True), ("localhost", True), ("0.0.0.0", False), ("::", False),
     ("192.168.1.1", False), ("localhost.evil.test", False), ("", False)],
)  # fmt: skip
def test_only_this_machines_own_addresses_need_no_token(host: str, expected: bool) -> None:
    assert is_loopback(host) is expected


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("view")
    write_journal(folder / "runs" / "one", [a_record()])
    hostile_run(folder / "runs" / "hostile")
    write_journal(folder / "outside", [a_record(id="SECRET", response_text="SECRET")])
    (folder / "secret.txt").write_text("SECRET")
    with served(folder / "runs") as started:
        yield started


ESCAPES = ".. %2e%2e %2E. . / %2f \\ %5c %00 ; ? # ~ %c0%ae %252e"
NAMES = "outside secret.txt outputs.jsonl one run api/runs cases case?at=0 overview events/.. etc/passwd"
PIECES = st.sampled_from(f"{ESCAPES} {NAMES}".split())


@given(st.lists(PIECES, min_size=1, max_size=8), st.sampled_from(["/", "", "//", "/run/", "/api/runs/", "http://x/"]))
@settings(max_examples=150, deadline=None)
def test_no_path_leads_out_of_the_folder(server: Served, pieces: list[str], begins: str) -> None:
    for joint in ("", "/"):
        reply = server.raw((begins + joint.join(pieces)).encode())
        status = int(reply.split()[1]) if reply else 400
        assert status in (200, 307, 400, 404), reply[:200]
        assert b"SECRET" not in reply
        assert b"root:" not in reply


def test_absolute_paths_and_folders_are_no_ids(server: Served) -> None:
    outside = str(server.folder.parent / "outside")
    for name in (
        outside,
        outside[1:],
        "one",
        "../outside",
        "..%2foutside",
        "%2e%2e%2foutside",
        outside.replace("/", "%2f"),
    ):
        for path in (f"/run/{name}", f"/api/runs/{name}/cases", f"/api/runs/{name}/overview"):
            assert server.get(path).status == 404, path


def test_pages_allow_only_what_carries_their_nonce_which_is_new_each_time(server: Served) -> None:
    name = server.ids()["one"]
    nonces = set()
    for path in ("/", "/", f"/run/{name}", f"/compare?run={name}&run={name}"):
        reply = server.get(path)
        assert reply.status == 200, path
        policy = reply.headers["content-security-policy"]
        (nonce,) = set(re.findall(r"'nonce-([^']+)'", policy))
        nonces.add(nonce)
        assert "default-src 'none'" in policy
        assert "frame-ancestors 'none'" in policy
        assert "unsafe" not in policy
        text = reply.body.decode()
        executed = re.findall(r"<script(?! type=\"application/json\")([^>]*)>", text)
        assert executed == [f' nonce="{nonce}"']
        assert re.findall(r"<style([^>]*)>", text) == [f' nonce="{nonce}"']
        assert not re.search(r"<[^>]+ on\w+=", re.sub(r"<script.*?</script>", "", text, flags=re.S))
    assert len(nonces) == 4


def test_every_answer_carries_the_headers_that_keep_it_to_itself(server: Served) -> None:
    name = server.ids()["one"]
    for path in ("/", "/api/runs", f"/api/runs/{name}/cases", "/nowhere", "/api/runs/x/cases"):
        headers = server.get(path).headers
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["cross-origin-resource-policy"] == "same-origin"
        assert headers["referrer-policy"] == "no-referrer"
        assert "access-control-allow-origin" not in headers
        assert "default-src 'none'" in headers["content-security-policy"]


def test_what_models_say_comes_as_json_that_no_browser_takes_for_a_page(server: Served) -> None:
    name = server.ids()["hostile"]
    for path in (f"/api/runs/{name}/cases", f"/api/runs/{name}/case?record=0", f"/api/runs/{name}/overview"):
        reply = server.get(path)
        assert reply.headers["content-type"] == "application/json"
    compared = server.get(f"/compare?run={name}&run={name}").body.decode()
    for text in HOSTILE:
        assert "<" not in text or text not in compared


def test_head_is_answered_without_a_body(server: Served) -> None:
    name = server.ids()["one"]
    for path in ("/", "/api/runs", f"/api/runs/{name}/events"):
        reply = server.get(path, "HEAD")
        assert (reply.status, reply.body) == (200, b"")


def test_an_answer_that_the_browser_has_is_not_sent_again(server: Served) -> None:
    tag = server.get("/api/runs").headers["etag"]
    reply = server.get("/api/runs", if_none_match=tag)
    assert (reply.status, reply.body) == (304, b"")
