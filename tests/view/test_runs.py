"""The runs in a folder: which there are, what state each is in, and that looking changes nothing."""

from __future__ import annotations

import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from steelyard.errors import ConfigurationError
from steelyard.journal.lock import RunLock
from steelyard.run.matrix import Matrix, make_variants, write_matrix
from steelyard.view import runs as runs_module
from steelyard.view.runs import Matrices, Runs, Suites, Sweeps
from tests.support.axe import violations
from tests.support.browser import opened
from tests.support.compare import finished, journal
from tests.support.journal import CountedModel, a_record, cases, reopen, run_in, write_journal
from tests.support.matrix import matrix
from tests.support.report import large_run
from tests.support.sweep import mixed_sweep
from tests.support.view import served

if TYPE_CHECKING:
    from playwright.sync_api import Browser


@pytest.fixture(autouse=True)
def always_fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs_module, "_FRESH", 0.0)


def states(folder: Path) -> dict[str, str]:
    return {one.name: one.state for one in Runs(folder).headlines()}


def test_each_state_is_told_from_the_files_and_the_lock(tmp_path: Path) -> None:
    for name in ("complete", "killed", "writing", "broken"):
        run_in(tmp_path / name, CountedModel(), cases(5))
    data = (tmp_path / "killed" / "outputs.jsonl").read_bytes()
    reopen(tmp_path / "killed", data[:-30])
    reopen(tmp_path / "writing", data)
    reopen(tmp_path / "broken", data.replace(b'{"v"', b'{v"', 1))
    (tmp_path / "broken" / "outputs.idx").unlink()
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "readme.txt").write_text("not a run")
    with RunLock(tmp_path / "writing"):
        found = states(tmp_path)
    assert found == {"complete": "complete", "killed": "interrupted", "writing": "running", "broken": "damaged"}
    assert states(tmp_path)["writing"] == "interrupted"


def test_the_headline_of_a_complete_run_is_that_of_its_metrics(tmp_path: Path) -> None:
    metrics = run_in(tmp_path / "run", CountedModel(), cases(30)).metrics
    (one,) = Runs(tmp_path).headlines()
    assert (one.done, one.planned, one.errors) == (30, 30, 0)
    assert (one.pass_rate, one.passed, one.scored) == (metrics["pass_rate"], metrics["passed"], metrics["scored"])
    assert one.p50 == metrics["stats"]["time_to_last_token-p50"]
    assert one.suite == "journal"


def test_the_headline_of_an_unfinished_run_comes_from_its_index_and_follows_it(tmp_path: Path) -> None:
    run = tmp_path / "run"
    large_run(run, 100)
    runs = Runs(tmp_path)
    assert (runs.headlines()[0].done, runs.headlines()[0].errors) == (100, 2)
    large_run(run, 120)
    assert runs.headlines()[0].done == 120


def test_an_interrupted_runs_own_figures_are_used_until_its_journal_grows(tmp_path: Path) -> None:
    run_in(tmp_path / "run", CountedModel(), cases(10))
    metrics = json.loads((tmp_path / "run" / "metrics.json").read_bytes())
    partial = tmp_path / "run" / "partial.json"
    partial.write_text(json.dumps({**metrics, "complete": False, "pass_rate": 0.125}))
    (tmp_path / "run" / "metrics.json").unlink()
    assert Runs(tmp_path).headlines()[0].pass_rate == 0.125
    os.utime(tmp_path / "run" / "outputs.jsonl", (2e9, 2e9))
    assert Runs(tmp_path).headlines()[0].pass_rate not in (None, 0.125)


def test_runs_within_runs_are_found_but_not_what_was_moved_aside(tmp_path: Path) -> None:
    for place in ("sweep/level-1", "sweep/level-10", "plain", "plain/previous/2026", ".hidden", "a/b/c/too-deep/it"):
        write_journal(tmp_path / place, [a_record()])
    assert set(states(tmp_path)) == {"sweep/level-1", "sweep/level-10", "plain"}


