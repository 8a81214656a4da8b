"""An agent's tool calls against the expected ones."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from steelyard import patterns
from steelyard.errors import ConfigurationError
from steelyard.patterns import PatternTimeout
from steelyard.records import EvalCase, InvocationResponse, Score
from steelyard.scoring import ToolCall, Trajectory
from steelyard.scoring.trajectory import Expected, tool_calls

MODES = ["exact", "in_order", "any_order", "subset", "superset"]


def log(*calls: Any) -> list[dict[str, Any]]:
    """Messages with these calls: names, or (name, arguments)."""
    pairs = [call if isinstance(call, tuple) else (call, {}) for call in calls]
    return [
        {"role": "assistant", "tool_calls": [{"function": {"name": name, "arguments": json.dumps(arguments)}}]}
        for name, arguments in pairs
    ]


def both(scorer: Trajectory, expected: Any, *calls: Any) -> list[Score]:
    case = EvalCase(id="c", expected_trajectory=expected)
    scores = scorer.score(case, InvocationResponse(messages=log(*calls)))
    assert scores is not None
    return scores


def verdict(expected: Any, *calls: Any, **options: Any) -> Score:
    return both(Trajectory(**options), expected, *calls)[0]


@pytest.mark.parametrize(
    ("expected", "calls", "passing"),
    [
        ("ab", "ab", {"exact", "in_order", "any_order", "subset", "superset"}),
        ("ab", "ba", {"any_order", "subset", "superset"}),
        ("ab", "axb", {"in_order", "superset"}),
        ("ab", "bxa", {"superset"}),
        ("ab", "a", {"subset"}),
        ("ab", "", {"subset"}),
        ("ab", "aab", {"in_order", "superset"}),
        ("aab", "ab", {"subset"}),
        ("", "", {"exact", "in_order", "any_order", "subset", "superset"}),
        ("", "a", {"in_order", "superset"}),
        ("ab", "cd", set()),
    ],
)
def test_each_mode_has_its_own_idea_of_agreement(expected, calls, passing) -> None:
    assert {mode for mode in MODES if verdict(list(expected), *calls, mode=mode).passed} == passing


NAMES = st.lists(st.sampled_from("abc"), max_size=6)


@given(NAMES, NAMES)
def test_the_modes_imply_each_other_as_sets_and_sequences_do(expected, calls) -> None:
    exact, in_order, any_order, subset, superset = (verdict(expected, *calls, mode=mode).passed for mode in MODES)
    wanted, got = Counter(expected), Counter(calls)
    remaining = iter(calls)
    assert exact == (expected == calls)
    assert in_order == all(name in remaining for name in expected)
    assert any_order == (wanted == got)
    assert subset == (got <= wanted)
    assert superset == (wanted <= got)
    assert not exact or (in_order and any_order)
    assert not in_order or superset
    assert any_order == (subset and superset)


@given(
    st.lists(st.tuples(st.sampled_from("ab"), st.dictionaries(st.sampled_from("pq"), st.integers(0, 2))), max_size=5)
)
def test_every_course_agrees_with_itself_by_every_mode_and_rule(calls) -> None:
    expected = [{"name": name, "arguments": arguments} for name, arguments in calls]
    for mode in MODES:
        for rule in ("ignore", "equal", "subset"):
            assert verdict(expected, *calls, mode=mode, arguments=rule).passed


@pytest.mark.parametrize(
    ("mode", "expected", "calls", "reason"),
    [
        (
            "exact",
            [{"name": "look"}, {"tool": "search", "args": {"q": "x"}}],
            ["look", ("fetch", {"url": "y"})],
            "call 2: expected search(q='x'), got fetch(url='y')",
        ),
        ("exact", ["a", "b"], ["a"], "call 2: expected b, got no more calls"),
        ("exact", ["a"], ["a", "b"], "call 2: expected no more calls, got b()"),
        ("in_order", ["a", "b"], ["a", "c"], "call 2: expected b from here on, got c()"),
        ("in_order", ["a", "b"], ["b", "a"], "call 3: expected b from here on, got no more calls"),
        ("any_order", ["a", "b"], ["b", "c"], "expected a, which was not called"),
        ("any_order", ["a"], ["a", "c"], "call 2: c() was not expected"),
        ("subset", ["a"], ["a", "c"], "call 2: c() was not expected"),
        (
            "superset",
            [{"name": "s", "arguments": {"q": 1}}],
            [("s", {"q": 2})],
            "expected s(q=1), which was not called; call 1 is s(q=2)",
        ),
    ],
)
def test_the_reason_names_the_first_divergence(mode, expected, calls, reason) -> None:
    result = verdict(expected, *calls, mode=mode)
    assert (result.passed, result.value, result.reason) == (False, 0.0, reason)


@pytest.mark.parametrize(
    ("rule", "wanted", "got", "passed"),
    [
        ("ignore", {"q": "x"}, {"q": "y"}, True),
        ("equal", {"q": "x"}, {"q": "x"}, True),
        ("equal", {"q": "x"}, {"q": "x", "n": 5}, False),
        ("equal", {"n": 1}, {"n": 1.0}, True),
        ("equal", {"n": 1}, {"n": True}, False),
        ("equal", {}, {"q": "x"}, False),
        ("equal", None, {"q": "x"}, True),
        ("subset", {"q": "x"}, {"q": "x", "n": 5}, True),
        ("subset", {"q": {"a": 1}}, {"q": {"a": 1, "b": 2}}, True),
        ("subset", {"q": "x", "m": 1}, {"q": "x"}, False),
        ("regex", {"q": "^par"}, {"q": "paris", "n": 5}, True),
        ("regex", {"q": "^par$"}, {"q": "paris"}, False),
        ("regex", {"n": r"^\d$"}, {"n": 5}, True),
        ("regex", {"n": 5}, {"n": 5}, True),
        ("regex", {"q": "x"}, {}, False),
        (lambda expected, got: got.arguments["n"] > expected.arguments["n"], {"n": 1}, {"n": 2}, True),
        (lambda expected, got: got.arguments["n"] > expected.arguments["n"], {"n": 3}, {"n": 2}, False),
    ],
)
def test_arguments_are_compared_by_their_rule(rule, wanted, got, passed) -> None:
    expected = {"name": "s"} if wanted is None else {"name": "s", "arguments": wanted}
    assert verdict([expected], ("s", got), arguments=rule).passed is passed
    per_call = {**expected, "match": rule}
    assert verdict([per_call], ("s", got), arguments="equal").passed is passed


def test_calls_are_paired_so_that_as_many_as_can_be_agree() -> None:
    """Taking the first that fits would give `.*` the only call that `x` fits."""
    expected = [{"name": "s", "arguments": {"q": ".*"}}, {"name": "s", "arguments": {"q": "^x$"}}]
    for calls in ([("s", {"q": "x"}), ("s", {"q": "y"})], [("s", {"q": "y"}), ("s", {"q": "x"})]):
        assert verdict(expected, *calls, mode="any_order", arguments="regex").passed


def test_malformed_arguments_are_a_divergence_that_is_said() -> None:
    messages = [{"tool_calls": [{"function": {"name": "s", "arguments": '{"q": '}}]}]
    case = EvalCase(id="c", expected_trajectory=[{"name": "s", "arguments": {"q": "x"}}])
    scores = Trajectory().score(case, InvocationResponse(messages=messages))
    assert scores is not None
    assert scores[0].reason == "call 1: expected s(q='x'), got s(malformed arguments '{\"q\": ')"


def test_a_forbidden_tool_fails_whatever_else_agrees() -> None:
    result = verdict(["a"], "a", "rm", mode="superset", forbidden=["rm"])
    assert result.reason == "call 2: rm is forbidden"
    assert verdict(["a"], "a", forbidden=["rm"]).passed


@pytest.mark.parametrize(
    ("counts", "calls", "reason"),
    [
        ({"s": 2}, "ss", None),
        ({"s": 2}, "s", "s was called 1 times, expected 2"),
        ({"s": {"min": 1, "max": 3}}, "sss", None),
        ({"s": {"min": 1, "max": 3}}, "ssss", "s was called 4 times, expected 1 to 3"),
        ({"s": {"min": 1}}, "", "s was called 0 times, expected at least 1"),
        ({"s": {"max": 1}}, "", None),
        ({"s": 0}, "s", "s was called 1 times, expected 0"),
    ],
)
def test_how_often_a_tool_is_called_can_be_limited(counts, calls, reason) -> None:
    for result in (verdict(None, *calls, counts=counts), verdict({"counts": counts}, *calls)):
        assert (result.passed, result.reason) == (reason is None, reason)


def test_a_case_may_carry_its_own_mode_rule_forbidden_tools_and_counts() -> None:
    own = {"calls": [{"name": "a", "args": {"q": "^x"}}], "mode": "superset", "arguments": "regex", "forbidden": ["rm"]}
    scorer = Trajectory(forbidden=["sudo"], counts={"a": {"max": 2}})
    assert both(scorer, own, "b", ("a", {"q": "xy"}))[0].passed
    assert both(scorer, own, ("a", {"q": "xy"}), "rm")[0].reason == "call 2: rm is forbidden"
    assert both(scorer, own, ("a", {"q": "xy"}), "sudo")[0].reason == "call 2: sudo is forbidden"
    assert both(scorer, own, *[("a", {"q": "x"})] * 3)[0].reason == "a was called 3 times, expected 0 to 2"


@pytest.mark.parametrize(
    ("expected", "calls", "value", "reason"),
    [
        (["a", "b"], "ab", 1.0, None),
        (["a", "b"], "a", 1.0, None),
        (["a"], "", 1.0, None),
        (["a", "b"], "axxb", 0.5, "4 calls: 1 repeated, 2 beyond the reference"),
        (["a"], "aa", 0.5, "2 calls: 1 repeated, 1 beyond the reference"),
        (["a", "a"], "aa", 1.0, None),
        (["a", "b"], "aa", 0.5, "2 calls: 1 repeated, 0 beyond the reference"),
        ({"forbidden": []}, "aab", 2 / 3, "3 calls: 1 repeated, 0 beyond the reference"),
    ],
)
def test_efficiency_is_the_share_of_calls_that_were_needed(expected, calls, value, reason) -> None:
    result = both(Trajectory(mode="superset", name="path"), expected, *calls)[1]
    assert (result.name, result.passed, result.reason) == ("path.efficiency", True, reason)
    assert result.value == pytest.approx(value)


def test_efficiency_can_be_demanded() -> None:
    result = both(Trajectory(mode="superset", min_efficiency=0.6), ["a"], "a", "a")[1]
    assert (result.value, result.passed) == (0.5, False)


def test_the_same_tool_with_other_arguments_is_no_repetition() -> None:
    assert both(Trajectory(), {"calls": None}, ("a", {"n": 1}), ("a", {"n": 2}))[1].value == 1.0


def test_a_case_without_a_trajectory_is_not_scored() -> None:
    assert Trajectory().score(EvalCase(id="c"), InvocationResponse(messages=log("a"))) is None


def test_a_response_without_messages_is_a_scoring_error_and_not_a_wrong_answer() -> None:
    case = EvalCase(id="c", expected_trajectory=["a"])
    with pytest.raises(ValueError, match="no messages"):
        Trajectory().score(case, InvocationResponse(response_text="x"))
    scores = Trajectory().score(case, InvocationResponse(messages=[]))
    assert scores is not None
    assert scores[0].reason == "call 1: expected a, got no more calls"


@pytest.mark.parametrize(
    ("expected", "result"),
    [
        ("search", "must be a list of calls"),
        ([3], "an expected call must be"),
        ([{"arguments": {}}], "an expected call must be"),
        ([{"name": "a", "argument": {}}], "an expected call must be"),
        ([{"name": "a", "match": "fuzzy"}], "match must be one of"),
        ({"mode": "sorted", "calls": []}, "mode must be one of .*, got 'sorted'"),
        ({"call": []}, "has no 'call'"),
        ({"forbidden": "rm"}, "forbidden must be a list"),
        ({"counts": {"a": -1}}, "counts.a must be"),
    ],
)
def test_a_malformed_trajectory_of_a_case_is_a_scoring_error(expected, result) -> None:
    with pytest.raises(ValueError, match=result):
        verdict(expected, "a")


@pytest.mark.parametrize(
    ("options", "result"),
    [
        ({"mode": "sorted"}, "mode must be one of .*, got 'sorted'"),
        ({"arguments": "fuzzy"}, "arguments must be one of .*, got 'fuzzy'"),
        ({"forbidden": "rm"}, "forbidden must be a list of tools' names, got 'rm'"),
        ({"counts": ["a"]}, r"counts must be a mapping .*, got \['a'\]"),
        ({"counts": {"a": 1.5}}, "counts.a must be a number >= 0 or min and max, got 1.5"),
        ({"counts": {"a": {"most": 1}}}, "counts.a must be"),
        ({"counts": {"a": {"min": 3, "max": 1}}}, "counts.a must be"),
        ({"min_efficiency": 2}, "min_efficiency must be a number within 0..1, got 2"),
    ],
)
def test_a_bad_argument_is_refused_with_its_value(options, result) -> None:
    with pytest.raises(ConfigurationError, match=result):
        Trajectory(**options)


def test_the_reason_stays_short_whatever_the_calls_hold() -> None:
    result = verdict(
        ["a"], ("b" * 100_000, {"k" * 100_000: "v" * 100_000, **{str(n): "v" * 10_000 for n in range(99)}})
    )
    assert result.reason is not None
    assert len(result.reason) < 1_100


def test_a_function_for_the_arguments_is_part_of_the_identity() -> None:
    def same(expected: ToolCall, got: ToolCall) -> bool:
        return expected.arguments == got.arguments

    def other(expected: ToolCall, got: ToolCall) -> bool:
        return bool(got.arguments)

    identities = [json.dumps(dict(Trajectory(arguments=rule).identity())) for rule in ("equal", same, other)]
    assert len(set(identities)) == 3


# Tool calls in messages, whichever API's shape they have -------------------------------------------------------------


JSON = st.recursive(
    st.none() | st.integers() | st.text(max_size=4),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["name", "type", "function", "input"]), inner)
    ),
    max_leaves=6,
)
KEYS = st.sampled_from(["role", "type", "content", "tool_calls", "function_call", "output"])


def chat(*calls: dict[str, object]) -> dict[str, object]:
    return {"role": "assistant", "content": None, "tool_calls": list(calls)}


def function(name: str, arguments: object, call_id: str = "c1") -> dict[str, object]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


SEARCH = ToolCall("search", {"q": "x"}, "c1")


def test_openai_chat_messages() -> None:
    log = [
        {"role": "user", "content": "hi"},
        chat(function("search", '{"q": "x"}'), function("fetch", '{"url": "y"}', "c2")),
        {"role": "tool", "tool_call_id": "c1", "content": "found"},
        {"role": "assistant", "content": "done"},
    ]
    assert tool_calls(log) == [SEARCH, ToolCall("fetch", {"url": "y"}, "c2")]


def test_openai_chats_legacy_function_call_and_custom_tools() -> None:
    log = [
        {"role": "assistant", "function_call": {"name": "search", "arguments": '{"q": "x"}'}},
        chat({"id": "c2", "type": "custom", "custom": {"name": "shell", "input": "3"}}),
    ]
    assert tool_calls(log) == [ToolCall("search", {"q": "x"}), ToolCall("shell", 3, "c2")]


def test_openai_responses_items() -> None:
    log = [
        {"type": "reasoning", "summary": []},
        {"type": "function_call", "id": "fc", "call_id": "c1", "name": "search", "arguments": '{"q": "x"}'},
        {"type": "function_call_output", "call_id": "c1", "output": "found"},
        {"type": "web_search_call", "id": "w", "action": {"type": "search", "query": "z"}},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "done"}]},
    ]
    assert tool_calls(log) == [SEARCH, ToolCall("web_search", {"type": "search", "query": "z"}, "w")]


def test_anthropic_content_blocks() -> None:
    log = [
        {
            "role": "assistant",
            "content": [
                {"type": "text", "text": "let me see"},
                {"type": "tool_use", "id": "c1", "name": "search", "input": {"q": "x"}},
            ],
        },
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c1", "content": "found"}]},
    ]
    assert tool_calls(log) == [SEARCH]


def test_shapes_may_be_mixed_and_the_order_is_the_logs() -> None:
    log = [
        chat({"name": "flat", "args": {"a": 1}, "id": "c0"}),
        {"role": "assistant", "content": [{"type": "tool_use", "id": "c1", "name": "search", "input": {"q": "x"}}]},
        {"output": [{"type": "function_call", "call_id": "c2", "name": "fetch", "arguments": "{}"}]},
    ]
    assert tool_calls(log) == [ToolCall("flat", {"a": 1}, "c0"), SEARCH, ToolCall("fetch", {}, "c2")]


def test_malformed_arguments_are_kept_as_text_and_noted() -> None:
    calls = tool_calls([chat(function("search", '{"q": "x'), function("search", "[" * 100_000))])
    assert calls[0] == ToolCall("search", '{"q": "x', "c1", malformed=True)
    assert calls[1].malformed


def test_empty_arguments_are_no_arguments() -> None:
    assert [
        call.arguments for call in tool_calls([chat(function("a", ""), function("b", None), function("c", "{}"))])
    ] == [
        {},
        {},
        {},
    ]


def test_what_is_not_a_message_is_passed_over() -> None:
    odd = [None, 3, "x", [], {}, {"tool_calls": None}, {"tool_calls": [None]}, {"content": 5}, {"function_call": "x"}]
    assert tool_calls(odd) == []
    assert tool_calls([chat({"function": {"name": 7}})]) == [ToolCall("")]


@given(st.lists(st.dictionaries(KEYS, JSON), max_size=4))
def test_no_log_can_break_it(log) -> None:
    assert isinstance(tool_calls(log), list)


def test_an_argument_pattern_that_backtracks_is_a_scoring_error_that_names_it(monkeypatch) -> None:
    monkeypatch.setattr(patterns, "MATCH_SECONDS", 0.05)
    expected = Expected(ToolCall("search", {"q": "(a|aa)+$"}), "regex")
    with pytest.raises(PatternTimeout, match="ran for more than"):
        expected.accepts(ToolCall("search", {"q": "a" * 60 + "b"}))
    assert Trajectory().identity()["patterns"] == patterns.PATTERNS_VERSION
