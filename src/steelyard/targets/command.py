"""A program as a target: the case as JSON on its stdin, the answer on its stdout."""

from __future__ import annotations

import errno
import json
import os
import shlex
import shutil
from collections.abc import Collection, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

import msgspec

from steelyard.disk import files_digest
from steelyard.errors import ConfigurationError, TargetError, TransientError, nearest
from steelyard.masking import Masker
from steelyard.protocols import Identity, InvocationContext, StartedPrograms
from steelyard.records import EvalCase, InvocationResponse
from steelyard.subprocesses import ChildProcess, allowed_environment, ending_of
from steelyard.targets.conversation import time_per_output_token

MALFORMED = "MalformedOutput"
"""The `error_type` of an answer that came back but cannot be read."""

SHOWN_STDERR = 2048
TRY_AGAIN = 75
"""The exit code of a program that asks to be tried again (EX_TEMPFAIL)."""
OUT_OF_RESOURCES = {errno.EAGAIN, errno.ENOMEM, errno.EMFILE, errno.ENFILE}


class Command:
    """A program that is started once per call, without a shell.

    It reads the case's fields and `trial`, `attempt` and `seed` as one JSON object, and answers with plain text or,
    with `output="json"`, with an object of InvocationResponse's fields. When it ends, or is cancelled, whatever it
    started in its process group is ended too. Of our environment it is given PATH, HOME, the language and proxies, and
    what `pass_env` names. Secrets belong in `env` or `pass_env`: their values are never written anywhere. Exit code 75
    means: try again.

    `inputs` are patterns of files, relative to `cwd`, on which the answers depend beside those that argv names: when
    one of them changes, cached answers are not used, and a resumed run warns.
    """

    def __init__(
        self,
        argv: str | Sequence[str],
        *,
        output: Literal["text", "json"] = "text",
        env: Mapping[str, str] | None = None,
        cwd: str | Path | None = None,
        max_output_bytes: int = 64 * 1024 * 1024,
        model_id: str | None = None,
        parallelism: int = 1,
        inputs: Sequence[str] = (),
        pass_env: Sequence[str] = (),
    ) -> None:
        if output not in ("text", "json"):
            raise ConfigurationError(f"output must be 'text' or 'json', got {output!r}")
        if max_output_bytes < 1:
            raise ConfigurationError(f"max_output_bytes must be >= 1, got {max_output_bytes}")
        if parallelism < 1:
            raise ConfigurationError(f"parallelism must be >= 1, got {parallelism}")
        self.argv = _split(argv)
        self.output = output
        self.cwd = None if cwd is None else Path(cwd)
        self.max_output_bytes = max_output_bytes
        self.model_id = model_id
        self.default_parallelism = parallelism
        self.inputs = _checked_inputs(inputs)
        self._env = checked_env(env or {})
        self.pass_env = checked_names(pass_env)
        self._mask = Masker([*self._env.values(), *passed_values(self.pass_env)])
        _check_program(self.argv[0], self.cwd, self._env.get("PATH"))

    def __repr__(self) -> str:
        return f"Command({shlex.join(self.argv)!r})"

    def identity(self) -> Identity:
        """What is run, and how; only the names of environment variables, as values may be secrets."""
        return {
            "kind": "command",
            "argv": list(self.argv),
            "output": self.output,
            "env": sorted({*self._env, *self.pass_env}),
            "~cwd": None if self.cwd is None else str(self.cwd),
            "~files": program_digest(self.argv, self.inputs, self.cwd or Path.cwd()),
        }

    async def invoke(self, case: EvalCase, context: InvocationContext) -> InvocationResponse:
        """Run the program for one case; a failing program raises, an unreadable answer is kept with its error."""
        payload = payload_of(case, context)
        request_time = datetime.now(UTC)
        child = self._start(payload, context.programs)
        try:
            await child.finished()
        except GeneratorExit:  # the event loop is gone: waiting is impossible
            child.kill()
            raise
        except BaseException as error:
            try:
                await child.end()
            finally:
                error.partial = self._so_far(child, case, request_time)  # type: ignore[attr-defined]
            raise
        await child.end()
        if (failure := self._failure(child)) is not None:
            failure.partial = self._so_far(child, case, request_time)
            raise failure
        response = self._read(child)
        response.input_prompt = case.prompt if response.input_prompt is None else response.input_prompt
        response.request_time = response.request_time or request_time
        response.stderr = self._stderr(child) if response.stderr is None else response.stderr
        return response

    def _start(self, payload: bytes, programs: StartedPrograms | None) -> ChildProcess:
        try:
            return ChildProcess(
                self.argv,
                stdin=payload,
                env={**allowed_environment("HOME", "TMPDIR", *self.pass_env), **self._env},
                cwd=self.cwd,
                max_output_bytes=self.max_output_bytes,
                log=programs,
            )
        except OSError as error:
            kind = TransientError if error.errno in OUT_OF_RESOURCES else TargetError
            raise kind(f"cannot start {self.argv[0]}: {error.strerror or error}") from error

    def _failure(self, child: ChildProcess) -> TargetError | None:
        """Return what is wrong with how the program ended; None when it ended well and wrote something."""
        name, stderr = self.argv[0], self._stderr(child)
        note = f": {stderr[-SHOWN_STDERR:]}" if stderr else ""
        if child.overflowed:
            return TargetError(f"{name} wrote more than {self.max_output_bytes} bytes to stdout and was ended")
        if child.returncode == TRY_AGAIN:
            return TransientError(f"{name} exited with code {TRY_AGAIN} (try again){note}")
        if child.returncode:
            return TargetError(f"{name} {ending_of(child.returncode)}{note}")
        if not child.stdout:
            return TargetError(f"{name} exited with code 0 and wrote nothing to stdout{note}")
        return None

    def _stderr(self, child: ChildProcess) -> str | None:
        """Return the end of stderr, with the values of `env` masked; None where it is empty."""
        return self._mask.text(child.stderr_tail.decode("utf-8", "replace")).strip() or None

    def _so_far(self, child: ChildProcess, case: EvalCase, request_time: datetime) -> InvocationResponse:
        """Return what a program that failed, or was ended, had written."""
        text = self._mask.text(bytes(child.stdout).decode("utf-8", "replace"))
        first = None if child.first_byte_at is None else child.first_byte_at - child.started_at
        return InvocationResponse(
            response_text=text or None,
            input_prompt=case.prompt,
            request_time=request_time,
            time_to_first_token=first if self.output == "text" else None,
            stderr=self._stderr(child),
        )

    def _read(self, child: ChildProcess) -> InvocationResponse:
        last = None if child.exited_at is None else child.exited_at - child.started_at
        if self.output == "json":
            response = read_json(bytes(child.stdout))
        else:
            response = _from_text(bytes(child.stdout))
            if child.first_byte_at is not None:
                response.time_to_first_token = child.first_byte_at - child.started_at
        if response.time_per_output_token is None:  # only from the program's own clock, never from two
            response.time_per_output_token = time_per_output_token(
                response.time_to_first_token, response.time_to_last_token, response.num_tokens_output
            )
        if response.time_to_last_token is None:
            response.time_to_last_token = last
        return response


