"""The writer: in the kernel's hands at once, on the disk in groups, and a disk that fails stops the run cleanly."""

from __future__ import annotations

import errno
import itertools
import os
import resource
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from steelyard import JournalError, Result
from steelyard.journal import writer as writer_module
from steelyard.journal.writer import JournalWriter
from tests.support.journal import CountedModel, cases, ok_ids, run_in

COUNT = 40


def no_rows(notes: object) -> bytes:
    return b""


def writer_in(run: Path) -> JournalWriter:
    run.mkdir(exist_ok=True)
    return JournalWriter(run, no_rows)


class Syncs:
    """Stands in for fdatasync: counts, and remembers who called and how far the file was."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.threads: list[str] = []
        self.sizes: list[tuple[float, int]] = []
        monkeypatch.setattr(writer_module, "_sync", self)

    def __call__(self, descriptor: int) -> None:
        self.threads.append(threading.current_thread().name)
        self.sizes.append((time.monotonic(), os.fstat(descriptor).st_size))


def test_an_appended_line_is_in_the_kernels_hands_when_append_returns(tmp_path: Path) -> None:
    writer = writer_in(tmp_path)
    offsets = [writer.append(line) for line in (b"one\n", b"three\n", b"x\n")]
    assert offsets == [0, 4, 10]
    assert (tmp_path / "outputs.jsonl").read_bytes() == b"one\nthree\nx\n"
    writer.close()


def test_appending_goes_on_where_the_file_ends(tmp_path: Path) -> None:
    (tmp_path / "outputs.jsonl").write_bytes(b"old\n")
    writer = writer_in(tmp_path)
    assert writer.append(b"new\n") == 4
    writer.close()
    assert (tmp_path / "outputs.jsonl").read_bytes() == b"old\nnew\n"


def test_many_lines_share_one_commit_off_the_thread_that_appends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    syncs = Syncs(monkeypatch)
    writer = writer_in(tmp_path)
    began = time.monotonic()
    for _ in range(300):
        writer.append(b"line\n")
        time.sleep(0.0005)
    commits = len(syncs.threads)
    most = (time.monotonic() - began) / 0.05 + 2
    writer.close()
    assert 1 <= commits <= most
    assert set(syncs.threads[:commits]) == {"steelyard-commit"}
    assert syncs.sizes[-1][1] == 1_500, "what is left is committed when it closes"


@pytest.mark.slow
def test_a_line_is_committed_within_a_tenth_of_a_second(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lines come every 5 ms; for each, the first commit that covers it follows soon. Judged by the median."""
    syncs = Syncs(monkeypatch)
    writer = writer_in(tmp_path)
    landed = []
    for _ in range(40):
        writer.append(b"line\n")
        landed.append((time.monotonic(), writer.size))
        time.sleep(0.005)
    time.sleep(0.12)
    writer.close()
    delays = sorted(next(when for when, size in syncs.sizes if size >= end) - at for at, end in landed)
    assert delays[len(delays) // 2] <= 0.1
    assert delays[-1] <= 0.3, "even on a busy machine"


def test_nothing_new_means_no_more_commits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    syncs = Syncs(monkeypatch)
    writer = writer_in(tmp_path)
    writer.append(b"line\n")
    while not syncs.threads:
        time.sleep(0.001)
    time.sleep(0.2)
    commits = len(syncs.threads)
    writer.close()
    assert commits <= 2


def test_closing_twice_is_closing_once(tmp_path: Path) -> None:
    writer = writer_in(tmp_path)
    writer.close()
    writer.close()


# A disk that fails -------------------------------------------------------------------------------------------------


def failing_write(original: Callable[..., int], journal: Path, *, after: int, error: int) -> Callable[..., int]:
    """os.write that writes half a line and then refuses, for this file, once it is so long."""

    def write(descriptor: int, data: Any) -> int:
        if not is_journal(descriptor, journal) or os.fstat(descriptor).st_size < after:
            return original(descriptor, data)
        if write.halved:  # type: ignore[attr-defined]
            raise OSError(error, os.strerror(error))
        write.halved = True  # type: ignore[attr-defined]
        return original(descriptor, bytes(data)[: len(data) // 2])

    write.halved = False  # type: ignore[attr-defined]
    return write


def is_journal(descriptor: int, journal: Path) -> bool:
    return journal.exists() and os.path.samestat(os.fstat(descriptor), journal.stat())


def check_resumes(run: Path) -> None:
    """What is in the journal is whole, and a later launch asks only for the rest."""
    data = (run / "outputs.jsonl").read_bytes()
    assert data.endswith(b"\n")
    assert len(ok_ids(data)) == data.count(b"\n"), "a valid prefix: whole records, one for each case"
    assert not (run / "metrics.json").exists()
    model = CountedModel()
    result = run_in(run, model, cases(COUNT))
    assert set(model.called) == {case.id for case in cases(COUNT)} - ok_ids(data)
    assert result.complete
    assert len(Result.load(run).load_responses()) == COUNT


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EIO, errno.EDQUOT, errno.EROFS])
@pytest.mark.parametrize("after", [1, 3_000])
def test_a_write_that_fails_in_the_middle_of_a_line_leaves_a_valid_prefix(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: int, after: int
) -> None:
    run = tmp_path / "run"
    model = CountedModel()
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", failing_write(os.write, run / "outputs.jsonl", after=after, error=error))
        with pytest.raises(JournalError) as caught:
            run_in(run, model, cases(COUNT))
    assert caught.value.errno == error
    assert "outputs.jsonl" in str(caught.value)
    assert len(model.called) < COUNT, "no more is asked once the disk has failed"
    check_resumes(run)


def test_a_torn_line_that_cannot_even_be_cut_off_is_mended_on_resume(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"

    def refuse(descriptor: int, size: int) -> None:
        if is_journal(descriptor, run / "outputs.jsonl"):
            raise OSError(errno.EIO, "no")

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", failing_write(os.write, run / "outputs.jsonl", after=3_000, error=errno.EIO))
        patch.setattr(os, "ftruncate", refuse)
        with pytest.raises(JournalError):
            run_in(run, CountedModel(), cases(COUNT))
    assert not (run / "outputs.jsonl").read_bytes().endswith(b"\n")
    assert run_in(run, CountedModel(), cases(COUNT)).complete


def test_a_short_write_is_carried_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = os.write
    writer = writer_in(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", lambda descriptor, data: original(descriptor, bytes(data)[:3]))
        writer.append(b"a longer line\n")
    writer.close()
    assert (tmp_path / "outputs.jsonl").read_bytes() == b"a longer line\n"


def test_of_several_lines_that_do_not_all_fit_the_whole_ones_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = writer_in(tmp_path)
    writer.append(b"before\n")
    lines = [b"one\n", b"two\n", b"three\n"]  # half of them ends within the second
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", failing_write(os.write, tmp_path / "outputs.jsonl", after=1, error=errno.ENOSPC))
        with pytest.raises(JournalError):
            writer.append(b"".join(lines))
    with pytest.raises(JournalError):
        writer.close()
    assert (tmp_path / "outputs.jsonl").read_bytes() == b"before\none\n"


@pytest.mark.parametrize("good_commits", [0, 1])
def test_a_sync_that_fails_stops_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, good_commits: int) -> None:
    """After a failed fsync the kernel may have dropped the pages: going on would promise what is not kept."""
    numbers = itertools.count()

    def sync(descriptor: int) -> None:
        if next(numbers) >= good_commits:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patch:
        patch.setattr(writer_module, "_sync", sync)
        with pytest.raises(JournalError) as caught:
            run_in(tmp_path / "run", CountedModel(), cases(COUNT))
    assert caught.value.errno == errno.EIO
    assert not (tmp_path / "run" / "metrics.json").exists()
    assert run_in(tmp_path / "run", CountedModel(), cases(COUNT)).complete


def test_after_a_failed_sync_nothing_more_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failed = threading.Event()

    def sync(descriptor: int) -> None:
        failed.set()
        raise OSError(errno.EIO, "dead")

    monkeypatch.setattr(writer_module, "_sync", sync)
    writer = writer_in(tmp_path)
    writer.append(b"first\n")
    assert failed.wait(5)
    while writer._failure is None:
        time.sleep(0.001)
    with pytest.raises(JournalError, match="dead"):
        writer.append(b"more\n")
    with pytest.raises(JournalError, match="dead"):
        writer.close()


@pytest.mark.parametrize("name", ["metrics.json", "run.json"])
def test_figures_that_cannot_be_written_stop_the_run_and_leave_it_resumable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    run, original = tmp_path / "run", os.replace

    def replace(source: Path, target: Path) -> None:
        if Path(target).name == name:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        original(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", replace)
        with pytest.raises(JournalError):
            run_in(run, CountedModel(), cases(COUNT))
    assert list(run.glob("*.tmp")) == []
    assert run_in(run, CountedModel(), cases(COUNT)).complete


@pytest.mark.parametrize("entry", [{}, {"salvage": True}, {"force": True}], ids=["resume", "salvage", "force"])
@pytest.mark.parametrize("broken", ["open", "os.open", "os.replace", "os.fsync"])
def test_a_directory_that_can_no_longer_be_written_is_a_journal_error_not_a_crash(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken: str, entry: dict[str, bool]
) -> None:
    """Whichever call it is that meets the failing disk first, the run says so and lets go of the directory."""
    run = tmp_path / "run"
    run_in(run, CountedModel(), cases(COUNT))
    (run / "metrics.json").unlink()
    journal = (run / "outputs.jsonl").read_bytes().splitlines(keepends=True)
    (run / "outputs.jsonl").write_bytes(b"".join([b"damaged\n"] * ("salvage" in entry) + journal[:-1]) + b"torn")
    model = CountedModel()
    with monkeypatch.context() as patch:
        module, _, name = broken.rpartition(".")
        original = getattr(os, name) if module else open
        patch.setattr(f"{module or 'builtins'}.{name}", read_only(original))
        with pytest.raises(JournalError) as caught:
            run_in(run, model, cases(COUNT), entry=entry)
    assert caught.value.errno == errno.EROFS
    assert model.called == []
    assert run_in(run, model, cases(COUNT), entry=entry).complete, "the lock was let go"


def read_only(original: Callable[..., Any]) -> Callable[..., Any]:
    """A function of the file system that reads, but writes nothing of a run except its lock."""

    def refuse(*args: Any, **kwargs: Any) -> Any:
        how = args[1] if len(args) > 1 else None
        reads = how == "rb" or how == os.O_RDONLY or str(args[0]).endswith(".lock") or ".py" in str(args[0])
        if reads:
            return original(*args, **kwargs)
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    return refuse


def test_an_index_that_fails_while_it_is_written_does_not_fail_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, original = tmp_path / "run", os.write

    def write(descriptor: int, data: Any) -> int:
        if is_journal(descriptor, run / "outputs.idx"):
            raise OSError(errno.ENOSPC, "no")
        return original(descriptor, data)

    monkeypatch.setattr(os, "write", write)
    assert run_in(run, CountedModel(), cases(COUNT)).complete
    assert [record.index for record in Result.load(run).load_responses()] == list(range(COUNT))


# A disk that is really full ----------------------------------------------------------------------------------------

SUITE = """
from pathlib import Path
from steelyard import EvalCase, EvalSet, Runner
suite = EvalSet("full", [EvalCase(id=f"c{{i}}", prompt=f"{{i}}?", expected="x" * 400) for i in range(200)])
async def answer(case):
    with open({log!r}, "a") as log:
        log.write(case.id + "\\n")
    return "x" * 400
runner = Runner(answer, suite, ["exact"], parallelism=8)
"""


def run_command(folder: Path, run: Path, *more: str, **how: Any) -> subprocess.CompletedProcess[str]:
    """`steelyard run` of 200 cases, in a process of its own."""
    suite = folder / "full.py"
    suite.write_text(textwrap.dedent(SUITE.format(log=str(folder / "calls"))))
    program = [sys.executable, "-c", "from steelyard.cli import main; main()"]
    command = [*program, "run", f"{suite}:runner", "--out", str(run), "--no-progress", *more]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, **how)


def check_full_disk(folder: Path, run: Path, full: subprocess.CompletedProcess[str]) -> None:
    """It stopped with exit 3 and a valid prefix; with room again it goes on to the end, asking for the rest alone."""
    assert full.returncode == 3, full.stderr
    assert "Traceback" not in full.stderr
    data = (run / "outputs.jsonl").read_bytes()
    finished = ok_ids(data)
    assert data == b"" or data.endswith(b"\n")
    assert len(finished) == data.count(b"\n") > 10
    (folder / "calls").unlink()
    again = run_command(folder, run)
    assert again.returncode == 0, again.stderr
    called = (folder / "calls").read_text().split()
    assert set(called).isdisjoint(finished)
    assert len(called) == 200 - len(finished)


def limit_file_size() -> None:
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, 60_000))


