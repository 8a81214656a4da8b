"""`steelyard run` on a matrix: its variants from the suite file or from -m, where they go, and how it ends."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import yaml

from steelyard.run.matrix import read_matrix
from tests.support.cli import Ended, run_cli
from tests.support.mock import running_mock
from tests.support.paths import ROOT

AGENT = """
from pathlib import Path
from steelyard import InvocationResponse

LOG = Path(__file__).with_name("calls.txt")

class Model:
    default_parallelism = 4

    def __init__(self, model="m", fails="", wrong=False, params=None, version=1):
        self.model_id, self.fails, self.wrong, self.params = model, fails.split(), wrong, params or {}

    def identity(self):
        return {"kind": "model", "model": self.model_id, "params": self.params}

    async def invoke(self, case, context):
        with LOG.open("a") as calls:
            calls.write(f"{self.model_id} {case.id} {self.params} {case.system_prompt}|{case.prompt}\\n")
        if case.id in self.fails:
            raise ValueError("told to fail")
        return InvocationResponse(response_text="no" if self.wrong else str(case.expected), cost=1.0)
"""


class Shop:
    """A folder with a matrix of models that write down what they are asked."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "agent.py").write_text(AGENT)
        self.suite(targets={"small": self.model("small"), "large": self.model("large")}, prompts=PROMPTS)

    @staticmethod
    def model(name: str, **more: Any) -> dict[str, Any]:
        return {"python": {"class": "agent.py:Model", "model": name, **more}}

    def suite(self, cases: int = 3, **more: Any) -> None:
        listed = [{"id": f"c{n}", "prompt": f"What is {n}?", "expected": str(n)} for n in range(cases)]
        document = {"id": "sums", "cases": listed, "scorers": ["exact"], **more}
        (self.folder / "suite.yaml").write_text(yaml.safe_dump(document, sort_keys=False))

    def run(self, *words: str) -> Ended:
        return run_cli(self.folder, "run", "suite.yaml", "--no-progress", *words)

    def asked(self) -> list[str]:
        """What was asked since this was last looked at."""
        log = self.folder / "calls.txt"
        lines = log.read_text().splitlines() if log.exists() else []
        log.unlink(missing_ok=True)
        return lines


PROMPTS = {"terse": {"system_prompt": "One word."}, "steps": {"prompt": "{{ prompt }} Think."}}


@pytest.fixture
def shop(tmp_path: Path) -> Shop:
    return Shop(tmp_path)


def test_a_suite_with_targets_and_prompts_is_run_as_a_matrix_and_shows_a_leaderboard(shop) -> None:
    ended = shop.run("-o", "M")
    assert ended.code == 0
    assert ended.out.startswith("sums: 4 variants, 3 cases in common")
    assert "large/steps" in ended.out
    asked = shop.asked()
    assert len(asked) == 12
    assert "small c1 {} One word.|What is 1?" in asked
    assert "large c1 {} None|What is 1? Think." in asked
    assert [variant.name for variant in read_matrix(shop.folder / "M").variants] == [
        "small/terse", "small/steps", "large/terse", "large/steps",
    ]  # fmt: skip
    manifest = json.loads((shop.folder / "M" / "small-terse" / "run.json").read_text())
    assert (manifest["suite_file"], manifest["variant"]) == ("suite.yaml", {"target": "small", "prompt": "terse"})


def test_models_of_the_command_line_are_a_matrix(shop) -> None:
    shop.suite(target=shop.model("own"))
    ended = shop.run("-o", "M", "-m", "a", "-m", "b", "--json")
    assert ended.code == 0
    assert list(json.loads(ended.out)["variants"]) == ["a", "b"]
    assert Counter(line.split()[0] for line in shop.asked()) == {"a": 3, "b": 3}
    assert shop.run("-o", "R", "-m", "a").code == 0
    assert (shop.folder / "R" / "run.json").is_file()  # one model is one run


def test_params_are_an_axis(shop) -> None:
    shop.suite(target=shop.model("m", params={"top_p": 1}), params={"temperature": [0, 0.7], "stop": ["a"]})
    ended = shop.run("-o", "M", "--json")
    assert ended.code == 0, ended.err
    assert list(json.loads(ended.out)["variants"]) == ["temperature=0/stop=a", "temperature=0.7/stop=a"]
    sent = {line.partition("{")[2].partition("}")[0] for line in shop.asked()}
    assert sent == {f"'top_p': 1, 'temperature': {value}, 'stop': 'a'" for value in ("0", "0.7")}


