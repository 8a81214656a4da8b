"""Jury: several models judge the same answer, each has one vote, and the majority decides."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Sequence
from typing import Literal

import msgspec

from steelyard.errors import ConfigurationError
from steelyard.protocols import Identity, InvocationContext, Target
from steelyard.records import EvalCase, InvocationResponse, Sample, Score
from steelyard.scoring.judge.calibration import calibration_file
from steelyard.scoring.judge.judge import Judge, mean_and_std_dev


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
