"""One case in full, all of its trials and an agent's model calls: as text for a terminal, as JSON for programs.

What the run directory has on disk of an agent's case (logs, the patch, what was kept) is all of it untrusted.
"""

from __future__ import annotations

import os
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from steelyard.attachments import shown
from steelyard.disk import open_beneath, read_beneath
from steelyard.errors import ConfigurationError, suggestion
from steelyard.journal.files import ARTIFACTS, CALLS, LOGS
from steelyard.journal.manifest import read_manifest
from steelyard.records import EvalCase, Record, Score
from steelyard.report.records import Expectations, RunRecords, open_suite, state_of
from steelyard.report.trajectory import AgentTrajectory, TurnFigures, trajectory_lines, trajectory_of
from steelyard.scoring.trajectory import ToolCall, tool_calls
from steelyard.stats.formatting import (
    counted,
    escape_invisible,
    format_bytes,
    format_number,
    format_seconds,
    without_commands,
)
from steelyard.suite.evalset import EvalSet
from steelyard.workspace.keeping import KEPT_WORKSPACE, PATCH, SUMMARY
from steelyard.workspace.patch import PatchSummary
from steelyard.workspace.places import safe_name

_WIDTH = 80
_IDS_TO_SUGGEST = 5_000


class OneCase:
    """The records of a case, and the case itself where the suite is at hand."""

    def __init__(self, run: Path, case_id: str, suite: EvalSet | None = None) -> None:
        records = RunRecords(run)
        self.run, self.found = run, records.of_case(case_id)
        if not self.found:
            ids = records.some_ids(_IDS_TO_SUGGEST)
            hint = suggestion(case_id, ids) if len(ids) <= 20 or _is_like_one(case_id, ids) else ""
            raise ConfigurationError(f"{run} has no record of a case {case_id!r}{'; ' + hint if hint else ''}")
        manifest = read_manifest(run)
        self.case = _find(case_id, open_suite(run, manifest)[0] if suite is None else suite)
        first = self.found[0][1]
        asked = Expectations(None if self.case is None else _alone(self.case), manifest).of(first)
        self.edited = asked is not None and asked.edited
        if self.case is None and asked is not None:
            self.case = asked.case

    def to_json(self) -> dict[str, Any]:
        """Whole records as they stand in `outputs.jsonl`, each with its byte there, and the case."""
        return {
            "id": self.found[0][1].id,
            "case": None if self.case is None else msgspec.to_builtins(self.case),
            "case_edited_since": self.edited,
            "records": [{"offset": offset, **msgspec.to_builtins(record)} for offset, record in self.found],
        }

    def to_text(self, label: str = "") -> str:
        """All of it for a terminal or a CI log, which nothing in it can steer; the label begins each heading."""
        found = (line for offset, record in self.found for line in self._lines(offset, record, label))
        lines = map(escape_invisible, found)
        return without_commands("\n".join(lines))

    def _lines(self, offset: int, record: Record, label: str) -> Iterator[str]:
        trial = f" trial {record.trial + 1}" if len(self.found) > 1 else ""
        yield f"{label}{record.id}{trial}: {state_of(record)}"
        if record.error is not None:
            yield f"  error: {record.error}"
            yield from _indented(record.error_traceback or "")
        for failed in record.retry_errors:
            yield f"  retried at {failed.time:%H:%M:%S}: {failed.error}"
        for turn in turns(record, self.case):
            yield f"  {turn.role}:"
            yield from _indented(turn.text)
            for call in turn.calls:
                yield f"    calls {call.name}"
                yield from _indented(as_text(call.arguments), "      ")
        if record.stderr is not None:
            yield "  stderr:"
            yield from _indented(record.stderr)
        if self.case is not None and self.case.expected is not None:
            yield f"  expected{' (edited since)' if self.edited else ''}:"
            yield from _indented(as_text(self.case.expected))
        for score in record.scores:
            yield from _score(score)
        found = trajectory_of(self.run, record)
        for line in () if found is None else trajectory_lines(found):
            yield f"  {line}"
        yield from self._file_lines(record)
        yield _times(record)
        yield f"  {self.run}/outputs.jsonl, byte {offset}"

    def _file_lines(self, record: Record) -> Iterator[str]:
        """Where an agent's patch, logs and kept files are."""
        found = case_files(self.run, record.id, record.trial)
        if found.patch is not None:
            summary = patch_summary(self.run, found.patch)
            changes = "" if summary is None else f" ({counted(summary.files, 'file')} changed)"
            yield f"  patch: {self.run}/{found.patch.path}{changes}"
        for file in found.logs:
            yield f"  log: {self.run}/{file.path} ({format_bytes(file.size)})"
        if found.artifacts:
            count = len(found.artifacts) + found.more
            folder = "/".join(found.artifacts[0].path.split("/")[:3])
            yield f"  kept: {counted(count, 'file')} in {self.run}/{folder}"


