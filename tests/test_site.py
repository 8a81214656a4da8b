"""The documentation as a site: it builds in strict mode, every page is in its menu, and the API is on it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import steelyard

ROOT = Path(__file__).parents[1]


@pytest.mark.slow
def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs")
    pytest.importorskip("mkdocstrings")
    ended = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict", "--site-dir", tmp_path / "1.0"],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert (ended.returncode, ended.stdout.strip(), ended.stderr.strip()) == (0, "", "")
    page = (tmp_path / "1.0" / "api.html").read_text(encoding="utf-8")
    assert "Runs a suite against a target" in page
    assert (tmp_path / "1.0" / "search" / "search_index.json").is_file()
    agents = (tmp_path / "1.0" / "agents.html").read_text(encoding="utf-8")
    assert '<span class="filename">hidden/test_price.py</span>' in agents
    loaded = re.findall(r'(?:src|href)="(https?://[^"]+)"', page)
    assert loaded == []
    subprocess.run([sys.executable, "scripts/site_versions.py", tmp_path], cwd=ROOT, check=True)
    assert json.loads((tmp_path / "versions.json").read_bytes())[0]["version"] == "1.0"


def test_every_public_name_is_on_the_page_of_the_api() -> None:
    page = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    named = set(re.findall(r"^::: steelyard\.(\w+)$", page, flags=re.M))
    assert set(steelyard.__all__) - named - {"__version__"} == set()
