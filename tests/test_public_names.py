"""What `import steelyard` gives, costs and changes."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import steelyard
from steelyard._version import __version__

SOURCE = Path(steelyard.__file__).read_text()


def in_a_fresh_process(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", textwrap.dedent(code)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def type_checking_imports() -> dict[str, str]:
    """Name to module, as the block that only type checkers read has them."""
    tree = ast.parse(SOURCE)
    block = next(
        node
        for node in tree.body
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
    )
    return {
        alias.name: statement.module or ""
        for statement in block.body
        if isinstance(statement, ast.ImportFrom)
        for alias in statement.names
    }


def test_all_is_sorted_and_has_no_name_twice() -> None:
    assert list(steelyard.__all__) == sorted(set(steelyard.__all__))


def test_all_the_homes_and_what_type_checkers_see_agree() -> None:
    assert set(steelyard.__all__) == {*steelyard._HOMES, "__version__"}
    assert type_checking_imports() == steelyard._HOMES


@pytest.mark.parametrize("name", [name for name in steelyard.__all__ if name != "__version__"])
def test_every_public_name_can_be_imported_and_is_its_homes(name) -> None:
    home = importlib.import_module(steelyard._HOMES[name])
    assert getattr(steelyard, name) is getattr(home, name)
    assert name in dir(steelyard)


def test_the_version_is_the_packages() -> None:
    assert steelyard.__version__ == __version__


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'steelyard' has no attribute 'Runer'"):
        steelyard.Runer  # noqa: B018 - the access is what is tested
    with pytest.raises(ImportError):
        exec("from steelyard import Runer")


@pytest.mark.parametrize(
    "package",
    [
        "steelyard.cache",
        "steelyard.load",
        "steelyard.mock",
        "steelyard.report",
        "steelyard.scoring",
        "steelyard.targets",
    ],
)
def test_the_packages_of_public_parts_have_a_sorted_all_whose_names_exist(package) -> None:
    module = importlib.import_module(package)
    assert list(module.__all__) == sorted(set(module.__all__))
    assert all(hasattr(module, name) for name in module.__all__)


def test_a_star_import_works() -> None:
    names = in_a_fresh_process("from steelyard import *; print(sorted(n for n in dir() if not n.startswith('_')))")
    assert ast.literal_eval(names) == [name for name in steelyard.__all__ if not name.startswith("_")]


def test_importing_steelyard_imports_nothing_heavy() -> None:
    loaded = in_a_fresh_process(
        """
        import sys
        before = set(sys.modules)
        import steelyard
        print(sorted(set(sys.modules) - before))
        """
    )
    assert set(ast.literal_eval(loaded)) - {"__future__"} == {"steelyard", "steelyard._version"}


@pytest.mark.parametrize("what", ["steelyard", "steelyard.run.runner", "steelyard.cli", "steelyard.targets.simulated"])
def test_importing_changes_nothing_in_the_process(what) -> None:
    """No loop policy, signal handler, log handler, thread, child or output; random numbers stay where they were."""
    out = in_a_fresh_process(
        f"""
        import asyncio, locale, logging, os, random, signal, sys, threading, warnings
        import numpy  # our dependencies' own doings are not what is tested
        import click, msgspec, tqdm

        def state():
            return (
                asyncio.events._event_loop_policy,
                [signal.getsignal(number) for number in sorted(signal.valid_signals())],
                list(logging.root.handlers),
                logging.root.level,
                [thread.name for thread in threading.enumerate()],
                list(warnings.filters),
                dict(os.environ),
                os.getcwd(),
                random.getstate(),
                sys.excepthook,
                sys.getswitchinterval(),
                sys.getrecursionlimit(),
                locale.setlocale(locale.LC_ALL),
            )

        before = state()
        import {what}
        after = state()
        assert before == after, (before, after)
        handlers = logging.getLogger("steelyard").handlers
        assert all(isinstance(handler, logging.NullHandler) for handler in handlers), handlers
        """
    )
    assert out == ""
