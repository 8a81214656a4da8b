"""A comparison as text, Markdown and a page: nothing from a case, a model or a path is taken for markup."""

from __future__ import annotations

import html.parser
import re
from pathlib import Path

import pytest

from steelyard.records import Score
from steelyard.report.compare.compare import compare_runs as compare
from steelyard.report.compare.comparison import Comparison
from steelyard.report.compare.page import compare_page
from steelyard.report.compare.text import compare_markdown, compare_text
from tests.support.cli import run_cli
from tests.support.compare import journal, outcome
from tests.support.journal import write_journal

HOSTILE = (
    "<script>alert(1)</script>",
    "</script><img src=x onerror=alert(1)>",
    "<!-- --> ]]> {{x}} @@MAIN@@ @@SCRIPT@@",
    "a|b`c*d_e[f](javascript:alert(1)) @everyone #1",
    "\x1b[31mred\x1b[0m\x07\r\n| new | row |",
    "\u202egnp.exe \u200b \ud7ff \u2028 next",
)


@pytest.fixture
def hostile(tmp_path: Path) -> Comparison:
    """Ids, answers and score names of two runs that try to be something else."""
    for run, passed in (("a", True), ("b", False)):
        records = [
            outcome(
                "u", i, id=text, response_text=text, scores=[Score("exact", float(passed), passed), Score(text, 0.5)]
            )
            for i, text in enumerate(HOSTILE)
        ]
        only = outcome("p", 90, id=f"{HOSTILE[0]} only in {run}")
        write_journal(tmp_path / run, [*records, only])
    return compare([tmp_path / "a", tmp_path / "b"])


class Elements(html.parser.HTMLParser):
    """Which elements and attributes a page has."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes |= {name for name, _ in attrs}


def test_the_page_has_no_element_but_its_own(hostile: Comparison) -> None:
    page = compare_page(hostile)
    seen = Elements()
    seen.feed(page)
    assert seen.tags.count("script") == 1
    assert "img" not in seen.tags
    assert not [name for name in seen.attributes if name.startswith("on")]
    assert page.count("default-src 'none'") == 1
    assert "http://" not in page
    assert "https://" not in page
    assert "\x1b" not in page
    assert "\u202e" not in page


def test_the_page_allows_exactly_its_own_script_and_style(hostile: Comparison) -> None:
    import base64
    import hashlib

    page = compare_page(hostile)
    for tag, rule in (("script", "script-src"), ("style", "style-src")):
        text = re.search(rf"<{tag}>(.*?)</{tag}>", page, re.S)
        assert text is not None
        digest = base64.b64encode(hashlib.sha256(text[1].encode()).digest()).decode()
        assert f"{rule} &#x27;sha256-{digest}&#x27;" in page or f"{rule} 'sha256-{digest}'" in page


def test_markdown_takes_nothing_for_markup(hostile: Comparison) -> None:
    text = compare_markdown(hostile)
    for sign in ("<script", "<img", "<!--", "](", "`", "@everyone", "\x1b", "\u202e"):
        assert sign not in text
    rows = [line for line in text.splitlines() if line.startswith("|")]
    widths = {line.count(" | ") for line in rows if not line.startswith("|---")}
    assert widths == {5, 3}  # figures have six columns, changed cases four


def test_text_cannot_steer_a_terminal(hostile: Comparison) -> None:
    text = compare_text(hostile)
    for sign in ("\x1b", "\x07", "\r", "\u202e", "\u2028"):
        assert sign not in text


def test_text_tells_the_verdict_the_figures_and_the_cases(tmp_path: Path) -> None:
    journal(tmp_path / "a", "p" * 30)
    journal(tmp_path / "b", "f" * 25 + "p" * 5)
    ended = run_cli(tmp_path, "compare", "a", "b")
    assert ended.code == 0
    lines = ended.out.splitlines()
    verdict = "b is worse: passed −83.3 points, 95 % CI −94.4 – −57.8, p < 0.001; worse on 25 cases, better on 0"
    assert verdict in lines
    (passed,) = [line.split() for line in lines if line.startswith("  passed")]
    assert passed[:5] == ["passed", "100.0%", "16.7%", "−83.3", "points"]
    assert passed[-1] == "worse"
    assert "  c0  hello → hello" in lines
    assert "  and 5 more (--all lists them)" in lines
    assert "more" not in run_cli(tmp_path, "compare", "a", "b", "--all").out


def test_the_columns_of_the_text_stand_below_one_another(tmp_path: Path) -> None:
    """Even where one is as wide as −100.0 points."""
    journal(tmp_path / "a", "p" * 30)
    journal(tmp_path / "b", "f" * 30)
    lines = run_cli(tmp_path, "compare", "a", "b").out.splitlines()
    (head,) = [line for line in lines if "30 paired cases" in line]
    ends = {line.rindex(" points") + 7 for line in lines if " points " in line}
    assert ends == {head.index("change") + 6}


def test_runs_that_are_named_by_their_time_are_told_apart_in_the_head(tmp_path: Path) -> None:
    journal(tmp_path / "capitals-20261116-031756", "pf")
    journal(tmp_path / "capitals-20261116-031807", "fp")
    lines = run_cli(tmp_path, "compare", "capitals-20261116-031756", "capitals-20261116-031807").out.splitlines()
    (head,) = [line for line in lines if "2 paired cases" in line]
    assert head.split()[3:5] == ["…1116-031756", "…1116-031807"]


def test_trials_are_shown_as_how_many_passed(tmp_path: Path) -> None:
    write_journal(tmp_path / "a", [outcome("f", 0, trial=k) for k in range(3)])
    write_journal(tmp_path / "b", [outcome("ppf"[k], 0, trial=k) for k in range(3)])
    comparison = compare([tmp_path / "a", tmp_path / "b"])
    for text in (compare_text(comparison), compare_markdown(comparison), compare_page(comparison)):
        assert "0 of 3 → 2 of 3" in text


@pytest.mark.parametrize("form", ["text", "md", "html"])
def test_each_format_goes_to_a_file_on_request(tmp_path: Path, form: str) -> None:
    journal(tmp_path / "a", "pf")
    journal(tmp_path / "b", "pp")
    shown = run_cli(tmp_path, "compare", "a", "b", "-f", form)
    ended = run_cli(tmp_path, "compare", "a", "b", "-f", form, "-o", "c.out")
    assert (ended.code, ended.out) == (0, "")
    assert (tmp_path / "c.out").read_text(encoding="utf-8").strip() == shown.out.strip()
    refused = run_cli(tmp_path, "compare", "a", "b", "-o", "nowhere/c.out")
    assert refused.code == 2
    assert "cannot write nowhere/c.out" in refused.err
