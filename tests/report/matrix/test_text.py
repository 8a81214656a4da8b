"""A leaderboard in a terminal, on a pull request and in a spreadsheet: it fits, and nothing in it is obeyed."""

from __future__ import annotations

import csv
import io
import itertools
import json
import re
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from steelyard.report import Leaderboard, leaderboard
from steelyard.report.matrix.leaderboard import rank
from steelyard.report.matrix.page import matrix_page
from steelyard.report.matrix.table import VariantRuns
from steelyard.report.matrix.text import MAX_DIFFERING, leaderboard_csv, leaderboard_markdown, leaderboard_text
from tests.support.cli import run_cli
from tests.support.compare import journal, outcome
from tests.support.journal import write_journal
from tests.support.matrix import matrix, matrix_of
from tests.support.report import HOSTILE


def measured(folder: Path) -> VariantRuns:
    words = {"large": "p" * 38 + "ff", "medium": "p" * 36 + "ffff", "small": "p" * 15 + "f" * 23 + "ee"}
    costs = {"large": 0.02, "medium": 0.01, "small": 0.0005}
    return matrix_of(
        folder,
        {
            name: [
                outcome(one, n, cost=costs[name], time_to_last_token=costs[name] * 50, num_tokens_output=20 + n)
                for n, one in enumerate(word)
            ]
            for name, word in words.items()
        },
    )


@pytest.fixture
def hostile(tmp_path: Path) -> tuple[Leaderboard, VariantRuns]:
    """Ids, answers and errors that try to be something else."""
    records = {
        name: [outcome(letter, n, id=f"{n} {text}", response_text=text) for n, text in enumerate(HOSTILE)]
        for name, letter in (("a", "p"), ("b", "f"), ("c", "p"))
    }
    variants = matrix_of(tmp_path / "m", records)
    return rank(variants), variants


def test_the_text_names_the_best_those_like_it_and_the_worse(tmp_path: Path) -> None:
    text = leaderboard_text(rank(measured(tmp_path)))
    assert "large passed most: 95.0%; medium cannot be told from it; small is shown to" in text
    assert re.search(r"^\* large +95\.0% 83\.1% – 99\.4% ", text, flags=re.M)
    assert re.search(r"^= medium +−5\.0 points .* p = 0\.5\b", text, flags=re.M)
    assert "cases would tell" in text
    assert "Holm's correction counts all 3 pairs that differ" in text
    assert re.search(r"^  variant .* cost/case .*time p50\b", text, flags=re.M)
    assert "  costs in USD; time: to the last token\n" in text


def test_only_columns_that_are_shown_are_explained(tmp_path: Path) -> None:
    text = leaderboard_text(rank(matrix(tmp_path, {"a": "pf", "b": "ff"})))
    assert "  time: to the last token; output tokens: of an answer\n" in text
    assert "cost" not in text


def test_an_interval_that_leaves_out_0_where_nothing_is_shown_is_explained(tmp_path: Path) -> None:
    plain = leaderboard_text(rank(measured(tmp_path / "plain")))
    letters = {"a": "p" * 40, "b": "f" * 6 + "p" * 34, "c": "p" * 34 + "f" * 6}
    board = rank(matrix_of(tmp_path / "m", {k: [outcome(x, n) for n, x in enumerate(v)] for k, v in letters.items()}))
    changes = [one.against_best.change for one in board.variants if one.against_best is not None]
    assert [(one.ci95[1] < 0, one.p_adjusted > 0.05, one.outcome) for one in changes] == [
        (True, True, "no difference")
    ] * 2
    note = "An interval is for its pair alone: where it excludes 0 and p is not below 0.05, no difference is shown"
    assert note in " ".join(leaderboard_text(board).split())
    assert note not in " ".join(plain.split())


