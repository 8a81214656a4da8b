"""The HTML report of 50,000 cases: its size, what writing it takes, and how fast it is in a browser.

Opened from a file in headless Chromium; without one only the writing is measured.
"""

from __future__ import annotations

import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.memory import peak_bytes
from benchmarks.rows import Row

CASES, FEW = 50_000, 5_000
ANSWER_WORDS = 90
ROUNDS = 3
FIRST_PAINT, FILTER = 2_000.0, 200.0
READY = "html[data-ready=cases]"


def write_run(folder: Path, count: int, seed: int = 7, right: float = 0.85) -> None:
    """A complete run of answers of about 600 characters, some of them wrong, a few of them errors."""
    import json

    from tests.support.journal import a_record, write_journal

    from steelyard.records import Record, Score
    from steelyard.run.result import Result

    rng = random.Random(seed)
    words = [f"{stem}{number}" for stem in ("measure", "weigh", "beam", "pan", "stone") for number in range(60)]

    def record(number: int) -> Record:
        ok, passed, first = rng.random() > 0.03, rng.random() < right, rng.lognormvariate(-1, 0.5)
        return a_record(
            id=f"case-{number:06}",
            index=number,
            status="ok" if ok else "error",
            error=None if ok else "TimeoutError: no answer within 30 s",
            error_type=None if ok else "TimeoutError",
            response_text=" ".join(rng.choices(words, k=ANSWER_WORDS)) if ok else None,
            input_prompt=f"Question {number} about {rng.choice(words)}?",
            time_to_first_token=first if ok else None,
            time_to_last_token=first + rng.lognormvariate(-1, 0.6) if ok else None,
            run_time=number / 80,
            metadata={"topic": words[number % 9], "hard": number % 4 == 0},
            num_tokens_input=rng.randrange(20, 900),
            num_tokens_output=rng.randrange(20, 900),
            scores=[Score("exact", float(passed), passed)] if ok else [],
        )

    write_journal(folder, map(record, range(count)))
    metrics = {**Result.load(folder).metrics, "complete": True}
    (folder / "metrics.json").write_text(json.dumps(metrics))


def child(run: str, place: str) -> None:
    """Write a report; print the seconds it took and the peak of this process's memory."""
    from steelyard.report.page.page import page

    timed(page(Path(run)), place)


def timed(pieces: Iterable[str], place: str) -> None:
    """Write a page; print the seconds it took and the peak of this process's memory."""
    started = time.perf_counter()
    with open(place, "w", encoding="utf-8") as file:
        file.writelines(pieces)
    print(time.perf_counter() - started, peak_bytes())


def written(folder: Path, count: int) -> tuple[Path, float, int]:
    """The report of a run of so many cases, written by a process of its own; its seconds and peak memory."""
    run, place = folder / f"run-{count}", folder / f"{count}.html"
    write_run(run, count)
    return place, *in_a_child("benchmarks.report_page", run, place)


def in_a_child(module: str, *paths: Path) -> tuple[float, int]:
    """What a module's `child` printed of these paths in a process of its own: seconds and peak memory."""
    program = f"from {module} import child; child{tuple(map(str, paths))!r}"
    ended = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
    seconds, peak = ended.stdout.split()
    return float(seconds), int(peak)


def in_browser(place: Path, measured: Callable[[Any], Iterator[tuple[str, float]]]) -> dict[str, float]:
    """Milliseconds, the median of several openings: first paint, cases ready, and each thing that a reader does."""
    from tests.support.browser import browser, opened

    taken: dict[str, list[float]] = {}
    with browser() as started:
        for _ in range(ROUNDS):
            with opened(started, place.as_uri(), ready=READY) as shown:
                for name, value in measured(shown.page):
                    taken.setdefault(name, []).append(value)
    return {name: median(values) for name, values in taken.items()}


def actions(shown: Any, named: Mapping[str, str]) -> Iterator[tuple[str, float]]:
    """When the page was there, and how long each of these actions in its table of cases takes."""
    yield "first paint", shown.evaluate("performance.getEntriesByName('first-contentful-paint')[0].startTime")
    yield "cases ready", shown.evaluate("performance.getEntriesByName('cases-ready')[0].startTime")
    shown.click("#tab-cases")
    for name, action in named.items():
        done = "table.grid.offsetHeight; return performance.now() - from;"  # asking for the height lays the page out
        yield name, shown.evaluate(f"() => {{ const from = performance.now(); {action}; {done} }}")


_ACTIONS = {
    "filter": "document.querySelector('[data-chip=failed]').click()",
    "search": "table.chips.clear(); table.search.value = 'beam17 stone'; table.apply()",
    "search again": "table.search.value = 'case-0499'; table.apply()",
    "sort": "table.showAll(); table.sortBy('last', true)",
    "scroll": "table.grid.scrollTop = 9e5; table.paint()",
}


def measure() -> list[Row]:
    """The file, then the browser where there is one."""
    from tests.support.browser import why_no_browser

    with tempfile.TemporaryDirectory() as folder:
        _, _, few = written(Path(folder), FEW)
        place, seconds, many = written(Path(folder), CASES)
        size = place.stat().st_size / 2**20
        growth = (many - few) / (CASES - FEW)
        peaks = f"peak {few / 2**20:.0f} and {many / 2**20:.0f} MiB"
        detail = f"{CASES:,} cases, {size:.0f} MiB of HTML in {seconds:.1f} s; {peaks}"
        rows = [Row(f"memory a case, from {FEW:,} to {CASES:,} cases", growth, 300.0, detail, unit="bytes")]
        if (reason := why_no_browser()) is not None:
            print(f"  ({reason})")
            return rows
        times = in_browser(place, lambda shown: actions(shown, _ACTIONS))
    shown = ", ".join(f"{name} {value:.0f}" for name, value in times.items())
    slowest = max(times[name] for name in ("filter", "search", "search again"))
    rows.append(Row("first paint in Chromium", times["first paint"], FIRST_PAINT, f"ms: {shown}", unit="ms"))
    rows.append(Row("the slowest of filter and search", slowest, FILTER, f"median of {ROUNDS} openings", unit="ms"))
    return rows
