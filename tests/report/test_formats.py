"""A run as Markdown, CSV, JUnit and JSON, and one case in full: right, and safe whatever the texts try."""

from __future__ import annotations

import csv
import io
import json
import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from steelyard.records import Score
from steelyard.report.csv import cell, table_csv
from steelyard.report.junit import attribute, content, junit
from steelyard.report.markdown import code, markdown, words
from steelyard.stats.formatting import escape_invisible, one_line
from tests.support.cli import Workshop, run_cli
from tests.support.compare import finished, outcome
from tests.support.journal import a_record, write_journal
from tests.support.junit import assert_valid_junit
from tests.support.report import HOSTILE, agent_run, hostile_run

FORMS = ["text", "md", "html", "json", "csv", "junit"]


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return hostile_run(tmp_path_factory.mktemp("hostile") / "run")


@pytest.fixture(scope="module")
def agents(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return agent_run(tmp_path_factory.mktemp("agents") / "run")


# Text


@given(st.text())
def test_visible_text_has_nothing_left_that_steers_or_hides(text: str) -> None:
    shown = escape_invisible(text)
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\u200e\u200f\u2028\u2029\ufeff]", shown)
    assert not any(0xE0000 <= ord(character) <= 0xE007F for character in shown)


def test_visible_text_says_what_was_there() -> None:
    assert escape_invisible("\x1b[31m") == "␛[31m"
    assert escape_invisible("a\u202eb") == "a⟨U+202E⟩b"
    assert escape_invisible("a\x7f\x00") == "a␡␀"


def test_plain_text_is_left_alone() -> None:
    text = "Ünïcode, 日本語, \u0641\u0627\u0631\u0633\u06cc\u200c\u0647\u0627, 👩\u200d🚀\n\tindented"
    assert escape_invisible(text) == text


@given(st.text(max_size=400), st.integers(2, 50))
def test_one_line_is_one_line_of_at_most_that_length(text: str, longest: int) -> None:
    shown = one_line(text, longest)
    assert len(shown) <= longest
    assert len(shown.splitlines()) <= 1


# JUnit


def test_junit_of_hostile_texts_is_valid_and_whole(hostile: Path) -> None:
    root = assert_valid_junit("".join(junit([hostile])))
    assert len(root.findall(".//testcase")) == len(HOSTILE)
    assert root.find(".//script") is None


def test_junit_tells_failures_errors_and_unscored_apart(tmp_path: Path) -> None:
    records = [
        a_record(id="good", index=0, scores=[Score("exact", 1.0, True)]),
        a_record(id="bad", index=1, scores=[Score("exact", 0.0, False, "expected 'a'")], response_text="b ]]> c"),
        a_record(id="none", index=2, scores=[]),
        a_record(id="broken", index=3, scores=[Score("judge", None, None, errors=["could not be asked"])]),
        a_record(id="err", index=4, status="error", error="TimeoutError: late", error_type="TimeoutError"),
    ]
    write_journal(tmp_path, records)
    root = assert_valid_junit("".join(junit([tmp_path])))
    found = {case.attrib["name"]: [outcome.tag for outcome in case] for case in root.iter("testcase")}
    assert found == {"good": [], "bad": ["failure"], "none": ["skipped"], "broken": ["skipped"], "err": ["error"]}
    failure = root.find(".//failure")
    assert failure is not None
    assert failure.attrib["message"] == "exact: expected 'a'"
    assert "answer: b ]]> c" in (failure.text or "")
    assert "could not be asked" in root.findall(".//skipped")[1].attrib["message"]
    assert root.find(".//error[@type='TimeoutError']") is not None


def test_junit_has_a_test_case_for_each_trial_and_the_headline_as_properties(agents: Path) -> None:
    root = assert_valid_junit("".join(junit([agents])))
    names = [case.attrib["name"] for case in root.iter("testcase")]
    assert names[:3] == ["right [trial 1]", "right [trial 2]", "right [trial 3]"]
    properties = {one.attrib["name"]: one.attrib["value"] for one in root.iter("property")}
    assert float(properties["pass_rate"]) == json.loads((agents / "metrics.json").read_text())["pass_rate"]
    assert properties["complete"] == "true"
    assert "score.judge.mean" in properties


def test_junit_of_several_runs_has_a_suite_each(agents: Path, hostile: Path) -> None:
    assert len(assert_valid_junit("".join(junit([agents, hostile])))) == 2


@given(st.text())
def test_any_text_survives_as_xml(text: str) -> None:
    element = ElementTree.fromstring(f"<a b={attribute(text)}>{content(text)}</a>")
    assert element.attrib["b"] == escape_invisible(text)
    assert (element.text or "") == escape_invisible(text)
    assert len(element) == 0


