"""Reports on the structure of src/steelyard: sizes, imports, layers, the path of one case, words. It gates nothing."""

from __future__ import annotations

import argparse
import ast
import contextlib
import io
import json
import re
import statistics
import subprocess
import sys
import tempfile
import textwrap
import threading
import tokenize
import tomllib
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "src" / "steelyard"

# Words of the first version's dialect (DESIGN.md §1). A name is read as its words: `early_end` and `EarlyEnd` are
# "early end". Counted in names and in prose (comments, docstrings, other strings, Markdown, YAML, page assets):
EVERYWHERE = (
    "sittings?", "books", "ledgers?", "weigh(?:s|ed|ing)?", "told of", "g(?:o|oes|oing|one) on with", "asked again",
    "held against", "held to", "bears?", "outranks?", "laid over", "seen from", "anew", "mended", "poured into",
    "at home", "stands twice", "pretend(?:s|ed|ing)?", "entrances?", "manner", "letters?", "outbox", "seats?", "staff",
    r"(?<!code\s)fence[sd]?", "early end", "leaves? to send", "of its own", "so many", "whoever",
)  # fmt: skip
# Only in names, because they are ordinary words in prose ("event-loop lag", "it leaves", "under these conditions"):
IN_NAMES = (
    "told", "said", r"(?<!price\s)book", "lots", "panels?", "conditions", "surfaces?", "wording", r"(?<!loop\s)lag",
    "leaves", "links", "supply",
)  # fmt: skip
# Never counted, because most uses are ordinary: given, shares, stands, beside, leave, go on.
_ONLY_IN = {  # elsewhere they are ordinary words: the letter of a choice, the links of a page
    "letter": "src/steelyard/engine/", "letters": "src/steelyard/engine/", "links": "src/steelyard/targets/",
}  # fmt: skip
_LIMIT = re.compile(r"^_?(MOST|LONGEST|LARGEST)(?:_|$)")  # constants that should start with MAX_
_WORD = re.compile(r"[A-Z]+(?=[A-Z][a-z])|[A-Z]?[a-z0-9]+|[A-Z]+")
_NAME_PATTERN, _PROSE_PATTERN = (
    re.compile(r"\b(?:" + "|".join(words).replace(" ", r"\s+") + r")\b", re.IGNORECASE)
    for words in (EVERYWHERE + IN_NAMES, EVERYWHERE)
)
_NAME_FIELDS = ("id", "attr", "arg", "name", "asname", "module")  # where AST nodes keep identifiers
_PROSE_FILES = (".js", ".html", ".css", ".yaml", ".yml", ".md", ".j2")

_MOCK = (sys.executable, "-c", "from steelyard.cli import main; main()", "mock")
_CASES = 5
_TRACED = 3  # the case that is followed: from when it is scored until the next one is


@dataclass(frozen=True)
class Module:
    """A Python file of the package, parsed."""

    name: str
    path: str
    text: str
    tree: ast.Module
    is_package: bool
    lines: int


Modules = dict[str, Module]


class Section(NamedTuple):
    """One part of the report: as text, and as figures for --json."""

    text: list[str]
    figures: dict[str, object]


class Hit(NamedTuple):
    """A word of the old dialect, and where it is."""

    path: str
    line: int
    word: str


def read_modules() -> Modules:
    """Return every module of the package by its full name."""
    modules = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        name = ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__")
        text = path.read_text(encoding="utf-8")
        tree, is_package = ast.parse(text, path), path.name == "__init__.py"
        modules[name] = Module(name, str(path.relative_to(ROOT)), text, tree, is_package, text.count("\n"))
    return modules