def test_links_are_not_followed(tmp_path: Path) -> None:
    write_journal(tmp_path / "outside" / "run", [a_record(response_text="secret")])
    folder = tmp_path / "runs"
    write_journal(folder / "honest", [a_record()])
    (folder / "linked").symlink_to(tmp_path / "outside" / "run")
    (folder / "linked-above").symlink_to(tmp_path / "outside")
    write_journal(folder / "tricky", [a_record()])
    (folder / "tricky" / "outputs.jsonl").unlink()
    (folder / "tricky" / "outputs.jsonl").symlink_to(tmp_path / "outside" / "run" / "outputs.jsonl")
    (folder / "tricky" / "run.json").write_text("{}")
    assert set(states(folder)) == {"honest"}


@pytest.mark.parametrize("replaced", ["sweep", "sweep/one"])
def test_a_run_that_comes_to_lie_behind_a_link_is_not_found_any_more(tmp_path: Path, replaced: str) -> None:
    write_journal(tmp_path / "runs" / "sweep" / "one", [a_record()])
    write_journal(tmp_path / "outside" / "one", [a_record(response_text="secret")])
    write_journal(tmp_path / "outside", [a_record(response_text="secret")])
    with served(tmp_path / "runs") as server:
        name = server.ids()["sweep/one"]
        assert server.get(f"/api/runs/{name}/cases").status == 200
        os.rename(tmp_path / "runs" / replaced, tmp_path / "gone")
        (tmp_path / "runs" / replaced).symlink_to(tmp_path / "outside")
        for path in (f"/run/{name}", f"/api/runs/{name}/cases", f"/api/runs/{name}/events"):
            reply = server.get(path)
            assert reply.status == 404
            assert b"secret" not in reply.body


def test_looking_at_a_folder_writes_nothing(tmp_path: Path) -> None:
    run_in(tmp_path / "done", CountedModel(), cases(5))
    large_run(tmp_path / "open", 20)
    before = {place: place.stat().st_mtime_ns for place in tmp_path.rglob("*")}
    with served(tmp_path) as server:
        for name in server.ids().values():
            for what in ("overview", "charts", "cases", "cases?search=answer", "case?record=0"):
                assert server.get(f"/api/runs/{name}/{what}").status == 200, what
            server.events(name).next()
    assert {place: place.stat().st_mtime_ns for place in tmp_path.rglob("*")} == before


def test_an_overview_is_that_of_the_report_and_a_damaged_run_shows_what_can_be_read(tmp_path: Path) -> None:
    metrics = run_in(tmp_path / "done", CountedModel(), cases(5)).metrics
    data = write_journal(tmp_path / "broken", [a_record(id=f"c{n}", index=n) for n in range(3)])
    (tmp_path / "broken" / "outputs.jsonl").write_bytes(data.replace(b'{"v"', b'{v"', 1))
    with served(tmp_path) as server:
        ids = server.ids()
        page = server.get(f"/api/runs/{ids['done']}/overview").json
        assert page["metrics"]["stats"] == metrics["stats"]
        assert page["counts"]["passed"] == metrics["passed"]
        assert server.get(f"/api/runs/{ids['broken']}/overview").status == 409
        assert server.get(f"/api/runs/{ids['broken']}/cases").json["leads"]["id"] == ["c1", "c2"]
        event = server.events(ids["broken"]).next()
        assert event["state"] == "damaged"
        assert event["problem"].startswith("1 unreadable line of ")


