"""`matrix.json`: which variants a matrix has, and the run directory of each beneath its folder."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path

import msgspec

from steelyard.disk import read_regular
from steelyard.errors import ConfigurationError, RunRefused
from steelyard.journal.files import MATRIX, PREVIOUS, write_json
from steelyard.journal.manifest import now

MATRIX_VERSION = 1
MAX_VARIANTS = 64
"""How many runs may share a folder: more would be a mistake in the axes, and an expensive one."""
TARGET = "target"
PROMPT = "prompt"
_MAX_DIRECTORY = 80
_UNSAFE = re.compile(r"[^A-Za-z0-9._=-]+")


class Variant(msgspec.Struct, frozen=True, kw_only=True):
    """One combination of a matrix: one run."""

    name: str
    """`small/terse`: its value on each axis; those of parameters as `temperature=0.7`."""
    directory: str
    """Its run directory, a name beneath the folder of the matrix."""
    axes: dict[str, str]
    """Its value on each axis: `target`, `prompt`, and each parameter by its name."""


class Matrix(msgspec.Struct, frozen=True, kw_only=True):
    """What matrix.json says: a suite, the axes along which its runs differ, and a run directory for each variant.

    Variants that have not begun have no directory yet.
    """

    v: int = MATRIX_VERSION
    suite: str
    suite_file: str | None = None
    axes: dict[str, list[str]]
    """The values on each axis, in the order of the suite; the targets first, then the prompts."""
    variants: list[Variant]
    created: str = msgspec.field(default_factory=now)

    def runs(self, folder: str | Path) -> dict[str, Path]:
        """The run directory of each variant, by its name."""
        return {variant.name: Path(folder) / variant.directory for variant in self.variants}


def is_matrix(folder: str | Path) -> bool:
    """Whether a folder holds a matrix."""
    return (Path(folder) / MATRIX).is_file()


def read_matrix(folder: str | Path) -> Matrix:
    """What matrix.json says; RunRefused where there is none, or none that can be used."""
    path = Path(folder) / MATRIX
    try:
        matrix = msgspec.json.decode(read_regular(path), type=Matrix)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise RunRefused(f"{folder} holds no matrix: it has no {MATRIX}", path=folder) from error
    except OSError as error:
        raise RunRefused(f"{path} cannot be read: {error.strerror}", path=folder) from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise RunRefused(f"{path} cannot be read ({error});", " {force} starts over", path=folder) from error
    if matrix.v > MATRIX_VERSION:
        raise RunRefused(f"{path} was written by a newer Steelyard (schema {matrix.v})", path=folder)
    for variant in matrix.variants:
        if variant.directory in ("", ".", "..") or _UNSAFE.search(variant.directory):
            raise RunRefused(f"{path}: {variant.directory!r} is not the name of a run directory", path=folder)
    return matrix


def write_matrix(folder: str | Path, matrix: Matrix) -> None:
    """Write matrix.json, atomically."""
    write_json(Path(folder) / MATRIX, matrix)


def make_variants(axes: Mapping[str, Sequence[str]], known: Sequence[Variant] = ()) -> list[Variant]:
    """Every combination of the axes, the last one changing fastest; those in `known` keep their directories."""
    count = math.prod(map(len, axes.values()))
    if count > MAX_VARIANTS:
        sizes = " × ".join(f"{len(values)} {axis}" for axis, values in axes.items())
        raise ConfigurationError(
            f"{count:,} variants ({sizes}) are more than {MAX_VARIANTS}: run some of them at a time, with fewer values"
        )
    directories = {variant.name: variant.directory for variant in known}
    taken = {PREVIOUS, *(directory.casefold() for directory in directories.values())}
    found: dict[str, Variant] = {}
    for values in product(*axes.values()):
        at = dict(zip(axes, values, strict=True))
        name = "/".join(value if axis in (TARGET, PROMPT) else f"{axis}={value}" for axis, value in at.items())
        if name in found:
            raise ConfigurationError(f"two variants would be named {name!r}: name the values of the axes otherwise")
        if name not in directories:
            directories[name] = _directory(name, taken)
            taken.add(directories[name].casefold())
        found[name] = Variant(name=name, directory=directories[name], axes=at)
    return list(found.values())


def _directory(name: str, taken: set[str]) -> str:
    """A name for a folder that none has yet, also where upper and lower case are the same."""
    safe = _UNSAFE.sub("-", name).strip(".-")[:_MAX_DIRECTORY] or "variant"
    chosen, number = safe, 2
    while chosen.casefold() in taken:
        chosen, number = f"{safe}-{number}", number + 1
    return chosen
