"""Logs of other tools as run directories: what counts, what decides, what is refused."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from steelyard import EvalCase, InvocationResponse, Result
from steelyard.errors import ConfigurationError, RunRefused
from steelyard.run.imports import Imported, LogAbout, LogSample, LogScore, import_log
from tests.support.cli import run_cli


class HandMade:
    """A log with these scores: of each case its trials, of each trial its scores."""

    def __init__(self, scores: dict[str, list[dict[str, Any] | None]], **about: Any) -> None:
        self.about = LogAbout(**{"tool": "by hand", "task": "toy", "digest": "0", **about})
        self._scores = scores

    def samples(self) -> Iterator[LogSample]:
        for case_id, trials in self._scores.items():
            for trial, scores in enumerate(trials):
                if scores is not None:
                    yield LogSample(
                        case=EvalCase(id=case_id, prompt=f"{case_id}?", expected=case_id),
                        trial=trial,
                        response=InvocationResponse(response_text=f"answer {trial}"),
                        scores={name: LogScore(value=value) for name, value in scores.items()},
                        run_time=trial + 1.0,
                    )


def imported(folder: Path, log: HandMade, **options: Any) -> tuple[Imported, Result]:
    made = import_log(log, folder / "RUN", **options)
    return made, Result.load(folder / "RUN")


def test_letters_numbers_and_words_become_scores_of_their_kind(tmp_path: Path) -> None:
    scores = [{"grade": "C", "flag": True, "share": 0.25, "steps": 7, "tone": "formal"},
              {"grade": "P", "flag": False, "share": 1, "steps": 0.5, "tone": "C"},
              {"grade": "N", "flag": True, "share": 0, "steps": 1, "tone": "rude"}]  # fmt: skip
    made, result = imported(tmp_path, HandMade({f"c{number}": [one] for number, one in enumerate(scores)}))
    assert made.decides == "grade"
    assert result.complete
    assert result.pass_rate == pytest.approx(1 / 3), "only full marks pass"
    first, second, third = result.load_responses()
    grades = [one.scores["grade"] for one in (first, second, third)]
    assert [(one.value, one.passed) for one in grades] == [(1.0, True), (0.5, False), (0.0, False)]
    assert (first.scores["flag"].value, first.scores["flag"].passed) == (1.0, None)
    assert (first.scores["steps"].value, first.scores["steps"].is_number) == (7.0, True)
    assert [one.scores["tone"].label for one in (first, second, third)] == ["formal", "C", "rude"]
    assert result.typed_metrics.scores["share"].mean == pytest.approx(1.25 / 3)


def test_the_score_that_decides_is_the_tools_first_or_the_one_asked_for(tmp_path: Path) -> None:
    scores = {"a": [{"x": 1, "y": 0, "z": 0.6}], "b": [{"x": 1, "y": 1, "z": 0.2}]}
    assert imported(tmp_path / "1", HandMade(scores))[1].pass_rate == 1.0
    assert imported(tmp_path / "2", HandMade(scores, decides="y"))[1].pass_rate == 0.5
    assert imported(tmp_path / "3", HandMade(scores, decides="y"), decides="x")[1].pass_rate == 1.0
    assert imported(tmp_path / "4", HandMade(scores), decides="z", pass_from=0.5)[1].pass_rate == 0.5
    assert imported(tmp_path / "5", HandMade(scores, decides="z"))[0].decides == "x"
    undecided = imported(tmp_path / "6", HandMade({"a": [{"z": 0.6}]}))
    assert (undecided[0].decides, undecided[1].pass_rate) == (None, None)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"decides": "gradd"}, "the log has no score 'gradd'; did you mean 'grade'"),
        ({"decides": "share"}, "the score 'share' goes from 0.25 to 0.5: say with --pass-from"),
        ({"decides": "tone", "pass_from": 1.0}, "the score 'tone' is a word"),
    ],
)
def test_a_score_that_cannot_decide_is_refused_and_nothing_is_left(
    tmp_path: Path, options: dict[str, Any], message: str
) -> None:
    log = HandMade(
        {"a": [{"grade": "C", "share": 0.5, "tone": "x"}], "b": [{"grade": "I", "share": 0.25, "tone": "y"}]}
    )
    with pytest.raises(ConfigurationError, match=message):
        imported(tmp_path, log, **options)
    assert not (tmp_path / "RUN").exists()


def test_a_trial_that_the_log_lacks_is_an_error_and_an_answer_without_its_score_is_unscored(tmp_path: Path) -> None:
    made, result = imported(tmp_path, HandMade({"a": [{"x": 1}, {"x": None}], "b": [{"x": 0}, None]}))
    assert (made.records, made.missing) == (3, 1)
    metrics = result.typed_metrics
    assert (metrics.counts.ok, metrics.counts.error, metrics.unscored) == (3, 1, 1)
    assert metrics.errors == {"NotInLog": 1}
    assert metrics.trials.trials == 2


def test_a_run_is_not_overwritten_and_an_empty_log_leaves_nothing(tmp_path: Path) -> None:
    imported(tmp_path, HandMade({"a": [{"x": 1}]}))
    with pytest.raises(RunRefused, match="holds a run already"):
        imported(tmp_path, HandMade({"b": [{"x": 1}]}))
    with pytest.raises(ConfigurationError, match="the log has no samples"):
        imported(tmp_path / "other", HandMade({}))
    assert not (tmp_path / "other" / "RUN").exists()


def test_records_without_a_manifest_are_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "RUN").mkdir()
    (tmp_path / "RUN" / "outputs.jsonl").write_text("{}\n")
    with pytest.raises(RunRefused, match="holds a run already"):
        imported(tmp_path, HandMade({"a": [{"x": 1}]}))
    assert (tmp_path / "RUN" / "outputs.jsonl").read_text() == "{}\n"


def test_a_killed_import_can_be_repeated(tmp_path: Path) -> None:
    class Cut(HandMade):
        def samples(self) -> Iterator[LogSample]:
            self.asked = getattr(self, "asked", 0) + 1
            for number, sample in enumerate(super().samples()):
                if self.asked == 2 and number == 1:
                    raise KeyboardInterrupt
                yield sample

    scores: dict[str, list[dict[str, Any] | None]] = {"a": [{"x": 1}], "b": [{"x": 0}]}
    (tmp_path / "RUN").mkdir()
    with pytest.raises(KeyboardInterrupt):
        imported(tmp_path, Cut(scores))
    assert (tmp_path / "RUN" / "outputs.jsonl").exists()
    assert imported(tmp_path, HandMade(scores))[1].pass_rate == 0.5


def test_everything_that_reads_runs_reads_it(tmp_path: Path) -> None:
    imported(tmp_path, HandMade({f"c{n}": [{"x": n % 3 > 0}, {"x": n % 2 > 0}] for n in range(12)}, model="m"))
    commands = ["report RUN", "report RUN -f html", "report RUN -f csv", "report RUN --case c1", "ls .",
                "compare RUN RUN", "gate RUN --rule pass_rate>=50%"]  # fmt: skip
    for words in commands:
        ended = run_cli(tmp_path, *words.split())
        assert ended.code == 0, (words, ended.err)
    assert "toy" in run_cli(tmp_path, "ls", ".").out
    (tmp_path / "s.yaml").write_text("target: simulated\ncases: RUN/cases.jsonl\nscorers: [{contains: {}}]\n")
    ended = run_cli(tmp_path, "score", "RUN", "--suite", "s.yaml", "-o", "AGAIN", "--no-progress")
    assert ended.code == 0, ended.err
    again = Result.load(tmp_path / "AGAIN")
    assert [one.response_text for one in again.iter_responses()][:2] == ["answer 0", "answer 1"]


VALUES = st.fixed_dictionaries({"x": st.sampled_from([0, 1, True, "C", "I"]), "y": st.floats(-5, 5)})


@settings(max_examples=30, deadline=None)
@given(
    st.dictionaries(
        st.text("abc", min_size=1, max_size=2),
        st.lists(st.one_of(st.none(), VALUES), max_size=2).flatmap(lambda some: VALUES.map(lambda one: [*some, one])),
        min_size=1,
    )
)
def test_the_counts_add_up_and_the_mean_is_that_of_cases(
    tmp_path_factory: pytest.TempPathFactory, scores: dict[str, list[dict[str, Any] | None]]
) -> None:
    known = [[one["y"] for one in trials if one is not None] for trials in scores.values()]
    theirs = math.fsum(math.fsum(values) / len(values) for values in known) / len(known)
    made, result = imported(tmp_path_factory.mktemp("import"), HandMade(scores, figures={"y": theirs}))
    (check,) = made.checks
    assert check.same
    planned = len(scores) * max(map(len, scores.values()))
    assert result.typed_metrics.counts.planned == planned == made.records + made.missing
