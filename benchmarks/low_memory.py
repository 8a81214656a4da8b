"""How much a low-memory run grows with each case: peak memory at 200,000 cases minus that at 20,000.

Each run is a separate process that reads its cases from a file and answers each with 4 KB.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.memory import peak_bytes
from benchmarks.rows import Row

FEW, MANY = 20_000, 200_000
ANSWER_BYTES = 4096
LIMIT_BYTES = 100.0


def write_cases(path: Path, count: int) -> None:
    with path.open("w") as file:
        for number in range(count):
            file.write(f'{{"id": "case-{number}", "prompt": "Question {number}?", "expected": "x"}}\n')


def child(folder: str) -> None:
    """Run the cases in a folder and print the peak of this process's memory in bytes."""
    from steelyard import EvalCase, EvalSet, InvocationResponse, Runner

    async def answer(case: EvalCase) -> InvocationResponse:
        text = (case.id + " ").ljust(ANSWER_BYTES, "x")
        return InvocationResponse(
            response_text=text,
            time_to_first_token=0.1,
            time_to_last_token=0.2,
            time_per_output_token=0.01,
            num_tokens_input=len(case.prompt or ""),
            num_tokens_output=1000,
        )

    suite = EvalSet.from_jsonl(Path(folder) / "cases.jsonl", id="memory")
    runner = Runner(answer, suite, ["exact"], parallelism=50, output_path=Path(folder) / "run", progress="off")
    result = runner.run_sync(low_memory=True)
    if not result.complete or result.responses:
        raise AssertionError("the run did not go as it should")
    print(peak_bytes())


def peak_memory(count: int) -> int:
    with tempfile.TemporaryDirectory() as folder:
        write_cases(Path(folder) / "cases.jsonl", count)
        command = [sys.executable, "-c", f"from benchmarks.low_memory import child; child({folder!r})"]
        return int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def measure() -> list[Row]:
    """Bytes of growth a case."""
    few, many = peak_memory(FEW), peak_memory(MANY)
    growth = (many - few) / (MANY - FEW)
    what = f"growth from {FEW:,} to {MANY:,} cases of {ANSWER_BYTES} bytes"
    detail = f"peak {few / 2**20:.0f} MiB and {many / 2**20:.0f} MiB"
    return [Row(what, growth, LIMIT_BYTES, detail, unit="bytes a case")]