def test_the_text_fits_80_columns_also_with_errors_and_long_names(tmp_path: Path) -> None:
    variants = measured(tmp_path / "short")
    names = {one.name: "provider-of-models/" * 3 + one.name for one in variants.runs}
    long = matrix_of(
        tmp_path / "long",
        {
            names[name]: [outcome(one, n, cost=0.000123, time_to_last_token=12.3) for n, one in enumerate(word)]
            for name, word in {"large": "pppe" * 9, "medium": "ppff" * 9, "small": "feef" * 9}.items()
        },
    )
    for board in (rank(variants), rank(long)):
        lines = leaderboard_text(board).splitlines()
        assert max(len(line) for line in lines if not line.startswith("results in")) <= 80
    assert all("…" in line for line in leaderboard_text(rank(long)).splitlines() if line.startswith(("* ", "= ")))


def test_names_that_are_cut_stay_different(tmp_path: Path) -> None:
    axes = itertools.product(("small", "large"), ("terse", "steps"), ("temperature=0", "temperature=0.7"))
    records = [outcome(one, n, cost=0.000123, time_to_last_token=0.3) for n, one in enumerate("ppf" * 9)]
    text = leaderboard_text(rank(matrix_of(tmp_path, {"/".join(axis): records for axis in axes})))
    table = text[text.index("  variant") : text.index("against")]
    names = [line.split()[1] for line in table.splitlines() if line.startswith(("* ", "= "))]
    assert len(set(names)) == 8, names
    assert {name[:7] for name in names} == {"small/t", "small/s", "large/t", "large/s"}
    assert max(map(len, table.splitlines())) <= 80


def test_nothing_of_a_model_or_case_is_markup_in_markdown(hostile: tuple[Leaderboard, VariantRuns]) -> None:
    text = "".join(leaderboard_markdown(*hostile))
    for found in re.findall(r"<(/?\w+)", text):
        assert found.strip("/") in ("code", "details", "summary", "sub")
    assert "@everyone" not in text
    assert "https://" not in text
    assert "\x1b" not in text
    assert "\u202e" not in text
    assert "differ on" in text
    rows = [line for line in text.splitlines() if line.startswith("| <code>")]
    assert {line.count("|") for line in rows[:MAX_DIFFERING]} >= {5}


def test_markdown_lists_so_many_differing_cases_and_says_how_many_there_are(tmp_path: Path) -> None:
    variants = matrix(tmp_path, {"a": "p" * 50, "b": "f" * 50, "c": "p" * 50}, response_text="x" * 5_000)
    text = "".join(leaderboard_markdown(rank(variants), variants))
    assert f"differ on 50 cases: the first {MAX_DIFFERING}" in text
    assert text.count("✕") == MAX_DIFFERING
    assert len(text) < 65_536
    assert "".join(leaderboard_markdown(rank(variants), variants, None)).count("✕") == 50


def test_a_comment_with_many_variants_stays_within_what_a_comment_may_hold(tmp_path: Path) -> None:
    words = {f"model-{number}": "pf"[number % 2] * 60 for number in range(24)}
    variants = matrix(tmp_path, words, response_text="word " * 2_000)
    assert len("".join(leaderboard_markdown(rank(variants), variants))) < 65_536


def test_the_csv_has_a_row_for_each_variant_and_no_formula(tmp_path: Path) -> None:
    write_journal(tmp_path / "=1+1", [outcome("p", n) for n in range(8)])
    journal(tmp_path / "b", "ppppffff")

    rows = list(
        csv.DictReader(io.StringIO("".join(leaderboard_csv([leaderboard([tmp_path / "=1+1", tmp_path / "b"])]))))
    )
    assert [row["name"] for row in rows] == ["'=1+1", "b"]
    assert [float(row["pass_rate_all"]) for row in rows] == [1.0, 0.5]
    assert float(rows[1]["against_best.difference"]) == -0.5


