"""Which cases of a suite are asked: conditions on their metadata, those that failed before, a random sample."""

from __future__ import annotations

import hashlib
import operator
import re
from collections.abc import Callable, Mapping
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from steelyard.errors import ConfigurationError
from steelyard.records import EvalCase, id_digest
from steelyard.stats.slices import values_of

_ORDER: dict[str, Callable[[float, float], bool]] = {
    "<=": operator.le,
    ">=": operator.ge,
    "<": operator.lt,
    ">": operator.gt,
}
_CONDITION = re.compile(
    r"\s*(?P<key>[^\s=!<>][^=!<>]*?)\s*(?:(?P<sign><=|>=|==|!=|=|<|>)|\s(?P<word>not\s+in|in)\s)\s*(?P<value>.*?)\s*",
    re.S,
)
_FORMS = "key=value, key!=value, key in a, b or key>=number"


class Condition(msgspec.Struct, frozen=True):
    """A condition on a case's metadata, such as `difficulty=hard`."""

    text: str
    """As it was written."""
    key: str
    operator: str
    """`in`, `not in`, or a comparison of numbers."""
    values: tuple[str, ...]

    def holds(self, metadata: Mapping[str, Any]) -> bool:
        """Whether a case keeps it; one whose value is a list does if any item is one of the values."""
        found = values_of(metadata, self.key)
        if self.operator in _ORDER:
            return any(self._compares(value) for value in found)
        return any(value in self.values for value in found) == (self.operator == "in")

    def _compares(self, value: str) -> bool:
        try:
            return _ORDER[self.operator](float(value), float(self.values[0]))
        except ValueError:
            return False


def parse_condition(text: str, name: str = "where") -> Condition:
    """A condition as it is written; ConfigurationError for what is none."""
    found = _CONDITION.fullmatch(text) if isinstance(text, str) else None
    if found is None:
        raise ConfigurationError(f"{name}: a condition is {_FORMS}, got {text!r}")
    key, value, sign = found["key"].strip(), found["value"], found["sign"]
    if found["word"]:
        sign, values = " ".join(found["word"].split()), _listed(value, text, name)
    elif sign in _ORDER:
        values = (value,)
        try:
            float(value)
        except ValueError:
            raise ConfigurationError(f"{name}: {text!r}: {value!r} is not a number; {sign} compares numbers") from None
    else:
        sign, values = "not in" if sign == "!=" else "in", (value,)
    if not all(values):
        raise ConfigurationError(f"{name}: {text!r} names no value: cases without the key are {key}=(none)")
    return Condition(text.strip(), key, sign, values)


def _listed(value: str, text: str, name: str) -> tuple[str, ...]:
    """The values of a list: `a, b`, or JSON's `["a, b", 3]` for values with commas."""
    if not value.startswith("["):
        return tuple(part.strip() for part in value.split(","))
    try:
        items = msgspec.json.decode(value, type=list[Any])
    except msgspec.DecodeError as error:
        raise ConfigurationError(f"{name}: {text!r}: {value} is not a list in JSON: {error}") from error
    return tuple(values_of({"item": item}, "item")[0] for item in items)


class FailedCases(msgspec.Struct, frozen=True):
    """The cases of an earlier run that failed or ended in an error."""

    run: str
    id_digests: frozenset[int]


class Selection(msgspec.Struct, frozen=True, kw_only=True):
    """Which cases of a suite are asked, besides those that an id selects."""

    where: tuple[Condition, ...] = ()
    """All of them must hold."""
    failed: FailedCases | None = None
    sample: int | None = None
    seed: int = 0

    @property
    def takes_all(self) -> bool:
        """Whether every case is asked, unless there is a sample."""
        return not self.where and self.failed is None

    def takes(self, case: EvalCase) -> bool:
        """Whether a case keeps every condition, and failed before where that is asked for."""
        if self.failed is not None and id_digest(case.id) not in self.failed.id_digests:
            return False
        return all(condition.holds(case.metadata) for condition in self.where)

    def drawn(self, id_digests: npt.NDArray[np.uint64]) -> npt.NDArray[np.int64] | None:
        """The places of the cases that are drawn, in order, of those with these ids; None for all.

        What is drawn depends on the seed and the ids alone: a larger sample holds the smaller ones, and cases that
        are added to a suite take the place of few.
        """
        if self.sample is None or self.sample >= len(id_digests):
            return None
        ranks = _mixed(id_digests ^ _seed_digest(self.seed))
        return np.sort(np.argpartition(ranks, self.sample - 1)[: self.sample])


def _seed_digest(seed: int) -> np.uint64:
    return np.uint64(int.from_bytes(hashlib.blake2b(f"sample:{seed}".encode(), digest_size=8).digest()))


def _mixed(numbers: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Each number as another that looks random (the finaliser of splitmix64)."""
    mixed = (numbers ^ (numbers >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    result: npt.NDArray[np.uint64] = mixed ^ (mixed >> np.uint64(31))
    return result
