"""Carries what a worker logs, and its warnings, to the log of the driver."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import pickle
import warnings
from typing import TextIO

import msgspec

from steelyard.engine.workers.messages import LOGGED, MessageQueue, WorkerInfo
from steelyard.engine.workers.pickling import pickle_item

_MAX_TEXT = 64 * 1024
"""Characters of one message; the rest is left out."""

_installed: list[LogForwarder] = []
"""One for each run that this process hosts. Only the first forwards: nothing should come twice."""


class LogEntry(msgspec.Struct):
    """Something that was logged, or a warning."""

    text: str
    logger: str = ""
    level: int = logging.WARNING
    path: str = ""
    line: int = 0
    category: type[Warning] | None = None


class LogForwarder(logging.Handler):
    """Sends what this process logs to the driver, while one of its runs is hosted here."""

    def __init__(self, queue: MessageQueue) -> None:
        super().__init__()
        self._queue = queue
        self._loop = asyncio.get_running_loop()
        self._pid = os.getpid()
        self._show_warning = warnings.showwarning

    def install(self) -> None:
        """Begin to forward."""
        if not _installed:
            warnings.showwarning = self._forward_warning
        _installed.append(self)
        logging.root.addHandler(self)

    def remove(self) -> None:
        """Forward nothing more."""
        logging.root.removeHandler(self)
        if self in _installed:
            _installed.remove(self)
        if not _installed:
            warnings.showwarning = self._show_warning

    def emit(self, record: logging.LogRecord) -> None:
        """Forward a record as text, with the traceback of its exception."""
        try:
            text = self.format(record)
        except Exception:  # noqa: BLE001 - arguments that do not fit, as logging itself would report
            self.handleError(record)
            return
        self._send(LogEntry(text[:_MAX_TEXT], record.name, record.levelno, record.pathname, record.lineno))

    def _forward_warning(
        self,
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: TextIO | None = None,  # noqa: ARG002 - the signature of warnings.showwarning
        line: str | None = None,  # noqa: ARG002
    ) -> None:
        entry = LogEntry(str(message)[:_MAX_TEXT], path=filename, line=lineno, category=category)
        (_installed[0] if _installed else self)._send(entry)

    def _send(self, entry: LogEntry) -> None:
        if not _installed or _installed[0] is not self or os.getpid() != self._pid:
            return
        item = (LOGGED, 0, pickle_item(entry))
        try:
            on_loop = asyncio.get_running_loop() is self._loop
        except RuntimeError:
            on_loop = False
        if on_loop:
            self._queue.put(item)
        else:
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody listens
                self._loop.call_soon_threadsafe(self._queue.put, item)


def log_here(worker: WorkerInfo | None, content: bytes) -> None:
    """Log in the driver what a worker logged; a warning is one here, by the filters that are set here."""
    try:
        entry: LogEntry = pickle.loads(content)
    except Exception:  # noqa: BLE001 - a category that is defined in a module of the worker's alone
        return
    if entry.category is not None:
        with contextlib.suppress(Warning):  # turned into an error: it was raised on the worker where that is set there
            warnings.warn_explicit(entry.text, entry.category, entry.path, entry.line)
        return
    logger = logging.getLogger(entry.logger)
    if logger.isEnabledFor(entry.level):
        record = logger.makeRecord(entry.logger, entry.level, entry.path, entry.line, "%s", (entry.text,), None)
        record.processName = worker.name if worker is not None else record.processName
        logger.handle(record)
