"""Cases from JSON, YAML, Parquet and compressed files, other separators, data frames and Hugging Face datasets."""

from __future__ import annotations

import gzip
import json
import logging
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from steelyard import EvalSet
from steelyard.errors import SuiteError
from steelyard.suite.data_files import harbor_cases, swebench_cases
from steelyard.suite.suite_file import read_suite_file

ROWS = [
    {"id": "fr", "prompt": "Capital of France?", "expected": "Paris", "continent": "Europe"},
    {"id": "007", "prompt": "Capital of Kenya?", "expected": "Nairobi", "continent": "Africa"},
]
INSTANCE = {
    "instance_id": "acme__calc-1",
    "repo": "acme/calc",
    "base_commit": "abc",
    "problem_statement": "add subtracts",
    "patch": "the fix",
    "test_patch": "the tests",
    "FAIL_TO_PASS": '["test_calc.py::test_add"]',
    "PASS_TO_PASS": "[]",
    "version": "1.0",
}


def told(suite: EvalSet) -> list[tuple[Any, ...]]:
    return [(case.id, case.prompt, case.expected, case.metadata) for case in suite]


EXPECTED = [(row["id"], row["prompt"], row["expected"], {"continent": row["continent"]}) for row in ROWS]


def jsonl() -> bytes:
    return b"".join(json.dumps(row).encode() + b"\n" for row in ROWS)


def csv(separator: str = ",") -> bytes:
    lines = [list(ROWS[0]), *(list(row.values()) for row in ROWS)]
    return "".join(separator.join(line) + "\n" for line in lines).encode()


FILES = {
    "c.json": json.dumps(ROWS).encode(),
    "c.json.gz": gzip.compress(json.dumps(ROWS).encode()),
    "c.yaml": b"- {id: fr, prompt: 'Capital of France?', expected: Paris, continent: Europe}\n"
    b"- {id: 007, prompt: 'Capital of Kenya?', expected: Nairobi, continent: Africa}\n",
    "c.ndjson": jsonl(),
    "c.jsonl.gz": gzip.compress(jsonl()),
    "c.csv": csv(),
    "c.csv.gz": gzip.compress(csv()),
    "c.tsv": csv("\t"),
    "c.tsv.gz": gzip.compress(csv("\t")),
}