def test_expected_answers_are_the_records_own_and_no_suite_outside_the_folder_is_read(tmp_path: Path) -> None:
    run_in(tmp_path / "runs" / "run", CountedModel(), cases(2))
    manifest = tmp_path / "runs" / "run" / "run.json"
    for place, shown in {tmp_path / "runs" / "suite.yaml": True, tmp_path / "outside.yaml": False}.items():
        suite = {"id": "journal", "target": {"simulated": {}}, "cases": [{"id": "c0", "prompt": "0?", "expected": "0"}]}
        place.write_text(json.dumps(suite))
        manifest.write_text(json.dumps({**json.loads(manifest.read_text()), "suite_file": str(place)}))
        with served(tmp_path / "runs") as server:
            name = server.ids()["run"]
            body = server.get(f"/api/runs/{name}/case?record=0").json["body"]
            assert body.get("expected") == ["0"]
            note = server.get(f"/api/runs/{name}/overview").json["about"]["suite_note"]
            assert note is None if shown else "outside the folders" in note


def test_a_single_run_is_its_own_page_and_a_missing_folder_is_refused(tmp_path: Path) -> None:
    run_in(tmp_path / "run", CountedModel(), cases(2))
    with served(tmp_path / "run") as server:
        reply = server.get("/")
        assert reply.status == 307
        assert b"run" in server.get(reply.headers["location"]).body
    with pytest.raises(ConfigurationError, match="there is no folder"):
        Runs(tmp_path / "nowhere")


def test_two_runs_are_compared_and_others_are_not_found(tmp_path: Path) -> None:
    for name in ("a", "b"):
        run_in(tmp_path / name, CountedModel(), cases(8))
    with served(tmp_path) as server:
        ids = server.ids()
        page = server.get(f"/compare?run={ids['a']}&run={ids['b']}")
        assert page.status == 200
        assert b"8 paired cases" in page.body
        for query in ("", f"run={ids['a']}", f"run={ids['a']}&run=ffffffffffffffff", "run=../a&run=../b"):
            assert server.get(f"/compare?{query}").status == 404


def test_runs_that_cannot_be_compared_say_why_on_a_page(tmp_path: Path) -> None:
    for name in ("<b>a</b>", "b"):
        write_journal(tmp_path / name, [a_record(id=name)])
    with served(tmp_path) as server:
        page = server.get("/compare?" + "&".join(f"run={one}" for one in server.ids().values()))
        assert page.status == 409
        assert b"nothing can be paired" in page.body
        assert b"<b>" not in page.body


def test_a_folder_whose_name_is_no_text_is_shown_all_the_same(tmp_path: Path) -> None:
    write_journal(Path(os.fsdecode(os.fsencode(tmp_path) + b"/odd\xff")), [a_record()])
    with served(tmp_path) as server:
        assert list(server.ids()) == ["odd?"]
        name = server.ids()["odd?"]
        for path in (f"/run/{name}", f"/api/runs/{name}/overview", f"/api/runs/{name}/cases"):
            assert server.get(path).status == 200, path
        assert server.events(name).next()["state"] == "interrupted"


def test_many_who_ask_at_once_get_the_same_answer(tmp_path: Path) -> None:
    for number in range(30):
        write_journal(tmp_path / f"run-{number}", [a_record()])
    runs = Runs(tmp_path)
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda _: [one.name for one in runs.headlines()], range(40)))
    assert all(one == found[0] for one in found)
    assert len(found[0]) == 30


# Sweeps --------------------------------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for level in (4, 16):
        run_in(tmp_path / "runs" / "swept" / f"level-{level}", CountedModel(), cases(2))
    (tmp_path / "runs" / "swept" / "sweep.json").write_text(json.dumps(mixed_sweep()), encoding="utf-8")
    return tmp_path / "runs"


def test_a_sweep_is_told_in_a_line(folder: Path) -> None:
    (one,) = Sweeps(Runs(folder)).headlines()
    assert (one.name, one.suite, one.model, one.levels, one.recommended) == ("swept", "capitals", "gpt-4.1", 6, 16)
    assert one.says == mixed_sweep()["recommendation"]["says"]


def test_a_sweep_that_goes_on_is_told_as_far_as_it_has_come(folder: Path) -> None:
    (folder / "swept" / "sweep.json").unlink()
    so_far = {**mixed_sweep(), "complete": False, "stopped": "not finished"}
    (folder / "swept" / "sweep.partial.json").write_text(json.dumps(so_far), encoding="utf-8")
    (one,) = Sweeps(Runs(folder)).headlines()
    assert (one.complete, one.levels) == (False, 6)