def test_variant_chooses_and_the_rest_comes_later_into_the_same_folder(shop) -> None:
    assert shop.run("--variant", "small/*").code == 0
    assert {line.split()[0] for line in shop.asked()} == {"small"}
    assert shop.run("--variant", "large/terse").code == 0
    assert len(shop.asked()) == 3
    ended = shop.run()
    assert ended.code == 0
    assert "found the unfinished matrix runs/sums-" in ended.err
    assert ": 3 variants complete, 0 of 3 done in 1 variant" in ended.err
    assert [line.split("|")[1] for line in shop.asked()] == [f"What is {n}? Think." for n in range(3)]
    assert len(list((shop.folder / "runs").iterdir())) == 1


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--variant", "smal/terse"], "no variant is named 'smal/terse'; did you mean 'small/terse'?"),
        (["--variant", "huge"], "known here: small/terse, small/steps, large/terse, large/steps"),
        (["-m", "a"], "has targets: --model changes the one target of a suite; --variant chooses"),
        (["-m", "a", "-m", "b"], "has targets"),
        (["--requests", "5"], "a matrix evaluates"),
    ],
)
def test_what_does_not_go_with_a_matrix_is_refused(shop, words, message) -> None:
    ended = shop.run(*words)
    assert ended.code == 2
    assert message in ended.err
    assert not (shop.folder / "runs").exists()


@pytest.mark.parametrize(
    ("suite", "message"),
    [
        ({"target": "simulated", "targets": {"a": "simulated"}}, "has target and targets: give one of them"),
        ({"targets": ["simulated"]}, "targets must be a mapping of names to targets"),
        ({"targets": {}}, "targets must be a mapping of names to targets"),
        ({"targets": {"a": {"simulated": {}, "echo": {}}}}, "targets.a must be a name or a mapping with one key"),
        ({"targets": {"a": None}}, "targets.a must be a name or a mapping with one key"),
        (
            {"targets": {"a": "simulated", "b": {"simulated": {"modle": 1}}}},
            "suite.yaml:18: b: unknown key targets.b.simulated.modle",
        ),
        ({"prompts": {"a": {"system_prompt": "x"}}}, "has no target"),
        ({"target": "simulated", "prompts": {"a": "gone.txt"}}, "prompts.a: cannot read gone.txt"),
        ({"target": "simulated", "params": {"temperature": 1}}, "params.temperature must be a list of values"),
        ({"target": "simulated", "params": {"temperature": [1, 1]}}, "params.temperature: each value once"),
        ({"target": "simulated", "params": {"prompt": [1]}}, "cannot be called like another axis"),
        ({"target": "simulated", "params": {"t": [1, 2]}}, "simulated does not take params: `params` cannot change it"),
        ({"targets": {str(n): "simulated" for n in range(65)}}, "65 variants (65 target) are more than 64"),
    ],
)
def test_what_is_wrong_with_a_matrix_in_a_suite_is_said(shop, suite, message) -> None:
    shop.suite(**suite)
    ended = shop.run()
    assert ended.code == 2
    assert message in ended.err


def test_variant_of_a_single_run_is_refused(shop) -> None:
    shop.suite(target=shop.model("m"))
    ended = shop.run("--variant", "x")
    assert (ended.code, "describes one run, not a matrix" in ended.err) == (2, True)


def test_the_gate_is_checked_for_each_variant_by_name(shop) -> None:
    targets = {"good": shop.model("good"), "bad": shop.model("bad", wrong=True)}
    shop.suite(targets=targets, gate={"min_pass_rate": 0.8})
    ended = shop.run("-o", "M")
    assert ended.code == 1
    assert "bad: pass rate 0.0%, below 80.0% (gate.min_pass_rate)" in ended.err
    assert "good" not in ended.err
    shop.suite(targets=targets, gate={"rules": ["pass_rate>=0.8"]})
    ended = shop.run("-o", "N")
    assert ended.code == 1
    assert "bad: gate: pass_rate>=0.8" in ended.err


def test_errors_override_a_failed_gate_and_are_retried_where_they_are(shop) -> None:
    shop.suite(
        targets={"bad": shop.model("bad", wrong=True), "broken": shop.model("broken", fails="c1")},
        gate={"min_pass_rate": 0.8},
    )
    ended = shop.run()
    assert ended.code == 4
    assert "broken: error rate 33.3%" in ended.err
    assert "bad: pass rate" in ended.err
    shop.asked()
    refused = shop.run()
    assert refused.code == 2
    assert "is complete with 1 error. This retries them:" in refused.err
    assert "--retry-errors" in refused.err
    shop.suite(targets={"bad": shop.model("bad", wrong=True), "broken": shop.model("broken")})
    assert shop.run("--retry-errors").code == 0
    assert [line.split()[:2] for line in shop.asked()] == [["broken", "c1"]]


