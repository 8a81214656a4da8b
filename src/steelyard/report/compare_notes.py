"""What else is different between two runs than what was to be compared, in words."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from steelyard.report.pairs import Pairs, RunCases

_LONGEST = 60
_BEFORE = 10
"""Characters that two long texts have in common which are shown before those in which they differ."""
_OPTIONS = {
    "trials": "trials of each case",
    "num_runs": "runs of each judge",
    "limit": "limit",
    "match": "selected cases",
    "initial_session_file": "initial session file",
}
_PACE = ("parallelism", "rate", "tokens_per_min", "requests", "duration", "arrivals")


def notes(pairs: Pairs) -> list[str]:
    """Each difference as a line, those that weigh most first."""
    a, b = pairs.baseline, pairs.other
    found = ["it is the same run"] if a.run.resolve() == b.run.resolve() else []
    found += [*_unfinished(a, "the baseline"), *_unfinished(b, "this run"), *_suites(pairs), *_graders(pairs)]
    if a.manifest is None or b.manifest is None:
        return [*found, *_clients(a, b), "a run.json is missing: what the runs were told cannot be compared"]
    found += _of_mapping("target ", _target(a), _target(b))
    if a.manifest.seed != b.manifest.seed:
        found.append(f"seed: {a.manifest.seed} in the baseline, {b.manifest.seed} here")
    options_a, options_b = a.manifest.options, b.manifest.options
    found += _of_mapping("", _chosen(options_a, _OPTIONS), _chosen(options_b, _OPTIONS))
    pace = [*_of_mapping("", {key: options_a.get(key) for key in _PACE}, {key: options_b.get(key) for key in _PACE})]
    if pace:
        found += [*pace, "the calls were paced otherwise: times say less"]
    return [*found, *_clients(a, b)]


def _unfinished(run: RunCases, name: str) -> Iterator[str]:
    metrics = run.metrics
    if not metrics["complete"]:
        yield f"{name} is not complete: {metrics['n']:,} of {metrics['counts']['planned']:,} done"


def _suites(pairs: Pairs) -> Iterator[str]:
    a, b = pairs.baseline.metrics["suite"], pairs.other.metrics["suite"]
    if a != b:
        yield f"suite: {_show(a)} in the baseline, {_show(b)} here"
    if pairs.asked_otherwise * 2 > pairs.shared:
        what = "prompt, system prompt, template, tools or metadata"
        yield f"{pairs.asked_otherwise:,} of {pairs.shared:,} cases were asked otherwise ({what})"
    if len(pairs.edited):
        left = "are left out" if len(pairs) < pairs.shared else "are paired all the same"
        yield f"{len(pairs.edited):,} of {pairs.shared:,} cases were edited in between and {left}"


def _graders(pairs: Pairs) -> Iterator[str]:
    a, b = _scorers(pairs.baseline), _scorers(pairs.other)
    for name in a.keys() - b.keys():
        yield f"scorer {_show(name)}: only in the baseline"
    for name in b.keys() - a.keys():
        yield f"scorer {_show(name)}: not in the baseline"
    for name in sorted(a.keys() & b.keys()):
        yield from _of_mapping(f"scorer {name} ", a[name], b[name])
    if a == b and pairs.graded_otherwise * 2 > pairs.shared:
        yield f"{pairs.graded_otherwise:,} of {pairs.shared:,} cases expect another answer"
    scores = {**pairs.baseline.metrics["scores"], **pairs.other.metrics["scores"]}
    for name in sorted(name for name, score in scores.items() if score.get("advisory")):
        yield f"score {name} is advisory: its judge is not calibrated, so it decides nothing"


def _clients(a: RunCases, b: RunCases) -> Iterator[str]:
    for run, name in ((a, "the baseline"), (b, "this run")):
        client = run.metrics.get("client") or {}
        if client.get("bottleneck"):
            why = client.get("reason") or "it had no time to spare"
            yield f"in {name} the client was the bottleneck ({why}): its times say nothing of the target"
        if run.cached:
            yield f"{run.cached:,} answers of {name} came from the cache: their times and costs are left out"


def _scorers(run: RunCases) -> dict[str, Mapping[str, Any]]:
    if run.manifest is None:
        return {}
    return {str(one.get("name") or one.get("kind") or "scorer"): one for one in run.manifest.scorers}


def _target(run: RunCases) -> dict[str, Any]:
    """What the target was, but for its model: that is what is compared, and stands above."""
    assert run.manifest is not None
    return {key.lstrip("~"): value for key, value in run.manifest.target.items() if key != "model"}


def _chosen(options: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    return {label: options.get(name) for name, label in names.items()}


def _of_mapping(prefix: str, a: Mapping[str, Any], b: Mapping[str, Any]) -> Iterator[str]:
    for key in sorted({*a, *b}):
        one, other = a.get(key), b.get(key)
        if isinstance(one, Mapping) and isinstance(other, Mapping):
            yield from _of_mapping(f"{prefix}{key}.", one, other)
        elif one != other:
            start = _where_they_part(_text(one), _text(other))
            yield f"{prefix}{key}: {_show(one, start)} in the baseline, {_show(other, start)} here"


def _where_they_part(a: str, b: str) -> int:
    """From where on to show two texts so that their difference is seen: the beginning, if it is near enough."""
    shorter = min(len(a), len(b))
    common = next((place for place in range(shorter) if a[place] != b[place]), shorter)
    return 0 if common < _LONGEST // 2 else common - _BEFORE


def _show(value: Any, start: int = 0) -> str:
    text = ("…" if start else "") + _text(value)[start:]
    return text if len(text) <= _LONGEST else text[: _LONGEST - 1] + "…"


def _text(value: Any) -> str:
    if value is None:
        return "none"
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()
