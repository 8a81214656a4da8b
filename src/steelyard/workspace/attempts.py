"""Attempts in workspaces: a fresh folder for each call of the target, limits around it, copies of it for graders."""

from __future__ import annotations

import asyncio
import base64
import logging
import os
import secrets
import threading
import zlib
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from steelyard import reaper
from steelyard.case_templates import CaseTemplate
from steelyard.daemon_threads import DaemonThreads
from steelyard.errors import CaseLimitReached, ConfigurationError, SetupError, TargetError
from steelyard.protocols import (
    InvocationContext,
    Sandbox,
    SandboxPlace,
    SandboxProvider,
    ScoringContext,
    StartedPrograms,
    Target,
    TargetWrapper,
)
from steelyard.records import CaseLimits, EvalCase, InvocationResponse, Record
from steelyard.stats.formatting import counted
from steelyard.subprocesses import allowed_environment, run_program
from steelyard.suite.identity import BadCase, canonical
from steelyard.workspace.keeping import STREAMS, TURNS, AttemptLogs, Keeper, TurnRecorder, read_patch
from steelyard.workspace.limits import NO_CALLS, AttemptLimits, BothClocks
from steelyard.workspace.patch import PatchSummary, Scan, apply_patch, make_patch, scan
from steelyard.workspace.places import AttemptPlace, AttemptState, RunPlaces, remove_tree
from steelyard.workspace.sandbox import folder_size
from steelyard.workspace.template import Template, Workspace, copy_tree

if TYPE_CHECKING:  # it loads every API's reader
    from steelyard.workspace.gateway import Gateway, GatewaySession

log = logging.getLogger("steelyard")

DISK_LIMIT = "disk_limit"
"""The `stop_reason` of an agent that wrote more than its sandbox's `disk`."""
_DISK_SECONDS = 0.1

_SHOWN_OUTPUT = 2000
_TEMPLATES = "templates"
_HURRIED_TEARDOWN = 1.0
"""Seconds for `teardown` in a run that is being cancelled."""
_MAX_CACHED_PATCH = 4 << 20


