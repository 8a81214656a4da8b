"""`steelyard explain`: the sections of docs/troubleshooting.md in the terminal, without a network."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator
from importlib import resources
from typing import NamedTuple

import click
from click.shell_completion import CompletionItem

from steelyard.cli.main import WIDEST, terminal_columns
from steelyard.cli.output import show
from steelyard.errors import ConfigurationError

_SECTION = re.compile(
    r'^<a id="(?P<name>[\w-]+)"></a>\n\n(?P<level>##+) (?P<title>.+)\n(?P<text>(?:(?!<a id=).*\n?)*)', re.M
)
_LINK = re.compile(r"\[(?P<text>[^\]]+)\]\((?P<page>[\w-]+\.md)[^)]*\)")
_CHAPTER = "##"


class Topic(NamedTuple):
    """A section of the page."""

    name: str
    title: str
    text: str
    is_chapter: bool
    """Whether others follow that belong to it."""


def topics() -> dict[str, Topic]:
    """All sections by name, in the order of the page."""
    page = resources.files("steelyard.cli").joinpath("troubleshooting.md").read_text(encoding="utf-8")
    return {
        found["name"]: Topic(found["name"], found["title"], found["text"].strip(), found["level"] == _CHAPTER)
        for found in _SECTION.finditer(page)
    }


def _complete(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:  # noqa: ARG001
    return [CompletionItem(one.name, help=one.title) for one in topics().values() if one.name.startswith(incomplete)]


@click.command("explain")
@click.argument("topic", required=False, shell_complete=_complete)
def command(topic: str | None) -> int:
    """Explain a message: what it means and what to do.

    Many messages name their TOPIC. Without one, all topics are listed.
    """
    known = topics()
    width = min(terminal_columns(), WIDEST)
    if topic is None:
        show("\n".join(_listed(known, width)))
        return 0
    name = topic.lower()
    if name not in known:
        raise ConfigurationError(f"no topic is named {topic!r}; {_hint(name, known)}")
    show(_explained(known[name], width))
    return 0


def _listed(known: dict[str, Topic], width: int) -> Iterator[str]:
    """A line for each topic, below the title of its chapter."""
    column = max(map(len, known)) + 4
    for number, topic in enumerate(known.values()):
        if topic.is_chapter:
            yield from ([""] if number else []) + [topic.title]
        title = "in general" if topic.is_chapter else topic.title
        yield textwrap.fill(f"{f'  {topic.name}':<{column}}{title}", width, subsequent_indent=" " * column)


def _hint(name: str, known: dict[str, Topic]) -> str:
    """The topics that are most like a name, else those whose text has it."""
    import difflib

    near = difflib.get_close_matches(name, known, n=3)
    if near:
        return f"the nearest: {', '.join(near)}"
    having = [topic.name for topic in known.values() if name in f"{topic.title} {topic.text}".lower()]
    if having:
        return f"it is mentioned in: {', '.join(having)}"
    return "steelyard explain lists all topics"


def _explained(topic: Topic, width: int) -> str:
    """A section as plain text, wrapped; a link is the name of its page."""
    text = _LINK.sub(lambda found: f"{found['text']} (docs/{found['page']})", topic.text)
    paragraphs = [textwrap.fill(part, width, break_on_hyphens=False) for part in (topic.title, *text.split("\n\n"))]
    return "\n\n".join(paragraphs)
