"""What is done about a complete run: refused, loaded, updated with what changed, or started over."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from steelyard import ConfigurationError, EvalCase, EvalSet, RunFinished, RunMismatch, Runner, RunRefused
from tests.support.cli import Door, Workshop, finish, run_cli, start, wait_until
from tests.support.journal import CountedModel, cases, run_in

ALL = ["c0", "c1", "c2", "c3", "c4", "c5"]


@pytest.fixture
def shop(tmp_path: Path) -> Workshop:
    return Workshop(tmp_path)


@pytest.fixture(params=["command", "python"])
def run(request: pytest.FixtureRequest, shop: Workshop) -> Door:
    return shop.by_command if request.param == "command" else shop.by_python


def launches(shop: Workshop) -> int:
    return len(json.loads((shop.run / "run.json").read_text())["launches"])


def contents(folder: Path) -> dict[str, bytes]:
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {str(path.relative_to(folder)): path.read_bytes() for path in files if path.name not in (".lock",)}


def test_an_update_without_a_change_asks_and_writes_nothing(shop: Workshop, run: Door) -> None:
    first = run().done
    shop.asked()
    before = contents(shop.run)
    outcome = run(update=True)
    assert outcome.done == first
    assert shop.asked() == []
    assert contents(shop.run) == before
    assert "is complete and up to date" in outcome.said


def test_an_update_asks_added_and_edited_cases_and_retries_errors_alone(shop: Workshop, run: Door) -> None:
    shop.failing("c4")
    run()
    shop.failing("")
    shop.suite("c0 c1 c2 c3 c4 c5 c6", prompts={"c2": "edited"})
    shop.asked()
    outcome = run(update=True)
    assert sorted(shop.asked()) == ["c2", "c4", "c6"]
    assert outcome.done["counts"] == {"planned": 7, "ok": 7, "error": 0, "cancelled": 0, "not_started": 0}
    assert outcome.done["lines"] == {"total": 9, "left_out": "3"}
    assert launches(shop) == 2
    assert len(list((shop.run / "previous").glob("*/metrics.json"))) == 1


def test_an_update_scores_again_where_scorers_changed_and_asks_nothing(shop: Workshop, run: Door) -> None:
    run()
    shop.suite(scorers=["exact", {"python": "agent.py:shout"}])
    shop.asked()
    outcome = run(update=True)
    assert shop.asked() == []
    assert sorted(shop.scored()) == ALL
    assert set(outcome.done["scores"]) == {"exact", "shout"}


def test_an_update_counts_removed_cases_out(shop: Workshop, run: Door) -> None:
    run()
    shop.suite("c0 c1")
    shop.asked()
    assert run(update=True).done["n"] == 2
    assert shop.asked() == []
    assert shop.metrics()["lines"] == {"total": 6, "left_out": "3-6"}


def test_an_update_of_nothing_is_a_run_and_of_an_unfinished_one_a_resume(shop: Workshop, run: Door) -> None:
    run(update=True)
    assert shop.asked() == ALL
    shop.cut_back(lines=4)
    assert run(update=True).done["complete"]
    assert shop.asked() == ["c4", "c5"]


@pytest.mark.parametrize("flags", [{}, {"update": True}, {"retry_errors": True}], ids=str)
def test_a_complete_run_of_something_else_is_refused_as_that(shop: Workshop, run: Door, flags: dict[str, bool]) -> None:
    run()
    before = contents(shop.run)
    outcome = run(seed=7, **flags)
    assert "holds a run of something else" in (outcome.refusal or "")
    assert contents(shop.run) == before


def test_a_dry_run_refuses_it_too(shop: Workshop) -> None:
    shop.by_command()
    ended = run_cli(shop.folder, "run", "suite.yaml", "--out", "RUN", "--seed", "7", "--dry-run")
    assert ended.code == 2
    assert "holds a run of something else" in ended.err


def test_an_update_that_is_killed_leaves_an_unfinished_run_that_resumes(shop: Workshop) -> None:
    """metrics.json is moved aside, every record is there, and a plain run continues."""
    shop.by_command()
    waits = "import time\n" + (shop.folder / "agent.py").read_text() + WAITS
    shop.agent(waits)
    shop.suite("c0 c1 c2 c3 c4 c5 c6 c7", prompts={"c1": "edited"})
    shop.asked()
    process = start(shop.folder, "run", "suite.yaml", "--out", "RUN", "--update", "--no-progress", "-j", "1")
    wait_until(lambda: (shop.folder / "waiting").exists())
    process.kill()
    assert finish(process).code == -9
    assert not (shop.run / "metrics.json").exists()
    assert len(list((shop.run / "previous").glob("*/metrics.json"))) == 1
    listed = json.loads(run_cli(shop.folder, "ls", ".", "--json").out)
    assert [(row["state"], row["done"], row["planned"]) for row in listed] == [("interrupted", 7, 8)]
    assert len(shop.lines()) == 8
    (shop.folder / "waiting").touch()
    shop.asked()
    outcome = shop.by_command()
    assert outcome.done["complete"]
    assert outcome.done["counts"]["ok"] == 8
    assert shop.asked() == ["c7"]
    assert outcome.done["lines"] == {"total": 9, "left_out": "2"}


WAITS = """

