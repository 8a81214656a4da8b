"""Suite files in YAML."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from steelyard import EvalCase, EvalSet, SuiteError
from steelyard.errors import ConfigurationError, reject_unknown
from steelyard.suite.suite_file import SuiteFile, read_suite_file

Write = Callable[[str], SuiteFile]


@pytest.fixture
def suite_file(tmp_path: Path) -> Write:
    def write(content: str) -> SuiteFile:
        path = tmp_path / "capitals.yaml"
        path.write_text(content, encoding="utf-8")
        return read_suite_file(path)

    return write


def test_a_suite_file_is_read_whole(suite_file: Write, tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "rows.jsonl").write_text('{"id": "fr", "question": "q", "answer": "Paris"}')
    suite = suite_file(
        """
        id: capital cities
        description: Which city?
        target: {openai-chat: {model: m, params: {temperature: 0}}}
        system_prompt: One word.
        cases: data/rows.jsonl
        fields: {prompt: "{{question}}", expected: "{{answer}}"}
        scorers: [exact, {judge: {model: j}}]
        run: {parallelism: 50}
        gate: {min_pass_rate: 0.8}
        """
    )
    assert (suite.id, suite.description, suite.system_prompt) == ("capital cities", "Which city?", "One word.")
    assert suite.target == {"openai-chat": {"model": "m", "params": {"temperature": 0}}}
    assert suite.scorers == ["exact", {"judge": {"model": "j"}}]
    assert (suite.run, suite.gate) == ({"parallelism": 50}, {"min_pass_rate": 0.8})
    assert suite.cases.id == "capital cities"
    expected = EvalCase(id="fr", prompt="q", system_prompt="One word.", expected="Paris")
    assert list(suite.cases) == list(EvalSet.from_yaml(suite.path)) == [expected]


def test_what_is_left_out_has_a_default(suite_file: Write) -> None:
    suite = suite_file("cases: [{prompt: p}]")
    assert (suite.id, suite.target, suite.scorers, suite.run, suite.gate) == ("capitals", None, [], {}, {})


def test_inline_cases_may_be_mapped_by_fields(suite_file: Write) -> None:
    suite = suite_file("{cases: [{q: a, n: 1}], fields: {prompt: '{{q}}'}}")
    assert [(case.prompt, case.metadata) for case in suite.cases] == [("a", {"n": 1})]


def test_csv_cases_are_found_beside_the_suite_file(suite_file: Write, tmp_path: Path) -> None:
    (tmp_path / "rows.CSV").write_text("prompt\np\n")
    assert [case.prompt for case in suite_file("cases: rows.CSV").cases] == ["p"]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("no", "no"),
        ("yes", "yes"),
        ("on", "on"),
        ("Off", "Off"),
        ("y", "y"),
        ("12:30", "12:30"),
        ("2024-01-02", "2024-01-02"),
        ("1_000", "1_000"),
        ("007", "007"),
        ("00.5", "00.5"),
        ("0b11", "0b11"),
        ("=", "="),
        ("1.2.3", "1.2.3"),
        ("true", True),
        ("False", False),
        ("null", None),
        ("~", None),
        ("", None),
        ("12", 12),
        ("-3", -3),
        ("0", 0),
        ("0o17", 15),
        ("0x1F", 31),
        ("1.5", 1.5),
        ("-.5e3", -500.0),
        ("1e3", 1000.0),
        (".inf", float("inf")),
        ("'12'", "12"),
    ],
)
def test_scalars_are_read_as_yaml_1_2_reads_them(suite_file: Write, text: str, value: object) -> None:
    suite = suite_file(f"cases:\n- prompt: p\n  expected: {text}\n")
    (case,) = suite.cases
    assert case.expected == value
    assert type(case.expected) is type(value)


def test_an_id_that_looks_like_a_boolean_is_text(suite_file: Write) -> None:
    suite = suite_file("id: no\ncases: [{id: no, prompt: p}, {id: 7, prompt: p}]")
    assert suite.id == "no"
    assert [case.id for case in suite.cases] == ["no", "7"]


def test_merge_keys_may_be_overridden(suite_file: Write) -> None:
    suite = suite_file(
        "run: {nested: &base {timeout: 1, retries: 2}}\ngate: {<<: *base, timeout: 3}\ncases: [{prompt: p}]"
    )
    assert suite.gate == {"timeout": 3, "retries": 2}


@pytest.mark.parametrize(
    ("content", "line", "message"),
    [
        ("", None, "is empty: it must be a mapping with keys such as .*steelyard init"),
        (
            "# nothing yet\n",
            None,
            "is empty: it must be a mapping with keys such as .*steelyard init",
        ),
        ("- a", None, "must be a mapping with keys such as target"),
        ("id: a", None, "has no cases"),
        ("id: a\ncases: [\n", 3, "is not valid YAML"),
        ("id: a\nid: b\n", 2, "the key 'id' is duplicated"),
        ("cases:\n- prompt: p\n  prompt: q\n", 3, "the key 'prompt' is duplicated"),
        ("cases: []\nscorer: [exact]", 2, r"unknown key scorer; did you mean 'scorers'\?"),
        ("cases: []\n7: [exact]", 2, "unknown key 7; known here: id, "),
        ("cases: rows.txt", None, "cases must be a file whose name ends in .jsonl.*got 'rows.txt'"),
        ("cases: 7", None, r"cases must be a list, a file's path, .*got a number \(7\)"),
        ("cases: missing.jsonl", None, "missing.jsonl: no such file"),
        ("cases: []\nfields: {promt: x}", None, "unknown key fields.promt; did you mean 'prompt'"),
        ("cases: []\nfields: [prompt]", None, "fields must be a mapping"),
        ("cases: []\nid: true", None, "id must be text or a number, got a boolean"),
        ("cases: []\nid: ''", None, "a suite's id must be text and not empty"),
        ("cases: []\nscorers: exact", None, r"scorers must be a list, got text \('exact'\)"),
        ("cases: []\nrun: [1]", None, "run must be a mapping"),
        ("cases: []\ntarget: {a: {}, b: {}}", None, "target must be a name or a mapping with one key"),
        ("cases: []\nid: a\n---\nid: b", 3, "is not valid YAML"),
        ("cases: !!python/object:os.system []", 1, "is not valid YAML"),
        ("cases: []\nid: !!int x", None, "is not valid YAML"),
        ("id: a\ncases: " + "[" * 50_000 + "]" * 50_000, 2, "is nested too deeply: more than 100 levels"),
    ],
)
def test_a_bad_suite_file_is_an_error_that_says_where(
    suite_file: Write, tmp_path: Path, content: str, line: int | None, message: str
) -> None:
    with pytest.raises(SuiteError, match=message) as caught:
        suite_file(content)
    assert str(tmp_path) in str(caught.value)
    if line is not None:
        assert caught.value.line == line


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("{prompt: p, expcted: x}", r"unknown key cases\[1\].expcted; did you mean 'expected'\?"),
        ("{expected: x}", r"cases\[1\]: has neither prompt nor messages"),
        ("just text", r"cases\[1\]: must be an EvalCase or an object, got text"),
    ],
)
def test_a_bad_inline_case_is_an_error_with_its_place_and_line(suite_file: Write, case: str, message: str) -> None:
    suite = suite_file(f"id: x\ncases:\n- prompt: fine\n\n- {case}\n")
    with pytest.raises(SuiteError, match=message) as caught:
        list(suite.cases)
    assert caught.value.line == 5


def test_a_file_that_is_not_utf_8_is_refused_with_the_line(tmp_path: Path) -> None:
    path = tmp_path / "suite.yaml"
    path.write_bytes(b"id: a\ndescription: caf\xe9\n")
    with pytest.raises(SuiteError, match="is not UTF-8: byte 0xe9") as caught:
        read_suite_file(path)
    assert caught.value.line == 2


def test_a_byte_order_mark_is_no_part_of_the_first_key(suite_file: Write) -> None:
    assert suite_file("\ufeffid: a\ncases: [{prompt: p}]").id == "a"


def test_unknown_keys_are_named_with_their_path() -> None:
    reject_unknown({"a": 1}, ("a", "b"), "run")
    with pytest.raises(SuiteError, match=r"^unknown key run.paralelism; did you mean 'parallelism'\?$"):
        reject_unknown({"paralelism": 1}, ("parallelism", "timeout"), "run")


def written(folder: Path, text: str) -> Path:
    path = folder / "capitals.yaml"
    path.write_text(text)
    return path


class TestVariables:
    @pytest.fixture(autouse=True)
    def _set(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("HOST", "example.com")
        monkeypatch.setenv("COUNT", "7")
        monkeypatch.setenv("EMPTY", "")
        monkeypatch.delenv("ABSENT", raising=False)

    def test_are_replaced_where_a_suite_is_configured(self, tmp_path: Path) -> None:
        path = written(
            tmp_path,
            "id: s-${COUNT}\n"
            "target: {openai-chat: {model: '${ABSENT:-m}', base_url: 'http://${HOST}:${PORT:-80}/v1'}}\n"
            "run:\n  parallelism: ${COUNT}\n  seed: ${ABSENT:-3}\n  cache: '${COUNT}'\n  timeout: ${EMPTY:-5s}\n"
            "scorers: [{regex: {pattern: 'a$${b}'}}]\n"
            "cases: ${ABSENT:-rows}.jsonl",
        )
        path.with_name("rows.jsonl").write_text('{"prompt": "${HOST}"}')
        file = read_suite_file(path)
        assert file.id == "s-7"
        assert file.target == {"openai-chat": {"model": "m", "base_url": "http://example.com:80/v1"}}
        assert file.run == {"parallelism": 7, "seed": 3, "cache": "7", "timeout": "5s"}
        assert file.scorers == [{"regex": {"pattern": "a${b}"}}]
        assert [case.prompt for case in file.cases] == ["${HOST}"]

    def test_are_left_in_the_words_of_prompts_and_inline_cases(self, tmp_path: Path) -> None:
        path = written(tmp_path, 'system_prompt: "Say ${x}"\ncases: [{prompt: "echo ${HOST}"}]')
        (case,) = read_suite_file(path).cases
        assert (case.system_prompt, case.prompt) == ("Say ${x}", "echo ${HOST}")

    @pytest.mark.parametrize(
        ("text", "problem"),
        [("${ABSENT}", r"\$\{ABSENT\} is not set"), ("${a-b}", "is not a variable"), ("${HOST", "is not a variable")],
    )
    def test_one_that_is_not_set_or_not_one_says_where(self, tmp_path: Path, text: str, problem: str) -> None:
        with pytest.raises(SuiteError, match=rf"capitals\.yaml:2: .*{problem}"):
            read_suite_file(written(tmp_path, f"cases: []\nrun: {{cache: '{text}'}}"))


class TestSettings:
    TEXT = (
        "target: {simulated: {accuracy: 1.0}}\ncases: [{prompt: a}]\n"
        "scorers: [exact, {judge: {runs: 1}}]\nrun: {seed: 1}"
    )

    def test_take_the_place_of_what_the_file_says(self, tmp_path: Path) -> None:
        settings = [
            "run.seed=7", "run.stop=[a, b]", "scorers.1.judge.runs=3", "scorers.0=contains", "gate.min_pass_rate=0.5",
            "target.simulated.accuracy=0.25", "id=other=name",
        ]  # fmt: skip
        file = read_suite_file(written(tmp_path, self.TEXT), settings)
        assert file.run == {"seed": 7, "stop": ["a", "b"]}
        assert file.scorers == ["contains", {"judge": {"runs": 3}}]
        assert file.gate == {"min_pass_rate": 0.5}
        assert file.target == {"simulated": {"accuracy": 0.25}}
        assert file.id == "other=name"

    @pytest.mark.parametrize(
        ("setting", "problem"),
        [
            ("run.seed", "takes key.path=value"),
            ("run..seed=1", "takes key.path=value"),
            ("scorers.7=exact", "'7' is no place in a list of 2"),
            ("scorers.x.y=exact", "'x' is no place in a list of 2"),
            ("run.seed.x=1", "which has no parts"),
            ("run.seed=[", "is not valid YAML"),
            ("rum.seed=1", "unknown key rum; did you mean 'run'"),
        ],
    )
    def test_bad_ones_are_refused(self, tmp_path: Path, setting: str, problem: str) -> None:
        with pytest.raises(ConfigurationError, match=problem):
            read_suite_file(written(tmp_path, self.TEXT), [setting])
