"""An agent as a target: a program that works in the workspace of its case, within the case's limits."""

from __future__ import annotations

import asyncio
import os
import shlex
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from time import perf_counter
from typing import Any, Literal, get_args

from steelyard.case_templates import CaseTemplate, PathTemplate
from steelyard.daemon_threads import DaemonThreads
from steelyard.errors import ConfigurationError, TargetError, TransientError
from steelyard.masking import Masker
from steelyard.protocols import Identity, InvocationContext
from steelyard.records import STOP_REASONS, EvalCase, InvocationResponse
from steelyard.subprocesses import ChildProcess, allowed_environment, ending_of, output_of
from steelyard.targets.agent_output import STREAM_READERS, OutputReader, WholeReader
from steelyard.targets.command import (
    OUT_OF_RESOURCES,
    SHOWN_STDERR,
    TRY_AGAIN,
    checked_names,
    passed_values,
    payload_of,
    program_digest,
    read_json,
)
from steelyard.units import parse_duration

Stdin = Literal["none", "prompt", "json"]
OutputName = Literal["text", "json", "claude-stream-json", "codex-json"]

MAX_ARGUMENT = 128 * 1024 - 1
"""Bytes of one word on a command line: what Linux takes."""
_VERSION_SECONDS = 30.0
_NAMES = ("workspace", "suite", "gateway", "trial", "attempt")
_FOR_GRADERS = frozenset({"expected", "expected_trajectory"})
"""Fields of a case that an agent does not get."""


