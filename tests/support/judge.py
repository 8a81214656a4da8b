"""Models that say what a test wants them to say, and judges that ask them."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from steelyard import EvalCase, InvocationContext, InvocationResponse
from steelyard.records import Sample
from steelyard.scoring.judge.judge import Judge

CASE = EvalCase(
    id="fr",
    prompt="Capital of France?",
    expected="Paris",
    metadata={"context": "France's capital is Paris.", "other_answer": "Lyon"},
)
ANSWER = InvocationResponse(response_text="It is Paris.")


class Script:
    """A target that gives these replies in turn (the last one for ever) and remembers what it was asked."""

    default_parallelism = 4

    def __init__(self, *replies: Any, model_id: str | None = "m", **identity: Any) -> None:
        self.model_id = model_id
        self.asked: list[EvalCase] = []
        self.contexts: list[InvocationContext] = []
        self._replies = list(replies) or [verdict()]
        self._identity = identity

    def identity(self) -> dict[str, Any]:
        return {"kind": "script", "model": self.model_id, **self._identity}

    async def invoke(self, case: EvalCase, context: InvocationContext) -> InvocationResponse:
        self.asked.append(case)
        self.contexts.append(context)
        await asyncio.sleep(0)
        reply = self._replies[min(len(self.asked), len(self._replies)) - 1]
        if isinstance(reply, BaseException):
            raise reply
        return InvocationResponse(response_text=reply) if isinstance(reply, str) else reply

    def messages(self, call: int = -1) -> list[dict[str, Any]]:
        return self.asked[call].messages or []


def verdict(score: Any = 1.0, passed: Any = True, reason: Any = "right", **more: Any) -> str:
    return json.dumps({"score": score, "passed": passed, "reason": reason, **more})


def judge(target: Any = None, **arguments: Any) -> Judge:
    return Judge(**{"model": "m", "target": Script() if target is None else target, **arguments})


def sample(
    of: Judge, case: EvalCase = CASE, response: InvocationResponse = ANSWER, context: InvocationContext | None = None
) -> Sample:
    return asyncio.run(of.sample(case, response, context or InvocationContext(case_id=case.id)))
