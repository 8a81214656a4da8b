"""`steelyard plugins`: every target, scorer, store, report format, prompt and hook that can be used by name."""

from __future__ import annotations

import textwrap
from typing import get_args

import click

from steelyard.cli.output import show, show_json
from steelyard.plugins import Kind, Plugin, plugins_of
from steelyard.stats.formatting import safe_text

_WIDTH = 80
_TITLES: dict[Kind, str] = {"run_metrics": "run metrics", "reports": "report formats", "prompts": "judge prompts"}


@click.command("plugins")
@click.option("--json", "as_json", is_flag=True, help="Print the list as JSON.")
def command(as_json: bool) -> int:
    """List what suites and commands can use by name: the built-in ones, then what installed packages add.

    Plugins of packages are loaded to check that they work. Nothing is called.
    """
    kinds: tuple[Kind, ...] = get_args(Kind)
    found = {kind: plugins_of(kind) for kind in kinds}
    if as_json:
        show_json([plugin for plugins in found.values() for plugin in plugins])
    else:
        show("\n\n".join(_section(kind, plugins) for kind, plugins in found.items()))
    return 0


def _section(kind: Kind, plugins: list[Plugin]) -> str:
    lines = [_TITLES.get(kind, kind)]
    width = max((len(plugin.name) for plugin in plugins), default=0)
    for plugin in plugins:
        source = "" if plugin.package == "steelyard" else f", of {plugin.package} {plugin.version or ''}".rstrip()
        lines += _wrapped(f"{plugin.name:<{width}}  {plugin.object}{source}", "  ")
        if plugin.problem is not None:
            lines += _wrapped(f"cannot be used: {plugin.problem}", " " * 4)
    return "\n".join(lines if plugins else [*lines, "  none"])


def _wrapped(text: str, indent: str) -> list[str]:
    """The text in lines, between words: a name to copy stays whole."""
    return textwrap.wrap(
        safe_text(text),
        _WIDTH,
        initial_indent=indent,
        subsequent_indent=f"{indent}    ",
        break_long_words=False,
        break_on_hyphens=False,
    )
