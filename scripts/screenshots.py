"""Makes docs/images/*.png: real runs and a real sweep, and what a browser shows of them.

    python scripts/screenshots.py [FOLDER]

Needs Playwright and a Chromium, as the browser tests do, and the extra `view`. Takes about two minutes.
"""

from __future__ import annotations

import re
import shutil
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

from demo_runs import Assistant, compared, evaluated, running, swept, worked  # noqa: E402
from tests.support.browser import Seen, browser, opened, why_no_browser  # noqa: E402
from tests.support.cli import wait_until  # noqa: E402
from tests.support.mock import running_mock  # noqa: E402
from tests.support.view import served  # noqa: E402

from steelyard import Result  # noqa: E402
from steelyard.report.compare.compare import compare_runs  # noqa: E402
from steelyard.report.compare.formats import compare_page  # noqa: E402
from steelyard.report.matrix.page import matrix_page  # noqa: E402
from steelyard.report.matrix.table import variants_in  # noqa: E402
from steelyard.report.page.page import page  # noqa: E402
from steelyard.report.sweep.page import checked_sweep, sweep_page  # noqa: E402

if TYPE_CHECKING:
    from playwright.sync_api import Browser

ENOUGH = re.compile("^([7-9]..|.,...)$")
"""Records of the live run after which its page has something to show."""
SCHEMES = ("light", "dark")
SETTLED = 400
"""Milliseconds in which charts are drawn and what moves comes to rest."""


class Studio:
    """Takes pictures of pages into a folder, in as few colours as they need."""

    def __init__(self, started: Browser, folder: Path) -> None:
        self._started = started
        self._folder = folder

    def open(self, address: str, ready: str, scheme: str = "light", height: int = 860) -> Any:
        look: dict[str, Any] = {"color_scheme": scheme, "device_scale_factor": 1.5, "reduced_motion": "reduce"}
        return opened(self._started, address, ready=ready, viewport={"width": 1280, "height": height}, **look)

    def take(self, seen: Seen, name: str, **options: Any) -> None:
        """The page as it is now; 256 colours look the same and weigh a third."""
        from PIL import Image

        seen.page.wait_for_timeout(SETTLED)
        path = self._folder / f"{name}.png"
        seen.page.screenshot(path=path, **options)
        with Image.open(path) as image:
            # Refined once more, or large areas would take on a tint.
            fewer = image.convert("RGB").quantize(256, Image.Quantize.MAXCOVERAGE, 3, dither=Image.Dither.NONE)
        fewer.save(path, optimize=True)
        sys.stdout.write(f"{path}\n")


def shoot_chart(studio: Studio, chart: Path) -> None:
    """One of the files that a sweep writes."""
    with studio.open(chart.as_uri(), "svg") as seen:
        size = seen.page.evaluate(
            "[document.documentElement.width, document.documentElement.height].map((length) => length.baseVal.value)"
        )
        studio.take(seen, "sweep-error-rate", clip={"x": 0, "y": 0, "width": size[0], "height": size[1]})


def shoot_report(studio: Studio, report: Path) -> None:
    """The overview and a case that failed in some of its trials."""
    for scheme in SCHEMES:
        with studio.open(report.as_uri(), "html[data-ready=cases]", scheme) as seen:
            studio.take(seen, f"report-overview-{scheme}")
            seen.page.keyboard.press("f")
            seen.page.locator(".row", has_text="flaky").first.click()
            seen.page.wait_for_selector("#drawer[data-record]")
            studio.take(seen, f"report-case-{scheme}")


def shoot_matrix(studio: Studio, place: Path) -> None:
    """Several runs side by side: the leaderboard, the cases on which they differ, and one of these."""
    for scheme in SCHEMES:
        with studio.open(place.as_uri(), "html[data-ready=cases]", scheme, height=900) as seen:
            if scheme == "light":
                studio.take(seen, "matrix-light", full_page=True)
            seen.page.keyboard.press("d")
            seen.page.locator(".row").first.wait_for()
            if scheme == "light":
                studio.take(seen, "matrix-cases-light")
                continue
            seen.page.locator(".row", has_text="refund-sale-01").click()
            seen.page.wait_for_selector("#drawer[data-record]")
            for number, variant in enumerate(("0", "2")):
                seen.page.locator(".compare-words select").nth(number).select_option(variant)
            studio.take(seen, "matrix-case-dark")


def shoot_documents(studio: Studio, documents: dict[str, Path]) -> None:
    """Pages whose content is there at once, as long as they are."""
    for name, path in documents.items():
        for scheme in SCHEMES:
            with studio.open(path.as_uri(), "html[data-theme]", scheme) as seen:
                studio.take(seen, f"{name}-{scheme}", full_page=True)


