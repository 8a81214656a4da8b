"""What can go wrong, as a tree.

SteelyardError
├── ConfigurationError        bad option, bad suite; nothing was called            (exit 2)
│   └── SuiteError            a suite or case file, with its path and line
├── RunRefused                a run directory that must not be written as asked    (exit 2)
│   ├── RunFinished           complete already: if_complete="update", or force=True
│   ├── RunLocked             another live process writes there
│   ├── RunMismatch           another target or seed than the manifest's
│   ├── RunDamaged            a line that cannot be read, or has a flipped bit: salvage=True
│   ├── RunEdited             a line that was changed after it was written: accept_edits=True
│   └── RunVersionError       its figures were written by another version of Steelyard
├── RunCancelled              cancelled before its first call; nothing was asked    (exit 130)
├── JournalError              the disk failed: what is on it is valid and resumable (exit 3)
├── WorkersLost               the engine's workers are gone; the run can be resumed (exit 3)
├── StoreError                the cache failed (steelyard.cache); a run warns and continues
├── CaseLimitReached          a limit of a case (case_limits) was reached; an outcome, not an error
├── CountsError               planned ≠ ok + error + cancelled + not started        (exit 3)
└── TargetError               a target could not answer; becomes that case's record
    ├── SetupError            ... because its workspace could not be made ready
    └── TransientError        ... and a retry may help
        └── TransportError    no whole answer came over the wire (steelyard.transport has its kinds)
"""

from __future__ import annotations

TYPE_CHECKING = False  # `typing`, `pathlib` and `difflib` would be half of what `steelyard --help` waits for
if TYPE_CHECKING:
    from collections.abc import Collection, Mapping
    from pathlib import Path
    from typing import Any

    from steelyard.protocols import HttpReply
    from steelyard.records import InvocationResponse

_MAX_MESSAGE = 10_000


def nearest(name: object, known: Collection[str]) -> str | None:
    """The known name that is most like this one, if any is."""
    import difflib

    matches = difflib.get_close_matches(str(name).lower(), list(known), n=1)
    return matches[0] if matches else None


def suggestion(name: object, known: Collection[str]) -> str:
    """How an error about an unknown name ends: the nearest known one, else all of them."""
    match = nearest(name, known)
    return f"did you mean {match!r}?" if match else f"known here: {', '.join(known)}"


class SteelyardError(Exception):
    """The root of every error that Steelyard raises on purpose."""

    topic = "internal-error"
    """The section of docs/troubleshooting.md about it, which `steelyard explain` prints."""


class ConfigurationError(SteelyardError, ValueError):
    """What was asked for cannot be done; raised before anything is called.

    `topic` names the section of docs/troubleshooting.md about this message, where there is one.
    """

    topic = "configuration"

    def __init__(self, message: str, *, topic: str | None = None) -> None:
        if topic is not None:
            self.topic = topic
        super().__init__(message)


class SuiteError(ConfigurationError):
    """A suite or case file that cannot be used; says where."""

    topic = "suite-file"

    def __init__(
        self,
        message: str,
        *,
        path: str | Path | None = None,
        line: int | None = None,
        topic: str | None = None,
    ) -> None:
        self.message = message
        """What is wrong, without the place."""
        super().__init__(message, topic=topic)
        self.set_place(path, line)

    def set_place(self, path: str | Path | None, line: int | None) -> None:
        """Name the file and the line of the mistake."""
        self.path = None if path is None else str(path)
        self.line = line
        where = ":".join(str(part) for part in (self.path, line) if part is not None)
        self.args = (f"{where}: {self.message}" if where else self.message,)


_REMEDIES = {
    "accept_edits": ("--accept-edits", "accept_edits=True"),
    "force": ("--force", "force=True"),
    "new_run": ("--new", "another output_path"),
    "out": ("another --out", "another output_path"),
    "retry_errors": ("--retry-errors", "retry_errors=True"),
    "salvage": ("--salvage", "salvage=True"),
    "update": ("--update", 'if_complete="update"'),
}
"""What helps against a refusal: the flag of `steelyard run`, and the argument in Python."""

_speaking_flags = False


class SpeakFlags:
    """While it is entered, errors offer flags of the command line and not arguments in Python."""

    def __enter__(self) -> None:
        global _speaking_flags
        self._before, _speaking_flags = _speaking_flags, True

    def __exit__(self, *_: object) -> None:
        global _speaking_flags
        _speaking_flags = self._before


class RunRefused(SteelyardError):
    """A run directory that must not be written in the way that was asked.

    `remedy` follows the message and says what can be done; names like `{force}` in it are written as the flag or the
    argument, whichever the caller can use.
    """

    topic = "refused"

    def __init__(self, message: str, remedy: str = "", *, path: str | Path, topic: str | None = None) -> None:
        from pathlib import Path

        if topic is not None:
            self.topic = topic
        self.path = Path(path)
        self._message, self._remedy = message, remedy
        super().__init__(message + remedy)

    def __str__(self) -> str:
        language = 0 if _speaking_flags else 1
        return self._message + self._remedy.format(**{name: words[language] for name, words in _REMEDIES.items()})