class Workspaces:
    """The workspaces of one run: makes them ready, hands them to targets and scorers, and clears them away."""

    def __init__(
        self,
        workspace: Workspace | None,
        *,
        run: Path | None,
        limits: CaseLimits | None = None,
        answers_of: Path | None = None,
        for_cache: bool = False,
        gateway: Gateway | None = None,
        sandbox: SandboxProvider | None = None,
    ) -> None:
        self.workspace = workspace
        """None where scorers take a context, or cases have limits, and nothing has a workspace."""
        self.limits = limits
        self.places = RunPlaces(run)
        self.keeper = Keeper(self.places, workspace) if workspace is not None else None
        self._answers_of = answers_of
        """The run whose answers are scored again: its patches rebuild their workspaces."""
        self.for_cache = for_cache
        """Whether responses carry their patch, for the cache."""
        self.gateway = gateway
        """What records the model calls of the agents; None where nothing does."""
        self.sandbox = sandbox
        """What confines the agents; None where nothing does."""
        self.setup_sandbox = None if workspace is None else workspace.sandbox
        self._notes: dict[tuple[str, int], list[str]] = {}
        self._problems: dict[tuple[str, int], str] = {}
        self._cached: dict[tuple[str, int], tuple[bytes, PatchSummary]] = {}
        self.programs: StartedPrograms | None = None
        """Where scorers write down the programs that they start."""
        self.is_complete = False
        """Whether every case of the run is done."""
        self._threads = DaemonThreads()
        self._scratches: dict[tuple[str, int], list[Path]] = {}
        self._lock = threading.Lock()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_lock": None, "_scratches": {}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _lock=threading.Lock())

    async def open(self, *, shared: bool = False) -> None:
        """End what an earlier launch left in sandboxes, and remove the copies that its graders were given.

        With `shared`, copies of this object in other processes do the work: they count together what is kept.
        """
        await self._threads.run(self.places.remove_scratches)
        await self._threads.run(self.places.unmark_all)
        for provider in (self.sandbox, self.setup_sandbox):
            if provider is not None:
                await provider.reap(self.places.root.name)
        if shared and self.keeper is not None:
            await self._threads.run(self.keeper.share)

    def seen_of(self, case: EvalCase) -> bytes:
        """What an agent sees besides the case, for the case's fingerprint: its workspace. BadCase without one."""
        try:
            return self.digest_of(case).encode()
        except (ConfigurationError, OSError) as error:
            raise BadCase(str(error)) from error

    def digest_of(self, case: EvalCase) -> str:
        """A digest of a workspace before the agent begins: its template, and how it is made ready."""
        assert self.workspace is not None
        ready = canonical(self.workspace.identity()).decode()
        return f"{self.workspace.digest_of(case, self.places.root / _TEMPLATES)}:{ready}"

    def template_of(self, case: EvalCase) -> Template:
        """The content of a case's workspace before anything was done in it."""
        assert self.workspace is not None
        return self.workspace.template_of(case, self.places.root / _TEMPLATES)

    def limits_of(self, case: EvalCase) -> CaseLimits | None:
        """The limits of a case: the suite's, and its own in their place."""
        return case.limits if self.limits is None else self.limits.overridden(case.limits)

    async def prepare(self, case: EvalCase, context: InvocationContext) -> Attempt:
        """A fresh workspace with its template and setup, and a context that names it; SetupError where that fails."""
        retries = 0
        while True:
            try:
                return await self._prepare_once(case, context)
            except SetupError:
                if self.workspace is None or retries >= self.workspace.setup_retries:
                    raise
            retries += 1

    async def _prepare_once(self, case: EvalCase, context: InvocationContext) -> Attempt:
        state = AttemptState(id=case.id, trial=context.trial, attempt=context.attempt)
        if self.workspace is not None or self.gateway is not None:
            await self._threads.run(self.places.mark_running, state)
        if self.workspace is None:
            return Attempt(self, None, case, context)
        place = await self._threads.run(self.places.new_attempt, state)
        try:
            template = await self._threads.run(self._make, case, place)
            attempt = Attempt(self, place, case, context, template)
            await attempt.set_up()
        except (ConfigurationError, OSError) as error:
            await self._threads.run(remove_tree, place.path)
            raise SetupError(f"the workspace could not be made: {error}") from error
        except BaseException:
            with suppress(OSError):
                await self._threads.run(remove_tree, place.path)
            raise
        return attempt

    def _make(self, case: EvalCase, place: AttemptPlace) -> Template:
        template = self.template_of(case)
        template.make(place.workspace)
        return template

    async def unpacked(self, case_id: str, trial: int, response: InvocationResponse) -> InvocationResponse:
        """The response without the patch that it carries for the cache; a cached one's is kept with this run."""
        if response.cached and response.workspace_patch is not None and self.keeper is not None:
            with suppress(ValueError):  # where it cannot be read, its workspace cannot be rebuilt
                found = unpacked(response.workspace_patch)
                self._cached[case_id, trial] = found
                await self._threads.run(self.keeper.write_patch, case_id, trial, *found)
        return msgspec.structs.replace(response, workspace_patch=None)

    async def restore(self, case: EvalCase, context: InvocationContext) -> None:
        """Find or rebuild the finished workspace of an answer that was not given just now.

        That is one of an earlier launch, of the run whose answers are scored again, or of the cache. Where it cannot be
        rebuilt, the scorers that ask for it are told why.
        """
        if self.workspace is None:
            return
        for place, state in self.places.attempts(case.id, context.trial):
            if state is not None and state.finished and state.id == case.id and state.attempt == context.attempt:
                context.workspace = place.workspace
                return
        try:
            patch, summary = await self._threads.run(self._read_patch, case.id, context.trial)
            context.workspace = await self._rebuild(case, context, patch, summary)
        except (SetupError, ConfigurationError, OSError, ValueError) as error:
            self._problems[case.id, context.trial] = str(error)

    def _read_patch(self, case_id: str, trial: int) -> tuple[bytes, PatchSummary]:
        assert self.keeper is not None
        if (case_id, trial) in self._cached:
            return self._cached[case_id, trial]
        if self._answers_of is not None:
            found = read_patch(self._answers_of, case_id, trial)
            self.keeper.write_patch(case_id, trial, *found)  # this run can be scored again, too
            return found
        if self.places.run is None:
            raise ConfigurationError("a run without a directory keeps no patches")
        return read_patch(self.places.run, case_id, trial)

    async def _rebuild(self, case: EvalCase, context: InvocationContext, patch: bytes, summary: PatchSummary) -> Path:
        state = AttemptState(id=case.id, trial=context.trial, attempt=context.attempt)
        place = await self._threads.run(self.places.new_attempt, state)
        template = await self._threads.run(self._make, case, place)
        # The commands of the setup see a context like the agent's; this one is not the agent's.
        ready = Attempt(self, place, case, msgspec.structs.replace(context), template, with_logs=False)
        await ready.set_up()
        await self._threads.run(apply_patch, patch, summary, template, place.workspace)
        place.write_state(msgspec.structs.replace(state, finished=True))
        return place.workspace

    def scoring_context(self, case: EvalCase, context: InvocationContext) -> ScoringContext:
        """What a scorer may know besides case and response: a copy of the finished workspace, on demand."""
        key = (case.id, context.trial)
        artifacts = self.places.artifacts(*key)

        def make_scratch() -> Path:
            path = self.places.scratch()
            with self._lock:
                self._scratches.setdefault(key, []).append(path)
            return path

        def make_workspace(scratch: Path) -> Path:
            copy_tree(self._finished(case, context), scratch / "workspace")
            return scratch / "workspace"

        def make_artifacts() -> Path:
            assert artifacts is not None
            artifacts.mkdir(parents=True, exist_ok=True)
            return artifacts

        def read_template(path: str) -> bytes | None:
            found = self.template_of(case).read(path)
            return None if found is None else found[1]

        return ScoringContext(
            case.id,
            context.trial,
            context.attempt,
            make_scratch=make_scratch,
            make_workspace=make_workspace if self.workspace is not None else None,
            make_artifacts=None if artifacts is None else make_artifacts,
            read_template=read_template if self.workspace is not None else None,
            programs=self.programs,
            sandbox=context.sandbox,
        )

    def _finished(self, case: EvalCase, context: InvocationContext) -> Path:
        """The finished workspace of a case."""
        if context.workspace is not None:
            return context.workspace
        why = self._problems.get((case.id, context.trial), "nothing is left of it")
        raise ConfigurationError(f"the workspace of case {case.id!r} cannot be rebuilt: {why}")

    async def keep(self, record: Record, context: InvocationContext) -> None:
        """Keep what is to be kept of a case; what could not be is said in the record's notes."""
        notes = self._notes.pop((record.id, record.trial), [])
        if self.keeper is not None and context.workspace is not None:
            notes += await self._threads.run(self.keeper.keep, record, context.workspace)
        if notes:
            record.notes = [*record.notes, *notes]

    def note(self, case_id: str, trial: int, text: str) -> None:
        """Have this said in the notes of a case's record."""
        self._notes.setdefault((case_id, trial), []).append(text)

    async def done(self, record: Record) -> None:
        """Clear away what a case used: its record is written."""
        self._problems.pop((record.id, record.trial), None)
        self._cached.pop((record.id, record.trial), None)
        await self._threads.run(self._clear, record.id, record.trial)

    def close(self) -> None:
        """Remove the run's folder if nothing is left in it but what can be made again, or if no case is left to do.

        In a complete run, what is there was left by a launch that was killed: copies of its graders, and workspaces of
        cases whose records were just written.
        """
        if self.keeper is not None and self.keeper.dropped:
            cases = counted(self.keeper.dropped, "case")
            log.warning("not everything was kept of %s: see the notes of their records", cases)
        if self.keeper is not None:
            self.keeper.close()
        left = [name for name in _listed(self.places.root) if name != _TEMPLATES]
        if self.is_complete or not left:
            remove_tree(self.places.root)
        self.places.unmark_all()

    def _clear(self, case_id: str, trial: int) -> None:
        with self._lock:
            scratches = self._scratches.pop((case_id, trial), [])
        for scratch in scratches:
            remove_tree(scratch)
        for place, _ in self.places.attempts(case_id, trial):
            remove_tree(place.path)
        self.places.unmark_running(case_id, trial)


