"""What the docs say is run: their Python, their suite files and their commands; and their lists are complete.

How a block is run: `tests.support.docs`.
"""

from __future__ import annotations

import inspect
import itertools
import json
import os
import re
import shlex
import shutil
import sys
import tomllib
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import click
import pytest
import yaml

import steelyard.scoring.text
from steelyard import EvalCase, EvalSet, Record, Runner, RunOptions
from steelyard.cli.group import group
from steelyard.run.config import RUN_KEYS, Gate
from steelyard.run.schema import suite_schema
from steelyard.suite.suite_file import KEYS
from steelyard.targets import AnthropicMessages, CallableTarget, Command, OpenAIChat, OpenAIResponses, Simulated
from tests.support.cli import run_cli
from tests.support.docs import (
    EXIT_CODES,
    INSTEAD,
    NOT_ASKED,
    NOT_RUN,
    SECOND_TIME,
    Reader,
    blocks,
    page_text,
)
from tests.support.mock import running_mock
from tests.support.paths import DOCS, ROOT
from tests.support.ray import cluster_of_nodes

PAGES = sorted(path.name for path in DOCS.glob("*.md"))
README = "../README.md"
CONTRIBUTING = "../CONTRIBUTING.md"
ALL = [*PAGES, README, CONTRIBUTING, "../CHANGELOG.md", "../SECURITY.md"]
FRESH = ("cookbook.md", "labels.md", "quickstart.md", "runs.md")
"""Pages that are read in a new folder the second time too. In the old one their commands would do something else: a
suite has another target or address by then, and there are more labels and more lines of a file."""
VIEW = ("starlette", "uvicorn")
NEEDED = {
    "cookbook.md": ("openai",),
    "hooks.md": ("mlflow",),
    "import.md": ("zstandard",),
    "integrations.md": ("mlflow", "opentelemetry.sdk"),
    "matrix.md": VIEW,
    "ray.md": ("ray",),
    "results.md": ("pandas",),
    "runs.md": ("pandas",),
    "view.md": VIEW,
    README: VIEW,
}
SUITE = ("suite.yaml", "cases.jsonl")
RUN = (*SUITE, "runs")
STAGE: dict[str, tuple[str, ...]] = {
    "agents.md": ("fixtures",),
    "calibration.md": RUN,
    "cancellation.md": SUITE,
    "cookbook.md": RUN,
    "costs.md": SUITE,
    "import.md": ("logs",),
    "integrations.md": RUN,
    "judges.md": RUN,
    "limits.md": SUITE,
    "load.md": SUITE,
    "matrix.md": SUITE,
    "ray.md": SUITE,
    "results.md": RUN,
    "suites.md": ("scans", "terms.pdf", "voice.wav"),
    "view.md": (*RUN, "sweeps"),
    "workers.md": SUITE,
    README: ("capitals.jsonl",),
}
"""What must be there before a page is read. `suite.yaml` and `runs/first` are those of the quick start."""
MODEL: dict[str, dict[str, Any]] = {
    "cancellation.md": {"slow_first_rate": 0.5, "slow_first": "100s", "slots": None},
    "quickstart.md": {"right_rate": 1.0},
    README: {"right_rate": 1.0},
}
"""What the simulated model of a page does in another way: for a gate, and for Ctrl-C before all answers have come."""

_LINK = re.compile(r"\]\(([^)\s]+)\)")


