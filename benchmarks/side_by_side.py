"""Six variants of 5,000 cases side by side: how large the page is, and how fast it is in a browser.

Opened from a file in headless Chromium; without one only the writing is measured.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.report_page import FILTER, FIRST_PAINT, ROUNDS, actions, in_a_child, in_browser, timed, write_run
from benchmarks.rows import Row

VARIANTS, CASES, FEW = 6, 5_000, 500


def write_matrix_of(folder: Path, count: int) -> None:
    """A finished matrix of targets, the first of them best."""
    from steelyard.run.matrix import Matrix, make_variants, write_matrix

    axes = {"target": [f"model-{number}" for number in range(VARIANTS)]}
    variants = make_variants(axes)
    folder.mkdir()
    write_matrix(folder, Matrix(suite="bench", axes=axes, variants=variants))
    for number, variant in enumerate(variants):
        write_run(folder / variant.directory, count, seed=number, right=0.9 - number / 50)


def child(folder: str, place: str) -> None:
    """Write the page; print the seconds it took and the peak of this process's memory."""
    from steelyard.report.matrix.page import matrix_page
    from steelyard.report.matrix.table import variants_in

    timed(matrix_page(variants_in(Path(folder))), place)


def written(folder: Path, count: int) -> tuple[Path, float, int]:
    """The page of a matrix with this many cases, written by a separate process; its seconds and peak memory."""
    matrix, place = folder / f"matrix-{count}", folder / f"{count}.html"
    write_matrix_of(matrix, count)
    return place, *in_a_child("benchmarks.side_by_side", matrix, place)


_ACTIONS = {
    "differ": "document.querySelector('[data-chip=differ]').click()",
    "metadata": "table.choose('hard', 'true')",
    "by variant": "table.showAll(); table.cases.outcomes[0] = 0; table.cases.outcomes[5] = 1; table.apply()",
    "search": "table.showAll(); table.search.value = 'beam17 stone'; table.apply()",
    "search again": "table.search.value = 'case-0049'; table.apply()",
    "sort": "table.showAll(); table.sortBy('passes', true)",
    "scroll": "table.grid.scrollTop = 1e5; table.paint()",
}
_OPENING = """() => new Promise((resolve) => { const from = performance.now();
    const seen = new MutationObserver(() => resolve(performance.now() - from));
    seen.observe(drawer.element, { attributes: true, attributeFilter: ["data-record"] });
    table.activate(2500); table.open(); })"""


def measured(shown: Any) -> Iterator[tuple[str, float]]:
    """What the table of cases takes, and a case by every variant until it is shown."""
    yield from actions(shown, _ACTIONS)
    yield "open a case", shown.evaluate(_OPENING)


def measure() -> list[Row]:
    """The file, then the browser where there is one."""
    from tests.support.browser import why_no_browser

    with tempfile.TemporaryDirectory() as folder:
        _, _, few = written(Path(folder), FEW)
        place, seconds, many = written(Path(folder), CASES)
        size = place.stat().st_size / 2**20
        growth = (many - few) / (CASES - FEW)
        detail = f"{VARIANTS} × {CASES:,} cases, {size:.0f} MiB of HTML in {seconds:.1f} s; peak {many / 2**20:.0f} MiB"
        rows = [Row(f"memory a case, from {FEW:,} to {CASES:,} cases", growth, 2_000.0, detail, unit="bytes")]
        if (reason := why_no_browser()) is not None:
            print(f"  ({reason})")
            return rows
        times = in_browser(place, measured)
    shown = ", ".join(f"{name} {value:.0f}" for name, value in times.items())
    slowest = max(times[name] for name in ("differ", "metadata", "by variant", "search", "search again"))
    rows.append(Row("first paint in Chromium", times["first paint"], FIRST_PAINT, f"ms: {shown}", unit="ms"))
    rows.append(Row("the slowest of filter and search", slowest, FILTER, f"median of {ROUNDS} openings", unit="ms"))
    return rows
