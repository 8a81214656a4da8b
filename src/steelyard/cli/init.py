"""`steelyard init [DIR]`: a small suite, its cases and a CI workflow to start from."""

from __future__ import annotations

import shlex
from importlib.resources import files
from pathlib import Path

import click

from steelyard.cli.output import show
from steelyard.errors import ConfigurationError
from steelyard.report.formats import write_text

_FILES = {
    "suite.yaml": "suite.yaml",
    "cases.jsonl": "cases.jsonl",
    "workflow.yml": ".github/workflows/evals.yml",
}
"""Each file of the package's `starter` folder, and where it goes."""


@click.command("init")
@click.argument("place", metavar="[DIR]", type=click.Path(path_type=Path), default=Path())
@click.option("--force", is_flag=True, help="Overwrite existing files; the old ones are kept as NAME.bak.")
def command(place: Path, force: bool) -> int:
    """Write a commented suite, its cases and a GitHub workflow to DIR (default: the current folder).

    The suite uses a simulated model, so it runs without a key. Existing files are not touched.
    """
    wanted = {place / name: _starter(source) for source, name in _FILES.items()}
    present = [path for path in wanted if path.exists() or path.is_symlink()]
    if present and not force:
        named = ", ".join(map(str, present))
        raise ConfigurationError(f"already there: {named}; nothing was written (--force keeps the old as NAME.bak)")
    for path, text in wanted.items():
        kept = _moved_aside(path) if path in present else None
        _write(path, text)
        show(f"wrote {path}" + (f", the old one is {kept.name}" if kept is not None else ""))
    show(_next_steps(place))
    return 0


def _starter(name: str) -> str:
    return (files("steelyard") / "starter" / name).read_text(encoding="utf-8")


def _moved_aside(path: Path) -> Path:
    """Where the old file is now: never in the place of another old one."""
    kept = path.with_name(f"{path.name}.bak")
    number = 2
    while kept.exists() or kept.is_symlink():
        kept = path.with_name(f"{path.name}.bak{number}")
        number += 1
    try:
        return path.rename(kept)
    except OSError as error:
        raise ConfigurationError(f"cannot move {path} aside: {error.strerror}") from error


def _write(path: Path, text: str) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigurationError(f"cannot make the folder {path.parent}: {error.strerror}") from error
    write_text(path, text)


def _next_steps(place: Path) -> str:
    steps = [
        "steelyard run suite.yaml --out runs/first",
        "steelyard gate runs/first -v",
        "steelyard report runs/first -f html",
    ]
    if place.resolve() != Path.cwd():
        steps.insert(0, f"cd {shlex.quote(str(place))}")
    return "\n".join(["", "next:", *(f"  {step}" for step in steps)])
