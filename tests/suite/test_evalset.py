"""Reading cases from JSONL, CSV and memory."""

from __future__ import annotations

import csv
import json
import tracemalloc
from collections.abc import Callable, Iterator
from copy import copy
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from steelyard import EvalCase, EvalSet, SuiteError
from steelyard.errors import ConfigurationError

Write = Callable[..., Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def write(content: str | bytes, name: str = "cases.jsonl") -> Path:
        path = tmp_path / name
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return path

    return write


def read_one(path: Path) -> EvalCase:
    (case,) = EvalSet.from_csv(path) if path.suffix == ".csv" else EvalSet.from_jsonl(path)
    return case


# JSONL


def test_known_columns_are_fields_and_all_others_are_metadata(write: Write) -> None:
    row = {"id": 7, "prompt": "p", "expected": {"a": 1}, "topic": "geo", "metadata": {"level": 2}}
    assert read_one(write(json.dumps(row))) == EvalCase(
        id="7", prompt="p", expected={"a": 1}, metadata={"topic": "geo", "level": 2}
    )


def test_the_file_stem_is_the_default_id(write: Write) -> None:
    path = write('{"prompt": "p"}', "capitals.jsonl")
    assert EvalSet.from_jsonl(path).id == "capitals"
    assert EvalSet.from_jsonl(path, id="x").id == "x"


def test_the_suite_system_prompt_is_for_cases_that_have_none(write: Write) -> None:
    path = write('{"prompt": "p"}\n{"prompt": "q", "system_prompt": "own"}')
    prompts = [case.system_prompt for case in EvalSet.from_jsonl(path, system_prompt="shared")]
    assert prompts == ["shared", "own"]


def test_a_suite_system_prompt_leaves_automatic_ids_alone(write: Write) -> None:
    path = write('{"prompt": "p"}')
    ids = [[case.id for case in EvalSet.from_jsonl(path, system_prompt=prompt)] for prompt in (None, "a", "b")]
    assert ids[0] == ids[1] == ids[2]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("[1]", r"a row must be an object, got a list \(\[1\]\)"),
        ("nul", "is not valid JSON: Expecting value at column 1"),
        ('{"prompt": "p"', "is not valid JSON: Expecting ',' delimiter at column 15"),
        ('{"answer": 1}', "has neither prompt nor messages; columns: answer; `fields` maps other columns"),
        ('{"promt": "p"}', "columns: promt; is 'promt' meant as 'prompt'"),
        ('{"prompt": null, "messages": []}', "has neither prompt nor messages"),
        ('{"prompt": 3}', r"prompt must be text, got a number \(3\); columns: prompt"),
        ('{"prompt": ["p"]}', "prompt must be text, got a list"),
        ('{"prompt": "p", "system_prompt": 1}', "system_prompt must be text, got a number"),
        ('{"messages": "hi"}', "messages must be a list of objects, got text"),
        ('{"messages": [{"role": "user"}, "hi"]}', r"got text \('hi'\) as messages\[1\]"),
        ('{"prompt": "p", "tools": {}}', "tools must be a list of objects, got an object"),
        ('{"prompt": "p", "metadata": 1}', "metadata must be an object, got a number"),
        ('{"prompt": "p", "id": true}', "id must be text or a number, got a boolean"),
        ('{"prompt": "p", "id": [1]}', "id must be text or a number, got a list"),
        ('{"prompt": "p", "expected": NaN}', "NaN is not JSON"),
        ('{"prompt": "p", "expected": 1e999}', "out of range"),
        ('{"prompt": "p", "expected": ' + "[" * 100_000, "nested too deeply"),
        (b'{"prompt": "\xff"}', "is not UTF-8: byte 0xff at byte 13"),
    ],
)
def test_a_bad_row_is_an_error_with_its_line(write: Write, row: str | bytes, message: str) -> None:
    row = row if isinstance(row, bytes) else row.encode()
    path = write(b'{"prompt": "fine"}\n\n' + row + b"\n")
    with pytest.raises(SuiteError, match=message) as caught:
        list(EvalSet.from_jsonl(path))
    assert (caught.value.path, caught.value.line) == (str(path), 3)
    assert str(caught.value).startswith(f"{path}:3: ")


