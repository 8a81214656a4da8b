"""Tasks in the formats of others: SWE-bench's JSONL, and the task folders of harbor and terminal-bench.

What an agent must not see (the reference patch, the hidden tests' patch, the names of the tests) becomes `expected`,
which no program of an agent is given.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from steelyard.errors import SuiteError

FORMATS = ("swebench", "harbor")
_HIDDEN = ("patch", "test_patch", "FAIL_TO_PASS", "PASS_TO_PASS")
_NEEDED = ("instance_id", "repo", "base_commit", "problem_statement")
_SHOWN = 5


def swebench_cases(path: Path) -> Iterator[dict[str, Any]]:
    """A case for each line of a SWE-bench file: the problem is the prompt, repository and commit are metadata.

    `metadata.repository` is the repository's name with `__` for `/`: the folder in which a local clone is looked for.
    """
    try:
        with open(path, encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    yield _instance(path, number, line)
    except OSError as error:
        raise SuiteError(f"cannot be read: {error.strerror}", path=path) from error
    except UnicodeDecodeError as error:
        raise SuiteError(f"is not UTF-8: {error.reason} at byte {error.start}", path=path) from error


def _instance(path: Path, number: int, line: str) -> dict[str, Any]:
    try:
        found = json.loads(line)
    except ValueError as error:
        raise SuiteError(f"not JSON: {error}", path=path, line=number) from error
    if not isinstance(found, dict):
        raise SuiteError(f"a task must be an object, got {type(found).__name__}", path=path, line=number)
    for name in _NEEDED:
        if not isinstance(found.get(name), str) or not found[name]:
            raise SuiteError(f"a SWE-bench task needs {name}, got {found.get(name)!r:.100}", path=path, line=number)
    expected = {name: _tests(found[name]) if name.isupper() else found[name] for name in _HIDDEN if name in found}
    told = {name: value for name, value in found.items() if name not in (*_HIDDEN, "instance_id", "problem_statement")}
    return {
        "id": found["instance_id"],
        "prompt": found["problem_statement"],
        "metadata": {**told, "repository": found["repo"].replace("/", "__")},
        "expected": expected or None,
    }


def _tests(listed: Any) -> Any:
    """A list of tests, which SWE-bench has as JSON text in a field."""
    if not isinstance(listed, str):
        return listed
    try:
        return json.loads(listed)
    except ValueError:
        return [listed]


def harbor_cases(folder: Path, *, skip_containers: bool = False) -> Iterator[dict[str, Any]]:
    """A case for each folder with `instruction.md` and `task.toml`: the instruction is the prompt.

    Tasks that need a container are refused by name, or left out with `skip_containers`.
    """
    try:
        places = sorted(place for place in folder.iterdir() if (place / "task.toml").is_file())
    except OSError as error:
        raise SuiteError(f"cannot be read: {error.strerror}", path=folder) from error
    if not places:
        raise SuiteError("has no task: a folder with task.toml and instruction.md", path=folder)
    settings = {place: _settings(place) for place in places}
    containers = [place.name for place in places if _needs_container(place, settings[place])]
    if containers and not skip_containers:
        named = ", ".join(containers[:_SHOWN]) + (
            f" and {len(containers) - _SHOWN:,} more" if containers[_SHOWN:] else ""
        )
        raise SuiteError(
            f"{len(containers):,} of {len(places):,} tasks need a container, which Steelyard does not start: {named}. "
            f"`skip_containers: true` leaves them out",
            path=folder,
        )
    for place in places:
        if place.name not in containers:
            yield _task(place, settings[place])


def _settings(place: Path) -> dict[str, Any]:
    try:
        with open(place / "task.toml", "rb") as file:
            return tomllib.load(file)
    except (OSError, tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SuiteError(f"cannot be read: {error}", path=place / "task.toml") from error


def _needs_container(place: Path, settings: dict[str, Any]) -> bool:
    environment = settings.get("environment")
    names = ("Dockerfile", "docker-compose.yaml", "docker-compose.yml")
    described = any((place / "environment" / name).exists() or (place / name).exists() for name in names)
    return described or (isinstance(environment, dict) and "docker_image" in environment)


def _task(place: Path, settings: dict[str, Any]) -> dict[str, Any]:
    try:
        instruction = (place / "instruction.md").read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise SuiteError(f"cannot be read: {error}", path=place / "instruction.md") from error
    metadata = settings.get("metadata")
    case: dict[str, Any] = {
        "id": place.name,
        "prompt": instruction,
        "metadata": {**(metadata if isinstance(metadata, dict) else {}), "task": place.name},
    }
    agent = settings.get("agent")
    seconds = agent.get("timeout_sec") if isinstance(agent, dict) else None
    if isinstance(seconds, (int, float)) and seconds > 0:
        case["limits"] = {"time": float(seconds)}
    return case
