"""What a run is to do, and what it is known by: its plan and its manifest."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence

from steelyard.conditions import load_of
from steelyard.contracts import RepeatedJudge, Scorer, Session, Target
from steelyard.journal.manifest import Manifest, now, versions
from steelyard.options import RunOptions
from steelyard.suite.cycle import cycling
from steelyard.suite.evalset import EvalSet
from steelyard.suite.identity import canonical
from steelyard.suite.plan import Plan, make_plan


def plan_of(
    suite: EvalSet, scorers: Sequence[Scorer], options: RunOptions, check: Callable[[], None] | None = None
) -> Plan:
    """Which cases a run is of; reads the suite once, so that a bad one is refused before anything is called."""
    digest = b""
    if scorers:
        asked: list[object] = [scorer.identity() for scorer in scorers]
        if options.num_runs > 1 and any(isinstance(scorer, RepeatedJudge) for scorer in scorers):
            asked.append({"num_runs": options.num_runs})
        digest = hashlib.sha256(canonical(asked)).digest()
    plan = make_plan(
        suite, limit=options.limit, match=options.match, trials=options.trials, scorers_digest=digest, check=check
    )
    if not options.is_load:
        return plan
    if options.arrivals is None:
        return cycling(plan, requests=options.requests, duration=options.duration)
    # In open loop the schedule knows when to stop; with a time there are as many slots as it had moments for. Without
    # a number or a time it sends each case once.
    requests = None if options.duration is not None else options.requests or plan.cases
    return cycling(plan, requests=requests, duration=None)


def manifest_of(
    target: Target,
    suite: EvalSet,
    scorers: Sequence[Scorer],
    options: RunOptions,
    *,
    planned: int = 0,
    session: Session | None = None,
) -> Manifest:
    """What run.json says of a run that is about to begin."""
    identity = dict(target.identity())
    if session is not None:  # another session, another answer: it belongs to who is asked
        identity["initial_session"] = hashlib.sha256(canonical(session)).hexdigest()[:16]
    return Manifest(
        suite=suite.id,
        target=identity,
        model_id=target.model_id,
        seed=options.seed,
        planned=planned,
        load=load_of(options),
        scorers=[dict(scorer.identity()) for scorer in scorers],
        options=options.for_manifest(),
        versions=versions(),
        created=now(),
    )