@pytest.mark.parametrize(
    ("content", "hint"),
    [(b'[\n  {"prompt": "p"}\n]', "one JSON document"), ('{"prompt": "p"}'.encode("utf-16"), "UTF-16")],
)
def test_a_file_of_another_kind_is_recognised(write: Write, content: bytes, hint: str) -> None:
    with pytest.raises(SuiteError, match=hint):
        list(EvalSet.from_jsonl(write(content)))


@pytest.mark.parametrize("make", [EvalSet.from_jsonl, EvalSet.from_csv, EvalSet.from_yaml])
def test_a_missing_file_or_a_directory_is_an_error_at_once(make: Callable[..., EvalSet], tmp_path: Path) -> None:
    with pytest.raises(SuiteError, match="no such file"):
        make(tmp_path / "missing")
    with pytest.raises(SuiteError, match="is a directory"):
        make(tmp_path)


def test_a_lone_surrogate_a_nul_and_braces_are_only_text(write: Write) -> None:
    path = write(r'{"prompt": "\ud800 \u0000 {{ 7 * 7 }}", "x": "{% raise %}"}')
    for fields in (None, {"prompt": "{{ prompt }}"}):
        (case,) = EvalSet.from_jsonl(path, fields=fields)
        assert case.prompt == "\ud800 \0 {{ 7 * 7 }}"
        assert case.metadata == {"x": "{% raise %}"}


def test_a_line_of_five_megabytes_is_a_case(write: Write) -> None:
    assert len(read_one(write(json.dumps({"prompt": "x" * 5_000_000}))).prompt or "") == 5_000_000


def test_a_long_file_is_never_held_in_memory(tmp_path: Path) -> None:
    path = tmp_path / "cases.jsonl"
    with path.open("w") as file:
        for number in range(10_000):
            file.write(json.dumps({"prompt": f"{number} " + "x" * 1000}) + "\n")
    tracemalloc.start()
    try:
        assert sum(1 for _ in EvalSet.from_jsonl(path)) == 10_000
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert path.stat().st_size > 10_000_000
    assert peak < 2_000_000


# CSV


def test_an_empty_cell_is_absent_and_some_columns_hold_json(write: Write) -> None:
    content = 'id,prompt,messages,expected,metadata,note\n,,"[{""role"": ""user""}]",,"{""a"": 1}",\nb,p,,7,,n\n'
    first, second = EvalSet.from_csv(write(content, "cases.csv"))
    assert (first.prompt, first.messages, first.expected) == (None, [{"role": "user"}], None)
    assert first.metadata == {"a": 1, "note": ""}
    assert second == EvalCase(id="b", prompt="p", expected="7", metadata={"note": "n"})


def test_a_csv_error_names_the_line_its_row_starts_on(write: Write) -> None:
    path = write('id,prompt\na,"one\ntwo\nthree"\n\nb,"four\nfive"\nc,\n', "cases.csv")
    with pytest.raises(SuiteError, match="neither prompt nor messages; columns: id, prompt") as caught:
        list(EvalSet.from_csv(path))
    assert caught.value.line == 8


@pytest.mark.parametrize(
    ("content", "line", "message"),
    [
        ("", None, "has no header row"),
        ("a,a\n1,2\n", 1, "has two columns named 'a'"),
        ("id,prompt\na,b,c\n", 2, "has 3 cells, the header has 2: id, prompt"),
        ('id,prompt\na,b\nc,"open\nd,e\n', 3, "is a quote left open"),
        ("id,prompt\na,b\nc,\xff\n".encode("latin-1"), 3, "is not UTF-8: byte 0xff"),
        ('prompt,messages\n,"[1"\n', 2, "messages is not valid JSON"),
        ('prompt,tools\nx,"{}"\n', 2, "tools must be a list of objects"),
    ],
)
def test_a_bad_csv_is_an_error_with_its_line(
    write: Write, content: str | bytes, line: int | None, message: str
) -> None:
    with pytest.raises(SuiteError, match=message) as caught:
        list(EvalSet.from_csv(write(content, "cases.csv")))
    assert caught.value.line == line


def test_a_column_without_a_name_is_left_out(write: Write) -> None:
    assert read_one(write(",prompt\n0,p\n", "cases.csv")).metadata == {}