# CSV


def rows_of(text: str) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(text, newline="")))


def test_no_cell_of_a_csv_begins_as_a_formula(hostile: Path) -> None:
    rows = rows_of("".join(table_csv([hostile])))
    assert len(rows) == len(HOSTILE)
    for row in rows:
        for name, value in row.items():
            if not re.fullmatch(r"-?[\d.]+(e-?\d+)?", value):
                assert not name.lstrip().startswith(("=", "+", "-", "@"))
                assert not value.lstrip().startswith(("=", "+", "-", "@", "\uff1d")), (name, value)


@pytest.mark.parametrize("text", ["=1", "+1", "-1", "@x", "\t=1", "\r=1", "\n=1", "  =1", "\uff1d1", "\uff0d1"])
def test_text_that_would_be_a_formula_gets_an_apostrophe(text: str) -> None:
    assert str(cell(text)).startswith("'")


def test_a_csv_has_a_row_a_record_with_its_scores_in_columns(agents: Path) -> None:
    rows = rows_of("".join(table_csv([agents])))
    assert len(rows) == 18
    wrong = [row for row in rows if row["id"] == "wrong"]
    assert [row["trial"] for row in wrong] == ["0", "1", "2"]
    assert wrong[0]["exact.value"] == "0.0"
    assert wrong[0]["exact.passed"] == "false"
    assert wrong[0]["judge.reason"]
    errs = next(row for row in rows if row["id"] == "errs")
    assert (errs["outcome"], errs["error_type"], errs["exact.value"]) == ("error", "TargetError", "")
    assert {row["run"] for row in rows} == {str(agents)}


def test_numbers_in_a_csv_stay_numbers(agents: Path) -> None:
    assert cell(-0.5) == -0.5
    assert float(rows_of("".join(table_csv([agents])))[0]["cost"]) == 0.001


# Markdown


def test_nothing_in_the_markdown_of_hostile_texts_is_markup(hostile: Path) -> None:
    text = "".join(markdown(hostile))
    tags = set(re.findall(r"</?(\w+)", text))
    assert tags <= {"code", "details", "summary", "sub"}
    assert "@everyone" not in text
    assert "](" not in text
    assert "http://" not in text
    assert "https://" not in text
    assert "<!--" not in text
    assert "`" not in text
    assert "\x1b" not in text
    assert "\u202e" not in text


def test_every_row_of_a_markdown_table_has_the_cells_of_its_head(hostile: Path) -> None:
    columns = 0
    for line in "".join(markdown(hostile)).split("\n"):
        if line.startswith("|"):
            assert columns in (0, line.count("|")), line
            columns = line.count("|")
        else:
            columns = 0


@given(st.text())
def test_code_in_markdown_has_only_its_own_tags(text: str) -> None:
    shown = code(text)
    assert shown.count("<") in (0, 2)
    assert "\n" not in shown
    assert not re.search(r"[|`*_@\[\]]", shown.removeprefix("<code>").removesuffix("</code>"))


def test_a_mention_in_a_sentence_falls_apart() -> None:
    assert words("ask @someone") == "ask <code>&#64;</code>someone"


def test_the_markdown_says_what_matters(agents: Path) -> None:
    text = "".join(markdown(agents))
    metrics = json.loads((agents / "metrics.json").read_text())
    assert f"**{metrics['pass_rate']:.1%}**" in text
    assert "TargetError" in text
    assert "<details><summary>" in text
    assert "The wrong answer is Paris" in text, "what was expected comes from the run's own cases"
    assert "flaky cases" in text
    assert len(text) < 60_000


def test_the_markdown_of_an_unfinished_run_begins_with_a_warning(hostile: Path) -> None:
    assert "> [!WARNING]\n> **This run is not complete.**" in "".join(markdown(hostile))


# The command


@pytest.fixture
def shop(tmp_path: Path) -> Workshop:
    shop = Workshop(tmp_path)
    shop.failing("c5")
    assert shop.by_command(max_error_rate=1).code == 0
    shop.asked()
    return shop


@pytest.mark.parametrize("form", FORMS)
def test_every_format_goes_to_stdout_or_a_file(shop: Workshop, form: str) -> None:
    printed = run_cli(shop.folder, "report", "RUN", "-f", form, "-o", "-")
    assert printed.code == 0, printed.err
    written = run_cli(shop.folder, "report", "RUN", "-f", form, "-o", "out")
    assert written.code == 0
    assert (shop.folder / "out").read_text(encoding="utf-8") == printed.out
    assert shop.asked() == []


