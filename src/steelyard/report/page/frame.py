"""What pages that need no network are made of: their assets, the frame around them, and the policy that binds them."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import re
from collections.abc import Iterable, Mapping
from importlib.resources import files
from typing import Any

import msgspec

from steelyard._version import __version__
from steelyard.stats.formatting import visible

_THEME = ("theme.js", "theme_key.js")


def asset(name: str) -> str:
    """One of the files that pages are made of."""
    return (files("steelyard.report") / "assets" / name).read_text(encoding="utf-8")


def program(scripts: Iterable[str]) -> str:
    """Scripts as the one that a page runs."""
    return "\n".join(['"use strict";', *scripts])


def filled(frame: str, values: Mapping[str, str]) -> str:
    """The frame with its places filled; what is filled in is not looked at again."""
    return re.sub(r"@@([A-Z]+)@@", lambda found: values[found[1]], frame)


def document(title: str, kind: str, main: Iterable[str]) -> str:
    """A whole page whose content is there already: markup that is escaped, a look of its kind, the theme's switch."""
    style, script = asset("page.css") + asset(f"{kind}.css"), program(map(asset, _THEME))
    values = {
        "POLICY": policy(script, style),
        "VERSION": __version__,
        "TITLE": escaped(title),
        "STYLE": style,
        "KIND": kind,
        "MAIN": "\n".join(main),
        "SCRIPT": script,
    }
    return filled(asset("document.html"), values)


def escaped(text: str) -> str:
    """Text from elsewhere as markup that shows it, with what cannot be seen made visible."""
    return html.escape(visible(text))


def script_json(value: Any) -> str:
    """JSON that can stand inside a script element: pure ASCII, and nothing in it opens, closes or comments."""
    text = json.dumps(msgspec.to_builtins(value), separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def policy(script: str, style: str) -> str:
    """The Content-Security-Policy of a page with this one script and this one style sheet."""
    return (
        f"default-src 'none'; script-src '{_source(script)}'; style-src '{_source(style)}'; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )


def _source(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