def sizes(modules: Modules) -> Section:
    """Count files and lines, in all and per folder."""
    folders: dict[str, list[int]] = defaultdict(list)
    for module in modules.values():
        folders[str(Path(module.path).parent)].append(module.lines)
    lengths = [module.lines for module in modules.values() if module.lines]
    total, median = sum(lengths), statistics.median(lengths)
    text = [
        f"1. Sizes: {len(modules)} files, {total:,} lines; median of the {len(lengths)} not empty: {median:g} lines"
    ]
    text += [f"   {name:<34} {len(each):>4} files {sum(each):>7,} lines" for name, each in sorted(folders.items())]
    by_folder = {name: {"files": len(each), "lines": sum(each)} for name, each in sorted(folders.items())}
    figures = {"files": len(modules), "not_empty": len(lengths), "lines": total, "median_lines": median}
    return Section(text, {**figures, "folders": by_folder})


def single_imports(modules: Modules) -> Section:
    """List modules that exactly one other module imports."""
    importers: dict[str, set[str]] = defaultdict(set)
    for module in modules.values():
        for name in _imported(module, modules):
            importers[name].add(module.name)
    found = {
        name: min(importers[name])
        for name, module in modules.items()
        if len(importers[name]) == 1 and not module.is_package and not name.startswith("steelyard.cli.")
    }
    text = [f"2. Imported by exactly one other module: {len(found)} (__init__ files and cli/*.py left out)"]
    text += [f"   {name:<44} {modules[name].lines:>4} lines   by {importer}" for name, importer in found.items()]
    return Section(text, {"count": len(found), "modules": found})


def _imported(module: Module, modules: Modules) -> Iterator[str]:
    """Yield what this module imports, anywhere in it: modules, and module names in lazy tables."""
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = _imported_from(node, module)
            for alias in node.names:
                yield f"{base}.{alias.name}" if f"{base}.{alias.name}" in modules else base
        elif isinstance(node, ast.Dict):
            yield from (_literal(item) for item in node.values)
        elif isinstance(node, ast.Constant) and ":" in _literal(node):
            yield _literal(node).partition(":")[0]  # "steelyard.module:Name"


def _imported_from(node: ast.ImportFrom, module: Module) -> str:
    """Return the full name of what `from ... import` reads."""
    if not node.level:
        return node.module or ""
    parts = module.name.split(".")
    kept = parts[: len(parts) - node.level + module.is_package]
    return ".".join([*kept, *filter(None, [node.module])])


def _literal(node: ast.AST) -> str:
    """Return the text of a string literal, and nothing for other nodes."""
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""