@pytest.fixture(scope="session")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of somebody who has read the quick start and then added an endpoint and a judge; the files that
    fragments of suites name; and programs that readers would have installed."""
    place = tmp_path_factory.mktemp("stage")
    capitals = {"France": "Paris", "Norway": "Oslo", "Peru": "Lima", "Kenya": "Nairobi", "Japan": "Tokyo"}
    cases = [{"id": name, "prompt": f"Capital of {name}?", "expected": capital} for name, capital in capitals.items()]
    (place / "capitals.jsonl").write_text("".join(json.dumps(case) + "\n" for case in cases))
    assert run_cli(place, "init").code == 0
    (place / "answers.jsonl").write_text(
        "".join((place / f"{name}.jsonl").read_text() for name in ("cases", "capitals"))
    )
    verdict = {"x-mock": 'answer={"score": 0.2%2C "reason": "not what was asked"}'}
    judge = {"model": "my-judge", "target": {"openai-chat": {"model": "my-judge", "headers": verdict}}}
    suite = {
        **yaml.safe_load((place / "suite.yaml").read_text()),
        "target": {"openai-chat": {"model": "my-model"}},
        "scorers": ["exact", {"judge": {**judge, "prompt": "correctness_v1", "when": "failed"}}],
        "gate": {"rules": ["ttft_p50<1min"], "allow": ["uncalibrated-judge"]},
    }
    (place / "suite.yaml").write_text(yaml.safe_dump(suite))
    for file in ("fixtures/hello/README.md", "scans/receipt.png", "terms.pdf", "voice.wav"):
        (place / file).parent.mkdir(parents=True, exist_ok=True)
        (place / file).write_text("hello")
    (place / "logs").mkdir()
    log = ROOT / "tests" / "integrations" / "logs" / "inspect_capitals.eval"
    shutil.copy(log, place / "logs" / "2026-11-18_capitals.eval")
    (place / "programs").mkdir()
    for name in ("aider", "az", "claude", "codex", "gcloud", "gemini", "goose", "mini", "opencode", "openhands"):
        (place / "programs" / name).write_text("#!/bin/sh\necho done\n")
        (place / "programs" / name).chmod(0o755)
    with simulated_model(place) as model, pytest.MonkeyPatch.context() as patch:
        set_environment(patch, place, model)
        assert run_cli(place, "run", "suite.yaml", "--out", "runs/first", "--no-progress").code == 0
        assert run_cli(place, "sweep", "suite.yaml", "-j", "1,2", "-n", "4", "-o", "sweeps/gpt", "-q").code == 0
    return place


@contextmanager
def simulated_model(stage: Path, **options: Any) -> Iterator[str]:
    """The host and port of a model that answers one question in four wrong."""
    options = {"answers": stage / "answers.jsonl", "right_rate": 0.75, "latency": "5ms", "slots": 8, **options}
    with running_mock(**options) as mock:
        yield urlsplit(mock.url).netloc


def set_environment(patch: pytest.MonkeyPatch, place: Path, model: str, keys: Iterable[str] = ()) -> None:
    """An environment in which the simulated model is every provider, and everything is written below `place`."""
    for name, path in (("OPENAI", "/v1"), ("ANTHROPIC", ""), ("GEMINI", "")):
        patch.setenv(f"{name}_BASE_URL", f"http://{model}{path}")
    for name in {"OPENAI_API_KEY", *keys}:
        patch.setenv(name, "any")
    patch.setenv("STEELYARD_WORK", str(place / "work"))
    patch.setenv("MLFLOW_TRACKING_URI", f"file:{place / 'mlruns'}")
    patch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")


@pytest.fixture
def place(tmp_path: Path, stage: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder to run a page in; what its suites import is forgotten afterwards."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    programs = [str(stage / "programs"), str(Path(sys.executable).parent), os.environ["PATH"]]
    monkeypatch.setenv("PATH", os.pathsep.join(programs))
    monkeypatch.delenv("PYTHONDONTWRITEBYTECODE", raising=False)  # a page starts Python many times
    monkeypatch.setenv("PYTHONPYCACHEPREFIX", str(stage / "bytecode"))
    yield tmp_path
    for name, module in list(sys.modules.items()):
        if str(getattr(module, "__file__", None) or "").startswith(str(tmp_path)):
            del sys.modules[name]


def set_up(folder: Path, stage: Path, names: Iterable[str]) -> None:
    """A new folder with these files and folders of the stage."""
    folder.mkdir()
    for name in names:
        (shutil.copytree if (stage / name).is_dir() else shutil.copy)(stage / name, folder / name)


def page_param(page: str) -> Any:
    return pytest.param(page, marks=[pytest.mark.ray] if page == "ray.md" else [])


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("page", [page_param(page) for page in (*PAGES, README)])
def test_the_examples_of_a_page_do_what_it_says(
    page: str, place: Path, stage: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Twice: readers start a script again, or a cell of a notebook, and repeat commands in the same folder."""
    for package in NEEDED.get(page, ()):
        pytest.importorskip(package)
    with ExitStack() as stack:
        model = stack.enter_context(simulated_model(stage, **MODEL.get(page, {})))
        set_environment(monkeypatch, place, model, re.findall(r"\b[A-Z_]+_(?:API_KEY|BEDROCK)\b", page_text(page)))
        cluster = stack.enter_context(cluster_of_nodes(1)).address if page == "ray.md" else ""
        for folder in (place / "one", place / ("two" if page in FRESH else "one")):
            again = folder.exists()
            if not again:
                set_up(folder, stage, STAGE.get(page, ()))
            monkeypatch.chdir(folder)
            with Reader(model, {"10.0.0.5:6379": cluster, "localhost:4318": model}, again=again) as reader:
                reader.read(blocks(page))