def test_a_complete_matrix_without_errors_is_followed_by_another(shop) -> None:
    shop.run()
    shop.run()
    assert len(shop.asked()) == 24
    assert len(list((shop.folder / "runs").iterdir())) == 2
    assert shop.run("--update").code == 0
    assert shop.asked() == []


def test_a_matrix_in_a_folder_is_refused_when_complete_and_force_starts_over(shop) -> None:
    shop.run("-o", "M")
    ended = shop.run("-o", "M")
    assert ended.code == 2
    assert "M is complete (4 variants, 12 records)." in ended.err
    assert "--update asks and scores what changed since; --force starts over there" in ended.err
    shop.asked()
    assert shop.run("-o", "M", "--force").code == 0
    assert len(shop.asked()) == 12


def test_one_budget_stops_all_and_says_how_to_go_on(shop) -> None:
    ended = shop.run("-o", "M", "--max-cost", "5", "-j", "1")
    assert ended.code == 4
    assert len(shop.asked()) == 5
    assert ended.err.count("5.00 USD spent in the whole matrix: max_cost is 5") == 1
    assert "resume with a larger --max-cost: steelyard run suite.yaml --out M" in ended.err
    assert shop.run("-o", "M", "--max-cost", "50").code == 0
    assert len(shop.asked()) == 7


def test_dry_run_shows_every_variant_with_its_cost_and_calls_nothing(shop) -> None:
    with running_mock() as mock:
        target = {"openai-chat": {"base_url": mock.base_url, "params": {"max_tokens": 10}}}
        targets = {name: {"openai-chat": {**target["openai-chat"], "model": name}} for name in ("small", "large")}
        prices = {"small": {"input": 1, "output": 2}, "large": {"input": 10, "output": 20}}
        shop.suite(targets=targets, prompts=PROMPTS, prices=prices, run={"parallelism": 7, "max_cost": 3.5})
        ended = shop.run("--dry-run")
        assert ended.code == 0, ended.err
        rows = {line.split()[0]: line for line in ended.out.splitlines()}
        assert rows["small/terse"].split()[1:5] == ["3", "0", "0", "3"]
        assert "at most" in rows["large/steps"]
        assert rows["all"].split()[1] == "12"
        assert f"7 at a time at {mock.url}; nothing was called" in ended.out
        ended = shop.run("--dry-run", "-j", "auto")
        assert f"as many at a time as the endpoint sustains at {mock.url}" in ended.out, ended.err
        assert "max_cost: all variants together stop at 3.50 USD" in ended.out
        planned = json.loads(shop.run("--dry-run", "--json").out)
        costs = [variant["plan"]["estimate"]["cost"] for variant in planned["variants"]]
        assert planned["cost"] == pytest.approx(sum(costs))
        assert costs[2] == pytest.approx(10 * costs[0])
        assert mock.stats()["requests"] == 0
    assert not (shop.folder / "runs").exists()


def test_dry_run_knows_what_is_complete_and_what_is_left(shop) -> None:
    shop.run("-o", "M", "--variant", "small/*")
    ended = shop.run("-o", "M", "--dry-run")
    rows = {line.split()[0]: line.split()[1:] for line in ended.out.splitlines()}
    assert rows["small/terse"] == ["complete", "0"]
    assert rows["large/terse"][:4] == ["3", "0", "0", "3"]
    before = (shop.folder / "M" / "matrix.json").read_bytes()
    shop.run("-o", "M", "--dry-run", "--force")
    assert (shop.folder / "M" / "matrix.json").read_bytes() == before


def test_a_judge_that_would_be_elsewhere_for_each_variant_needs_a_target(shop) -> None:
    targets = {name: {"openai-chat": {"model": "m", "base_url": f"http://127.0.0.1:{port}/v1"}} for name, port in PORTS}
    shop.suite(targets=targets, scorers=[{"judge": {"model": "j"}}])
    ended = shop.run()
    assert ended.code == 2
    assert "give the judge a target" in ended.err
    own = {"judge": {"model": "j", "target": {"openai-chat": {"base_url": "http://127.0.0.1:3/v1"}}}}
    shop.suite(targets=targets, scorers=[own])
    assert shop.run("--dry-run").code == 0


PORTS = (("a", 1), ("b", 2))