def test_a_cell_of_a_megabyte_is_read(write: Write) -> None:
    assert len(read_one(write("prompt\n" + "x" * 1_000_000, "cases.csv")).prompt or "") == 1_000_000


# memory


def test_a_list_a_function_and_an_iterator_give_the_same_cases() -> None:
    cases = [EvalCase(prompt="a"), {"id": 3, "prompt": "b"}]
    sets = [EvalSet("s", cases), EvalSet("s", lambda: iter(cases)), EvalSet("s", iter(cases))]
    assert [suite.one_shot for suite in sets] == [False, False, True]
    read = [list(suite) for suite in sets]
    assert read[0] == read[1] == read[2] == list(sets[0]) == list(sets[1])


def test_the_callers_cases_are_not_changed() -> None:
    case = EvalCase(prompt="a")
    (complete,) = EvalSet("s", [case], system_prompt="x")
    assert (case.id, case.system_prompt) == ("", None)
    assert complete.id
    assert complete.system_prompt == "x"


def test_reading_an_iterator_twice_is_an_error() -> None:
    suite = EvalSet("s", iter([EvalCase(prompt="a")]))
    list(suite)
    with pytest.raises(SuiteError, match="one-shot iterator that was already read"):
        list(suite)


@pytest.mark.parametrize(
    ("cases", "message"),
    [
        ([{"prompt": "a"}, {"prompt": "b", "expcted": 1}], r"unknown key cases\[1\].expcted; did you mean 'expected'"),
        ([EvalCase(prompt="a"), EvalCase()], r"cases\[1\]: has neither prompt nor messages"),
        ([EvalCase(prompt="a"), "b"], r"cases\[1\]: must be an EvalCase or an object, got text"),
        ([EvalCase(prompt="a"), EvalCase(messages=[{"a": float("nan")}])], r"cases\[1\]: a value cannot be written"),
    ],
)
def test_a_bad_case_in_memory_is_an_error_with_its_place(cases: list[object], message: str) -> None:
    with pytest.raises(SuiteError, match=message):
        list(EvalSet("s", cases))  # type: ignore[arg-type]


@pytest.mark.parametrize("case", [EvalCase(prompt="p"), EvalCase(messages=[{"role": "user"}])])
def test_an_id_outside_ascii_is_kept_and_one_that_is_not_unicode_is_refused(case: EvalCase) -> None:
    named, broken = copy(case), copy(case)
    named.id, broken.id = "Zürich", "Z\ud800"
    assert [each.id for each in EvalSet("s", [named])] == ["Zürich"]
    with pytest.raises(SuiteError, match=r"id must be Unicode text, got 'Z\\ud800' with a lone surrogate"):
        list(EvalSet("s", [broken]))


@pytest.mark.parametrize("cases", ["text", b"bytes", {"prompt": "p"}, 3, None])
def test_what_cannot_be_cases_is_refused_at_once(cases: object) -> None:
    with pytest.raises(ConfigurationError, match="cases must be an iterable"):
        EvalSet("s", cases)  # type: ignore[arg-type]


@pytest.mark.parametrize("id", ["", 3, None])
def test_a_suite_needs_an_id(id: object) -> None:
    with pytest.raises(ConfigurationError, match="id must be text"):
        EvalSet(id, [])  # type: ignore[arg-type]


# spool


def test_a_spooled_iterator_reads_like_the_list_it_came_from(tmp_path: Path) -> None:
    cases = [EvalCase(prompt="\ud800", expected=[None, 1.5]), EvalCase(prompt="\ud800"), EvalCase(id="x", prompt="é")]
    spooled = EvalSet("s", iter(cases), system_prompt="sys").spool(tmp_path / "cases.jsonl")
    expected = list(EvalSet("s", cases, system_prompt="sys"))
    assert (spooled.id, spooled.one_shot) == ("s", False)
    assert list(spooled) == list(spooled) == expected
    assert [path.name for path in tmp_path.iterdir()] == ["cases.jsonl"]