def test_a_matrix_is_reported_in_every_format(tmp_path: Path) -> None:
    measured(tmp_path / "m")
    assert "large passed most" in run_cli(tmp_path, "report", "m").out
    assert "## <code>letters</code>: 3 variants" in run_cli(tmp_path, "report", "m", "-f", "md").out
    assert json.loads(run_cli(tmp_path, "report", "m", "-f", "json").out)["best"] == "large"
    assert run_cli(tmp_path, "report", "m", "-f", "csv").out.count("\n") == 4
    assert run_cli(tmp_path, "report", "m", "-f", "junit").out.count("<testsuite ") == 3
    ended = run_cli(tmp_path, "report", "m", "-f", "html")
    assert ended.out.strip() == "m/report.html"
    assert (tmp_path / "m" / "report.html").read_text().startswith("<!doctype html>")
    shown = run_cli(tmp_path, "report", "m", "--case", "c0").out
    assert [line for line in shown.splitlines() if line.endswith("c0: passed")] == [
        f"{name}: c0: passed" for name in ("large", "medium", "small")
    ]
    found = json.loads(run_cli(tmp_path, "report", "m", "--case", "c0", "-f", "json").out)
    assert [one["run"] for one in found] == ["large", "medium", "small"]


@pytest.mark.parametrize("form", ["text", "md", "html", "json"])
def test_slices_of_a_matrix_are_refused_and_its_variants_named(tmp_path: Path, form: str) -> None:
    measured(tmp_path / "m")
    ended = run_cli(tmp_path, "report", "m", "-f", form, "--by", "level")
    assert ended.code == 2
    assert "m is a matrix, and slices are of one run: name a variant (m/large, " in ended.err
    assert not (tmp_path / "m" / "report.html").exists()


def test_a_matrix_and_a_run_have_no_common_columns(tmp_path: Path) -> None:
    measured(tmp_path / "m")
    journal(tmp_path / "run", "pf")
    ended = run_cli(tmp_path, "report", "m", "run", "-f", "csv")
    assert ended.code == 2
    assert "csv has other columns for a matrix than for a run: leave out m" in ended.err


def test_compare_shows_three_runs_as_a_leaderboard_and_two_as_before(tmp_path: Path) -> None:
    for name, word in {"a": "p" * 30, "b": "f" * 30, "c": "pf" * 15}.items():
        journal(tmp_path / name, word)
    assert "against   b" in run_cli(tmp_path, "compare", "a", "b").out
    several = run_cli(tmp_path, "compare", "c", "a", "b").out
    assert "a passed most: 100.0%; c and b are shown to be worse" in several
    assert json.loads(run_cli(tmp_path, "compare", "a", "b", "c", "-f", "json").out)["best"] == "a"
    assert "differ on 30 cases: the first 20" in run_cli(tmp_path, "compare", "a", "b", "c", "-f", "md").out
    assert run_cli(tmp_path, "compare", "a", "b", "c", "-f", "md", "--all").out.count("<code>c") >= 30
    assert run_cli(tmp_path, "compare", "a", "b", "c", "-f", "html", "-o", "x.html").code == 0
    assert 'id="chunk-0"' in (tmp_path / "x.html").read_text()


def test_runs_with_the_same_folder_name_are_told_apart(tmp_path: Path) -> None:
    for place in ("x/run", "y/run", "z/run"):
        journal(tmp_path / place, "pf")
    names = {
        one["name"]
        for one in json.loads(run_cli(tmp_path, "compare", "x/run", "y/run", "z/run", "-f", "json").out)["variants"]
    }
    assert names == {"x/run", "y/run", "z/run"}


Words = st.dictionaries(
    st.sampled_from(["a", "b/c", "=d", "<e>"]), st.text("pfue.", max_size=12), min_size=1, max_size=4
)


@settings(deadline=None, max_examples=40)
@given(Words)
def test_whatever_the_runs_hold_every_format_can_show_it(
    tmp_path_factory: pytest.TempPathFactory, words: dict[str, str]
) -> None:
    variants = matrix(tmp_path_factory.mktemp("any"), words, cost=0.01)
    board = rank(variants)
    assert max(map(len, leaderboard_text(board).splitlines()[:-1])) <= 80
    assert "".join(leaderboard_markdown(board, variants)).count("<details>") <= 1
    assert len(list(leaderboard_csv([board]))) == len(variants.runs) + 1
    assert "".join(matrix_page(variants, board=board)).rstrip().endswith("</html>")
    assert board._repr_html_().startswith("<div")
    places = [one.place for one in board.variants]
    assert places.count("best") == (board.best is not None and "tied" not in places)
    assert msgspec.json.decode(msgspec.json.encode(board), type=Leaderboard) == board
