"""What the docs say is run: their Python, their suite files and their commands, and their lists are complete.

A block after `<!-- file: NAME -->` is written to that file. Python blocks of a page share one namespace, and an
expression before `# → VALUE` must have that value. In a console block the lines after `$ command` are its output,
where `…` stands for anything. A YAML block that is no file is laid over a small suite, which must then build.
"""

from __future__ import annotations

import ast
import inspect
import itertools
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import click
import pytest
import yaml

from steelyard import EvalCase, EvalSet, Record, Runner, RunOptions
from steelyard.cli.group import group
from steelyard.run.config import RUN_KEYS, Gate, build_suite
from steelyard.run.schema import suite_schema
from steelyard.suite.suite_file import KEYS
from steelyard.targets import AnthropicMessages, CallableTarget, Command, OpenAIChat, OpenAIResponses, Simulated
from tests.support.mock import running_mock

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = sorted(path.name for path in DOCS.glob("*.md"))
NOT_ON_EVERY_MACHINE = ("jq",)
ONCE = ("runs.md",)
"""Pages whose commands damage a run on purpose: what Python reads of it afterwards is told of the first time alone."""
NEEDED = {"integrations.md": ("mlflow", "opentelemetry.sdk"), "results.md": ("pandas",), "cookbook.md": ("openai",)}

_BLOCK = re.compile(r"(?:<!-- file: (?P<file>\S+) -->\n)?^```(?P<language>\w+)\n(?P<text>.*?)^```$", re.M | re.S)
_LINK = re.compile(r"\]\(([^)\s]+)\)")


class Block(NamedTuple):
    """A fenced block of a page."""

    language: str
    file: str | None
    text: str


def page_text(page: str) -> str:
    return (DOCS / page).read_text(encoding="utf-8")


def blocks(page: str) -> list[Block]:
    return [Block(found["language"], found["file"], found["text"]) for found in _BLOCK.finditer(page_text(page))]


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder to run a page in; what its suites import is forgotten afterwards."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield tmp_path
    for name, module in list(sys.modules.items()):
        if str(getattr(module, "__file__", None) or "").startswith(str(tmp_path)):
            del sys.modules[name]


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES)
def test_the_examples_of_a_page_do_what_it_says(page: str, place: Path) -> None:
    for package in NEEDED.get(page, ()):
        pytest.importorskip(package)
    names: dict[str, Any] = {"__name__": "docs_" + page.removesuffix(".md")}
    found = blocks(page)
    passes = (False,) if page in ONCE else (False, True)
    for block, again in ((block, again) for again in passes for block in found):
        if again and block.language == "console":
            continue  # it names the folder that it writes to: a second time, a complete run is refused on purpose
        if block.file is not None:
            (place / block.file).parent.mkdir(parents=True, exist_ok=True)
            (place / block.file).write_text(block.text, encoding="utf-8")
        elif block.language == "python":
            run_python(block.text, names)
        elif block.language == "console":
            run_console(block.text)
        elif block.language == "yaml":
            build_fragment(block.text, place)


def run_python(text: str, names: dict[str, Any]) -> None:
    lines = text.splitlines()
    for statement in ast.parse(text).body:
        code = ast.unparse(statement)
        _, arrow, said = lines[(statement.end_lineno or 1) - 1].partition("# → ")
        if isinstance(statement, ast.Expr) and arrow:
            assert repr(eval(code, names)) == said.strip(), code
        else:
            assert not arrow, f"only an expression can have a value: {code}"
            exec(compile(ast.Module([statement], []), "<docs>", "exec"), names)


def run_console(text: str) -> None:
    for part in re.split(r"^\$ ", text, flags=re.M)[1:]:
        command, _, said = part.partition("\n")
        program = command.split()[0]
        if program in NOT_ON_EVERY_MACHINE and shutil.which(program) is None:
            continue
        got = run_command(command)
        pattern = re.escape(said.rstrip()).replace("…", ".*")
        assert re.fullmatch(pattern, got.rstrip(), flags=re.S), f"$ {command}\n{got}\n--- the page says\n{said}"