class Attempt:
    """One attempt at a case: its folders, logs and limits."""

    def __init__(
        self,
        owner: Workspaces,
        place: AttemptPlace | None,
        case: EvalCase,
        context: InvocationContext,
        template: Template | None = None,
        *,
        with_logs: bool = True,
    ) -> None:
        self._template = template
        self._before = Scan({}, 0)
        self._owner = owner
        self._place = place
        self._case = case
        self._context = context
        self._marker = secrets.token_hex(8)
        self.limits = AttemptLimits(owner.limits_of(case))
        key = (case.id, context.trial)
        places = owner.places
        self.logs = AttemptLogs({stream: places.log(*key, stream) for stream in STREAMS if with_logs})
        path = places.log(*key, TURNS) if with_logs else None
        self.turns = TurnRecorder(path, self.limits, attempt=context.attempt, logs=self.logs)
        self._clock = context.clock
        if place is not None:
            artifacts = places.artifacts(*key) or place.path / "artifacts"
            artifacts.mkdir(parents=True, exist_ok=True)
            context.workspace, context.artifacts = place.workspace, artifacts
            context.environment = {**place.environment, f"{reaper.MARKER_PREFIX}{self._marker}": "1"}
        context.log = self.logs
        context.limits = self.limits.limits
        context.limit_signal = self.limits
        context.record_turn = self.turns
        context.clock = BothClocks(context.clock, self.limits)

    async def call(self, target: Target) -> InvocationResponse:
        """Call the target within the limits, its model calls through the gateway where there is one."""
        gateway = self._owner.gateway
        if gateway is not None:
            return await self._call_through(gateway, target)
        return await self._call_confined(target)

    async def _call_through(self, gateway: Gateway, target: Target) -> InvocationResponse:
        """Call the target with its own address of the gateway; what the gateway measured is in the response."""
        case, context = self._case, self._context
        session = await gateway.session(
            case.id,
            context.trial,
            context.attempt,
            self.limits.limits,
            path=self._owner.places.calls(case.id, context.trial),
            signal=self.limits,
        )
        context.gateway = session.addresses
        context.environment = {**(context.environment or {}), **session.environment()}
        try:
            response = await self._call_confined(target, session)
        except Exception as error:
            partial = getattr(error, "partial", None)
            partial = partial if isinstance(partial, InvocationResponse) else InvocationResponse()
            if self.limits.reached is None:
                (await session.end()).apply(partial)
                error.partial = partial  # type: ignore[attr-defined]
                raise
            # Refused by the gateway for a limit, the agent failed: that is the limit's doing, and no error.
            response = self._completed(partial)
        finally:
            summary = await session.end()
        if not isinstance(response, InvocationResponse):
            return response  # reported by the case runner
        summary.apply(response)
        if not summary.calls and self.limits.reached is None:
            self._owner.note(case.id, context.trial, NO_CALLS)
        if summary.problem is not None and self.limits.reached is None:
            raise TargetError(summary.problem, partial=response)
        return response

    async def _call_confined(self, target: Target, session: GatewaySession | None = None) -> InvocationResponse:
        """Call the target with a sandbox for its programs, where the suite names one."""
        provider, context = self._owner.sandbox, self._context
        if provider is None or self._place is None:
            return await self._call(target)
        context.sandbox = await provider.start(self._sandbox_place(provider, self._place, "agent", session))
        watching = None
        try:
            if context.sandbox.disk is not None:
                watching = asyncio.create_task(self._watch_disk(context.sandbox.disk))
            return await self._call(target)
        finally:
            if watching is not None:
                watching.cancel()
                await asyncio.wait({watching})
            await context.sandbox.destroy()
            context.sandbox = None

    def _sandbox_place(
        self, provider: SandboxProvider, place: AttemptPlace, what: str, session: GatewaySession | None = None
    ) -> SandboxPlace:
        folders = [place.workspace, place.home, place.tmp]
        if self._context.artifacts is not None:
            folders.append(self._context.artifacts)
        through = session if provider.wants_gateway else None
        return SandboxPlace(
            label=f"{self._owner.places.root.name}-{place.path.name}-{what}",
            workspace=place.workspace,
            writable=tuple(folders),
            gateway_socket=None if through is None else through.open_door(),
            gateway_port=0 if through is None else through.port,
        )

    async def _watch_disk(self, most: int) -> None:
        """End the agent, at once, when it has written more than it may."""
        assert self._place is not None
        folders = [self._place.path, *([] if self._context.artifacts is None else [self._context.artifacts])]
        while await folder_size(folders, most) <= most:  # noqa: ASYNC110 - nothing tells of a write
            await asyncio.sleep(_DISK_SECONDS)
        self.limits.reach(DISK_LIMIT)
        await self._owner._threads.run(reaper.end_all, {}, self._marker)

    async def _call(self, target: Target) -> InvocationResponse:
        """Call the target within the limits. Reaching one is an outcome: the answer is what there is."""
        self.limits.begin()
        try:
            if getattr(target, "heeds_limits", False):
                response = await target.invoke(self._case, self._context)
            else:
                response = await self._cut_short(target)
        except CaseLimitReached as reached:
            response = InvocationResponse(stop_reason=reached.stop_reason)
        finally:
            self.limits.end()
            self._context.clock = self._clock
        return self._completed(response)

    async def _cut_short(self, target: Target) -> InvocationResponse:
        """Call a target that does not watch its limits: when one is reached, the call is cancelled."""
        call = asyncio.ensure_future(self._call_and_keep(target))
        limit = asyncio.ensure_future(self.limits.wait())
        try:
            await asyncio.wait({call, limit}, return_when=asyncio.FIRST_COMPLETED)
            if not call.done():
                call.cancel()
            return await call
        finally:
            for one in (call, limit):
                one.cancel()
            await asyncio.wait({call, limit})

    async def _call_and_keep(self, target: Target) -> InvocationResponse:
        """Call the target; of a call that a limit cuts short, what had come."""
        try:
            return await target.invoke(self._case, self._context)
        except asyncio.CancelledError as error:
            if self.limits.reached is None:
                raise
            partial = getattr(error, "partial", None)
            return partial if isinstance(partial, InvocationResponse) else InvocationResponse()

    def _completed(self, response: InvocationResponse) -> InvocationResponse:
        """The response with what was recorded turn by turn, where it does not say so itself."""
        if not isinstance(response, InvocationResponse):
            return response  # reported by the case runner
        turns, changes = self.turns, dict[str, Any]()
        if self.limits.reached is not None and response.error is None:
            changes["stop_reason"] = self.limits.reached
        if response.messages is None and turns.messages:
            changes["messages"] = list(turns.messages)
        known = {
            "num_turns": turns.turns or None,
            "num_tokens_input": turns.input_tokens,
            "num_tokens_output": turns.output_tokens,
            "cost": turns.cost,
        }
        changes |= {
            name: value for name, value in known.items() if getattr(response, name) is None and value is not None
        }
        if response.response_text is None and response.error is None:
            changes["response_text"] = _last_text(changes.get("messages") or response.messages)
        return msgspec.structs.replace(response, **changes) if changes else response

    async def run_commands(self, place: AttemptPlace, commands: list[list[CaseTemplate]], which: str) -> None:
        """Run the commands of `setup` or `teardown`, one after another; SetupError where one fails."""
        workspace, folder = self._owner.workspace, place.workspace
        assert workspace is not None
        env = {
            **allowed_environment(),
            **(self._context.environment or {}),
            **{name: text.render(self._case, workspace=str(folder)) for name, text in workspace.env.items()},
        }
        confined = None
        if self._owner.setup_sandbox is not None:
            provider = self._owner.setup_sandbox
            confined = await provider.start(self._sandbox_place(provider, place, which))
        try:
            await self._run_each(commands, which, env, folder, confined)
        finally:
            if confined is not None:
                await confined.destroy()

    async def _run_each(
        self,
        commands: list[list[CaseTemplate]],
        which: str,
        env: dict[str, str],
        folder: Path,
        confined: Sandbox | None,
    ) -> None:
        workspace = self._owner.workspace
        assert workspace is not None
        for words in commands:
            argv = [word.render(self._case, workspace=str(folder)) for word in words]
            if confined is not None:
                argv, env = confined.wrap(argv, env, cwd=folder)
            try:
                done = await run_program(
                    argv, env=env, cwd=folder, timeout=workspace.setup_timeout, programs=self._context.programs
                )
            except OSError as error:
                raise SetupError(f"{which}: cannot start {argv[0]}: {error.strerror or error}") from error
            if done.returncode or done.timed_out:
                printed = (done.stderr or done.stdout)[-_SHOWN_OUTPUT:].decode("utf-8", "replace").strip()
                how = (
                    f"took longer than {workspace.setup_timeout:g} s"
                    if done.timed_out
                    else f"exited with code {done.returncode}"
                )
                raise SetupError(f"{which}: {' '.join(argv)[:200]} {how}" + (f": {printed}" if printed else ""))

    async def set_up(self) -> None:
        """Run the commands of `setup`, and remember what the agent finds."""
        assert self._place is not None
        assert self._owner.workspace is not None
        await self.run_commands(self._place, self._owner.workspace.setup, "setup")
        self._before = await self._owner._threads.run(scan, self._place.workspace)

    async def end(self) -> PatchedWorkspace | None:
        """End what is left of the agent's programs, run `teardown`, and write down what the agent changed.

        None in a run without workspaces, and in one that is being cancelled: such an attempt is made again.
        """
        owner, place = self._owner, self._place
        try:
            if place is None or owner.workspace is None:
                return None
            await owner._threads.run(reaper.end_all, {}, self._marker)
            is_ending = self._context.token is not None and self._context.token.cancelled
            try:
                async with asyncio.timeout(_HURRIED_TEARDOWN if is_ending else None):
                    await self.run_commands(place, owner.workspace.teardown, "teardown")
            except (SetupError, TimeoutError) as error:
                log.warning("case %s: %s", self._case.id, error)
            return None if is_ending else await owner._threads.run(self._write_patch, place)
        finally:
            self.logs.close()

    def _write_patch(self, place: AttemptPlace) -> PatchedWorkspace:
        assert self._template is not None
        assert self._owner.keeper is not None
        if place.workspace.is_symlink() or not place.workspace.is_dir():
            raise TargetError("the agent removed or replaced its workspace: nothing is left to grade")
        after, context = scan(place.workspace), self._context
        patch, summary = make_patch(self._template, self._before, after, place.workspace, context.attempt)
        self._owner.keeper.write_patch(self._case.id, context.trial, patch, summary)
        state = AttemptState(id=self._case.id, trial=context.trial, attempt=context.attempt, finished=True)
        place.write_state(state)
        return PatchedWorkspace(patch, summary, after.total)


