"""Matrices: every combination is a run, all of them under one plan."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from steelyard import (
    CancellationToken,
    ConfigurationError,
    EvalCase,
    EvalSet,
    InvocationContext,
    InvocationResponse,
    MatrixResult,
    MatrixRunner,
    Result,
    RunFinished,
    RunMismatch,
    Runner,
    RunRefused,
)
from steelyard.errors import RunLocked, TransientError
from steelyard.journal.lock import RunLock
from steelyard.run.matrix import read_matrix
from steelyard.scoring import Exact
from steelyard.targets import CallableTarget, OpenAIChat
from tests.support.engine import Gauge, until
from tests.support.mock import running_mock


class Model:
    """A target that notes what it was asked, in which order over all models of one log."""

    default_parallelism = 4

    def __init__(self, name: str, log: list[tuple[str, str, str | None, str | None]], **more: Any) -> None:
        self.model_id = name
        self._log = log
        self.right = more.get("right", True)
        self.fails: set[str] = more.get("fails", set())
        self.cost: float | None = more.get("cost")
        self.gauge: Gauge = more.get("gauge") or Gauge()
        self.hold: asyncio.Event | None = None

    def identity(self) -> dict[str, Any]:
        return {"kind": "model", "model": self.model_id}

    async def invoke(self, case: EvalCase, context: InvocationContext) -> InvocationResponse:
        self._log.append((str(self.model_id), case.id, case.prompt, case.system_prompt))
        with self.gauge:
            await asyncio.sleep(0)
            if self.hold is not None:
                await self.hold.wait()
        if case.id in self.fails:
            raise ValueError(f"no answer to {case.id}")
        return InvocationResponse(response_text=str(case.expected) if self.right else "wrong", cost=self.cost)


def suite_of(count: int = 6) -> EvalSet:
    return EvalSet("sums", [EvalCase(id=f"c{n}", prompt=f"What is {n}?", expected=str(n)) for n in range(count)])


PROMPTS = {"terse": {"system_prompt": "One word."}, "steps": {"prompt": "{{ prompt }} Think."}}


@pytest.fixture
def log() -> list[tuple[str, str, str | None, str | None]]:
    return []


def matrix(place: Path, log: list[Any], *names: str, **more: Any) -> MatrixRunner:
    targets = more.pop("targets", None) or {name: Model(name, log) for name in names or ("small", "large")}
    suite = more.pop("suite", None) or suite_of()
    options = {"prompts": PROMPTS, "progress": "off", "output_path": place, **more}
    return MatrixRunner(targets, suite, [Exact()], **options)


def test_every_combination_is_a_run_in_one_folder(tmp_path, log) -> None:
    result = matrix(tmp_path, log).run_sync()
    assert isinstance(result, MatrixResult)
    assert list(result.results) == ["small/terse", "small/steps", "large/terse", "large/steps"]
    assert result.complete
    assert {one.pass_rate for one in result.results.values()} == {1.0}
    assert read_matrix(tmp_path).axes == {"target": ["small", "large"], "prompt": ["terse", "steps"]}
    for name, run in read_matrix(tmp_path).runs(tmp_path).items():
        assert Result.load(run).metrics["counts"]["ok"] == 6
        assert json.loads((run / "run.json").read_text())["variant"] == dict(
            zip(("target", "prompt"), name.split("/"), strict=True)
        )
    asked = {(prompt, system) for model, case, prompt, system in log if case == "c1"}
    assert asked == {("What is 1?", "One word."), ("What is 1? Think.", None)}
    assert "small/terse=100.0%" in repr(MatrixResult.load(tmp_path))


def test_variants_take_turns(tmp_path, log) -> None:
    matrix(tmp_path, log, "a", "b", "c", suite=suite_of(40), parallelism=5).run_sync()
    so_far: Counter[tuple[str, str | None]] = Counter()
    for model, _, _, system in log:
        so_far[model, system] += 1
        if len(so_far) == 6:
            assert max(so_far.values()) - min(so_far.values()) <= 3


def test_one_limit_holds_over_all_variants_of_a_machine(tmp_path, log) -> None:
    gauge = Gauge()
    targets = {name: Model(name, log, gauge=gauge) for name in "abc"}
    result = matrix(tmp_path, log, targets=targets, suite=suite_of(30), parallelism=4).run_sync()
    assert gauge.most == 4
    assert all(one.metrics.get("parallelism_shortfall") is None for one in result.results.values())


@pytest.mark.parametrize("parallelism", [3, "auto"])
def test_one_limit_holds_for_each_endpoint(tmp_path, parallelism) -> None:
    with running_mock(latency="2ms") as first, running_mock(latency="2ms") as second:
        targets = {
            "a": OpenAIChat(model="a", base_url=first.base_url),
            "b": OpenAIChat(model="b", base_url=first.base_url),
            "c": OpenAIChat(model="c", base_url=second.base_url),
        }
        options: dict[str, Any] = {"parallelism": parallelism, "max_parallelism": 3, "progress": "off"}
        runner = MatrixRunner(targets, suite_of(30), prompts=PROMPTS, output_path=tmp_path / "m", **options)
        result = runner.run_sync()
        assert result.complete
        assert (first.stats()["requests"], second.stats()["requests"]) == (120, 60)
        assert first.stats()["peak_concurrency"] <= 3
        assert second.stats()["peak_concurrency"] <= 3


def test_a_judge_counts_towards_the_limit_of_its_endpoint(tmp_path) -> None:
    """The judge of one variant is at the endpoint of another: together they stay within the limit."""
    from steelyard import Judge

    with running_mock(latency="2ms") as first, running_mock(latency="2ms", answers=None) as second:
        judge = Judge(model="judge", target=OpenAIChat(model="judge", base_url=second.base_url))
        targets = {
            "a": OpenAIChat(model="a", base_url=first.base_url),
            "b": OpenAIChat(model="b", base_url=second.base_url),
        }
        MatrixRunner(
            targets, suite_of(20), [judge], output_path=tmp_path / "m", parallelism=3, progress="off", retries=0
        ).run_sync()
        assert second.stats()["requests"] >= 60
        assert second.stats()["peak_concurrency"] <= 3


def test_one_rate_holds_over_all_variants(tmp_path) -> None:
    with running_mock(rate="40/s") as mock:
        targets = {name: OpenAIChat(model=name, base_url=mock.base_url) for name in "abc"}
        runner = MatrixRunner(targets, suite_of(4), output_path=tmp_path / "m", rate="30/s", progress="off")
        assert runner.run_sync().complete
        assert mock.stats()["by_status"] == {"200": 12}


def test_an_overloaded_endpoint_makes_all_its_variants_pause(tmp_path) -> None:
    """The other variants meet no refusal of their own: the first one's pause was theirs too."""
    with running_mock(max_concurrency=1, retry_after="100ms", latency="20ms") as mock:
        targets = {name: OpenAIChat(model=name, base_url=mock.base_url) for name in "abcdef"}
        runner = MatrixRunner(targets, suite_of(2), output_path=tmp_path / "m", parallelism=6, progress="off")
        result = runner.run_sync()
        assert result.complete
        assert sum(one.metrics["counts"]["error"] for one in result.results.values()) == 0
        # Six runs that each paused for themselves would be refused in every round.
        assert mock.stats()["by_status"]["429"] <= 30