shouts = answer


def answer(case):
    if case.id == "c7" and not (HERE / "waiting").exists():
        (HERE / "waiting").touch()
        time.sleep(600)
    return shouts(case)
"""


def test_update_goes_with_neither_new_nor_force(shop: Workshop) -> None:
    for flag in ("--new", "--force"):
        ended = run_cli(shop.folder, "run", "suite.yaml", "--update", flag)
        assert ended.code == 2
        assert "--update cannot be used with --new or --force: it continues a run" in ended.err


def test_update_finds_the_newest_complete_run_by_itself(shop: Workshop) -> None:
    run_cli(shop.folder, "run", "suite.yaml", "--no-progress")
    shop.suite("c0 c1 c2 c3 c4 c5 c6")
    shop.asked()
    assert run_cli(shop.folder, "run", "suite.yaml", "--no-progress", "--update").code == 0
    assert shop.asked() == ["c6"]
    assert len(list((shop.folder / "runs").iterdir())) == 1


# In Python


def go(run: Path, model: CountedModel, **more: Any) -> Any:
    return run_in(run, model, cases(4), entry=more)


def test_a_complete_run_is_refused_loaded_or_started_over(tmp_path: Path) -> None:
    run, model = tmp_path / "run", CountedModel()
    first = go(run, model)
    with pytest.raises(RunFinished, match=r'if_complete="update" asks and scores what changed since; force=True'):
        go(run, model, if_complete="error")
    before = contents(run)
    loaded = go(run, model, if_complete="load")
    assert len(model.called) == 4
    assert contents(run) == before
    assert loaded.metrics == first.metrics
    assert [record.id for record in loaded.responses] == [record.id for record in first.responses]
    assert go(run, model, if_complete="new").complete
    assert len(model.called) == 8
    assert len(list((run / "previous").glob("*/outputs.jsonl"))) == 1


def test_an_unfinished_run_is_resumed_whatever_is_to_be_done_about_a_complete_one(tmp_path: Path) -> None:
    for choice in ("error", "load", "update", "new"):
        run, model = tmp_path / choice, CountedModel()
        go(run, model)
        (run / "metrics.json").unlink()
        outputs = run / "outputs.jsonl"
        outputs.write_bytes(b"".join(outputs.read_bytes().splitlines(keepends=True)[:3]))
        assert go(run, model, if_complete=choice).complete
        assert len(model.called) == 5


def test_a_run_of_something_else_is_not_loaded(tmp_path: Path) -> None:
    go(tmp_path / "run", CountedModel())
    with pytest.raises(RunMismatch, match=r"use another output_path, or force=True to start over there"):
        run_in(tmp_path / "run", CountedModel(), cases(4), entry={"if_complete": "load"}, seed=5)


def test_a_word_that_is_none_of_the_four_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="if_complete must be one of 'error', 'load', 'update', 'new'"):
        go(tmp_path / "run", CountedModel(), if_complete="retry")
    assert not (tmp_path / "run").exists()


def test_a_load_run_is_loaded_or_started_over_but_not_updated(tmp_path: Path) -> None:
    suite = EvalSet("load", [EvalCase(id="a", prompt="?")])
    runner = Runner(lambda case: "x", suite, requests=3, progress="off", output_path=tmp_path / "run")
    first = runner.run_sync()
    assert runner.run_sync(if_complete="load").metrics == first.metrics
    with pytest.raises(RunRefused, match="is a load run"):
        runner.run_sync(if_complete="update")
    assert runner.run_sync(if_complete="new").complete
