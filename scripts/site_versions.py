"""Writes versions.json beside the built versions of the site, newest first: what its version menu reads."""

from __future__ import annotations

import json
import sys
from pathlib import Path


def main(site: Path) -> None:
    built = sorted((path.parent.name for path in site.glob("*/index.html")), key=_order, reverse=True)
    listed = [
        {"version": name, "title": name, "aliases": ["latest"] if place == 0 else []}
        for place, name in enumerate(built)
    ]
    (site / "versions.json").write_text(json.dumps(listed, indent=2) + "\n")


def _order(version: str) -> list[tuple[int, str]]:
    return [(int(part) if part.isdigit() else -1, part) for part in version.split(".")]


if __name__ == "__main__":
    main(Path(sys.argv[1]))