def test_some_variants_are_run_first_and_the_others_later(tmp_path, log) -> None:
    first = matrix(tmp_path, log, variants=["small/*"]).run_sync()
    assert list(first.results) == ["small/terse", "small/steps"]
    assert [variant.name for variant in read_matrix(tmp_path).variants] == ["small/terse", "small/steps"]
    count = len(log)
    second = matrix(tmp_path, log).run_sync()
    assert list(second.results) == ["small/terse", "small/steps", "large/terse", "large/steps"]
    assert {model for model, *_ in log[count:]} == {"large"}
    assert len(read_matrix(tmp_path).variants) == 4


def test_another_target_joins_a_finished_matrix(tmp_path, log) -> None:
    matrix(tmp_path, log, "a", "b").run_sync()
    count = len(log)
    result = matrix(tmp_path, log, "b", "c").run_sync()
    assert {model for model, *_ in log[count:]} == {"c"}
    assert [variant.axes["target"] for variant in read_matrix(tmp_path).variants] == ["b", "b", "c", "c", "a", "a"]
    assert read_matrix(tmp_path).axes["target"] == ["b", "c", "a"]
    assert len(result.results) == 4


def test_an_unknown_variant_is_named_with_those_there_are(tmp_path, log) -> None:
    with pytest.raises(ConfigurationError, match=r"no variant is named 'smal/terse'; did you mean 'small/terse'"):
        matrix(tmp_path, log, variants=["smal/terse"])