def _find(case_id: str, suite: EvalSet | None) -> EvalCase | None:
    """The case of that id, wherever in the suite it stands now."""
    try:
        return next((case for case in suite or () if case.id == case_id), None)
    except (ConfigurationError, OSError):
        return None


def _alone(case: EvalCase) -> EvalSet:
    return EvalSet("one", [case])


def _is_like_one(case_id: str, ids: list[str]) -> bool:
    return suggestion(case_id, ids).startswith("did you mean")


def _indented(text: str, margin: str = "    ") -> Iterator[str]:
    for line in text.splitlines():
        yield f"{margin}{line}"


def _score(score: Score) -> Iterator[str]:
    verdict = {True: "passed", False: "failed", None: ""}[score.passed]
    value = score.label or "–" if score.value is None else f"{score.value:.3f}"
    if score.value is not None and score.is_number:
        value = " ".join(filter(None, (format_number(score.value), score.unit, score.label)))
    spread = "" if score.std_dev is None or len(score.samples or ()) < 2 else f" ± {score.std_dev:.3f}"
    marks = [name for name in ("escalated", "overruled", "advisory") if getattr(score, name)]
    by = f" by {score.by}" if score.by else ""
    yield " ".join(part for part in (f"  score {score.name}: {value}{spread}", verdict, *marks) if part) + by
    yield from _indented(score.reason or "")
    if score.extracted is not None:
        yield f"    extracted: {' '.join(score.extracted.split())}"
    errors = iter(score.errors)  # each is of a sample that has no value, in their order
    for sample, reason in zip(score.samples or [], score.reasons or [], strict=False):
        text = (reason if sample is not None else next(errors, reason)) or ""
        yield f"    {'–' if sample is None else f'{sample:.2f}'}  {' '.join(text.split())}".rstrip()
    for error in errors:
        yield from _indented(error)
    yield from _indented(score.error_traceback or "", "      ")


def _times(record: Record) -> str:
    parts = [f"attempts {record.attempts}", f"in all {format_seconds(record.elapsed)}"]
    for name, label in {"time_to_first_token": "first token", "time_to_last_token": "last token"}.items():
        if (value := getattr(record, name)) is not None:
            parts.append(f"{label} {format_seconds(value)}")
    for name, label in {"num_tokens_input": "tokens in", "num_tokens_output": "out", "cost": "cost"}.items():
        if (value := getattr(record, name)) is not None:
            parts.append(f"{label} {value:,}")
    return textwrap.fill(", ".join(parts), _WIDTH, initial_indent="  ", subsequent_indent="    ")


_TEXTS = ("text", "content", "output", "summary", "thinking", "refusal")
"""Where the APIs keep the words of a message or of one of its parts."""
_SYSTEM = ("system", "developer")


class ChatMessage(msgspec.Struct, omit_defaults=True):
    """One message: its role, its words, and the tools it calls."""

    role: str
    text: str
    calls: list[ToolCall] = []
    answers: str | None = None
    """The id of the tool call whose result it is."""
    thread: int | None = None
    """Of a sub-agent's message, its conversation."""
    figures: TurnFigures | None = None


def turns(record: Record, case: EvalCase | None, trajectory: AgentTrajectory | None = None) -> list[ChatMessage]:
    """The conversation of a record: the question, unless the target logged it too, and the answer.

    With a trajectory its turns, which have their times, are shown in place of the record's own messages.
    """
    system = case.system_prompt if case is not None else None
    asked = [_turn(message) for message in _asked(record, case)]
    found = [_turn(message) for message in record.messages or []] if trajectory is None else spoken(trajectory)
    if not _tells_what_was_asked(found, asked):
        found = [*asked, *found]
    if system and not any(turn.role in _SYSTEM for turn in found):
        found.insert(0, ChatMessage("system", system))
    logged = record.messages if trajectory is None else trajectory.turns
    if record.response_text and not (logged and found and found[-1].role == "assistant"):
        found.append(ChatMessage("assistant", record.response_text))
    return found


