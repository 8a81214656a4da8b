"""A cached target: asks once, never serves what it should not, and lets no store fail a case."""

from __future__ import annotations

import asyncio
import pickle

import pytest

from steelyard import CancellationToken, EvalCase, EvalSet, InvocationResponse, Runner
from steelyard.cache import Cached, StoreError
from steelyard.protocols import Target
from steelyard.targets import CallableTarget, Simulated
from tests.support.cache import STORES, an_answer, context_of, open_store


class Model:
    """Answers with the number of the call."""

    default_parallelism = 4

    def __init__(self, model_id="m", answer=None, **identity):
        self.model_id = model_id
        self.calls = 0
        self.answer = answer
        self._identity = identity

    def identity(self):
        return {"kind": "model", "model": self.model_id, **self._identity}

    async def invoke(self, case, context):
        self.calls += 1
        await asyncio.sleep(0)
        if isinstance(self.answer, BaseException):
            raise self.answer
        return self.answer or an_answer(f"answer {self.calls}")


class Memory:
    """The smallest store there is."""

    def __init__(self):
        self.kept = {}

    def get(self, eval_set_id, case_id, key):
        return self.kept.get((eval_set_id, case_id, key))

    def put(self, eval_set_id, case_id, key, response):
        self.kept[eval_set_id, case_id, key] = response


class Broken:
    def get(self, eval_set_id, case_id, key):
        raise StoreError("cannot read: the disk is gone")

    def put(self, eval_set_id, case_id, key, response):
        raise OSError("cannot write: the disk is gone")


CASE = EvalCase(id="fr", prompt="Capital of France?", tools=[{"name": "search"}])


def ask(cached, case=CASE, **context):
    return asyncio.run(cached.invoke(case, context_of(case, **context)))


@pytest.mark.parametrize("kind", STORES)
def test_the_second_time_the_store_answers_and_the_response_says_so(kind, tmp_path):
    store = open_store(kind, tmp_path)
    model = Model(answer=an_answer(time_to_last_token=1.5, num_tokens_output=7))
    first = ask(Cached(model, store, "set"))
    second = ask(Cached(model, store, "set"))
    assert model.calls == 1
    assert (first.cached, second.cached) == (False, True)
    assert isinstance(second, InvocationResponse)
    kept = [name for name in InvocationResponse.__struct_fields__ if name != "cached"]
    assert all(getattr(first, name) == getattr(second, name) for name in kept)
    store.close()


def test_it_is_a_target_like_the_one_inside():
    model = Model()
    cached = Cached(model, Memory(), "set")
    assert isinstance(cached, Target)
    assert (cached.model_id, cached.default_parallelism, cached.identity()) == ("m", 4, model.identity())
    assert cached.excess == 0


@pytest.mark.parametrize(
    "changed",
    [
        lambda store: (Cached(Model("m-2"), store, "set"), CASE, {}),
        lambda store: (Cached(Model(temperature=0.1), store, "set"), CASE, {}),
        lambda store: (Cached(Model(), store, "other"), CASE, {}),
        lambda store: (Cached(Model(), store, "set", session={"data": 1}), CASE, {}),
        lambda store: (Cached(Model(), store, "set", tools=[{"name": "own"}]), CASE, {}),
        lambda store: (Cached(Model(), store, "set", parameters={}), CASE, {}),
        lambda store: (Cached(Model(), store, "set"), EvalCase(id="fr", prompt="Capital of France?"), {}),
        lambda store: (Cached(Model(), store, "set"), EvalCase(id="fr", prompt="Capital?", tools=CASE.tools), {}),
        lambda store: (
            Cached(Model(), store, "set"),
            EvalCase(id="fr", prompt="Capital of France?", system_prompt="Be brief.", tools=CASE.tools),
            {},
        ),
        lambda store: (Cached(Model(), store, "set"), CASE, {"trial": 1}),
        lambda store: (Cached(Model(), store, "set"), CASE, {"seed": 1}),
    ],
    ids=[
        "model",
        "temperature",
        "set",
        "session",
        "tools",
        "parameters",
        "case-tools",
        "prompt",
        "system",
        "trial",
        "seed",
    ],
)
def test_whatever_decides_an_answer_misses_when_it_changes(changed):
    store = Memory()
    ask(Cached(Model(), store, "set"))
    assert ask(Cached(Model(), store, "set")).cached
    cached, case, context = changed(store)
    assert not ask(cached, case, **context).cached
    assert ask(cached, case, **context).cached


def test_an_edited_function_is_asked_again():
    def first(case):
        return "old"

    def second(case):
        return "new"

    second.__qualname__ = first.__qualname__
    store = Memory()
    assert ask(Cached(CallableTarget(first, model_id="f"), store, "set")).response_text == "old"
    assert ask(Cached(CallableTarget(second, model_id="f"), store, "set")).response_text == "new"


@pytest.mark.parametrize(
    "answer",
    [
        an_answer(error="boom"),
        an_answer(stop_reason="length"),
        an_answer(stop_reason="content_filter"),
        InvocationResponse(),
        "not a response",
    ],
    ids=["error", "length", "filter", "empty", "no response"],
)
def test_what_did_not_complete_normally_is_handed_on_and_not_kept(answer):
    store = Memory()
    model = Model(answer=answer)
    assert ask(Cached(model, store, "set")) is answer
    assert store.kept == {}
    assert ask(Cached(model, store, "set")) is answer
    assert model.calls == 2