def test_a_complete_matrix_is_refused_and_force_moves_it_aside(tmp_path, log) -> None:
    place = tmp_path / "m"
    matrix(place, log).run_sync()
    count = len(log)
    with pytest.raises(RunFinished, match=r"is complete \(4 variants, 24 records\)\..*force=True starts over"):
        matrix(place, log).run_sync()
    assert len(log) == count
    assert matrix(place, log).run_sync(if_complete="load").complete
    assert len(log) == count
    matrix(place, log).run_sync(force=True)
    assert len(log) == 2 * count
    (previous,) = (place / "previous").iterdir()
    assert (previous / "matrix.json").is_file()
    assert Result.load(previous / "small-terse").complete
    matrix(place, log).run_sync(if_complete="new")
    assert len(log) == 3 * count


def test_force_of_some_variants_leaves_the_others(tmp_path, log) -> None:
    matrix(tmp_path, log).run_sync()
    count = len(log)
    matrix(tmp_path, log, variants=["large/terse"]).run_sync(force=True)
    assert len(log) == count + 6
    assert not (tmp_path / "previous").exists()
    assert (tmp_path / "large-terse" / "previous").is_dir()


def test_errors_are_retried_in_the_variants_that_have_some(tmp_path, log) -> None:
    targets = {"small": Model("small", log, fails={"c2", "c3"}), "large": Model("large", log)}
    result = matrix(tmp_path, log, targets=targets).run_sync()
    assert result.complete
    with pytest.raises(RunFinished, match="retry_errors=True retries its 4 errors") as refused:
        matrix(tmp_path, log).run_sync()
    assert refused.value.errors == 4
    count = len(log)
    again = matrix(tmp_path, log).run_sync(retry_errors=True)
    assert sorted(log[count:]) == sorted(
        ("small", case, *asked)
        for case, number in (("c2", 2), ("c3", 3))
        for asked in ((f"What is {number}?", "One word."), (f"What is {number}? Think.", None))
    )
    assert sum(one.metrics["counts"]["error"] for one in again.results.values()) == 0
    assert not (tmp_path / "large-terse" / "previous").exists()


def test_update_asks_only_what_changed_in_each_variant(tmp_path, log) -> None:
    matrix(tmp_path, log).run_sync()
    count = len(log)
    matrix(tmp_path, log, suite=suite_of(7)).run_sync(if_complete="update")
    assert [case for _, case, *_ in log[count:]] == ["c6"] * 4


def test_a_changed_target_is_refused_before_any_call(tmp_path, log) -> None:
    matrix(tmp_path, log, suite=suite_of(2)).run_sync()
    count = len(log)
    targets = {"new": Model("new", log), "small": Model("small", log), "large": Model("other", log)}
    with pytest.raises(RunMismatch, match="large-terse"):
        matrix(tmp_path, log, targets=targets).run_sync()
    assert len(log) == count
    assert not (tmp_path / "new-terse" / "outputs.jsonl").exists()


@pytest.mark.parametrize("if_complete", ["error", "update"])
def test_a_complete_matrix_of_another_target_is_refused_as_that(tmp_path, log, if_complete) -> None:
    matrix(tmp_path, log, suite=suite_of(2)).run_sync()
    count = len(log)
    targets = {"small": Model("small", log), "large": Model("other", log)}
    with pytest.raises(RunMismatch, match="holds a run of something else"):
        matrix(tmp_path, log, targets=targets, suite=suite_of(2)).run_sync(if_complete=if_complete)
    assert len(log) == count


def test_a_matrix_of_another_suite_or_other_axes_is_refused(tmp_path, log) -> None:
    matrix(tmp_path, log).run_sync()
    with pytest.raises(RunMismatch, match="suite: 'sums' there, 'other' now"):
        matrix(tmp_path, log, suite=EvalSet("other", [EvalCase(prompt="x")])).run_sync()
    with pytest.raises(RunMismatch, match="axes: target, prompt there, target now"):
        matrix(tmp_path, log, prompts=None).run_sync()
    assert matrix(tmp_path, log, prompts=None).run_sync(force=True).complete
    assert [variant.name for variant in read_matrix(tmp_path).variants] == ["small", "large"]


