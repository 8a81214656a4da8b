"""The pages themselves: a frame, the report's own look and scripts, and what is different while a run is live."""

from __future__ import annotations

import secrets
from functools import cache
from importlib.resources import files
from typing import Any

from starlette.responses import HTMLResponse

from steelyard._version import __version__
from steelyard.report.page import PARTS
from steelyard.report.page_frame import asset, escaped, filled, program, script_json
from steelyard.view.security import page_policy

_STYLES = ("page.css", "compare.css", "sweep.css")


def list_page(about: dict[str, Any]) -> HTMLResponse:
    """The runs in the folder."""
    return _page("list.html", "Runs", ("dom.js", "theme.js", "charts.js"), ("list.js",), about)


def run_page(about: dict[str, Any]) -> HTMLResponse:
    """One run: live, or its report."""
    return _page("run.html", about["name"], PARTS, ("remote.js", "live.js", "run.js"), about)


def document_page(kind: str, title: str, markup: str) -> HTMLResponse:
    """A comparison (`compare`) or a `sweep`, made up already."""
    return _page("document.html", title, ("theme.js", "theme_key.js"), (), {}, KIND=kind, MAIN=markup)


def no_comparison(reason: str) -> HTMLResponse:
    """Why these runs cannot be compared."""
    page = document_page("compare", "No comparison", f'<p class="empty">{escaped(reason)}</p>')
    page.status_code = 409
    return page


def _page(
    frame: str, title: str, report: tuple[str, ...], own: tuple[str, ...], about: dict[str, Any], **more: str
) -> HTMLResponse:
    nonce = secrets.token_urlsafe(16)
    values = {
        "NONCE": nonce,
        "VERSION": __version__,
        "TITLE": escaped(title),
        "STYLE": _style(),
        "ABOUT": script_json(about),
        "SCRIPT": _script(report, own),
        **more,
    }
    text = filled(_own_asset("frame.html").replace("@@BODY@@", _own_asset(frame)), values)
    return HTMLResponse(text, headers={"content-security-policy": page_policy(nonce)})


def _own_asset(name: str) -> str:
    return (files("steelyard.view") / "assets" / name).read_text(encoding="utf-8")


@cache
def _style() -> str:
    return "\n".join([*(asset(name) for name in _STYLES), _own_asset("view.css")])


@cache
def _script(report: tuple[str, ...], own: tuple[str, ...]) -> str:
    return program([*map(asset, report), *map(_own_asset, own)])
