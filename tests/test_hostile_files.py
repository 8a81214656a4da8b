"""Files that are not what they seem: links, pipes, caches that are none, aliases and templates that grow."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from steelyard import EvalCase, EvalSet, Runner
from steelyard.case_templates import CaseTemplate
from steelyard.errors import ConfigurationError, JournalError, SuiteError
from steelyard.journal.lock import is_locked
from steelyard.suite.suite_file import read_suite_file
from steelyard.view.runs import Suites
from tests.support.cli import run_cli

CASES = EvalSet(id="s", cases=[EvalCase(id="a", prompt="?", expected="yes")])
FILES = (
    "run.json", "outputs.jsonl", "outputs.idx", "metrics.json", "partial.json", "answers.jsonl", "cases.jsonl", ".lock",
    "sweep.json", "sweep.partial.json", "processes.jsonl",
)  # fmt: skip


def answer(case: EvalCase) -> str:
    return "yes"


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("runs") / "x"
    Runner(answer, CASES, ["exact"], progress="off").run_sync(output_path=run)
    return run


def test_a_lock_that_is_a_link_is_refused_and_its_target_left_alone(tmp_path: Path) -> None:
    precious = tmp_path / "precious.txt"
    precious.write_text("do not touch")
    run = tmp_path / "run"
    run.mkdir()
    (run / ".lock").symlink_to(precious)
    with pytest.raises(JournalError, match=r"\.lock is a symbolic link, which is not followed: remove it"):
        Runner(answer, CASES, progress="off").run_sync(output_path=run)
    assert precious.read_text() == "do not touch"
    assert is_locked(run) is None


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", FILES)
def test_a_pipe_in_a_run_folder_hangs_no_reader(finished: Path, name: str, tmp_path: Path) -> None:
    folder = tmp_path / "runs"
    shutil.copytree(finished, folder / "x")
    (folder / "x" / name).unlink(missing_ok=True)
    os.mkfifo(folder / "x" / name)
    assert run_cli(tmp_path, "ls", "runs").code == 0
    for words in (("report", "runs/x"), ("report", "runs/x", "-f", "csv"), ("compare", "runs/x", "runs/x")):
        ended = run_cli(tmp_path, *words)
        assert ended.code in (0, 2, 3), ended.err
        assert "Traceback" not in ended.err


@pytest.mark.parametrize("words", [(), ("--dry-run",)])
def test_a_database_that_is_none_is_refused_before_any_call(tmp_path: Path, words: tuple[str, ...]) -> None:
    (tmp_path / "suite.yaml").write_text("target: simulated\ncases: [{id: a, prompt: hi}]\n")
    (tmp_path / "cache.db").write_text("this is not a database, but a text of some length " * 50)
    ended = run_cli(tmp_path, "run", "suite.yaml", "--out", "run", "--cache", "cache.db", *words)
    assert ended.code == 2
    assert "Traceback" not in ended.err
    assert "cache.db" in ended.err


def test_a_database_on_a_full_disk_is_refused_without_a_traceback(tmp_path: Path) -> None:
    (tmp_path / "suite.yaml").write_text("target: simulated\ncases: [{id: a, prompt: hi}]\n")
    (tmp_path / "cache.db").symlink_to("/dev/full")
    ended = run_cli(tmp_path, "run", "suite.yaml", "--out", "run", "--cache", "cache.db")
    assert ended.code == 2
    assert "Traceback" not in ended.err
    assert "the cache cannot be opened" in ended.err
    assert "--no-cache" in ended.err


BOMB = "a: &a0 [x,x,x,x,x,x,x,x,x,x]\n" + "".join(
    f"b{n}: &a{n} [{','.join([f'*a{n - 1}'] * 10)}]\n" for n in range(1, 12)
)
MERGED = "a: &a0 {k: [1,2,3,4,5,6,7,8,9]}\n" + "".join(
    f"b{n}: &a{n} {{{', '.join(f'x{m}: *a{n - 1}' for m in range(10))}}}\n" for n in range(1, 12)
)


@pytest.mark.parametrize("text", [BOMB, MERGED, "a: &a [1, *a]\n", "a: &a {b: *a}\n"])
def test_aliases_that_would_fill_the_memory_are_refused(text: str, tmp_path: Path) -> None:
    suite = tmp_path / "suite.yaml"
    suite.write_text(text + "target: simulated\ncases: [{prompt: hi}]\n")
    with pytest.raises(SuiteError, match="alias"):
        read_suite_file(suite)


def test_ordinary_aliases_are_read(tmp_path: Path) -> None:
    suite = tmp_path / "suite.yaml"
    tools = "[{name: f, parameters: {type: object, properties: {x: {type: string}}}}]"
    shared = f"  - {{id: first, prompt: hi, tools: &tools {tools}}}\n"
    more = "".join(f"  - {{id: c{n}, prompt: hi, tools: *tools}}\n" for n in range(300))
    suite.write_text(f"target: simulated\ncases:\n{shared}{more}")
    assert len(list(read_suite_file(suite).cases)) == 301


GROWING = [
    "{{ 'a' * 10 ** 9 }}",
    "{{ 10 ** 9 * 'a' }}",
    "{{ [0] * 1000000000 }}",
    "{{ 10 ** (10 ** 10) }}",
    "{{ 'a'.ljust(1000000000) }}",
    "{{ 'a'.center(10 ** 9) }}",
    "{{ 'a' | center(1000000000) }}",
    "{{ '%1000000000d' % 1 }}",
    "{{ '{:1000000000}'.format(1) }}",
    "{{ '%*d' % (1000000000, 1) }}",
    "{{ 'a\nb' | indent(1000000000) }}",
    "{{ ('a' * 1000000).replace('a', 'b' * 1000000) }}",
]


@pytest.mark.parametrize("source", GROWING)
def test_a_template_cannot_fill_the_memory(source: str) -> None:
    with pytest.raises(ConfigurationError, match="at most 10,000,000 characters or items"):
        CaseTemplate(source, "argv[0]").render(EvalCase(id="a"))


@pytest.mark.parametrize("source", GROWING[:3])
def test_a_template_of_a_field_or_a_prompt_cannot_either(source: str, tmp_path: Path) -> None:
    (tmp_path / "cases.jsonl").write_text('{"q": "hi"}\n')
    suite = EvalSet.from_jsonl(tmp_path / "cases.jsonl", fields={"prompt": source})
    with pytest.raises(SuiteError, match="at most 10,000,000"):
        list(suite)


@pytest.mark.parametrize(
    ("source", "filled"),
    [
        ("{{ '-' * 20 }}", "-" * 20),
        ("{{ 2 ** 10 }} {{ 3 * 4 }} {{ 7 % 4 }} {{ 1 + 2 }}", "1024 12 3 3"),
        ("{{ '%05.1f' % 3.14159 }}", "003.1"),
        ("{{ 'a' | center(5) }}|{{ 'x'.ljust(3) }}|", "  a  |x  |"),
        ("{{ ['a', 'b'] | join(', ') }} {{ {'k': 1} | tojson }}", 'a, b {"k": 1}'),
        ("{{ 'a-b' | replace('-', '+') }} {{ prompt.upper() }}", "a+b HI"),
    ],
)
def test_ordinary_templates_work(source: str, filled: str) -> None:
    assert CaseTemplate(source, "argv[0]").render(EvalCase(id="a", prompt="hi")) == filled


def test_view_reads_no_cases_outside_its_folders(tmp_path: Path) -> None:
    outside = tmp_path / "outside.jsonl"
    outside.write_text('{"id": "a", "prompt": "secret"}\n')
    inside = tmp_path / "project"
    inside.mkdir()
    (inside / "suite.yaml").write_text("id: s\ntarget: simulated\ncases: ../outside.jsonl\n")
    run_cli(inside, "run", "suite.yaml", "--out", "run")
    from steelyard.journal.manifest import read_manifest

    manifest = read_manifest(inside / "run")
    assert manifest is not None
    manifest.suite_file = str(inside / "suite.yaml")
    suite, note = Suites(inside).open(inside / "run", manifest)
    assert suite is None
    assert note is not None
    assert "outside the folders" in note
    suite, _ = Suites(tmp_path).open(inside / "run", manifest)
    assert suite is not None


def test_scoring_again_runs_no_code_that_only_the_run_names(tmp_path: Path) -> None:
    (tmp_path / "suite.yaml").write_text(
        "id: s\ntarget: simulated\nscorers: [exact]\ncases: [{id: a, prompt: hi, expected: x}]\n"
    )
    assert run_cli(tmp_path, "run", "suite.yaml", "--out", "run").code == 0
    manifest = json.loads((tmp_path / "run" / "run.json").read_text())
    (tmp_path / "evil.py").write_text("open('was_run', 'w')\n")
    (tmp_path / "run" / "evil.yaml").write_text("target: {python: 'evil.py:f'}\ncases: [{id: a, prompt: hi}]\n")
    for named, said in (("evil.py", "which is Python code"), ("run/evil.yaml", "in the run directory itself")):
        (tmp_path / "run" / "run.json").write_text(json.dumps({**manifest, "suite_file": named}))
        ended = run_cli(tmp_path, "score", "run", "--out", "again")
        assert ended.code == 2
        assert said in ended.err
        assert f"--suite {named}" in ended.err
    assert not (tmp_path / "was_run").exists()
    assert run_cli(tmp_path, "score", "run", "--suite", "suite.yaml", "--out", "again").code == 0


@pytest.mark.parametrize("place", ["s3://bucket/x", "gs://bucket/x", "file:///tmp/x", "https://host/x", "hdfs:///x"])
def test_a_url_is_no_run_directory(place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for given in (place, Path(place)):
        with pytest.raises(ConfigurationError, match="must be a folder on this machine, got the URL"):
            Runner(answer, CASES, progress="off").run_sync(output_path=given)
    (tmp_path / "suite.yaml").write_text("target: simulated\ncases: [{id: a, prompt: hi}]\n")
    for command in ("run", "sweep"):
        ended = run_cli(tmp_path, command, "suite.yaml", "--out", place, "-j", "1")
        assert ended.code == 2
        assert "copy that when the run has ended" in ended.err
    assert [path.name for path in tmp_path.iterdir()] == ["suite.yaml"]