def _split(argv: str | Sequence[str]) -> list[str]:
    try:
        words = shlex.split(argv) if isinstance(argv, str) else [os.fspath(word) for word in argv]
    except (ValueError, TypeError) as error:
        raise ConfigurationError(f"argv must be a command line or a list of words, got {argv!r}: {error}") from error
    if not words or not words[0]:
        raise ConfigurationError(f"argv must name a program, got {argv!r}")
    if any("\0" in word for word in words):
        raise ConfigurationError(f"argv must not contain NUL characters, got {argv!r}")
    return words


def checked_env(env: Mapping[str, str]) -> dict[str, str]:
    """Environment variables, checked."""
    for name, value in env.items():
        if not isinstance(name, str) or not name or "=" in name or "\0" in name:
            raise ConfigurationError(f"env has an invalid name: {name!r}")
        if not isinstance(value, str) or "\0" in value:
            raise ConfigurationError(f"env[{name!r}] must be text without NUL, got {type(value).__name__}")
    return dict(env)


def checked_names(names: Sequence[str]) -> tuple[str, ...]:
    """Names of environment variables, checked."""
    if isinstance(names, str) or not all(isinstance(name, str) and name and "=" not in name for name in names):
        raise ConfigurationError(f"pass_env must be a list of names of environment variables, got {names!r}")
    return tuple(names)


