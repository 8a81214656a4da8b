"""Judge: a scorer that asks a model, and how several samples become one score. Jury: several models, a vote each.

A judge that cannot be asked or understood is a scoring error, never a zero.
"""

from __future__ import annotations

import copy
import hashlib
import inspect
import json
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypeAlias

import msgspec

from steelyard.errors import ConfigurationError
from steelyard.masking import masked_description
from steelyard.protocols import Identity, InvocationContext, Target
from steelyard.records import EvalCase, InvocationResponse, Sample, Score
from steelyard.scoring.base import DEFAULT_LIMITS, check_choice, check_share, read_limits
from steelyard.scoring.judge.calibration import calibration_file
from steelyard.scoring.judge.question import (
    DEFAULT_PROMPT,
    ESCAPE_VERSION,
    MAX_TEXT,
    example_turns,
    find_prompt,
    missing,
    question_text,
    variables_of,
)
from steelyard.scoring.judge.verdict import RULES_VERSION, NoVerdict, Verdict, read_verdict, with_note

log = logging.getLogger("steelyard")

_MAX_SHOWN_REPLY = 10_000
_REPAIR = (
    "Your reply could not be read: {error}. Reply again with the same verdict as one JSON object and nothing else: "
    '{{"reason": "one to three sentences", "score": a number from 0 to 1, "passed": true or false}}'
)

Turns = list[dict[str, Any]]

Aggregate: TypeAlias = Literal["mean", "all", "any", "majority"]
AGGREGATES: tuple[Aggregate, ...] = ("mean", "all", "any", "majority")


class _ReplyFailed(Exception):
    """The target's reply is an error, with the target's message."""