def test_a_variable_in_targets_is_replaced(shop, monkeypatch) -> None:
    monkeypatch.setenv("WHICH", "from-env")
    shop.suite(targets={"one": shop.model("${WHICH}")}, prompts={"raw": {"system_prompt": "${WHICH}"}})
    assert shop.run("-o", "M").code == 0
    assert shop.asked()[0] == "from-env c0 {} ${WHICH}|What is 0?"


def test_other_commands_that_want_one_run_name_the_variants(shop) -> None:
    ended = run_cli(shop.folder, "sweep", "suite.yaml", "-j", "1")
    assert ended.code == 2
    assert "suite.yaml is a matrix (small/terse, small/steps, large/terse, large/steps)" in ended.err


def test_a_variant_is_scored_again_with_its_own_prompt(shop) -> None:
    shop.run("-o", "M")
    shop.asked()
    shop.suite(
        targets={"small": shop.model("small"), "large": shop.model("large")}, prompts=PROMPTS, scorers=["contains"]
    )
    ended = run_cli(shop.folder, "score", "M/large-steps", "-o", "S", "--no-progress", "--json")
    assert ended.code == 0, ended.err
    assert json.loads(ended.out)["counts"]["ok"] == 3
    assert shop.asked() == []


def test_a_report_of_a_variant_shows_what_was_really_asked(shop) -> None:
    shop.run("-o", "M")
    ended = run_cli(shop.folder, "report", "M/small-steps", "--case", "c1")
    assert ended.code == 0
    assert "What is 1? Think." in ended.out
    assert "edited" not in ended.out


def test_a_matrix_in_python_is_run_by_name(shop) -> None:
    (shop.folder / "code.py").write_text(
        "from agent import Model\n"
        "from steelyard import EvalCase, EvalSet, MatrixRunner\n"
        "def matrix():\n"
        "    suite = EvalSet('sums', [EvalCase(id='a', prompt='x', expected='1')])\n"
        "    return MatrixRunner({'one': Model('one'), 'two': Model('two')}, suite)\n"
    )
    words = ["run", "code.py:matrix", "-o", "M", "--no-progress", "--json"]
    ended = run_cli(shop.folder, *words, "--variant", "two")
    assert ended.code == 0, ended.err
    assert list(json.loads(ended.out)["variants"]) == ["two"]
    assert list(json.loads(run_cli(shop.folder, *words).out)["variants"]) == ["one", "two"]
    refused = run_cli(shop.folder, *words, "-m", "a", "-m", "b")
    assert "makes its own target: --model can only change that of a suite file" in refused.err


def test_agents_in_workspaces_are_a_matrix_too(shop) -> None:
    argv = ["sh", "-c", "echo {{ metadata.word }}-WORD > out.txt; cat out.txt"]
    targets = {name: {"agent": {"argv": [*argv[:2], argv[2].replace("WORD", name)]}} for name in ("a", "b")}
    cases = [{"id": f"c{n}", "prompt": "x", "expected": "hi-a", "metadata": {"word": "hi"}} for n in range(2)]
    document = {"id": "agents", "targets": targets, "workspace": {"from": {"files": {"in.txt": "x"}}}}
    (shop.folder / "suite.yaml").write_text(yaml.safe_dump({**document, "cases": cases, "scorers": ["exact"]}))
    ended = shop.run("-o", "M", "--json")
    assert ended.code == 0, ended.err
    variants = json.loads(ended.out)["variants"]
    assert {name: metrics["pass_rate"] for name, metrics in variants.items()} == {"a": 1.0, "b": 0.0}


def test_the_example_runs_as_it_is(shop) -> None:
    for name in ("matrix.yaml", "capitals.jsonl"):
        shutil.copy(ROOT / "examples" / name, shop.folder)
    ended = run_cli(shop.folder, "run", "matrix.yaml", "-o", "M", "-n", "20", "--no-progress", "--json")
    assert ended.code == 0, ended.err
    variants = json.loads(ended.out)["variants"]
    assert {name: metrics["counts"]["ok"] for name, metrics in variants.items()} == {
        f"{model}/{prompt}": 20 for model in ("small", "large") for prompt in ("terse", "steps")
    }