class Agent:
    """A program that works in the workspace of its case.

    The words of `argv`, the values of `env` and `cwd` (a folder in the workspace) are templates over the case:
    `{{ prompt }}`, `{{ id }}`, `{{ metadata.x }}`, `{{ workspace }}`, `{{ suite }}` (the suite's folder), and
    `{{ gateway.openai }}`, `{{ gateway.anthropic }}`, `{{ gateway.key }}` with a gateway. Each word stays one word.
    `output` says how what it prints is read: `text`, `json`, `claude-stream-json`, `codex-json`, or a function of the
    text. The output of the command `version` is part of its identity.

    Exit code 0 is an answer, 75 means: try again; any other is an error with the end of stderr. At a limit of the case
    it is sent SIGTERM and, after `grace`, SIGKILL, and its answer is what there is.
    """

    needs_workspace = True
    heeds_limits = True

    def __init__(
        self,
        argv: str | Sequence[str],
        *,
        stdin: Stdin = "none",
        output: OutputName | Callable[[str], Any] = "text",
        env: Mapping[str, str] | None = None,
        pass_env: Sequence[str] = (),
        cwd: str = ".",
        version: Sequence[str] | str | None = None,
        grace: float | str = 5.0,
        model_id: str | None = None,
        parallelism: int = 1,
        gateway: Mapping[str, Any] | None = None,
        sandbox: Mapping[str, Any] | str | None = None,
        folder: str | Path = ".",
    ) -> None:
        if stdin not in get_args(Stdin):
            raise ConfigurationError(f"stdin must be one of {', '.join(get_args(Stdin))}, got {stdin!r}")
        if not callable(output) and output not in get_args(OutputName):
            known = ", ".join(get_args(OutputName))
            raise ConfigurationError(f"output must be one of {known}, or a function, got {output!r}")
        if isinstance(parallelism, bool) or not isinstance(parallelism, int) or parallelism < 1:
            raise ConfigurationError(f"parallelism must be >= 1, got {parallelism!r}")
        self.folder = Path(folder).resolve()
        self._argv = [CaseTemplate(word, "argv", _NAMES) for word in _words(argv, "argv")]
        self._env = {
            name: CaseTemplate(text, f"env.{name}", _NAMES) for name, text in _checked_templates(env or {}).items()
        }
        self._cwd = PathTemplate(cwd, "cwd", _NAMES)
        self._version_argv = None if version is None else _words(version, "version")
        self._version: str | None = None
        self._threads = DaemonThreads()
        self.stdin: Stdin = stdin
        self.output = output
        self.pass_env = checked_names(pass_env)
        self.grace = parse_duration(grace, "grace")
        self.model_id = model_id
        self.default_parallelism = parallelism
        self.gateway = gateway
        """As written; the run makes it."""
        self.sandbox = sandbox
        self._check_program()

    def __repr__(self) -> str:
        return f"Agent({shlex.join(word.source for word in self._argv)!r})"

    @property
    def enforces(self) -> frozenset[str]:
        """The limits that hold while the agent runs; with a gateway, all of them."""
        if self.gateway is not None:
            return frozenset(STOP_REASONS)
        read = STREAM_READERS[self.output].enforces if self.output in STREAM_READERS else frozenset()  # type: ignore[index]
        return frozenset({"time", "output"}) | read

    def identity(self) -> Identity:
        """What is run, and how. Of environment variables only the names, as values may be secrets. Blocks at first."""
        words = [word.source for word in self._argv]
        named = [word.replace("{{ suite }}", str(self.folder)).replace("{{suite}}", str(self.folder)) for word in words]
        output = self.output
        facts: dict[str, Any] = {
            "kind": "agent",
            "argv": words,
            "stdin": self.stdin,
            "output": output if isinstance(output, str) else f"{output.__module__}:{output.__qualname__}",
            "env": sorted({*self._env, *self.pass_env}),
            "cwd": self._cwd.source,
            "~files": program_digest(named, (), self.folder),
        }
        if self._version_argv is not None:
            facts["version"] = self.version()
        if self.sandbox is not None:
            facts["sandbox"] = self.sandbox
        return facts

    def version(self) -> str | None:
        """What the command `version` prints; None without one. ConfigurationError where it fails."""
        if self._version_argv is None or self._version is not None:
            return self._version
        argv = [word.replace("{{ suite }}", str(self.folder)) for word in self._version_argv]
        try:
            code, out, err = output_of(argv, timeout=_VERSION_SECONDS, max_bytes=4096)
        except (OSError, TimeoutError) as error:
            raise ConfigurationError(f"version: {shlex.join(argv)}: {error}") from error
        text = (out or err).decode("utf-8", "replace").strip()
        if code or not text:
            raise ConfigurationError(f"version: {shlex.join(argv)} {ending_of(code)} and printed {text[:200]!r}")
        self._version = text[:500]
        return self._version

    def _payload(self, case: EvalCase, context: InvocationContext) -> bytes:
        """What the agent reads from stdin; never what its answer is compared with."""
        if self.stdin == "none":
            return b""
        if self.stdin == "prompt":
            return (case.prompt or "").encode("utf-8", "replace")
        return payload_of(case, context, leave_out=_FOR_GRADERS)

    async def invoke(self, case: EvalCase, context: InvocationContext) -> InvocationResponse:
        """Run the agent in its workspace, to its end or to a limit."""
        if context.workspace is None or context.environment is None:
            raise ConfigurationError("an agent works in a workspace: it can only be called by a run")
        argv, env, cwd = self._command(case, context)
        secrets = self._secrets(env)
        masker = Masker(secrets)
        reader = self._reader(context)
        running = _Running(context, reader)
        if context.log is not None:
            context.log.mask(secrets)
        child = self._start(argv, env, cwd, self._payload(case, context), context, running)
        request_time = datetime.now(UTC)
        try:
            limit = await _finished_or_limited(child, context)
            await child.end(self.grace)
        except GeneratorExit:  # the event loop is gone: waiting is impossible
            child.kill()
            raise
        except BaseException as error:
            try:
                await child.end()
            finally:
                partial = _masked(reader.finish(), masker)
                partial.error = partial.error_type = None
                error.partial = self._about(partial, child, case, request_time, masker)  # type: ignore[attr-defined]
            raise
        response = _masked(await self._read(reader), masker)
        response = self._about(response, child, case, request_time, masker)
        return self._judged(response, child, limit)

    def _command(self, case: EvalCase, context: InvocationContext) -> tuple[list[str], dict[str, str], Path]:
        workspace = context.workspace
        assert workspace is not None
        more = {
            "workspace": str(workspace),
            "suite": str(self.folder),
            "gateway": context.gateway,
            "trial": context.trial,
            "attempt": context.attempt,
        }
        argv = [word.render(case, **more) for word in self._argv]
        for word in argv:
            if len(word.encode("utf-8", "surrogateescape")) > MAX_ARGUMENT:
                raise TargetError(
                    f"an argument has more bytes than a program can be given ({MAX_ARGUMENT:,}): use `stdin: prompt`"
                )
        env = {**allowed_environment(*self.pass_env), **(context.environment or {})}
        env |= {name: text.render(case, **more) for name, text in self._env.items()}
        cwd = workspace / self._cwd.render(case, **more) if self._cwd.source != "." else workspace
        if not cwd.resolve().is_relative_to(workspace.resolve()) or not cwd.is_dir():
            raise TargetError(f"cwd must be a folder in the workspace, got {self._cwd.source!r}")
        if context.sandbox is not None:
            argv, env = context.sandbox.wrap(argv, env, cwd=cwd)
        return argv, env, cwd

    def _start(
        self,
        argv: list[str],
        env: dict[str, str],
        cwd: Path,
        payload: bytes,
        context: InvocationContext,
        running: _Running,
    ) -> ChildProcess:
        try:
            return ChildProcess(
                argv,
                stdin=payload,
                env=env,
                cwd=cwd,
                max_output_bytes=None,
                log=context.programs,
                on_output=running.take,
            )
        except OSError as error:
            kind = TransientError if error.errno in OUT_OF_RESOURCES else TargetError
            raise kind(f"cannot start {argv[0]}: {error.strerror or error}") from error
        except ValueError as error:  # a NUL, or a surrogate that no program can be given
            raise TargetError(f"cannot start {argv[0]}: {error}") from error

    def _secrets(self, env: Mapping[str, str]) -> list[str]:
        """What must not be written of the environment: what was named on purpose, except paths of the workspace."""
        given = [env[name] for name, text in self._env.items() if name in env and "{{ workspace" not in text.source]
        return [*given, *passed_values(self.pass_env)]

    def _reader(self, context: InvocationContext) -> OutputReader:
        if callable(self.output):
            function = self.output
            return WholeReader(lambda data: function(data.decode("utf-8", "replace")), context.record_turn)
        if self.output == "json":
            return WholeReader(read_json, context.record_turn)
        return STREAM_READERS[self.output](context.record_turn)

    async def _read(self, reader: OutputReader) -> InvocationResponse:
        """What was printed, read; a function of the user's runs in a thread."""
        if not callable(self.output):
            return reader.finish()
        try:
            return await self._threads.run(reader.finish)
        except Exception as error:
            raise TargetError(f"output could not be read by {self.output.__qualname__}: {error}") from error

    def _about(
        self,
        response: InvocationResponse,
        child: ChildProcess,
        case: EvalCase,
        request_time: datetime,
        masker: Masker,
    ) -> InvocationResponse:
        """The response with how its program ran."""
        ended = child.exited_at or perf_counter()
        response.request_time = response.request_time or request_time
        response.time_to_last_token = ended - child.started_at
        response.input_prompt = case.prompt if response.input_prompt is None else response.input_prompt
        response.exit_code = child.returncode
        response.stderr = masker.text(child.stderr_tail.decode("utf-8", "replace")).strip() or None
        if child.usage is not None:
            response.cpu_seconds = child.usage.ru_utime + child.usage.ru_stime
            response.peak_memory = child.usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024)
        return response

    def _judged(self, response: InvocationResponse, child: ChildProcess, limit: str | None) -> InvocationResponse:
        """The response of an agent that answered or reached a limit; for all others, raise."""
        if limit is not None or response.stop_reason in STOP_REASONS.values():
            response.stop_reason = limit or response.stop_reason
            response.error = response.error_type = None
            return response
        name, code = self._argv[0].source, child.returncode
        note = f": {response.stderr[-SHOWN_STDERR:]}" if response.stderr else ""
        if code == TRY_AGAIN:
            raise TransientError(f"{name} exited with code {TRY_AGAIN} (try again){note}", partial=_answer(response))
        if code:
            reported = f" ({response.error})" if response.error else ""
            message = f"{name} {ending_of(code)}{reported}{note}"
            raise TargetError(message, partial=_answer(response))
        return response

    def _check_program(self) -> None:
        """Refuse a program that is not there, before anything is called; one that a case names cannot be checked."""
        program = self._argv[0]
        if os.sep not in program.source and program.is_constant and shutil.which(program.source) is None:
            raise ConfigurationError(f"program not found: {program.source!r}")


