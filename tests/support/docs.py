"""The blocks of a page, and a reader who works through them in a folder.

A block after `<!-- file: NAME -->` is written to that file, a YAML block after `<!-- in: FILE -->` replaces its keys
in that file, and any other YAML block is laid over a small suite, which must then run to its end, well or badly.
Python blocks of a page share one namespace; an expression before `# → VALUE` must have that value, and a text block
right after a Python block is what that prints. In a console block the lines after `$ command` are its output, where
`…` stands for anything and `^C` for Ctrl-C; a command of an `sh` block must end well.
"""

from __future__ import annotations

import ast
import contextlib
import io
import os
import re
import shlex
import shutil
import signal
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import yaml

from steelyard.run.config import build_suite
from tests.support.cli import run_cli, wait_until
from tests.support.paths import DOCS

NOT_RUN = {
    "pip install": "Steelyard and its extras are installed already",
    "make ": "the checkout's own commands, which run these tests",
    "vllm serve": "a mock is there in its place",
    "ray job submit": "needs the dashboard of a cluster",
    "id=$(gh run list": "asks GitHub for the run of main, which is there already",
    "-- duckdb": "duckdb is no dependency",
    '[project.entry-points."steelyard.targets"]': "a package's own file: compared with that of examples/plugin",
}
"""How a command or a block that is not run begins, and why it is not."""

NOT_ASKED = {
    "run: {parallelism: 2000, engine: ray": "would join any cluster of this machine; the page's commands name one",
    "cases: {hf:": "is on a hub",
    "cases: {swebench:": "is a file of patches, for clones of repositories",
    'target:\n  agent:\n    argv: [python3, "{{ suite }}/agent.py"': "needs bwrap and a cgroup: see tests/workspace",
}
"""How a fragment of a suite begins that is built, but not run, and why."""

INSTEAD = {
    "--duration 60s": "--duration 1s",
    "--duration 10m": "--duration 1s",
    "--requests 5000": "--requests 500",
    "--arrivals poisson:5/s,10/s,20/s": "-n 10 --arrivals poisson:50/s,100/s,200/s",
    "sweep suite.yaml -j auto": "sweep suite.yaml -n 10 -j auto",
    "-j 1,8,32,64,128": "-n 20 -j 1,8,32",
    "pytest --steelyard -n 4": "pytest --steelyard -n 2",
    "workers 16": "workers 2",
    "workers=16": "workers=2",
    "workers 4": "workers 2",
    "run suite.yaml --max-cost": "run suite.yaml --set prices='{input: 1, output: 1}' --max-cost",
}
"""What a page says, and what is run in its place: the same for less long or in fewer processes; and with prices, as the
public list knows none of a model on this machine."""

SECOND_TIME = {
    "steelyard run": " is complete (",
    "steelyard score": " is complete (",
    "steelyard sweep": " holds a finished sweep",
    "steelyard import": " holds a run already",
    "--audit": " already exists and may have labels",
    "git -C shop": "nothing to commit",
}
"""How commands that make something are refused when it is there already."""

EXIT_CODES = {"steelyard calibrate": 1}
"""How commands of `sh` blocks end if not with 0: a few labels do not yet show that a judge can be trusted."""

NOT_ON_EVERY_MACHINE = ("jq",)
LOCAL_MODEL = "localhost:8000"
"""Where the pages have a model on this machine."""

_BLOCK = re.compile(
    r"(?:<!-- (?P<marker>file|in): (?P<file>\S+) -->\n)?^```(?P<language>\w+)\n(?P<text>.*?)^```$", re.M | re.S
)
_SERVES = re.compile(r"steelyard (?:mock|view)\b")
_STARTS_AGAIN = re.compile(r"--(?:force|update|retry-errors|dry-run|duration|requests|arrivals)\b")


