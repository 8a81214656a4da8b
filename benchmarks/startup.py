"""How long a user waits before anything happens: importing the package, asking for help."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

from benchmarks.rows import Row

ROUNDS = 20


def fastest(*command: str) -> float:
    """The best of several runs of a command, in seconds."""
    times = []
    for _ in range(ROUNDS):
        started = time.perf_counter()
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        times.append(time.perf_counter() - started)
    return min(times)


def measure() -> list[Row]:
    """Both against starting Python itself."""
    python = sys.executable
    bare = fastest(python, "-c", "pass")
    imported = fastest(python, "-c", "import steelyard")
    helped = fastest(str(Path(python).with_name("steelyard")), "--help")
    against = f"python -c pass {bare * 1e3:.0f} ms"
    return [
        Row("python -c 'import steelyard'", imported / bare, 2.0, f"{imported * 1e3:.0f} ms; {against}"),
        Row("steelyard --help", helped / bare, 5.0, f"{helped * 1e3:.0f} ms; {against}"),
    ]
