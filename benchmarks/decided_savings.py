"""How much of a suite a run asks that stops when it is decided, and how often the whole suite would decide otherwise.

`python -m benchmarks.decided_savings` prints the table of docs/statistics.md; seeded, about a minute.
"""

from __future__ import annotations

import numpy as np

from steelyard.run.stop_rules import RateRule, Unit
from steelyard.stats.rules import BaselineRule, read_rule

DRAWS = 200


def threshold(rng: np.random.Generator, cases: int, rate: float, rule: str) -> tuple[float, float]:
    """The share asked, and the share of draws that decide otherwise than all cases would."""
    good, asked, wrong = round(rate * cases), 0, 0
    read = read_rule(rule)
    assert read is not None
    truth = "pass" if good >= round(read.limit * cases) else "fail"
    for _ in range(DRAWS):
        decided = RateRule(read, [1] * cases)
        for one in (rng.permutation(cases) < good).tolist():
            asked += 1
            decided.update(Unit(1, int(one), 1, int(not one), 0))
            if decided.decision is not None:
                break
        wrong += decided.decision != truth
    return asked / (DRAWS * cases), wrong / DRAWS


def paired(rng: np.random.Generator, cases: int, margin: float, churn: float) -> float:
    """The share asked until a drop by the margin is ruled out, where as many cases get better as get worse."""
    asked = 0
    for _ in range(DRAWS):
        rule = BaselineRule(margin)
        for difference in rng.choice([1.0, -1.0, 0.0], p=[churn / 2, churn / 2, 1 - churn], size=cases).tolist():
            asked += 1
            if rule.update(difference) is not None:
                break
    return asked / (DRAWS * cases)


def main() -> None:
    """Print the table."""
    rng = np.random.default_rng(11)
    print("| rule | cases | true | asked | decided otherwise |\n|---|---|---|---|---|")
    for cases in (200, 1000):
        for rate in (0.80, 0.87, 0.93, 0.95, 0.98):
            share, wrong = threshold(rng, cases, rate, "pass_rate>=90%")
            print(f"| `pass_rate>=90%` | {cases:,} | {rate:.0%} | {share:.0%} | {wrong:.1%} |")
    for cases in (500, 1000):
        share = paired(rng, cases, 0.05, 0.04)
        print(f"| `max_regression` 5 points | {cases:,} | 4 % of cases change, evenly | {share:.0%} | |")


if __name__ == "__main__":
    main()
