"""What the screenshots show: a pretend support agent that is evaluated, and a pretend endpoint that is loaded."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from steelyard import EvalCase, EvalSet, InvocationContext, InvocationResponse, Runner
from steelyard.errors import TargetError
from steelyard.protocols import derived_rng
from steelyard.report.sweep.page import checked_sweep
from steelyard.run.matrix import Matrix, make_variants, write_matrix
from steelyard.scoring import Judge

QUESTIONS = (
    ("refund-window", "How long may a customer return shoes?", "Within 30 days, unworn."),
    ("refund-sale", "Can sale items be returned?", "Sale items can be exchanged but not refunded."),
    ("ship-europe", "How long does shipping to Norway take?", "Five to seven working days."),
    ("ship-track", "Where do I find my tracking number?", "In the confirmation e-mail and under Orders."),
    ("size-up", "I am between two sizes. Which one should I order?", "Order the larger size."),
    ("gift-card", "Do gift cards expire?", "Gift cards never expire."),
    ("store-hours", "When is the shop in Bergen open on Saturday?", "From 10 to 18."),
    ("care-leather", "How do I clean leather boots?", "With a damp cloth and leather balm; never in the machine."),
)
SLIPS = (
    "Within 14 days, unworn.",
    "I am not sure; please ask in a shop.",
    "Sale items can be refunded within 30 days.",
)
SUITE = """\
id: support-answers
target: {{openai-chat: {{model: assistant-small, base_url: "{address}", stream: true}}}}
cases: cases.jsonl
scorers: [exact]
run: {{parallelism: 20, retries: 0}}
"""
_MOST_TRIES = 5
STEELYARD = str(Path(sys.executable).with_name("steelyard"))


class Assistant:
    """A pretend support agent: it looks things up, is mostly right, and now and then does not answer at all."""

    default_parallelism = 24

    def __init__(self, model_id: str, right: float, pace: float = 0.006, price: float = 1.0) -> None:
        self.model_id, self.right, self.pace, self.price = model_id, right, pace, price

    def identity(self) -> dict[str, Any]:
        return {"kind": "demo", "model": self.model_id, "temperature": 0.4}

    async def invoke(self, case: EvalCase, context: InvocationContext) -> InvocationResponse:
        rng = derived_rng(context.seed, case.id, context.trial, self.model_id)
        first, tokens = 0.28 * rng.lognormvariate(0, 0.45), rng.randrange(18, 90)
        last = first + tokens * self.pace
        await asyncio.sleep(last)
        if rng.random() < 0.035:
            raise TargetError("HTTP 503: the model is overloaded (request req_7f3a)")
        text = str(case.expected) if rng.random() < self.right else rng.choice(SLIPS)
        return InvocationResponse(
            response_text=text,
            messages=_looked_up(case, text),
            time_to_first_token=first,
            time_to_last_token=last,
            time_per_output_token=self.pace,
            num_tokens_input=rng.randrange(240, 420),
            num_tokens_input_cached=160,
            num_tokens_output=tokens,
            cost=self.price * (300 * 0.4 + tokens * 1.6) / 1e6,
            stop_reason="stop",
            request_id=f"req_{rng.randrange(16**8):08x}",
        )


def _looked_up(case: EvalCase, text: str) -> list[dict[str, Any]]:
    arguments = json.dumps({"query": case.prompt})
    call = {"id": "call_1", "type": "function", "function": {"name": "search_help", "arguments": arguments}}
    return [
        {"role": "user", "content": case.prompt},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": f"Help centre: {case.expected}"},
        {"role": "assistant", "content": text},
    ]


class Grader:
    """The judge's pretend model."""

    model_id = "judge-large"
    default_parallelism = 24

    def identity(self) -> dict[str, Any]:
        return {"kind": "demo", "model": self.model_id}

    async def invoke(self, case: EvalCase, context: InvocationContext) -> InvocationResponse:
        rng = derived_rng(context.seed, context.case_id, context.trial, context.attempt, str(case.messages))
        score = rng.choice((0.0, 0.0, 0.2, 0.9))
        reason = "Says the same in other words." if score > 0.5 else "Contradicts the help centre on the terms."
        return InvocationResponse(response_text=json.dumps({"reason": reason, "score": score, "passed": score > 0.5}))


def cases(rounds: int) -> list[EvalCase]:
    """The questions, each from a number of customers."""
    return [
        EvalCase(
            id=f"{name}-{number:02}",
            prompt=f"{prompt} (customer {number})",
            expected=expected,
            metadata={"topic": name.partition("-")[0], "customer": "new" if number % 3 else "regular"},
        )
        for number in range(1, rounds + 1)
        for name, prompt, expected in QUESTIONS
    ]


