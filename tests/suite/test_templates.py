"""`fields`: columns mapped to a case's fields by templates."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from steelyard import EvalCase, EvalSet, SuiteError
from steelyard.errors import ConfigurationError


def mapped(tmp_path: Path, row: dict[str, Any], fields: dict[str, str]) -> EvalCase:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(row))
    (case,) = EvalSet.from_jsonl(path, fields=fields)
    return case


def test_unmentioned_columns_become_metadata_and_known_ones_map_by_name(tmp_path: Path) -> None:
    row = {"id": 1, "question": "q", "answer": 4, "topic": "t", "metadata": {"x": 1}}
    case = mapped(tmp_path, row, {"prompt": "Q: {{ question }}", "expected": "{{answer}}"})
    assert case == EvalCase(id="1", prompt="Q: q", expected=4, metadata={"topic": "t", "x": 1})


@pytest.mark.parametrize("template", ["{{ answers }}", "{{- answers -}}", "{{answers}}\n", "{{ answers | list }}"])
def test_a_sole_expression_yields_the_value_itself(tmp_path: Path, template: str) -> None:
    case = mapped(tmp_path, {"q": "q", "answers": [1, 2.5]}, {"prompt": "{{q}}", "expected": template})
    assert case.expected == [1, 2.5]


def test_a_sole_expression_that_streams_is_made_a_list(tmp_path: Path) -> None:
    row = {"q": "q", "answers": [{"text": "a"}, {"text": "b"}]}
    case = mapped(tmp_path, row, {"prompt": "{{q}}", "expected": "{{ answers | map(attribute='text') }}"})
    assert case.expected == ["a", "b"]


@pytest.mark.parametrize("template", ["{{ n }}{{ n }}", " {{ n }}{{ '' }}", "{{ n }}!", "{% if n %}{{ n }}{% endif %}"])
def test_any_other_template_yields_text(tmp_path: Path, template: str) -> None:
    assert isinstance(mapped(tmp_path, {"n": 3}, {"prompt": "{{ n | string }}", "expected": template}).expected, str)


def test_a_text_template_for_messages_is_json(tmp_path: Path) -> None:
    template = '[{"role": "user", "content": {{ q | tojson }}}]'
    case = mapped(tmp_path, {"q": 'a "<b>"'}, {"messages": template})
    assert case.messages == [{"role": "user", "content": 'a "<b>"'}]


def test_a_template_for_the_prompt_leaves_the_messages_column_out(tmp_path: Path) -> None:
    row = {"messages": [{"role": "user", "content": "hi"}], "prompt": "x"}
    case = mapped(tmp_path, row, {"prompt": "{{ messages[0].content }}"})
    assert (case.prompt, case.messages) == ("hi", None)


def test_a_column_replaced_by_a_template_is_kept_as_metadata(tmp_path: Path) -> None:
    case = mapped(tmp_path, {"prompt": "p", "expected": "old", "answer": "new"}, {"expected": "{{ answer }}"})
    assert (case.expected, case.metadata) == ("new", {"expected": "old"})


def test_any_column_can_be_reached_through_the_row(tmp_path: Path) -> None:
    assert mapped(tmp_path, {"the question": "q"}, {"prompt": "{{ row['the question'] }}"}).prompt == "q"


def test_csv_cells_are_mapped_too(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_text('q,a,chat\nwhy?,,"[{""role"": ""user""}]"\n')
    (case,) = EvalSet.from_csv(path, fields={"messages": "{{ chat }}", "expected": "{{ a }}"})
    assert (case.messages, case.expected, case.metadata) == ([{"role": "user"}], None, {"q": "why?"})


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ answr }}", "fields.expected cannot be filled in: 'answr' is undefined; columns: prompt, answer"),
        ("{{ answr }}!", "'answr' is undefined"),
        ("{{ answer.__class__.__mro__ }}", "fields.expected cannot be filled in: .*unsafe"),
        ("{{ 1 / 0 }}", "division by zero"),
    ],
)
def test_a_template_that_a_row_cannot_fill_is_an_error_with_the_line(
    tmp_path: Path, template: str, message: str
) -> None:
    with pytest.raises(SuiteError, match=message) as caught:
        mapped(tmp_path, {"prompt": "p", "answer": "a"}, {"expected": template})
    assert caught.value.line == 1


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"promt": "{{q}}"}, r"unknown key fields.promt; did you mean 'prompt'\?"),
        ({"prompt": "{{ q"}, "fields.prompt is not a template: .* in '{{ q'"),
        ({"prompt": "{{ q | nosuchfilter }}"}, "nosuchfilter"),
        ({"prompt": 3}, r"fields.prompt must be a template \(text\), got 3"),
        ({}, "fields must map case fields to templates"),
    ],
)
def test_bad_fields_are_refused_before_a_row_is_read(tmp_path: Path, fields: Any, message: str) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text("not json")
    with pytest.raises(ConfigurationError, match=message):
        EvalSet.from_jsonl(path, fields=fields)


def test_jinja_and_yaml_are_imported_only_when_they_are_needed() -> None:
    code = "import sys, steelyard.run.plan; sys.exit(bool({'jinja2', 'yaml'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
