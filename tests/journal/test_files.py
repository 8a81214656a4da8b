"""The table of states of a run directory: each row through the command line and through Python."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from steelyard import EvalCase, EvalSet, Runner
from steelyard.errors import RunDamaged, RunFinished, RunLocked, RunMismatch, RunRefused
from steelyard.journal.lock import RunLock
from tests.support.cli import AGENT, Door, Outcome, Workshop

ALL = ["c0", "c1", "c2", "c3", "c4", "c5"]
FIGURES = ("n", "counts", "pass_rate", "error_rate", "scored", "passed", "unscored", "scoring_errors", "scores")


@pytest.fixture
def shop(tmp_path: Path) -> Workshop:
    return Workshop(tmp_path)


@pytest.fixture(params=["command", "python"])
def run(request: pytest.FixtureRequest, shop: Workshop) -> Door:
    """Both doors to a run; what follows must hold through each."""
    return shop.by_command if request.param == "command" else shop.by_python


def figures(metrics: dict[str, object]) -> dict[str, object]:
    """What does not depend on a clock."""
    return {name: metrics[name] for name in FIGURES}


def files_of(run: Path) -> dict[str, bytes]:
    """Every file below a run directory but its lock, with its content."""
    return {
        str(place.relative_to(run)): place.read_bytes()
        for place in sorted(run.rglob("*"))
        if place.is_file() and place.name != ".lock"
    }


# Nothing there


@pytest.mark.parametrize("before", ["no folder", "an empty folder", "a lock left behind", "an unrelated file"])
def test_where_nothing_is_a_fresh_run_begins(shop: Workshop, run: Door, before: str) -> None:
    if before != "no folder":
        shop.run.mkdir()
    if before == "a lock left behind":
        (shop.run / ".lock").write_text('{"pid": 4194304, "host": "elsewhere"}')
    if before == "an unrelated file":
        (shop.run / "notes.txt").write_text("mine")
    outcome = run()
    assert shop.asked() == ALL
    assert outcome.done["complete"]
    assert shop.metrics()["counts"] == {"planned": 6, "ok": 6, "error": 0, "cancelled": 0, "not_started": 0}
    if before == "an unrelated file":
        assert (shop.run / "notes.txt").read_text() == "mine"


# Incomplete: resume


def only_the_manifest(run: Path) -> None:
    (run / "outputs.jsonl").unlink()
    (run / "outputs.idx").unlink()


def only_the_outputs(run: Path) -> None:
    (run / "run.json").unlink()
    (run / "outputs.idx").unlink()


def both(run: Path) -> None:
    pass


def without_index(run: Path) -> None:
    (run / "outputs.idx").unlink()


def garbage_for_an_index(run: Path) -> None:
    (run / "outputs.idx").write_bytes(b"SYIDX\x01\0\0" + os.urandom(99))


def another_partial(run: Path) -> None:
    (run / "partial.json").write_text("{")


def metrics_of(content: str) -> Callable[[Path], None]:
    def write(run: Path) -> None:
        (run / "metrics.json").write_text(content)

    return write


@pytest.mark.parametrize(
    ("left", "known"),
    [
        pytest.param(only_the_manifest, 0, id="only run.json"),
        pytest.param(only_the_outputs, 4, id="only outputs.jsonl"),
        pytest.param(both, 4, id="both"),
        pytest.param(without_index, 4, id="no index"),
        pytest.param(garbage_for_an_index, 4, id="garbage index"),
        pytest.param(another_partial, 4, id="torn partial.json"),
        pytest.param(metrics_of(""), 4, id="empty metrics.json"),
        pytest.param(metrics_of('{"complete": true, "n": 6, "cou'), 4, id="torn metrics.json"),
        pytest.param(metrics_of('{"complete": false, "n": 4}'), 4, id="metrics.json says not complete"),
        pytest.param(metrics_of('{"complete": true}'), 4, id="metrics.json without figures"),
        pytest.param(metrics_of('{"complete": true, "n": 6}'), 4, id="metrics.json without counts"),
        pytest.param(
            metrics_of('{"complete": true, "n": 6, "counts": {}, "scores": {}, "stats": {}}'),
            4,
            id="hollow metrics.json",
        ),
        pytest.param(metrics_of("[]"), 4, id="metrics.json is no object"),
        pytest.param(metrics_of("\udcff".encode("utf-8", "surrogateescape").decode("latin-1")), 4, id="not JSON"),
    ],
)
def test_an_incomplete_run_is_resumed(shop: Workshop, run: Door, left: Callable[[Path], None], known: int) -> None:
    """Cases with an ok record are skipped, errored ones and the rest asked in their order, in the same file."""
    shop.failing("c1")
    run()
    shop.cut_back(lines=4)
    left(shop.run)
    shop.failing("")
    shop.asked()
    outcome = run()
    assert shop.asked() == ([one for one in ALL if one not in ("c0", "c2", "c3")] if known else ALL)
    assert len(shop.lines()) == known + (3 if known else 6)
    assert outcome.done["complete"]
    assert shop.metrics()["counts"] == {"planned": 6, "ok": 6, "error": 0, "cancelled": 0, "not_started": 0}
    assert shop.metrics()["pass_rate"] == 1.0
    assert not (shop.run / "partial.json").exists()


def test_a_resumed_run_has_the_figures_of_an_uninterrupted_one(shop: Workshop, run: Door) -> None:
    shop.suite(prompts={"c2": "ß"})  # its upper case, SS, is what is expected
    whole = run().done
    shop.cut_back(lines=3)
    assert figures(run().done) == figures(whole)


# Complete


REMEDIES = {
    "force": ("--force", "force=True"),
    "retry_errors": ("--retry-errors", "retry_errors=True"),
    "salvage": ("--salvage", "salvage=True"),
    "update": ("--update", 'if_complete="update"'),
}


def offers(outcome: Outcome, remedy: str) -> bool:
    """Whether a refusal offers the remedy in the caller's language, and not in the other one."""
    flag, argument = REMEDIES[remedy]
    ours, theirs = (flag, argument) if outcome.error is None else (argument, flag)
    assert theirs not in outcome.refusal
    return ours in outcome.refusal


