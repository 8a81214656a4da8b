"""Logs of an attempt: `logs/ID/TRIAL.out` and `.err`, written as output comes, with secrets masked."""

from __future__ import annotations

import codecs
import os
import threading
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from steelyard.masking import Masker, environment_masker, environment_secrets

STREAMS = ("out", "err")


class AttemptLogs:
    """The logs of one attempt. Those of an earlier attempt at the same case are moved aside."""

    def __init__(self, paths: dict[str, Path | None], masker: Masker | None = None) -> None:
        self._paths = paths
        self._masker = masker or environment_masker()
        self._open: dict[str, _Log] = {}
        self._lock = threading.Lock()
        for path in paths.values():
            if path is not None:
                _move_aside(path)

    def __call__(self, text: str | bytes, stream: str = "out") -> None:
        """Append to a log, at once but for what may be the beginning of a secret."""
        with self._lock:
            log = self._open.get(stream)
            if log is None:
                path = self._paths.get(stream)
                if path is None:
                    return
                path.parent.mkdir(parents=True, exist_ok=True)
                log = self._open[stream] = _Log(path, self._masker)
            log.write(text.encode("utf-8", "surrogateescape") if isinstance(text, str) else text)

    def mask(self, secrets: Iterable[str]) -> None:
        """Have these texts masked, too, in logs that are not open yet."""
        self._masker = Masker([*environment_secrets(), *secrets])

    def close(self) -> None:
        """Write the rest and close the files."""
        with self._lock:
            for log in self._open.values():
                log.close()
            self._open.clear()


class _Log:
    """One file, to which output is written as it comes, without secrets that it may contain."""

    def __init__(self, path: Path, masker: Masker) -> None:
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        self._masker = masker
        self._decoder = codecs.getincrementaldecoder("utf-8")("surrogateescape")
        self._held = ""

    def write(self, data: bytes) -> None:
        if not self._masker.longest:
            self._append(data)
            return
        text = self._masker.text(self._held + self._decoder.decode(data))
        kept = self._masker.longest - 1
        self._held = text[len(text) - kept :] if kept and len(text) > kept else text if kept else ""
        self._append(text[: len(text) - len(self._held)].encode("utf-8", "surrogateescape"))

    def _append(self, data: bytes) -> None:
        with suppress(OSError):  # a full disk must not end the agent: its record says what it answered
            while data:
                data = data[os.write(self._descriptor, data) :]

    def close(self) -> None:
        text = self._masker.text(self._held + self._decoder.decode(b"", final=True))
        self._append(text.encode("utf-8", "surrogateescape"))
        os.close(self._descriptor)


def _move_aside(path: Path) -> None:
    """Keep the log of an earlier attempt, under `TRIAL.1.out`, `TRIAL.2.out` and so on."""
    if not path.exists():
        return
    number = 1
    while (aside := path.with_name(f"{path.stem}.{number}{path.suffix}")).exists():
        number += 1
    path.rename(aside)