@pytest.mark.parametrize("form", FORMS)
def test_what_is_no_run_is_refused_before_anything_is_written(shop: Workshop, form: str) -> None:
    for words_ in (["nowhere"], ["RUN", "nowhere"]):
        if form in ("html", "text", "md") and len(words_) > 1:
            continue  # one after another: the first is done
        ended = run_cli(shop.folder, "report", *words_, "-f", form)
        assert ended.code == 2
        assert "nowhere is not a run directory" in ended.err
        assert ended.out == ""


def test_html_goes_into_the_run_and_says_so(shop: Workshop) -> None:
    ended = run_cli(shop.folder, "report", "RUN", "-f", "html")
    assert ended.out == "RUN/report.html\n"
    assert (shop.run / "report.html").read_text(encoding="utf-8").startswith("<!doctype html>")
    assert not list(shop.run.glob("*.tmp"))


def test_several_runs_are_shown_one_after_another(shop: Workshop, agents: Path) -> None:
    text = run_cli(shop.folder, "report", "RUN", agents).out
    assert text.index("shouting: 6 of 6 done") < text.index("agents: 18 of 18 done")
    both = json.loads(run_cli(shop.folder, "report", "RUN", agents, "-f", "json").out)
    assert [metrics["suite"] for metrics in both] == ["shouting", "agents"]
    (shop.folder / "pages").mkdir()
    ended = run_cli(shop.folder, "report", "RUN", agents, "-f", "html", "-o", "pages")
    assert ended.out.split() == ["pages/RUN.html", f"pages/{agents.name}.html"]
    refused = run_cli(shop.folder, "report", "RUN", agents, "-f", "html", "-o", "one.html")
    assert refused.code == 2
    assert "folder" in refused.err


@pytest.mark.parametrize("place", ["nowhere/x.html", "RUN"])
def test_a_place_that_cannot_be_written_is_exit_2(shop: Workshop, place: str) -> None:
    ended = run_cli(shop.folder, "report", "RUN", "-f", "csv", "-o", place)
    assert ended.code == 2
    assert "cannot write" in ended.err


def test_one_case_in_full_as_json_has_the_record_and_the_case(shop: Workshop) -> None:
    found = json.loads(run_cli(shop.folder, "report", "RUN", "--case", "c1", "-f", "json").out)
    assert found["case"]["expected"] == "C1"
    (record,) = found["records"]
    line = (shop.run / "outputs.jsonl").read_bytes()[record.pop("offset") :].split(b"\n")[0]
    written = json.loads(line)
    assert written.pop("crc32")
    assert record == written


def test_one_case_in_full_as_text_cannot_steer_a_terminal(hostile: Path) -> None:
    for number, text in enumerate(HOSTILE):
        ended = run_cli(hostile, "report", ".", "--case", f"{number} {text}")
        assert ended.code == 0, ended.err
        assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]", ended.out)


def test_one_case_shows_every_trial_with_its_samples(agents: Path) -> None:
    text = run_cli(agents, "report", ".", "--case", "rescued").out
    assert text.count("rescued trial ") == 3
    assert "overruled" in text
    assert "escalated" in text
    assert "calls look_up" in text
    assert "The rescued answer is Paris" in text


def test_a_case_that_is_not_there_is_exit_2_with_the_nearest(shop: Workshop) -> None:
    ended = run_cli(shop.folder, "report", "RUN", "--case", "c11")
    assert ended.code == 2
    assert "did you mean 'c1'?" in ended.err
    assert run_cli(shop.folder, "report", "RUN", "--case", "c1", "-f", "csv").code == 2


def test_markdown_is_another_word_for_md(tmp_path: Path) -> None:
    finished(tmp_path / "a", "pf")
    finished(tmp_path / "b", "pp")
    for command in (["report", "a"], ["compare", "a", "b"]):
        by_name = run_cli(tmp_path, *command, "-f", "markdown")
        assert (by_name.code, by_name.out) == (0, run_cli(tmp_path, *command, "-f", "md").out)


def test_markdown_says_what_a_cost_leaves_out(tmp_path: Path) -> None:
    journal = [outcome("p", 0, cost=2.0), outcome("p", 1, cost=1.0, tokens_estimated=True), outcome("f", 2)]
    write_journal(tmp_path / "run", journal)
    report = run_cli(tmp_path, "report", "run", "-f", "md").out
    note = "not in it, as their cost is unknown: 1 answer; by an estimated number of tokens: 1 answer"
    assert re.search(rf"\| cost \| 3\.00 .*\| {note} \|", report), report
