"""Names are found among the built-in ones, then among what packages add; the sample package is used by its names."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml

from steelyard import ConfigurationError, EvalCase, EvalSet, Runner
from steelyard.plugins import BUILT_IN, Kind, find, names, plugins_of, takes
from steelyard.run.config import build_suite
from steelyard.scoring import Judge, Prompt
from steelyard.targets import CallableTarget
from tests.support.cli import Ended, finish, run_cli, start
from tests.support.plugin import install_sample, note_package

KINDS: tuple[Kind, ...] = get_args(Kind)


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder on the path where packages are installed."""
    folder = tmp_path / "site"
    folder.mkdir()
    monkeypatch.syspath_prepend(folder)
    yield folder
    for name, module in list(sys.modules.items()):
        if str(getattr(module, "__file__", None) or "").startswith(str(folder)):
            del sys.modules[name]


@pytest.fixture
def acme(site: Path) -> Path:
    install_sample(site)
    return site


def suite(folder: Path, **keys: Any) -> Path:
    cases = [{"id": "a", "prompt": "aeon"}, {"id": "b", "prompt": "zzz"}]
    path = folder / "suite.yaml"
    path.write_text(yaml.safe_dump({"id": "s", "target": {"acme": {"model": "m"}}, "cases": cases, **keys}))
    return path


def run(folder: Path, *words: str) -> Ended:
    return run_cli(folder, "run", "suite.yaml", "--no-progress", "--out", "RUN", *words)


@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind in KINDS for name in BUILT_IN[kind]])
def test_every_built_in_name_leads_to_something(kind: Kind, name: str) -> None:
    assert find(kind, name) is not None