class PatchedWorkspace(NamedTuple):
    """A finished workspace: what the agent changed, and how many bytes it has."""

    patch: bytes
    summary: PatchSummary
    size: int


class InWorkspace(TargetWrapper):
    """A target that is called in a fresh workspace each time, within the limits of the case."""

    def __init__(self, target: Target, workspaces: Workspaces) -> None:
        self._target = target
        self._workspaces = workspaces

    async def invoke(self, case: EvalCase, context: InvocationContext) -> InvocationResponse:
        """Prepare the workspace, call the target in it, and leave it for the scorers."""
        attempt = await self._workspaces.prepare(case, context)
        finished = None
        try:
            response = await attempt.call(self._target)
        finally:
            finished = await attempt.end()
        if finished is None or not isinstance(response, InvocationResponse):
            return response
        packed = pack(finished.patch, finished.summary) if self._workspaces.for_cache else None
        return msgspec.structs.replace(response, disk_used=finished.size, workspace_patch=packed)


def pack(patch: bytes, summary: PatchSummary) -> str | None:
    """A patch as text for the cache; None for one that is too large, or cannot be rebuilt from."""
    if len(patch) > _MAX_CACHED_PATCH or summary.left_out:
        return None
    return base64.b64encode(zlib.compress(msgspec.json.encode(summary) + b"\n" + patch)).decode()


def unpacked(packed: str) -> tuple[bytes, PatchSummary]:
    """The patch in a cached answer; ValueError where it cannot be read."""
    try:
        head, _, patch = zlib.decompress(base64.b64decode(packed)).partition(b"\n")
        return patch, msgspec.json.decode(head, type=PatchSummary)
    except (zlib.error, msgspec.DecodeError) as error:
        raise ValueError(f"the cached patch cannot be read: {error}") from error


def _listed(folder: Path) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:
        return []


def _last_text(messages: list[dict[str, Any]] | None) -> str:
    """The last text of the model in a trajectory."""
    for message in reversed(messages or ()):
        content = message.get("content")
        if message.get("role") == "assistant" and isinstance(content, str) and content:
            return content
    return ""