def run_command(command: str) -> str:
    """What a command prints, with this environment's programs first; both streams, as on a terminal."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    ended = subprocess.run(
        ["sh", "-c", command],
        env={**os.environ, "PATH": path, "PYTHONUTF8": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=60,
        check=False,
    )
    return ended.stdout.decode("utf-8")


def build_fragment(text: str, place: Path) -> None:
    suite = {"target": "simulated", "cases": [{"prompt": "hello"}], **yaml.safe_load(text)}
    path = place / "fragment.yaml"
    path.write_text(yaml.safe_dump(suite), encoding="utf-8")
    built = build_suite(path)
    Runner(built.target, built.suite, built.scorers, options=RunOptions().replace(**built.options))


@pytest.mark.parametrize("page", [*PAGES, "../CHANGELOG.md", "../CONTRIBUTING.md", "../README.md", "../SECURITY.md"])
def test_the_links_of_a_page_lead_somewhere(page: str) -> None:
    for link in _LINK.findall(page_text(page)):
        if "://" in link:
            continue
        file, _, anchor = link.partition("#")
        target = (DOCS / page).parent / file if file else DOCS / page
        assert target.is_file(), link
        if anchor:
            assert anchor in anchors(target.read_text(encoding="utf-8")), link


@pytest.mark.parametrize("page", [*PAGES, "../CHANGELOG.md", "../CONTRIBUTING.md", "../README.md", "../SECURITY.md"])
def test_every_block_of_a_page_names_its_language_and_is_closed(page: str) -> None:
    """One that lost its first line would be shown as text, and not run."""
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


def test_the_first_example_of_the_readme_prints_what_it_says(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    found = re.search(r"^```python\n(.*?)^```\n\n^```text\n(.*?)^```", text, re.M | re.S)
    assert found is not None
    for _ in range(2):  # as a script that is started again, or a cell of a notebook
        exec(compile(found[1], "README.md", "exec"), {"__name__": "readme"})
        assert capsys.readouterr().out == found[2]
    assert (place / "runs" / "capitals" / "metrics.json").is_file()


@pytest.mark.slow
def test_the_suite_of_the_readme_runs_and_keeps_its_gate(place: Path) -> None:
    text = page_text("../README.md")
    (suite,) = re.findall(r"^```yaml\n(# capitals\.yaml.*?)^```", text, re.M | re.S)
    (shell,) = re.findall(r"^```sh\n(steelyard run.*?)^```", text, re.M | re.S)
    capitals = {"France": "Paris", "Norway": "Oslo", "Peru": "Lima", "Kenya": "Nairobi", "Japan": "Tokyo"}
    cases = [{"id": name, "prompt": f"Capital of {name}?", "expected": capital} for name, capital in capitals.items()]
    (place / "capitals.jsonl").write_text("\n".join(map(json.dumps, cases)))
    with running_mock(answers="capitals.jsonl") as mock:
        assert "http://localhost:8000/v1" in suite
        (place / "capitals.yaml").write_text(suite.replace("http://localhost:8000/v1", mock.base_url))
        run, matrix, gate = (
            next(line for line in shell.splitlines() if line.startswith(start)).partition("#")[0]
            for start in ("steelyard run capitals.yaml --out", "steelyard run capitals.yaml -m", "steelyard gate")
        )
        assert re.search(r"passed +100\.0%", run_command(run))
        assert "complete" in run_command(run)  # a second time it is refused: nothing is paid for again
        assert mock.stats()["requests"] == 3 * len(cases)
        for _ in range(2):
            assert "b  0.0 points" in run_command(matrix)
            assert run_command(f"{gate} && echo kept").endswith("kept\n")


def shell_commands(page: str) -> Iterator[list[str]]:
    """The words of each call of steelyard in a page's blocks for a shell."""
    for text in re.findall(r"^```(?:sh|console)\n(.*?)^```", page_text(page), re.M | re.S):
        for line in text.replace("\\\n", " ").splitlines():
            lexer = shlex.shlex(line.removeprefix("$ "), posix=True, punctuation_chars=True)
            lexer.wordchars += "{}$%!:=,.@+[]"
            try:
                words = list(lexer)
            except ValueError:  # what a command prints may have one quote
                continue
            for ends, part in itertools.groupby(words, key=lambda word: bool(re.fullmatch(r"[|&;()]+", word))):
                called = [word for word in part if not re.fullmatch(r"[A-Z_]+=.*", word)]
                redirected = next((at for at, word in enumerate(called) if word[0] in "<>"), len(called))
                if not ends and called[:1] == ["steelyard"] and redirected > 1:
                    yield called[1:redirected]


@pytest.mark.parametrize("page", [*PAGES, "../README.md", "../CONTRIBUTING.md"])
def test_every_command_of_a_page_has_flags_and_arguments_that_there_are(page: str) -> None:
    for words in shell_commands(page):
        command: click.Command = group
        rest = words
        while isinstance(command, click.Group) and rest and not rest[0].startswith("-"):
            _, found, rest = command.resolve_command(click.Context(command), rest)
            assert found is not None
            command = found
        try:
            command.make_context("steelyard", list(rest))
        except click.exceptions.Exit:  # --help, --version
            pass
        except click.UsageError as error:
            pytest.fail(f"steelyard {' '.join(words)}: {error.format_message()}")


_PUBLIC = re.compile(r"steelyard(\.(targets|scoring|cache|load|report|mock|integrations\.\w+))?")
_IMPORT = re.compile(r"(?:from|import) (steelyard[\w.]*)")


@pytest.mark.parametrize("page", [*PAGES, "../README.md"])
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
