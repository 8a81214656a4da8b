"""`steelyard sweep`: results on stdout, errors are what is measured, an interrupted sweep says how to go on."""

from __future__ import annotations

import json
import re
import shlex
import signal
from pathlib import Path

import pytest

from steelyard.journal.lock import RunLock
from steelyard.journal.manifest import PLOTS
from steelyard.stats import client_load
from tests.support.cli import Workshop, finish, run_cli, start, wait_until

AGENT = """
import asyncio
from pathlib import Path

HERE = Path(__file__).parent


async def answer(case):
    with open(HERE / "calls.txt", "a") as calls:
        calls.write(case.id + "\\n")
    if (HERE / "hang").exists():
        await asyncio.sleep(60)
    await asyncio.sleep(0.005)
    if case.id == "c0" and (HERE / "fails").exists():
        raise ValueError("told to fail")
    return case.prompt.upper()
"""


@pytest.fixture
def shop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Workshop:
    """A suite whose agent takes a moment; whatever else this machine is busy with is not held against the client."""
    monkeypatch.setattr(client_load, "MIN_SECONDS", float("inf"))
    shop = Workshop(tmp_path)
    shop.agent(AGENT)
    return shop


def test_the_table_the_advice_and_the_plots_go_to_stdout(shop: Workshop) -> None:
    ended = run_cli(shop.folder, "sweep", "suite.yaml", "-j", "1,2", "-n", "12", "-o", "out", "--no-progress")
    assert ended.code == 0, ended.err
    assert ended.out.startswith("shouting: 2 levels measured, complete\n")
    assert "100.0%" in ended.out
    assert re.search(r"^  recommended: [12]: ", ended.out, re.MULTILINE)  # which of them, this machine's load decides
    for name in PLOTS:
        assert f"plot in {Path('out') / name}" in ended.out
        assert (shop.folder / "out" / name).stat().st_size > 1000
    assert "level 2: 12 requests" in ended.err
    assert "shouting: 24 requests: 2 × 12" in ended.err
    assert len(shop.asked()) == 12 + 12


def test_errors_are_what_is_measured_and_no_failure(shop: Workshop) -> None:
    (shop.folder / "fails").touch()
    ended = run_cli(shop.folder, "sweep", "suite.yaml", "-j", "1", "-n", "20", "-o", "out", "--no-progress", "-q")
    assert ended.code == 0
    assert "no level can be recommended: at 1 the error rate is 20% (limit 1%)" in ended.out
    assert ended.err == ""


def test_json_is_what_sweep_json_says_and_where_the_plots_are(shop: Workshop) -> None:
    ended = run_cli(shop.folder, "sweep", "suite.yaml", "-j", "1", "-o", "out", "--json", "--no-progress")
    printed = json.loads(ended.out)
    plots = printed.pop("plots")
    assert plots == [str(Path("out") / name) for name in PLOTS]
    assert printed == json.loads((shop.folder / "out" / "sweep.json").read_bytes())


def test_without_out_the_sweep_has_a_folder_of_its_own_in_runs(shop: Workshop) -> None:
    ended = run_cli(shop.folder, "sweep", "suite.yaml", "-j", "1", "--no-progress")
    assert ended.code == 0
    (place,) = (shop.folder / "runs").iterdir()
    assert place.name.startswith("shouting-sweep-")
    assert f"results in {place.relative_to(shop.folder)}" in ended.out


