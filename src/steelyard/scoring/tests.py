"""Graders that are programs: a test run in a copy of the agent's workspace, and any program that prints a score."""

from __future__ import annotations

import json
import os
import re
import shutil
import stat
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar
from xml.parsers import expat

import msgspec

from steelyard.case_templates import CaseTemplate, PathTemplate, ValueTemplate
from steelyard.daemon_threads import DaemonThreads
from steelyard.disk import files_digest
from steelyard.errors import ConfigurationError, TransientError
from steelyard.plugins import make_sandbox
from steelyard.protocols import Identity, SandboxPlace, SandboxProvider, ScoringContext, StartedPrograms
from steelyard.records import EvalCase, InvocationResponse, Score
from steelyard.scoring.base import PlainScorer
from steelyard.subprocesses import ProgramResult, allowed_environment, run_program
from steelyard.units import parse_duration

MAX_JUNIT_BYTES = 64 << 20
MAX_TESTS = 200_000
_MAX_SHOWN_TESTS = 10
_SHOWN_OUTPUT = 2_000
_KEPT_OUTPUT = 8 << 20
_NO_TESTS = 5
"""pytest's exit code when it collected nothing."""
_NOT_RUN = {3: "internal error", 4: "usage error", 126: "cannot be executed", 127: "not found"}
"""Exit codes of pytest and of shells that say that no test was run."""
_TRY_AGAIN = 75
_GIT_SECONDS = 120.0
_SUSPECTS = frozenset(
    ("conftest.py", "sitecustomize.py", "usercustomize.py", "pytest.ini", "tox.ini", "setup.cfg", "pyproject.toml")
)
"""Files with which an agent can change how tests are collected, run or judged."""


_NAMES = ("workspace", "expected")
"""What a grader's templates see besides the case: graders may know what is expected."""


class GraderError(TransientError):
    """The grader itself failed: neither a pass nor a fail. Retried where the scorer has `retries`."""

    topic = "could-not-score"


@dataclass(frozen=True, kw_only=True)
class ProgramScorer(PlainScorer):
    """What the graders that are programs share: a command line, its environment, and where it runs."""

    argv: Sequence[str] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    cwd: str = ""
    """A folder in the workspace."""
    folder: str | Path | None = None
    """What paths are relative to: the folder of the suite file."""
    sandbox: Mapping[str, Any] | str | None = None
    """What confines it, such as `bubblewrap`; not the agent's sandbox."""
    timeout: float | str | None = "10m"
    immediate: ClassVar[bool] = False
    takes_context: ClassVar[bool] = True
    keeps_own_time: ClassVar[bool] = True

    if TYPE_CHECKING:  # what `_check` makes of the arguments
        _words: ClassVar[list[CaseTemplate]]
        _env: ClassVar[dict[str, CaseTemplate]]
        _seconds: ClassVar[float | None]
        sandbox_provider: ClassVar[SandboxProvider | None]
        _threads: ClassVar[DaemonThreads]

    def _check(self) -> None:
        if isinstance(self.argv, str) or not self.argv or not all(isinstance(word, str) for word in self.argv):
            raise ConfigurationError(f"argv must be a list of words such as [pytest, -q], got {self.argv!r}")
        if os.path.isabs(self.cwd) or ".." in Path(self.cwd).parts:
            raise ConfigurationError(f"cwd must be a folder in the workspace, got {self.cwd!r}")
        set_up = object.__setattr__  # a frozen dataclass
        set_up(self, "_words", [CaseTemplate(word, f"{self.name}.argv", _NAMES) for word in self.argv])
        given = {name: CaseTemplate(text, f"{self.name}.env.{name}", _NAMES) for name, text in self.env.items()}
        set_up(self, "_env", given)
        set_up(self, "sandbox_provider", make_sandbox(self.sandbox, f"{self.name}.sandbox", self._root.absolute()))
        if self.sandbox_provider is not None and self.sandbox_provider.wants_gateway:
            raise ConfigurationError("a grader's sandbox cannot have network: gateway, which is the agent's alone")
        set_up(self, "_threads", DaemonThreads())
        set_up(self, "_seconds", None if self.timeout is None else parse_duration(self.timeout, "timeout"))

    def identity(self) -> Identity:
        """Every argument but limits and place; of the environment the names alone, as values may be secrets."""
        found = dict(super().identity())
        found.pop("folder", None)
        found["env"] = sorted(self.env)
        return found

    @property
    def _root(self) -> Path:
        return Path.cwd() if self.folder is None else Path(self.folder)

    async def _run(self, case: EvalCase, place: Path, context: ScoringContext, stdin: bytes = b"") -> ProgramResult:
        """Run the program in the workspace; GraderError when it cannot be started."""
        home = context.new_folder()
        for name in ("home", "tmp"):
            (home / name).mkdir(mode=0o700)
        known = {"workspace": str(place), "expected": case.expected}
        argv = [word.render(case, **known) for word in self._words]
        env = {
            **allowed_environment(),
            "HOME": str(home / "home"),
            "TMPDIR": str(home / "tmp"),
            "GIT_CEILING_DIRECTORIES": str(place.parent),
            **{name: text.render(case, **known) for name, text in self._env.items()},
        }
        env["PATH"] = os.pathsep.join(filter(None, (env.get("PATH"), os.path.dirname(sys.executable))))
        folder = _inside(place, self.cwd)
        confined = None
        if self.sandbox_provider is not None:
            label = f"{place.parent.name}-{self.name}"
            walls = SandboxPlace(label=label, workspace=place, writable=(place, home))
            confined = await self.sandbox_provider.start(walls)
            argv, env = confined.wrap(argv, env, cwd=folder)
        try:
            return await run_program(
                argv,
                env=env,
                cwd=folder,
                timeout=self._seconds,
                stdin=stdin,
                max_output_bytes=_KEPT_OUTPUT,
                programs=context.programs,
            )
        except OSError as error:
            raise GraderError(f"cannot start {argv[0]}: {error.strerror or error}") from error
        finally:
            if confined is not None:
                await confined.destroy()