class Judge:
    """Asks `target`, which is the model called `model`, what an answer is worth.

    `prompt` is a built-in prompt with its version; a `template`, or `criteria` in plain words, replace it. With
    `when="failed"` only answers that the scorers before it failed are judged. `params` are the sampling parameters
    that the target sends; they are part of `by`. `calibration` is read by the run, which decides whether its scores are
    only advisory. `timeout` is for one sample, `parallelism` for how many are asked at once; `retries`
    replaces the run's.
    """

    def __init__(
        self,
        *,
        model: str,
        target: object = None,
        prompt: str = DEFAULT_PROMPT,
        template: str | None = None,
        criteria: str | Sequence[str] | None = None,
        examples: Sequence[Mapping[str, Any]] = (),
        when: Literal["always", "failed"] = "always",
        aggregate: Aggregate = "mean",
        threshold: float = 0.5,
        name: str = "judge",
        params: Mapping[str, Any] | None = None,
        calibration: object = None,
        timeout: float | str | None = DEFAULT_LIMITS.timeout,
        parallelism: int | None = None,
        retries: int | None = None,
    ) -> None:
        for argument, value in (("model", model), ("name", name)):
            if not isinstance(value, str) or not value.strip():
                raise ConfigurationError(f"{argument} must be a text that is not empty, got {value!r}")
        check_choice("when", when, ("always", "failed"))
        check_choice("aggregate", aggregate, AGGREGATES)
        check_share("threshold", threshold)
        limits = read_limits({"timeout": timeout, "parallelism": parallelism, "retries": retries})
        self.timeout, self.parallelism, self.retries = limits.timeout, limits.parallelism, limits.retries
        self.name = name
        self.model = model
        self.when = when
        self.calibration = None if calibration is None else calibration_file(calibration)
        self._target = _checked_target(target, model)
        self._aggregate: Aggregate = aggregate
        self._threshold = float(threshold)
        self._params = _checked_params(params)
        self._prompt = find_prompt(prompt, template, criteria)
        self._opening: Turns = [
            {"role": "system", "content": self._prompt.system},
            *example_turns(self._prompt, examples, self._threshold),
        ]
        self.by = f"{model}/{self._prompt.name}@{_digest(self._deciding())[:8]}"

    def identity(self) -> Identity:
        """Everything that decides a verdict, and how several are combined."""
        return {
            "kind": "judge",
            "name": self.name,
            "by": self.by,
            "asked": _digest(self._deciding()),
            "params": self._params,
            "target": _facts(self._target),
            "when": self.when,
            "aggregate": self._aggregate,
            "threshold": self._threshold,
        }

    def bound(self, wrap: Callable[[Target], Target]) -> Judge:
        """Return the same judge with its target wrapped."""
        judge = copy.copy(self)
        judge._target = wrap(self._target)
        return judge

    def applies(self, case: EvalCase) -> bool:
        """Whether the case has what the prompt needs: `correctness_v1` needs an expected answer."""
        return missing(self._prompt, variables_of(case, InvocationResponse())) is None

    def fingerprint(self, case: EvalCase, response: InvocationResponse) -> str:
        """Return 16 hex digits of all that a sample depends on: a recorded sample is reused while they are the same."""
        facts = [self.by, self._threshold, _facts(self._target), variables_of(case, response)]
        return _digest(facts)[:16]

    async def score(self, case: EvalCase, response: InvocationResponse) -> Score | None:
        """Score with one sample; None when the prompt does not apply to the case."""
        if not self.applies(case):
            return None
        return self.combine([await self.sample(case, response, InvocationContext(case_id=case.id))])

    async def sample(self, case: EvalCase, response: InvocationResponse, context: InvocationContext) -> Sample:
        """Ask the model once; for a reply that is not a verdict, it gets one chance to correct it."""
        variables = variables_of(case, response)
        lacking = missing(self._prompt, variables)
        if lacking is not None:
            return Sample(error=f"{self._prompt.name} does not apply: the case has no {lacking}")
        swapped = self._prompt.pairwise and context.rng.random() < 0.5
        try:
            question = question_text(self._prompt, variables, swapped=swapped)
            verdict = await self._verdict([*self._opening, {"role": "user", "content": question}], context)
        except NoVerdict as error:
            return Sample(error=f"verdict not understood: {error}")
        except _ReplyFailed as error:
            return Sample(error=str(error))
        except Exception as error:  # noqa: BLE001 - an outage, a template that cannot be filled in: a scoring error
            return Sample(error=masked_description(error))
        return self._sample(_unswapped(verdict) if swapped else verdict)

    def combine(self, samples: Sequence[Sample], *, escalated: bool = False) -> Score:
        """Combine several samples, in order, into one score that keeps all their values and reasons."""
        score = combine_samples(self.name, samples, aggregate=self._aggregate, threshold=self._threshold)
        score.by = self.by
        score.escalated = escalated
        return score

    async def _verdict(self, turns: Turns, context: InvocationContext) -> Verdict:
        """Return the verdict of the first reply, or of a second one for which the model is shown the error."""
        reply = await self._reply(turns, context)
        try:
            return read_verdict(reply)
        except NoVerdict as error:
            shown = {"role": "assistant", "content": reply[:_MAX_SHOWN_REPLY].strip() or "(empty)"}
            again = {"role": "user", "content": _REPAIR.format(error=error)}
            return read_verdict(await self._reply([*turns, shown, again], context))

    async def _reply(self, turns: Turns, context: InvocationContext) -> str:
        # Each call gets copies and a new attempt count: targets and retries may change them.
        asked = EvalCase(id=f"{context.case_id}#judge", messages=copy.deepcopy(turns), metadata={"judge": self.by})
        reply = await self._target.invoke(asked, msgspec.structs.replace(context, attempt=1))
        if not isinstance(reply, InvocationResponse):
            raise TypeError(f"the judge's target returned {type(reply).__name__}, not an InvocationResponse")
        if reply.error is not None:
            raise _ReplyFailed(reply.error)
        return reply.response_text or ""

    def _sample(self, verdict: Verdict) -> Sample:
        enough = verdict.score >= self._threshold
        if verdict.passed is None or verdict.passed == enough:
            return Sample(score=verdict.score, passed=enough, reason=verdict.reason)
        claim = "passed" if verdict.passed else "not passed"
        side = "below" if verdict.passed else "not below"
        note = f"said {claim}, though {verdict.score:g} is {side} the threshold {self._threshold:g}"
        return Sample(score=verdict.score, passed=verdict.passed, reason=with_note(verdict.reason, note))

    def _deciding(self) -> dict[str, Any]:
        """Return everything on our side that decides a verdict."""
        return {
            "opening": self._opening,
            "template": self._prompt.template,
            "repair": _REPAIR,
            "params": self._params,
            "rules": [RULES_VERSION, ESCAPE_VERSION, MAX_TEXT],
        }


def _facts(target: Target) -> dict[str, Any]:
    """Return the target's identity without keys that only warn (`~`): those must not cause paid judging again."""
    return {key: value for key, value in target.identity().items() if not key.startswith("~")}


