"""A toy evaluation in inspect_ai: two epochs, a tool, scores of each kind, and an error if asked for.

    python inspect_capitals.py FORMAT FOLDER [error]

Run with a Python that has inspect_ai. Prints, as JSON, where the log is and the figures that inspect computed.
"""

import json
import sys

from inspect_ai import Task, eval
from inspect_ai.dataset import MemoryDataset, Sample
from inspect_ai.model import ModelOutput, ModelUsage, get_model
from inspect_ai.scorer import Score, accuracy, includes, match, mean, scorer, stderr
from inspect_ai.solver import generate, solver, system_message, use_tools
from inspect_ai.tool import tool

CITIES = {"France": "Paris", "Norway": "Oslo", "Peru": "Lima", "Japan": "Tokyo", "Kenya": "Nairobi"}


@tool
def look_up():
    async def execute(country: str):
        """Look up a capital.

        Args:
            country: Whose capital.
        """
        return CITIES[country]

    return execute


@scorer(metrics=[mean(), stderr()])
def words():
    async def score(state, target):
        return Score(value=len(state.output.completion.split()))

    return score


@scorer(metrics=[accuracy()])
def partly():
    async def score(state, target):
        text = state.output.completion
        grade = "C" if text == target.text else "P" if target.text in text else "I"
        return Score(value=grade, explanation="exact, within, or not")

    return score


@scorer(metrics=[])
def tone():
    async def score(state, target):
        return Score(value="short" if len(state.output.completion) < 8 else "long")

    return score


@scorer(metrics={"*": [mean()]})
def shape():
    async def score(state, target):
        text = state.output.completion
        return Score(value={"letters": len(text), "capital": text[:1].isupper()})

    return score


@solver
def break_one():
    async def solve(state, generate):
        if "error" in sys.argv and state.sample_id == "Kenya" and state.epoch == 2:
            raise ValueError("no such country")
        return state

    return solve


def answer(input, tools, tool_choice, config):
    country = next(message.text for message in input if message.role == "user").split("\n")[0]
    if country == "Norway" and input[-1].role == "user":
        output = ModelOutput.for_tool_call("mockllm/model", "look_up", {"country": country})
    else:
        texts = {"Peru": "Cusco", "Japan": "It is Tokyo"}
        output = ModelOutput.from_content("mockllm/model", texts.get(country, CITIES[country]))
    output.usage = ModelUsage(input_tokens=12, output_tokens=3, total_tokens=15)
    return output


def main(form, folder):
    samples = [
        Sample(
            id=country,
            input=f"{country}\n" + "What is its capital? " * 20,
            target=city,
            metadata={"letters": len(city)},
        )
        for country, city in CITIES.items()
    ]
    capitals = Task(
        name="capitals",
        dataset=MemoryDataset(samples[:2] if form == "json" else samples, name="capitals"),
        solver=[system_message("Answer with the city alone."), use_tools(look_up()), break_one(), generate()],
        scorer=[match(), includes(), partly(), words(), tone(), shape()],
        epochs=1 if form == "json" else 2,
        fail_on_error=False,
    )
    model = get_model("mockllm/model", custom_outputs=answer)
    (log,) = eval(capitals, model=model, log_dir=folder, log_format=form, display="none")
    figures = {
        f"{score.scorer}.{score.name}" if score.name != score.scorer else score.name: next(
            iter(score.metrics.values())
        ).value
        for score in log.results.scores
    }
    print(json.dumps({"log": log.location, "figures": figures}))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