@dataclass(frozen=True, kw_only=True)
class Tests(ProgramScorer):
    """Runs tests in a fresh copy of the finished workspace: passes when they pass.

    With `junit`, the file that the tests write, the score is the share of tests that passed. Hidden tests in `files`
    are copied over what the agent left; a `patch` is applied, to files as they were before the agent. `fail_to_pass`
    and `pass_to_pass` name the tests that count, as SWE-bench has them. A run of no tests is an error of the grader.
    """

    __test__: ClassVar[bool] = False  # not a test class, whatever its name

    name: str = "tests"
    threshold: float = 1.0
    junit: str | None = None
    files: str | None = None
    patch: str | None = None
    fail_to_pass: Sequence[str] | str | None = None
    pass_to_pass: Sequence[str] | str | None = None

    if TYPE_CHECKING:
        _junit: ClassVar[PathTemplate | None]
        _files: ClassVar[PathTemplate | None]
        _patch: ClassVar[CaseTemplate | None]

    def _check(self) -> None:
        super()._check()
        set_up = object.__setattr__
        for name in ("junit", "files"):
            text = getattr(self, name)
            set_up(self, f"_{name}", None if text is None else PathTemplate(text, f"{self.name}.{name}"))
        patch = None if self.patch is None else CaseTemplate(self.patch, f"{self.name}.patch", _NAMES)
        set_up(self, "_patch", patch)
        if self.junit is not None and (os.path.isabs(self.junit) or ".." in Path(self.junit).parts):
            raise ConfigurationError(f"junit must be a file in the workspace, got {self.junit!r}")
        for name in ("fail_to_pass", "pass_to_pass"):
            named = getattr(self, name)
            if isinstance(named, str):
                named = ValueTemplate(named, f"{self.name}.{name}", _NAMES)
            set_up(self, f"_{name}", named)
        if (self.fail_to_pass or self.pass_to_pass) and self.junit is None:
            raise ConfigurationError("fail_to_pass and pass_to_pass need junit: the file with each test's result")

    def identity(self) -> Identity:
        """Its arguments, and the content of the hidden files: when these change, answers are graded again."""
        found = dict(super().identity())
        if self.files is not None:
            constant = self.files.partition("{{")[0]
            place = self._root / (constant if constant == self.files else constant.rpartition("/")[0])
            found["files_digest"] = files_digest(place.rglob("*") if place.is_dir() else [place], place)
        return found

    async def score(
        self,
        case: EvalCase,
        response: InvocationResponse,  # noqa: ARG002 - what is graded is the workspace
        context: ScoringContext | None = None,
    ) -> Score:
        """Run the tests in a fresh copy of the workspace, which is as the agent left it but for the hidden files."""
        if context is None:
            raise ConfigurationError(f"{self.name} grades a workspace: give the suite `workspace:`")
        place = await self._threads.run(context.fresh_workspace)
        if place is None:
            raise ConfigurationError(f"{self.name} grades a workspace, and this suite has none: give it `workspace:`")
        notes = await self._threads.run(self._prepare, case, place, context)
        if self._patch is not None:
            await self._apply_patch(self._patch.render(case, expected=case.expected), place, context)
        done = await self._run(case, place, context)
        return await self._threads.run(self._read, case, place, context, done, notes)

    def _prepare(self, case: EvalCase, place: Path, context: ScoringContext) -> list[str]:
        """Report what the agent added that steers test runs; lay the hidden files over; remove an old result."""
        notes = list(_suspicious(place, context))
        if self._files is not None:
            source = self._root / self._files.render(case)
            if not source.exists():
                raise ConfigurationError(f"{self.name}.files: there is no {source} for case {case.id!r:.100}")
            overlay(source, place)
        if (result := self._junit_of(case)) is not None:
            _remove(place, result)
        return notes

    async def _apply_patch(self, patch: str, place: Path, context: ScoringContext) -> None:
        """Apply the hidden tests' patch; the files that it names are first made as they were before the agent."""
        await self._threads.run(_restore, patched_paths(patch), place, context)
        await apply_with_git(patch.encode(), place, context.programs, f"{self.name}.patch")

    def _junit_of(self, case: EvalCase) -> str | None:
        return None if self._junit is None else str(Path(self.cwd) / self._junit.render(case))

    def _read(
        self, case: EvalCase, place: Path, context: ScoringContext, done: ProgramResult, notes: list[str]
    ) -> Score:
        """The score of a test run: by its exit code, or by each test's result."""
        output = done.stdout + (b"\n" if done.stdout and done.stderr else b"") + done.stderr
        (context.artifacts / f"{self.name}.log").write_bytes(output)
        tail = output[-_SHOWN_OUTPUT:].decode("utf-8", "replace").strip()
        results = None
        if (junit := self._junit_of(case)) is not None:
            results = self._results(place, junit, context)
        if not done.timed_out and not notes:  # what an agent did to the tests' configuration is its own failure
            _refuse_no_tests(done.returncode, results, junit, tail[-500:])
        value, why = self._value(case, results, done)
        passed = value >= self.threshold
        parts = [*notes, *why, *([] if passed else [tail])]
        return Score(self.name, value, passed, "\n".join(parts)[:10_000] or None)

    def _value(self, case: EvalCase, results: dict[str, str] | None, done: ProgramResult) -> tuple[float, list[str]]:
        """The share of the tests that count and passed, and why it is not all of them."""
        why = []
        if done.timed_out:
            why.append(f"the tests did not end within {self._seconds:g} s")
        listed = [*self._listed(case, "fail_to_pass"), *self._listed(case, "pass_to_pass")]
        if listed:
            found = results or {}
            bad = [name for name in listed if _result_of(name, found) != "passed"]
            if bad:
                why.append(f"{len(bad):,} of {len(listed):,} listed tests did not pass: {_some(bad)}")
            return 1 - len(bad) / len(listed), why
        if results is None:
            if done.returncode:
                why.append(f"exit code {done.returncode}" + (f" and no {self.junit}" if self.junit else ""))
            return (0.0 if done.returncode or done.timed_out else 1.0), why
        counted = {name: result for name, result in results.items() if result != "skipped"}
        bad = [name for name, result in counted.items() if result != "passed"]
        if not results:
            why.append("no tests were run")
        elif bad:
            why.append(f"{len(bad):,} of {len(counted):,} tests did not pass: {_some(bad)}")
        elif done.returncode and not done.timed_out:
            why.append(f"all tests passed, and the run exited with code {done.returncode}")
        share = 1 - len(bad) / len(counted) if counted else 1.0
        broken = done.timed_out or (done.returncode and not bad)
        return (min(share, 1 - 1 / (len(counted) + 1)) if broken else share), why

    def _listed(self, case: EvalCase, name: str) -> list[str]:
        """The tests that count: a list, or a template that yields one, as a list or as JSON text of one."""
        named = getattr(self, f"_{name}")
        if named is None:
            return []
        value = named.value(case, expected=case.expected) if isinstance(named, ValueTemplate) else named
        if isinstance(value, str):
            try:
                value = json.loads(value)
            except ValueError as error:
                raise ConfigurationError(f"{self.name}.{name} must be a list, got {value!r:.100}") from error
        if not isinstance(value, (list, tuple)) or not all(isinstance(one, str) for one in value):
            raise ConfigurationError(f"{self.name}.{name} must be a list of tests, got {value!r:.100}")
        return list(value)

    def _results(self, place: Path, junit: str, context: ScoringContext) -> dict[str, str] | None:
        """Each test's result by its name; None when there is no file. A copy is kept with the case."""
        try:
            content = _read_regular(_inside(place, junit), MAX_JUNIT_BYTES)
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            raise GraderError(f"{junit} cannot be read: {error}") from error
        (context.artifacts / f"{self.name}.xml").write_bytes(content)
        return read_junit(content)


