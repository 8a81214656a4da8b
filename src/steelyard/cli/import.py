"""`steelyard import FILE`: a log of another tool as a run directory."""  # noqa: N999 - the command has this name

from __future__ import annotations

from pathlib import Path

import click

from steelyard.cli.output import say, show
from steelyard.errors import ConfigurationError
from steelyard.report.summary import summary
from steelyard.run.imports import Imported, Log, import_log
from steelyard.run.result import Result
from steelyard.stats.formatting import counted, safe_text


@click.command("import")
@click.argument("file", type=click.Path(path_type=Path))
@click.option("-o", "--out", required=True, type=click.Path(path_type=Path), metavar="RUN", help="New run directory.")
@click.option(
    "--decides",
    metavar="SCORE",
    help="The score that says which answers pass [default: the one that the tool shows first, else the first that is "
    "0 or 1 for each answer].",
)
@click.option(
    "--pass-from",
    type=float,
    metavar="VALUE",
    help="Lowest value of that score that passes [default: only full marks].",
)
def command(file: Path, out: Path, decides: str | None, pass_from: float | None) -> int:
    """Make a run directory of a log of inspect_ai (.eval, .json) or of lm-eval's samples (samples_TASK_TIME.jsonl).

    Answers, conversations, tokens, times, errors and scores become records, epochs become trials. `report`, `view`,
    `compare`, `gate`, `label` and `score` then work on it. The figures that the tool itself computed are compared with
    those of the records. Nothing is called.
    """
    imported = import_log(open_log(file), out, decides=decides, pass_from=pass_from)
    show(summary(Result.load(out).typed_metrics, str(out)))
    _tell(imported, file)
    return 0


def open_log(path: Path) -> Log:
    """What reads this file; ConfigurationError, with what it is, where nothing does."""
    if not path.is_file():
        raise ConfigurationError(f"{path} is {'a folder: name a file in it' if path.is_dir() else 'not there'}")
    with path.open("rb") as file:
        beginning = file.read(4_096)
    if beginning.startswith(b"PK") or path.suffix == ".eval":
        from steelyard.integrations.inspect_log import InspectLog

        return InspectLog(path)
    is_object = beginning.lstrip().startswith(b"{")
    if path.suffix == ".jsonl" or (is_object and b'"doc_id"' in beginning):
        from steelyard.integrations.lm_eval_log import LmEvalLog

        return LmEvalLog(path)
    if is_object and b'"eval"' in beginning:
        from steelyard.integrations.inspect_log import InspectLog

        return InspectLog(path)
    if path.name.startswith("results_") or b'"lm_eval_version"' in beginning or b'"group_subtasks"' in beginning:
        raise ConfigurationError(
            f"{path} has figures and no answers: name samples_TASK_TIME.jsonl beside it (--log_samples)"
        )
    raise ConfigurationError(
        f"{path} is neither a log of inspect_ai (.eval, .json) nor samples of lm-eval (samples_TASK_TIME.jsonl)"
    )


def _tell(imported: Imported, file: Path) -> None:
    """Say what was made of what."""
    about = imported.about
    version = f" {about.tool_version}" if about.tool_version else ""
    say(
        f"imported {counted(imported.records, 'answer')} of {safe_text(about.task)} from {file} ({about.tool}{version})"
    )
    if about.unfinished:
        say("the evaluation did not end by itself: the log has what there was")
    if imported.missing:
        say(f"{counted(imported.missing, 'trial')} not in the log: errors here")
    if imported.decides is None:
        say("no score says which answers pass: --decides SCORE --pass-from VALUE does")
    else:
        say(f"the score {safe_text(imported.decides)} decides which answers pass")
    for check in imported.checks:
        ours = "nothing" if check.ours is None else f"{check.ours:.4f}"
        same = "the same" if check.same else f"{ours} here"
        say(f"{safe_text(check.score)}: mean {check.theirs:.4f} in the log, {same}")
