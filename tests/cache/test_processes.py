"""Several processes on one cache at once: nothing torn, nothing mixed up, no exception."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest

from tests.support.cache import STORES, an_answer, key_of, open_store
from tests.support.paths import ROOT

WORKER = """
    import logging, random, sys
    from pathlib import Path
    from tests.support.cache import an_answer, key_of, open_store

    kind, folder, number = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
    logging.getLogger("steelyard").addHandler(logging.StreamHandler(sys.stderr))
    print("ready", flush=True)
    sys.stdin.readline()
    store = open_store(kind, folder)
    rng, found = random.Random(number), 0
    for turn in range(150):
        case = rng.randrange(40)
        answer = store.get("set", f"c{case}", key_of(case))
        if answer is not None:
            found += 1
            words = answer.response_text.split()
            assert len(set(words)) == 1 and words[0].endswith(f"c{case}"), "a torn or foreign answer"
        if answer is None or turn % 3 == 0:
            # Long enough for many pages, different for each writer.
            store.put("set", f"c{case}", key_of(case), an_answer(f"{number}-c{case} " * (500 + 400 * number)))
        CLEAR
    store.close()
    print(found)
"""
CLEAR = "if turn % 50 == 49 and number == 0: store.clear()"


def together(kind, folder, *, count=3, clear=False):
    """What that many processes print and complain of, having started at the same moment."""
    code = textwrap.dedent(WORKER).replace("CLEAR", CLEAR if clear else "pass")
    processes = [
        subprocess.Popen(
            [sys.executable, "-W", "error", "-c", code, kind, str(folder), str(number)],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for number in range(count)
    ]
    for process in processes:
        assert process.stdout.readline() == "ready\n"
    for process in processes:
        process.stdin.write("go\n")
        process.stdin.flush()
    return [(*process.communicate(timeout=90), process.returncode) for process in processes]


@pytest.mark.parametrize("clear", [False, True], ids=["", "and one clears it meanwhile"])
@pytest.mark.parametrize("kind", STORES)
def test_processes_on_one_cache_neither_fail_nor_see_half_an_answer(kind, clear, tmp_path):
    outcomes = together(kind, tmp_path, clear=clear)
    assert [(error, code) for _, error, code in outcomes] == [("", 0)] * 3
    assert sum(int(found) for found, _, _ in outcomes) > 0, "they found each other's answers, or their own"
    store = open_store(kind, tmp_path)
    if not clear:
        assert store.info().entries == 40
        assert all(store.get("set", f"c{case}", key_of(case)) is not None for case in range(40))
        assert not list(tmp_path.rglob("*.tmp"))
    store.close()


@pytest.mark.parametrize("kind", STORES)
def test_a_process_killed_while_it_writes_leaves_a_cache_that_works(kind, tmp_path):
    code = """
        import sys
        from pathlib import Path
        from tests.support.cache import an_answer, key_of, open_store
        store = open_store(sys.argv[1], Path(sys.argv[2]))
        number = 0
        while True:
            store.put("set", "c", key_of(number), an_answer(f"{number} " * 3000))
            print(number, flush=True)
            number += 1
    """
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code), kind, str(tmp_path)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
    )
    for _ in range(20):
        last = int(process.stdout.readline())
    process.kill()
    process.communicate(timeout=30)
    store = open_store(kind, tmp_path)
    assert last == 19
    for number in range(last + 1):
        assert store.get("set", "c", key_of(number)) == an_answer(f"{number} " * 3000)
    store.put("set", "c", key_of(0), an_answer("after"))
    assert store.get("set", "c", key_of(0)) == an_answer("after")
    store.close()
