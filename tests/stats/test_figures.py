"""progress_bar_stats: parsed once, refused with a reason."""

from __future__ import annotations

import pytest

from steelyard.errors import ConfigurationError
from steelyard.stats.figures import DEFAULT_PROGRESS_BAR_STATS, ProgressStat, full_name, parse_progress_bar_stats


def test_none_is_the_default_and_an_empty_mapping_is_nothing():
    assert [stat.label for stat in parse_progress_bar_stats(None)] == list(DEFAULT_PROGRESS_BAR_STATS)
    assert parse_progress_bar_stats({}) == ()


def test_what_is_parsed_already_passes_through():
    spec = parse_progress_bar_stats(None)
    assert parse_progress_bar_stats(spec) is spec


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("failed", ProgressStat(label="x", source="failed")),
        (
            ["time_to_last_token", "p99.9"],
            ProgressStat(label="x", source="time_to_last_token", aggregate="p99.9", percentile=99.9),
        ),
        (
            ("time_per_output_token", "average", "inv"),
            ProgressStat(label="x", source="time_per_output_token", aggregate="average", inverse=True),
        ),
        (
            ("num_tokens_input", "p0"),
            ProgressStat(label="x", source="num_tokens_input", aggregate="p0", percentile=0.0),
        ),
    ],
)
def test_each_form_of_spec_is_understood(given, expected):
    assert parse_progress_bar_stats({"x": given}) == (expected,)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("faild", ["'faild'", "did you mean 'failed'", "requests_per_minute"]),
        ("time_to_last_token", ["needs an aggregate", "('time_to_last_token', 'p50')"]),
        (("time_to_lst_token", "p50"), ["did you mean 'time_to_last_token'", "num_tokens_output"]),
        (("time_to_last_token", "p101"), ["'p101'", "p0 to p100"]),
        (("time_to_last_token", "avrage"), ["did you mean 'average'"]),
        (("time_to_last_token", 50), ["50 is not a known aggregate"]),
        (("time_to_last_token", "p50", "inverse"), ["'inv'", "'inverse'"]),
        (("time_to_last_token",), ["(metric, aggregate)"]),
        (("time_to_last_token", "p50", "inv", "x"), ["(metric, aggregate)"]),
        (([], "p50"), ["[] is not a known metric"]),
        (None, ["None", "(metric, aggregate)"]),
        (7, ["7", "a counter's name"]),
    ],
)
def test_a_bad_spec_is_refused_naming_the_label_the_value_and_what_is_allowed(given, words):
    with pytest.raises(ConfigurationError) as caught:
        parse_progress_bar_stats({"my label": given})
    assert "'my label'" in str(caught.value)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize("given", [["failed"], "failed", 3, ("failed",)])
def test_something_that_is_no_mapping_is_refused(given):
    with pytest.raises(ConfigurationError, match="must map a label"):
        parse_progress_bar_stats(given)


@pytest.mark.parametrize("label", ["", "  ", 3, None])
def test_a_label_must_be_text(label):
    with pytest.raises(ConfigurationError, match="label must be text"):
        parse_progress_bar_stats({label: "failed"})


def test_gaps_between_tokens_have_short_names():
    assert full_name("itl_p99") == "time_between_tokens_p99-p99"
    assert full_name("ITL_max") == "time_between_tokens_max-max"
    for unknown in ("itl", "itl_p90"):
        with pytest.raises(ConfigurationError, match="itl_p50, itl_p99, itl_max"):
            full_name(unknown)
