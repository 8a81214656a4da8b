"""The task that `with_inspect.py` has Inspect evaluate: one question a sample, one word as its target."""

from __future__ import annotations

from inspect_ai import Task, task
from inspect_ai.dataset import FieldSpec, json_dataset
from inspect_ai.scorer import exact
from inspect_ai.solver import generate


@task
def peers(cases_file: str, count: int) -> Task:
    fields = FieldSpec(input="prompt", target="expected", id="id")
    return Task(dataset=json_dataset(cases_file, fields, limit=count), solver=generate(), scorer=exact())
