"""`steelyard sweep`: results on stdout, errors are what is measured, an interrupted sweep says how to go on."""

from __future__ import annotations

import json
import re
import shlex
import signal
import sys
from pathlib import Path

import pytest

from steelyard.report.plots import PLOTS
from steelyard.stats import lag
from support_cli import Workshop, finish, run_cli, start, wait_until

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
    monkeypatch.setattr(lag, "SHORTEST", float("inf"))
    shop = Workshop(tmp_path)
    shop.agent(AGENT)
    return shop


@pytest.fixture
def no_plots(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drawing takes most of the time, and most tests have nothing to see in a plot."""
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)


def test_the_table_the_advice_and_the_plots_go_to_stdout(shop: Workshop) -> None:
    ended = run_cli(shop.folder, "sweep", "suite.yaml", "-j", "1,2", "-n", "12", "-o", "out", "--no-progress")
    assert ended.code == 0, ended.err
    assert ended.out.startswith("shouting: 2 levels measured, complete\n")
    assert "100.0%" in ended.out
    assert re.search(r"^  recommended: [12]: ", ended.out, re.MULTILINE)  # which of them, this machine's load decides
    for name in PLOTS:
        assert f"plot in {Path('out') / name}" in ended.out
        assert (shop.folder / "out" / name).stat().st_size > 1000
    assert "level 2: 20 requests, 2 at a time" in ended.err
    assert len(shop.asked()) == 12 + 20


@pytest.mark.usefixtures("no_plots")
def test_errors_are_what_is_measured_and_no_failure(shop: Workshop) -> None:
    (shop.folder / "fails").touch()
    ended = run_cli(shop.folder, "sweep", "suite.yaml", "-j", "1", "-o", "out", "--no-progress", "-q")
    assert ended.code == 0
    assert "no level can be recommended: at 1 the error rate is 20 % (limit 1 %)" in ended.out
    assert ended.err.startswith("steelyard: no plots were drawn")


def test_json_is_what_sweep_json_says_and_where_the_plots_are(shop: Workshop) -> None:
    ended = run_cli(shop.folder, "sweep", "suite.yaml", "-j", "1", "-o", "out", "--json", "--no-progress")
    printed = json.loads(ended.out)
    plots = printed.pop("plots")
    assert plots == [str(Path("out") / name) for name in PLOTS]
    assert printed == json.loads((shop.folder / "out" / "sweep.json").read_bytes())


@pytest.mark.usefixtures("no_plots")
def test_without_the_plot_extra_all_else_is_there(shop: Workshop) -> None:
    ended = run_cli(shop.folder, "sweep", "suite.yaml", "-j", "1", "-o", "out", "--no-progress")
    assert ended.code == 0
    assert "1 level measured, complete" in ended.out
    assert "plot in" not in ended.out
    assert "no plots were drawn: plots need matplotlib: pip install 'steelyard[plot]'" in ended.err
    assert (shop.folder / "out" / "sweep.json").exists()


@pytest.mark.usefixtures("no_plots")
def test_without_out_the_sweep_has_a_folder_of_its_own_in_runs(shop: Workshop) -> None:
    ended = run_cli(shop.folder, "sweep", "suite.yaml", "-j", "1", "--no-progress")
    assert ended.code == 0
    (place,) = (shop.folder / "runs").iterdir()
    assert place.name.startswith("shouting-sweep-")
    assert f"results in {place.relative_to(shop.folder)}" in ended.out


@pytest.mark.usefixtures("no_plots")
def test_a_finished_sweep_is_refused_and_can_be_forced(shop: Workshop) -> None:
    words = ["sweep", "suite.yaml", "-j", "1", "-o", "out", "--no-progress"]
    assert run_cli(shop.folder, *words).code == 0
    refused = run_cli(shop.folder, *words)
    assert (refused.code, refused.out) == (2, "")
    assert "out holds a finished sweep; --force starts over there" in refused.err
    assert run_cli(shop.folder, *words, "--force").code == 0
    assert len(shop.asked()) == 40


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "Missing option '-j'"),
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


@pytest.mark.usefixtures("no_plots")
def test_ctrl_c_keeps_the_finished_levels_and_prints_the_command_that_goes_on(shop: Workshop) -> None:
    assert run_cli(shop.folder, "sweep", "suite.yaml", "-j", "1", "-o", "out", "--no-progress").code == 0
    assert len(shop.asked()) == 20
    (shop.folder / "hang").touch()
    process = start(shop.folder, "sweep", "suite.yaml", "-j", "1,2", "-o", "out", "--no-progress")
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


def test_the_table_says_which_error_was_the_most_frequent(shop: Workshop, no_plots: None) -> None:
    (shop.folder / "fails").touch()
    ended = run_cli(shop.folder, "sweep", "suite.yaml", "-j", "1", "-n", "12", "-o", "out", "--no-progress")
    assert ended.code == 0, ended.err
    assert "mostly ValueError: told to fail" in ended.out


def test_a_sweep_is_reported_again_from_its_folder(shop: Workshop, no_plots: None) -> None:
    swept = run_cli(shop.folder, "sweep", "suite.yaml", "-j", "1,2", "-n", "12", "-o", "out", "--no-progress")
    assert run_cli(shop.folder, "report", "out").out == swept.out
    found = json.loads(run_cli(shop.folder, "report", "out", "-f", "json").out)
    assert [level["level"] for level in found["levels"]] == [1, 2]