def commands_of_jobs(workflow: str) -> Iterator[str]:
    """What the jobs of a workflow of GitHub or GitLab run."""
    document = yaml.safe_load(workflow)
    for job in document.get("jobs", document).values():
        yield from job.get("script", ())
        yield from (step["run"] for step in job.get("steps", ()) if "run" in step)


WORKFLOWS = [
    pytest.param(page, block.text, id=page)
    for page in PAGES
    for block in blocks(page)
    if block.file is not None and re.match(r"\.github/workflows/|\.gitlab-ci\.yml", block.file)
]


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize(("page", "workflow"), WORKFLOWS)
def test_the_commands_of_a_workflow_pass(
    page: str, workflow: str, place: Path, stage: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Twice, each time in a new folder, as in CI. With 200 cases: a margin of 2 points needs 183."""
    cases = [{"id": f"n{number}", "prompt": f"Say {number}.", "expected": str(number)} for number in range(200)]
    (place / "answers.jsonl").write_text("".join(json.dumps(case) + "\n" for case in cases))
    with simulated_model(place, right_rate=1.0) as model:
        set_environment(monkeypatch, place, model)
        for folder in (place / "one", place / "two"):
            set_up(folder, stage, SUITE)
            shutil.copy(place / "answers.jsonl", folder / "cases.jsonl")
            monkeypatch.chdir(folder)
            with Reader(model, {}) as reader:
                for command in ("steelyard run suite.yaml --out runs/main", *commands_of_jobs(workflow)):
                    reader.do(command)


def test_the_example_in_contributing_passes_its_test() -> None:
    scorer, test = (block.text for block in blocks(CONTRIBUTING) if block.language == "python")
    for _ in range(2):
        names = {**vars(steelyard.scoring.text), "pytest": pytest}
        exec(scorer, names)
        exec(test, names)
        passes = names["test_an_answer_that_starts_with_the_expected_text_passes"]
        (mark,) = passes.pytestmark
        assert len(mark.args[1]) == 3
        for arguments in mark.args[1]:
            passes(*arguments)


def test_the_entry_points_of_the_page_are_those_of_the_example() -> None:
    (block,) = (block for block in blocks("plugins.md") if block.language == "toml")
    example = tomllib.loads((ROOT / "examples" / "plugin" / "pyproject.toml").read_text())["project"]["entry-points"]
    for kind, names in tomllib.loads(block.text)["project"]["entry-points"].items():
        assert names.items() <= example[kind].items()


@pytest.mark.parametrize("page", ALL)
def test_every_block_of_a_page_is_run_or_there_is_a_reason(page: str) -> None:
    for block in blocks(page):
        if block.language == "text":
            assert not re.search(r"^\$ ", block.text, flags=re.M), "commands are in a `console` block, which is run"
        elif block.file is None and block.is_run:
            assert block.language in ("console", "sh", "python", "yaml"), block.text


def test_each_exception_is_about_something_that_there_is() -> None:
    found = [block for page in ALL for block in blocks(page)]
    text = "".join(block.text for block in found)
    assert [said for said in (*NOT_ASKED, *INSTEAD, *SECOND_TIME, *EXIT_CODES) if said not in text] == []
    commands = [command for block in found for command, _ in block.commands()]
    commands += [command for workflow in WORKFLOWS for command in commands_of_jobs(workflow.values[1])]
    run = (*commands, *(block.text for block in found))
    assert [said for said in NOT_RUN if not any(one.startswith(said) for one in run)] == []


@pytest.mark.parametrize("page", ALL)
def test_the_links_of_a_page_lead_somewhere(page: str) -> None:
    for link in _LINK.findall(page_text(page)):
        if "://" in link:
            continue
        file, _, anchor = link.partition("#")
        target = (DOCS / page).parent / file if file else DOCS / page
        assert target.is_file(), link
        if anchor:
            assert anchor in anchors(target.read_text(encoding="utf-8")), link


@pytest.mark.parametrize("page", ALL)
def test_every_block_of_a_page_names_its_language_and_is_closed(page: str) -> None:
    """One that lost its first line would be shown as text, and not run."""
    assert not re.search(r"^[ \t]+```", page_text(page), flags=re.M), "an indented block is not found"
    fences = re.findall(r"^```(\w*)$", page_text(page), flags=re.M)
    assert all(fences[::2]), "a block that begins without a language, or is closed but never opened"
    assert not any(fences[1::2]), "a block inside another"
    assert len(fences) % 2 == 0, "a block that is not closed"


def anchors(text: str) -> set[str]:
    """The headings as GitHub turns them into anchors, and the anchors that are written out."""
    headings = re.findall(r"^#+ (.+)$", text, flags=re.M)
    written = set(re.findall(r'^<a id="([^"]+)"></a>$', text, flags=re.M))
    return written | {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_the_index_links_every_page() -> None:
    linked = {link.partition("#")[0] for link in _LINK.findall(page_text("index.md"))}
    assert linked == set(PAGES) - {"index.md"}


def assert_all_named(names: Iterator[str] | list[str] | tuple[str, ...], page: str) -> None:
    """Every name stands in the page as code: alone, or in code that holds more."""
    code = " ".join(re.findall(r"`([^`\n]+)`", page_text(page)))
    missing = [name for name in names if not re.search(rf"(?<![\w-]){re.escape(name)}(?![\w-])", code)]
    assert not missing, f"{page} does not tell of {missing}"


def test_suites_tells_of_every_key_of_a_suite_file() -> None:
    assert_all_named([*KEYS, *RUN_KEYS, *Gate.__struct_fields__], "suites.md")


def test_suites_tells_of_every_field_of_a_case() -> None:
    assert_all_named(EvalCase.__struct_fields__, "suites.md")


@pytest.mark.parametrize("kind", [AnthropicMessages, CallableTarget, Command, OpenAIChat, OpenAIResponses, Simulated])
def test_targets_tells_of_every_argument_of_a_target(kind: type) -> None:
    arguments = [name for name in inspect.signature(kind).parameters if name != "function"]
    assert_all_named(arguments, "targets.md")


def test_runs_tells_of_every_field_of_a_record() -> None:
    assert_all_named(Record.__struct_fields__, "runs.md")


def test_runs_lists_as_always_there_exactly_the_fields_of_the_shortest_record(tmp_path: Path) -> None:
    runner = Runner(lambda case: None, EvalSet("one", [{"prompt": "?"}]), output_path=tmp_path, progress="off")
    runner.run_sync()
    line = yaml.safe_load((tmp_path / "outputs.jsonl").read_text(encoding="utf-8"))
    section = page_text("runs.md").partition("## A record")[2].partition("These are there only")[0]
    listed = {
        name for row in re.findall(r"^\| (`.+?`) \|", section, flags=re.M) for name in re.findall(r"`(\w+)`", row)
    }
    assert listed == set(line) - {"error_type"}


def test_statistics_tells_of_every_field_of_the_metrics() -> None:
    metrics = Runner(lambda case: "x", EvalSet("one", [{"prompt": "?"}]), ["exact"], progress="off").run_sync().metrics
    metrics_of_a_score = ("n", "mean", "mean_ci95", "passed", "pass_rate", "pass_rate_ci95", "errors")
    counters = [name for name in metrics["stats"] if "-" not in name]
    measured = {name.partition("-")[0] for name in metrics["stats"] if "-" in name}
    endings = sorted({name.partition("-")[2] for name in metrics["stats"] if "-" in name})
    assert_all_named([*metrics, *metrics["counts"], *metrics_of_a_score, *counters, *measured], "statistics.md")
    assert all(f"-{ending}`" in page_text("statistics.md") for ending in endings)


def test_the_docs_tell_of_every_command_and_flag() -> None:
    """Beside docs/cli.md, which is made from the commands themselves and so tells of all."""
    text = "".join(page_text(page) for page in PAGES if page != "cli.md")
    missing = []
    for name, command in commands(group):
        missing += [] if f"steelyard {name}" in text else [name]
        for parameter in command.params:
            if isinstance(parameter, click.Option):
                # The long spelling: `-o` and its like stand on every page, for something.
                flag = max(parameter.opts, key=len)
                found = re.search(rf"(?<![\w-]){re.escape(flag)}(?![\w-])", text)
                missing += [] if found else [f"{name}: {flag}"]
    assert missing == []


def commands(of: click.Group, before: str = "") -> Iterator[tuple[str, click.Command]]:
    """Each command with the words that call it, those within others too."""
    context = click.Context(of)
    for name in of.list_commands(context):
        command = of.get_command(context, name)
        assert command is not None
        if isinstance(command, click.Group):
            yield from commands(command, f"{before}{name} ")
        else:
            yield f"{before}{name}", command


def test_the_docs_tell_of_every_option_of_a_run() -> None:
    text = "".join(page_text(page) for page in PAGES if page != "cli.md")
    assert [name for name in RunOptions.__struct_fields__ if not re.search(rf"\b{name}\b", text)] == []


def test_architecture_names_every_folder_of_the_package_and_keeps_its_glossary_short() -> None:
    folders = [path.parent.name for path in (ROOT / "src" / "steelyard").glob("*/__init__.py")]
    assert_all_named(folders, "architecture.md")
    glossary = page_text("architecture.md").partition("## Glossary")[2]
    assert 1 <= len(re.findall(r"^\| ", glossary, flags=re.M)) - 1 <= 25


def shell_commands(page: str) -> Iterator[list[str]]:
    """The words of each call of steelyard in a page's blocks for a shell."""
    for command, _ in (command for block in blocks(page) for command in block.commands()):
        lexer = shlex.shlex(command, posix=True, punctuation_chars=True)
        lexer.wordchars += "{}$%!:=,.@+[]"
        for ends, part in itertools.groupby(lexer, key=lambda word: bool(re.fullmatch(r"[|&;()]+", word))):
            called = [word for word in part if not re.fullmatch(r"[A-Z_]+=.*", word)]
            redirected = next((at for at, word in enumerate(called) if word[0] in "<>"), len(called))
            if not ends and called[:1] == ["steelyard"] and redirected > 1:
                yield called[1:redirected]


@pytest.mark.parametrize("page", [*PAGES, README, CONTRIBUTING])
def test_every_command_of_a_page_has_flags_and_arguments_that_there_are(page: str) -> None:
    for words in shell_commands(page):
        command: click.Command = group
        rest = words
        while isinstance(command, click.Group) and rest and not rest[0].startswith("-"):
            _, found, rest = command.resolve_command(click.Context(command), rest)
            assert found is not None
            command = found
        try:
            command.make_context("steelyard", list(rest), **group.context_settings)  # commands keep what it makes
        except click.exceptions.Exit:  # --help, --version
            pass
        except click.UsageError as error:
            pytest.fail(f"steelyard {' '.join(words)}: {error.format_message()}")


_PUBLIC = re.compile(r"steelyard(\.(targets|scoring|cache|load|report|mock|integrations\.\w+))?")
_IMPORT = re.compile(r"(?:from|import) (steelyard[\w.]*)")


@pytest.mark.parametrize("page", [*PAGES, README])
def test_a_page_imports_from_documented_packages_only(page: str) -> None:
    """Modules inside a package may move: only packages are promised."""
    named = _IMPORT.findall(page_text(page))
    assert [module for module in named if not _PUBLIC.fullmatch(module)] == []


def test_the_readme_has_no_gaps_left_to_fill_in() -> None:
    readme = (ROOT / "README.md").read_text()
    assert not re.findall(r"\b(?:DEMO|TEST|BENCH|LOW)_[A-Z]+\b|\bTODO\b", readme)


def test_each_promise_against_a_fault_names_tests_that_are_there() -> None:
    table = page_text("runs.md").partition("### Against which fault")[2].partition("\n## ")[0]
    rows = [line for line in table.splitlines() if line.startswith("| ")][1:]
    assert len(rows) > 10
    for row in rows:
        named = re.findall(r"`(tests/[\w/]+\.py)`", row.split("|")[3])
        assert named, row
        for file in named:
            assert (DOCS.parent / file).is_file(), file


def test_troubleshooting_quotes_messages_that_there_are() -> None:
    source = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "src").rglob("*.py"))
    for heading in re.findall(r"^### (.+)$", page_text("troubleshooting.md"), flags=re.M):
        for quoted in re.findall(r'"([^"]+)"', heading):
            for part in filter(None, (piece.strip(" ,") for piece in quoted.split("…"))):
                assert part in source, part


def test_the_complete_suite_file_has_every_key_and_keeps_the_schema() -> None:
    jsonschema = pytest.importorskip("jsonschema")
    (block,) = [block for block in blocks("suite-file.md") if block.language == "yaml"]
    suite = yaml.safe_load(block.text)
    assert set(suite) == set(KEYS)
    assert set(suite["run"]) == set(RUN_KEYS)
    assert set(suite["gate"]) == set(Gate.__struct_fields__)
    errors = jsonschema.Draft202012Validator(suite_schema()).iter_errors(suite)
    assert [error.message for error in errors] == []