@pytest.mark.parametrize("failing", ["", "c1 c4"])
def test_a_complete_run_is_refused_and_left_as_it_is(shop: Workshop, run: Door, failing: str) -> None:
    """The refusal names what starts over, and what retries errors only where there were any."""
    shop.failing(failing)
    run()
    shop.asked()
    before = files_of(shop.run)
    outcome = run()
    assert shop.asked() == []
    assert files_of(shop.run) == before
    assert outcome.refusal is not None
    assert offers(outcome, "force")
    assert offers(outcome, "update")
    assert offers(outcome, "retry_errors") == bool(failing)
    if outcome.error is not None:
        assert isinstance(outcome.error, RunFinished)
        assert outcome.error.errors == len(failing.split())
    else:
        assert outcome.code == 2


def test_a_complete_run_with_scoring_errors_names_retry_errors(shop: Workshop, run: Door) -> None:
    shop.suite(scorers=["exact", {"python": "agent.py:shout"}])
    shop.unscorable("c3")
    run()
    outcome = run()
    assert outcome.refusal is not None
    retry = "--retry-errors" if outcome.error is None else "retry_errors=True"
    assert f"is complete (6 records). {retry} retries its 1 scoring error;" in outcome.refusal


def test_retry_errors_asks_only_the_errored_again(shop: Workshop, run: Door) -> None:
    shop.failing("c1 c4")
    first = run().done
    assert first["error_rate"] == pytest.approx(2 / 6)
    old_metrics = (shop.run / "metrics.json").read_bytes()
    shop.failing("c4")
    shop.asked()
    outcome = run(retry_errors=True)
    assert shop.asked() == ["c1", "c4"]
    assert outcome.done["counts"]["ok"] == 5
    assert outcome.done["counts"]["error"] == 1
    assert shop.metrics()["counts"] == outcome.done["counts"]
    (aside,) = (shop.run / "previous").iterdir()
    assert (aside / "metrics.json").read_bytes() == old_metrics
    assert len(shop.lines()) == 8