class Block(NamedTuple):
    """A fenced block of a page."""

    language: str
    marker: str | None
    file: str | None
    text: str
    follows: bool
    """Nothing is between it and the block before."""

    @property
    def is_run(self) -> bool:
        """Whether it is; of a block for a shell, each command may not be."""
        return self.language in ("sh", "console") or not begins_with(self.text, NOT_RUN)

    def commands(self) -> Iterator[tuple[str, str | None]]:
        """Each command of a block for a shell, and what it prints where the page shows that."""
        if self.language == "console":
            for part in re.split(r"^\$ ", self.text, flags=re.M)[1:]:
                command, _, said = part.partition("\n")
                yield command, said.rstrip()
        elif self.language == "sh":
            for line in self.text.replace("\\\n", " ").splitlines():
                if line.strip():
                    yield line, None


def page_text(page: str) -> str:
    return (DOCS / page).read_text(encoding="utf-8")


def blocks(page: str) -> list[Block]:
    text, found, end = page_text(page), [], 0
    for one in _BLOCK.finditer(text):
        follows = not text[end : one.start()].strip()
        found.append(Block(one["language"], one["marker"], one["file"], one["text"], follows))
        end = one.end()
    return found


def begins_with(text: str, listed: Mapping[str, object]) -> bool:
    return text.startswith(tuple(listed))