def _refuse_no_tests(code: int, results: dict[str, str] | None, junit: str | None, tail: str) -> None:
    """GraderError for a run of no tests: that says nothing of the agent."""
    if code == _NO_TESTS or (results is not None and not results):
        raise GraderError(f"no tests were collected (exit code {code}): {tail}")
    if results is None and code in _NOT_RUN:
        raise GraderError(f"the tests were not run (exit code {code}, {_NOT_RUN[code]}): {tail}")
    if results is None and junit is not None and code == 0:
        raise GraderError(f"the tests wrote no {junit} and exited with code 0: {tail}")


@dataclass(frozen=True, kw_only=True)
class Program(ProgramScorer):
    """Any program as a scorer: JSON on its stdin, a score as JSON on its stdout.

    It reads `{"case": …, "response": …, "trial": …, "workspace": …}` and prints `{"value": 0.7, "passed": true,
    "reason": "…"}`, a list of such objects, or null when it does not apply. It runs in a copy of the workspace, or,
    in a suite without, in the suite's folder. Exit code 75 asks to be tried again; any other but 0 is an error.
    """

    name: str = "program"

    async def score(
        self, case: EvalCase, response: InvocationResponse, context: ScoringContext | None = None
    ) -> Score | list[Score] | None:
        """Run the program and read its score."""
        assert context is not None
        place = await self._threads.run(context.fresh_workspace)
        asked = {
            "case": case,
            "response": response,
            "trial": context.trial,
            "workspace": None if place is None else str(place),
        }
        done = await self._run(case, place or self._root, context, msgspec.json.encode(asked) + b"\n")
        tail = done.stderr[-_SHOWN_OUTPUT:].decode("utf-8", "replace").strip()
        if done.timed_out:
            raise GraderError(f"the program did not end within {self._seconds:g} s: {tail}")
        if done.returncode:
            kind = GraderError if done.returncode == _TRY_AGAIN else RuntimeError
            raise kind(f"the program exited with code {done.returncode}: {tail}")
        return self._scores(done.stdout)

    def _scores(self, printed: bytes) -> Score | list[Score] | None:
        try:
            found = msgspec.json.decode(printed, type=dict[str, Any] | list[dict[str, Any]] | None)
        except (msgspec.DecodeError, msgspec.ValidationError, UnicodeDecodeError) as error:
            raise ValueError(f"the program must print a score as JSON, got {printed[:200]!r}: {error}") from error
        if found is None:
            return None
        return [self._one(one) for one in found] if isinstance(found, list) else self._one(found)

    def _one(self, found: dict[str, Any]) -> Score:
        unknown = sorted(set(found) - {"name", "value", "passed", "reason"})
        if unknown:
            raise ValueError(f"a score has name, value, passed and reason; the program printed {unknown[0]!r}")
        value, passed = found.get("value"), found.get("passed")
        if value is None and isinstance(passed, bool):
            value = float(passed)
        if passed is None and isinstance(value, (int, float)):
            passed = value >= self.threshold
        made = {"name": self.name, **found, "value": value, "passed": passed}
        return msgspec.convert(made, Score)


