"""The log on stderr, in the same plain words as everything else."""

from __future__ import annotations

import logging

from steelyard.cli.output import say


class _Handler(logging.Handler):
    """Says each message."""

    def emit(self, record: logging.LogRecord) -> None:
        level = "" if record.levelno < logging.WARNING else f"{record.levelname.lower()}: "
        say(f"{level}{self.format(record)}")


def log_to_stderr(*, quiet: bool, verbose: bool) -> None:
    """Show the library's log: notices by default, only errors when quiet, everything when verbose."""
    log = logging.getLogger("steelyard")
    log.handlers[:] = [_Handler()]
    log.propagate = False
    log.setLevel(logging.ERROR if quiet else logging.DEBUG if verbose else logging.INFO)
