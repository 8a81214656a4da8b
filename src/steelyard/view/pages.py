"""The pages of the view, made of the report's templates, style sheets and scripts and a few more; and their figures."""

from __future__ import annotations

import math
import secrets
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
from markupsafe import Markup
from starlette.responses import HTMLResponse

from steelyard.journal.index import Rows, counting
from steelyard.report.html import DOCUMENT_SCRIPTS, asset, environment, join_scripts, render, script_json, style_sheet
from steelyard.report.matrix.page import page_head
from steelyard.report.page import page as report_page
from steelyard.report.page.page import SHARED_SCRIPTS
from steelyard.report.records import STATES
from steelyard.stats.intervals import clopper_pearson
from steelyard.view.security import page_policy

_LIST_SCRIPTS = ("dom.js", "theme.js", "tip.js", "charts.js")


def list_page(about: dict[str, Any]) -> HTMLResponse:
    """The runs in the folder."""
    return _page("list.html", "Runs", _script(_LIST_SCRIPTS, ("list.js",)), about=script_json(about))


def run_page(about: dict[str, Any], *, label: bool = False) -> HTMLResponse:
    """One run: live, or its report; with `label`, a link to where its answers are labelled."""
    script = _script(SHARED_SCRIPTS, ("remote.js", "running.js", "live.js", "run.js"))
    return _page("run.html", about["name"], script, about=script_json(about), label=label, id=about["id"])


def label_page(about: dict[str, Any]) -> HTMLResponse:
    """The answers of a run, one at a time, for a person to label."""
    script = _script(("dom.js", "theme.js", "tip.js"), ("label.js",))
    return _page("label.html", f"Label {about['name']}", script, about=script_json(about))


def document_page(kind: str, title: str, markup: Markup) -> HTMLResponse:
    """A comparison (`compare`) or a `sweep`, whose content is in its markup."""
    return _page("view_document.html", title, _script(DOCUMENT_SCRIPTS, ()), kind=kind, main=markup)


def side_by_side_headers() -> dict[str, str]:
    """The headers of a page of several runs, which is the one of the report: its script and style by their digests."""
    return {"content-security-policy": f"{page_head()['policy']}; frame-ancestors 'none'"}


def no_comparison(reason: str) -> HTMLResponse:
    """Why these runs cannot be compared."""
    page = document_page("compare", "No comparison", render("message.html", title="No comparison", message=reason))
    page.status_code = 409
    return page


def _page(template: str, title: str, script: str, **more: Any) -> HTMLResponse:
    nonce = secrets.token_urlsafe(16)
    values = {"nonce": nonce, "title": title, "style": Markup(_style()), "script": Markup(script), **more}
    text = environment("steelyard.view", "steelyard.report").get_template(template).render(values)
    return HTMLResponse(text, headers={"content-security-policy": page_policy(nonce)})


@cache
def _style() -> str:
    return "\n".join([style_sheet("compare.css", "sweep.css"), asset("view.css", "steelyard.view")])


@cache
def _script(shared: tuple[str, ...], own: tuple[str, ...]) -> str:
    return join_scripts([*map(asset, shared), *(asset(name, "steelyard.view") for name in own)])


Values = npt.NDArray[np.float64]

NO_CHARTS = {
    "first": None,
    "last": None,
    "output": None,
    "over_time": None,
    "points": None,
    "cached_input": 0,
    "reasoning": 0,
}
"""The charts of a page whose journal is still being read."""

PERCENTILES = (50, 90, 99)
_ERROR = STATES.index("error")
_RECENT = 10.0
"""Seconds that the present throughput is taken over."""
_MAX_KINDS = 6


def in_case_order(rows: Rows) -> Rows:
    """The rows that count, those of one case together."""
    kept = counting(rows)
    if not kept["trial"].any():
        return kept[np.argsort(kept["index"], kind="stable")]
    return kept[np.lexsort((kept["trial"], kept["id"], kept["index"]))]


def states_of(rows: Rows) -> npt.NDArray[np.uint8]:
    """What became of each record, as a position in STATES."""
    return np.where(rows["ok"] == 1, rows["verdict"], _ERROR).astype(np.uint8)