async def apply_with_git(patch: bytes, place: Path, programs: StartedPrograms | None, name: str) -> None:
    """Apply a patch in a workspace; GraderError with what git says."""
    env = {**allowed_environment(), "GIT_CEILING_DIRECTORIES": str(place.parent)}
    argv = ["git", "apply", "--whitespace=nowarn", "-"]
    try:
        done = await run_program(argv, env=env, cwd=place, timeout=_GIT_SECONDS, stdin=patch, programs=programs)
    except OSError as error:
        raise GraderError(f"cannot start git to apply {name}: {error.strerror or error}") from error
    if done.returncode or done.timed_out:
        raise GraderError(f"{name} does not apply: {done.stderr.decode('utf-8', 'replace').strip()[:1000]}")


def patched_paths(patch: str) -> list[str]:
    """The files that a patch names, as paths in the workspace; those that lead out of it are left to git to refuse."""
    found = re.findall(r"^(?:---|\+\+\+) [ab]/([^\t\n]+)", patch, re.M)
    return [path for path in dict.fromkeys(found) if ".." not in path.split("/") and not path.startswith("/")]


def _restore(paths: Sequence[str], place: Path, context: ScoringContext) -> None:
    """Make these files as the template has them, whatever the agent put in their place."""
    for path in paths:
        folder = place
        for name in path.split("/")[:-1]:
            folder = folder / name
            if folder.is_symlink() or (folder.exists() and not folder.is_dir()):
                folder.unlink()
            folder.mkdir(exist_ok=True)
        _clear(place / path)
        content = context.template_content(path)
        if content is not None:
            (place / path).write_bytes(content)


