"""Packages with plugins, installed into a folder without a build or a network: their modules, and what pip notes."""

from __future__ import annotations

import shutil
import tomllib
from pathlib import Path

from tests.support.paths import ROOT

SAMPLE = ROOT / "examples" / "plugin"


def install_sample(folder: Path) -> None:
    """Install the sample package as pip would: its modules, its metadata and its entry points."""
    project = tomllib.loads((SAMPLE / "pyproject.toml").read_text(encoding="utf-8"))
    folder.mkdir(parents=True, exist_ok=True)
    for module in project["tool"]["setuptools"]["py-modules"]:
        shutil.copy(SAMPLE / f"{module}.py", folder)
    about = project["project"]
    note_package(folder, about["name"], about["entry-points"], version=about["version"])


def note_package(folder: Path, name: str, entry_points: dict[str, dict[str, str]], version: str = "1.0") -> None:
    """Make a package known to importlib.metadata: entry points by group, each a name and its `module:Name`."""
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n", encoding="utf-8")
    lines = []
    for group, points in entry_points.items():
        lines += [f"[{group}]", *(f"{point} = {place}" for point, place in points.items()), ""]
    (info / "entry_points.txt").write_text("\n".join(lines), encoding="utf-8")
