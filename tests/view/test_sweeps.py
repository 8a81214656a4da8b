"""The sweeps that a view finds: by their levels, without following links, and without stumbling over a broken one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from steelyard.view.runs import Runs, Sweeps
from tests.support.journal import CountedModel, cases, run_in
from tests.support.sweep import mixed_sweep
from tests.support.view import served


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
