"""A pytest plugin: `pytest --steelyard` runs suites, one test per case, called once and in parallel.

Nothing of Steelyard is imported until a suite is collected or the fixture is used: other people's tests pay nothing.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from steelyard.records import EvalCase, Record
    from steelyard.run.result import Result
    from steelyard.run.runner import Runner
    from steelyard.suite.evalset import EvalSet

RUNS = "runs/pytest"
"""Where run directories go, relative to pytest's root directory."""
_MAX_SHOWN_CHARS = 2_000
_WANTED = pytest.StashKey[set[Path]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("steelyard")
    group.addoption(
        "--steelyard",
        action="store_true",
        help="collect Steelyard suites: those named as arguments, or else those of [tool.steelyard] in pyproject.toml",
    )
    group.addoption(
        "--steelyard-runs", metavar="DIR", default=RUNS, help=f"where to put their run directories [default: {RUNS}]"
    )


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers",
        "steelyard(cases=…, scorers=…, **options): one test per case, answered by the function that is marked; without "
        "cases, options for the fixture `steelyard_run`",
    )
    config.stash[_WANTED] = _named_suites(config) if config.getoption("steelyard") else set()


def _named_suites(config: pytest.Config) -> set[Path]:
    """The suite files among the arguments; without any, those of pyproject.toml are added to what is collected."""
    here = config.invocation_params.dir
    named = {
        (here / argument.partition("::")[0]).resolve()
        for argument in config.args
        if argument.partition("::")[0].endswith((".yaml", ".yml"))
    }
    if named:
        return named
    configured = list(_configured_suites(config))
    if not configured:
        raise pytest.UsageError(
            "--steelyard: no suite is named: give its file as an argument, or [tool.steelyard] suites in pyproject.toml"
        )
    if config.args_source is pytest.Config.ArgsSource.INVOCATION_DIR or not config.args:
        config.args[:] = [str(config.rootpath)]
    config.args.extend(str(path) for path in configured)
    return set(configured)


def _configured_suites(config: pytest.Config) -> Iterator[Path]:
    """The files that `[tool.steelyard] suites = ["evals/*.yaml"]` names, relative to the root directory."""
    import tomllib

    try:
        with open(config.rootpath / "pyproject.toml", "rb") as file:
            section = tomllib.load(file).get("tool", {}).get("steelyard", {})
    except FileNotFoundError:
        return
    except tomllib.TOMLDecodeError as error:
        raise pytest.UsageError(f"pyproject.toml: {error}") from error
    patterns = section.get("suites", [])
    if not isinstance(patterns, list) or not all(isinstance(one, str) and one for one in patterns):
        raise pytest.UsageError(f"pyproject.toml: [tool.steelyard] suites must be a list of files, got {patterns!r}")
    for pattern in patterns:
        found = sorted(config.rootpath.glob(pattern))
        if not found:
            raise pytest.UsageError(f"pyproject.toml: [tool.steelyard] suites: no file matches {pattern!r}")
        yield from (path.resolve() for path in found)


def pytest_collect_file(file_path: Path, parent: pytest.Collector) -> pytest.Collector | None:
    if file_path.resolve() not in parent.config.stash.get(_WANTED, set()):
        return None
    return SuiteTests.from_parent(parent, path=file_path)


@pytest.hookimpl(tryfirst=True)
def pytest_pycollect_makeitem(collector: pytest.Collector, name: str, obj: object) -> pytest.Collector | None:
    """Make a function that is marked with cases into one test per case."""
    marks = getattr(obj, "pytestmark", None)
    if not isinstance(marks, list) or not callable(obj) or not isinstance(collector, pytest.Module):
        return None
    given = {key: value for mark in marks if mark.name == "steelyard" for key, value in mark.kwargs.items()}
    if "cases" not in given:
        return None
    return MarkedTests.from_parent(collector, name=name, function=obj, given=given)


