"""How many stored answers a second `steelyard score` scores again with three scorers, and whether memory stays flat.

The run that is scored has short answers. Scoring it is the command itself, in a separate process, from the moment
it has started until its new run directory is complete.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.rows import Row

ROWS = 100_000
ROUNDS = 3
RATE_LIMIT = 20_000.0
GROWTH_LIMIT = 200.0

AGENT = """
def answer(case):
    raise AssertionError("scoring again must not ask the target")
"""
SUITE = """
id: scoring
target: {python: agent.py:answer}
cases: cases.jsonl
scorers: [exact, contains, number]
"""


def prepare(folder: Path, rows: int) -> None:
    """A complete run of short answers, of which every second one is right, and the suite that it is of."""
    from steelyard import EvalCase, EvalSet, Runner

    async def answer(case: EvalCase) -> str:
        number = int(case.id.removeprefix("case-"))
        return str(number) if number % 2 else f"The answer is {number + 1}."

    (folder / "agent.py").write_text(AGENT)
    (folder / "suite.yaml").write_text(SUITE)
    with (folder / "cases.jsonl").open("w") as file:
        for number in range(rows):
            file.write(f'{{"id": "case-{number}", "prompt": "What is {number}?", "expected": "{number}"}}\n')
    suite = EvalSet.from_jsonl(folder / "cases.jsonl", id="scoring")
    Runner(answer, suite, parallelism=50, output_path=folder / "run", progress="off", low_memory=True).run_sync()


def score(folder: str) -> None:
    """Score the run in a folder again; print the seconds it took and the peak of this process's memory in MiB."""
    import time

    from benchmarks.memory import peak_bytes
    from steelyard.cli.main import main

    started = time.perf_counter()
    try:
        main(["score", "run", "--suite", "suite.yaml", "--out", f"{folder}/scored", "--force", "--quiet", "--json"])
    except SystemExit as ending:
        if ending.code:
            raise
    print(json.dumps([time.perf_counter() - started, peak_bytes() / 2**20]))


def in_child(folder: Path) -> tuple[float, float]:
    """Seconds and peak MiB of scoring the run in a folder, in a fresh process standing there."""
    command = [sys.executable, "-c", f"from benchmarks.score_rate import score; score({str(folder)!r})"]
    environment = {"PYTHONPATH": str(Path(__file__).parents[1])}
    ended = subprocess.run(command, check=True, capture_output=True, text=True, cwd=folder, env=environment)
    *metrics, figures = ended.stdout.strip().split("\n")
    told = json.loads("\n".join(metrics))
    if not told["complete"] or told["error_rate"] or told["pass_rate"] != 0.5:
        raise AssertionError(f"the run was not scored as it should be: {told['counts']}")
    took, peak = json.loads(figures)
    return took, peak


def measure() -> list[Row]:
    """Rows a second, and bytes of growth a row."""
    with tempfile.TemporaryDirectory() as name:
        small, large = Path(name) / "small", Path(name) / "large"
        for folder, rows in ((small, ROWS // 10), (large, ROWS)):
            folder.mkdir()
            prepare(folder, rows)
        _, small_peak = in_child(small)
        took, peak = min(in_child(large) for _ in range(ROUNDS))  # the best: a busy moment is not ours
    growth = (peak - small_peak) * 2**20 / (ROWS - ROWS // 10)
    return [
        Row(
            f"scoring {ROWS:,} stored answers with three scorers",
            ROWS / took,
            RATE_LIMIT,
            f"{took:.2f} s for the whole command: exact, contains, number",
            unit="rows/s",
            at_least=True,
        ),
        Row(
            "memory while scoring them",
            growth,
            GROWTH_LIMIT,
            f"peak {small_peak:.0f} MiB at {ROWS // 10:,} rows, {peak:.0f} MiB at {ROWS:,}",
            unit="bytes a row",
        ),
    ]
