"""The tools that are compared, and an environment for each."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ADAPTERS = Path(__file__).parent / "adapters"
INSTALL_SECONDS = 1_800


@dataclass(frozen=True)
class Tool:
    """A peer: what to install for it, and what should be known when its figures are read."""

    name: str
    adapter: str
    package: str
    needs: tuple[str, ...] = ()
    npm: tuple[str, ...] = ()
    """What it needs of npm's packages; their commands stand beside those of Python's."""
    note: str = ""
    first_token: bool = True
    most_requests: int | None = None
    """For a tool that takes ever longer for each request the more there are."""

    @property
    def script(self) -> Path:
        return ADAPTERS / f"with_{self.adapter}.py"

    @property
    def is_ours(self) -> bool:
        return not (self.needs or self.npm)


TOOLS = (
    Tool(
        "Steelyard", "steelyard", "steelyard", note="journal, statistics and the `exact` scorer on; resumes by itself"
    ),
    Tool(
        "bare aiohttp loop",
        "aiohttp",
        "aiohttp",
        note="the yardstick of `make bench`: uvloop, orjson, no retries, no statistics; compares each answer; lines "
        "wait in a buffer, and where that ends is chance",
    ),
    Tool(
        "openai SDK + semaphore",
        "openai",
        "openai",
        needs=("openai",),
        note="a short script that flushes a line for each answer; scores nothing",
    ),
    Tool(
        "LLMeter",
        "llmeter",
        "llmeter",
        needs=("llmeter[openai]", "httpx"),
        note="threads over the openai SDK; `httpx` is installed beside it, which it imports and today's SDK no longer "
        "brings; scores nothing",
    ),
    Tool(
        "Inspect",
        "inspect",
        "inspect_ai",
        needs=("inspect-ai", "openai"),
        note="logs a transcript of every sample and scores it (`exact`); over the openai SDK",
        first_token=False,
    ),
    Tool(
        "GuideLLM",
        "guidellm",
        "guidellm",
        needs=("guidellm",),
        note="worker processes; scores nothing; takes token counts from the server",
    ),
    Tool(
        "AIPerf",
        "aiperf",
        "aiperf",
        needs=("aiperf",),
        note="many processes; scores nothing; counts tokens itself, here with a tokenizer of whole words made on the "
        "spot, where it would fetch one from a hub; after the kill with `--export-level raw`, without which it writes "
        "no answers",
    ),
    Tool(
        "Pydantic Evals",
        "pydantic_evals",
        "pydantic-evals",
        needs=("pydantic-evals", "openai"),
        note="its task asks with the openai SDK; compares each answer (`EqualsExpected`); keeps everything in memory",
        first_token=False,
    ),
    Tool(
        "promptfoo",
        "promptfoo",
        "promptfoo",
        npm=("promptfoo",),
        note="runs on node; keeps a database and a cache of answers and compares each answer (`equals`); telemetry and "
        "the look for updates are off",
        first_token=False,
    ),
    Tool(
        "DeepEval",
        "deepeval",
        "deepeval",
        needs=("deepeval", "openai"),
        note="its task asks with the openai SDK; traces each and compares the answers (`ExactMatchMetric`) after the "
        "last, where each takes the longer the more there are, so that it gets only 500; telemetry is off",
        first_token=False,
        most_requests=500,
    ),
    Tool(
        "lm-eval",
        "lm_eval",
        "lm_eval",
        needs=("lm-eval[api]",),
        note="makes all requests before the first is sent and compares the answers (`exact_match`) after the last, so "
        "that of its work only the sending is in its requests/s; after the kill with `--use_cache`, without which it "
        "writes no answers before the end; the hub of datasets is off",
        first_token=False,
    ),
    Tool(
        "EvalScope",
        "evalscope",
        "evalscope",
        needs=("evalscope[perf]",),
        note="its `perf` command; scores nothing; takes token counts from the server; commits to its database every "
        "1,000 requests, and the kill comes before",
    ),
)


@dataclass
class Installed:
    """Where a tool can be started, and which versions it came in."""

    python: Path
    versions: dict[str, str]


class InstallFailed(Exception):
    """A tool could not be installed; says why."""


def install(tool: Tool, scratch: Path) -> Installed:
    """An environment with this tool in it; one that is there already is kept."""
    if tool.is_ours:
        return Installed(Path(sys.executable), versions(Path(sys.executable), tool))
    folder = scratch / "environments" / tool.adapter
    python, ready = folder / "bin" / "python", folder / "ready"
    wanted = "\n".join((*tool.needs, *tool.npm))
    if not (ready.exists() and ready.read_text() == wanted):
        quietly([sys.executable, "-m", "venv", "--clear", folder])
        if tool.needs:
            quietly([installer(scratch), "pip", "install", "--python", python, *tool.needs])
        if tool.npm:
            quietly(["npm", "install", "--global", "--prefix", folder, *tool.npm])
        ready.write_text(wanted)
    return Installed(python, versions(python, tool))


def installer(scratch: Path) -> Path:
    """uv, in its own environment: pip takes an hour over the dependencies of some of these."""
    folder = scratch / "environments" / "installer"
    uv = folder / "bin" / "uv"
    if not uv.exists():
        quietly([sys.executable, "-m", "venv", "--clear", folder])
        quietly([folder / "bin" / "python", "-m", "pip", "install", "--quiet", "uv"])
    return uv


def quietly(command: list[str | Path]) -> None:
    environment = os.environ | {"SSL_CERT_FILE": os.environ.get("PIP_CERT", os.environ.get("SSL_CERT_FILE", ""))}
    if not environment["SSL_CERT_FILE"]:
        del environment["SSL_CERT_FILE"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=INSTALL_SECONDS, env=environment)
    except subprocess.TimeoutExpired as error:
        raise InstallFailed(f"not installed within {INSTALL_SECONDS} s") from error
    except FileNotFoundError as error:
        raise InstallFailed(f"{command[0]} is not there") from error
    if done.returncode:
        raise InstallFailed((done.stderr.strip().splitlines() or ["failed without a word"])[-1])


def versions(python: Path, tool: Tool) -> dict[str, str]:
    """The versions of the tool and of what it asks with, where that is the openai SDK or node."""
    if tool.npm:
        package = json.loads((python.parents[1] / "lib" / "node_modules" / tool.package / "package.json").read_text())
        return {tool.package: package["version"], "node": told_by(["node", "--version"]).strip().removeprefix("v")}
    names = [tool.package] + (["openai"] if any("openai" in one for one in tool.needs) else [])
    code = f"import json, importlib.metadata as m; print(json.dumps({{n: m.version(n) for n in {names!r}}}))"
    told: dict[str, str] = json.loads(told_by([python, "-c", code]))
    return told


def told_by(command: list[str | Path]) -> str:
    return subprocess.run(command, capture_output=True, check=True, text=True).stdout
