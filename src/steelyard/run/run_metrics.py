"""Metrics of a whole run: functions over all of its records, the built-in ones and the user's own."""

from __future__ import annotations

import hashlib
import inspect
import itertools
import logging
import math
import numbers
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from steelyard.errors import ConfigurationError, RunCancelled
from steelyard.masking import masked_description
from steelyard.plugins import find
from steelyard.protocols import Identity, derived_rng
from steelyard.records import Record, id_digest, is_digest
from steelyard.scoring.base import FunctionScorer, as_text, check_choice, need_extra
from steelyard.scoring.extract import Extract
from steelyard.stats.classification import Predictions, majority_share
from steelyard.stats.formatting import safe_text
from steelyard.stats.intervals import BoundedMean
from steelyard.stats.metrics import RunMetric
from steelyard.stats.slices import NONE, NOT_KEPT, values_of

log = logging.getLogger("steelyard")

MAX_VALUES = 1_000
"""Figures that one metric may give."""
_MAX_ERROR = 500
_MAX_SUBSETS = 1_000
_DRAWS = 1_000


class MetricValue(msgspec.Struct, frozen=True):
    """A figure of a run with its 95 % interval, its unit, which direction is better, and of how many it is."""

    value: float | None
    ci95: tuple[float, float] | None = None
    unit: str | None = None
    better: str | None = None
    n: int | None = None


RunMetricFunction = Callable[[Iterator[Record]], Any]
"""Takes the records in case order, one at a time; returns a number, a MetricValue, or a mapping of either."""


class NamedMetric:
    """A function over all records, with its name and what its result depends on."""

    def __init__(self, function: RunMetricFunction, name: str | None = None) -> None:
        if not callable(function) or inspect.isclass(function):
            raise ConfigurationError(f"a run metric is a function of an iterator of records, got {function!r:.100}")
        self.function = function
        own = getattr(function, "name", "") or getattr(function, "__name__", "")
        self.name = str(name or own or type(function).__name__)

    def identity(self) -> Identity:
        """What a changed result may come from: its arguments, or where the function is and its source."""
        own = getattr(self.function, "identity", None)
        if callable(own):
            return {**own(), "name": self.name}
        return {**FunctionScorer(self.function, name=self.name).identity(), "threshold": None}

    def figures(self, records: Iterator[Record]) -> dict[str, RunMetric]:
        """What it gives, by name; one that fails is its message. RunCancelled passes through."""
        try:
            return _figures(self.name, self.function(records))
        except RunCancelled:
            raise
        except (Exception, SystemExit) as error:  # noqa: BLE001 - whatever it raises, the run is good without it
            message = masked_description(error, _MAX_ERROR)
            log.warning("the run metric %s failed: %s", safe_text(self.name), safe_text(message))
            return {self.name: RunMetric(value=None, error=message)}


def as_run_metrics(items: Iterable[object]) -> list[NamedMetric]:
    """Run metrics from functions, objects that can be called, and names; two of one name are refused."""
    if isinstance(items, str) or not isinstance(items, Iterable):
        raise ConfigurationError(f"run_metrics must be a list of run metrics, got {items!r}")
    made = [_as_metric(item) for item in items]
    names = [metric.name for metric in made]
    for name in names:
        if names.count(name) > 1:
            raise ConfigurationError(f"two run metrics are named {name!r}: give one of them another name")
    return made


def _as_metric(item: Any) -> NamedMetric:
    if isinstance(item, NamedMetric):
        return item
    if isinstance(item, str):
        found = find("run_metrics", item)
        item = found() if inspect.isclass(found) else found
    return NamedMetric(item)


def _figures(name: str, result: Any) -> dict[str, RunMetric]:
    if inspect.isawaitable(result):
        getattr(result, "close", lambda: None)()
        raise TypeError("it is async: a run metric is a plain function")
    if not isinstance(result, Mapping):
        return {name: _figure(result)}
    if len(result) > MAX_VALUES:
        raise ValueError(f"it gives {len(result):,} figures, at most {MAX_VALUES:,}")
    return {f"{name}.{key}": _figure(value) for key, value in result.items()}


def _figure(value: Any) -> RunMetric:
    if isinstance(value, MetricValue):
        low, high = value.ci95 or (None, None)
        better = value.better if value.better in ("higher", "lower") else None
        return RunMetric(
            value=_number(value.value),
            ci95=None if low is None or high is None else (_finite(low), _finite(high)),
            unit=value.unit,
            better=better,  # type: ignore[arg-type]
            n=value.n,
        )
    return RunMetric(value=_number(value))


def _number(value: Any) -> float | None:
    if value is None or isinstance(value, numbers.Real) or type(value).__name__ in ("bool", "bool_"):
        return None if value is None else _finite(value)
    raise TypeError(f"it gives {type(value).__name__}, not a number, a MetricValue or a mapping of these")