@pytest.mark.parametrize("more", [(), ("--workers", "2")])
def test_a_file_that_may_not_grow_stops_the_command_with_exit_3_and_a_resumable_run(
    tmp_path: Path, more: tuple[str, ...]
) -> None:
    full = run_command(tmp_path, tmp_path / "run", *more, preexec_fn=limit_file_size)
    check_full_disk(tmp_path, tmp_path / "run", full)


@pytest.mark.skipif(os.geteuid() != 0 or sys.platform != "linux", reason="mounting a small disk needs root on Linux")
def test_a_disk_that_is_full_stops_the_command_with_exit_3_and_a_resumable_run(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=96k", "tmpfs", str(disk)], check=False)
    if mounted.returncode:
        pytest.skip("this system lets nobody mount a tmpfs")
    try:
        full = run_command(tmp_path, disk / "run")
        subprocess.run(["mount", "-o", "remount,size=4m", str(disk)], check=True)
        check_full_disk(tmp_path, disk / "run", full)
    finally:
        subprocess.run(["umount", str(disk)], check=True)


@pytest.mark.skipif(os.geteuid() != 0 or sys.platform != "linux", reason="mounting a disk needs root on Linux")
def test_a_disk_that_turns_read_only_is_refused_with_exit_3(tmp_path: Path) -> None:
    """As ext4 does after an error: what was written stays, and a resume on it says what is wrong."""
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(disk)], check=False).returncode:
        pytest.skip("this system lets nobody mount a tmpfs")
    try:
        run_in(disk / "run", CountedModel(), cases(4))
        (disk / "run" / "metrics.json").unlink()
        subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
        refused = run_command(tmp_path, disk / "run")
        fresh = run_command(tmp_path, disk / "fresh")
    finally:
        subprocess.run(["umount", str(disk)], check=True)
    for ending in (refused, fresh):
        assert ending.returncode == 3, ending.stderr
        assert "Traceback" not in ending.stderr
        assert "ead-only" in ending.stderr
    assert not (tmp_path / "calls").exists()