def _unswapped(verdict: Verdict) -> Verdict:
    """Return the verdict on our answer when it was shown as answer 2."""
    tie = verdict.score == 0.5
    return Verdict(
        score=round(1.0 - verdict.score, 12),
        passed=None if verdict.passed is None else tie or not verdict.passed,
        reason=with_note(verdict.reason, "the answer judged was shown as answer 2"),
    )


def _checked_target(target: object, model: str) -> Target:
    if target is None:
        raise ConfigurationError(f"a judge needs a target that asks {model!r}: pass target=…")
    if inspect.isclass(target) or not isinstance(target, Target):
        raise ConfigurationError(f"a judge's target must be a Target (CallableTarget makes one), got {target!r}")
    if target.model_id is not None and target.model_id != model:
        log.warning("the judge's model is %r, but its target asks %r", model, target.model_id)
    return target


def _checked_params(params: Mapping[str, Any] | None) -> dict[str, Any]:
    if params is not None and not isinstance(params, Mapping):
        raise ConfigurationError(f"params must be a mapping, got {params!r}")
    try:
        checked: dict[str, Any] = json.loads(json.dumps(dict(params or {}), allow_nan=False))
    except (TypeError, ValueError, RecursionError) as error:
        raise ConfigurationError(f"params cannot be written as JSON: {error}") from error
    return checked


def _digest(value: object) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()


def mean_and_std_dev(scores: Sequence[float]) -> tuple[float, float]:
    """Return the mean and population standard deviation of at least one score."""
    mean = math.fsum(scores) / len(scores)
    return mean, math.sqrt(math.fsum((score - mean) ** 2 for score in scores) / len(scores))


def combine_samples(name: str, samples: Sequence[Sample], *, aggregate: Aggregate, threshold: float) -> Score:
    """Combine samples, in order, into one score. Failed ones are listed in `errors` and do not count."""
    if not samples:
        raise ValueError(f"{name}: there are no samples to combine")
    good = [sample for sample in samples if sample.score is not None]
    score = Score(
        name,
        samples=[sample.score for sample in samples],
        errors=[sample.error or "no score" for sample in samples if sample.score is None],
        reasons=[sample.reason for sample in samples],
    )
    if not good:
        return score
    mean, std_dev = mean_and_std_dev([sample.score for sample in good if sample.score is not None])
    score.mean, score.std_dev = mean, std_dev
    passes = [_passed(sample, threshold) for sample in good]
    if aggregate == "mean":
        score.value, score.passed = mean, mean >= threshold
    else:
        score.passed = _agreed(aggregate, passes)
        score.value = float(score.passed)
    score.reason = _reason(aggregate, samples, good, passes, score)
    return score


def _passed(sample: Sample, threshold: float) -> bool:
    return sample.passed if sample.passed is not None else sample.score is not None and sample.score >= threshold


def _agreed(aggregate: Aggregate, passes: Sequence[bool]) -> bool:
    if aggregate == "majority":
        return 2 * sum(passes) > len(passes)
    return all(passes) if aggregate == "all" else any(passes)


def _reason(
    aggregate: Aggregate, samples: Sequence[Sample], good: Sequence[Sample], passes: Sequence[bool], score: Score
) -> str | None:
    """Return the only sample's reason; of several, a summary and the first reason that agrees with the outcome."""
    if len(samples) == 1:
        return good[0].reason
    if aggregate == "mean":
        summary = f"mean {score.mean:.3g} of {len(good)} samples"
    else:
        summary = f"{sum(passes)} of {len(good)} samples passed"
        if aggregate == "majority" and 2 * sum(passes) == len(passes):
            summary += ", a tie, which is not a pass"
    if len(good) < len(samples):
        summary += f", {len(samples) - len(good)} failed"
    agreeing = (sample.reason for sample, passed in zip(good, passes, strict=True) if passed == score.passed)
    first = next((reason for reason in agreeing if reason), None)
    return f"{summary}: {first}" if first else summary


