"""Slices against pandas: which cases belong to one, its figures, and the same intervals as the whole run's."""

from __future__ import annotations

import tracemalloc
from typing import Any

import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from steelyard.errors import ConfigurationError
from steelyard.records import Record, Score
from steelyard.stats.intervals import BoundedMean, clopper_pearson
from steelyard.stats.slices import MAX_SLICES, Slices, metadata_at, parse_keys, values_of

rows = st.lists(
    st.tuples(
        st.sampled_from(["math", "law", "safety", None]),
        st.sampled_from(["easy", "hard"]),
        st.sampled_from(["passed", "failed", "unscored", "error"]),
        st.floats(0.01, 10),
    ),
    min_size=1,
    max_size=60,
)


def record(case: int, outcome: str = "passed", *, trial: int = 0, seconds: float = 1.0, **more: Any) -> Record:
    scores = {"passed": [Score("exact", 1.0, True)], "failed": [Score("exact", 0.0, False)]}.get(outcome, [])
    failed = {"error": "ValueError: no", "error_type": "ValueError"} if outcome == "error" else {}
    time = None if failed else seconds
    return Record(
        v=2, id=f"c{case}", trial=trial, index=case, status="error" if failed else "ok", attempts=1, elapsed=seconds,
        case_fp="", scored_by="", run_time=0.0, scores=scores, time_to_last_token=time, **failed, **more,
    )  # fmt: skip


def sliced(records: list[Record], *keys: str, **options: Any) -> dict[tuple[str, str], Any]:
    slices = Slices(keys, **options)
    for one in records:
        slices.add(one)
    return {(one.key, one.value): one for one in slices.to_metrics()}


@given(rows)
def test_the_figures_of_a_slice_are_those_of_pandas(observed):
    records = [
        record(case, outcome, seconds=seconds, metadata={"category": category, "more": {"level": level}})
        for case, (category, level, outcome, seconds) in enumerate(observed)
    ]
    found = sliced(records, "category", "more.level", by_case=False)
    table = pd.DataFrame(observed, columns=["category", "more.level", "outcome", "seconds"])
    table["category"] = table["category"].fillna("(none)")
    assert len(found) == table["category"].nunique() + table["more.level"].nunique()
    for (key, value), one in found.items():
        chosen = table[table[key] == value]
        counts = chosen["outcome"].value_counts()
        passed, failed, errors = (int(counts.get(name, 0)) for name in ("passed", "failed", "error"))
        assert (one.n, one.cases, one.passed, one.scored, one.errors) == (
            len(chosen), len(chosen), passed, passed + failed, errors,
        )  # fmt: skip
        assert one.pass_rate == (passed / (passed + failed) if passed + failed else None)
        assert one.pass_rate_ci95 == clopper_pearson(passed, passed + failed)
        assert one.pass_rate_all == pytest.approx(passed / len(chosen))
        assert one.error_rate == pytest.approx(errors / len(chosen))
        times = chosen[chosen["outcome"] != "error"]["seconds"]
        if len(times):
            assert one.latency["time_to_last_token"].p50.value == pytest.approx(times.quantile(0.5))
        assert one.small


@given(
    st.lists(
        st.tuples(st.integers(0, 2), st.sampled_from("ab"), st.lists(st.booleans(), min_size=2, max_size=3)),
        max_size=25,
    ),
    st.booleans(),
)
def test_trials_of_a_case_and_cases_of_a_group_count_together(observed, grouped):
    records = [
        record(
            case,
            "passed" if passed else "failed",
            trial=trial,
            metadata={"k": value},
            group=str(group) if grouped else None,
        )
        for case, (group, value, verdicts) in enumerate(observed)
        for trial, passed in enumerate(verdicts)
    ]
    found = sliced(records, "k", trials=3)
    table = pd.DataFrame(
        [(case, group, value, sum(verdicts) / len(verdicts)) for case, (group, value, verdicts) in enumerate(observed)],
        columns=["case", "group", "k", "share"],
    )
    for value, chosen in table.groupby("k"):
        one = found["k", value]
        assert (one.cases, one.pass_rate) == (len(chosen), pytest.approx(chosen["share"].mean()))
        clusters = chosen["group" if grouped else "case"].tolist()
        expected = BoundedMean.over_groups(chosen["share"].to_numpy(), clusters).interval()
        assert one.pass_rate_ci95 == pytest.approx(expected)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("hard", ["hard"]),
        (3, ["3"]),
        (0.5, ["0.5"]),
        (True, ["true"]),
        (None, ["(none)"]),
        ([], ["(none)"]),
        (["a", "b", "a"], ["a", "b"]),
        ({"deep": 1}, ['{"deep":1}']),
    ],
)
def test_a_value_is_a_slice_and_each_item_of_a_list_is(value, expected):
    assert values_of({"key": value}, "key") == expected
    assert values_of({"more": {"key": value}}, "more.key") == expected
    assert values_of({"more.key": value}, "more.key") == expected


def test_long_values_are_cut_and_stay_apart():
    one, other = (values_of({"key": "x" * 500 + end}, "key")[0] for end in "ab")
    assert one != other
    assert len(one) <= 200
    assert metadata_at({"a": "text"}, "a.b") is None


def test_metadata_too_large_for_a_record_is_said_to_be_so():
    assert values_of({"sha256": "ab", "bytes": 20_000}, "key") == ["(not kept)"]


def test_values_beyond_the_first_hundred_are_one_slice_and_memory_stays_flat():
    slices = Slices(["user"], by_case=False)
    for number in range(MAX_SLICES + 50):
        slices.add(record(number, metadata={"user": number}))
    tracemalloc.start()
    for number in range(1_000, 3_000):
        slices.add(record(number, metadata={"user": number}))
    used = tracemalloc.get_traced_memory()[0] / 2_000
    tracemalloc.stop()
    found = slices.to_metrics()
    assert len(found) == MAX_SLICES + 1
    assert (found[-1].value, found[-1].n, found[-1].small) == ("(other)", 2_050, False)
    assert used < 100, f"{used} bytes a record"


def test_a_case_with_several_values_counts_in_each():
    found = sliced([record(0, metadata={"tags": ["a", "b"]}), record(1, "failed", metadata={"tags": ["b"]})], "tags")
    assert (found["tags", "a"].n, found["tags", "b"].n, found["tags", "b"].pass_rate) == (1, 2, 0.5)


def test_a_case_with_several_values_beyond_the_first_hundred_counts_once_among_the_others():
    first = [record(n, metadata={"tags": f"t{n}"}) for n in range(100)]
    found = sliced([*first, record(100, metadata={"tags": ["u", "v", "t0"]})], "tags")
    assert (found["tags", "(other)"].n, found["tags", "(other)"].cases, found["tags", "t0"].n) == (1, 1, 2)


def test_slices_are_in_their_natural_order():
    records = [record(n, metadata={"level": value}) for n, value in enumerate([10, "nan", None, 9, "x", "b"])]
    assert [value for _, value in sliced(records, "level")] == ["9", "10", "b", "nan", "x", "(none)"]


def test_keys_are_a_list_or_a_text_with_commas():
    assert parse_keys(" a, b.c,a", "by") == parse_keys(["a", "b.c"], "by") == ("a", "b.c")
    for wrong in (["a", 3], 7, [""], "a,,b"):
        with pytest.raises(ConfigurationError, match="by must be a list of metadata keys"):
            parse_keys(wrong, "by")