def _finite(value: Any) -> float:
    if not math.isfinite(value):
        raise ValueError(f"it gives {value}, which is not a finite number")
    return float(value)


def _expected(record: Record) -> Any:
    """What the case expected; None where the record has only the digest of something large."""
    return None if is_digest(record.expected) else record.expected


def _cluster(record: Record) -> int:
    """What a record counts together with: its group, or else its case."""
    return id_digest(f"group {record.group}" if record.group else f"case {record.id}")


class Classification:
    """Accuracy, and precision, recall and F1 of each label: macro, micro and weighted over the labels too.

    What is predicted is the answer's text, or what `extract` finds in it, or the label of the score named `score`; what
    is true is the case's expected, or its metadata at `truth`. Answers that never came are left out, as of pass rates,
    and cases whose expected is too large for a record.
    """

    name = "classification"

    def __init__(
        self,
        *,
        name: str | None = None,
        labels: Sequence[Any] | None = None,
        score: str | None = None,
        truth: str | None = None,
        extract: Any = None,
        ignore_case: bool = False,
    ) -> None:
        self.name = name or type(self).name
        if labels is not None and (isinstance(labels, str) or not labels):
            raise ConfigurationError(f"labels must be a list of labels, got {labels!r}")
        if not isinstance(ignore_case, bool):
            raise ConfigurationError(f"ignore_case must be true or false, got {ignore_case!r}")
        if score is not None and extract is not None:
            raise ConfigurationError("give score or extract, not both: a score has a label")
        self._ignore_case, self._score, self._truth = ignore_case, score, truth
        self._labels = None if labels is None else [self._normal(as_text(label)) for label in labels]
        self._extract = None if extract is None else Extract(extract)

    def identity(self) -> Identity:
        return {
            "kind": type(self).name,
            "labels": self._labels,
            "score": self._score,
            "truth": self._truth,
            "extract": None if self._extract is None else self._extract.identity(),
            "ignore_case": self._ignore_case,
        }

    def __call__(self, records: Iterator[Record]) -> dict[str, MetricValue]:
        found = self._read(records).to_figures()
        return {name: MetricValue(one.value, one.ci95, None, "higher", one.n) for name, one in found.items()}

    def _read(self, records: Iterator[Record]) -> Predictions:
        predictions = Predictions(self._labels)
        for record in records:
            if record.status == "ok" and (pair := self._pair(record)) is not None:
                predictions.add(*pair, _cluster(record))
        if not len(predictions):
            raise ValueError("no answer has both a true and a predicted label")
        return predictions

    def _pair(self, record: Record) -> tuple[str, str] | None:
        """The true and the predicted label; None where the case has no true one, or the answer no such score."""
        if self._score is None:
            text = record.response_text or ""
            found = text if self._extract is None else self._extract.of(text)[0]
            predicted = self._normal(found or "")
        else:
            labels = [score.label for score in record.scores if score.name == self._score and score.label is not None]
            if not labels:
                return None
            predicted = self._normal(labels[-1])
        truth = _expected(record) if self._truth is None else None
        if self._truth is not None:
            (text, *_) = values_of(record.metadata, self._truth)
            truth = None if text in (NONE, NOT_KEPT) else text
        if truth is None:
            return None
        accepted = [self._normal(as_text(one)) for one in (truth if isinstance(truth, list) else [truth])]
        return (predicted if predicted in accepted else accepted[0], predicted) if accepted else None

    def _normal(self, label: str) -> str:
        text = " ".join(label.split())
        return text.casefold() if self._ignore_case else text


class Accuracy(Classification):
    """The share of answers whose label is right."""

    name = "accuracy"

    def __call__(self, records: Iterator[Record]) -> MetricValue:  # type: ignore[override]
        found = self._read(records).accuracy()
        return MetricValue(found.value, found.ci95, None, "higher", found.n)