def read_junit(content: bytes) -> dict[str, str]:
    """Each test's result (passed, failed, error, skipped) by `classname.name`; GraderError for what is no JUnit file.

    Document types are refused, so that no entity is expanded; sizes and counts are bounded.
    """
    reader = _JunitReader()
    parser = expat.ParserCreate()
    parser.StartElementHandler, parser.EndElementHandler = reader.start, reader.end
    parser.StartDoctypeDeclHandler = reader.refuse
    try:
        parser.Parse(content, True)
    except expat.ExpatError as error:
        raise GraderError(f"the JUnit file is not XML: {error}") from error
    return reader.results


class _JunitReader:
    """Takes in the elements of a JUnit file."""

    def __init__(self) -> None:
        self.results: dict[str, str] = {}
        self._test: str | None = None
        self._result = "passed"

    def start(self, name: str, attributes: dict[str, str]) -> None:
        if name == "testcase":
            if len(self.results) >= MAX_TESTS:
                raise GraderError(f"the JUnit file has more than {MAX_TESTS:,} tests")
            self._test = ".".join(part for part in (attributes.get("classname"), attributes.get("name")) if part)
            self._result = "passed"
        elif name in ("failure", "error", "skipped") and self._test is not None and self._result != "failed":
            self._result = {"failure": "failed"}.get(name, name)

    def end(self, name: str) -> None:
        if name == "testcase" and self._test is not None:
            before = self.results.get(self._test, "passed")  # a test that is there twice must pass twice
            self.results[self._test] = self._result if before in ("passed", "skipped") else before
            self._test = None

    def refuse(self, *_: Any) -> None:
        raise GraderError("the JUnit file has a document type, which is not read")