def test_a_spool_that_fails_leaves_the_old_file_and_no_draft(tmp_path: Path) -> None:
    def broken() -> Iterator[EvalCase]:
        yield EvalCase(prompt="a")
        raise RuntimeError("the source broke")

    (tmp_path / "cases.jsonl").write_text("old")
    with pytest.raises(SuiteError, match="failed after 1 of them: RuntimeError: the source broke"):
        EvalSet("s", broken()).spool(tmp_path / "cases.jsonl")
    assert [path.read_text() for path in tmp_path.iterdir()] == ["old"]


def test_spooling_what_json_cannot_hold_names_the_case(tmp_path: Path) -> None:
    with pytest.raises(SuiteError, match=r"cases\[0\]: a value cannot be written as JSON"):
        EvalSet("s", iter([EvalCase(prompt="a", expected=float("nan"))])).spool(tmp_path / "cases.jsonl")


# properties

texts = st.text(st.characters(), max_size=10)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | texts,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(texts, inner, max_size=2),
    max_leaves=4,
)
objects = st.dictionaries(texts, json_values, max_size=2)
cases_strategy = st.lists(
    st.builds(
        EvalCase,
        prompt=texts,
        messages=st.none() | st.lists(objects, min_size=1, max_size=2),
        system_prompt=st.none() | texts,
        tools=st.none() | st.lists(objects, max_size=2),
        expected=json_values,
        metadata=objects,
    ),
    max_size=6,
)
anywhere = settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60)


def as_row(case: EvalCase) -> str:
    return json.dumps({name: getattr(case, name) for name in EvalCase.__struct_fields__})


@anywhere
@given(cases_strategy)
def test_cases_written_as_jsonl_read_back_the_same(tmp_path: Path, cases: list[EvalCase]) -> None:
    path = tmp_path / "cases.jsonl"
    path.write_text("".join(as_row(case) + "\n" for case in cases))
    assert list(EvalSet.from_jsonl(path)) == list(EvalSet("s", cases))


@anywhere
@given(cases_strategy, st.data())
def test_a_bom_crlf_and_blank_lines_change_nothing(tmp_path: Path, cases: list[EvalCase], data: st.DataObject) -> None:
    path = tmp_path / "cases.jsonl"
    content = "\ufeff" if data.draw(st.booleans()) else ""
    for case in cases:
        content += data.draw(st.sampled_from(["", "\n", " \r\n", "\t\n\n"]))
        content += as_row(case) + data.draw(st.sampled_from(["\n", "\r\n", " \n"]))
    path.write_bytes(content.encode())
    assert list(EvalSet.from_jsonl(path)) == list(EvalSet("s", cases))


@anywhere
@given(st.lists(st.fixed_dictionaries({"prompt": st.text(min_size=1), "note": st.text()}), max_size=5))
def test_csv_rows_read_back_the_same(tmp_path: Path, rows: list[dict[str, str]]) -> None:
    path = tmp_path / "cases.csv"
    with path.open("w", newline="", encoding="utf-8-sig") as file:
        writer = csv.DictWriter(file, ["prompt", "note"], quoting=csv.QUOTE_ALL)
        writer.writeheader()
        writer.writerows(rows)
    read = [{"prompt": case.prompt, **case.metadata} for case in EvalSet.from_csv(path)]
    assert read == rows


few_prompts = st.lists(st.sampled_from(["a", "b", "c"]), max_size=12)


def ids_of(prompts: list[str]) -> list[str]:
    return [case.id for case in EvalSet("s", [EvalCase(prompt=prompt) for prompt in prompts])]


@given(few_prompts, st.sampled_from(["a", "z"]))
def test_ids_are_unique_and_stay_when_a_case_is_appended(prompts: list[str], more: str) -> None:
    ids = ids_of([*prompts, more])
    assert len(set(ids)) == len(ids)
    assert ids[:-1] == ids_of(prompts)


@given(few_prompts, st.integers(0, 12))
def test_ids_stay_when_another_case_is_put_in_or_taken_out(prompts: list[str], place: int) -> None:
    place = min(place, len(prompts))
    ids = ids_of([*prompts[:place], "z", *prompts[place:]])
    assert ids[:place] + ids[place + 1 :] == ids_of(prompts)


def test_an_automatic_id_is_a_digest_and_an_occurrence() -> None:
    first, second = ids_of(["a", "a"])
    assert first.endswith("-1")
    assert second == first[:-1] + "2"
    assert len(first) == 14
