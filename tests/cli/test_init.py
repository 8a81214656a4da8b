"""`steelyard init`: what it writes runs at once, and what was there before is never lost."""

from __future__ import annotations

import json
import os
from importlib.resources import files
from pathlib import Path

import pytest
import yaml

from steelyard.run.config import build_suite
from steelyard.suite.suite_file import KEYS
from tests.support.cli import run_cli

FILES = {"suite.yaml", "cases.jsonl", ".github/workflows/evals.yml"}


def written(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def test_what_it_writes_runs_and_passes_its_gate(tmp_path: Path) -> None:
    started = run_cli(tmp_path, "init")
    assert started.code == 0
    assert written(tmp_path) == FILES
    commands = [line.split()[1:] for line in started.out.splitlines() if line.startswith("  steelyard")]
    assert [words[0] for words in commands] == ["run", "gate", "report"]
    for words in commands:
        ended = run_cli(tmp_path, *words)
        assert ended.code == 0, ended.err
    assert (tmp_path / "runs/first/report.html").is_file()
    metrics = json.loads((tmp_path / "runs/first/metrics.json").read_bytes())
    assert metrics["counts"]["error"] == 0
    assert 0.6 <= metrics["pass_rate"] < 1, "a starter shows what a failed case looks like"


def test_the_gate_can_be_missed(tmp_path: Path) -> None:
    run_cli(tmp_path, "init")
    suite = tmp_path / "suite.yaml"
    suite.write_text(suite.read_text().replace("accuracy: 0.85", "accuracy: 0.0"))
    assert run_cli(tmp_path, "run", "suite.yaml", "--out", "runs/bad", "--no-progress").code == 1
    ended = run_cli(tmp_path, "gate", "runs/bad")
    assert (ended.code, ended.out.splitlines()) == (1, ["pass_rate>=0.6: is 0"])


def test_the_workflow_runs_the_suite_and_holds_it_to_its_gate(tmp_path: Path) -> None:
    run_cli(tmp_path, "init")
    workflow = yaml.safe_load((tmp_path / ".github/workflows/evals.yml").read_text())
    (job,) = workflow["jobs"].values()
    commands = [step["run"].split() for step in job["steps"] if "run" in step]
    ours = [words[1:] for words in commands if words[0] == "steelyard"]
    assert [words[0] for words in ours] == ["run", "gate", "report"]
    for words in ours:
        assert run_cli(tmp_path, *words).code == 0
    assert (tmp_path / "runs/ci/gate.xml").is_file()
    (upload,) = [step for step in job["steps"] if "upload" in step.get("uses", "")]
    assert (tmp_path / upload["with"]["path"]).is_dir()


def test_the_endpoint_that_is_commented_out_is_one_that_can_be_built(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OPENAI_BASE_URL", raising=False)
    run_cli(tmp_path, "init")
    suite = tmp_path / "suite.yaml"
    lines = suite.read_text().splitlines()
    begins = lines.index("# target:")
    lines[begins : begins + 4] = [line.removeprefix("# ") for line in lines[begins : begins + 4]]
    suite.write_text("\n".join(line for line in lines if not line.startswith("target: {simulated")))
    built = build_suite(suite)
    assert built.target.identity()["kind"] == "openai-chat"
    assert built.target.model_id == "gpt-4.1-mini"


def test_the_suite_shows_the_keys_that_most_suites_need(tmp_path: Path) -> None:
    run_cli(tmp_path, "init")
    keys = set(yaml.safe_load((tmp_path / "suite.yaml").read_text()))
    assert keys == {"id", "target", "system_prompt", "cases", "scorers", "run", "gate"}
    assert keys < set(KEYS)


@pytest.mark.parametrize("name", sorted(FILES))
def test_a_file_that_is_there_is_not_touched(tmp_path: Path, name: str) -> None:
    mine = tmp_path / name
    mine.parent.mkdir(parents=True, exist_ok=True)
    mine.write_text("mine")
    ended = run_cli(tmp_path, "init")
    assert ended.code == 2
    assert f"already there: {name}; nothing was written" in ended.err
    assert written(tmp_path) == {name}
    assert mine.read_text() == "mine"


def test_a_link_that_leads_nowhere_is_not_written_through(tmp_path: Path) -> None:
    (tmp_path / "suite.yaml").symlink_to(tmp_path / "elsewhere")
    assert run_cli(tmp_path, "init").code == 2
    assert run_cli(tmp_path, "init", "--force").code == 0
    assert not (tmp_path / "elsewhere").exists()


def test_force_keeps_every_old_file(tmp_path: Path) -> None:
    for text in ("first", "second"):
        (tmp_path / "suite.yaml").write_text(text)
        ended = run_cli(tmp_path, "init", "--force")
        assert ended.code == 0
    assert "wrote suite.yaml, the old one is suite.yaml.bak2" in ended.out
    assert (tmp_path / "suite.yaml.bak").read_text() == "first"
    assert (tmp_path / "suite.yaml.bak2").read_text() == "second"
    assert (tmp_path / "cases.jsonl.bak").read_text() == (tmp_path / "cases.jsonl").read_text()


def test_another_folder_is_made_and_the_way_there_told(tmp_path: Path) -> None:
    ended = run_cli(tmp_path, "init", "my evals/new")
    assert ended.code == 0
    assert "  cd 'my evals/new'\n  steelyard run" in ended.out
    assert written(tmp_path / "my evals/new") == FILES


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_that_cannot_be_written_is_exit_2(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    ended = run_cli(tmp_path, "init")
    tmp_path.chmod(0o700)
    assert ended.code == 2
    assert "cannot write suite.yaml" in ended.err


def test_a_file_in_the_place_of_the_folder_is_exit_2(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("")
    ended = run_cli(tmp_path, "init", "taken")
    assert ended.code == 2
    assert "cannot make the folder taken" in ended.err


def test_the_files_name_nothing_that_an_installed_package_does_not_have() -> None:
    for file in files("steelyard").joinpath("starter").iterdir():
        assert "docs/" not in file.read_text(encoding="utf-8"), file.name
