"""What is kept of an agent's work: its patch always, its logs, files by patterns; whole workspaces by rule.

Its turns are in `logs/ID/TRIAL.turns.jsonl`, a line for each message as it comes.
"""

from __future__ import annotations

import codecs
import fcntl
import logging
import os
import re
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

import msgspec

from steelyard.errors import CaseLimitReached, ConfigurationError
from steelyard.journal.files import ARTIFACTS
from steelyard.masking import Masker, environment_masker, environment_secrets
from steelyard.records import STOP_REASONS, Record, verdict
from steelyard.workspace.limits import AttemptLimits
from steelyard.workspace.patch import PatchSummary, scan
from steelyard.workspace.places import RunPlaces, remove_tree, safe_name
from steelyard.workspace.template import Workspace, copy_entry, copy_tree

log = logging.getLogger("steelyard")

PATCH = "workspace.patch"
SUMMARY = "workspace.json"
_KEPT = "kept-bytes"
KEPT_WORKSPACE = "workspace"
KEPT_FILES = "files"
STREAMS = ("out", "err")


class Keeper:
    """Keeps what is left of cases under artifacts/ID/TRIAL/ of a run directory, and counts the bytes."""

    def __init__(self, places: RunPlaces, workspace: Workspace) -> None:
        self._places = places
        self._workspace = workspace
        self._patterns = [re.compile(_as_regex(pattern)) for pattern in workspace.artifacts]
        self._lock = threading.Lock()
        self._used: int | None = None
        self.dropped = 0
        """Cases of this launch of which not everything was kept."""
        self._shared: Path | None = None
        """Where the processes of a run count together; None where there is one."""

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "_lock": None}

    def __setstate__(self, state: dict[str, object]) -> None:
        self.__dict__.update(state, _lock=threading.Lock())

    def share(self) -> None:
        """Count together with other processes, to which this keeper is sent after this."""
        self._shared = self._places.root / _KEPT
        self._shared.parent.mkdir(parents=True, exist_ok=True)
        self._shared.write_text(str(self._kept_so_far()))

    def close(self) -> None:
        """Remove what the processes counted in."""
        if self._shared is not None:
            self._shared.unlink(missing_ok=True)

    def write_patch(self, case_id: str, trial: int, patch: bytes, summary: PatchSummary) -> None:
        """Write down what an agent changed; whole or not at all."""
        folder = self._places.artifacts(case_id, trial)
        if folder is None:
            return
        folder.mkdir(parents=True, exist_ok=True)
        self._reserve(len(patch), always=True)
        for name, content in ((PATCH, patch), (SUMMARY, msgspec.json.encode(summary))):
            draft = folder / f".{name}.tmp"
            draft.write_bytes(content)
            draft.replace(folder / name)

    def keep(self, record: Record, workspace: Path | None) -> list[str]:
        """Keep files and, by rule, the whole workspace of a case; what could not be kept, for the record's notes."""
        folder = self._places.artifacts(record.id, record.trial)
        if folder is None or workspace is None or workspace.is_symlink() or not workspace.is_dir():
            return []  # there is none, or the agent put a link in its place
        notes: list[str] = []
        try:
            if self._patterns:
                self._keep_files(workspace, folder / KEPT_FILES, notes, record)
            if self._is_kept(record):
                self._keep_whole(workspace, folder / KEPT_WORKSPACE, notes, record)
        except OSError as error:
            notes.append(f"not everything could be kept of the workspace: {error.strerror or error}")
            log.warning("case %s: %s", record.id, notes[-1])
        self.dropped += bool(notes)
        return notes

    def _is_kept(self, record: Record) -> bool:
        if self._workspace.keep != "failed":
            return self._workspace.keep == "all"
        return record.status == "error" or verdict(record.scores) is False

    def _keep_files(self, workspace: Path, folder: Path, notes: list[str], record: Record) -> None:
        """Keep the files that a pattern matches. Links are not followed: they may lead to anything of the user's."""
        if folder.exists():
            remove_tree(folder)
        dropped, size = 0, 0
        for path, stamp in scan(workspace).stamps.items():
            if not any(pattern.fullmatch(path) for pattern in self._patterns):
                continue
            if (workspace / path).is_symlink() or not (workspace / path).is_file():
                continue
            if not self._reserve(stamp.size):
                dropped, size = dropped + 1, size + stamp.size
                continue
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            copy_entry(workspace / path, folder / path)
        if dropped:
            notes.append(f"artifacts not kept: {dropped}; max_disk ({self._workspace.max_disk:,} bytes) is used up")
            _count_dropped(record, dropped, size)

    def _keep_whole(self, workspace: Path, folder: Path, notes: list[str], record: Record) -> None:
        size, files = tree_size(workspace)
        if not self._reserve(size):
            _count_dropped(record, files, size)
            notes.append(
                f"workspace not kept ({size:,} bytes): max_disk ({self._workspace.max_disk:,} bytes) is used up"
            )
            return
        if folder.exists():
            remove_tree(folder)
        copy_tree(workspace, folder)

    def _reserve(self, size: int, *, always: bool = False) -> bool:
        """Count bytes that are about to be written; False where they are too many."""
        with self._lock, self._counting():
            if self._used is None:
                self._used = self._kept_so_far()
            if not always and self._used + size > self._workspace.max_disk:
                return False
            self._used += size
            return True

    @contextmanager
    def _counting(self) -> Iterator[None]:
        """Have the count of all processes, and pass it on."""
        if self._shared is None:
            yield
            return
        with self._shared.open("r+") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            self._used = int(file.read() or 0)
            yield
            file.seek(0)
            file.write(str(self._used))  # it only grows: nothing of the last number is left

    def _kept_so_far(self) -> int:
        run = self._places.run
        return tree_size(run / ARTIFACTS)[0] if run is not None else 0