class Jury:
    """Judges that ask different models the same question. More than half of their votes must be a pass.

    `when`, `timeout`, `parallelism` and `retries` are those of the first, which in a suite are those of all.
    With `num_runs` each member is asked as often, and its own samples make its vote. Members that give no verdict have
    no vote; when half of them or more have none, the jury has no verdict.
    """

    def __init__(
        self,
        judges: Sequence[Judge],
        *,
        name: str = "judge",
        when: Literal["always", "failed"] | None = None,
        calibration: object = None,
    ) -> None:
        members = list(judges)
        if len(members) < 2 or not all(isinstance(member, Judge) for member in members):
            raise ConfigurationError(f"a jury needs two judges or more, got {judges!r}")
        models = [member.model for member in members]
        twice = next((model for model in models if models.count(model) > 1), None)
        if twice is not None:
            raise ConfigurationError(
                f"a jury has each model once, got {twice!r} twice; num_runs asks one several times"
            )
        self.name = name
        self.when = members[0].when if when is None else when
        self.calibration = None if calibration is None else calibration_file(calibration)
        self.size = len(members)
        self.timeout, self.parallelism, self.retries = members[0].timeout, members[0].parallelism, members[0].retries
        self._members = members
        digest = hashlib.sha256("\n".join(member.by for member in members).encode()).hexdigest()
        self.by = f"jury of {', '.join(models)}@{digest[:8]}"

    def identity(self) -> Identity:
        """The members' identities, in the order in which they are asked."""
        members = [dict(member.identity()) for member in self._members]
        return {"kind": "jury", "name": self.name, "by": self.by, "when": self.when, "members": members}

    def bound(self, wrap: Callable[[Target], Target]) -> Jury:
        """Return the same jury with the target of each member wrapped."""
        jury = copy.copy(self)
        jury._members = [member.bound(wrap) for member in self._members]
        return jury

    def applies(self, case: EvalCase) -> bool:
        """Whether the case has what the members' prompts need."""
        return all(member.applies(case) for member in self._members)

    def fingerprint(self, case: EvalCase, response: InvocationResponse) -> str:
        """Return 16 hex digits of all that the members' samples depend on."""
        parts = [member.fingerprint(case, response) for member in self._members]
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]

    async def score(self, case: EvalCase, response: InvocationResponse) -> Score | None:
        """Score with one sample of each member; None when the prompt does not apply to the case."""
        if not self.applies(case):
            return None
        context = InvocationContext(case_id=case.id)
        samples = [
            await self.sample(case, response, msgspec.structs.replace(context, trial=run)) for run in range(self.size)
        ]
        return self.combine(samples)

    async def sample(self, case: EvalCase, response: InvocationResponse, context: InvocationContext) -> Sample:
        """Ask one member once: samples go round the members, so that a larger `num_runs` only adds to them."""
        repetition, member = divmod(context.trial, self.size)
        return await self._members[member].sample(case, response, msgspec.structs.replace(context, trial=repetition))

    def combine(self, samples: Sequence[Sample], *, escalated: bool = False) -> Score:
        """Make a vote of each member's samples and a verdict of the votes; all samples and votes are kept."""
        votes = [member.combine(samples[place :: self.size]) for place, member in enumerate(self._members)]
        score = Score(
            self.name,
            samples=[sample.score for sample in samples],
            errors=[
                f"{self._members[place % self.size].model}: {sample.error or 'no score'}"
                for place, sample in enumerate(samples)
                if sample.score is None
            ],
            reasons=[sample.reason for sample in samples],
            by=self.by,
            escalated=escalated,
            votes={member.model: vote.passed for member, vote in zip(self._members, votes, strict=True)},
        )
        valid = [vote for vote in votes if vote.value is not None and vote.passed is not None]
        if 2 * len(valid) <= self.size:
            score.errors = score.errors or ["no member has given a verdict"]
            return score
        known = [sample.score for sample in samples if sample.score is not None]
        score.mean, score.std_dev = mean_and_std_dev(known)
        passes = sum(bool(vote.passed) for vote in valid)
        score.passed = 2 * passes > len(valid)
        score.value = passes / len(valid)
        score.reason = self._reason(passes, valid, score.passed)
        return score

    def _reason(self, passes: int, valid: Sequence[Score], passed: bool) -> str:
        silent = self.size - len(valid)
        summary = f"{passes} of {len(valid)} models passed it"
        if 2 * passes == len(valid):
            summary += ", a tie, which is not a pass"
        if silent:
            summary += f", {silent} gave no verdict"
        agreeing = (vote.reason for vote in valid if vote.passed == passed)
        first = next((reason for reason in agreeing if reason), None)
        return f"{summary}: {first}" if first else summary