def test_what_the_target_raises_passes_through_and_is_not_kept():
    store = Memory()
    with pytest.raises(ConnectionError, match="gone"):
        ask(Cached(Model(answer=ConnectionError("gone")), store, "set"))
    assert store.kept == {}


def test_an_answer_given_under_cancellation_is_not_kept():
    """A target that sees the token may return early with what it has."""
    store = Memory()
    token = CancellationToken()
    token.cancel("enough")
    assert ask(Cached(Model(), store, "set"), token=token).response_text == "answer 1"
    assert store.kept == {}


def test_a_store_that_holds_what_it_should_not_is_not_believed():
    store = Memory()
    ask(Cached(Model(), store, "set"))
    (place,) = store.kept
    for bad in (an_answer(error="boom"), an_answer(stop_reason="length"), {"response_text": "x"}):
        store.kept[place] = bad
        assert ask(Cached(Model(), store, "set")) == an_answer("answer 1")


def test_a_hit_is_a_copy():
    store = Memory()
    ask(Cached(Model(), store, "set"))
    ask(Cached(Model(), store, "set")).response_text = "changed"
    assert ask(Cached(Model(), store, "set")).response_text == "answer 1"


def test_a_broken_store_fails_no_case_and_is_warned_of_once_for_each_kind(caplog):
    model = Model()
    cached = Cached(model, Broken(), "set")
    assert [ask(cached).response_text for _ in range(3)] == ["answer 1", "answer 2", "answer 3"]
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == 2
    assert "cannot be read" in messages[0]
    assert "StoreError: cannot read: the disk is gone" in messages[0]
    assert "cannot be written" in messages[1]
    assert "OSError: cannot write: the disk is gone" in messages[1]


def test_without_a_model_id_nothing_is_cached_and_that_is_said_once(caplog):
    store = Memory()
    model = Model(model_id=None)
    cached = Cached(model, store, "set")
    assert not ask(cached).cached
    assert not ask(cached).cached
    assert model.calls == 2
    assert store.kept == {}
    assert [record.getMessage() for record in caplog.records] == [
        "cache: the target has no model_id: its answers are not cached"
    ]


def test_a_target_whose_parameters_json_cannot_hold_is_asked_and_not_cached(caplog):
    store = Memory()
    assert ask(Cached(Model(temperature=float("nan")), store, "set")).response_text == "answer 1"
    assert store.kept == {}
    assert "case 'fr' is not cached" in caplog.text


def test_identical_questions_of_two_runs_in_flight_are_asked_once():
    async def main():
        store, model = Memory(), Model()
        runs = [Cached(model, store, "set") for _ in range(5)]
        answers = await asyncio.gather(*(run.invoke(CASE, context_of(CASE)) for run in runs))
        assert model.calls == 1
        assert [answer.cached for answer in answers] == [False, True, True, True, True]
        assert {answer.response_text for answer in answers} == {"answer 1"}

    asyncio.run(main())


@pytest.mark.parametrize("answer", [an_answer(stop_reason="length"), an_answer(error="boom"), ConnectionError("gone")])
def test_an_answer_that_may_not_be_kept_is_not_shared_either(answer):
    async def main():
        store, model = Memory(), Model(answer=answer)
        cached = Cached(model, store, "set")
        calls = (cached.invoke(CASE, context_of(CASE)) for _ in range(3))
        answers = await asyncio.gather(*calls, return_exceptions=True)
        assert model.calls == 3
        assert not any(getattr(answer, "cached", False) for answer in answers)

    asyncio.run(main())


def test_a_slow_store_holds_up_neither_the_event_loop_nor_a_cancellation():
    async def main():
        release = asyncio.Event()
        loop = asyncio.get_running_loop()

        class Slow(Memory):
            def put(self, *arguments):
                asyncio.run_coroutine_threadsafe(release.wait(), loop).result(10)
                super().put(*arguments)

        store = Slow()
        cached = Cached(Model(), store, "set")
        asking, cancelled = [
            asyncio.create_task(cached.invoke(case, context_of(case))) for case in (CASE, EvalCase(id="x"))
        ]
        await asyncio.sleep(0.02)
        assert not asking.done()
        cancelled.cancel()
        await asyncio.wait([cancelled], timeout=5)
        assert cancelled.done(), "a cancellation does not wait for the store"
        assert cancelled.result().response_text, "and the answer is not lost to it"
        release.set()
        await asking
        assert ("set", "fr") in {place[:2] for place in store.kept}

    asyncio.run(main())


def test_a_session_that_a_case_changes_does_not_change_the_key():
    store, session = Memory(), {"data": {}}
    cached = Cached(Model(), store, "set", session=session)
    ask(cached)
    session["data"]["seen"] = 1
    assert ask(cached).cached


def test_it_can_be_sent_to_another_process(tmp_path):
    store = open_store("sqlite", tmp_path)
    cached = Cached(Simulated(latency=0, tokens_per_second=0), store, "set")
    copy = pickle.loads(pickle.dumps(cached))
    assert not ask(copy).cached
    assert ask(cached).cached
    copy._store.close()
    store.close()


@pytest.mark.parametrize("kind", STORES)
def test_a_second_run_of_a_suite_asks_nobody(kind, tmp_path):
    store, model = open_store(kind, tmp_path), Model()
    suite = EvalSet("capitals", [EvalCase(id=f"c{number}", prompt=f"{number}?") for number in range(20)])

    def run():
        return Runner(Cached(model, store, suite.id), suite, progress="off").run_sync()

    first, second = run(), run()
    assert model.calls == 20
    assert [one.response_text for one in first.responses] == [one.response_text for one in second.responses]
    assert store.info().entries == 20
    store.close()
