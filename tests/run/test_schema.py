"""The JSON Schemas: valid, complete, true of every suite and run in the examples, and strict about mistakes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from steelyard import EvalCase, EvalSet, Runner
from steelyard.plugins import BUILT_IN
from steelyard.run.config import RUN_KEYS, Gate
from steelyard.run.schema import SCHEMAS, metrics_schema, record_schema, suite_schema
from steelyard.suite.suite_file import KEYS
from tests.support.cli import run_cli

jsonschema = pytest.importorskip("jsonschema")

ROOT = Path(__file__).parents[2]
SUITES = sorted(
    path for folder in ("examples", "src/steelyard/starter") for path in (ROOT / folder).rglob("*.yaml")
    if "cases" in (yaml.safe_load(path.read_text()) or {})
)  # fmt: skip


def problems(schema: dict[str, object], value: object) -> list[str]:
    return [error.message for error in jsonschema.Draft202012Validator(schema).iter_errors(value)]


@pytest.mark.parametrize("name", SCHEMAS)
def test_a_schema_is_a_schema(name) -> None:
    jsonschema.Draft202012Validator.check_schema(SCHEMAS[name]())


@pytest.mark.parametrize("path", SUITES, ids=lambda path: path.name)
def test_the_suites_of_the_examples_are_valid(path) -> None:
    assert problems(suite_schema(), yaml.safe_load(path.read_text())) == []


def test_every_key_of_a_suite_is_in_it_and_says_what_it_is() -> None:
    schema = suite_schema()
    assert list(schema["properties"]) == list(KEYS)
    assert [key for key in KEYS if not schema["properties"][key].get("description")] == []
    assert set(schema["properties"]["run"]["properties"]) == set(RUN_KEYS)
    assert set(schema["properties"]["gate"]["properties"]) == set(Gate.__struct_fields__)
    for kind, key in (("targets", "target"), ("scorers", "scorers"), ("hooks", "hooks")):
        named = schema["properties"][key]
        named = named["items"] if key != "target" else named
        assert set(named["anyOf"][1]["properties"]) == set(BUILT_IN[kind])
    helps = {field: schema["properties"]["run"]["properties"][field]["description"] for field in RUN_KEYS}
    assert all(helps.values())


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"scorer": ["exact"]}, "scorer"),
        ({"run": {"parallellism": 3}}, "parallellism"),
        ({"target": {"openai-chat": {"modle": "m"}}}, "modle"),
        ({"gate": {"min_pass_rate": "high"}}, "high"),
        ({"scorers": "exact"}, "exact"),
        ({"workspace": {"kep": "all"}}, "kep"),
    ],
)
def test_a_mistake_is_found(change, said) -> None:
    suite = {"target": "simulated", "cases": [{"prompt": "?"}], **change}
    assert said in " ".join(problems(suite_schema(), suite))


def test_what_suites_may_say_in_several_ways_is_allowed() -> None:
    suite = {
        "id": 7,
        "target": {"openai-chat": {"model": "m", "parallelism": "${N}", "params": {"temperature": 0}}},
        "cases": "cases.jsonl",
        "scorers": [
            "exact",
            {"contains": {"whole_words": True, "timeout": "3s"}},
            {"judge": {"model": "j", "prompt": "correctness_v1", "when": "failed"}},
            {"acme": {"any": "argument"}},
            {"python": "checks.py:polite"},
        ],
        "run": {"parallelism": "auto", "timeout": "2m", "rate": "60/min", "cache": ".cache"},
        "gate": {"min_pass_rate": 0.8, "rules": ["cost<2"]},
    }
    assert problems(suite_schema(), suite) == []


def test_the_files_of_a_run_are_as_the_schemas_say(tmp_path) -> None:
    def answer(case: EvalCase) -> str:
        if case.id == "b":
            raise ValueError("no")
        return "x"

    cases = [EvalCase(id=name, prompt="?", expected="x", metadata={"k": name}) for name in "abc"]
    Runner(answer, EvalSet("s", cases), ["exact"], trials=2, progress="off", output_path=tmp_path, retries=0).run_sync()
    assert problems(metrics_schema(), json.loads((tmp_path / "metrics.json").read_bytes())) == []
    for line in (tmp_path / "outputs.jsonl").read_text().splitlines():
        record = json.loads(line)
        record.pop("crc32")
        assert problems(record_schema(), record) == []


def test_the_command_prints_them(tmp_path) -> None:
    for name in SCHEMAS:
        ended = run_cli(tmp_path, "schema", name)
        assert ended.code == 0
        assert json.loads(ended.out)["title"].startswith("Steelyard")
    assert json.loads(run_cli(tmp_path, "schema").out)["title"] == "Steelyard suite"
    assert run_cli(tmp_path, "schema", "other").code == 2
