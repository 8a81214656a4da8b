"""The pages themselves: a frame, the report's own look and scripts, and what is different while a run is live."""

from __future__ import annotations

import html
import re
import secrets
from functools import cache
from importlib.resources import files
from typing import Any

from starlette.responses import HTMLResponse

from steelyard._version import __version__
from steelyard.report.page import asset, script_json
from steelyard.report.visible import visible
from steelyard.view.security import page_policy

_STYLES = ("page.css", "compare.css")
_COMMON = ("dom.js", "theme.js")
_REPORT = (*_COMMON, "charts.js", "overview.js", "cases.js", "table.js", "diff.js", "drawer.js")


def list_page(about: dict[str, Any]) -> HTMLResponse:
    """The runs in the folder."""
    return _page("list.html", "Runs", (*_COMMON, "charts.js"), ("list.js",), about)


def run_page(about: dict[str, Any]) -> HTMLResponse:
    """One run: live, or its report."""
    return _page("run.html", about["name"], _REPORT, ("remote.js", "live.js", "run.js"), about)


def compare_page(title: str, markup: str) -> HTMLResponse:
    """A comparison, made up already."""
    return _page("compare.html", title, _COMMON, ("compare.js",), {}, markup)


def no_comparison(reason: str) -> HTMLResponse:
    """Why these runs cannot be compared."""
    page = compare_page("No comparison", f'<p class="empty">{html.escape(visible(reason))}</p>')
    page.status_code = 409
    return page


def _page(
    frame: str, title: str, report: tuple[str, ...], own: tuple[str, ...], about: dict[str, Any], markup: str = ""
) -> HTMLResponse:
    nonce = secrets.token_urlsafe(16)
    filled = {
        "NONCE": nonce,
        "VERSION": __version__,
        "TITLE": html.escape(visible(title)),
        "STYLE": _style(),
        "ABOUT": script_json(about),
        "MAIN": markup,
        "SCRIPT": _script(report, own),
    }
    text = re.sub(
        r"@@([A-Z]+)@@", lambda found: filled[found[1]], _own_asset("frame.html").replace("@@BODY@@", _own_asset(frame))
    )
    return HTMLResponse(text, headers={"content-security-policy": page_policy(nonce)})


def _own_asset(name: str) -> str:
    return (files("steelyard.view") / "assets" / name).read_text(encoding="utf-8")


@cache
def _style() -> str:
    return "\n".join([*(asset(name) for name in _STYLES), _own_asset("view.css")])


@cache
def _script(report: tuple[str, ...], own: tuple[str, ...]) -> str:
    return "\n".join([*(asset(name) for name in report), *(_own_asset(name) for name in own)])
