"""Checks the links in the description of the wheel that was built, installs it into an empty environment and uses it as
a new user would, outside the checkout."""

from __future__ import annotations

import email
import re
import subprocess
import sys
import tempfile
import venv
import zipfile
from pathlib import Path

COMMANDS = (
    ("--version",),
    ("init",),
    ("run", "suite.yaml", "--out", "runs/first", "--no-progress"),
    ("gate", "runs/first"),
    ("report", "runs/first", "-f", "html"),
    ("report", "runs/first", "-f", "md"),
    ("schema",),
    ("explain", "locked"),
    ("plugins",),
    ("ls",),
)


def relative_links(description: str) -> list[str]:
    """The links and images of a Markdown text that are neither absolute nor within it."""
    links = re.findall(r"\]\(([^)\s]+)\)", description)
    return [link for link in links if not re.match(r"https://|#", link)]


def description_of(wheel: Path) -> str:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        return str(email.message_from_bytes(archive.read(name)).get_payload())


def main(dist: Path) -> None:
    (wheel,) = dist.resolve().glob("*.whl")
    if links := relative_links(description_of(wheel)):
        sys.exit(f"the description of {wheel.name} has links that lead nowhere: {', '.join(links)}")
    with tempfile.TemporaryDirectory(prefix="steelyard-wheel-") as folder:
        place = Path(folder)
        venv.create(place / "env", with_pip=True)
        programs = place / "env" / "bin"
        pip = [programs / "python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check", wheel]
        subprocess.run(pip, check=True)
        for words in COMMANDS:
            ended = subprocess.run([programs / "steelyard", *words], cwd=place, capture_output=True, text=True)
            if ended.returncode:
                sys.exit(f"steelyard {' '.join(words)} exited with {ended.returncode}:\n{ended.stdout}{ended.stderr}")
            sys.stdout.write(f"ok  steelyard {' '.join(words)}\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
