"""What the view gives out of a run directory besides its records: files of agents' cases, and cases that are running.

Files are what agents wrote: read only below the folders that have them, without following links, and sent as plain text
or to be saved, never as something that a browser would run.
"""

from __future__ import annotations

import os
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any
from urllib.parse import quote

import msgspec
from starlette.exceptions import HTTPException
from starlette.responses import StreamingResponse

from steelyard.daemon_threads import DaemonThreads
from steelyard.disk import open_beneath
from steelyard.journal.files import LOGS
from steelyard.report.case import spoken
from steelyard.report.case_files import FILE_FOLDERS, CaseFile, ending
from steelyard.report.page.data import CaseWork, shown_turns, time_line
from steelyard.report.trajectory import read_trajectory
from steelyard.stats.formatting import one_line
from steelyard.workspace.places import RunningCase, running_cases, safe_name

_CHUNK = 1 << 18
_MAX_PATH = 4_096
_TEXTS = (".out", ".err", ".jsonl", ".json", ".patch", ".diff", ".txt", ".log", ".md", ".py", ".xml", ".csv")
"""Files that a browser shows, as plain text; all others it saves."""
_POLICY = "default-src 'none'; sandbox; frame-ancestors 'none'"
_MAX_RUNNING = 50
_LIVE_CHARS = 20_000
_LAST_LINE_BYTES = 400
_MAX_LIVE_TURNS = 200


def file_response(run: Path, path: str, threads: DaemonThreads) -> StreamingResponse:
    """A file of a case; 404 for anything that is not one."""
    if path.partition("/")[0] not in FILE_FOLDERS or len(path) > _MAX_PATH:
        raise HTTPException(404, "there is no such file of a case")
    try:
        descriptor = open_beneath(run, path)
    except (OSError, ValueError) as error:
        raise HTTPException(404, "there is no such file of a case") from error
    size = os.fstat(descriptor).st_size
    is_text = path.endswith(_TEXTS)
    name = quote(path.rpartition("/")[2], safe="", errors="replace")
    headers = {
        "content-length": str(size),
        "content-disposition": f"{'inline' if is_text else 'attachment'}; filename*=UTF-8''{name}",
        "content-security-policy": _POLICY,
    }
    kind = "text/plain; charset=utf-8" if is_text else "application/octet-stream"
    return StreamingResponse(_pieces(descriptor, size, threads.run), media_type=kind, headers=headers)


async def _pieces(descriptor: int, size: int, run: Callable[..., Any]) -> AsyncIterator[bytes]:
    """The file as it was when it was opened: a log may grow while it is sent."""
    try:
        while size > 0 and (piece := await run(os.read, descriptor, min(_CHUNK, size))):
            size -= len(piece)
            yield piece
        if size > 0:  # it was cut short meanwhile: what was promised is filled up
            yield b"\0" * size
    finally:
        os.close(descriptor)


def running_now(run: Path) -> list[dict[str, Any]]:
    """The attempts that are under way, each with the last line that it printed."""
    now = time.time()
    return [
        {
            "id": case.id,
            "trial": case.trial,
            "attempt": case.attempt,
            "seconds": max(0, int(now - case.since)),
            "line": _last_line(run, case),
        }
        for case in running_cases(run, _MAX_RUNNING)
    ]


def _last_line(run: Path, case: RunningCase) -> str:
    for stream in ("out", "err"):
        path = f"{LOGS}/{safe_name(case.id)}/{case.trial}.{stream}"
        lines = ending(run, CaseFile(path, 0), _LAST_LINE_BYTES).splitlines()
        if text := next((line for line in reversed(lines) if line.strip()), ""):
            return one_line(text, 160)
    return ""


def running_case(run: Path, case_id: str, trial: int) -> dict[str, Any]:
    """What can be seen of a case that is running: its logs, turns and time line so far. 404 once it is done."""
    found = next((one for one in running_cases(run, _MAX_RUNNING) if (one.id, one.trial) == (case_id, trial)), None)
    if found is None:
        raise HTTPException(404, "this case is not running")
    since = max(0.0, time.time() - found.since)
    trajectory = read_trajectory(run, case_id, trial, since)
    shown: dict[str, Any] = {**msgspec.to_builtins(found), "seconds": int(since), "turns": []}
    shown |= CaseWork(run).files(case_id, trial, _LIVE_CHARS * 4)
    if trajectory is not None:
        shown["time_line"] = time_line(trajectory)
        shown["turns"] = list(shown_turns(spoken(trajectory)[-_MAX_LIVE_TURNS:], _LIVE_CHARS))
    return shown