def test_a_finished_sweep_is_refused_and_can_be_forced(shop: Workshop) -> None:
    words = ["sweep", "suite.yaml", "-j", "1", "-n", "20", "-o", "out", "--no-progress"]
    assert run_cli(shop.folder, *words).code == 0
    refused = run_cli(shop.folder, *words)
    assert (refused.code, refused.out) == (2, "")
    assert "out holds a finished sweep; --force starts over there" in refused.err
    assert "20 requests" not in refused.err, "the plan is of a sweep that starts"
    assert run_cli(shop.folder, *words, "--force").code == 0
    assert len(shop.asked()) == 40


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "give the levels: -j 1,10,50"),
        (["-j", "1", "--arrivals", "poisson:5/s"], "give the levels: -j 1,10,50"),
        (["--arrivals", "poison:5/s"], "did you mean 'poisson'?"),
        (["-j", "1,many"], "got 'many'"),
        (["-j", "0"], "got 0"),
        (["-j", "1", "--slo", "ttft_p99<5"], "needs a unit"),
        (["-j", "1", "--slo", "eror_rate<1%"], "did you mean 'error_rate'?"),
        (["-j", "1", "-n", "5", "--duration", "3s"], "give one of the two"),
        (["-j", "1", "--duration", "soon"], "got 'soon'"),
        (["-j", "1", "-n", "0"], "requests must be >= 1, got 0"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_mistake_is_exit_2_and_leaves_nothing_behind(shop: Workshop, words: list[str], said: str) -> None:
    ended = run_cli(shop.folder, "sweep", "suite.yaml", *words)
    assert ended.code == 2
    assert said in ended.err
    assert not (shop.folder / "runs").exists()
    assert shop.asked() == []


def test_ctrl_c_keeps_the_finished_levels_and_prints_the_command_that_goes_on(shop: Workshop) -> None:
    words = ("sweep", "suite.yaml", "-n", "20", "-o", "out", "--no-progress", "-j")
    assert run_cli(shop.folder, *words, "1").code == 0
    assert len(shop.asked()) == 20
    (shop.folder / "hang").touch()
    process = start(shop.folder, *words, "1,2")
    try:
        wait_until(lambda: (shop.folder / "calls.txt").exists())
        process.send_signal(signal.SIGINT)
        ended = finish(process)
    finally:
        process.kill()
    assert ended.code == 130
    assert "1 level measured, not complete" in ended.out
    assert "stopped: SIGINT" in ended.out
    assert not (shop.folder / "out" / "sweep.json").exists()
    command = ended.err.rpartition("resume with: ")[2].strip()
    (shop.folder / "hang").unlink()
    shop.asked()
    resumed = run_cli(shop.folder, *shlex.split(command)[1:])
    assert resumed.code == 0, resumed.err
    assert "2 levels measured, complete" in resumed.out
    assert len(shop.asked()) == 20


def test_the_table_says_which_error_was_the_most_frequent(shop: Workshop) -> None:
    (shop.folder / "fails").touch()
    ended = run_cli(shop.folder, "sweep", "suite.yaml", "-j", "1", "-n", "12", "-o", "out", "--no-progress")
    assert ended.code == 0, ended.err
    assert "mostly ValueError: told to fail" in ended.out


def test_a_sweep_is_reported_again_from_its_folder(shop: Workshop) -> None:
    swept = run_cli(shop.folder, "sweep", "suite.yaml", "-j", "1,2", "-n", "12", "-o", "out", "--no-progress")
    assert run_cli(shop.folder, "report", "out").out == swept.out.partition("plot in ")[0]
    found = json.loads(run_cli(shop.folder, "report", "out", "-f", "json").out)
    assert [level["level"] for level in found["levels"]] == [1, 2]


def killed_sweep(shop: Workshop, *words: str) -> Path:
    """The folder of a sweep without --out that had measured level 1 and was killed in level 2."""
    words = ("-n", "20", *words)
    run_cli(shop.folder, "sweep", "suite.yaml", "-j", "1", "--no-progress", "--new", *words)
    (place,) = (shop.folder / "runs").iterdir()
    (shop.folder / "hang").touch()
    shop.asked()
    process = start(shop.folder, "sweep", "suite.yaml", "-j", "1,2", "-o", str(place), "--no-progress", *words)
    try:
        wait_until(lambda: (shop.folder / "calls.txt").exists())
    finally:
        process.kill()
        finish(process)
    (shop.folder / "hang").unlink()
    shop.asked()
    return place


def test_a_killed_sweep_is_found_again_without_out(shop: Workshop) -> None:
    place = killed_sweep(shop)
    ended = run_cli(shop.folder, "sweep", "suite.yaml", "-j", "1,2", "-n", "20", "--no-progress")
    assert ended.code == 0, ended.err
    assert f"found the unfinished sweep {place.relative_to(shop.folder)}; --new starts another" in ended.err
    assert "2 levels measured, complete" in ended.out
    assert len(shop.asked()) == 20  # level 1 stands, level 2 is measured anew
    assert list((shop.folder / "runs").iterdir()) == [place]
    assert not (place / "sweep.partial.json").exists()


def test_new_starts_another_sweep_and_a_finished_one_is_left_alone(shop: Workshop) -> None:
    place = killed_sweep(shop)
    words = ["sweep", "suite.yaml", "-j", "1", "--no-progress"]
    assert run_cli(shop.folder, *words, "--new").code == 0
    assert len(list((shop.folder / "runs").iterdir())) == 2
    assert run_cli(shop.folder, *words).code == 0  # the killed one
    assert (place / "sweep.json").exists()
    assert run_cli(shop.folder, *words).code == 0  # none is unfinished now
    assert len(list((shop.folder / "runs").iterdir())) == 3


@pytest.mark.parametrize("difference", ["target", "suite"])
def test_an_unfinished_sweep_of_something_else_is_left_alone(shop: Workshop, difference: str) -> None:
    place = killed_sweep(shop)
    if difference == "target":
        shop.suite(target={"python": {"function": "agent.py:answer", "version": "2"}})
    else:
        shop.suite(id="whispering")
    ended = run_cli(shop.folder, "sweep", "suite.yaml", "-j", "1", "--no-progress")
    assert ended.code == 0, ended.err
    assert "found the unfinished" not in ended.err
    assert not (place / "sweep.json").exists()


def test_a_sweep_that_is_at_work_is_not_joined(shop: Workshop) -> None:
    place = killed_sweep(shop)
    with RunLock(place):
        ended = run_cli(shop.folder, "sweep", "suite.yaml", "-j", "1", "--no-progress")
    assert ended.code == 2
    assert "is being written by process" in ended.err
    assert "--new starts another sweep" in ended.err


def test_a_run_does_not_go_on_with_a_sweep_nor_the_other_way_round(shop: Workshop) -> None:
    place = killed_sweep(shop)
    ended = run_cli(shop.folder, "run", "suite.yaml", "--no-progress")
    assert ended.code == 0, ended.err
    assert len(list((shop.folder / "runs").iterdir())) == 2
    assert "found" not in ended.err
    assert not (place / "run.json").exists()


@pytest.mark.parametrize("finished", [True, False])
@pytest.mark.parametrize("force", [True, False])
def test_a_run_is_not_poured_into_the_folder_of_a_sweep(shop: Workshop, finished: bool, force: bool) -> None:
    place = killed_sweep(shop)
    if finished:
        run_cli(shop.folder, "sweep", "suite.yaml", "-j", "1", "--no-progress")
    before = sorted(place.rglob("*"))
    shop.asked()
    words = ["run", "suite.yaml", "-o", str(place), "--no-progress", *(["--force"] if force else [])]
    for more in ([], ["--dry-run"], ["--requests", "5"]):
        ended = run_cli(shop.folder, *words, *more)
        assert (ended.code, ended.out) == (2, "")
        assert f"{place} holds a sweep, not a run: use another --out" in ended.err
    assert shop.asked() == []
    assert sorted(place.rglob("*")) == before


@pytest.mark.parametrize("force", [True, False])
def test_a_sweep_is_not_poured_into_a_run_directory(shop: Workshop, force: bool) -> None:
    assert run_cli(shop.folder, "run", "suite.yaml", "-o", "out", "--no-progress").code == 0
    shop.asked()
    words = ["sweep", "suite.yaml", "-j", "1", "-o", "out", "--no-progress", *(["--force"] if force else [])]
    ended = run_cli(shop.folder, *words)
    assert (ended.code, ended.out) == (2, "")
    assert "out holds a run, not a sweep: use another --out" in ended.err
    assert shop.asked() == []
    assert (shop.folder / "out" / "metrics.json").exists()
    assert not (shop.folder / "out" / "sweep.partial.json").exists()


def test_new_and_out_do_not_go_together(shop: Workshop) -> None:
    ended = run_cli(shop.folder, "sweep", "suite.yaml", "-j", "1", "-o", "out", "--new")
    assert ended.code == 2
    assert "--new cannot be used with --out" in ended.err


def test_the_budget_of_a_sweep_ends_it_with_exit_4_and_says_what_helps(shop: Workshop) -> None:
    shop.suite(
        target={"simulated": {"latency": 0.001, "tokens_per_second": None}}, prices={"input": 1e6, "output": 1e6}
    )
    words = ["sweep", "suite.yaml", "-j", "1,2", "--no-progress", "-o", "out"]
    ended = run_cli(shop.folder, *words, "--max-cost", "1")
    assert ended.code == 4
    assert "spent in the whole sweep: max_cost is 1\n" in ended.out
    assert "resume with a larger --max-cost: " in ended.err
    assert run_cli(shop.folder, *words, "--max-cost", "1e9").code == 0


def test_a_load_run_with_errors_is_not_told_to_ask_them_again(shop: Workshop) -> None:
    (shop.folder / "fails").touch()
    ended = run_cli(shop.folder, "run", "suite.yaml", "--requests", "6", "-o", "out", "--no-progress")
    assert ended.code == 4
    assert "a load run does not ask them again" in ended.err
    assert "--retry-errors" not in ended.err


def test_a_dry_run_says_how_many_requests_and_what_they_cost_and_calls_nothing(shop: Workshop) -> None:
    shop.suite(prices={"input": 1e6, "output": 1e6})
    ended = run_cli(shop.folder, "sweep", "suite.yaml", "-j", "1,10,50,100", "-n", "20", "--dry-run")
    assert ended.code == 0, ended.err
    assert "shouting: 80 requests: 4 × 20" in ended.out
    assert re.search(r"cost: at least \d", ended.out)
    found = json.loads(run_cli(shop.folder, "sweep", "suite.yaml", "-j", "auto", "--dry-run", "--json").out)
    assert found["requests"]["least"] == 120
    assert shop.asked() == []
    assert not (shop.folder / "runs").exists()


def test_a_sweep_over_arrival_rates_has_a_row_for_each_rate(shop: Workshop) -> None:
    words = ["sweep", "suite.yaml", "--arrivals", "constant:50/s,100/s", "-n", "30", "-o", "out", "--no-progress", "-q"]
    ended = run_cli(shop.folder, *words)
    assert ended.code == 0, ended.err
    assert re.search(r"^.{2} +50/s ", ended.out, re.MULTILINE)
    assert re.search(r"^.{2} +100/s ", ended.out, re.MULTILINE)
    assert len(shop.asked()) == 60
    run_cli(shop.folder, "report", "out", "-f", "html")
    assert "requests a second" in (shop.folder / "out" / "report.html").read_text(encoding="utf-8")
