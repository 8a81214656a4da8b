"""The log on stderr, in the same plain words as everything else."""

from __future__ import annotations

import logging
import sys

import click


class _Handler(logging.Handler):
    """Writes each message as one line that says who speaks."""

    def emit(self, record: logging.LogRecord) -> None:
        level = "" if record.levelno < logging.WARNING else f"{record.levelname.lower()}: "
        click.echo(f"steelyard: {level}{self.format(record)}", err=True)
        sys.stderr.flush()


def log_to_stderr(*, quiet: bool, verbose: bool) -> None:
    """Show the library's log: notices by default, only errors when quiet, everything when verbose."""
    log = logging.getLogger("steelyard")
    log.handlers[:] = [_Handler()]
    log.propagate = False
    log.setLevel(logging.ERROR if quiet else logging.DEBUG if verbose else logging.INFO)