def read_patch(run: Path, case_id: str, trial: int) -> tuple[bytes, PatchSummary]:
    """The patch of a case that a run has kept; ConfigurationError where there is none."""
    folder = run / ARTIFACTS / safe_name(case_id) / str(trial)
    try:
        summary = msgspec.json.decode((folder / SUMMARY).read_bytes(), type=PatchSummary)
        return (folder / PATCH).read_bytes(), summary
    except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"{run} has kept no patch of it") from error


def _count_dropped(record: Record, files: int, size: int) -> None:
    record.files_not_kept += files
    record.bytes_not_kept += size


def tree_size(folder: Path) -> tuple[int, int]:
    """Bytes and number of all files in a folder, `.git` included, without following links."""
    total = count = 0
    for place, _, files in os.walk(folder):
        for name in files:
            try:
                total += os.lstat(os.path.join(place, name)).st_size
                count += 1
            except OSError:
                continue
    return total, count


def _as_regex(pattern: str) -> str:
    """A file pattern as a regular expression: `**` matches folders too, `*` and `?` stay within a name."""
    parts = re.split(r"(\*\*/?|\*|\?)", pattern)
    known = {"**/": r"(?:.*/)?", "**": r".*", "*": r"[^/]*", "?": r"[^/]"}
    return "".join(known.get(part, re.escape(part)) for part in parts)


class AttemptLogs:
    """The logs of one attempt. Those of an earlier attempt at the same case are moved aside."""

    def __init__(self, paths: dict[str, Path | None], masker: Masker | None = None) -> None:
        self._paths = paths
        self.masker = masker or environment_masker()
        """Masks secrets in what is written."""
        self._open: dict[str, _Log] = {}
        self._lock = threading.Lock()
        for path in paths.values():
            if path is not None:
                move_aside(path)

    def __call__(self, text: str | bytes, stream: str = "out") -> None:
        """Append to a log, at once but for what may be the beginning of a secret."""
        with self._lock:
            log = self._open.get(stream)
            if log is None:
                path = self._paths.get(stream)
                if path is None:
                    return
                path.parent.mkdir(parents=True, exist_ok=True)
                log = self._open[stream] = _Log(path, self.masker)
            log.write(text.encode("utf-8", "surrogateescape") if isinstance(text, str) else text)

    def mask(self, secrets: Iterable[str]) -> None:
        """Have these texts masked, too, in logs that are not open yet."""
        self.masker = Masker([*environment_secrets(), *secrets])

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


