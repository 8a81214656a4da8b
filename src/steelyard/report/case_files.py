"""What a run directory has on disk of an agent's case: logs, the patch, what was kept. All of it is untrusted."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import msgspec

from steelyard.disk import open_beneath, read_beneath
from steelyard.journal.files import ARTIFACTS, CALLS, LOGS
from steelyard.workspace.keeping import KEPT_WORKSPACE, PATCH, SUMMARY
from steelyard.workspace.patch import PatchSummary
from steelyard.workspace.places import safe_name

FILE_FOLDERS = (LOGS, ARTIFACTS, CALLS)
"""The folders of a run directory that have files of cases."""
MAX_FILES = 200
_MAX_LOOKED_AT = 20_000
_MAX_SUMMARY = 4 << 20


class CaseFile(msgspec.Struct, frozen=True):
    """A file, by its path in the run directory."""

    path: str
    size: int


class CaseFiles(msgspec.Struct):
    """The files of one case and trial."""

    logs: list[CaseFile]
    patch: CaseFile | None
    artifacts: list[CaseFile]
    """What else was kept, no more than `MAX_FILES`; of a whole workspace the files in it come last."""
    more: int = 0
    """How many artifacts are not listed."""

    def __bool__(self) -> bool:
        return bool(self.logs or self.patch or self.artifacts)


def has_files(run: Path) -> bool:
    """Whether a run has files of cases at all: most have none, and need not be asked for each case."""
    return any((run / name).is_dir() for name in FILE_FOLDERS)


def case_files(run: Path, case_id: str, trial: int) -> CaseFiles:
    """The files of a case; links are not followed, and not listed."""
    name = safe_name(case_id)
    logs = [file for file in _listed(run, f"{LOGS}/{name}") if file.path.rpartition("/")[2].startswith(f"{trial}.")]
    calls = [file for file in _listed(run, f"{CALLS}/{name}") if file.path.endswith(f"/{trial}.jsonl")]
    patch, kept, looked = None, list[CaseFile](), 0
    for file in _below(run, f"{ARTIFACTS}/{name}/{trial}"):
        looked += 1
        inside = file.path.split("/", 3)[3]
        if inside == PATCH:
            patch = file
        elif inside != SUMMARY and len(kept) < MAX_FILES:
            kept.append(file)
    more = looked - len(kept) - (patch is not None) - (run / ARTIFACTS / name / str(trial) / SUMMARY).is_file()
    return CaseFiles(logs=sorted([*logs, *calls], key=_newest_first), patch=patch, artifacts=kept, more=max(0, more))


def patch_summary(run: Path, patch: CaseFile) -> PatchSummary | None:
    """What a patch is of: how many files, lines added and removed."""
    try:
        data = read_beneath(run, f"{patch.path.rpartition('/')[0]}/{SUMMARY}", _MAX_SUMMARY)
        return msgspec.json.decode(data, type=PatchSummary)
    except (OSError, msgspec.DecodeError, UnicodeDecodeError):
        return None


def beginning(run: Path, file: CaseFile, most: int) -> str:
    """The first characters of a text file; nothing of one that cannot be read."""
    try:
        return read_beneath(run, file.path, 4 * most).decode("utf-8", "replace")[:most]
    except OSError:
        return ""


def ending(run: Path, file: CaseFile, most: int) -> str:
    """The last characters of a text file; nothing of one that cannot be read."""
    try:
        with os.fdopen(open_beneath(run, file.path), "rb") as opened:
            size = os.fstat(opened.fileno()).st_size
            opened.seek(max(0, size - 4 * most))
            return opened.read(4 * most).decode("utf-8", "replace")[-most:]
    except OSError:
        return ""


def _newest_first(file: CaseFile) -> tuple[bool, str]:
    """Logs of the last attempt before those of earlier ones, which have its number in their name."""
    return file.path.rpartition("/")[2].split(".")[1].isdigit(), file.path


def _listed(run: Path, folder: str) -> Iterator[CaseFile]:
    """The files of a folder, without those below it."""
    return (file for file in _below(run, folder) if file.path.count("/") == folder.count("/") + 1)


def _below(run: Path, folder: str) -> Iterator[CaseFile]:
    """The files below a folder of the run, a bounded number, those of a kept workspace last."""
    parts = folder.split("/")
    if any(run.joinpath(*parts[:number]).is_symlink() for number in range(1, len(parts) + 1)):
        return
    waiting, seen = [folder], 0
    while waiting and seen < _MAX_LOOKED_AT:
        place = waiting.pop()
        with suppress(OSError), os.scandir(run / place) as entries:
            for entry in sorted(entries, key=lambda entry: entry.name):
                seen += 1
                if entry.is_dir(follow_symlinks=False):
                    at = 0 if entry.name == KEPT_WORKSPACE and place == folder else len(waiting)
                    waiting.insert(at, f"{place}/{entry.name}")
                elif entry.is_file(follow_symlinks=False) and not entry.name.endswith(".tmp"):
                    yield CaseFile(f"{place}/{entry.name}", entry.stat(follow_symlinks=False).st_size)
