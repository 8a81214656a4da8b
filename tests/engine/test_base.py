"""What deriving from Engine gives, and what a run asks of an engine of the user's."""

from __future__ import annotations

from typing import Any

import pytest

from steelyard import ConfigurationError, Engine, EvalCase, EvalSet, LocalEngine, Runner
from steelyard.protocols import InFlight, Tally


class Counting(Engine):
    """The two methods that every engine must have, and nothing else."""

    def __init__(self) -> None:
        self._inner = LocalEngine()
        self.runs = 0

    async def run(self, *args: Any, **options: Any) -> Tally:
        self.runs += 1
        return await self._inner.run(*args, **options)

    def in_flight(self) -> InFlight:
        return self._inner.in_flight()


def a_suite() -> EvalSet:
    return EvalSet("three", [EvalCase(prompt=f"p{number}") for number in range(3)])


def test_an_engine_with_only_run_and_in_flight_runs_a_suite() -> None:
    with Counting() as engine:
        result = Runner(lambda prompt: prompt, a_suite(), engine=engine, progress="off").run_sync()
    assert (result.complete, result.metrics["n"], engine.runs) == (True, 3, 1)


def test_the_defaults_are_those_of_an_engine_in_this_process() -> None:
    engine = Counting()
    engine.check(pace=True)
    engine.close()
    engine.close()
    assert not engine.runs_in_other_processes
    assert list(engine.client_loads()) == []


def test_an_engine_without_run_cannot_be_made() -> None:
    class Empty(Engine):
        pass

    with pytest.raises(TypeError, match="in_flight"):
        Empty()  # type: ignore[abstract]


def test_a_runner_refuses_what_is_not_an_engine() -> None:
    class Lookalike:
        run = in_flight = None

    with pytest.raises(ConfigurationError, match="engine must be an Engine, got Lookalike"):
        Runner(lambda prompt: prompt, a_suite(), engine=Lookalike())  # type: ignore[arg-type]


@pytest.mark.parametrize("failing", [False, True])
def test_a_check_that_raises_ends_the_run_before_any_call(failing) -> None:
    class Checked(Counting):
        def check(self, *, pace: bool = False) -> None:
            if failing:
                raise ConfigurationError(f"not today, pace={pace}")

    engine = Checked()
    runner = Runner(lambda prompt: prompt, a_suite(), engine=engine, progress="off")
    if failing:
        with pytest.raises(ConfigurationError, match="not today, pace=False"):
            runner.run_sync()
    else:
        runner.run_sync()
    assert engine.runs == (0 if failing else 1)