class SuiteCollector(pytest.Collector):
    """A suite: one test per case. The first test that runs has the selected cases called, all in one run."""

    _records: dict[str, list[Record]] | None = None
    _problem: BaseException | None = None

    def cases(self) -> Iterable[EvalCase]:
        """The cases of the suite."""
        raise NotImplementedError

    def runner(self, wanted: Callable[[EvalSet], EvalSet], place: Path) -> Runner:
        """A runner of those of its cases that are `wanted`, whose results go to `place`."""
        raise NotImplementedError

    def run_name(self) -> str:
        """The name of the run directory."""
        raise NotImplementedError

    def collect(self) -> Iterator[CaseTest]:
        from steelyard.errors import SteelyardError

        try:
            for case in self.cases():
                yield CaseTest.from_parent(self, name=case.id, case=case)
        except SteelyardError as error:
            raise self.CollectError(str(error)) from error

    def records_of(self, case_id: str) -> list[Record]:
        """The records of a case, a trial each. A run that could not be made fails each of its tests."""
        if self._problem is not None:
            raise self._problem
        if self._records is None:
            try:
                self._records = self._run()
            except BaseException as error:
                self._problem = error
                raise
        return self._records.get(case_id, [])

    def _run(self) -> dict[str, list[Record]]:
        """Run the cases whose tests are selected, or take what another worker of pytest-xdist has run."""
        from filelock import FileLock

        place = Path(self.config.rootpath, self.config.getoption("steelyard_runs"), self.run_name())
        place.parent.mkdir(parents=True, exist_ok=True)
        session = getattr(self.config, "workerinput", {}).get("testrunuid")
        done = place.with_name(f"{place.name}.session")
        with FileLock(place.with_name(f"{place.name}.lock")):
            result = None
            if session is not None and done.exists() and done.read_text() == session:
                from steelyard.run.result import Result

                result = Result.load(place)
            if result is None:
                result = self._call(place)
                if session is not None:
                    done.write_text(session)
        records: dict[str, list[Record]] = {}
        for record in result.iter_responses():
            records.setdefault(record.id, []).append(record)
        return records

    def _call(self, place: Path) -> Result:
        from steelyard.suite.evalset import EvalSet

        names = {item.name for item in self.session.items if isinstance(item, CaseTest) and item.parent is self}

        def wanted(suite: EvalSet) -> EvalSet:
            return EvalSet(suite.id, lambda: (case for case in suite if case.id in names))

        return _run_again(self.runner(wanted, place))


class SuiteTests(SuiteCollector, pytest.File):
    """The tests of a suite file."""

    def cases(self) -> Iterable[EvalCase]:
        from steelyard.suite.suite_file import read_suite_file

        return read_suite_file(self.path).cases

    def run_name(self) -> str:
        return self.path.stem

    def runner(self, wanted: Callable[[EvalSet], EvalSet], place: Path) -> Runner:
        from steelyard.run.config import build_suite
        from steelyard.run.options import RunOptions
        from steelyard.run.runner import Runner
        from steelyard.shutdown import CALLS_SECONDS

        built = build_suite(self.path)
        options = RunOptions().replace(**{**built.options, "output_path": place, "progress": "off"})
        engine = built.engine.make(self.path.parent, CALLS_SECONDS)
        return Runner(
            built.target,
            wanted(built.suite),
            built.scorers,
            workspace=built.workspace,
            case_limits=built.case_limits,
            hooks=built.hooks,
            run_metrics=built.run_metrics,
            options=options,
            engine=engine,
        )


class MarkedTests(SuiteCollector):
    """The tests of `@pytest.mark.steelyard(cases=…)`: the function that is marked answers the cases."""

    def __init__(self, *, function: Callable[..., object], given: dict[str, Any], **more: Any) -> None:
        super().__init__(**more)
        self._function = function
        self._given = given

    def cases(self) -> Iterable[EvalCase]:
        return self._suite()

    def _suite(self) -> EvalSet:
        """The cases: an EvalSet, a list, or the path of a file, relative to the test's."""
        from steelyard.suite.evalset import EvalSet

        cases = self._given["cases"]
        if isinstance(cases, EvalSet):
            return cases
        if isinstance(cases, str | Path):
            return EvalSet.from_file(self.path.parent / cases)
        return EvalSet(self.name, list(cases))

    def run_name(self) -> str:
        return _safe(self.nodeid)

    def runner(self, wanted: Callable[[EvalSet], EvalSet], place: Path) -> Runner:
        from steelyard.run.runner import Runner

        options = {name: value for name, value in self._given.items() if name not in ("cases", "scorers")}
        options = {"progress": "off", **options, "output_path": place}
        return Runner(self._function, wanted(self._suite()), self._given.get("scorers", ()), **options)


def _safe(nodeid: str) -> str:
    """A test's id as the name of a folder."""
    return re.sub(r"[^\w.-]+", "-", nodeid).strip("-.")


def _run_again(runner: Runner) -> Result:
    """Resume an unfinished run; replace a complete one, or one of other cases or another target."""
    from steelyard.errors import RunFinished, RunMismatch

    try:
        result: Result = runner.run_sync()
    except (RunFinished, RunMismatch):
        result = runner.run_sync(force=True)
    return result


