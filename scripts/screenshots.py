"""Makes docs/images/*.png: a simulated run, its report, and what a browser shows of it.

    python scripts/screenshots.py [FOLDER]

Needs Playwright and a Chromium, as the browser tests do.
"""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))

from steelyard import EvalCase, EvalSet, InvocationContext, InvocationResponse, Runner  # noqa: E402
from steelyard.contracts import derived_rng  # noqa: E402
from steelyard.errors import TargetError  # noqa: E402
from steelyard.report.page import page  # noqa: E402
from steelyard.scoring import Judge  # noqa: E402
from support_browser import browser, opened, why_no_browser  # noqa: E402

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


class Assistant:
    """A pretend support agent: it looks things up, is mostly right, and now and then does not answer at all."""

    model_id = "assistant-small"
    default_parallelism = 24

    def identity(self) -> dict[str, Any]:
        return {"kind": "demo", "model": self.model_id, "temperature": 0.4}

    async def invoke(self, case: EvalCase, context: InvocationContext) -> InvocationResponse:
        rng = derived_rng(context.seed, case.id, context.trial)
        first, tokens = 0.28 * rng.lognormvariate(0, 0.45), rng.randrange(18, 90)
        last = first + tokens * 0.006
        await asyncio.sleep(last)
        if rng.random() < 0.035:
            raise TargetError("HTTP 503: the model is overloaded (request req_7f3a)")
        text = str(case.expected) if rng.random() < 0.83 else rng.choice(SLIPS)
        call = {
            "id": "call_1",
            "type": "function",
            "function": {"name": "search_help", "arguments": json.dumps({"query": case.prompt})},
        }
        messages = [
            {"role": "user", "content": case.prompt},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "call_1", "content": f"Help centre: {case.expected}"},
            {"role": "assistant", "content": text},
        ]
        return InvocationResponse(
            response_text=text,
            messages=messages,
            time_to_first_token=first,
            time_to_last_token=last,
            time_per_output_token=0.006,
            num_tokens_input=rng.randrange(240, 420),
            num_tokens_input_cached=160,
            num_tokens_output=tokens,
            cost=(300 * 0.4 + tokens * 1.6) / 1e6,
            stop_reason="stop",
            request_id=f"req_{rng.randrange(16**8):08x}",
        )


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


def demo_run(place: Path) -> None:
    """A run with passes, failures, flaky cases, errors, judgements and costs."""
    cases = [
        EvalCase(id=f"{name}-{number:02}", prompt=f"{prompt} (customer {number})", expected=expected)
        for number in range(1, 26)
        for name, prompt, expected in QUESTIONS
    ]
    suite = EvalSet("support-answers", cases, system_prompt="Answer from the help centre, in one sentence.")
    judge = Judge(model="judge-large", target=Grader(), when="failed")
    runner = Runner(
        Assistant(), EvalSet("support-answers", iter(suite)), ["exact", judge], trials=3, num_runs=3, retries=0
    )
    runner.run_sync(output_path=place, progress="off", low_memory=True)


def shoot(report: Path, folder: Path) -> list[Path]:
    """The report's views as images."""
    made = []

    def take(shown: Any, name: str, **options: Any) -> None:
        shown.page.wait_for_timeout(300)
        shown.page.screenshot(path=folder / name, **options)
        made.append(folder / name)

    with browser() as started:
        for scheme in ("light", "dark"):
            look = {"ready": "html[data-ready=cases]", "color_scheme": scheme, "device_scale_factor": 1.5}
            with opened(started, report.as_uri(), **look) as shown:
                take(shown, f"report-overview-{scheme}.png")
                shown.page.keyboard.press("f")
                shown.page.locator(".row", has_text="flaky").first.click()
                shown.page.wait_for_selector("#drawer[data-record]")
                take(shown, f"report-case-{scheme}.png")
    return made


def main(folder: Path) -> int:
    """Make all of them; 1 where there is no browser."""
    if (reason := why_no_browser()) is not None:
        sys.stderr.write(f"{reason}\n")
        return 1
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as place:
        run, report = Path(place) / "runs" / "support-answers", Path(place) / "report.html"
        demo_run(run)
        with report.open("w", encoding="utf-8") as file:
            file.writelines(piece.replace(f"{place}/", "") for piece in page(run))
        for path in shoot(report, folder):
            sys.stdout.write(f"{path}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "docs" / "images"))