_UNITTEST = re.compile(r"(?P<name>\S+) \((?P<path>[\w.]+)\)")


def _result_of(listed: str, results: Mapping[str, str]) -> str | None:
    """The result of a test as SWE-bench or pytest names it: path.py::Class::name, name (module.Class), or name."""
    if listed in results:
        return results[listed]
    found = _UNITTEST.fullmatch(listed)
    if found is not None:
        dotted = f"{found['path']}.{found['name']}"
    else:
        path, bracket, parameters = listed.partition("[")
        dotted = path.replace(".py::", ".").replace("::", ".").replace("/", ".") + bracket + parameters
    if dotted in results:
        return results[dotted]
    ends = [result for name, result in results.items() if name.endswith(f".{dotted}")]
    if not ends:
        return None
    return "passed" if all(result == "passed" for result in ends) else "failed"


def _some(names: Sequence[str]) -> str:
    more = len(names) - _MAX_SHOWN_TESTS
    return ", ".join(names[:_MAX_SHOWN_TESTS]) + (f" and {more:,} more" if more > 0 else "")


def _suspicious(place: Path, context: ScoringContext) -> Iterator[str]:
    """Files that steer test runs and that the agent added or changed."""
    found = []
    for folder, folders, names in os.walk(place):
        folders[:] = [name for name in folders if name != ".git"]
        chosen = [name for name in names if name in _SUSPECTS or name.endswith(".pth")]
        found += [os.path.relpath(os.path.join(folder, name), place) for name in chosen]
    for path in sorted(found)[:_MAX_SHOWN_TESTS]:
        before = context.template_content(path)
        if before is None:
            yield f"note: the agent added {path}"
        else:
            try:
                if _read_regular(place / path, MAX_JUNIT_BYTES) != before:
                    yield f"note: the agent changed {path}"
            except (OSError, ValueError):
                yield f"note: the agent replaced {path}"


def _inside(place: Path, path: str) -> Path:
    """A path in the workspace; GraderError where the agent's links would lead out of it."""
    found = place / path
    if not Path(os.path.realpath(found)).is_relative_to(os.path.realpath(place)):
        raise GraderError(f"{path} leads out of the workspace by a link that the agent made")
    return found


def _read_regular(path: Path, limit: int) -> bytes:
    """The content of a regular file: a pipe would not end, a link may lead anywhere."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(descriptor, "rb") as file:
        mode = os.fstat(descriptor)
        if not stat.S_ISREG(mode.st_mode):
            raise ValueError("it is not a regular file")
        if mode.st_size > limit:
            raise ValueError(f"it has {mode.st_size:,} bytes, more than {limit:,}")
        return file.read(limit)


def _remove(place: Path, path: str) -> None:
    """Remove an old result, whatever it is, without following a link out of the workspace."""
    target = _inside(place, os.path.dirname(path)) / os.path.basename(path)
    if target.is_dir() and not target.is_symlink():
        raise GraderError(f"{path} is a folder: the agent put it in the place of the tests' result")
    target.unlink(missing_ok=True)


def overlay(source: Path, place: Path) -> None:
    """Copy hidden files over the workspace. What stands in their way is replaced, links included, never followed."""
    if source.is_file():
        _put(source, place / source.name)
        return
    for folder, folders, names in os.walk(source):
        into = place / os.path.relpath(folder, source)
        for name in folders:
            target = into / name
            if target.is_symlink() or (target.exists() and not target.is_dir()):
                target.unlink()
            target.mkdir(exist_ok=True)
        for name in names:
            _put(Path(folder, name), into / name)


def _put(source: Path, target: Path) -> None:
    _clear(target)
    shutil.copy(source, target)


def _clear(target: Path) -> None:
    """Remove a file, a link or a whole folder."""
    if target.is_dir() and not target.is_symlink():
        shutil.rmtree(target)
    else:
        target.unlink(missing_ok=True)
