"""Where agents work: folders outside the run directory, fresh for each attempt, with a home of their own.

Under the run directory an agent would find the expected answers in `../outputs.jsonl`, commit into the user's own
repository and pick up its `conftest.py`.
"""

from __future__ import annotations

import hashlib
import os
import re
import secrets
import shutil
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import msgspec

from steelyard.disk import read_beneath
from steelyard.errors import ConfigurationError, TransientError
from steelyard.journal.files import ARTIFACTS, CALLS, LOGS, RUNNING

WORK_VARIABLE = "STEELYARD_WORK"
_MAX_NAME = 60
_PLAIN = re.compile(r"[a-z0-9][a-z0-9._-]*")
_NOT_PLAIN = re.compile(r"[^A-Za-z0-9._-]+")
_STATE = "attempt.json"
_SCRATCH = "scratch-"
_MAX_MARKS = 10_000
_MAX_MARK_BYTES = 1 << 20


def safe_name(case_id: str) -> str:
    """A folder's name for any case id: the id itself where that is plain, else what is plain of it and a digest."""
    if len(case_id) <= _MAX_NAME and _PLAIN.fullmatch(case_id):
        return case_id
    digest = hashlib.blake2b(case_id.encode("utf-8", "surrogatepass"), digest_size=6).hexdigest()
    shown = _NOT_PLAIN.sub("_", case_id).strip("._-")[: _MAX_NAME - 20]
    # A name that only differs in its case would be the same folder on some disks.
    return f"{shown}-{digest}" if shown else f"case-{digest}"


def work_root() -> Path:
    """The folder of all workspaces: STEELYARD_WORK, or one in the user's cache folder."""
    named = os.environ.get(WORK_VARIABLE)
    if named:
        return Path(named).expanduser().absolute()
    cache = os.environ.get("XDG_CACHE_HOME")
    base = Path(cache) if cache and os.path.isabs(cache) else Path.home() / ".cache"
    return base / "steelyard" / "work"


def private_folder(path: Path) -> Path:
    """Make a folder that only this user can enter."""
    try:
        path.mkdir(parents=True, exist_ok=True, mode=0o700)
        if path.stat().st_mode & 0o077:
            path.chmod(0o700)
    except OSError as error:
        raise ConfigurationError(
            f"cannot make the folder {path} for workspaces: {error.strerror or error}; set {WORK_VARIABLE} to another"
        ) from error
    return path


class AttemptState(msgspec.Struct, kw_only=True, omit_defaults=True):
    """What is written down of an attempt beside its workspace, so that a later launch knows what it finds."""

    id: str
    trial: int
    attempt: int
    case_fp: str = ""
    finished: bool = False
    """Whether the agent has ended: what is in the workspace is what it left."""


class RunningCase(msgspec.Struct, kw_only=True):
    """An attempt that is under way: `running/ID.TRIAL.json` of a run directory."""

    id: str
    trial: int
    attempt: int
    since: float
    """Seconds since 1970."""


def running_cases(run: Path, most: int) -> list[RunningCase]:
    """The attempts that are under way, the longest first; no more than `most`. Links are not followed."""
    found: list[RunningCase] = []
    with suppress(OSError):
        for name in sorted(os.listdir(run / RUNNING))[:_MAX_MARKS]:
            with suppress(OSError, msgspec.DecodeError, UnicodeDecodeError):
                data = read_beneath(run, f"{RUNNING}/{name}", _MAX_MARK_BYTES)
                found.append(msgspec.json.decode(data, type=RunningCase))
    return sorted(found, key=lambda case: case.since)[:most]


