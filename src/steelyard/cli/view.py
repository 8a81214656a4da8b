"""`steelyard view`: a local page over the runs in a folder."""

from __future__ import annotations

import asyncio
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
    help="Address to listen on. One that others can reach asks for the token in the printed address.",
)
@click.option(
    "--open/--no-open",
    "opening",
    default=None,
    help="Open a browser [default: where there is a desktop to open it on].",
)
def command(place: Path, port: int, host: str, opening: bool | None) -> int:
    """Show the runs in DIR (default: runs), or one RUN, as a page in a browser: live while a run is being written.

    Prints its address on stdout. It only reads: nothing can be changed through it.
    """
    try:
        from steelyard.view.server import ViewServer
    except ImportError as error:
        raise ConfigurationError(f"view needs {error.name}: pip install 'steelyard[view]'") from error
    if not place.is_dir() and place == RUNS:
        raise ConfigurationError(f"there is no folder {RUNS} here; steelyard run SUITE makes one")
    server = ViewServer(place, host=host, port=port)
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


def _has_desktop() -> bool:
    """Whether there is a local desktop to open a browser on, and a terminal."""
    graphical = sys.platform in ("darwin", "win32") or "DISPLAY" in os.environ or "WAYLAND_DISPLAY" in os.environ
    return graphical and sys.stdout is not None and sys.stdout.isatty()


def _open(url: str) -> None:
    """Open the address in the reader's browser, which may take its time."""
    import webbrowser

    threading.Thread(target=webbrowser.open, args=(url,), daemon=True).start()
