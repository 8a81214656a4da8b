"""Installs the wheel that was built into an empty environment and uses it as a new user would, outside the checkout."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import venv
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


def main(dist: Path) -> None:
    (wheel,) = dist.resolve().glob("*.whl")
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