def test_a_run_and_a_matrix_do_not_share_a_folder(tmp_path, log) -> None:
    matrix(tmp_path / "m", log).run_sync()
    with pytest.raises(RunRefused, match="holds a matrix, not a run"):
        Runner(Model("a", log), suite_of(), output_path=tmp_path / "m", progress="off").run_sync()
    Runner(Model("a", log), suite_of(), output_path=tmp_path / "r", progress="off").run_sync()
    with pytest.raises(RunRefused, match="holds a run, not a matrix"):
        matrix(tmp_path / "r", log).run_sync()


def test_a_matrix_that_is_being_written_is_refused(tmp_path, log) -> None:
    with RunLock(tmp_path), pytest.raises(RunLocked):
        matrix(tmp_path, log).run_sync()


def test_a_cancelled_matrix_writes_what_became_of_each_case_and_is_resumed(tmp_path, log) -> None:
    async def scenario() -> MatrixResult:
        token = CancellationToken()
        hold = asyncio.Event()
        targets = {name: Model(name, log) for name in ("small", "large")}
        runner = matrix(tmp_path, log, targets=targets, token=token, suite=suite_of(30), parallelism=4)
        running = asyncio.create_task(runner.run())
        await until(lambda: len(log) >= 40)
        for target in targets.values():
            target.hold = hold
        await until(lambda: sum(target.gauge.now for target in targets.values()) == 4)
        token.cancel("enough")
        return await running

    result = asyncio.run(scenario())
    assert not result.complete
    counts = [one.metrics["counts"] for one in result.results.values()]
    assert sum(count["cancelled"] for count in counts) == 4
    assert all(one.metrics["stopped"] == "enough" for one in result.results.values())
    assert all(sum(count[part] for part in ("ok", "cancelled", "not_started")) == 30 for count in counts)
    done = sum(count["ok"] for count in counts)
    before = len(log)
    assert matrix(tmp_path, log, suite=suite_of(30)).run_sync().complete
    assert len(log) - before == 4 * 30 - done


def test_a_cancelled_task_leaves_partial_results_of_all(tmp_path, log) -> None:
    async def scenario() -> None:
        targets = {name: Model(name, log) for name in ("small", "large")}
        for target in targets.values():
            target.hold = asyncio.Event()
        running = asyncio.create_task(matrix(tmp_path, log, targets=targets).run())
        await until(lambda: len(log) >= 4)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running

    asyncio.run(scenario())
    assert all((run / "partial.json").is_file() for run in read_matrix(tmp_path).runs(tmp_path).values())
    assert matrix(tmp_path, log).run_sync().complete


def test_one_budget_is_for_all_variants_and_counts_what_earlier_launches_spent(tmp_path, log) -> None:
    def runner(limit: float, **more: Any) -> MatrixRunner:
        targets = {name: Model(name, log, cost=1.0) for name in ("small", "large")}
        return matrix(tmp_path, log, targets=targets, suite=suite_of(20), parallelism=1, max_cost=limit, **more)

    result = runner(10).run_sync()
    assert not result.complete
    assert len(log) == 10
    assert sum(one.metrics["cost"] for one in result.results.values()) == 10
    assert all("10.00 USD spent in the whole matrix" in one.metrics["stopped"] for one in result.results.values())
    runner(25).run_sync()
    assert len(log) == 25
    # What is not run now has been paid for all the same.
    runner(27, variants=["small/*"]).run_sync()
    assert len(log) == 27


def test_complete_variants_count_against_the_budget(tmp_path, log) -> None:
    targets = {"small": Model("small", log, cost=1.0)}
    matrix(tmp_path, log, targets=targets).run_sync()
    targets["large"] = Model("large", log, cost=1.0)
    result = matrix(tmp_path, log, targets=targets, parallelism=1, max_cost=15.0).run_sync()
    assert len(log) == 15
    assert not result.complete


def test_variants_share_one_cache(tmp_path, log) -> None:
    cache = tmp_path / "cache.sqlite"
    matrix(tmp_path / "a", log, cache=cache).run_sync()
    count = len(log)
    result = matrix(tmp_path / "b", log, cache=cache).run_sync()
    assert len(log) == count
    assert all(one.stats["total_requests"] == 6 for one in result.results.values())


def test_a_variant_that_is_refused_everything_stops_alone(tmp_path) -> None:
    with running_mock(key="right", latency="1ms") as mock:
        targets = {
            "good": OpenAIChat(model="m", base_url=mock.base_url, api_key="right"),
            "bad": OpenAIChat(model="m", base_url=mock.base_url, api_key="wrong"),
        }
        runner = MatrixRunner(
            targets, suite_of(60), output_path=tmp_path / "m", parallelism=4, progress="off", stop_first_errors=10
        )
        result = runner.run_sync()
    assert result["good"].complete
    assert "every call is refused" in result["bad"].metrics["stopped"]
    assert not result.complete