def move_aside(path: Path) -> None:
    """Keep the log of an earlier attempt, under `TRIAL.1.out`, `TRIAL.2.out` and so on."""
    if not path.exists():
        return
    number = 1
    while (aside := path.with_name(f"{path.stem}.{number}{path.suffix}")).exists():
        number += 1
    path.rename(aside)


TURNS = "turns.jsonl"


class TurnLine(msgspec.Struct, omit_defaults=True, kw_only=True):
    """One line: the beginning of an attempt, or a message of it."""

    time: float
    """Seconds since 1970."""
    attempt: int | None = None
    """On the first line alone, whose time is the attempt's beginning."""
    message: dict[str, Any] | None = None
    input_tokens: int | None = None
    output_tokens: int | None = None
    cost: float | None = None


_LINE = msgspec.json.Decoder(TurnLine)


class TurnRecorder:
    """`context.record_turn`: writes each turn to disk at once and counts it against the limits. Thread-safe."""

    def __init__(
        self, path: Path | None, signal: AttemptLimits, *, attempt: int = 1, logs: AttemptLogs | None = None
    ) -> None:
        self._path = path
        self._signal = signal
        self._logs = logs
        """Knows the secrets that must not be written."""
        self._begin = TurnLine(time=time.time(), attempt=attempt)
        self._lock = threading.Lock()
        self.turns = 0
        self.input_tokens: int | None = None
        self.output_tokens: int | None = None
        self.cost: float | None = None
        self.messages: list[dict[str, Any]] = []
        if path is not None:
            move_aside(path)

    def __call__(
        self,
        message: Mapping[str, Any] | None = None,
        *,
        input_tokens: int | None = None,
        output_tokens: int | None = None,
        cost: float | None = None,
        at: float | None = None,
    ) -> None:
        """Record one message of the trajectory; one of the model (`role: assistant`) is a turn.

        CaseLimitReached once a limit is reached: an agent that catches it can still give its answer.
        """
        with self._lock:
            line = TurnLine(
                time=time.time() if at is None else at,
                message=None if message is None else dict(message),
                input_tokens=input_tokens,
                output_tokens=output_tokens,
                cost=cost,
            )
            if line.message is not None:
                self.messages.append(line.message)
            if message is None or message.get("role") == "assistant":
                self.turns += 1
            self._write(line)
            self.count(input_tokens=input_tokens, output_tokens=output_tokens, cost=cost)
        if self._signal.reached is not None:
            raise CaseLimitReached(self._signal.reached)

    def count(
        self, *, input_tokens: int | None = None, output_tokens: int | None = None, cost: float | None = None
    ) -> None:
        """Add to what was used, and see whether that reaches a limit."""
        self.input_tokens = _sum(self.input_tokens, input_tokens)
        self.output_tokens = _sum(self.output_tokens, output_tokens)
        self.cost = _sum(self.cost, cost)
        limits = self._signal.limits
        tokens = (self.input_tokens or 0) + (self.output_tokens or 0)
        for name, used in (("turns", self.turns), ("tokens", tokens), ("cost", self.cost or 0.0)):
            limit = getattr(limits, name)
            if limit is not None and used > limit:
                self._signal.reach(STOP_REASONS[name])

    def _write(self, line: TurnLine) -> None:
        if self._path is None:
            return
        if self._logs is not None and line.message is not None:
            line = msgspec.structs.replace(line, message=self._logs.masker.value(line.message))
        data = msgspec.json.encode(line, enc_hook=repr) + b"\n"
        if self._begin.attempt is not None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            data = msgspec.json.encode(self._begin) + b"\n" + data
            self._begin.attempt = None
        with open(self._path, "ab") as file:
            file.write(data)


def read_turns(file: IO[bytes]) -> Iterator[TurnLine]:
    """The readable lines of a file of turns; one that a crash cut short is left out."""
    for raw in file:
        try:
            yield _LINE.decode(raw)
        except (msgspec.DecodeError, UnicodeDecodeError):
            continue


def _sum(before: Any, more: Any) -> Any:
    return before if more is None else more if before is None else before + more
