"""Extract before a scorer: what is found, what is said of it, and that an answer without it fails."""

from __future__ import annotations

import asyncio
import pickle
from pathlib import Path
from typing import Any

import pytest

from steelyard import EvalCase, EvalSet, InvocationResponse, Runner, Score
from steelyard.errors import ConfigurationError, SuiteError
from steelyard.patterns import PatternTimeout
from steelyard.run.config import build_suite
from steelyard.scoring import Exact, FunctionScorer, extracting
from steelyard.scoring.base import run_scorers
from steelyard.scoring.extract import Extract
from steelyard.scoring.judge.judge import Judge
from steelyard.targets import CallableTarget

ANSWER = """First I think: Answer: 17.
```json
{"answer": {"values": [1, 2, "three"]}, "ok": true}
```
Some more.
```python
print(1)
```
Answer: 18

"""


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ({"pattern": "Answer: (\\d+)"}, "17"),
        ({"pattern": "Answer: (\\d+)", "take": "last"}, "18"),
        ({"pattern": "answer: (\\d+)$", "ignore_case": True}, None),
        ({"pattern": "(?m)answer: (\\d+)$", "ignore_case": True}, "18"),
        ({"pattern": "(?:x(y))|(m)ore"}, "m"),
        ({"pattern": "Some \\w+"}, "Some more"),
        ({"json": "answer.values.2"}, "three"),
        ({"json": "answer.values.-1"}, "three"),
        ({"json": "answer.values"}, '[1,2,"three"]'),
        ({"json": "ok"}, "true"),
        ({"json": "answer.none"}, None),
        ("last_line", "Answer: 18"),
        ({"last_line": True}, "Answer: 18"),
        ("code_block", '{"answer": {"values": [1, 2, "three"]}, "ok": true}'),
        ({"code_block": True, "take": "last"}, "print(1)"),
        ({"code_block": "Python"}, "print(1)"),
        ({"code_block": "rust"}, None),
        (["last_line", {"pattern": "\\d+"}], "18"),
        ([{"code_block": "json"}, {"json": "answer.values.0"}], "1"),
        ([{"code_block": "rust"}, "last_line"], None),
    ],
)
def test_what_is_found(given: Any, found: str | None) -> None:
    extract = Extract(given)
    assert extract.of(ANSWER)[0] == found
    assert pickle.loads(pickle.dumps(extract.identity())) == extract.identity()


def test_an_open_code_block_goes_to_the_end_and_a_longer_fence_holds_shorter_ones() -> None:
    assert Extract("code_block").of("x\n```py\na\nb")[0] == "a\nb"
    assert Extract("code_block").of("````\n```\ninner\n```\n````\n")[0] == "```\ninner\n```"
    assert Extract("last_line").of(" \n\t\n")[0] is None
    assert Extract("code_block").of("no block")[0] is None


@pytest.mark.parametrize(
    "given",
    [[], "first_line", {}, {"pattern": "("}, {"pattern": 3}, {"json": True}, {"last_line": "x"}, {"code_block": 1},
     {"pattern": "a", "json": "b"}, {"pattern": "a", "take": "middle"}, {"json": "a", "ignore_case": True},
     {"pattern": "a", "ignore_case": "no"}, {"patern": "a"}, 3, None],
)  # fmt: skip
def test_what_cannot_be_extracted_is_refused(given: Any) -> None:
    with pytest.raises(ConfigurationError):
        Extract(given)


def test_a_pattern_that_backtracks_is_a_scoring_error() -> None:
    with pytest.raises(PatternTimeout):
        Extract({"pattern": "(a|aa)+$", "take": "last"}).of("a" * 60 + "b")


def scores(scorer: Any, text: str, expected: Any = "18") -> list[Score]:
    case = EvalCase(id="c", prompt="?", expected=expected)
    return asyncio.run(run_scorers([scorer], case, InvocationResponse(response_text=text)))


LAST = {"pattern": "Answer: (.*)", "take": "last"}


def test_the_part_is_scored_and_is_in_the_score() -> None:
    (score,) = scores(extracting(Exact(), LAST), ANSWER)
    assert (score.name, score.passed, score.extracted) == ("exact", True, "18")
    (score,) = scores(extracting(Exact(), LAST), "Answer: 19")
    assert (score.passed, score.extracted) == (False, "19")