def test_a_target_that_raises_keyboard_interrupt_ends_all_variants_in_order(tmp_path, log) -> None:
    async def interrupt(case: EvalCase) -> str:
        raise KeyboardInterrupt

    targets = {"fine": Model("fine", log), "odd": CallableTarget(interrupt, name="odd")}
    with pytest.raises(KeyboardInterrupt):
        matrix(tmp_path, log, targets=targets, suite=suite_of(500), parallelism=2).run_sync()
    for run in read_matrix(tmp_path).runs(tmp_path).values():
        assert not Result.load(run).complete
        assert (run / "partial.json").is_file()


def test_a_target_that_cannot_be_called_is_named_and_leaves_no_folder(tmp_path, monkeypatch) -> None:
    monkeypatch.delenv("NOT_THERE", raising=False)
    targets = {
        "here": OpenAIChat(model="m", base_url="http://127.0.0.1:1/v1"),
        "keyless": OpenAIChat(model="m", base_url="https://127.0.0.1:1/v1", api_key_env="NOT_THERE"),
    }
    with pytest.raises(ConfigurationError, match=r"^keyless: .*NOT_THERE"):
        MatrixRunner(targets, suite_of(), output_path=tmp_path / "m").run_sync()
    assert not (tmp_path / "m").exists()


def test_a_bad_suite_is_refused_and_leaves_no_matrix(tmp_path, log) -> None:
    twice = EvalSet("s", [EvalCase(id="a", prompt="x"), EvalCase(id="a", prompt="y")])
    with pytest.raises(ConfigurationError, match="duplicated"):
        matrix(tmp_path, log, suite=twice).run_sync()
    assert [place.name for place in tmp_path.iterdir()] == [".lock"]


def test_cases_that_can_be_read_once_are_kept_for_all_variants(tmp_path, log) -> None:
    cases = (EvalCase(id=f"c{n}", prompt=f"What is {n}?", expected=str(n)) for n in range(5))
    result = matrix(tmp_path, log, suite=EvalSet("sums", cases)).run_sync()
    assert [one.metrics["counts"]["ok"] for one in result.results.values()] == [5] * 4
    assert len(log) == 20


def test_of_cases_that_can_be_read_once_any_may_be_chosen_by_metadata(tmp_path, log) -> None:
    cases = (EvalCase(id=f"c{n}", prompt="?", expected="1", metadata={"odd": str(n % 2)}) for n in range(8))
    result = matrix(tmp_path, log, suite=EvalSet("sums", cases), limit=3, where=("odd=1",)).run_sync()
    assert [one.metrics["counts"]["ok"] for one in result.results.values()] == [3] * 4


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"targets": {}}, "targets must be a mapping of names to targets"),
        ({"prompts": {}}, "prompts must be a mapping"),
        ({"requests": 5}, "a matrix evaluates"),
        ({"output_path": None}, "give it an output_path"),
        ({"paralellism": 5}, "no option is named 'paralellism'; did you mean 'parallelism'"),
        ({"targets": {str(n): abs for n in range(40)}}, "80 variants"),
    ],
)
def test_what_cannot_be_run_is_said(tmp_path, change, message) -> None:
    given: dict[str, Any] = {"targets": {"a": abs}, "prompts": PROMPTS, "output_path": tmp_path, **change}
    with pytest.raises(ConfigurationError, match=message):
        MatrixRunner(given.pop("targets"), suite_of(), **given).run_sync()


def test_transient_faults_are_retried_as_in_any_run(tmp_path, log) -> None:
    failed: Counter[str] = Counter()

    async def flaky(case: EvalCase) -> str:
        failed[case.id] += 1
        if failed[case.id] == 1:
            raise TransientError("not now")
        return str(case.expected)

    result = matrix(tmp_path, log, targets={"flaky": CallableTarget(flaky)}, prompts=None).run_sync()
    assert result["flaky"].pass_rate == 1.0
    assert set(failed.values()) == {2}


def test_hooks_are_called_for_each_variant(tmp_path, log) -> None:
    seen: list[str] = []

    class Seen:
        def on_start(self, run: Any) -> None:
            seen.append(f"start {run.path.name}")

        def on_end(self, result: Result) -> None:
            seen.append(f"end {result.path and result.path.name}")

    matrix(tmp_path, log, "a", prompts=PROMPTS, hooks=[Seen()]).run_sync()
    assert sorted(seen) == ["end a-steps", "end a-terse", "start a-steps", "start a-terse"]