class CaseTest(pytest.Item):
    """One case of a suite: it passes when all of its trials pass."""

    def __init__(self, *, case: EvalCase, **more: Any) -> None:
        super().__init__(**more)
        self.case = case

    def runtest(self) -> None:
        assert isinstance(self.parent, SuiteCollector)
        records = self.parent.records_of(self.name)
        if not records:
            raise CaseFailed("the run ended before this case was called")
        bad = [record for record in records if not _is_good(record)]
        if bad:
            count = f"{len(bad)} of {len(records)} trials: " if len(records) > 1 else ""
            raise CaseFailed(count + "\n\n".join(_shown(self.case, record) for record in bad))
        if all(record.passed is None for record in records):
            pytest.skip("no scorer decides whether this case passes")

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], style: Any = None) -> Any:
        from steelyard.errors import SteelyardError

        if isinstance(excinfo.value, (CaseFailed, SteelyardError)):
            return str(excinfo.value)
        return super().repr_failure(excinfo, style)

    def reportinfo(self) -> tuple[Path, None, str]:
        return self.path, None, self.name


class CaseFailed(Exception):
    """A case that did not pass."""


def _is_good(record: Record) -> bool:
    if record.error is not None or record.passed is False:
        return False
    return record.passed is True or not any(score.errors for score in record.scores)


def _shown(case: EvalCase, record: Record) -> str:
    """Question, expected, answer, scores and traceback of a record, as lines that cannot steer a terminal."""
    from steelyard.stats.formatting import escape_invisible

    lines = [_field("question", record.input_prompt or case.prompt or case.messages)]
    if case.expected is not None:
        lines.append(_field("expected", case.expected))
    if record.error is not None:
        lines.append(_field("error", record.error))
    if record.response_text is not None:
        lines.append(_field("answer", record.response_text))
    for score in record.scores:
        verdict = {True: "passed", False: "failed", None: "–"}[score.passed]
        value = "" if score.value is None else f" {score.value:.3f}"
        reason = "; ".join(part for part in (score.reason, *score.errors) if part)
        lines.append(_field(f"score {score.name}", f"{verdict}{value}{': ' if reason else ''}{reason}"))
    lines += [trace for trace in (record.error_traceback, *(one.error_traceback for one in record.scores)) if trace]
    return "\n".join(escape_invisible(line) for text in lines for line in text.splitlines())


def _field(label: str, value: object) -> str:
    text = value if isinstance(value, str) else repr(value)
    if len(text) > _MAX_SHOWN_CHARS:
        text = f"{text[:_MAX_SHOWN_CHARS]}… ({len(text):,} characters)"
    return f"{label}: {text}"


@pytest.fixture
def steelyard_run(request: pytest.FixtureRequest) -> Any:
    """Run cases against a target: `steelyard_run(target, cases, scorers, **options)` returns a Result.

    `@pytest.mark.steelyard(parallelism=20)` gives options for a test. The run directory is named after the test; an
    unfinished run is resumed, a complete one replaced.
    """
    marked: dict[str, Any] = {}
    for mark in reversed(list(request.node.iter_markers("steelyard"))):
        marked |= mark.kwargs
    place = Path(request.config.rootpath, request.config.getoption("steelyard_runs"), _safe(request.node.nodeid))

    def run(target: object, cases: Any, scorers: Iterable[object] | None = None, **options: Any) -> Result:
        from steelyard.run.runner import Runner
        from steelyard.suite.evalset import EvalSet

        chosen = {"progress": "off", "output_path": place, **marked, **options}
        wanted = chosen.pop("scorers", ())
        suite = cases if isinstance(cases, EvalSet) else EvalSet(request.node.name, cases)
        return _run_again(Runner(target, suite, wanted if scorers is None else scorers, **chosen))

    return run


def assert_passes(result: Result, *rules: str, baseline: str | Path | Result | None = None) -> None:
    """Fail the test unless the result keeps the rules, such as `pass_rate>=0.8`; show rate, interval and failures."""
    __tracebackhide__ = True
    gate = result.gate(*rules, baseline=baseline)
    if gate:
        return
    from itertools import islice

    from steelyard.stats.formatting import escape_invisible
    from steelyard.stats.metrics import correction_note, uncalibrated

    lines = [f"{check.rule}: {check.reason}" for check in gate.broken]
    metrics = result.typed_metrics
    if metrics.pass_rate is not None:
        ends = metrics.pass_rate_ci95
        interval = "" if ends is None else f", 95 % CI {ends[0]:.1%} – {ends[1]:.1%}"
        lines.append(f"passed {metrics.pass_rate:.1%}, {metrics.passed:,} of {metrics.scored:,}{interval}")
        lines += uncalibrated(metrics)
    if metrics.correction:
        rate = "–" if metrics.pass_rate_corrected is None else f"{metrics.pass_rate_corrected:.1%}"
        lines.append(f"corrected {rate}, {correction_note(metrics.correction)}")
    for record in islice(result.iter_failures(), 3):
        why = record.error or "; ".join(score.reason for score in record.scores if score.reason) or "failed"
        lines.append(f"  {record.id}: {why[:300]}")
    pytest.fail("\n".join(escape_invisible(line) for line in lines), pytrace=False)