@pytest.mark.parametrize("name", FILES)
def test_every_kind_of_file_gives_the_same_cases(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(FILES[name])
    (tmp_path / "s.yaml").write_text(f"cases: {name}")
    suite = EvalSet.from_file(tmp_path / name)
    assert suite.id == "c"
    assert told(suite) == told(suite) == EXPECTED
    assert told(read_suite_file(tmp_path / "s.yaml").cases) == EXPECTED


def test_parquet_is_read_some_rows_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    parquet.write_table(arrow.Table.from_pylist(ROWS), tmp_path / "c.parquet")
    monkeypatch.setattr("steelyard.suite.data_files._ROWS", 1)
    assert told(EvalSet.from_file(tmp_path / "c.parquet")) == EXPECTED
    (tmp_path / "bad.parquet").write_bytes(b"PAR1 no")
    with pytest.raises(SuiteError, match=r"bad\.parquet: cannot be read as Parquet"):
        list(EvalSet.from_file(tmp_path / "bad.parquet"))


@pytest.mark.parametrize(("separator", "name"), [(";", "semicolons"), ("\t", "tabs")])
def test_another_separator_is_found_and_reported_once(
    tmp_path: Path, separator: str, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "c.csv").write_bytes(csv(separator))
    suite = EvalSet.from_csv(tmp_path / "c.csv")
    with caplog.at_level(logging.WARNING, logger="steelyard"):
        assert told(suite) == told(suite) == EXPECTED
    assert [record.getMessage().partition(": ")[2] for record in caplog.records] == [
        f"its cells are separated by {name}, as its header has no comma"
    ]


def test_a_comma_in_the_header_decides_and_a_single_column_is_fine(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text('prompt,"note; long"\nWhy; and how?,x\n')
    (tmp_path / "b.csv").write_text("prompt\nWhy, and how?\n".replace(",", ""))
    assert [case.prompt for case in EvalSet.from_csv(tmp_path / "a.csv")] == ["Why; and how?"]
    assert [case.prompt for case in EvalSet.from_csv(tmp_path / "b.csv")] == ["Why and how?"]


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        ("c.json", b'{"prompt": "a"}', r"c\.json: must be a list of objects, got an object"),
        ("c.json", b"[{", r"c\.json: is not valid JSON"),
        ("c.json", b'[{"prompt": "a"}, 7]', r"c\.json: row 2: a row must be an object, got a number"),
        ("c.json", b'[{"promt": "a"}]', "is 'promt' meant as 'prompt'"),
        ("c.yaml", b"- {prompt: a}\n- {}\n", r"c\.yaml:2: has neither prompt nor messages"),
        ("c.yaml", b"prompt: a", r"c\.yaml: must be a list of cases"),
        ("c.jsonl.gz", gzip.compress(jsonl(), mtime=0)[:-20], r"c\.jsonl\.gz: cannot be decompressed"),
        ("c.csv.gz", b"prompt\na\n", r"c\.csv\.gz: cannot be decompressed"),
    ],
)
def test_what_is_wrong_is_said_with_its_place(tmp_path: Path, name: str, content: bytes, problem: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(SuiteError, match=problem):
        list(EvalSet.from_file(tmp_path / name))


def test_an_unknown_ending_names_those_that_are_known(tmp_path: Path) -> None:
    (tmp_path / "s.yaml").write_text("cases: cases.xlsx")
    with pytest.raises(
        SuiteError, match=r"s\.yaml:1: cases must be a file whose name ends in \.jsonl.*got 'cases.xlsx'"
    ):
        read_suite_file(tmp_path / "s.yaml")


@pytest.mark.parametrize("kind", ["pandas", "polars", "pyarrow"])
def test_a_data_frame_is_a_suite(kind: str) -> None:
    library = pytest.importorskip(kind)
    rows = [*ROWS, {"id": "x", "prompt": "Why?", "expected": None, "continent": None}]
    frame = library.Table.from_pylist(rows) if kind == "pyarrow" else library.DataFrame(rows)
    suite = EvalSet("capitals", frame)
    assert told(suite) == told(suite) == [*EXPECTED, ("x", "Why?", None, {})]
    mapped = EvalSet("capitals", frame, fields={"prompt": "{{ continent or 'nowhere' }}: {{ prompt }}"})
    assert [case.prompt for case in mapped][::2] == ["Europe: Capital of France?", "nowhere: Why?"]


def test_numbers_of_a_frame_become_pythons_own() -> None:
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame({"prompt": ["a", "b"], "level": [1, 2], "share": [0.5, float("nan")]})
    assert [case.metadata for case in EvalSet("s", frame)] == [{"level": 1, "share": 0.5}, {"level": 2}]


def test_an_iterable_of_dictionaries_takes_fields() -> None:
    rows = [{"q": "2+2?", "a": 4}, {"q": "1+1?", "a": 2}]
    suite = EvalSet("sums", rows, fields={"prompt": "{{ q }}", "expected": "{{ a }}"})
    assert [(case.prompt, case.expected) for case in suite] == [("2+2?", 4), ("1+1?", 2)]
    once = EvalSet("sums", iter(rows), fields={"prompt": "{{ q }}"})
    assert once.one_shot
    assert [case.metadata for case in once] == [{"a": 4}, {"a": 2}]


class TestHuggingFace:
    @pytest.fixture
    def saved(self, tmp_path: Path) -> Path:
        datasets = pytest.importorskip("datasets")
        picture = {"bytes": b"\x89PNG\r\n\x1a\n picture", "path": None}
        data = datasets.Dataset.from_list(
            [{**row, "image": picture} for row in ROWS],
            features=datasets.Features(
                {**{name: datasets.Value("string") for name in ROWS[0]}, "image": datasets.Image(decode=True)}
            ),
        )
        datasets.DatasetDict({"test": data, "train": data.select([0])}).save_to_disk(str(tmp_path / "all"))
        data.remove_columns("image").save_to_disk(str(tmp_path / "one"))
        return tmp_path

    def cases(self, folder: Path, about: str, more: str = "") -> EvalSet:
        (folder / "s.yaml").write_text(f"cases: {{hf: {about}}}\n{more}")
        return read_suite_file(folder / "s.yaml").cases

    def test_a_dataset_saved_to_disk_is_a_suite(self, saved: Path) -> None:
        suite = self.cases(saved, "{path: one}")
        assert told(suite) == told(suite) == EXPECTED

    def test_a_split_is_chosen_and_its_images_can_be_attached(self, saved: Path) -> None:
        suite = self.cases(saved, "{path: all, split: test}", 'fields: {attachments: "{{ image }}"}')
        assert [case.id for case in suite] == ["fr", "007"]
        assert [(one.media_type, one.size) for case in suite for one in case.attachments] == [("image/png", 16)] * 2
        assert len(list(self.cases(saved, "{path: all, split: train}", 'fields: {attachments: "{{ image }}"}'))) == 1

    @pytest.mark.parametrize(
        ("about", "problem"),
        [
            ("{path: all}", "no split is given; there are: test, train"),
            ("{path: all, split: dev}", "there is no split 'dev'; there are: test, train"),
            ("{split: test}", "needs a path"),
            ("{path: one, spilt: test}", "unknown key cases.hf.spilt"),
            ("{path: 3}", "cases.hf.path must be text"),
        ],
    )
    def test_what_is_wrong_is_said(self, saved: Path, about: str, problem: str) -> None:
        with pytest.raises(SuiteError, match=problem):
            list(self.cases(saved, about))

    def test_a_dataset_that_is_not_there_is_named(self, saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("HF_HUB_OFFLINE", "1")
        with pytest.raises(SuiteError, match=r"the dataset '\./nothing' cannot be loaded"):
            list(self.cases(saved, "{path: ./nothing}"))


def git(repository: Path, *words: str) -> str:
    command = ["git", "-c", "user.name=a", "-c", "user.email=a@b", *words]
    return subprocess.run(command, cwd=repository, check=True, capture_output=True, text=True).stdout


def test_a_swe_bench_line_becomes_a_case_that_hides_patch_and_tests(tmp_path: Path) -> None:
    path = tmp_path / "tasks.jsonl"
    path.write_text(json.dumps(INSTANCE) + "\n\n")
    (case,) = swebench_cases(path)
    assert case["id"] == "acme__calc-1"
    assert case["prompt"] == "add subtracts"
    assert case["metadata"] == {
        "repo": "acme/calc",
        "base_commit": "abc",
        "version": "1.0",
        "repository": "acme__calc",
    }
    assert case["expected"]["FAIL_TO_PASS"] == ["test_calc.py::test_add"]
    assert case["expected"]["PASS_TO_PASS"] == []


@pytest.mark.parametrize(
    ("line", "message"),
    [("{", "not JSON"), ("[]", "must be an object"), (json.dumps({**INSTANCE, "repo": None}), "needs repo, got None")],
)
def test_a_bad_line_is_named(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "tasks.jsonl"
    path.write_text(json.dumps(INSTANCE) + "\n" + line + "\n")
    with pytest.raises(SuiteError, match=message) as error:
        list(swebench_cases(path))
    assert error.value.line == 2


@pytest.fixture
def swebench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A suite over a local clone with a bug, its fix as the reference patch and its test as the hidden one."""
    monkeypatch.setenv("STEELYARD_WORK", str(tmp_path / "work"))
    repository = tmp_path / "repos/acme__calc"
    repository.mkdir(parents=True)
    git(repository, "init", "-q", "-b", "main")
    (repository / "calc.py").write_text("def add(a, b):\n    return a - b\n")
    (repository / "test_calc.py").write_text("from calc import add\n\n\ndef test_zero():\n    assert add(1, 0) == 1\n")
    git(repository, "add", ".")
    git(repository, "commit", "-q", "-m", "base")
    base = git(repository, "rev-parse", "HEAD").strip()
    (repository / "calc.py").write_text("def add(a, b):\n    return a + b\n")
    fix = git(repository, "diff")
    git(repository, "checkout", "-q", ".")
    with open(repository / "test_calc.py", "a") as file:
        file.write("\n\ndef test_add():\n    assert add(1, 2) == 3\n")
    tests = git(repository, "diff")
    git(repository, "checkout", "-q", ".")
    instance = {**INSTANCE, "base_commit": base, "patch": fix, "test_patch": tests}
    instance["PASS_TO_PASS"] = '["test_calc.py::test_zero"]'
    (tmp_path / "tasks.jsonl").write_text(json.dumps(instance) + "\n")
    (tmp_path / "agent.py").write_text(
        "from pathlib import Path\nPath('test_calc.py').write_text('broken(')\n"
        "Path('calc.py').write_text('def add(a, b):\\n    return b + a\\n')\nprint('done')\n"
    )
    (tmp_path / "suite.yaml").write_text(
        """
id: swe
target: {agent: {argv: [python3, "{{ suite }}/agent.py"]}}
cases: {swebench: tasks.jsonl}
workspace: {from: {git: "repos/{{ metadata.repository }}", ref: "{{ metadata.base_commit }}"}}
solution: {patch: "{{ expected.patch }}"}
scorers:
  - tests:
      argv: [pytest, -q, -p, no:cacheprovider, --junitxml=r.xml]
      junit: r.xml
      patch: "{{ expected.test_patch }}"
      fail_to_pass: "{{ expected.FAIL_TO_PASS }}"
      pass_to_pass: "{{ expected.PASS_TO_PASS }}"
"""
    )
    return tmp_path


@pytest.mark.slow
def test_swe_bench_tasks_are_checked_and_run_onto_local_clones(swebench: Path) -> None:
    for words in (["check", "suite.yaml"], ["run", "suite.yaml", "--out", "run"]):
        command = [sys.executable, "-m", "steelyard", *words]
        done = subprocess.run(command, cwd=swebench, capture_output=True, text=True, timeout=100)
        assert done.returncode == 0, done.stdout + done.stderr
        assert ("1 of 1 task sound" if words[0] == "check" else "100.0%") in done.stdout


def harbor_task(folder: Path, name: str, toml: str = "[agent]\ntimeout_sec = 90.0\n") -> Path:
    place = folder / name
    (place / "tests").mkdir(parents=True)
    (place / "task.toml").write_text(toml)
    (place / "instruction.md").write_text(f"Do {name}.\n")
    return place


def test_task_folders_become_cases_with_their_time_limit(tmp_path: Path) -> None:
    harbor_task(tmp_path / "tasks", "b", '[metadata]\ndifficulty = "hard"\n')
    harbor_task(tmp_path / "tasks", "a")
    (tmp_path / "suite.yaml").write_text("id: h\ncases: {harbor: tasks}\n")
    first, second = read_suite_file(tmp_path / "suite.yaml").cases
    assert (first.id, first.prompt) == ("a", "Do a.\n")
    assert first.limits is not None
    assert first.limits.time == 90.0
    assert second.metadata == {"difficulty": "hard", "task": "b"}


def test_tasks_that_need_a_container_are_refused_by_name(tmp_path: Path) -> None:
    harbor_task(tmp_path, "plain")
    (harbor_task(tmp_path, "boxed") / "environment").mkdir()
    (tmp_path / "boxed/environment/Dockerfile").write_text("FROM scratch\n")
    harbor_task(tmp_path, "image", '[environment]\ndocker_image = "x"\n')
    with pytest.raises(SuiteError, match=r"2 of 3 tasks need a container.*: boxed, image"):
        list(harbor_cases(tmp_path))
    assert [case["id"] for case in harbor_cases(tmp_path, skip_containers=True)] == ["plain"]


def test_an_unknown_format_is_refused(tmp_path: Path) -> None:
    (tmp_path / "suite.yaml").write_text("id: h\ncases: {harbour: tasks}\n")
    with pytest.raises(SuiteError, match="cases"):
        read_suite_file(tmp_path / "suite.yaml")