def passed_values(names: Sequence[str]) -> list[str]:
    """The values that a program is given by name, to be masked."""
    return [os.environ[name] for name in names if name in os.environ]


def _checked_inputs(inputs: Sequence[str]) -> tuple[str, ...]:
    if isinstance(inputs, str) or not all(isinstance(pattern, str) and pattern for pattern in inputs):
        raise ConfigurationError(f"inputs must be a list of file patterns such as src/**/*.py, got {inputs!r}")
    for pattern in inputs:
        if os.path.isabs(pattern) or ".." in Path(pattern).parts:
            raise ConfigurationError(f"inputs must be relative to the program's folder, got {pattern!r}")
    return tuple(inputs)


def program_digest(argv: Sequence[str], inputs: Sequence[str], folder: Path) -> str | None:
    """A digest of the files that argv names and `inputs` match, by path and content; None when there are none."""
    # A program elsewhere (/usr/bin/python3, or found on PATH) belongs to the system, one in the folder to the suite.
    own = os.sep in argv[0] and (folder / argv[0]).is_relative_to(folder)
    named = {folder / word for word in (argv if own else argv[1:])}
    matched = {path for pattern in inputs for path in folder.glob(pattern)}
    return files_digest(named | matched, folder)


def _check_program(program: str, cwd: Path | None, path: str | None) -> None:
    """Refuse a program that cannot be started from here, before anything is called."""
    if cwd is not None and not cwd.is_dir():
        raise ConfigurationError(f"cwd must be a directory, got {str(cwd)!r}")
    place = os.path.join(cwd or "", program) if os.sep in program else program
    if shutil.which(place, path=path) is not None:
        return
    if os.sep in program and os.path.exists(place):
        raise ConfigurationError(f"program is not executable: {place!r}")
    raise ConfigurationError(f"program not found: {place!r}")


def payload_of(case: EvalCase, context: InvocationContext, *, leave_out: Collection[str] = ()) -> bytes:
    """The case as one line of JSON."""
    fields = {name: getattr(case, name) for name in case.__struct_fields__ if name not in leave_out}
    if not case.attachments:
        del fields["attachments"]
    fields |= {"trial": context.trial, "attempt": context.attempt, "seed": context.seed}
    try:
        return msgspec.json.encode(fields) + b"\n"
    except UnicodeEncodeError:  # lone surrogates, which only an escape can carry
        return json.dumps(msgspec.to_builtins(fields)).encode("ascii") + b"\n"


def _from_text(stdout: bytes) -> InvocationResponse:
    text = stdout.removesuffix(b"\n").removesuffix(b"\r")
    try:
        return InvocationResponse(response_text=text.decode())
    except UnicodeDecodeError as error:
        return _malformed(text, f"stdout is not UTF-8: {error.reason} at byte {error.start}")


def read_json(stdout: bytes) -> InvocationResponse:
    """A response from an object of its fields; one that says so where it cannot be read."""
    try:
        fields = msgspec.json.decode(stdout)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        return _malformed(stdout, f"stdout is not JSON: {error}")
    if not isinstance(fields, dict):
        return _malformed(stdout, f"stdout must be a JSON object, got {type(fields).__name__}")
    unknown = [key for key in fields if key not in InvocationResponse.__struct_fields__]
    if unknown:
        return _malformed(stdout, _unknown_key(unknown[0]))
    try:
        response = msgspec.convert(fields, InvocationResponse)
    except msgspec.ValidationError as error:
        return _malformed(stdout, f"stdout has a bad field: {error}")
    if response.response_text is None and response.error is None:
        return _malformed(stdout, "stdout must have `response_text` or `error`")
    return response


def _unknown_key(key: str) -> str:
    near = nearest(key, InvocationResponse.__struct_fields__)
    hint = f"; did you mean {near!r}?" if near else ""
    return f"stdout has an unknown key {key[:80]!r}{hint}"


def _malformed(stdout: bytes, error: str) -> InvocationResponse:
    return InvocationResponse(response_text=stdout.decode("utf-8", "replace"), error=error, error_type=MALFORMED)