def test_retry_errors_killed_on_the_way_is_resumed_like_any_other(shop: Workshop, run: Door) -> None:
    shop.failing("c1 c4")
    run()
    shop.failing("")
    run(retry_errors=True)
    shop.asked()
    shop.cut_back(lines=7)  # the six of the first launch, and c1
    outcome = run()
    assert shop.asked() == ["c4"]
    assert outcome.done["counts"]["ok"] == 6
    assert outcome.done["n"] == 6


def test_retry_errors_without_errors_writes_the_same_figures_anew(shop: Workshop, run: Door) -> None:
    first = run().done
    shop.asked()
    assert figures(run(retry_errors=True).done) == figures(first)
    assert shop.asked() == []


# Force


@pytest.mark.parametrize(
    "found", ["nothing", "incomplete", "complete", "damaged", "another target", "unreadable manifest", "torn"]
)
def test_force_starts_over_in_every_state_and_deletes_nothing(shop: Workshop, run: Door, found: str) -> None:
    if found != "nothing":
        run()
    if found in ("incomplete", "damaged", "torn"):
        shop.cut_back(lines=4)
    if found == "damaged":
        outputs = shop.run / "outputs.jsonl"
        outputs.write_bytes(outputs.read_bytes().replace(b'{"v"', b'{"w"', 1))
    if found == "torn":
        with open(shop.run / "outputs.jsonl", "ab") as outputs_file:
            outputs_file.write(b'{"v":1,"id":"c')
    if found == "another target":
        shop.suite(target={"python": {"function": "agent.py:answer", "version": "2"}})
    if found == "unreadable manifest":
        (shop.run / "run.json").write_text("{")
    before = files_of(shop.run) if found != "nothing" else {}
    shop.asked()
    outcome = run(force=True)
    assert shop.asked() == ALL
    assert outcome.done["complete"]
    assert len(shop.lines()) == 6
    if found != "nothing":
        (aside,) = (shop.run / "previous").iterdir()
        assert files_of(aside) == before