def test_entry_points_are_read_only_for_a_name_that_is_not_built_in(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(**group: str) -> None:
        raise AssertionError(f"read for {group}")

    monkeypatch.setattr("importlib.metadata.entry_points", refuse)
    assert find("scorers", "exact")
    with pytest.raises(AssertionError, match=r"steelyard\.scorers"):
        find("scorers", "vowels")


def test_the_sample_target_and_scorer_are_used_by_name(tmp_path: Path, acme: Path) -> None:
    suite(tmp_path, scorers=[{"vowels": {"least": 2}}])
    ended = run(tmp_path, "--json")
    assert ended.code == 0, ended.err
    metrics = json.loads(ended.out)
    assert metrics["scores"]["vowels"]["passed"] == 1
    manifest = json.loads((tmp_path / "RUN" / "run.json").read_bytes())
    assert manifest["target"]["model"] == "m"


def test_a_plugins_scorer_and_prompt_are_used_by_name_in_python(acme: Path) -> None:
    cases = EvalSet("s", [EvalCase(id="a", prompt="aeon")])
    assert Runner(lambda case: case.prompt, cases, ["vowels"], progress="off").run_sync().metrics["pass_rate"] == 1.0
    target = CallableTarget(lambda case: "", model_id="j")
    assert Judge(model="j", target=target, prompt="acme_v1").by.startswith("j/acme_v1@")


def test_model_and_address_can_be_changed_on_the_command_line_for_a_target_that_takes_them(
    tmp_path: Path, acme: Path
) -> None:
    suite(tmp_path)
    assert run(tmp_path, "-m", "other", "--base-url", "https://there.invalid").code == 0
    target = json.loads((tmp_path / "RUN" / "run.json").read_bytes())["target"]
    assert (target["model"], target["base_url"]) == ("other", "https://there.invalid")


def test_the_samples_store_keeps_answers_and_gives_them_back(tmp_path: Path, acme: Path) -> None:
    suite(tmp_path)
    assert run(tmp_path, "--cache", "acme:answers.json").code == 0
    assert len(json.loads((tmp_path / "answers.json").read_text())) == 2
    ended = run(tmp_path, "--cache", "acme:answers.json", "--force", "--json")
    assert json.loads(ended.out)["cached"] == 2
    assert not (tmp_path / "acme:answers.json").exists()


def test_the_samples_report_format_is_used_by_name(tmp_path: Path, acme: Path) -> None:
    suite(tmp_path, scorers=["vowels"])
    run(tmp_path)
    assert run_cli(tmp_path, "report", "RUN", "-f", "acme").out == "ACME: 2 answers, 100% passed\n"
    assert run_cli(tmp_path, "report", "RUN", "-f", "acme", "-o", "line.txt").code == 0
    assert (tmp_path / "line.txt").read_text() == "ACME: 2 answers, 100% passed\n"


def test_the_samples_hook_is_used_by_name(tmp_path: Path, acme: Path) -> None:
    suite(tmp_path, scorers=["vowels"], hooks=[{"acme": {"file": str(tmp_path / "tally.txt")}}])
    assert run(tmp_path).code == 0
    assert (tmp_path / "tally.txt").read_text() == "0 errors\n"


def test_a_report_format_may_return_bytes_and_is_named_when_it_fails(tmp_path: Path, acme: Path) -> None:
    (acme / "other.py").write_text(
        "def packed(result): return bytes([0, 255])\n"
        "def fails(result): raise KeyError('x')\n"
        "def odd(result): return 5\n"
    )
    places = {name: f"other:{name}" for name in ("packed", "fails", "odd")}
    note_package(acme, "steelyard-other", {"steelyard.reports": places})
    suite(tmp_path)
    run(tmp_path)
    assert run_cli(tmp_path, "report", "RUN", "-f", "packed", "-o", "out.bin").code == 0
    assert (tmp_path / "out.bin").read_bytes() == bytes([0, 255])
    for name, said in (("fails", "failed on RUN: KeyError"), ("odd", "must return text or bytes, got int")):
        ended = run_cli(tmp_path, "report", "RUN", "-f", name)
        assert (ended.code, f"the report format '{name}' {said}" in ended.err) == (2, True), ended.err


def test_a_judge_in_a_suite_uses_a_plugins_prompt(tmp_path: Path, acme: Path) -> None:
    judge = {"judge": {"model": "j", "prompt": "acme_v1"}}
    built = build_suite(suite(tmp_path, scorers=[judge]))
    assert built.scorers[0].by.startswith("j/acme_v1@")  # type: ignore[attr-defined]


def test_a_plugins_prompt_may_be_a_template_alone(site: Path) -> None:
    (site / "words.py").write_text("SHORT = 'Is {{ answer }} short?'\nNUMBER = 5\nWRONG = '{{ answr }}'\n")
    places = {"short_v1": "words:SHORT", "number_v1": "words:NUMBER", "wrong_v1": "words:WRONG"}
    note_package(site, "steelyard-words", {"steelyard.prompts": places})
    target = CallableTarget(lambda case: "", model_id="j")
    assert Judge(model="j", target=target, prompt="short_v1").by.startswith("j/short_v1@")
    with pytest.raises(ConfigurationError, match="the prompt 'number_v1' must be a Prompt or a template, got int"):
        Judge(model="j", target=target, prompt="number_v1")
    with pytest.raises(ConfigurationError, match="answr"):
        Judge(model="j", target=target, prompt="wrong_v1")


@pytest.mark.parametrize(
    ("keys", "nearest", "listed"),
    [
        ({"target": {"acmee": {"model": "m"}}}, "'acme'", "bedrock, acme"),
        ({"scorers": ["vowls"]}, "'vowels'", "python, vowels"),
        ({"scorers": [{"judge": {"model": "j", "prompt": "acme_v2"}}]}, "'acme_v1'", "following_v1, acme_v1"),
    ],
)
def test_an_unknown_name_is_refused_with_the_nearest_and_all_plugins(
    tmp_path: Path, acme: Path, keys: dict[str, Any], nearest: str, listed: str
) -> None:
    suite(tmp_path, **keys)
    ended = run(tmp_path)
    assert ended.code == 2
    assert f"did you mean {nearest}?" in ended.err
    assert listed in ended.err


def test_an_unknown_report_format_is_refused_with_all_that_there_are(tmp_path: Path, acme: Path) -> None:
    ended = run_cli(tmp_path, "report", "RUN", "-f", "acne")
    assert ended.code == 2
    assert "no report format is named 'acne'; did you mean 'acme'?" in ended.err
    assert "junit, acme" in ended.err


def test_a_broken_plugin_is_named_and_breaks_nothing_else(tmp_path: Path, acme: Path) -> None:
    (acme / "broken.py").write_text("import a_module_that_is_not_there\n")
    note_package(acme, "steelyard-broken", {"steelyard.scorers": {"bad": "broken:Bad", "gone": "steelyard_acme:Gone"}})
    suite(tmp_path, scorers=["vowels"])
    assert run(tmp_path).code == 0
    suite(tmp_path, scorers=["bad"])
    ended = run(tmp_path, "--force")
    assert ended.code == 2
    assert "the scorer 'bad' of steelyard-broken 1.0 cannot be loaded (broken:Bad): ModuleNotFoundError" in ended.err
    environment = {"PYTHONPATH": f"{acme}:{':'.join(sys.path)}"}
    assert finish(start(tmp_path, "--help", **environment)).code == 0
    listing = finish(start(tmp_path, "plugins", **environment))
    assert listing.code == 0, listing.err
    assert "vowels       steelyard_acme:Vowels, of steelyard-acme 1.0" in listing.out
    assert "cannot be used: the scorer 'bad' of steelyard-broken 1.0" in listing.out
    assert "cannot be used: the scorer 'gone' of steelyard-broken 1.0" in listing.out
    assert max(map(len, listing.out.splitlines())) <= 80
    assert "steelyard.scoring.judge.prompts:INSTRUCTION_FOLLOWING_V1\n" in listing.out


def test_the_list_says_of_everything_where_it_came_from(tmp_path: Path, acme: Path) -> None:
    ended = run_cli(tmp_path, "plugins", "--json")
    assert ended.code == 0, ended.err
    listed = {(row["kind"], row["name"]): row for row in json.loads(ended.out)}
    assert {(kind, name) for kind in KINDS for name in names(kind)} == set(listed)
    ours = listed["stores", "acme"]
    assert (ours["package"], ours["version"], ours["object"]) == ("steelyard-acme", "1.0", "steelyard_acme:OneFile")
    assert listed["targets", "simulated"]["package"] == "steelyard"
    assert all(row["problem"] is None for row in listed.values())


def test_a_built_in_name_cannot_be_taken_and_two_packages_cannot_share_one(site: Path) -> None:
    for package in ("steelyard-one", "steelyard-two"):
        note_package(site, package, {"steelyard.scorers": {"exact": "json:dumps", "same": "json:dumps"}})
    assert find("scorers", "exact").__module__ == "steelyard.scoring.text"
    with pytest.raises(ConfigurationError, match="'same' is added by steelyard-one and steelyard-two"):
        find("scorers", "same")
    problems = {plugin.name: plugin.problem for plugin in plugins_of("scorers") if plugin.package != "steelyard"}
    assert problems["exact"] == "the built-in scorer of that name is used"
    assert "is added by" in (problems["same"] or "")


def test_a_hook_is_found_by_name(site: Path) -> None:
    (site / "told.py").write_text("def tell(): pass\n")
    note_package(site, "steelyard-told", {"steelyard.hooks": {"tell": "told:tell"}})
    assert find("hooks", "tell").__name__ == "tell"
    with pytest.raises(ConfigurationError, match="no hook is named 'shout'; known here: mlflow, webhook, tell"):
        find("hooks", "shout")


def test_what_a_class_takes_is_known_by_its_signature() -> None:
    def fixed(a: int, *rest: int, b: int = 1) -> None: ...

    def anything(**more: int) -> None: ...

    assert (takes(fixed), takes(anything), takes(Prompt)) == (
        ["a", "b"],
        None,
        ["name", "task", "template", "needs", "pairwise"],
    )


OWN = '''
from dataclasses import dataclass

from steelyard import InvocationResponse, Score


@dataclass
class Short:
    """As short as a scorer can be written."""

    most: int = 3

    def score(self, case, response):
        return Score("", float(len(response.response_text) <= self.most))


class Whole:
    name = "whole"

    def __init__(self, most=3):
        self.most = most

    def identity(self):
        return {"most": self.most}

    def score(self, case, response):
        return Score("whole", float(len(response.response_text) <= self.most))


class Called:
    def __init__(self, most=3):
        self.most = most

    def __call__(self, case, response):
        return len(response.response_text) <= self.most


def short(case, response):
    return len(response.response_text) <= 3


class Echo:
    model_id = "echo"
    default_parallelism = 2

    def __init__(self, model="none", suffix=""):
        self.model, self.suffix = model, suffix

    def identity(self):
        return {"model": self.model, "suffix": self.suffix}

    async def invoke(self, case, context):
        return InvocationResponse(response_text=case.prompt + self.suffix)


class Plain:
    def __init__(self, suffix=""):
        self.suffix = suffix

    def __call__(self, case):
        return case.prompt + self.suffix


class Fails:
    def __init__(self):
        raise KeyError("no such thing")


class Memory:
    kept = {}

    def __init__(self, place=""):
        self.place = place

    def get(self, eval_set_id, case_id, key):
        return self.kept.get((self.place, eval_set_id, case_id, key))

    def put(self, eval_set_id, case_id, key, response):
        self.kept[self.place, eval_set_id, case_id, key] = response


ready = Echo()
'''

SCORERS: dict[str, tuple[Any, str]] = {
    "a class in a file": ({"python": "own.py:Short"}, "Short"),
    "a class in a module": ({"python": "own:Whole"}, "whole"),
    "a class with arguments": ({"python": {"class": "own.py:Short", "most": 5}}, "Short"),
    "a class in a module with arguments": ({"python": {"class": "own:Whole", "most": 5}}, "whole"),
    "a class that can be called": ({"python": {"class": "own.py:Called", "most": 5}}, "Called"),
    "a class by its place alone": ("own.py:Whole", "whole"),
    "a class by its place with arguments": ({"own.py:Whole": {"most": 5}}, "whole"),
    "a function with a name": ({"python": {"function": "own.py:short", "name": "brief"}}, "brief"),
    "a function": ({"python": "own.py:short"}, "short"),
}


@pytest.mark.parametrize(("scorer", "name"), SCORERS.values(), ids=SCORERS)
def test_classes_and_functions_of_ones_own_are_scorers_in_a_suite(tmp_path: Path, scorer: Any, name: str) -> None:
    (tmp_path / "own.py").write_text(OWN)
    suite(tmp_path, target={"python": "own.py:Echo"}, scorers=[scorer])
    ended = run(tmp_path, "--json")
    assert ended.code == 0, ended.err
    score = json.loads(ended.out)["scores"][name]
    most = 5 if "5" in str(scorer) else 3
    assert score["passed"] == (2 if most == 5 else 1)


TARGETS: dict[str, tuple[Any, str]] = {
    "a class": ({"python": "own.py:Echo"}, "zzz"),
    "a class with arguments": ({"python": {"class": "own.py:Echo", "suffix": "!"}}, "zzz!"),
    "a class that can be called": ({"python": {"class": "own:Plain", "suffix": "?"}}, "zzz?"),
    "a class by its place": ({"own.py:Echo": {"suffix": "."}}, "zzz."),
    "a target": ({"python": "own.py:ready"}, "zzz"),
}


@pytest.mark.parametrize(("target", "said"), TARGETS.values(), ids=TARGETS)
def test_classes_of_ones_own_are_targets_in_a_suite(tmp_path: Path, target: Any, said: str) -> None:
    (tmp_path / "own.py").write_text(OWN)
    suite(tmp_path, target=target)
    ended = run(tmp_path)
    assert ended.code == 0, ended.err
    lines = [json.loads(line) for line in (tmp_path / "RUN" / "outputs.jsonl").read_bytes().splitlines()]
    assert said in {line["response_text"] for line in lines}


@pytest.mark.parametrize("target", [{"python": "own.py:Echo"}, {"python": {"class": "own.py:Echo", "suffix": "!"}}])
def test_the_model_of_a_class_of_ones_own_can_be_changed(tmp_path: Path, target: Any) -> None:
    (tmp_path / "own.py").write_text(OWN)
    suite(tmp_path, target=target)
    assert run(tmp_path, "-m", "other").code == 0
    assert json.loads((tmp_path / "RUN" / "run.json").read_bytes())["target"]["model"] == "other"


@pytest.mark.parametrize(
    ("keys", "words", "named"),
    [
        ({"target": {"python": {"class": "own.py:Echo", "sufix": 1}}}, [], ["target.python.sufix", "'suffix'"]),
        (
            {"target": {"python": {"function": "own.py:ready", "model": 1}}},
            [],
            ["target.python.model", "known here: f"],
        ),
        ({"target": {"python": {"model": "m"}}}, [], ["target.python takes a class or a function"]),
        ({"target": {"python": {"class": "own.py:Fails"}}}, [], ["target.python", "KeyError", "no such thing"]),
        ({"target": {"python": {"class": "own.py:Short"}}}, [], ["target.python", "a target must be"]),
        ({"target": {"python": "own.py:Plain"}}, ["-m", "x"], ["python does not take model: --model cannot change it"]),
        ({"target": "simulated"}, ["--base-url", "http://x"], ["simulated does not take base_url"]),
        ({"scorers": [{"python": {"class": "own.py:Whole", "mots": 1}}]}, [], ["scorers[0].python.mots", "'most'"]),
        (
            {"scorers": [{"python": {"class": "own.py:Plain"}}, "own.py:Fails"]},
            [],
            ["scorers[1].own.py:Fails: KeyError"],
        ),
        ({"scorers": [{"own.py:ready": {"most": 1}}]}, [], ["scorers[0]", "most"]),
    ],
)
def test_what_is_wrong_with_a_class_of_ones_own_is_named(
    tmp_path: Path, keys: dict[str, Any], words: list[str], named: list[str]
) -> None:
    (tmp_path / "own.py").write_text(OWN)
    suite(tmp_path, **{"target": "simulated", **keys})
    ended = run(tmp_path, *words)
    assert ended.code == 2, ended.err
    assert "Traceback" not in ended.err
    for word in named:
        assert word in ended.err


def test_an_object_with_a_score_method_is_known_by_its_class_and_what_it_holds(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(OWN)

    def identity(most: int) -> dict[str, Any]:
        scorer = {"python": {"class": "own.py:Short", "most": most}}
        return dict(build_suite(suite(tmp_path, target="simulated", scorers=[scorer])).scorers[0].identity())

    assert identity(3) == identity(3)
    assert identity(3) != identity(4)
    assert identity(4)["arguments"] == {"most": 4}


@pytest.mark.parametrize("cache", ["own.py:Memory", "own:Memory", "own:Memory:somewhere"])
@pytest.mark.parametrize("place", ["flag", "suite"])
def test_a_store_class_of_ones_own_is_used_and_makes_no_folder(tmp_path: Path, cache: str, place: str) -> None:
    (tmp_path / "own.py").write_text(OWN)
    folder = tmp_path if place == "flag" else tmp_path / "elsewhere"
    folder.mkdir(exist_ok=True)
    keys = {"run": {"cache": cache}} if place == "suite" else {}
    suite(tmp_path, target={"python": "own.py:Echo"}, **keys)
    words = ["--cache", cache] if place == "flag" else []
    ended = run_cli(folder, "run", str(tmp_path / "suite.yaml"), "--no-progress", "--out", "RUN", *words)
    assert ended.code == 0, ended.err
    assert {entry.name for entry in folder.iterdir()} - {"own.py", "suite.yaml", "__pycache__", "elsewhere"} == {"RUN"}


@pytest.mark.parametrize(
    ("cache", "said"),
    [
        ("acmee:answers.db", ["no store is named 'acmee'", "did you mean 'acme'?", "written ./acmee:answers.db"]),
        ("nowhere.at_all:Store", ["nowhere.at_all cannot be imported", "files, sqlite, acme"]),
        ("redis://host/1", ["no store is named 'redis'", "known here: files, sqlite, acme"]),
        ("json:dumps", ["json:dumps"]),
    ],
)
def test_a_cache_that_looks_like_a_store_but_is_none_is_refused_and_makes_no_folder(
    tmp_path: Path, acme: Path, cache: str, said: list[str]
) -> None:
    suite(tmp_path)
    ended = run(tmp_path, "--cache", cache)
    assert ended.code == 2, ended.err
    for word in said:
        assert word in ended.err
    assert {entry.name for entry in tmp_path.iterdir()} <= {"site", "suite.yaml"}


def test_a_folder_with_a_colon_in_its_name_is_written_with_a_slash_before_it(tmp_path: Path) -> None:
    suite(tmp_path, target="simulated")
    assert run(tmp_path, "--cache", "./a:b").code == 0
    assert (tmp_path / "a:b").is_dir()


def test_built_in_stores_have_names_too(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    suite(tmp_path / "deep", target="simulated", run={"cache": "sqlite:kept"})
    assert run_cli(tmp_path, "run", "deep/suite.yaml", "--no-progress", "--out", "RUN").code == 0
    assert (tmp_path / "deep" / "kept").is_file()
    assert "2 answers" in run_cli(tmp_path, "cache", "info", "sqlite:deep/kept").out
    assert run_cli(tmp_path, "cache", "info", "sqlite:gone").code == 2
    assert not (tmp_path / "gone").exists()


def test_a_sweep_refuses_two_models_instead_of_taking_the_last(tmp_path: Path) -> None:
    suite(tmp_path, target={"simulated": {"model": "m"}})
    ended = run_cli(tmp_path, "sweep", "-j", "1", "suite.yaml", "-m", "a", "-m", "b")
    assert ended.code == 2
    assert "a sweep asks one model, got a, b" in ended.err


def test_python_m_steelyard_is_the_command_line() -> None:
    ended = subprocess.run(
        [sys.executable, "-m", "steelyard", "--version"], capture_output=True, text=True, timeout=60, check=False
    )
    assert ended.stdout.startswith("steelyard, version ")
