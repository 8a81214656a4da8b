"""A matrix in the view: one entry of the list, and the page of several runs side by side."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from steelyard.run.matrix import Matrix, make_variants, write_matrix
from steelyard.view import runs as runs_module
from steelyard.view.matrices import Matrices
from steelyard.view.runs import Runs, Suites
from tests.support.axe import violations
from tests.support.browser import opened
from tests.support.compare import finished, journal
from tests.support.matrix import matrix
from tests.support.view import served

if TYPE_CHECKING:
    from playwright.sync_api import Browser

LETTERS = {"small": "ppff" * 5, "large <b>": "pppf" * 5}


@pytest.fixture(autouse=True)
def always_fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs_module, "_FRESH", 0.0)


def matrices(folder: Path) -> Matrices:
    return Matrices(Runs(folder), Suites(folder))


def test_a_matrix_is_one_entry_and_its_variants_are_no_others(tmp_path: Path) -> None:
    matrix(tmp_path / "m", LETTERS)
    journal(tmp_path / "alone", "pf")
    found = matrices(tmp_path)
    (one,) = found.headlines()
    assert (one.name, one.suite, one.variants, one.begun, one.done) == ("m", "letters", 2, 2, 40)
    assert (one.leader, one.pass_rate, one.state) == ("large <b>", 0.75, "interrupted")
    assert [run.name for run in found.listed()] == ["alone"]


def test_a_run_in_the_folder_that_is_no_variant_stays_in_the_list(tmp_path: Path) -> None:
    matrix(tmp_path / "m", LETTERS)
    journal(tmp_path / "m" / "other", "pf")
    assert [run.name for run in matrices(tmp_path).listed()] == ["m/other"]


def test_a_matrix_is_complete_when_all_of_its_variants_are(tmp_path: Path) -> None:
    axes = {"target": ["a", "b"]}
    write_matrix(tmp_path, Matrix(suite="letters", axes=axes, variants=make_variants(axes)))
    finished(tmp_path / "a", "pf")
    assert matrices(tmp_path).headlines()[0].state == "interrupted"
    finished(tmp_path / "b", "pp")
    assert matrices(tmp_path).headlines()[0].state == "complete"


def test_the_page_is_that_of_the_report_with_links_and_a_way_back(tmp_path: Path) -> None:
    matrix(tmp_path / "m", LETTERS)
    with served(tmp_path) as server:
        (one,) = server.get("/api/matrices").json
        assert server.get("/api/runs").json == []
        reply = server.get(f"/matrix/{one['id']}")
        text = reply.body.decode()
        assert reply.status == 200
        assert 'href="/" aria-label="All runs"' in text
        assert text.count('href="/run/') == 2
        assert 'id="chunk-0"' in text
        assert text.rstrip().endswith("</html>")
        assert "large &lt;b&gt; passed most" in text
        assert "script-src 'sha256-" in reply.headers["content-security-policy"]
        assert "frame-ancestors 'none'" in reply.headers["content-security-policy"]
        assert server.get("/matrix/0123456789abcdef").status == 404


def test_a_folder_that_is_a_matrix_opens_at_its_page(tmp_path: Path) -> None:
    matrix(tmp_path, LETTERS)
    with served(tmp_path) as server:
        reply = server.get("/")
        assert (reply.status, reply.headers["location"]) == (307, f"/matrix/{Runs(tmp_path).id_of(tmp_path.resolve())}")
        assert server.get(reply.headers["location"]).status == 200


def test_three_runs_are_compared_side_by_side(tmp_path: Path) -> None:
    for name, letters in {"a": "p" * 30, "b": "f" * 30, "c": "pf" * 15}.items():
        journal(tmp_path / name, letters)
    with served(tmp_path) as server:
        ids = server.ids()
        reply = server.get(f"/compare?run={ids['b']}&run={ids['a']}&run={ids['c']}")
        assert "a passed most" in reply.body.decode()
        assert "side-by-side" in reply.body.decode()


def test_a_variant_that_cannot_be_read_is_an_answer_not_half_a_page(tmp_path: Path) -> None:
    variants = matrix(tmp_path / "m", LETTERS)
    outputs = variants.runs[0].run / "outputs.jsonl"
    outputs.write_bytes(outputs.read_bytes().replace(b'"v"', b"'v'", 1))
    (variants.runs[0].run / "outputs.idx").unlink(missing_ok=True)
    with served(tmp_path) as server:
        (one,) = server.get("/api/matrices").json
        reply = server.get(f"/matrix/{one['id']}")
        assert one["state"] == "damaged"
        assert reply.status == 409
        assert b"outputs.jsonl" in reply.body


def test_links_and_paths_elsewhere_are_not_followed(tmp_path: Path) -> None:
    matrix(tmp_path / "elsewhere" / "m", LETTERS)
    inside = tmp_path / "inside"
    matrix(inside / "linked", {"a": "pf"})
    (inside / "linked" / "matrix.json").unlink()
    (inside / "linked" / "matrix.json").symlink_to(tmp_path / "elsewhere" / "m" / "matrix.json")
    matrix(inside / "escaping", {"a": "pf"})
    path = inside / "escaping" / "matrix.json"
    told = json.loads(path.read_text())
    told["variants"][0]["directory"] = "../../elsewhere/m/small"
    path.write_text(json.dumps(told))
    matrix(inside / "through", {"a": "pf", "b": "pp"})
    (inside / "through" / "b").rename(tmp_path / "moved")
    (inside / "through" / "b").symlink_to(tmp_path / "moved")
    found = matrices(inside)
    assert [(one.name, one.begun) for one in found.headlines()] == [("through", 1)]
    assert {run.name for run in found.listed()} == {"linked/a", "escaping/a"}


def test_the_list_leads_to_the_page_and_from_there_to_a_variant(chromium: Browser, tmp_path: Path) -> None:
    matrix(tmp_path / "m", LETTERS)
    journal(tmp_path / "alone", "pf")
    with served(tmp_path) as server, opened(chromium, server.url, ready="html[data-ready=runs]") as seen:
        page = seen.page
        assert "2 variants" in page.locator("#matrices").inner_text()
        assert page.locator("#runs tr").count() == 1
        assert violations(page) == []
        page.click("#matrices a")
        page.wait_for_selector("html[data-ready=cases]", state="attached")
        page.keyboard.press("d")
        page.locator(".row").first.click()
        page.locator("#drawer[data-record]").wait_for()
        assert page.locator(".variant").count() == 2
        page.click("#tab-overview")
        page.click("table.board a >> nth=0")
        page.wait_for_selector("html[data-ready=report]", state="attached")
        assert seen.said == []