def test_ls_shows_a_matrix_in_one_row_with_its_variants_beneath(shop) -> None:
    shop.run("-o", "runs/m")
    shop.suite(target=shop.model("own"))
    shop.run("-o", "runs/single")
    ended = run_cli(shop.folder, "ls")
    lines = ended.out.splitlines()
    rows = [" ".join(line.split()[:6]) for line in lines]
    place = next(number for number, row in enumerate(rows) if row.startswith("runs/m"))
    assert rows[place] == "runs/m complete sums 4 variants 12/12"
    assert rows[place + 1 : place + 5] == [
        f"{model}/{prompt} complete {model} 3/3 0 100.0%" for model in ("small", "large") for prompt in PROMPTS
    ]
    assert lines[place + 1].startswith("  small/terse")
    listed = json.loads(run_cli(shop.folder, "ls", "--json").out)
    assert [(row["run"], len(row["runs"])) for row in listed] == [("runs/single", 0), ("runs/m", 4)]
    assert listed[1]["runs"][0]["variant"] == "small/terse"


def test_ls_shows_an_unfinished_matrix_and_a_damaged_one(shop) -> None:
    shop.run("-o", "runs/m", "--max-cost", "5", "-j", "1")
    (shop.folder / "runs" / "bad").mkdir()
    (shop.folder / "runs" / "bad" / "matrix.json").write_text("{")
    states = {row["run"]: row["state"] for row in json.loads(run_cli(shop.folder, "ls", "--json").out)}
    assert states == {"runs/m": "interrupted", "runs/bad": "damaged"}


def test_ls_shows_the_levels_of_a_sweep_beneath_it(shop) -> None:
    shop.suite(target="simulated")
    words = ["sweep", "suite.yaml", "-j", "1,2", "-n", "3", "-o", "runs/s", "-q", "--set"]
    ended = run_cli(shop.folder, *words, "target={simulated: {latency: 0, tokens_per_second: 0}}")
    assert ended.code == 0, ended.err
    lines = run_cli(shop.folder, "ls").out.splitlines()
    assert lines[1].startswith("runs/s")
    assert [line.split()[:2] for line in lines[2:]] == [["level-1", "complete"], ["level-2", "complete"]]


def test_gate_checks_each_variant_of_a_matrix(shop) -> None:
    shop.suite(targets={"good": shop.model("good"), "bad": shop.model("bad", wrong=True)})
    shop.run("-o", "M")
    kept = run_cli(shop.folder, "gate", "M", "--rule", "error_rate<=0")
    assert (kept.code, kept.out) == (0, "")
    broken = run_cli(shop.folder, "gate", "M", "--rule", "pass_rate>=0.5", "--junit", "gate.xml")
    assert broken.code == 1
    assert broken.out.startswith("bad: pass_rate>=0.5: ")
    assert "good" not in broken.out
    assert "bad: pass_rate&gt;=0.5" in (shop.folder / "gate.xml").read_text()
    assert json.loads(run_cli(shop.folder, "gate", "M", "--rule", "n>=3", "--json").out)["passed"]
    (shop.folder / "M" / "bad" / "metrics.json").unlink()
    unfinished = run_cli(shop.folder, "gate", "M", "--rule", "n>=3")
    assert unfinished.code == 1
    assert unfinished.out.startswith("bad: the run: is not complete: ")


def test_gate_of_a_matrix_reads_the_rules_of_its_suite_and_a_baseline_by_variant(shop) -> None:
    targets = {"a": shop.model("a"), "b": shop.model("b")}
    shop.suite(cases=200, targets=targets)
    shop.run("-o", "OLD")
    shop.suite(cases=200, targets={**targets, "b": shop.model("b", wrong=True)}, gate={"min_pass_rate": 0.5})
    shop.run("-o", "NEW")
    ended = run_cli(shop.folder, "gate", "NEW", "--baseline", "OLD", "--max-regression", "pass_rate=0.05")
    assert ended.code == 1
    rules = [line.split(":")[:2] for line in ended.out.splitlines()]
    assert {variant for variant, _ in rules} == {"b"}
    assert len(rules) >= 2  # below the suite's bar, and below its baseline


def test_compare_and_report_take_the_folder_of_a_matrix(shop) -> None:
    shop.run("-o", "M")
    for words in (["compare", "M"], ["report", "M"]):
        ended = run_cli(shop.folder, *words)
        assert ended.code == 0, ended.err
        assert ended.out.startswith("sums: 4 variants, 3 cases in common")
    html = run_cli(shop.folder, "report", "M", "-f", "html")
    assert (shop.folder / html.out.strip()).is_file()
    alone = run_cli(shop.folder, "compare", "M/small-terse")
    assert alone.code == 2
    assert "only the folder of a matrix can be compared alone" in alone.err
    assert run_cli(shop.folder, "compare", "M/small-terse", "M/large-terse").code == 0