class Reader:
    """Somebody who works through a page in the current folder, for the first time or again.

    The second time a command that makes something must be refused, and everything else do again what the page says.
    """

    def __init__(self, model: str, stand_ins: Mapping[str, str], *, again: bool = False) -> None:
        """`model` is the host and port of a simulated model; `stand_ins` are put in the place of what a page says."""
        self._place = Path.cwd()
        self._model = model
        self._stand_ins = {**INSTEAD, **stand_ins, LOCAL_MODEL: model}
        self._again = again
        self._environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
        self._environment["PYTHONUTF8"] = "1"
        self._names: dict[str, Any] = {"__name__": "docs_page"}
        self._printed: str | None = None
        self._fragments = 0
        self._servers: list[subprocess.Popen[str]] = []

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """End the servers that commands have started, with exit code 0."""
        for server in self._servers:
            server.terminate()
        for server in self._servers:
            server.communicate(timeout=30)
        assert error is not None or not any(server.returncode for server in self._servers)

    def read(self, page: list[Block]) -> None:
        for block in page:
            if block.is_run:
                self._take(block._replace(text=self._staged(block.text)))

    def _staged(self, text: str) -> str:
        for said, instead in self._stand_ins.items():
            text = text.replace(said, instead)
        return text

    def _take(self, block: Block) -> None:
        printed, self._printed = self._printed, None
        if block.file is not None:
            self._write(self._place / block.file, block)
        elif block.language == "python":
            self._printed = run_python(block.text, self._names)
        elif block.language == "text":
            assert not block.follows or printed in (None, block.text), f"{printed}\n--- the page says\n{block.text}"
        elif block.language == "yaml":
            self._run_fragment(block.text)
        else:
            for command, said in block.commands():
                self.do(command, said)

    def _write(self, file: Path, block: Block) -> None:
        file.parent.mkdir(parents=True, exist_ok=True)
        text = block.text
        if block.marker == "in":
            text = yaml.safe_dump({**yaml.safe_load(file.read_text(encoding="utf-8")), **yaml.safe_load(text)})
        file.write_text(text, encoding="utf-8")

    def do(self, command: str, said: str | None = None) -> None:
        """Run a command: `said` is what it must print; without it, it must end well."""
        program = command.split(maxsplit=1)[0]
        if begins_with(command, NOT_RUN) or (program in NOT_ON_EVERY_MACHINE and shutil.which(program) is None):
            return
        if program == "export":
            name, _, value = shlex.split(command)[1].partition("=")
            self._environment[name] = value
        elif _SERVES.match(command):
            self._serve(command)
        elif said is not None and said.startswith("^C"):
            _assert_said(command, self._interrupted(command), said.removeprefix("^C"))
        else:
            complete = self._again and self._names_a_complete_run(command)
            code, got = self._run(command)
            shown = f"$ {command}\n{got}"
            if self._again and any(part in command and message in got for part, message in SECOND_TIME.items()):
                assert (code or int(got.split()[-1])) == (2 if "steelyard" in command else 1), shown
                return
            assert not complete, f"not refused: {shown}"
            if said is not None:
                _assert_said(command, got, said)
            else:
                assert code == next((code for part, code in EXIT_CODES.items() if part in command), 0), shown

    def _run(self, command: str) -> tuple[int, str]:
        """How it ends and what it prints on both streams. When it asks for labels, it gets pass and fail in turn."""
        ended = subprocess.run(
            ["sh", "-c", command],
            cwd=self._place,
            env=self._environment,
            input="p\nf\n" * 20,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            encoding="utf-8",
            timeout=200,
            check=False,
        )
        return ended.returncode, ended.stdout

    def _start(self, command: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            ["sh", "-c", f"exec {command}"],
            cwd=self._place,
            env=self._environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            encoding="utf-8",
        )

    def _serve(self, command: str) -> None:
        """Start a server that is there until the page is read, and wait until it listens, on a free port."""
        server = self._start(re.sub(r" --port \d+", "", command).partition("#")[0] + " 2>/dev/null")
        self._servers.append(server)
        assert server.stdout is not None
        address = server.stdout.readline().strip()
        assert address.startswith("http://127.0.0.1:"), f"$ {command}\n{address}"
        if "steelyard mock" in command:
            self._stand_ins[LOCAL_MODEL] = urlsplit(address).netloc

    def _interrupted(self, command: str) -> str:
        """What a run prints that gets Ctrl-C as soon as it has an answer; the second time it says that it resumes."""
        outputs = self._place / _out(command) / "outputs.jsonl"
        before = outputs.stat().st_size if outputs.exists() else 0
        with self._start(command) as started:
            wait_until(lambda: outputs.exists() and outputs.stat().st_size > before)
            started.send_signal(signal.SIGINT)
            got = started.communicate(timeout=60)[0]
        return re.sub(r"^steelyard: resuming .*\n", "", got) if self._again else got

    def _names_a_complete_run(self, command: str) -> bool:
        out = _out(command)
        return bool(out) and not _STARTS_AGAIN.search(command) and (self._place / out / "metrics.json").exists()

    def _run_fragment(self, text: str) -> None:
        """Run a suite with these keys; its endpoint, wherever it is, is the simulated model."""
        self._fragments += 1
        suite = {"cases": [{"id": "hello", "prompt": "hello"}], **yaml.safe_load(text)}
        if "targets" not in suite:
            suite.setdefault("target", "simulated")
        (self._place / "fragment.yaml").write_text(yaml.safe_dump(suite), encoding="utf-8")
        if begins_with(text, NOT_ASKED):
            build_suite(self._place / "fragment.yaml")
            return
        endpoint = []
        if {*suite.get("target", ())} & {"openai-chat", "openai-responses", "openai-completions"}:
            endpoint = ["--base-url", f"http://{self._model}/v1"]
        elif {*suite.get("target", ())} & {"anthropic-messages", "gemini", "bedrock"}:
            endpoint = ["--base-url", f"http://{self._model}"]
        out = f"fragments/{self._fragments}"
        ended = run_cli(self._place, "run", "fragment.yaml", "--out", out, "--force", "--no-progress", *endpoint)
        assert ended.code in ((0,) if endpoint else (0, 1, 4)), f"{text}\n{ended.err}"


def _out(command: str) -> str:
    """The directory that a run is written to, where the command says that."""
    found = re.search(r"steelyard run .*(?:--out|-o) (\S+)", command)
    return found[1] if found else ""


def run_python(text: str, names: dict[str, Any]) -> str:
    """What it prints; an expression before `# → VALUE` has that value."""
    lines = text.splitlines()
    with contextlib.redirect_stdout(io.StringIO()) as out:
        for statement in ast.parse(text).body:
            code = ast.unparse(statement)
            _, arrow, said = lines[(statement.end_lineno or 1) - 1].partition("# → ")
            if isinstance(statement, ast.Expr) and arrow:
                assert repr(eval(code, names)) == said.strip(), code
            else:
                assert not arrow, f"only an expression can have a value: {code}"
                exec(compile(ast.Module([statement], []), "<docs>", "exec"), names)
    return out.getvalue()


def _assert_said(command: str, got: str, said: str) -> None:
    pattern = re.escape(said.rstrip()).replace("…", ".*")
    assert re.fullmatch(pattern, got.rstrip(), flags=re.S), f"$ {command}\n{got}\n--- the page says\n{said}"
