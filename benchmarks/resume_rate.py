"""How fast a log of half a million records and 1 GB is taken up again, against a bare decode of the same file.

Both run in processes of their own. The bare loop decodes each line and keeps nothing. Resuming also reads
and digests the half million cases, finds each record's case, checks its fingerprints, counts it in the
statistics and rebuilds the index.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from benchmarks.rows import Row

if TYPE_CHECKING:
    from steelyard import EvalCase, InvocationResponse, Runner

RECORDS = 500_000
TEXT_BYTES = 1_600
RATE_LIMIT = 0.4
ROUNDS = 3
GROWTH_LIMIT = 100.0


async def answer(case: EvalCase) -> InvocationResponse:
    from steelyard import InvocationResponse

    return InvocationResponse(
        response_text=case.id.ljust(TEXT_BYTES, "x"),
        time_to_first_token=0.1,
        time_to_last_token=0.2,
        num_tokens_output=300,
    )


def make_runner(folder: Path) -> Runner:
    from steelyard import EvalSet, Runner

    suite = EvalSet.from_jsonl(folder / "cases.jsonl", id="resume")
    return Runner(answer, suite, ["exact"], parallelism=50, output_path=folder / "run", progress="off")


def prepare(folder: Path, records: int) -> None:
    """A run directory whose journal has every record but whose metrics were never written."""
    with (folder / "cases.jsonl").open("w") as file:
        for number in range(records):
            file.write(f'{{"id": "case-{number}", "prompt": "Question {number}?", "expected": "x"}}\n')
    make_runner(folder).run_sync(low_memory=True)
    (folder / "run" / "metrics.json").unlink()


def bare_decode(folder: Path) -> None:
    decode = msgspec.json.Decoder().decode
    with (folder / "run" / "outputs.jsonl").open("rb") as file:
        for line in file:
            decode(line)


def read_log(folder: Path) -> None:
    """What resuming does with the log alone: replay it over a plan that is already made."""
    from steelyard.journal.replay import Replay
    from steelyard.run.directory import PlanSlots
    from steelyard.run.execution import plan_of

    runner = make_runner(folder)
    plan = plan_of(runner.suite, runner.scorers, runner.options)
    replay = Replay(folder / "run", PlanSlots(plan), bytearray(plan.slots))
    started = time.perf_counter()
    replay.read()
    print(time.perf_counter() - started)


def resume(folder: Path) -> None:
    """The whole of it: from starting the runner to the metrics of a run with nothing left to ask."""
    result = make_runner(folder).run_sync(low_memory=True)
    if not result.complete:
        raise AssertionError("the run was not resumed")


def in_child(name: str, folder: Path) -> tuple[float, float]:
    """Seconds and peak MiB of one of the functions above, in a fresh process."""
    code = (
        "import sys, time; from pathlib import Path; from benchmarks import memory, resume_rate\n"
        f"started = time.perf_counter(); resume_rate.{name}(Path(sys.argv[1]))\n"
        "print(time.perf_counter() - started, memory.peak_bytes() / 2**20)"
    )
    command = [sys.executable, "-c", code, str(folder)]
    lines = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split("\n")
    took, peak = lines[-2].split()
    return (float(lines[0]) if len(lines) > 2 else float(took)), float(peak)


def measure() -> list[Row]:
    """Rates as shares of the bare loop's; memory as growth a record."""
    with tempfile.TemporaryDirectory() as name:
        small, large = Path(name) / "small", Path(name) / "large"
        for folder, records in ((small, RECORDS // 10), (large, RECORDS)):
            folder.mkdir()
            prepare(folder, records)
        size = (large / "run" / "outputs.jsonl").stat().st_size
        # Best of several, alternating: the first finds the file's pages, the others spare both a busy moment.
        rounds = [(in_child("bare_decode", large)[0], in_child("read_log", large)[0]) for _ in range(ROUNDS)]
        bare, log = min(bare for bare, _ in rounds), min(log for _, log in rounds)
        _, small_peak = in_child("resume", small)
        whole, peak = in_child("resume", large)
    growth = (peak - small_peak) * 2**20 / (RECORDS - RECORDS // 10)
    rate = f"{size / 1e6 / log:,.0f} MB/s; a bare decode {size / 1e6 / bare:,.0f} MB/s"
    return [
        Row(f"reading a log of {RECORDS:,} records, {size / 1e9:.2f} GB", bare / log, RATE_LIMIT, rate, at_least=True),
        Row(
            "memory while resuming it",
            growth,
            GROWTH_LIMIT,
            f"peak {small_peak:.0f} MiB at {RECORDS // 10:,} records, {peak:.0f} MiB at {RECORDS:,}; "
            f"the whole resume, cases included, took {whole:.1f} s",
            unit="bytes a record",
        ),
    ]