def counts_of(states: npt.NDArray[np.uint8]) -> dict[str, int]:
    """How many there are of each state."""
    return dict(zip(STATES, np.bincount(states, minlength=len(STATES)).tolist(), strict=True))


def charts(rows: Rows) -> dict[str, Any]:
    """The charts of the report, of rows in case order."""
    states = states_of(rows)
    measured = (rows["ok"] == 1) & (rows["cached"] == 0)
    first, last, at, output = (rows[name].astype(np.float64) for name in ("first", "last", "at", "output"))
    return {
        **report_page.charts(first, last, output, at, states, measured),
        **{name: round(_total(rows[name][measured])) for name in ("cached_input", "reasoning")},
    }


def live_figures(rows: Rows, kinds: Sequence[str], quiet: float) -> dict[str, Any]:
    """The numbers and curves of a run so far; `quiet` is for how many seconds nothing has finished."""
    counted = counting(rows)
    states = states_of(counted)
    counts = counts_of(states)
    scored = counts["passed"] + counts["failed"]
    measured = counted[(counted["ok"] == 1) & (counted["cached"] == 0)]
    return {
        "n": len(counted),
        "counts": counts,
        "pass_rate": counts["passed"] / scored if scored else None,
        "pass_rate_all": counts["passed"] / len(counted) if len(counted) else None,
        # Trials of a case count together, which is worked out at the end.
        "pass_rate_ci95": None if counted["trial"].any() else clopper_pearson(counts["passed"], scored),
        "errors": _error_kinds(counted[states == _ERROR], kinds),
        "first": _percentiles(measured["first"]),
        "last": _percentiles(measured["last"]),
        "tokens": [_total(measured[name]) for name in ("input", "output")],
        "cost": _total(rows["cost"]) if np.isfinite(rows["cost"]).any() else None,
        "rate": _rate_now(rows["at"], quiet),
        "seconds": _latest(rows["at"]),
        "over_time": _curves(rows),
    }


def _percentiles(values: npt.NDArray[Any]) -> list[float] | None:
    known = values[np.isfinite(values)].astype(np.float64)
    return [_short(one) for one in np.percentile(known, PERCENTILES)] if len(known) else None


def _total(values: npt.NDArray[Any]) -> float:
    return float(np.nansum(values, dtype=np.float64))


def _latest(at: npt.NDArray[Any]) -> float:
    known = at[np.isfinite(at)]
    return float(known.max()) if len(known) else 0.0


def _rate_now(at: npt.NDArray[Any], quiet: float) -> float:
    """Records a second of late: none of them if nothing has finished for longer than that."""
    now = _latest(at) + max(quiet, 0.0)
    stretch = min(_RECENT, now)
    return _short(float((at > now - stretch).sum()) / stretch) if stretch > 0 else 0.0


def _error_kinds(errors: Rows, kinds: Sequence[str]) -> list[tuple[str, int]]:
    counted = np.bincount(errors["kind"], minlength=1)
    ranked = np.argsort(-counted, kind="stable")[:_MAX_KINDS].tolist()
    return [(kinds[number], int(counted[number])) for number in ranked if counted[number]]


def _curves(rows: Rows) -> dict[str, Any] | None:
    """Records and errors in each stretch of the run, and the percentiles of the times of those that finished in it."""
    at = rows["at"].astype(np.float64)
    found = report_page.over_time(at, states_of(rows))
    if found is None:
        return None
    bins = len(found["finished"])
    measured = (rows["ok"] == 1) & (rows["cached"] == 0) & np.isfinite(at) & np.isfinite(rows["last"])
    place = np.minimum((at[measured] / found["width"]).astype(np.int64), bins - 1)
    order = np.argsort(place, kind="stable")
    times = rows["last"][measured][order].astype(np.float64)
    pieces = np.split(times, np.searchsorted(place[order], np.arange(1, bins)))
    return {**found, "times": [_percentiles(piece) for piece in pieces]}


def _short(value: float) -> float:
    return float(f"{value:.5g}") if math.isfinite(value) else 0.0