def compared(folder: Path) -> Path:
    """A matrix of three models and two prompts, each case asked twice."""
    axes = {"target": ["small", "medium", "large"], "prompt": ["brief", "careful"]}
    rates, paces, prices = (0.6, 0.84, 0.88), (0.003, 0.006, 0.012), (0.3, 1.0, 4.0)
    variants = make_variants(axes)
    folder.mkdir()
    write_matrix(folder, Matrix(suite="support-answers", axes=axes, variants=variants))
    for variant in variants:
        size, careful = axes["target"].index(variant.axes["target"]), variant.axes["prompt"] == "careful"
        right, pace = rates[size] + 0.08 * careful, paces[size] * (1.5 if careful else 1.0)
        model = Assistant(f"assistant-{variant.axes['target']}", right, pace, prices[size] * (1.4 if careful else 1.0))
        evaluated(folder / variant.directory, model, trials=2)
    return folder


def evaluated(place: Path, assistant: Assistant, *, trials: int = 1) -> None:
    """A run with passes, failures, errors, judgements and costs; with several trials also flaky cases."""
    asked = iter(cases(25))  # read once: the run keeps its cases, so that reports know what was expected
    suite = EvalSet("support-answers", asked, system_prompt="Answer from the help centre, in one sentence.")
    judge = Judge(model="judge-large", target=Grader(), when="failed")
    runner = Runner(assistant, suite, ["exact", judge], trials=trials, num_runs=3, retries=0)
    runner.run_sync(output_path=place, progress="off", low_memory=True)


@contextlib.contextmanager
def loaded_endpoint(folder: Path, rounds: int, *flags: str) -> Iterator[Path]:
    """A mock server in a separate process; the file of a suite that asks it."""
    answers = folder / "cases.jsonl"
    rows = ({"id": case.id, "prompt": case.prompt, "expected": case.expected} for case in cases(rounds))
    answers.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    command = [STEELYARD, "mock", "--answers", str(answers), *flags]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as mock:
        try:
            assert mock.stdout is not None
            suite = folder / "suite.yaml"
            suite.write_text(SUITE.format(address=mock.stdout.readline().strip()), encoding="utf-8")
            yield suite
        finally:
            mock.terminate()


def swept(folder: Path) -> Path:
    """A sweep over an endpoint that bears 40 calls at once; made again where this machine was too busy for it."""
    place = folder / "runs" / "support-sweep"
    flags = ["--latency", "normal:400ms,40ms", "--tokens-per-second", "normal:90,8", "--max-concurrency", "40"]
    with loaded_endpoint(folder, 8, *flags) as suite:
        levels = ["-j", "1,4,8,16,24,32,40,48,64", "--slo", "ttft_p99<600ms,error_rate<1%"]
        command = [STEELYARD, "sweep", suite.name, *levels, "-o", str(place.relative_to(folder)), "-q", "--force"]
        for _ in range(_MOST_TRIES):
            subprocess.run(command, cwd=folder, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            found = checked_sweep(place) or {}
            if found["recommendation"]["level"] == 40 and all(level["invalid"] is None for level in found["levels"]):
                return place
    raise SystemExit(f"this machine is too busy: {_MOST_TRIES} sweeps, and in each the client was the bottleneck")


@contextlib.contextmanager
def running(folder: Path) -> Iterator[None]:
    """A run that goes on while the block lasts, against an endpoint that fails now and then."""
    chance = ["--right-rate", "0.86", "--error-rate", "0.02", "--slow-first-rate", "0.03", "--slow-first", "1s"]
    flags = ["--latency", "lognormal:260ms,0.35", "--tokens-per-second", "normal:60,10", *chance]
    with loaded_endpoint(folder, 200, *flags) as suite:
        command = [STEELYARD, "run", suite.name, "-o", "runs/support-answers-live", "--no-progress", "-q"]
        with subprocess.Popen(command, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as run:
            try:
                yield
            finally:
                run.terminate()


def worked(run: Path, models: str) -> Path:
    """Four tasks of examples/coding, by the agent that asks its models through the gateway; they are at `models`."""
    example = Path(__file__).resolve().parent.parent / "examples" / "coding" / "gateway.yaml"
    arguments = ["run", str(example), "--out", str(run), "--no-progress", "-n", "4"]
    keys = {"OPENAI_BASE_URL": models, "OPENAI_API_KEY": "any", "STEELYARD_WORK": str(run.with_name("work"))}
    programs = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    environment = {**os.environ, **keys, "PATH": programs}
    subprocess.run([STEELYARD, *arguments], env=environment, check=True, stdout=subprocess.DEVNULL)
    return run
