"""What a connection to Ray sends along and refuses; no cluster is started here."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path
from typing import Any

import pytest

from steelyard import Runner
from steelyard.errors import ConfigurationError
from steelyard.targets import OpenAIChat
from tests.support.engine import make_suite

pytestmark = pytest.mark.ray

KEYS = (
    ".env", ".env.local", "prod.env", "server.pem", "tls.key", "id_rsa", "id_ed25519.pub", ".netrc", ".npmrc",
    ".pypirc", ".git-credentials", "credentials", "credentials.json", "gcp-credentials.json", "my-service-account.json",
    "secrets.yaml", "client_secret.json", "deploy/inner.pem", "deploy/.env", ".aws/config", ".ssh/known_hosts",
)  # fmt: skip
SENT = ("agent.py", "cases.jsonl", "suite.yaml", "words.txt", "prompts/keys.md", "environment.py", "tokenizer.json")


@pytest.mark.parametrize("mine", [{}, {"excludes": ["data/", "!.env"]}, {"working_dir": "suite"}])
def test_files_that_may_hold_keys_are_not_packed(tmp_path, mine) -> None:
    """By Ray's own packing, with the list that it is given."""
    from ray._private.runtime_env.packaging import create_package

    from steelyard.engine.ray.connect import RayConnection

    folder = tmp_path / "suite"
    for name in (*KEYS, *SENT):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("x")
    settings = RayConnection("10.0.0.5:6379", None if "working_dir" in mine else folder, mine)._settings()
    packed = tmp_path / "packed.zip"
    create_package(str(folder), packed, include_gitignore=True, excludes=settings["runtime_env"]["excludes"])
    names = {name for name in zipfile.ZipFile(packed).namelist() if not name.endswith("/")}
    assert {name.removeprefix("suite/") for name in names} == set(SENT)


@pytest.mark.parametrize(
    ("job", "ours"),
    [
        ({}, {"working_dir", "excludes", "env_vars"}),
        ({"working_dir": "gcs://_ray_pkg_1.zip"}, {"env_vars"}),
        ({"env_vars": {"KEY": "of the job"}}, {"working_dir", "excludes", "env_vars"}),
    ],
)
def test_what_a_job_brought_along_is_not_overridden(monkeypatch, tmp_path, job, ours) -> None:
    from ray.runtime_env.runtime_env import _merge_runtime_env

    from steelyard.engine.ray.connect import RayConnection

    monkeypatch.setenv("RAY_JOB_CONFIG_JSON_ENV_VAR", json.dumps({"runtime_env": job, "metadata": {}}))
    mine = {"env_vars": {"KEY": "of the engine", "OTHER": "1"}}
    sent = RayConnection("10.0.0.5:6379", tmp_path, mine)._settings()["runtime_env"]
    assert set(sent) == ours
    merged = _merge_runtime_env(job, sent)
    assert merged is not None  # None is a conflict: Ray would refuse to start
    assert merged["env_vars"]["OTHER"] == "1"
    assert merged["env_vars"]["KEY"] == (job.get("env_vars") or mine["env_vars"])["KEY"]


def test_a_key_in_the_suite_is_refused_before_anything_is_sent(monkeypatch) -> None:
    from steelyard.engine.ray.connect import RayConnection
    from steelyard.engine.ray.engine import RayEngine

    def opened(self: Any) -> None:
        raise AssertionError("connected, and sent the folder")

    monkeypatch.setattr(RayConnection, "open", opened)
    target = OpenAIChat("m", base_url="http://127.0.0.1:9/v1", api_key="sk-secret")
    runner = Runner(target, make_suite(3), engine=RayEngine("10.0.0.5:6379"), progress="off")
    with pytest.raises(ConfigurationError, match="api_key_env") as caught:
        runner.run_sync()
    assert "sk-secret" not in str(caught.value)


@pytest.mark.parametrize(("nodes", "refused"), [(["192.0.2.77"], True), (["192.0.2.77", "127.0.0.1"], False)])
def test_a_machine_that_is_no_node_is_refused(monkeypatch, nodes, refused) -> None:
    from steelyard.engine.ray import connect

    monkeypatch.setattr(connect, "_NODE_TABLE", f"print({json.dumps(nodes)!r})")
    if not refused:
        connect._check_is_node("10.0.0.5:6379")
        return
    with pytest.raises(ConfigurationError, match="run this on a node, or submit it as a job"):
        connect._check_is_node("10.0.0.5:6379")


def test_nodes_that_cannot_be_found_out_are_left_to_ray(monkeypatch) -> None:
    from steelyard.engine.ray import connect

    monkeypatch.setattr(connect, "_NODE_TABLE", "import os; os.abort()")
    connect._check_is_node("10.0.0.5:6379")


@pytest.mark.parametrize(
    ("words", "meaning"),
    [
        ("Worker exit type: NODE_OUT_OF_MEMORY Worker exit detail: ...", "ran out of memory"),
        ("The actor is dead because its node has died.", "its node is gone"),
        ("exits with a connection error code 2. End of file.", "killed (SIGKILL, perhaps for memory) or crashed"),
        ("something new", "RuntimeError: something new"),
    ],
)
def test_the_cause_of_a_death_is_said_in_a_line(words, meaning) -> None:
    from steelyard.engine.ray.engine import RayWorkerPool

    assert meaning in RayWorkerPool.why_lost(object.__new__(RayWorkerPool), RuntimeError(words))


def test_the_folder_of_a_suite_is_not_sent_to_a_cluster_on_this_machine(tmp_path) -> None:
    from steelyard.engine.ray.connect import RayConnection

    assert "runtime_env" not in RayConnection(None, Path(tmp_path))._settings()