def shoot_view(studio: Studio, folder: Path) -> None:
    """A run while it is written, and the list of runs beside it."""
    with running(folder), served(folder / "runs") as server:
        wait_until(lambda: "support-answers-live" in server.ids())
        address = f"{server.url}/run/{server.ids()['support-answers-live']}"
        with studio.open(address, "html[data-ready=live]", height=1080) as seen:
            seen.page.locator("#tab-count", has_text=ENOUGH).wait_for(timeout=120_000)
            studio.take(seen, "view-live")
        with studio.open(server.url, "html[data-ready=runs]", height=620) as seen:
            seen.page.evaluate("document.getElementById('folder').textContent = 'runs'")
            studio.take(seen, "view-runs")


def shoot_agent(studio: Studio, folder: Path) -> None:
    """A case of an agent: its time line and what it changed, and its turns."""
    with running_mock(tool_call_rate=1.0, latency="400ms", chunk_interval="20ms") as mock:
        worked(folder / "runs" / "coding", mock.base_url)
    report = written(folder / "coding.html", page(folder / "runs" / "coding"), folder)
    with studio.open(report.as_uri(), "html[data-ready=cases]", height=760) as seen:
        seen.page.click("#tab-cases")
        seen.page.locator(".row[data-id=leap-year]").click()
        seen.page.locator("#drawer svg.chart").wait_for()
        studio.take(seen, "agent-time-line")
        seen.page.locator("#drawer h3", has_text="Trajectory").evaluate("(title) => title.scrollIntoView()")
        seen.page.locator("#drawer").evaluate("(drawer) => drawer.scrollBy(0, -70)")
        studio.take(seen, "agent-trajectory")


def shoot_labels(studio: Studio, run: Path) -> None:
    """An answer to label, after a few others; the labels stay in a copy of the run."""
    copy = Path(shutil.copytree(run, run.parent.parent / "to-label" / run.name))
    with served(copy, labeller="anna") as server, studio.open(server.address, "html[data-ready]", height=760) as seen:
        for key in "pfpps":
            before = seen.page.locator("html").get_attribute("data-ready")
            seen.page.keyboard.press(key)
            seen.page.wait_for_function("before => document.documentElement.dataset.ready !== before", arg=before)
        seen.page.keyboard.press("e")
        studio.take(seen, "label")


def shoot_notebook(studio: Studio, place: Path) -> None:
    """What a notebook shows of a result and of a comparison, one below the other."""
    runs = place / "runs"
    against = compare_runs([runs / "assistant-small", runs / "assistant-large"], most=6)
    cells = [Result.load(runs / "assistant-small")._repr_html_(), against._repr_html_()]
    body = "".join(f'<div style="margin:24px 32px">{cell}</div>' for cell in cells)
    shown = written(place / "notebook.html", [f"<!doctype html><meta charset=utf-8><body>{body}</body>"], place)
    with studio.open(shown.as_uri(), "table", height=760) as seen:
        studio.take(seen, "notebook")


def written(path: Path, pieces: Iterable[str], place: Path) -> Path:
    """A page in a file, without the folder that only this script knows."""
    path.write_text("".join(piece.replace(f"{place}/", "") for piece in pieces), encoding="utf-8")
    return path


def make_pages(place: Path) -> tuple[Path, dict[str, Path]]:
    """The runs that are shown, the report of one, and the pages of a sweep and of a comparison, by their names."""
    runs = place / "runs"
    runs.mkdir()
    sweep = swept(place)
    evaluated(runs / "support-answers", Assistant("assistant-small", 0.83), trials=3)
    evaluated(runs / "assistant-small", Assistant("assistant-small", 0.78))
    evaluated(runs / "assistant-large", Assistant("assistant-large", 0.93, pace=0.009))
    against = compare_runs([runs / "assistant-small", runs / "assistant-large"], most=6)
    documents = {
        "sweep": written(place / "sweep.html", [sweep_page(checked_sweep(sweep) or {}, str(sweep))], place),
        "compare": written(place / "compare.html", [compare_page(against)], place),
    }
    return written(place / "report.html", page(runs / "support-answers"), place), documents


def main(folder: Path) -> int:
    """Make all of them; 1 where there is no browser."""
    if (reason := why_no_browser()) is not None:
        sys.stderr.write(f"{reason}\n")
        return 1
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as name, browser() as started:
        place, studio = Path(name), Studio(started, folder)
        report, documents = make_pages(place)
        shoot_chart(studio, place / "runs" / "support-sweep" / "error-rate.svg")
        shoot_report(studio, report)
        shoot_matrix(
            studio, written(place / "matrix.html", matrix_page(variants_in(compared(place / "matrix"))), place)
        )
        shoot_documents(studio, documents)
        shoot_notebook(studio, place)
        shoot_agent(studio, place)
        shoot_view(studio, place)
        shoot_labels(studio, place / "runs" / "support-answers")
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "docs" / "images"))