def test_a_folder_that_is_a_sweep_lists_itself(folder: Path) -> None:
    (one,) = Sweeps(Runs(folder / "swept")).headlines()
    assert one.name == "swept"


def test_only_levels_that_are_there_are_linked(folder: Path) -> None:
    runs = Runs(folder)
    sweeps = Sweeps(runs)
    found = sweeps.page_of(sweeps.headlines()[0].id)
    assert found is not None
    ids = {one.name: one.id for one in runs.headlines()}
    assert found[1].count("<a ") == 2
    for level in (4, 16):
        assert f'<a href="/run/{ids[f"swept/level-{level}"]}">{level}</a>' in found[1]


def test_the_levels_of_a_sweep_are_on_its_page_and_not_among_the_runs(folder: Path) -> None:
    run_in(folder / "swept" / "level-4" / "judged", CountedModel(), cases(2))
    run_in(folder / "alone", CountedModel(), cases(2))
    runs = Runs(folder)
    inside = Sweeps(runs).inside()
    assert [one.name for one in runs.headlines() if one.id not in inside] == ["alone"]
    assert Sweeps(Runs(folder / "swept")).inside() == set()


def test_a_level_that_is_running_is_among_the_runs(folder: Path) -> None:
    level = folder / "swept" / "level-16"
    (level / "metrics.json").unlink()
    with RunLock(level):
        runs = Runs(folder)
        inside = Sweeps(runs).inside()
        assert [one.name for one in runs.headlines() if one.id not in inside] == ["swept/level-16"]


@pytest.mark.parametrize("broken", ["", "{}", "[]", '{"levels": 3}', json.dumps({**mixed_sweep(), "levels": [{}]})])
def test_what_cannot_be_understood_is_left_out(folder: Path, broken: str) -> None:
    (folder / "swept" / "sweep.json").write_text(broken, encoding="utf-8")
    assert Sweeps(Runs(folder)).headlines() == []


def test_a_link_is_not_followed(folder: Path) -> None:
    place = folder / "swept" / "sweep.json"
    elsewhere = place.rename(folder.parent / "elsewhere.json")
    place.symlink_to(elsewhere)
    assert Sweeps(Runs(folder)).headlines() == []


def test_an_unknown_sweep_is_not_found(folder: Path) -> None:
    with served(folder) as server:
        (one,) = server.get("/api/sweeps").json
        page = server.get(f"/sweep/{one['id']}")
        assert page.status == 200
        assert "nonce-" in page.headers["content-security-policy"]
        assert server.get("/sweep/0123456789abcdef").status == 404
        assert server.get("/sweep/..%2F..%2Fetc").status == 404


LETTERS = {"small": "ppff" * 5, "large <b>": "pppf" * 5}


def matrices(folder: Path) -> Matrices:
    return Matrices(Runs(folder), Suites(folder))


def test_a_matrix_is_one_entry_and_its_variants_are_no_others(tmp_path: Path) -> None:
    matrix(tmp_path / "m", LETTERS)
    journal(tmp_path / "alone", "pf")
    found = matrices(tmp_path)
    (one,) = found.headlines()
    assert (one.name, one.suite, one.variants, one.begun, one.done) == ("m", "letters", 2, 2, 40)
    assert (one.leader, one.leads, one.pass_rate) == ("large <b>", "passed most", 0.75)
    assert one.state == "interrupted"
    assert [run.name for run in found.listed()] == ["alone"]


def test_no_variant_of_a_tied_matrix_passed_most(tmp_path: Path) -> None:
    matrix(tmp_path / "m", {"b": "ppff", "a": "fpfp", "c": "ffff"})
    (one,) = matrices(tmp_path).headlines()
    assert (one.leader, one.leads, one.pass_rate) == ("b and a", "passed equally many", 0.5)


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