def test_an_answer_without_it_fails_with_the_reason() -> None:
    (score,) = scores(extracting(Exact(), LAST), "I do not know.")
    assert (score.value, score.passed, score.errors) == (0.0, False, [])
    assert score.reason == "the answer has no match of 'Answer: (.*)': 'I do not know.'"
    assert scores(extracting(Exact(), LAST), "I do not know.", expected=None) == []


async def later(case: EvalCase, response: InvocationResponse) -> float:
    await asyncio.sleep(0)
    return float(response.response_text == "18")


def both(case: EvalCase, response: InvocationResponse) -> list[Score]:
    return [Score("words", len((response.response_text or "").split()), unit="words"), Score("kind", label="x")]


def test_functions_get_the_part_too() -> None:
    (score,) = scores(extracting(FunctionScorer(later), LAST), ANSWER)
    assert (score.passed, score.extracted) == (True, "18")
    assert [one.extracted for one in scores(extracting(both, "last_line"), ANSWER)] == ["Answer: 18"] * 2
    (score,) = scores(extracting(FunctionScorer(later), LAST), "nothing")
    assert score.passed is False


def test_what_was_extracted_changes_how_a_case_is_graded(tmp_path: Path) -> None:
    asked: list[str] = []

    def target(case: EvalCase) -> str:
        asked.append(case.id)
        return ANSWER

    suite = EvalSet("s", [EvalCase(id="c", prompt="?", expected="18")])
    one = Runner(target, suite, [extracting(Exact(), LAST)], progress="off", output_path=tmp_path / "run").run_sync()
    assert one.pass_rate == 1.0
    again = Runner(
        target, suite, [extracting(Exact(), {"pattern": "Answer: (.*)"})], progress="off", output_path=tmp_path / "run"
    ).run_sync(if_complete="update")
    assert (again.pass_rate, asked) == (0.0, ["c"])
    assert again.responses[0].scores[0].extracted == "17."


def test_a_judge_sees_the_part_alone(tmp_path: Path) -> None:
    seen: list[str] = []

    def judge_model(case: EvalCase) -> str:
        seen.append(str(case.prompt or case.messages))
        return '{"score": 1.0, "passed": true, "reason": "right"}'

    judge = extracting(Judge(model="m", target=CallableTarget(judge_model)), LAST)
    suite = EvalSet("s", [EvalCase(id="a", prompt="?", expected="18"), EvalCase(id="b", prompt="?", expected="18")])
    result = Runner(lambda case: ANSWER if case.id == "a" else "none", suite, [judge], progress="off").run_sync()
    assert [record.passed for record in result.responses] == [True, False]
    assert "has no match" in (result.responses[1].scores[0].reason or "")
    assert len(seen) == 1
    assert "print(1)" not in seen[0]


SUITE = """
target: {{simulated: {{}}}}
cases: [{{prompt: "2+2", expected: "4"}}]
scorers:
  - {scorer}
"""


def built(tmp_path: Path, scorer: str) -> Any:
    (tmp_path / "s.yaml").write_text(SUITE.format(scorer=scorer))
    (tmp_path / "mine.py").write_text("def half(case, response):\n    return 0.5\n")
    return build_suite(tmp_path / "s.yaml").scorers[0]


@pytest.mark.parametrize(
    "scorer",
    [
        "exact: {extract: last_line, ignore_case: true}",
        "number: {extract: {pattern: 'A: (.*)'}}",
        "python: {function: mine.py:half, extract: code_block}",
        "python: {function: mine.py:half, extract: code_block, timeout: 5, retries: 0}",
        "json_match: {extract: [code_block, {json: a}]}",
    ],
)
def test_any_scorer_of_a_suite_file_takes_it(tmp_path: Path, scorer: str) -> None:
    assert "extract" in built(tmp_path, scorer).identity()


def test_a_mistake_names_its_place(tmp_path: Path) -> None:
    with pytest.raises(SuiteError, match=r"scorers\[0\].exact: extract takes last_line"):
        built(tmp_path, "exact: {extract: {patern: x}}")