@pytest.mark.slow
def test_worker_processes_run_one_variant_after_another_under_one_budget(tmp_path) -> None:
    from steelyard import ProcessEngine

    with running_mock(latency="1ms") as mock, ProcessEngine(2) as engine:
        targets = {name: OpenAIChat(model=name, base_url=mock.base_url) for name in "ab"}
        prices = {"input": 1_000_000, "output": 0}
        runner = MatrixRunner(
            targets, suite_of(20), output_path=tmp_path / "m", engine=engine, parallelism=4, progress="off"
        )
        assert runner.run_sync(limit=5).complete
        assert mock.stats()["requests"] == 10
        assert mock.stats()["peak_concurrency"] <= 4
        one = runner.run_sync(limit=5, prices=prices, if_complete="load")["a"].stats["total_input_tokens"]
        spent = runner.with_changes(output_path=tmp_path / "n", prices=prices, max_cost=float(2 * one)).run_sync()
        assert not spent.complete
        assert sum(result.metrics["cost"] or 0 for result in spent.results.values()) >= 2 * one


def test_the_display_is_one_for_all_variants(tmp_path, log, capsys) -> None:
    matrix(tmp_path, log, progress="lines").run_sync()
    lines = capsys.readouterr().err.splitlines()
    assert lines[-1].startswith("sums × 4 24/24 100%")
    assert all(line.startswith("sums × 4 ") for line in lines)


def test_a_result_has_leaderboard_report_and_gate(tmp_path, log) -> None:
    targets = {"right": Model("right", log), "wrong": Model("wrong", log, right=False)}
    result = matrix(tmp_path, log, targets=targets, prompts=None).run_sync()
    assert [one.name for one in result.leaderboard().variants] == ["right", "wrong"]
    assert result.summary().startswith("sums: 2 variants, 6 cases in common")
    assert {name: bool(gated) for name, gated in result.gate("pass_rate>=0.5").items()} == {
        "right": True,
        "wrong": False,
    }
    assert result.report().name == "report.html"
    assert "wrong" in result.report("md", tmp_path / "board.md").read_text()
    assert "right" in result._repr_html_()


def test_a_disk_that_fails_one_variant_ends_all_and_loses_nothing(tmp_path, log, monkeypatch) -> None:
    from steelyard.errors import JournalError
    from steelyard.run.recorder import Recorder

    emit = Recorder.emit

    def failing(self: Recorder, record: Any) -> None:
        if record.id == "c3" and len(log) > 8:
            raise JournalError(28, "no space left")
        emit(self, record)

    monkeypatch.setattr(Recorder, "emit", failing)
    with pytest.raises(JournalError, match="no space left"):
        matrix(tmp_path, log, suite=suite_of(40), parallelism=2).run_sync()
    monkeypatch.undo()
    done = sum(len(Result.load(run).load_responses()) for run in read_matrix(tmp_path).runs(tmp_path).values())
    before = len(log)
    assert 0 < done < 40
    assert matrix(tmp_path, log, suite=suite_of(40)).run_sync().complete
    assert len(log) - before == 4 * 40 - done


def test_a_matrix_can_be_awaited_on_a_running_loop(tmp_path, log) -> None:
    async def scenario() -> MatrixResult:
        return await matrix(tmp_path, log).run()

    assert asyncio.run(scenario()).complete


def test_warnings_name_the_variant_and_those_about_a_judge_come_once(tmp_path, log, caplog) -> None:
    from steelyard import Judge

    def broken(case: EvalCase, response: InvocationResponse) -> float:
        raise RuntimeError("no score today")

    async def verdict(case: EvalCase) -> str:
        return json.dumps({"reason": "good", "score": 1, "passed": True})

    judge = Judge(model="j", target=CallableTarget(verdict, model_id="j"), calibration="required")
    targets = {name: Model(name, log) for name in ("a", "b")}
    options: dict[str, Any] = {"output_path": tmp_path, "progress": "off"}
    MatrixRunner(targets, suite_of(2), [broken, judge], **options).run_sync()
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert sorted(warning.partition(":")[0] for warning in warnings if "could not score" in warning) == ["a", "b"]
    assert len([warning for warning in warnings if "is only advisory" in warning]) == 1