class RunFinished(RunRefused):
    """The run there is complete; starting over or continuing it must be asked for."""

    topic = "complete"

    def __init__(self, message: str, remedy: str = "", *, path: str | Path, errors: int) -> None:
        self.errors = errors
        super().__init__(message, remedy, path=path)


class RunLocked(RunRefused):
    """Another live process writes to the run directory."""

    topic = "locked"

    def __init__(self, message: str, remedy: str = "", *, path: str | Path, pid: int | None, host: str | None) -> None:
        self.pid = pid
        self.host = host
        super().__init__(message, remedy, path=path)


class RunMismatch(RunRefused):
    """The run directory belongs to another target or seed."""

    topic = "mismatch"

    def __init__(self, message: str, remedy: str = "", *, path: str | Path, differences: list[str]) -> None:
        self.differences = differences
        super().__init__(message, remedy, path=path)


class RunDamaged(RunRefused):
    """A line of a journal cannot be read, or is not as it was written."""

    topic = "damaged"

    def __init__(self, message: str, remedy: str = "", *, path: str | Path, line: int, byte: int) -> None:
        self.line = line
        self.byte = byte
        super().__init__(message, remedy, path=path)


class RunEdited(RunRefused):
    """A line of a journal is a record, but somebody changed it after it was written."""

    topic = "edited"

    def __init__(self, message: str, remedy: str = "", *, path: str | Path, line: int, byte: int) -> None:
        self.line = line
        self.byte = byte
        super().__init__(message, remedy, path=path)


class RunVersionError(RunRefused):
    """The figures of a run were written by another version of Steelyard and cannot be read by this one."""

    topic = "version"


class RunCancelled(SteelyardError):
    """The run was cancelled before its first call; nothing was asked and nothing written."""

    topic = "interrupted"


class JournalError(SteelyardError, OSError):
    """The disk refused a write; everything before it is intact."""

    topic = "disk"


class WorkersLost(SteelyardError):
    """No worker of the engine can be reached any more; what has finished is on disk, and the run can be resumed."""

    topic = "workers-lost"


class CountsError(SteelyardError):
    """The counts of a run do not add up: a bug, never written to disk as a result."""

    topic = "internal-error"


class CaseLimitReached(SteelyardError):
    """A limit of the case was reached: raised in an agent by `context.record_turn`. The case is scored all the same."""

    topic = "case-limits"

    def __init__(self, stop_reason: str) -> None:
        self.stop_reason = stop_reason
        super().__init__(f"the case reached its {stop_reason.replace('_', ' ')}")


class TargetError(SteelyardError):
    """A target could not answer a case; its message becomes the case's error record.

    `partial` is an InvocationResponse with what did come: its text and times are kept in that record.
    """

    topic = "errors"

    def __init__(self, message: str, *, partial: InvocationResponse | None = None) -> None:
        self.partial = partial
        super().__init__(message)


class SetupError(TargetError):
    """The workspace of a case could not be made ready: a command of its `setup` failed, or its template is gone."""

    topic = "setup"


class TransientError(TargetError):
    """An error that may pass: the call is retried within its limits.

    `retry_after` is how many seconds the endpoint asked to wait; `overloaded` says that it has too much to do, so that
    all calls to it should slow down and not only this one.
    """

    topic = "retries"

    def __init__(
        self,
        message: str,
        *,
        retry_after: float | None = None,
        overloaded: bool = False,
        partial: InvocationResponse | None = None,
    ) -> None:
        self.retry_after = retry_after
        self.overloaded = overloaded
        super().__init__(message, partial=partial)


class TransportError(TransientError):
    """No whole answer came over the wire; `reply` is the part that did, if any."""

    topic = "connection"

    def __init__(self, message: str, *, reply: HttpReply | None = None) -> None:
        self.reply = reply
        super().__init__(message)


_MAX_CAUSES = 20
"""An error can be its own cause, after `raise error from error`."""
_GENERAL = frozenset({ConfigurationError.topic, SuiteError.topic})
"""Topics that say less than the messages themselves."""


def topic_of(error: BaseException) -> str | None:
    """The topic that says more about an error than its message does: its own, or that of what it was raised from."""
    cause: BaseException | None = error
    for _ in range(_MAX_CAUSES):
        if isinstance(cause, SteelyardError) and cause.topic not in _GENERAL:
            return cause.topic
        cause = None if cause is None else cause.__cause__
    return None


def describe(error: BaseException) -> str:
    """`Type: message`, whatever the exception does when it is turned into text."""
    try:
        message = str(error)
    except Exception:  # noqa: BLE001 - a broken __str__ must not lose the error it belongs to
        message = "(its message could not be read)"
    return f"{type(error).__name__}: {message}"[:_MAX_MESSAGE] if message else type(error).__name__


def reject_unknown(
    mapping: Mapping[Any, Any],
    known: Collection[str],
    path: str = "",
    *,
    file: str | Path | None = None,
    line: int | None = None,
) -> None:
    """Refuse a mapping with a key that is not known, naming the key's path (`cases[3].expcted`)."""
    for key in mapping:
        if key not in known:
            where = f"{path}.{key}" if path else str(key)
            message = f"unknown key {where}; {suggestion(key, known)}"
            raise SuiteError(message, path=file, line=line, topic="unknown-key")
