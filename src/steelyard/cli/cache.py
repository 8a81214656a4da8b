"""`steelyard cache info|clear`: what a cache of answers holds, and emptying it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import click

from steelyard.cache.store import ManagedStore, StoreError, open_store, parse_store, path_of
from steelyard.cli.click_types import Parsed
from steelyard.cli.group import CommandGroup
from steelyard.cli.main import BROKEN
from steelyard.cli.output import say, show, show_json, with_topic
from steelyard.errors import ConfigurationError
from steelyard.stats.formatting import counted, safe_text

CACHE = Path(".steelyard/cache")
_SQLITE_ENDINGS = (".sqlite", ".db")

_place = click.argument("place", metavar="[DIR]", type=Parsed(parse_store), default=CACHE)


@click.group("cache", cls=CommandGroup)
def command() -> None:
    """Show or clear a cache of answers.

    DIR is a folder, a .sqlite or .db file, or STORE:PLACE; without it .steelyard/cache.
    """


@command.command("info")
@_place
@click.option("--json", "as_json", is_flag=True, help="Print it as JSON.")
def info(place: str | Path, as_json: bool) -> int:
    """Show how many answers are in DIR, and their size."""
    try:
        with _opened(place) as store:
            held = store.info()
    except StoreError as error:
        return _broken(error)
    if as_json:
        show_json({"path": str(place), "entries": held.entries, "bytes": held.bytes})
    else:
        show(f"{safe_text(str(place))}: {counted(held.entries, 'answer')}, {_size(held.bytes)}")
    return 0


@command.command("clear")
@_place
@click.option("--suite", metavar="ID", help="Only the answers of the suite with this id.")
@click.option("-y", "--yes", is_flag=True, help="Do not ask for confirmation.")
def clear(place: str | Path, suite: str | None, yes: bool) -> int:
    """Remove the answers in the cache in DIR. Other files are kept."""
    try:
        with _opened(place) as store:
            if not yes and not _confirmed(place, suite, store.info().entries):
                say("nothing was removed")
                return 0
            removed = store.clear(suite)
    except StoreError as error:
        return _broken(error)
    show(f"{safe_text(str(place))}: {counted(removed, 'answer')} removed")
    return 0


@contextmanager
def _opened(place: str | Path) -> Iterator[ManagedStore]:
    """The store that is at a place. One that is not there is an error: to look must not make it."""
    store = _store(place)
    try:
        yield store
    finally:
        store.close()


def _store(place: str | Path) -> ManagedStore:
    if not isinstance(place, Path):
        return _named_store(place)
    if place.is_dir():
        from steelyard.cache.files import LocalFileTaskResultStore

        return LocalFileTaskResultStore(place)
    if not place.exists():
        raise ConfigurationError(f"there is no cache at {place}")
    if place.suffix.lower() not in _SQLITE_ENDINGS:
        raise ConfigurationError(f"{place} is neither a folder nor a {' or '.join(_SQLITE_ENDINGS)} file")
    from steelyard.cache.sqlite import SqliteTaskResultStore

    try:
        return SqliteTaskResultStore(place)
    except StoreError as error:
        raise ConfigurationError(str(error)) from error


def _named_store(text: str) -> ManagedStore:
    """A store that is named and not found at a path, if it can be looked at."""
    path = path_of(text)
    if path is not None and not path.exists():
        raise ConfigurationError(f"there is no cache at {path}")
    store = open_store(text)
    if not isinstance(store, ManagedStore):
        raise ConfigurationError(f"{text} cannot be shown or cleared: the store needs info, clear and close")
    return store


def _confirmed(place: str | Path, suite: str | None, entries: int) -> bool:
    """Whether the person at the terminal agrees; where there is nobody to ask, that is a mistake, not a yes."""
    answers = counted(entries, "answer")
    what = answers if suite is None else f"those of suite {suite!r} among {answers}"
    try:
        return click.confirm(safe_text(f"Remove {what} in {place}?"), err=True)
    except click.Abort as error:
        if isinstance(error.__context__, KeyboardInterrupt):
            raise
        raise ConfigurationError(
            "no confirmation, so nothing was removed; use --yes to remove without asking"
        ) from error


def _broken(error: StoreError) -> int:
    say(with_topic(str(error), error.topic))
    return BROKEN


def _size(count: float) -> str:
    """Bytes as people read them: 512 B, 1.2 kB, 34 MB."""
    for unit in ("B", "kB", "MB"):
        if count < 999.5:
            return f"{count:.0f} {unit}" if unit == "B" or count >= 9.95 else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:,.1f} GB"
