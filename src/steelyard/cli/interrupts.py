"""Ctrl-C and SIGTERM: the first stops the run politely, the second at once. Nothing finished is lost either way."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

import click
import msgspec

from steelyard.engine.cancellation import CancellationToken
from steelyard.engine.threaded import LoopThread
from steelyard.errors import RunCancelled
from steelyard.result import Result
from steelyard.runner import Runner

_PATIENCE = 5.0
"""Seconds from the first signal until the process ends, whatever a target does."""


class Ending(msgspec.Struct, frozen=True):
    """How a run ended: its result, and the exit code of the signal that stopped it, 0 if none did."""

    result: Result | None
    signal_code: int


class _Signals:
    """Cancels a token at the first signal, ends the process at the second."""

    def __init__(self, token: CancellationToken, resume_with: str) -> None:
        self._token = token
        self._resume_with = resume_with
        self.code = 0
        self.deadline = float("inf")

    def __call__(self, number: int, frame: FrameType | None) -> None:  # noqa: ARG002 - a handler's signature
        if self.code:
            self.leave("killed")
        self.code = 128 + number
        self.deadline = time.monotonic() + _PATIENCE
        _say(f"{signal.Signals(number).name}: cancelling the calls in flight; once more to kill")
        self._token.cancel(signal.Signals(number).name)

    def leave(self, how: str) -> None:
        """End the process now. What finished is in the kernel's hands already."""
        _say(f"{how}; resume with: {self._resume_with}")
        sys.stdout.flush()
        os._exit(self.code)


def run_interruptibly(runner: Runner, resume_with: str, **entry: Any) -> Ending:
    """Run to the end or to the first signal; the process never outlives that by more than five seconds."""
    runner.token = CancellationToken()
    signals = _Signals(runner.token, resume_with)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signals)
    running = LoopThread(runner.run(**entry), _loop_factory())
    while not running.wait(0.2):
        if time.monotonic() > signals.deadline:
            signals.leave("a call does not end; leaving it behind")
    try:
        return Ending(running.result(), signals.code)
    except RunCancelled as error:
        _say(str(error))
        return Ending(None, signals.code)


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """uvloop's where it is installed: a choice of the command line, never made at import."""
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop


def _say(text: str) -> None:
    click.echo(f"\nsteelyard: {text}", err=True)
