"""`steelyard run`: its flags, what it prints where, and how it ends."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.support.cli import STEELYARD, Ended, Workshop, finish, run_cli, start

CALM = {"simulated": {"latency": 0, "tokens_per_second": 0}}


@pytest.fixture
def shop(tmp_path: Path) -> Workshop:
    return Workshop(tmp_path)


def go(shop: Workshop, *words: str | Path) -> Ended:
    return run_cli(shop.folder, "run", "suite.yaml", "--out", "RUN", *words)


# Flags


@pytest.mark.parametrize("flag", ["-j", "--parallelism"])
def test_parallelism_is_how_many_are_in_flight(shop: Workshop, flag: str) -> None:
    shop.agent("""
        import asyncio
        now = peak = 0
        async def answer(case):
            global now, peak
            now += 1
            peak = max(peak, now)
            await asyncio.sleep(0.02)
            now -= 1
            return str(peak)
    """)
    assert go(shop, flag, "3").code == 0
    assert max(int(line["response_text"]) for line in shop.lines()) == 3


@pytest.mark.parametrize("flag", ["-n", "--limit"])
def test_limit_takes_the_first_cases(shop: Workshop, flag: str) -> None:
    go(shop, flag, "2")
    assert shop.asked() == ["c0", "c1"]


def test_k_and_n_together_take_the_first_of_those_that_match(shop: Workshop) -> None:
    go(shop, "-k", "c[1-5]", "-n", "2")
    assert shop.asked() == ["c1", "c2"]


@pytest.mark.parametrize("words", [[], ["--no-tracebacks"]], ids=["kept", "left out"])
def test_no_tracebacks_leaves_them_out(shop: Workshop, words: list[str]) -> None:
    shop.agent("""
        def answer(case):
            return {}["missing"]
    """)
    ended = go(shop, "-n", "1", "-v", *words)
    (line,) = shop.lines()
    assert ('return {}["missing"]' in line.get("error_traceback", "")) is (not words)
    assert ('return {}["missing"]' in ended.err) is (not words)


def test_timeout_makes_a_late_answer_an_error(shop: Workshop) -> None:
    shop.agent("""
        import asyncio
        async def answer(case):
            await asyncio.sleep(30 if case.id == "c1" else 0)
            return case.prompt.upper()
    """)
    assert go(shop, "--timeout", "100ms", "--retries", "0").code == 4
    assert shop.metrics()["errors"] == {"TimeoutError": 1}


@pytest.mark.parametrize("retries", [0, 2])
def test_retries_are_tries_after_the_first(shop: Workshop, retries: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("steelyard.engine.retry.RetryPolicy.wait_before", lambda *_: 0.0)
    shop.agent("""
        from agent_log import note
        def answer(case):
            note(case.id)
            raise ConnectionError("always")
    """)
    (shop.folder / "agent_log.py").write_text(
        'def note(word):\n    with open("calls.txt", "a") as calls:\n        calls.write(word + "\\n")\n'
    )
    assert go(shop, "-n", "1", "--retries", str(retries)).code == 4
    assert shop.asked() == ["c0"] * (retries + 1)
    assert shop.lines()[0]["attempts"] == retries + 1


def test_seed_decides_what_the_pretend_model_says(shop: Workshop) -> None:
    shop.suite(target={"simulated": {"latency": 0, "tokens_per_second": 0, "accuracy": 0.5}})
    answers = set()
    for seed in range(6):
        go(shop, "--seed", str(seed), "--force")
        answers.add(tuple(line["response_text"] for line in sorted(shop.lines(), key=lambda line: line["index"])))
    assert len(answers) > 1


@pytest.mark.parametrize("where", ["flag", "suite file"])
def test_low_memory_may_be_asked_for(shop: Workshop, where: str) -> None:
    if where == "suite file":
        shop.suite(run={"low_memory": True})
    assert go(shop, *(["--low-memory"] if where == "flag" else [])).code == 0


def test_dry_run_says_what_would_be_asked_and_touches_nothing(shop: Workshop) -> None:
    ended = go(shop, "--dry-run")
    assert ended.code == 0
    assert "to be asked: 6" in ended.out
    assert not shop.run.exists()
    go(shop)
    shop.cut_back(lines=4)
    shop.asked()
    ended = go(shop, "--dry-run", "--json")
    planned = json.loads(ended.out)
    assert {name: planned[name] for name in ("suite", "run", "planned", "done", "to_score", "to_ask")} == {
        "suite": "shouting",
        "run": "RUN",
        "planned": 6,
        "done": 4,
        "to_score": 0,
        "to_ask": 2,
    }
    assert json.loads(go(shop, "--dry-run", "--json", "--force").out)["to_ask"] == 6
    assert shop.asked() == []
    assert not (shop.run / "metrics.json").exists()


def test_dry_run_refuses_what_a_run_would_refuse(shop: Workshop) -> None:
    shop.failing("c1")
    go(shop)
    assert go(shop, "--dry-run").code == 2
    assert json.loads(go(shop, "--dry-run", "--retry-errors", "--json").out)["to_ask"] == 1
    assert go(shop, "--dry-run", "--seed", "9", "--retry-errors").code == 2


def test_json_prints_the_metrics_and_nothing_else(shop: Workshop) -> None:
    ended = go(shop, "--json")
    assert json.loads(ended.out) == shop.metrics()


def test_quiet_says_nothing_but_the_result(shop: Workshop) -> None:
    ended = go(shop, "-q")
    assert ended.err == ""
    assert "6 of 6 done" in ended.out


def test_verbose_says_what_is_run_and_how(shop: Workshop) -> None:
    words = go(shop, "-v", "--no-progress", "-j", "3", "--seed", "9").err
    for word in ("answer", "3 at a time", "seed 9", "RUN"):
        assert word in words


def test_no_progress_leaves_the_notices(shop: Workshop) -> None:
    go(shop)
    shop.cut_back(lines=2)
    ended = go(shop, "--no-progress")
    assert ended.err.splitlines() == ["steelyard: resuming RUN: 2 of 6 done"]


def test_results_go_to_stdout_and_progress_to_stderr(shop: Workshop) -> None:
    ended = go(shop)
    assert "100%" in ended.err
    assert "100%" not in ended.out
    assert "results in RUN" in ended.out
    assert "results in RUN" not in ended.err


def test_an_out_given_in_python_is_used(shop: Workshop) -> None:
    (shop.folder / "bench.py").write_text(
        "from steelyard import EvalCase, EvalSet, Runner\n"
        "suite = EvalSet(id='s', cases=[EvalCase(id='a', prompt='p')])\n"
        "runner = Runner(lambda case: 'x', suite, output_path='here')\n"
    )
    assert run_cli(shop.folder, "run", "bench.py:runner", "--no-progress").code == 0
    assert (shop.folder / "here" / "metrics.json").exists()


# Exit codes


def test_0_when_complete_without_errors(shop: Workshop) -> None:
    assert go(shop).code == 0


def test_0_when_errors_are_within_what_is_allowed(shop: Workshop) -> None:
    shop.failing("c1")
    assert go(shop, "--max-error-rate", "0.2").code == 0


def test_1_when_the_pass_rate_is_below_the_gate(shop: Workshop) -> None:
    shop.suite(gate={"min_pass_rate": 0.9})
    document = (shop.folder / "suite.yaml").read_text().replace("expected: C4", "expected: other")
    (shop.folder / "suite.yaml").write_text(document)
    ended = go(shop)
    assert ended.code == 1
    assert "83.3%" in ended.err
    assert go(shop, "--force", "--min-pass-rate", "0.5").code == 0


def test_all_that_is_broken_of_a_gate_is_named_with_what_set_it(shop: Workshop) -> None:
    shop.suite(gate={"min_pass_rate": 0.9, "rules": ["n>=10", "n<=100", "ttft_p50<1s"]})
    document = (shop.folder / "suite.yaml").read_text().replace("expected: C4", "expected: other")
    (shop.folder / "suite.yaml").write_text(document)
    ended = go(shop, "--no-progress")
    assert ended.code == 1
    assert ended.err.splitlines() == [
        "steelyard: pass rate 83.3%, below 90.0% (gate.min_pass_rate)",
        "steelyard: gate: n>=10: is 6",
        "steelyard: gate: ttft_p50<1s: is not known: there was nothing to measure",
    ]
    assert "below 95.0% (--min-pass-rate)" in go(shop, "--force", "--min-pass-rate", "0.95").err


def test_1_when_a_gate_is_set_and_nothing_was_scored(shop: Workshop) -> None:
    shop.suite(scorers=[])
    ended = go(shop, "--min-pass-rate", "0.1")
    assert ended.code == 1
    assert "nothing was scored" in ended.err


def test_4_outranks_1(shop: Workshop) -> None:
    shop.failing("c1")
    document = (shop.folder / "suite.yaml").read_text().replace("expected: C4", "expected: other")
    (shop.folder / "suite.yaml").write_text(document)
    ended = go(shop, "--min-pass-rate", "1", "--no-progress")
    assert ended.code == 4
    pass_rate, error_rate, _ = ended.err.splitlines()
    assert pass_rate == "steelyard: pass rate 80.0%, below 100.0% (--min-pass-rate)"
    assert "16.7% is above 0.0% (the default of --max-error-rate); --retry-errors retries them" in error_rate


def test_4_and_resumable_when_stopped_early(shop: Workshop) -> None:
    ids = [f"c{number}" for number in range(80)]
    shop.suite(" ".join(ids))
    shop.failing(" ".join(ids[::2]))
    ended = go(shop, "--stop-error-rate", "0.25", "--force")
    assert ended.code == 4
    assert len(shop.asked()) == 50
    command = "resume with: steelyard run suite.yaml --out RUN --stop-error-rate 0.25\n"
    assert ended.err.endswith(command)  # without --force, which would start over
    assert json.loads((shop.run / "partial.json").read_bytes())["counts"]["not_started"] == 30
    shop.failing("")
    assert go(shop).code == 0


@pytest.mark.parametrize(
    "words",
    [
        ["-j", "0"],
        ["-j", "many"],
        ["-n", "0"],
        ["-n", "-3"],
        ["--timeout", "0"],
        ["--timeout", "nan"],
        ["--timeout", "soon"],
        ["--retries", "-1"],
        ["--min-pass-rate", "1.5"],
        ["--max-error-rate", "-0.1"],
        ["--stop-error-rate", "nan"],
        ["--seed", "x"],
        ["--nonsense"],
        ["--out"],
        ["-k", "nothing-like-this"],
    ],
    ids=" ".join,
)
def test_2_for_a_flag_that_cannot_be(shop: Workshop, words: list[str]) -> None:
    """Nothing is called, nothing written, and the flag or its value is named."""
    ended = run_cli(shop.folder, "run", "suite.yaml", *words)
    assert ended.code == 2
    assert words[-1].lstrip("-") in ended.err
    assert ended.out == ""
    assert "Traceback" not in ended.err
    assert shop.asked() == []
    assert not (shop.folder / "runs").exists()


def test_3_when_the_disk_fails_and_the_rest_is_resumable(shop: Workshop, monkeypatch: pytest.MonkeyPatch) -> None:
    real, written = os.write, 0

    def failing_write(descriptor: int, data: Any) -> int:
        nonlocal written
        if bytes(data).startswith(b'{"v":'):
            written += 1
            if written > 3:
                raise OSError(28, "No space left on device")
        return real(descriptor, data)

    with monkeypatch.context() as patch:
        patch.setattr("steelyard.journal.writer.os.write", failing_write)
        ended = go(shop)
    assert ended.code == 3
    assert "No space left on device" in ended.err
    assert "Traceback" not in ended.err
    assert len(shop.lines()) == 3
    shop.asked()
    assert go(shop).code == 0
    assert shop.asked() == ["c3", "c4", "c5"]


def test_3_for_an_internal_error(shop: Workshop, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("a bug of ours")

    monkeypatch.setattr("steelyard.cli.run.build_any", broken)
    ended = go(shop)
    assert ended.code == 3
    assert "a bug of ours" in ended.err


# Places that output may lead to


@pytest.mark.slow
def test_a_reader_that_went_away_changes_neither_the_run_nor_its_exit_code(shop: Workshop) -> None:
    shop.suite(target=CALM, gate={"min_pass_rate": 1.0})
    document = (shop.folder / "suite.yaml").read_text().replace("expected: C4", "expected: null")
    (shop.folder / "suite.yaml").write_text(document)
    shop.failing("")
    pipe = "set -o pipefail; {} run suite.yaml --out {} {} | true"
    started = [
        subprocess.Popen(
            ["bash", "-c", pipe.format(STEELYARD, f"R{number}", words)], cwd=shop.folder, stderr=subprocess.PIPE
        )
        for number, words in enumerate(["", "-v 2>&1", "--json", "--no-progress --min-pass-rate 1"])
    ]
    codes, errors = [], []
    for process in started:
        errors.append(process.communicate()[1])
        codes.append(process.returncode)
    assert not any(b"Traceback" in error or b"Exception ignored" in error for error in errors), errors
    rates = [json.loads((shop.folder / f"R{number}" / "metrics.json").read_bytes()) for number in range(4)]
    assert codes == [0 if one["pass_rate"] == 1.0 else 1 for one in rates]


def test_what_a_suite_prints_itself_may_go_unread_too(shop: Workshop) -> None:
    (shop.folder / "noisy.py").write_text("print('noise')\n")
    line = f"unset PYTHONUNBUFFERED; set -o pipefail; {STEELYARD} run noisy.py:runner | true"
    process = subprocess.run(["bash", "-c", line], cwd=shop.folder, capture_output=True, text=True)
    assert process.returncode == 2
    assert process.stderr.startswith("steelyard: noisy.py has no 'runner'")
    assert "BrokenPipe" not in process.stderr


def test_an_output_that_cannot_be_written_is_exit_3_and_the_run_is_there(shop: Workshop) -> None:
    with open("/dev/full", "w") as full:
        process = subprocess.run(
            [STEELYARD, "run", "suite.yaml", "--out", "RUN"], cwd=shop.folder, stdout=full, stderr=subprocess.PIPE
        )
    assert process.returncode == 3
    assert b"Traceback" not in process.stderr
    assert shop.metrics()["complete"]


@pytest.mark.parametrize("environment", [{"PYTHONIOENCODING": "ascii"}, {"PYTHONIOENCODING": "latin-1"}])
def test_a_terminal_that_cannot_write_our_characters_still_gets_the_result(
    shop: Workshop, environment: dict[str, str]
) -> None:
    shop.suite(id="größe–日本")
    ended = finish(start(shop.folder, "run", "suite.yaml", "--out", "RUN", **environment))
    assert ended.code == 0, ended.err
    assert "6 of 6 done" in ended.out


def test_no_colour_codes_are_written_where_nobody_looks(shop: Workshop) -> None:
    ended = finish(start(shop.folder, "run", "suite.yaml", "--out", "RUN", NO_COLOR="1"))
    assert "\x1b" not in ended.out + ended.err


CONTROLS = "\x1b\x7f\x9b\u061c\u200e\u202e\u2028\u2066"


def test_json_holds_no_raw_control_characters_and_says_the_same(shop: Workshop) -> None:
    shop.suite(id=f"a{CONTROLS}é日")
    ran = run_cli(shop.folder, "run", "suite.yaml", "--out", "RUN", "--json", "--no-progress")
    shown = run_cli(shop.folder, "report", "RUN", "-f", "json")
    listed = run_cli(shop.folder, "ls", ".", "--json")
    for ended in (ran, shown, listed):
        assert not set(ended.out) & set(CONTROLS)
        assert "é日" in ended.out
    assert json.loads(ran.out)["suite"] == json.loads(shown.out)["suite"] == f"a{CONTROLS}é日"


def test_a_run_that_stops_when_it_is_decided_is_complete_and_says_what_it_saved(tmp_path: Path) -> None:
    shop = Workshop(tmp_path)
    shop.agent("def answer(case):\n    return case.prompt.upper()\n")
    shop.suite(
        cases=[{"id": f"c{n}", "prompt": "a", "expected": "A"} for n in range(200)],
        run={"stop_when": "decided"},
        gate={"min_pass_rate": 0.9},
    )
    ahead = run_cli(shop.folder, "run", "suite.yaml", "--dry-run")
    assert "200 cases show a change of the pass rate by 6 points or more" in ahead.out
    assert "cases settle it at a true rate of 98%" in ahead.out
    ended = run_cli(shop.folder, "run", "suite.yaml", "-o", "out", "--no-progress")
    assert ended.code == 0, ended.err
    assert "decided: pass_rate>=0.9: holds" in ended.out
    assert "not asked: decided: " in ended.out
    assert run_cli(shop.folder, "gate", "out", "--rule", "pass_rate>=90%").code == 0
    refused = run_cli(shop.folder, "run", "suite.yaml", "-o", "out", "--no-progress")
    assert refused.code == 2