class _Running:
    """What becomes of an agent's output as it comes: logged, read, and counted against the limit."""

    def __init__(self, context: InvocationContext, reader: OutputReader) -> None:
        self._context = context
        self._reader = reader
        self._bytes = 0

    def take(self, data: bytes, stream: str) -> None:
        """Take a piece of output."""
        context = self._context
        if context.log is not None:
            context.log(data, stream)
        self._bytes += len(data)
        if context.limits is not None and context.limits.output is not None and self._bytes > context.limits.output:
            if context.limit_signal is not None:
                context.limit_signal.reach(STOP_REASONS["output"])
            return
        if stream == "out":
            self._reader.feed(data)


async def _finished_or_limited(child: ChildProcess, context: InvocationContext) -> str | None:
    """Wait for the agent's end, or for a limit: then the limit's `stop_reason`."""
    if context.limit_signal is None:
        await child.finished()
        return None
    ended = asyncio.ensure_future(child.finished())
    limit = asyncio.ensure_future(context.limit_signal.wait())
    try:
        await asyncio.wait({ended, limit}, return_when=asyncio.FIRST_COMPLETED)
        return context.limit_signal.reached if not ended.done() else None
    finally:
        for one in (ended, limit):
            one.cancel()


def _answer(response: InvocationResponse) -> InvocationResponse:
    """The response as part of a failure: what is wrong is reported by the failure."""
    response.error = response.error_type = None
    return response


def _masked(response: InvocationResponse, masker: Masker) -> InvocationResponse:
    if masker.longest:
        response.response_text = masker.value(response.response_text)
        response.messages = masker.value(response.messages)
        response.error = masker.value(response.error)
    return response


def _words(argv: str | Sequence[str], name: str) -> list[str]:
    try:
        words = shlex.split(argv) if isinstance(argv, str) else [os.fspath(word) for word in argv]
    except (ValueError, TypeError) as error:
        raise ConfigurationError(f"{name} must be a list of words, got {argv!r}: {error}") from error
    if not words or not words[0]:
        raise ConfigurationError(f"{name} must name a program, got {argv!r}")
    return words


def _checked_templates(env: Mapping[str, Any]) -> dict[str, str]:
    if not isinstance(env, Mapping):
        raise ConfigurationError(f"env must be a mapping of names to texts, got {env!r}")
    for name, value in env.items():
        if not isinstance(name, str) or not name or "=" in name or "\0" in name:
            raise ConfigurationError(f"env has an invalid name: {name!r}")
        if not isinstance(value, str):
            raise ConfigurationError(f"env[{name!r}] must be text, got {type(value).__name__}")
    return dict(env)