def spoken(trajectory: AgentTrajectory) -> list[ChatMessage]:
    """The messages of a trajectory, each with its figures."""
    found = []
    for turn in trajectory.turns:
        message = _turn(turn.message)
        message.figures = turn.figures
        message.thread = turn.thread if turn.thread > 1 else message.thread
        found.append(message)
    return found


def question(record: Record, case: EvalCase | None) -> str:
    """What was asked, in short: the prompt, or the last words of the user."""
    if record.input_prompt or (case is not None and case.prompt):
        return record.input_prompt or (case.prompt if case is not None else None) or ""
    texts = [turn.text for turn in map(_turn, record.messages or _asked(record, case)) if turn.role == "user"]
    return texts[-1] if texts else ""


def as_text(value: Any) -> str:
    """A value as people write it: text as it is, anything else as indented JSON."""
    if isinstance(value, str):
        return value
    try:
        return msgspec.json.format(msgspec.json.encode(value), indent=2).decode()
    except (TypeError, ValueError, RecursionError):
        return str(value)


def _asked(record: Record, case: EvalCase | None) -> list[dict[str, Any]]:
    messages = list(case.messages or []) if case is not None else []
    prompt = record.input_prompt or (case.prompt if case is not None else None)
    attached = list(map(shown, case.attachments)) if case is not None else []
    if not attached:
        return [*messages, *([{"role": "user", "content": prompt}] if prompt else [])]
    return [*messages, {"role": "user", "content": [*attached, *([prompt] if prompt else [])]}]


def _tells_what_was_asked(found: Sequence[ChatMessage], asked: Sequence[ChatMessage]) -> bool:
    """Whether a target's log begins with the question, in its own words perhaps: an endpoint's has the answer alone."""
    first = next((turn for turn in found if turn.role not in _SYSTEM), None)
    if first is not None and first.role == "user":
        return True
    return any(turn.role == "user" and turn.text == asked[-1].text for turn in found) if asked else True


def _turn(message: Any) -> ChatMessage:
    if not isinstance(message, Mapping):
        return ChatMessage("", as_text(message))
    role = message.get("role") or _role_of_kind(str(message.get("type") or ""))
    answers, thread = _answered_call(message), message.get("thread")
    return ChatMessage(
        role="tool" if answers is not None else str(role),
        text="\n\n".join(_words(message)),
        calls=tool_calls([message]),
        answers=answers,
        thread=thread if isinstance(thread, int) else None,
    )


def _answered_call(message: Mapping[str, Any]) -> str | None:
    """The id of the tool call whose result a message is, in the words of each API; None where it is none."""
    content = message.get("content")
    parts = [part for part in content if isinstance(part, Mapping)] if isinstance(content, list) else []
    results = [part.get("tool_use_id") for part in parts if part.get("type") == "tool_result"]
    kind = str(message.get("type") or "")
    found = message.get("tool_call_id") or (message.get("call_id") if kind.endswith("_output") else None)
    found = found or (results[0] if results and len(results) == len(parts) else None)
    return found if isinstance(found, str) else None


def _role_of_kind(kind: str) -> str:
    """Items of the Responses API without a role: a call is the assistant's, its output the tool's."""
    return "tool" if kind.endswith("_output") else "assistant" if kind.endswith("_call") else kind


def _words(part: Any) -> Iterator[str]:
    """The texts in a message or part, nested ones too; what is not text is named by its type."""
    if isinstance(part, str):
        if part:
            yield part
    elif isinstance(part, list):
        for one in part:
            yield from _words(one)
    elif isinstance(part, Mapping) and "attachment" in part:
        yield shown(part["attachment"])
    elif isinstance(part, Mapping):
        found = [part[key] for key in _TEXTS if isinstance(part.get(key), str | list | dict) and part[key]]
        kind = part.get("type")
        if found:
            for one in found:
                yield from _words(one)
        elif isinstance(kind, str) and not tool_calls([part]) and "role" not in part:
            yield f"[{kind}]"


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
