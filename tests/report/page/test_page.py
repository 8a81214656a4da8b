"""The HTML report without a browser: one safe file that holds what the records say, in bounded memory."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from steelyard import EvalCase, EvalSet, Runner
from steelyard.journal.manifest import read_manifest
from steelyard.records import Score
from steelyard.report.case import turns
from steelyard.report.headline import notices
from steelyard.report.html import asset, script_json
from steelyard.report.page.data import text_limit
from steelyard.report.page.page import SCRIPTS, histogram, over_time, page, points
from steelyard.report.records import Expectations, RunRecords, open_suite
from steelyard.run.result import Result
from tests.support.journal import a_record, write_journal
from tests.support.metrics import typed
from tests.support.report import HOSTILE, Elements, PageData, agent_run, hostile_run, large_run


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> PageData:
    return PageData("".join(page(hostile_run(tmp_path_factory.mktemp("hostile") / "run"))))


@pytest.fixture(scope="module")
def agents(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return agent_run(tmp_path_factory.mktemp("agents") / "run")


# Safety


def test_the_policy_allows_this_script_and_this_style_and_nothing_else(hostile: PageData) -> None:
    found = Elements(hostile.text)
    (policy,) = [attrs["content"] for tag, attrs in found.tags if attrs.get("http-equiv") == "Content-Security-Policy"]
    assert policy is not None
    rules = dict(rule.strip().split(" ", 1) for rule in policy.split(";"))
    assert rules["default-src"] == "'none'"
    assert "unsafe" not in policy
    for kind in ("script", "style"):
        allowed = [text for text in found.inside[kind] if f"'sha256-{_digest(text)}'" == rules[f"{kind}-src"]]
        assert len(allowed) == 1, kind


def _digest(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def test_hostile_texts_add_no_element_and_no_attribute(hostile: PageData, tmp_path: Path) -> None:
    write_journal(tmp_path, [a_record(id=str(number), index=number) for number in range(len(HOSTILE))])
    tame = Elements("".join(page(tmp_path)))
    shape = [(tag, sorted(attrs)) for tag, attrs in Elements(hostile.text).tags]
    assert shape == [(tag, sorted(attrs)) for tag, attrs in tame.tags]


def test_a_hostile_suite_id_and_directory_add_nothing_either(tmp_path: Path) -> None:
    name = "</title></noscript><script>window.ran = 1<|script> \u202e&amp;"
    shapes = []
    for folder, suite_id in ((tmp_path / name, name), (tmp_path / "tame", "tame")):
        run = run_of(folder, EvalSet(suite_id, [EvalCase(id="a", prompt="?")]))
        shapes.append([(tag, sorted(attrs)) for tag, attrs in Elements("".join(page(run))).tags])
    assert shapes[0] == shapes[1]


def test_the_page_names_no_other_address(hostile: PageData) -> None:
    linked = [
        value for _, attrs in Elements(hostile.text).tags for name, value in attrs.items() if name in ("src", "href")
    ]
    assert [value for value in linked if not str(value).startswith(("data:", "#"))] == []
    assert "url(" not in asset("page.css")
    assert "@import" not in asset("page.css")


def test_the_scripts_never_turn_text_into_markup() -> None:
    program = "".join(asset(name) for name in SCRIPTS)
    for word in (
        "innerHTML",
        "outerHTML",
        "insertAdjacentHTML",
        "document.write",
        "eval(",
        "new Function",
        "DOMParser",
    ):
        assert word not in program
    assert not re.search(r"\b(fetch|XMLHttpRequest|WebSocket|EventSource|import)\s*\(", program)


@given(
    st.recursive(
        st.text() | st.none() | st.booleans(), lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner)
    )
)
def test_json_in_a_script_element_reads_back_and_cannot_end_it(value: object) -> None:
    text = script_json(value)
    assert json.loads(text) == json.loads(json.dumps(value))
    assert text.isascii()
    assert not re.search(r"[<>&]", text)


def test_every_hostile_text_is_in_the_data_as_it_was(hostile: PageData) -> None:
    assert hostile.columns("id") == [f"{number} {text}" for number, text in enumerate(HOSTILE)]
    for number, body in enumerate(hostile.bodies()):
        assert (body["answer"] if number % 3 != 2 else body["error"]).removeprefix("Broken: ") == HOSTILE[number]


# What it holds


def test_the_columns_and_bodies_are_those_of_the_records(agents: Path) -> None:
    data = PageData("".join(page(agents)))
    records = list(RunRecords(agents))
    assert data.columns("id") == [record.id for _, record in records]
    assert data.columns("trial") == [record.trial for _, record in records]
    assert data.columns("last") == [
        None if record.time_to_last_token is None else pytest.approx(record.time_to_last_token, rel=1e-4)
        for _, record in records
    ]
    lines = (agents / "outputs.jsonl").read_bytes()
    for body, (_, record) in zip(data.bodies(), records, strict=True):
        assert json.loads(lines[body["offset"] :].split(b"\n")[0])["id"] == record.id
        assert body["answer"] == record.response_text
        assert [score["name"] for score in body["scores"]] == [score.name for score in record.scores]


def test_a_body_has_the_conversation_the_tools_and_what_was_expected(agents: Path) -> None:
    data = PageData("".join(page(agents)))
    body = data.bodies()[data.columns("id").index("wrong")]
    assert [turn["role"] for turn in body["turns"]] == ["system", "user", "assistant", "tool", "assistant"]
    assert body["turns"][2]["calls"] == [{"name": "look_up", "arguments": '{\n  "query": "capital"\n}', "id": "c1"}]
    assert body["turns"][-1] == {"role": "assistant", "is_answer": True}
    assert body["expected"] == ["The wrong answer is Paris"]
    assert "edited" not in body
    judged = next(score for score in body["scores"] if score["name"] == "judge")
    assert len(judged["samples"]) == 3
    assert judged["escalated"]
    assert judged["std_dev"] is not None


@pytest.mark.parametrize(
    ("expected", "shown"),
    [
        ("Paris", ["Paris"]),
        (["Paris", "paris"], ["Paris", "paris"]),
        ([], ["[]"]),
        ([1, 2], ["[\n  1,\n  2\n]"]),
        ({"city": "Paris"}, ['{\n  "city": "Paris"\n}']),
        (0, ["0"]),
        ("lone \ud800", ["lone ?"]),
    ],
    ids=["text", "several texts", "an empty list", "a list", "an object", "zero", "a lone surrogate"],
)
def test_whatever_was_expected_is_shown_as_text(tmp_path: Path, expected: object, shown: list[str]) -> None:
    suite = EvalSet("s", [EvalCase(id="a", prompt="?", expected=expected)])
    run = run_of(tmp_path, suite)
    assert PageData("".join(page(run, suite))).bodies()[0]["expected"] == shown


def test_a_count_of_zero_is_shown_and_what_is_not_known_is_not(tmp_path: Path) -> None:
    write_journal(tmp_path, [a_record(num_tokens_output=0, num_tokens_input=None)])
    facts = PageData("".join(page(tmp_path))).bodies()[0]["facts"]
    assert facts["num_tokens_output"] == 0
    assert "num_tokens_input" not in facts
    assert "cached" not in facts


def test_the_counts_of_the_page_are_those_of_the_metrics(agents: Path) -> None:
    data = PageData("".join(page(agents)))
    metrics = data.overview["metrics"]
    counts = data.overview["counts"]
    assert counts["passed"] == metrics["passed"]
    assert counts["error"] == metrics["counts"]["error"]
    assert sum(counts.values()) == metrics["n"]


def test_a_long_text_is_cut_and_its_length_told(tmp_path: Path) -> None:
    long = "x" * 200_000
    write_journal(tmp_path, [a_record(response_text=long, input_prompt=long, scores=[Score("s", 0.0, False, long)])])
    data = PageData("".join(page(tmp_path)))
    (body,) = data.bodies()
    limit = text_limit(1)
    assert body["answer"] == ["x" * limit, 200_000]
    assert body["scores"][0]["reason"] == ["x" * limit, 200_000]
    assert len(data.text) < 150_000


def test_the_more_cases_the_shorter_the_texts_within_reason() -> None:
    limits = [text_limit(count) for count in (0, 1, 1_000, 50_000, 10**7)]
    assert limits == sorted(limits, reverse=True)
    assert limits[-1] >= 1_000


def test_an_empty_run_has_a_page(tmp_path: Path) -> None:
    write_journal(tmp_path, [])
    data = PageData("".join(page(tmp_path)))
    assert data.columns("id") == []
    assert data.overview["chunks"] == []
    assert data.overview["charts"]["first"] is None


def test_writing_a_page_takes_memory_that_hardly_grows(tmp_path: Path) -> None:
    """An answer has 4 KB: to hold them would take more than ten times what is allowed here."""
    peaks = []
    for count in (600, 1_800):
        run = large_run(tmp_path / str(count), count, text="word " * 800)
        (run / "metrics.json").write_text(json.dumps({**Result.load(run).metrics, "complete": True}))
        written = 0
        tracemalloc.start()
        for piece in page(run):
            written += len(piece)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert (peaks[1] - peaks[0]) / 1_200 < 300


# What was expected


def suite_of(*names: str, change: dict[str, str] | None = None, expected: str = "x") -> EvalSet:
    change = change or {}
    return EvalSet(
        "s", [EvalCase(id=name, prompt=change.get(name, name), expected=f"{name} {expected}") for name in names]
    )


def run_of(folder: Path, suite: EvalSet, **options: object) -> Path:
    Runner(lambda case: case.id, suite, ["exact"], output_path=folder, progress="off", **options).run_sync()
    return folder


def found(run: Path, suite: EvalSet) -> list[tuple[str, str, bool] | None]:
    expectations = Expectations(suite, read_manifest(run))
    asked = [expectations.of(record) for _, record in RunRecords(run)]
    return [None if one is None else (one.case.id, one.case.expected, one.edited) for one in asked]


def test_each_record_finds_its_case_with_trials_too(tmp_path: Path) -> None:
    run = run_of(tmp_path, suite_of("a", "b", "c"), trials=2)
    assert found(run, suite_of("a", "b", "c")) == [(name, f"{name} x", False) for name in "aabbcc"]


def test_a_suite_that_was_reordered_added_to_and_cut_is_still_matched(tmp_path: Path) -> None:
    run = run_of(tmp_path, suite_of("a", "b", "c", "d"))
    assert found(run, suite_of("new", "d", "c", "a")) == [
        ("a", "a x", False),
        ("b", "b x", False),  # as its record has it
        ("c", "c x", False),
        ("d", "d x", False),
    ]


def test_an_edited_question_or_expectation_is_said_to_be_edited(tmp_path: Path) -> None:
    run = run_of(tmp_path, suite_of("a", "b"))
    assert found(run, suite_of("a", "b", change={"a": "another question"})) == [("a", "a x", True), ("b", "b x", False)]
    assert found(run, suite_of("a", "b", expected="y")) == [("a", "a y", True), ("b", "b y", True)]


def test_the_suite_is_read_lazily_and_at_most_once(tmp_path: Path) -> None:
    run = run_of(tmp_path, suite_of(*(f"c{number}" for number in range(30))), limit=3)
    read = []

    def cases() -> object:
        for number in range(100_000):
            read.append(number)
            yield EvalCase(id=f"c{number}", prompt=f"c{number}")

    assert [one[0] for one in found(run, EvalSet("s", cases)) if one] == ["c0", "c1", "c2"]
    assert len(read) == 3


def test_where_the_suite_is_not_at_hand_the_page_says_why(tmp_path: Path) -> None:
    run = run_of(tmp_path, EvalSet("s", [EvalCase(id="a", prompt="a")]))
    note = PageData("".join(page(run))).overview["about"]["suite_note"]
    assert note == "the run does not say which suite file it is of"
    manifest = read_manifest(run)
    assert manifest is not None
    manifest.suite_file = "nowhere.yaml"
    assert "nowhere.yaml is not to be found" in str(open_suite(run, manifest)[1])
    broken = tmp_path / "broken.yaml"
    broken.write_text("cases: {")
    manifest.suite_file = str(broken)
    assert "cannot be read any more" in str(open_suite(run, manifest)[1])


def test_without_its_suite_the_page_shows_what_the_records_say_was_expected(tmp_path: Path) -> None:
    data = PageData("".join(page(run_of(tmp_path, suite_of("a", "b")))))
    assert [body["expected"] for body in data.bodies()] == [["a x"], ["b x"]]
    assert data.overview["about"]["suite_note"] is None


def test_a_run_that_keeps_expectations_out_of_its_records_keeps_them_out_of_its_page(tmp_path: Path) -> None:
    suite = suite_of("a", "b")
    run = run_of(tmp_path, suite, keep_expected=False)
    assert b'"expected"' not in (run / "outputs.jsonl").read_bytes()
    data = PageData("".join(page(run, suite)))
    assert all("expected" not in body for body in data.bodies())
    assert "left out" in data.overview["about"]["suite_note"]


def test_a_suite_in_python_is_not_run_for_a_report(tmp_path: Path) -> None:
    run = run_of(tmp_path / "run", suite_of("a"))
    manifest = read_manifest(run)
    assert manifest is not None
    program = tmp_path / "bench.py"
    program.write_text("raise SystemExit('I was run')")
    manifest.suite_file = f"{program}:runner"
    assert open_suite(run, manifest)[0] is None


def test_a_suite_that_breaks_off_is_told_of(tmp_path: Path) -> None:
    run = run_of(tmp_path / "run", suite_of("a", "b"))
    cases = tmp_path / "cases.jsonl"
    cases.write_text('{"id": "a", "prompt": "a", "expected": "a x"}\nnot json\n')
    data = PageData("".join(page(run, EvalSet.from_jsonl(cases))))
    assert data.bodies()[0]["expected"] == ["a x"]
    assert "cases.jsonl:2" in data.overview["about"]["suite_note"]


# Notices and charts


def test_what_a_reader_must_know_stands_on_top(agents: Path) -> None:
    metrics = Result.load(agents).metrics
    changed = {
        **metrics,
        "complete": False,
        "stopped": "enough",
        "client": {**metrics["client"], "bottleneck": True, "reason": "its event loop was busy 97% of the time"},
        "scores": {**metrics["scores"], "judge": {**metrics["scores"]["judge"], "advisory": True}},
        "scoring_errors": 3,
    }
    titles = {notice["title"]: notice for notice in notices(typed(changed))}
    assert "enough" in titles["This run is not complete"]["text"]
    assert "busy 97% of the time" in titles["The client was the bottleneck"]["text"]
    assert titles["A judge is only advisory"]["level"] == "warning"
    assert "3 of them" in titles["Some answers could not be scored"]["text"]
    del metrics["client"]
    (mark,) = [notice for notice in notices(typed(metrics)) if notice["level"] == "warning"]
    assert mark["text"].startswith("The judge is not calibrated; the pass rate without it is ")
    metrics["scores"]["judge"]["calibrated"] = True
    assert not [notice for notice in notices(typed(metrics)) if notice["level"] == "warning"]


@given(st.lists(st.floats(0, 1e6) | st.sampled_from([1e18, 2.0**53, 1e300]), min_size=2, max_size=300))
@example([1e18, 1e18])
def test_a_histogram_counts_every_value_once_and_its_percentiles_are_numpys(values: list[float]) -> None:
    found_ = histogram(np.array(values))
    assert found_ is not None
    assert sum(found_["counts"]) == len(values)
    assert len(found_["edges"]) == len(found_["counts"]) + 1
    assert found_["p90"] == pytest.approx(float(np.percentile(values, 90)), rel=1e-4, abs=1e-300)


@given(st.lists(st.integers(0, 5_000), min_size=2, max_size=300))
def test_a_histogram_of_whole_numbers_has_no_bar_between_two_of_them(values: list[int]) -> None:
    found_ = histogram(np.array(values, dtype=float))
    assert found_ is not None
    assert found_["whole"]
    assert sum(found_["counts"]) == len(values)
    widths = {round(high - low, 6) for low, high in zip(found_["edges"], found_["edges"][1:], strict=False)}
    assert len(widths) == 1
    assert widths.pop() % 1 == 0


def test_the_curve_over_time_counts_every_record_and_error() -> None:
    at = np.linspace(0.1, 60, 500)
    states = np.where(np.arange(500) % 10 == 0, 3, 1).astype(np.uint8)
    curve = over_time(at, states)
    assert curve is not None
    assert (sum(curve["finished"]), sum(curve["errors"])) == (500, 50)
    assert curve["width"] * len(curve["finished"]) == pytest.approx(60)


def test_points_are_thinned_evenly_and_name_their_records() -> None:
    count = 20_000
    at, last = np.arange(count, dtype=float), np.ones(count)
    shown = points(at, last, np.ones(count, dtype=np.uint8), np.ones(count, dtype=bool))
    assert shown is not None
    assert len(shown["at"]) <= 1_500
    assert shown["of"] == count
    assert (shown["record"][0], shown["record"][-1]) == (0, count - 1)


# Conversations


@pytest.mark.parametrize(
    ("messages", "expected"),
    [
        ([{"role": "user", "content": "hi"}], [("user", "hi", [])]),
        (
            [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "image_url", "image_url": {}}]}],
            [("user", "a\n\n[image_url]", [])],
        ),
        (
            [
                {
                    "role": "assistant",
                    "content": [{"type": "text", "text": "wait"}, {"type": "tool_use", "name": "f", "input": {"x": 1}}],
                }
            ],
            [("assistant", "wait", ["f"])],
        ),
        (
            [
                {
                    "role": "user",
                    "content": [
                        {"type": "tool_result", "tool_use_id": "1", "content": [{"type": "text", "text": "42"}]}
                    ],
                }
            ],
            [("tool", "42", [])],
        ),
        (
            [
                {"type": "function_call", "name": "g", "arguments": "{}"},
                {"type": "function_call_output", "output": "7"},
            ],
            [("assistant", "", ["g"]), ("tool", "7", [])],
        ),
        ([{"role": "assistant", "content": None, "refusal": "no"}], [("assistant", "no", [])]),
    ],
    ids=["chat", "parts", "anthropic call", "anthropic result", "responses", "refusal"],
)
def test_every_shape_of_message_becomes_a_turn(
    messages: list[dict[str, object]], expected: list[tuple[object, ...]]
) -> None:
    spoken = turns(a_record(messages=messages, response_text=None), None)
    assert [(turn.role, turn.text, [call.name for call in turn.calls]) for turn in spoken] == expected


def test_without_messages_the_prompt_and_the_answer_are_the_conversation() -> None:
    case = EvalCase(id="c0", prompt="why?", system_prompt="be brief")
    assert [(turn.role, turn.text) for turn in turns(a_record(), case)] == [
        ("system", "be brief"),
        ("user", "why?"),
        ("assistant", "hello"),
    ]