def test_force_twice_in_one_second_keeps_both(shop: Workshop, run: Door, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("steelyard.journal.files.time.strftime", lambda _: "20260101-000000")
    run()
    first = (shop.run / "outputs.jsonl").read_bytes()
    run(force=True)
    second = (shop.run / "outputs.jsonl").read_bytes()
    run(force=True)
    kept = [(folder / "outputs.jsonl").read_bytes() for folder in (shop.run / "previous").iterdir()]
    assert sorted(kept) == sorted([first, second])


def test_force_moves_the_metrics_first(shop: Workshop, run: Door, monkeypatch: pytest.MonkeyPatch) -> None:
    """A crash between two moves must never leave metrics.json beside anything but its own outputs."""
    run()
    moved: list[str] = []
    real = os.replace

    def replace(source: Path, goal: Path) -> None:
        if "previous" in str(goal):
            moved.append(Path(source).name)
        real(source, goal)

    monkeypatch.setattr(os, "replace", replace)
    run(force=True)
    assert moved[0] == "metrics.json"
    assert moved[-1] == "run.json"


# Another target or seed


def test_another_target_and_seed_are_refused_and_each_difference_named(shop: Workshop, run: Door) -> None:
    run()
    shop.cut_back(lines=2)
    before = files_of(shop.run)
    shop.suite(target={"simulated": {"model": "other", "latency": 0, "tokens_per_second": 0}})
    shop.asked()
    outcome = run(seed=7)
    assert outcome.refusal is not None
    for named in ("seed: 0 there, 7 now", "agent", '"other"', "kind"):
        assert named in outcome.refusal
    assert offers(outcome, "force")
    assert files_of(shop.run) == before
    assert shop.asked() == []
    if outcome.error is not None:
        assert isinstance(outcome.error, RunMismatch)
        assert len(outcome.error.differences) >= 3


def test_another_suite_id_is_refused(shop: Workshop, run: Door) -> None:
    run()
    shop.cut_back(lines=2)
    shop.suite(id="whispering")
    refusal = run().refusal
    assert refusal is not None
    assert 'suite: "shouting" there, "whispering" now' in refusal


def test_another_declared_version_of_a_callable_is_refused(shop: Workshop, run: Door) -> None:
    shop.suite(target={"python": {"function": "agent.py:answer", "version": "1"}})
    run()
    shop.cut_back(lines=2)
    shop.suite(target={"python": {"function": "agent.py:answer", "version": "2"}})
    refusal = run().refusal
    assert refusal is not None
    assert 'target version: "1" there, "2" now' in refusal


def test_changed_source_of_a_callable_only_warns(shop: Workshop, run: Door) -> None:
    run()
    shop.cut_back(lines=2)
    shop.asked()
    shop.agent(AGENT.replace("told to fail", "asked to fail"))
    outcome = run()
    assert "source" in outcome.said
    assert shop.asked() == ALL[2:]
    assert outcome.done["complete"]


def test_a_mismatch_with_a_complete_run_moves_nothing_even_with_retry_errors(shop: Workshop, run: Door) -> None:
    shop.failing("c1")
    run()
    before = files_of(shop.run)
    assert "seed" in (run(seed=1, retry_errors=True).refusal or "")
    assert files_of(shop.run) == before


def test_a_manifest_of_a_newer_version_is_refused(shop: Workshop, run: Door) -> None:
    run()
    manifest = json.loads((shop.run / "run.json").read_bytes())
    (shop.run / "run.json").write_text(json.dumps({**manifest, "v": 99}))
    shop.cut_back(lines=2)
    outcome = run()
    assert "newer" in (outcome.refusal or "")
    assert outcome.error is None or isinstance(outcome.error, RunRefused)


# Cases edited, added, removed; -n and -k


def test_an_edited_case_is_asked_again_and_the_others_are_not(shop: Workshop, run: Door) -> None:
    run()
    shop.cut_back(lines=5)
    shop.suite(prompts={"c2": "edited"})
    shop.asked()
    outcome = run()
    assert shop.asked() == ["c2", "c5"]
    assert outcome.done["n"] == 6
    assert outcome.done["pass_rate"] == 1.0
    assert outcome.done["left_out"] == 1


def test_added_cases_are_asked_and_removed_ones_left_out_and_counted(shop: Workshop, run: Door) -> None:
    run()
    shop.cut_back(lines=5)
    shop.suite("new c3 c0 c5 late")
    shop.asked()
    outcome = run()
    assert shop.asked() == ["new", "c5", "late"]
    assert outcome.done["counts"]["planned"] == outcome.done["n"] == 5
    assert outcome.done["left_out"] == 3


def test_only_a_changed_expectation_scores_again_without_a_call(shop: Workshop, run: Door) -> None:
    run()
    shop.cut_back(lines=6)
    shop.asked()
    document = (shop.folder / "suite.yaml").read_text().replace("expected: C4", "expected: something else")
    (shop.folder / "suite.yaml").write_text(document)
    outcome = run()
    assert shop.asked() == []
    assert outcome.done["passed"] == 5
    assert outcome.done["scored"] == 6


def test_a_larger_limit_goes_on_where_a_smaller_one_ended(shop: Workshop, run: Door) -> None:
    assert run(limit=2).done["n"] == 2
    shop.asked()
    assert run(limit=4).refusal is not None  # complete as it was asked for: only a reopening goes further
    outcome = run(limit=4, retry_errors=True)
    assert shop.asked() == ["c2", "c3"]
    assert outcome.done["counts"]["planned"] == 4


def test_another_selection_of_an_incomplete_run_asks_what_is_missing(shop: Workshop, run: Door) -> None:
    run(limit=4)
    shop.cut_back(lines=3)
    shop.asked()
    outcome = run(match="c[2-5]")
    assert shop.asked() == ["c3", "c4", "c5"]
    assert outcome.done["n"] == 4
    assert outcome.done["left_out"] == 2


def test_a_selection_of_nothing_is_refused_before_the_directory_is_touched(shop: Workshop, run: Door) -> None:
    outcome = run(match="zzz")
    assert "'zzz'" in (outcome.refusal or "")
    assert not shop.run.exists()
    assert shop.asked() == []


# Scorers


def test_changed_scorers_score_the_stored_responses_again(shop: Workshop, run: Door) -> None:
    first = run().done
    assert list(first["scores"]) == ["exact"]
    shop.cut_back(lines=4)
    shop.asked()
    shop.suite(scorers=["exact", {"python": "agent.py:shout"}])
    outcome = run()
    assert shop.asked() == ["c4", "c5"]
    assert sorted(shop.scored()) == ALL
    assert outcome.done["scores"]["shout"]["n"] == 6
    assert outcome.done["stats"]["total_requests"] == 6


def test_a_removed_scorer_leaves_the_figures(shop: Workshop, run: Door) -> None:
    shop.suite(scorers=["exact", {"python": "agent.py:shout"}])
    run()
    shop.cut_back(lines=6)
    shop.asked()
    shop.suite(scorers=["exact"])
    outcome = run()
    assert shop.asked() == []
    assert list(outcome.done["scores"]) == ["exact"]


def test_changed_scorers_of_a_complete_run_are_refused_without_retry_errors(shop: Workshop, run: Door) -> None:
    run()
    shop.suite(scorers=["exact", {"python": "agent.py:shout"}])
    shop.asked()
    assert run().refusal is not None
    outcome = run(retry_errors=True)
    assert shop.asked() == []
    assert outcome.done["scores"]["shout"]["n"] == 6


@pytest.mark.parametrize("how", ["resume", "retry_errors"])
def test_a_scoring_error_leaves_the_response_and_is_scored_again(shop: Workshop, run: Door, how: str) -> None:
    shop.suite(scorers=["exact", {"python": "agent.py:shout"}])
    shop.unscorable("c1 c3")
    first = run().done
    assert first["counts"]["ok"] == 6
    assert first["scoring_errors"] == 2
    assert first["pass_rate"] == 1.0
    assert first["scored"] == 4
    shop.unscorable("")
    shop.asked()
    shop.scored()
    if how == "resume":
        shop.cut_back(lines=6)
    outcome = run(retry_errors=how == "retry_errors")
    assert shop.asked() == []
    assert sorted(shop.scored()) == ["c1", "c3"]
    assert outcome.done["scoring_errors"] == 0
    assert outcome.done["scored"] == outcome.done["n"] == 6


# What cannot change an answer


def test_parallelism_timeout_and_retries_may_change(shop: Workshop, run: Door) -> None:
    run(parallelism=1, timeout=50.0, retries=1)
    shop.cut_back(lines=2)
    shop.asked()
    outcome = run(parallelism=3, timeout=20.0, retries=2)
    assert sorted(shop.asked()) == ALL[2:]
    assert outcome.done["complete"]
    assert "warning" not in outcome.said.lower()


# The lock


def test_a_live_lock_is_refused_naming_pid_and_host_even_with_force(shop: Workshop, run: Door) -> None:
    shop.run.mkdir()
    with RunLock(shop.run):
        for force in (False, True):
            outcome = run(force=force)
            assert outcome.refusal is not None
            assert str(os.getpid()) in outcome.refusal
            assert socket.gethostname() in outcome.refusal
            if outcome.error is not None:
                assert isinstance(outcome.error, RunLocked)
                assert (outcome.error.pid, outcome.error.host) == (os.getpid(), socket.gethostname())
    assert shop.asked() == []
    assert run().done["complete"]


def test_the_lock_of_a_killed_process_is_taken_over(shop: Workshop, run: Door) -> None:
    shop.run.mkdir()
    hold = (
        "import sys; from pathlib import Path; from steelyard.journal.lock import RunLock;"
        "lock = RunLock(Path('RUN')); lock.acquire(); print('held', flush=True); sys.stdin.read()"
    )
    holder = subprocess.Popen(
        [sys.executable, "-c", hold], cwd=shop.folder, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    with holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        assert str(holder.pid) in (run().refusal or "")
        holder.kill()
        holder.wait()
        assert run().done["complete"]


# Torn and damaged


def test_a_torn_last_line_is_cut_off_and_its_case_asked_again(shop: Workshop, run: Door) -> None:
    run()
    shop.cut_back(lines=4)
    outputs = shop.run / "outputs.jsonl"
    outputs.write_bytes(outputs.read_bytes()[:-20])
    shop.asked()
    outcome = run()
    assert shop.asked() == ["c3", "c4", "c5"]
    assert "torn last line" in outcome.said
    assert len(shop.lines()) == 6


def test_a_whole_last_line_without_its_newline_is_kept(shop: Workshop, run: Door) -> None:
    run()
    shop.cut_back(lines=4)
    outputs = shop.run / "outputs.jsonl"
    outputs.write_bytes(outputs.read_bytes().removesuffix(b"\n"))
    shop.asked()
    run()
    assert shop.asked() == ["c4", "c5"]
    assert len(shop.lines()) == 6


@pytest.mark.parametrize("bad", [b"garbage", b"\0\0\0\0", b'{"v":1}', b"[]", b"\xff\xfe"])
def test_damage_in_the_middle_is_refused_and_salvaged_when_asked(shop: Workshop, run: Door, bad: bytes) -> None:
    run()
    shop.cut_back(lines=5)
    outputs = shop.run / "outputs.jsonl"
    lines = outputs.read_bytes().splitlines()
    lines[2] = bad
    outputs.write_bytes(b"\n".join(lines) + b"\n")
    before = outputs.read_bytes()
    shop.asked()
    outcome = run()
    assert outcome.refusal is not None
    byte = len(lines[0]) + len(lines[1]) + 2
    for named in ("line 3", f"byte {byte}"):
        assert named in outcome.refusal
    assert offers(outcome, "salvage")
    if outcome.error is not None:
        assert isinstance(outcome.error, RunDamaged)
        assert (outcome.error.line, outcome.error.byte) == (3, byte)
    assert outputs.read_bytes() == before
    assert shop.asked() == []

    outcome = run(salvage=True)
    assert shop.asked() == ["c2", "c5"]
    assert (shop.run / "damaged.jsonl").read_bytes() == bad + b"\n"
    assert outcome.done["counts"]["ok"] == 6


def test_salvage_of_a_run_without_damage_changes_nothing(shop: Workshop, run: Door) -> None:
    run()
    shop.cut_back(lines=3)
    shop.asked()
    run(salvage=True)
    assert shop.asked() == ["c3", "c4", "c5"]
    assert not (shop.run / "damaged.jsonl").exists()


# A suite that can be read once


def once(ids: str = "a b c") -> EvalSet:
    """A suite whose cases come from an iterator."""
    return EvalSet(id="once", cases=iter([EvalCase(id=one, prompt=one) for one in ids.split()]))


def echo(case: EvalCase) -> str:
    return case.prompt or ""


def test_a_one_shot_suite_is_written_down_and_can_be_run_again_with_force(tmp_path: Path) -> None:
    runner = Runner(echo, once(), output_path=tmp_path / "RUN", progress="off")
    runner.run_sync()
    assert runner.run_sync(force=True).metrics["n"] == 3
    again = Runner(echo, once(), output_path=tmp_path / "RUN", progress="off")
    assert again.run_sync(force=True).metrics["n"] == 3


def test_a_refused_run_of_a_one_shot_suite_leaves_the_spooled_cases_as_they_were(tmp_path: Path) -> None:
    Runner(echo, once(), output_path=tmp_path / "RUN", progress="off").run_sync()
    before = files_of(tmp_path / "RUN")
    with pytest.raises(RunFinished):
        Runner(echo, once("x y z"), output_path=tmp_path / "RUN", progress="off").run_sync()
    assert files_of(tmp_path / "RUN") == before
