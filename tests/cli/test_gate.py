"""The rules of a suite's gate decide the exit code of `steelyard run` too."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.cli import run_cli

SUITE = """
id: asked
target: {simulated: {latency: 0, tokens_per_second: 0, accuracy: 1.0}}
cases: [{id: a, prompt: "?", expected: x}, {id: b, prompt: "?", expected: y}]
scorers: [exact]
gate: {rules: [RULE]}
"""


@pytest.mark.parametrize(
    ("rule", "code", "said"),
    [
        ("pass_rate>=0.9", 0, ""),
        ("score.exact.mean<0.5", 1, "gate: score.exact.mean<0.5: is 1"),
        ("score.exat.mean>=0.9", 1, "did you mean 'score.exact.mean'?"),
        ("pass_rat>=0.9", 2, "did you mean 'pass_rate'?"),
        ("scroe.exact.mean>=0.9", 2, "no run has a metric 'scroe.exact.mean'"),
        ("peak_in_flight<=50", 0, ""),
        ("cost_unknown_judges<1", 0, ""),
        ("counts.error<1", 0, ""),
        ("time_queued-p99<1", 1, "no metric of this run"),
        ("quite good", 2, "a rule is a metric, one of"),
    ],
)
def test_a_rule_is_kept_broken_or_not_a_rule(tmp_path: Path, rule: str, code: int, said: str) -> None:
    (tmp_path / "suite.yaml").write_text(SUITE.replace("RULE", f'"{rule}"'))
    ended = run_cli(tmp_path, "run", "suite.yaml", "--out", "run", "--no-progress")
    assert ended.code == code, ended.err
    assert said in ended.err
    assert (tmp_path / "run" / "metrics.json").exists() == (code != 2)
