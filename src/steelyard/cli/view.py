"""`steelyard view`: a local page over the runs in a folder."""

from __future__ import annotations

import asyncio
import getpass
import os
import signal
import sys
import threading
from pathlib import Path

import click

from steelyard.cli.output import say, show
from steelyard.cli.output_dir import RUNS
from steelyard.cli.run_control import loop_factory
from steelyard.errors import ConfigurationError


@click.command("view")
@click.argument("place", metavar="[RUN | DIR]", type=click.Path(path_type=Path), default=RUNS)
@click.option("--port", type=int, default=0, help="Port to listen on [default: a free one].")
@click.option(
    "--host",
    default="127.0.0.1",
    show_default=True,
    help="Address to listen on. Other machines then need the token in the printed address.",
)
@click.option(
    "--open/--no-open",
    "opening",
    default=None,
    help="Open a browser [default: if there is a desktop].",
)
@click.option(
    "--label", is_flag=True, help="Also label answers, as with `steelyard label`: on this machine, with a token."
)
@click.option("--labeller", metavar="NAME", help="Who labels, with --label [default: the user's name].")
def command(
    place: Path, port: int, host: str, opening: bool | None, label: bool = False, labeller: str | None = None
) -> int:
    """Show the runs in DIR (default: runs), or one RUN, in a browser; live while a run is being written.

    Prints the address on stdout. The page is read-only, except that --label adds labels.
    """
    if labeller is not None and not label:
        raise click.UsageError("--labeller needs --label")
    name = (labeller if labeller is not None else user_name()) if label else None
    return serve(place, name, host=host, port=port, opening=opening)


def serve(
    place: Path, labeller: str | None = None, *, host: str = "127.0.0.1", port: int = 0, opening: bool | None = None
) -> int:
    """Serve runs until a signal comes; for labels too where there is a labeller."""
    try:
        from steelyard.view.server import ViewServer
    except ImportError as error:
        raise ConfigurationError(f"view needs {error.name}: pip install 'steelyard[view]'", topic="extra") from error
    if not place.is_dir() and place == RUNS:
        raise ConfigurationError(f"there is no folder {RUNS} here; steelyard run SUITE makes one")
    server = ViewServer(place, host=host, port=port, labeller=labeller)
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        runner.run(_serve(server, _has_desktop() if opening is None else opening))
    return 0


async def _serve(server: object, opening: bool) -> None:
    """Serve until a signal comes; that is how a server ends, so it is no failure."""
    from steelyard.view.server import ViewServer

    assert isinstance(server, ViewServer)
    stopped = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stopped.set)
    async with server:
        show(server.url)
        sys.stdout.flush()
        say("serving; Ctrl-C ends it")
        if opening:
            _open(server.url)
        await stopped.wait()


def user_name() -> str:
    """The name of who is logged in."""
    try:
        return getpass.getuser()
    except (OSError, KeyError):  # a user without a name, as in some containers
        return "labeller"


def _has_desktop() -> bool:
    """Whether there is a local desktop to open a browser on, and a terminal."""
    graphical = sys.platform in ("darwin", "win32") or "DISPLAY" in os.environ or "WAYLAND_DISPLAY" in os.environ
    return graphical and sys.stdout is not None and sys.stdout.isatty()


def _open(url: str) -> None:
    """Open the address in the reader's browser, which may take its time."""
    import webbrowser

    threading.Thread(target=webbrowser.open, args=(url,), daemon=True).start()