def functions(modules: Modules) -> Section:
    """Measure functions, methods and nested ones, in lines from `def` to the last."""
    found = sorted(
        ((node.end_lineno or node.lineno) - node.lineno + 1, f"{module.path}:{node.lineno} {node.name}")
        for module in modules.values()
        for node in ast.walk(module.tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    )
    lengths, longest = [lines for lines, _ in found], found[:-6:-1]
    p50, p90 = lengths[len(lengths) // 2], lengths[len(lengths) * 9 // 10]
    text = [f"3. Functions: {len(found):,}; lines p50 {p50}, p90 {p90}, max {lengths[-1]}"]
    text += [f"   {lines:>4} lines  {place}" for lines, place in longest]
    return Section(text, {"count": len(found), "p50": p50, "p90": p90, "max": lengths[-1], "longest": longest})


def layers(modules: Modules) -> Section:
    """Read the import contract: how many layers, and which modules none of them names."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"]
    contract: dict[str, Any] = next((one for one in settings["contracts"] if one["type"] == "layers"), {})
    containers, lines = contract.get("containers", []), contract.get("layers", [])
    named = _full_names([name.strip("() ") for line in lines for name in re.split("[|:]", line)], containers)
    excepted = _full_names(contract.get("exhaustive_ignores", []), containers)
    others = [name for name in modules if not _covers(named, name) and name not in {"steelyard", *containers}]
    unnamed = [name for name in others if not _covers(excepted, name)]
    exhaustive = bool(contract.get("exhaustive"))
    text = [
        f"4. Layers: {len(lines)}, exhaustive: {'yes' if exhaustive else 'no'}; modules that no layer names: "
        f"{len(unnamed)} (and {len(others) - len(unnamed)} in exhaustive_ignores)",
        *(f"   {name}" for name in unnamed),
    ]
    return Section(
        text, {"layers": len(lines), "exhaustive": exhaustive, "unnamed": unnamed, "ignored": sorted(excepted)}
    )


def _full_names(names: list[str], containers: list[str]) -> set[str]:
    return {f"{container}.{name}" for container in containers for name in names} if containers else set(names)


def _covers(names: set[str], module: str) -> bool:
    return any(module == name or module.startswith(f"{name}.") for name in names)


def walk() -> Section:
    """Follow one case through a run against the mock server: which functions of Steelyard are called for it."""
    try:
        with tempfile.TemporaryDirectory() as folder, _mock_server() as address:
            calls = _calls_of_one_case(address, Path(folder))
    except Exception as error:  # noqa: BLE001 - while modules move, the rest of the report is still wanted
        problem = f"{type(error).__name__}: {error}"
        return Section([f"5. Path of one HTTP case: not traced: {problem}"], {"problem": problem})
    first_calls = list(dict.fromkeys(calls))
    files = [Path(code.co_filename).relative_to(PACKAGE) for code in first_calls]
    count, changes, first_changes = len(set(files)), _folder_changes(calls), _folder_changes(first_calls)
    text = [
        f"5. Path of one HTTP case: {len(first_calls)} functions in {count} files; {changes} changes of folder from "
        f"call to call, coroutines that resume included ({first_changes} with each function's first call only)"
    ]
    figures = {"functions": len(first_calls), "files": count, "folder_changes": changes}
    order = [f"{file} {code.co_qualname}" for file, code in zip(files, first_calls, strict=True)]
    return Section(text, {**figures, "folder_changes_of_first_calls": first_changes, "order": order})


def _folder_changes(calls: list[CodeType]) -> int:
    folders = [Path(code.co_filename).parent for code in calls]
    return sum(one != other for one, other in pairwise(folders))


@contextlib.contextmanager
def _mock_server() -> Iterator[str]:
    """Start the mock server in another process, which is not traced; its base URL."""
    with subprocess.Popen(_MOCK, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as mock:
        assert mock.stdout is not None
        assert mock.stderr is not None
        try:
            address = mock.stdout.readline().strip()
            if not address:
                raise RuntimeError(f"the mock server did not start: {mock.stderr.read().strip()[-300:]}")
            yield address
        finally:
            mock.terminate()


def _calls_of_one_case(address: str, folder: Path) -> list[CodeType]:
    """Return the calls from when one case is scored until the next one is, in order, all threads together."""
    from steelyard import EvalCase, EvalSet, Runner
    from steelyard.scoring import Exact
    from steelyard.targets import OpenAIChat

    calls: list[CodeType] = []

    def record(frame: FrameType, event: str, _argument: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(str(PACKAGE)):
            calls.append(frame.f_code)

    suite = EvalSet("structure", [EvalCase(id=f"{n}", prompt=f"Case {n}", expected="yes") for n in range(_CASES)])
    target = OpenAIChat("mock", base_url=address, api_key="none", stream=False)
    runner = Runner(target, suite, [Exact()], parallelism=1, output_path=folder / "run", progress="off")
    threading.setprofile(record)
    sys.setprofile(record)
    try:
        runner.run_sync()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    scored = [index for index, code in enumerate(calls) if code is Exact.score.__code__]
    if len(scored) != _CASES:
        raise RuntimeError(f"{_CASES} cases were sent, and {len(scored)} scored")
    return calls[scored[_TRACED - 1] : scored[_TRACED]]


def words(modules: Modules, *, every: bool) -> Section:
    """Count the words of the old dialect; with `every`, list where each one is."""
    names = [hit for module in modules.values() for hit in _hits_in_names(module)]
    prose = [hit for module in modules.values() for hit in _hits_in_python_prose(module)]
    others = [path for folder in (PACKAGE, ROOT / "docs") for path in folder.rglob("*") if path.suffix in _PROSE_FILES]
    for path in [*ROOT.glob("*.md"), *(ROOT / "examples").glob("*.yaml"), *others]:
        prose += _find_prose(str(path.relative_to(ROOT)), 1, path.read_text(encoding="utf-8"))
    hits = sorted([*names, *prose])
    by_word = dict(Counter(hit.word for hit in hits).most_common())
    by_file = dict(Counter(hit.path for hit in hits).most_common())
    places = [f"{hit.path}:{hit.line}: {hit.word}" for hit in hits] if every else []
    text = [
        f"6. Words of the old dialect: {len(hits):,} ({len(names):,} in names, {len(prose):,} in prose)",
        *(f"   {line}" for line in textwrap.wrap(", ".join(f"{word} {n}" for word, n in by_word.items()), 110)),
        *(f"   {count:>5}  {path}" for path, count in list(by_file.items())[:15]),
        *(f"   {place}" for place in places),
    ]
    figures = {"total": len(hits), "names": len(names), "prose": len(prose), "by_word": by_word, "by_file": by_file}
    return Section(text, {**figures, **({"hits": places} if every else {})})


def _hits_in_names(module: Module) -> Iterator[Hit]:
    """Yield the words in the module's own name and in every identifier, at each use."""
    names = [(1, module.name.rpartition(".")[2])]
    for node in ast.walk(module.tree):
        found = (getattr(node, field, None) for field in _NAME_FIELDS)
        names += [(getattr(node, "lineno", 1), name) for name in found if isinstance(name, str)]
    for line, name in names:
        if limit := _LIMIT.match(name):
            yield Hit(module.path, line, f"{limit[1]}_")
        yield from _find(_NAME_PATTERN, module.path, line, " ".join(_WORD.findall(name)))


def _hits_in_python_prose(module: Module) -> Iterator[Hit]:
    for token in tokenize.generate_tokens(io.StringIO(module.text).readline):
        if token.type == tokenize.COMMENT:
            yield from _find_prose(module.path, token.start[0], token.string)
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Constant):
            yield from _find_prose(module.path, node.lineno, _literal(node))


def _find_prose(path: str, first_line: int, text: str) -> Iterator[Hit]:
    return _find(_PROSE_PATTERN, path, first_line, text.replace("_", " "))


def _find(pattern: re.Pattern[str], path: str, first_line: int, text: str) -> Iterator[Hit]:
    for match in pattern.finditer(text):
        word = " ".join(match[0].lower().split())
        if path.startswith(_ONLY_IN.get(word, "")):
            yield Hit(path, first_line + text.count("\n", 0, match.start()), word)


def duplicate_classes(modules: Modules) -> Section:
    """List public class names that more than one module defines."""
    places: dict[str, set[str]] = defaultdict(set)
    for module in modules.values():
        for node in ast.walk(module.tree):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].add(module.name)
    found = {name: sorted(where) for name, where in sorted(places.items()) if len(where) > 1}
    text = [f"7. Public class names defined in more than one module: {len(found)}"]
    text += [f"   {name:<20} {', '.join(where)}" for name, where in found.items()]
    return Section(text, {"count": len(found), "classes": found})


def main() -> None:
    """Print the report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--words", action="store_true", help="show every word of the old dialect as file:line: word")
    parser.add_argument("--json", action="store_true", help="print all figures as JSON")
    flags = parser.parse_args()
    modules = read_modules()
    sections = {
        "sizes": sizes(modules),
        "single_imports": single_imports(modules),
        "functions": functions(modules),
        "layers": layers(modules),
        "walk": walk(),
        "words": words(modules, every=flags.words),
        "duplicate_classes": duplicate_classes(modules),
    }
    if flags.json:
        report = json.dumps({name: section.figures for name, section in sections.items()}, indent=2)
    else:
        report = "\n\n".join("\n".join(section.text) for section in sections.values())
    sys.stdout.write(f"{report}\n")


if __name__ == "__main__":
    main()
