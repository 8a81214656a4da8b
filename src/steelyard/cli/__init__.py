"""The command line: one file a command, each imported only when it is asked for."""

from __future__ import annotations

from steelyard.cli.main import main

__all__ = ["main"]
