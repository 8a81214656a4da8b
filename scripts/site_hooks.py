"""For mkdocs: brings the pages beside docs/ into the site, corrects links that lead out of it and back, and shows the
names of files above their content."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parent.parent
PAGES = ("CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")
_OUT = re.compile(r"\]\(\.\./(?P<page>[A-Z]+\.md)")
_IN = re.compile(r"\]\(docs/")
_ELSEWHERE = re.compile(
    r"\[(?P<text>[^\]]+)\]\((?:\.\./)?(?:examples|src|tests|benchmarks|scripts|LICENSE|README)[^)]*\)"
)
_FILE = re.compile(r"<!-- file: (?P<name>\S+) -->\n+```(?P<language>\w+)$", flags=re.M)


def on_files(files: Files, config: Any) -> Files:
    """Add the pages that are kept at the top of the repository."""
    for name in PAGES:
        files.append(File.generated(config, name, content=(ROOT / name).read_text(encoding="utf-8")))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Make links to those pages links within the site; what is not part of it is named without a link.

    A comment before a block of code that names its file becomes the block's title.
    """
    markdown = _FILE.sub(r'```\g<language> title="\g<name>"', markdown)
    markdown = _IN.sub("](", _OUT.sub(r"](\g<page>", markdown))
    return _ELSEWHERE.sub(r"\g<text>", markdown)