class Majority:
    """majority@k: whether the most frequent of k answers to a case passes, as if k trials had voted.

    The mean over cases, of all ways to choose k of a case's trials, or of a thousand of them. Answers count as equal by
    their text, or by what `extract` finds in it. Cases with fewer than k verdicts are left out.
    """

    name = "majority"

    def __init__(
        self,
        *,
        name: str | None = None,
        k: int | Sequence[int] | None = None,
        extract: Any = None,
        ignore_case: bool = True,
    ) -> None:
        self.name = name or "majority"
        self._ks = None if k is None else [k] if isinstance(k, int) else list(k)
        if self._ks is not None and not all(type(one) is int and one >= 1 for one in self._ks):
            raise ConfigurationError(f"k must be a number >= 1, or a list of such, got {k!r}")
        if not isinstance(ignore_case, bool):
            raise ConfigurationError(f"ignore_case must be true or false, got {ignore_case!r}")
        self._extract = None if extract is None else Extract(extract)
        self._ignore_case = ignore_case

    def identity(self) -> Identity:
        extract = None if self._extract is None else self._extract.identity()
        return {"kind": "majority", "k": self._ks, "extract": extract, "ignore_case": self._ignore_case}

    def __call__(self, records: Iterator[Record]) -> dict[str, MetricValue]:
        shares: dict[int, list[float]] = {}
        clusters: dict[int, list[int]] = {}
        for _, trials in itertools.groupby(records, key=lambda record: record.id):
            voted = [(record, record.passed) for record in trials if record.passed is not None]
            for k in self._ks if self._ks is not None else [len(voted)] if voted else []:
                if k <= len(voted):
                    answers = [self._answer(record) for record, _ in voted]
                    shares.setdefault(k, []).append(
                        _majority(answers, [bool(one) for _, one in voted], k, voted[0][0].id)
                    )
                    clusters.setdefault(k, []).append(_cluster(voted[0][0]))
        if not shares:
            raise ValueError("no case has as many verdicts: run with --trials")
        if self._ks is None:  # of all trials: those of the cases that have the most
            shares = {max(shares): shares[max(shares)]}
        found = {}
        for k in sorted(shares):
            mean = BoundedMean.over_groups(shares[k], clusters[k])
            found[str(k)] = MetricValue(mean.mean, mean.interval(), None, "higher", len(shares[k]))
        return found

    def _answer(self, record: Record) -> str:
        text = record.response_text or ""
        if self._extract is not None:
            text = self._extract.of(text)[0] or ""
        text = " ".join(text.split())
        return text.casefold() if self._ignore_case else text


def _majority(answers: list[str], passed: list[bool], k: int, case_id: str) -> float:
    """The mean over the ways to choose k of the answers."""
    n = len(answers)
    if math.comb(n, k) <= _MAX_SUBSETS:
        chosen: Iterable[Sequence[int]] = itertools.combinations(range(n), k)
    else:
        rng = derived_rng(0, case_id, k, "majority")
        chosen = (rng.sample(range(n), k) for _ in range(_MAX_SUBSETS))
    found = [majority_share([answers[place] for place in one], [passed[place] for place in one]) for one in chosen]
    return math.fsum(found) / len(found)


class CorpusBleu:
    """sacrebleu's corpus BLEU, 0 to 100, of the answers against what was expected; a list holds references.

    Its interval is by resampling the cases, or groups of them, a thousand times.
    """

    name = "corpus_bleu"

    def __init__(self, *, name: str | None = None, tokens: str = "13a", ignore_case: bool = False) -> None:
        need_extra("sacrebleu", "text", "corpus_bleu")
        from sacrebleu.metrics.bleu import BLEU

        self.name = name or "corpus_bleu"
        check_choice("tokens", tokens, tuple(BLEU.TOKENIZERS))
        if not isinstance(ignore_case, bool):
            raise ConfigurationError(f"ignore_case must be true or false, got {ignore_case!r}")
        self._tokens, self._ignore_case = tokens, ignore_case

    def identity(self) -> Identity:
        return {"kind": "corpus_bleu", "tokens": self._tokens, "ignore_case": self._ignore_case}

    def __call__(self, records: Iterator[Record]) -> MetricValue:
        from sacrebleu.metrics.bleu import BLEU

        bleu = BLEU(tokenize=self._tokens, lowercase=self._ignore_case, effective_order=True)
        total, draws, n = np.zeros(10), np.zeros((_DRAWS, 10)), 0
        for record in records:
            expected = _expected(record)
            if record.status != "ok" or expected is None:
                continue
            wanted = expected if isinstance(expected, list) else [expected]
            one = bleu.sentence_score(record.response_text or "", [as_text(text) for text in wanted])
            counted = np.array([one.sys_len, one.ref_len, *one.counts, *one.totals], dtype=np.float64)
            total += counted
            draws += np.outer(_weights(_cluster(record)), counted)
            n += 1
        if not n:
            raise ValueError("no answer has an expected text to compare with")
        scores = np.sort([_bleu(bleu, row) for row in draws])
        low, high = np.percentile(scores, (2.5, 97.5)).tolist()
        return MetricValue(_bleu(bleu, total), (low, high), None, "higher", n)


def _weights(cluster: int) -> Any:
    """How often a cluster is drawn in each resample (Poisson bootstrap): the same wherever its records come."""
    seed = int.from_bytes(hashlib.blake2b(cluster.to_bytes(8), digest_size=8).digest())
    return np.random.Generator(np.random.SFC64(seed)).poisson(1.0, _DRAWS)


def _bleu(bleu: Any, counted: Any) -> float:
    lengths, counts, totals = counted[:2], counted[2:6].astype(int).tolist(), counted[6:].astype(int).tolist()
    found = bleu.compute_bleu(counts, totals, int(lengths[0]), int(lengths[1]), bleu.smooth_method, bleu.smooth_value)
    return float(found.score)
