"""HTML pages that need no network: their templates, their assets, and the policy that allows nothing else."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterable
from functools import cache
from importlib.resources import files
from typing import Any

import msgspec
from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from steelyard._version import __version__
from steelyard.stats.formatting import escape_invisible

DOCUMENT_SCRIPTS = ("theme.js", "tip.js", "chart_keys.js")
"""The scripts of a page whose content is in its markup."""


def asset(name: str, package: str = "steelyard.report") -> str:
    """One of the style sheets and scripts that pages are made of."""
    return (files(package) / "assets" / name).read_text(encoding="utf-8")


def style_sheet(*names: str) -> str:
    """The style sheets that every page has, and these."""
    return "\n".join(map(asset, ("colors.css", "page.css", "chart.css", *names)))


def join_scripts(scripts: Iterable[str]) -> str:
    """Scripts as the one that a page runs."""
    return "\n".join(['"use strict";', *scripts])


@cache
def environment(*packages: str) -> Environment:
    """The templates of these packages, the first one's before the others'.

    Whatever a template prints is escaped, and characters that cannot be seen are made visible, unless it is `Markup`.
    """
    made = Environment(
        loader=ChoiceLoader([PackageLoader(package) for package in packages]),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=_shown,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    made.filters["number"] = lambda number: f"{number:,}"
    made.globals["version"] = __version__
    return made


def render(template: str, **values: Any) -> Markup:
    """A template of the reports, filled in."""
    return Markup(environment("steelyard.report").get_template(template).render(values))


def _shown(value: Any) -> Any:
    return value if isinstance(value, Markup) else escape_invisible(str(value))


def document(kind: str, title: str, main: Markup) -> str:
    """A whole page whose content is in its markup: a comparison (`compare`) or a `sweep`."""
    values = head(f"{kind}.css", scripts=DOCUMENT_SCRIPTS)
    return str(render("document.html", kind=kind, title=title, main=main, **values))


def head(*styles: str, scripts: Iterable[str]) -> dict[str, Markup]:
    """The style sheet and the script of a page, and the policy that allows these two alone."""
    style, script = style_sheet(*styles), join_scripts(map(asset, scripts))
    return {"style": Markup(style), "script": Markup(script), "policy": Markup(policy(script, style))}


def script_json(value: Any) -> Markup:
    """JSON for a script element: pure ASCII, and nothing in it opens, closes or comments."""
    text = json.dumps(msgspec.to_builtins(value), separators=(",", ":"))
    return Markup(text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026"))


def policy(script: str, style: str) -> str:
    """The Content-Security-Policy of a page with this one script and this one style sheet."""
    return (
        f"default-src 'none'; script-src '{_source(script)}'; style-src '{_source(style)}'; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )


def _source(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