class AttemptPlace:
    """The folders of one attempt: `workspace`, a home, a folder for temporary files."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.workspace = path / "workspace"
        self.home = path / "home"
        self.tmp = path / "tmp"

    def make(self, state: AttemptState) -> None:
        """Make the folders, but not the workspace itself: its template does."""
        for folder in (self.path, self.home, self.tmp, self.home / ".claude", self.home / ".codex", self.tmp / "run"):
            folder.mkdir(mode=0o700)
        (self.home / ".gitconfig").write_text(
            "[user]\n\tname = Agent\n\temail = agent@localhost\n[init]\n\tdefaultBranch = main\n"
        )
        self.write_state(state)

    def write_state(self, state: AttemptState) -> None:
        """Write down how far the attempt has come; whole or not at all."""
        draft = self.path / f"{_STATE}.tmp"
        draft.unlink(missing_ok=True)  # the agent may have put a link there
        descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        with open(descriptor, "wb") as file:
            file.write(msgspec.json.encode(state))
        draft.replace(self.path / _STATE)

    def read_state(self) -> AttemptState | None:
        """How far the attempt has come; None where nothing says so."""
        try:
            return msgspec.json.decode((self.path / _STATE).read_bytes(), type=AttemptState)
        except (OSError, msgspec.DecodeError, UnicodeDecodeError):
            return None

    @property
    def environment(self) -> dict[str, str]:
        """What makes programs keep to these folders, git included."""
        home, tmp = str(self.home), str(self.tmp)
        return {
            "HOME": home,
            "TMPDIR": tmp,
            "TMP": tmp,
            "TEMP": tmp,
            "XDG_CONFIG_HOME": f"{home}/.config",
            "XDG_CACHE_HOME": f"{home}/.cache",
            "XDG_DATA_HOME": f"{home}/.local/share",
            "XDG_STATE_HOME": f"{home}/.local/state",
            "XDG_RUNTIME_DIR": f"{tmp}/run",
            "CLAUDE_CONFIG_DIR": f"{home}/.claude",
            "CODEX_HOME": f"{home}/.codex",
            "GIT_CONFIG_GLOBAL": f"{home}/.gitconfig",
            "GIT_CONFIG_NOSYSTEM": "1",
            "GIT_CEILING_DIRECTORIES": str(self.path),
            "PWD": str(self.workspace),
        }


class RunPlaces:
    """The folder of one run under the work folder, with a folder for each attempt. Picklable."""

    def __init__(self, run: Path | None) -> None:
        self.run = None if run is None else run.absolute()
        key = secrets.token_hex(6) if run is None else _digest(os.path.realpath(run))
        self.root = work_root() / key
        if self.run is not None and self.root.resolve().is_relative_to(self.run.resolve()):
            raise ConfigurationError(
                f"workspaces must be outside the run directory, where the expected answers are: "
                f"{WORK_VARIABLE} is {work_root()}, the run directory {self.run}"
            )

    def open(self) -> None:
        """Make the run's folder, for this user alone."""
        private_folder(self.root)

    def new_attempt(self, state: AttemptState) -> AttemptPlace:
        """Fresh folders for an attempt."""
        self.open()
        name = f"{safe_name(state.id)}.{state.trial}.{state.attempt}-{secrets.token_hex(3)}"
        place = AttemptPlace(self.root / name)
        try:
            place.make(state)
        except OSError as error:
            raise TransientError(f"cannot make {place.path}: {error.strerror or error}") from error
        return place

    def attempts(self, case_id: str, trial: int) -> Iterator[tuple[AttemptPlace, AttemptState | None]]:
        """The attempts at a case that are still on disk, of this launch and of earlier ones."""
        prefix = f"{safe_name(case_id)}.{trial}."
        with suppress(OSError):
            for name in sorted(os.listdir(self.root)):
                if name.startswith(prefix):
                    place = AttemptPlace(self.root / name)
                    yield place, place.read_state()

    def scratch(self) -> Path:
        """A fresh empty folder."""
        self.open()
        path = self.root / f"{_SCRATCH}{secrets.token_hex(6)}"
        path.mkdir(mode=0o700)
        return path

    def remove_scratches(self) -> None:
        """Remove the folders that `scratch` made, in this launch or in one that was killed."""
        with suppress(OSError):
            for name in os.listdir(self.root):
                if name.startswith(_SCRATCH):
                    remove_tree(self.root / name)

    def artifacts(self, case_id: str, trial: int) -> Path | None:
        """The folder of what is kept of a case; None in a run without a directory."""
        return None if self.run is None else self.run / ARTIFACTS / safe_name(case_id) / str(trial)

    def log(self, case_id: str, trial: int, stream: str) -> Path | None:
        """The log of a case's output; None in a run without a directory."""
        return None if self.run is None else self.run / LOGS / safe_name(case_id) / f"{trial}.{stream}"

    def calls(self, case_id: str, trial: int) -> Path | None:
        """The file of a case's model calls; None in a run without a directory."""
        return None if self.run is None else self.run / CALLS / safe_name(case_id) / f"{trial}.jsonl"

    def mark_running(self, state: AttemptState) -> None:
        """Note in the run directory that an attempt has begun, for those who look on."""
        if self.run is None:
            return
        path = self._mark(state.id, state.trial)
        with suppress(OSError, UnicodeError):  # nothing but a view depends on it
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(
                msgspec.json.encode(
                    RunningCase(id=state.id, trial=state.trial, attempt=state.attempt, since=time.time())
                )
            )

    def unmark_running(self, case_id: str, trial: int) -> None:
        """Note that a case is done."""
        if self.run is not None:
            with suppress(OSError):
                self._mark(case_id, trial).unlink(missing_ok=True)

    def unmark_all(self) -> None:
        """Note that no attempt is under way."""
        if self.run is not None:
            with suppress(OSError):
                remove_tree(self.run / RUNNING)

    def _mark(self, case_id: str, trial: int) -> Path:
        assert self.run is not None
        return self.run / RUNNING / f"{safe_name(case_id)}.{trial}.json"

    def remove(self) -> None:
        """Remove all folders of the run: it is complete."""
        remove_tree(self.root)


def remove_tree(path: Path) -> None:
    """Remove a folder and all that is in it, also what was made read-only; never what links in it lead to."""

    def make_writable(function: object, name: str, error: BaseException) -> None:  # noqa: ARG001 - shutil's shape
        with suppress(OSError):
            parent = os.path.dirname(name)
            os.chmod(parent, 0o700)
            if os.path.isdir(name) and not os.path.islink(name):
                os.chmod(name, 0o700)
                shutil.rmtree(name, ignore_errors=True)
            else:
                os.unlink(name)

    if os.path.islink(path):
        path.unlink(missing_ok=True)
        return
    if not os.path.lexists(path):
        return  # nor is the folder above it touched
    _rmtree(path, make_writable)


def _rmtree(path: Path, on_error: object) -> None:
    import sys

    if sys.version_info >= (3, 12):
        shutil.rmtree(path, onexc=on_error)  # type: ignore[arg-type]
    else:
        shutil.rmtree(path, onerror=on_error)  # type: ignore[arg-type]


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode("utf-8", "surrogateescape"), digest_size=6).hexdigest()
