"""A bare function as a target."""

from __future__ import annotations

import asyncio
import functools
import pickle
import subprocess
import sys
import threading
import time
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from steelyard.errors import ConfigurationError, TargetError, TransientError
from steelyard.protocols import InvocationContext, Target
from steelyard.records import EvalCase, InvocationResponse
from steelyard.targets import CallableTarget, Simulated, as_target

CASE = EvalCase(id="fr", prompt="Capital of France?")
CONTEXT = InvocationContext(case_id="fr", trial=2)


def ask(function: Any) -> InvocationResponse:
    return asyncio.run(as_target(function).invoke(CASE, CONTEXT))


def plain(case):
    return f"plain {case.id}"


def plain_with_context(case, context):
    return f"plain {case.id} {context.trial}"


async def coroutine(case):
    return f"coroutine {case.id}"


async def coroutine_with_context(case, context):
    return f"coroutine {case.id} {context.trial}"


def pieces(case):
    yield "pie"
    yield "ces"


async def async_pieces(case, context):
    yield "async "
    await asyncio.sleep(0)
    yield f"pieces {context.trial}"


class Agent:
    def __call__(self, case):
        return "object"

    def answer(self, case, context):
        return f"method {context.trial}"

    async def answer_async(self, case):
        return "async method"

    @classmethod
    def of_class(cls, case):
        return cls.__name__

    @staticmethod
    def of_nobody(case, context):
        return f"static {context.trial}"


class AsyncAgent:
    async def __call__(self, case, context):
        return f"async object {context.trial}"


class StreamingAgent:
    async def __call__(self, case):
        yield "async "
        yield "stream object"


def with_setting(setting, case, context=None):
    return f"{setting} {context.trial}"


def with_default(case, temperature=0.5):
    return f"{temperature}"


def with_default_context(case, context=None):
    return f"{context.trial}"


def with_keyword_context(case, *, context):
    return f"{context.trial}"


def with_rest(*args, **kwargs):
    return f"{len(args)}"


@pytest.mark.parametrize(
    ("function", "text"),
    [
        (plain, "plain fr"),
        (plain_with_context, "plain fr 2"),
        (coroutine, "coroutine fr"),
        (coroutine_with_context, "coroutine fr 2"),
        (pieces, "pieces"),
        (async_pieces, "async pieces 2"),
        (Agent(), "object"),
        (Agent().answer, "method 2"),
        (Agent().answer_async, "async method"),
        (Agent.of_class, "Agent"),
        (Agent.of_nobody, "static 2"),
        (AsyncAgent(), "async object 2"),
        (StreamingAgent(), "async stream object"),
        (functools.partial(with_setting, "warm"), "warm 2"),
        (functools.partial(with_setting, "cold", context=InvocationContext(case_id="x", trial=9)), "cold 9"),
        (functools.partial(functools.partial(coroutine_with_context)), "coroutine fr 2"),
        (with_default, "0.5"),
        (with_default_context, "2"),
        (with_keyword_context, "2"),
        (with_rest, "1"),
        (lambda case: "lambda", "lambda"),
        (lambda case: coroutine(case), "coroutine fr"),
        (lambda case: pieces(case), "pieces"),
        (lambda case, context: async_pieces(case, context), "async pieces 2"),
    ],
)
def test_every_kind_of_callable_answers(function, text) -> None:
    assert ask(function).response_text == text


@pytest.mark.parametrize("function", [pieces, async_pieces, lambda case: pieces(case)])
def test_a_stream_has_a_time_to_its_first_token(function) -> None:
    response = ask(function)
    assert 0 <= response.time_to_first_token <= response.time_to_last_token


@pytest.mark.parametrize("function", [plain, coroutine])
def test_a_whole_answer_has_no_time_to_first_token(function) -> None:
    response = ask(function)
    assert response.time_to_first_token is None
    assert response.time_to_last_token >= 0


def test_the_first_token_is_timed_when_it_comes_and_not_at_the_end() -> None:
    async def slow(case):
        yield ""  # no token yet
        await asyncio.sleep(0.02)
        yield "one"
        await asyncio.sleep(0.02)
        yield "two"

    response = ask(slow)
    assert 0.015 < response.time_to_first_token < response.time_to_last_token - 0.015


def test_what_a_function_leaves_out_is_filled_in() -> None:
    before = datetime.now(UTC)
    response = ask(coroutine)
    assert response.input_prompt == CASE.prompt
    assert before <= response.request_time <= datetime.now(UTC)
    assert response.request_time.utcoffset() == timedelta(0)


def test_what_a_function_says_stands() -> None:
    returned = InvocationResponse(
        response_text="x",
        input_prompt="mine",
        time_to_last_token=5.0,
        time_to_first_token=1.0,
        num_tokens_output=5,
        request_time=datetime(2020, 1, 1, tzinfo=UTC),
        error="half an answer",
    )

    response = ask(lambda case: returned)
    assert response.time_per_output_token == 1.0
    response.time_per_output_token = None
    assert response == returned


@pytest.mark.parametrize(("first", "tokens"), [(None, 5), (1.0, None), (1.0, 1), (1.0, 0)])
def test_time_per_output_token_is_left_out_where_it_cannot_be_known(first, tokens) -> None:
    returned = InvocationResponse(
        response_text="x", time_to_first_token=first, time_to_last_token=2.0, num_tokens_output=tokens
    )
    assert ask(lambda case: returned).time_per_output_token is None


def test_a_response_object_that_is_handed_out_twice_is_not_written_to() -> None:
    shared = InvocationResponse(response_text="x")
    first, second = ask(lambda case: shared), ask(lambda case: shared)
    assert shared == InvocationResponse(response_text="x")
    assert first.request_time < second.request_time


@pytest.mark.parametrize("answer", [None, 42, b"bytes", ["text"], {"response_text": "x"}])
@pytest.mark.parametrize("is_async", [False, True])
def test_an_answer_of_another_type_is_an_error_that_names_function_and_type(answer, is_async) -> None:
    async def eventually_odd(case):
        return answer

    def odd(case):
        return answer

    function = eventually_odd if is_async else odd
    with pytest.raises(TypeError, match=rf"odd must return .* got {type(answer).__name__}"):
        ask(function)


@pytest.mark.parametrize("piece", [None, 42, b"bytes"])
def test_a_piece_of_another_type_is_an_error_that_names_function_and_type(piece) -> None:
    closed = []

    def stream(case):
        try:
            yield "fine"
            yield piece
        finally:
            closed.append("sync")

    async def async_stream(case):
        try:
            yield "fine"
            yield piece
        finally:
            closed.append("async")

    for function in (stream, async_stream):
        with pytest.raises(TypeError, match=rf"stream must yield text, got {type(piece).__name__}"):
            ask(function)
    assert closed == ["sync", "async"]


@pytest.mark.parametrize("error", [TransientError("busy"), ConnectionError("lost"), ValueError("bug")])
def test_exceptions_come_through_unchanged(error) -> None:
    async def async_fail(case):
        raise error

    def fail(case):
        raise error

    def fail_late(case):
        yield "so far so good"
        raise error

    for function in (async_fail, fail, fail_late):
        with pytest.raises(type(error)) as caught:
            ask(function)
        assert caught.value is error


@pytest.mark.parametrize("error", [SystemExit(3), asyncio.CancelledError("from within")])
def test_a_function_that_exits_or_cancels_itself_fails_alone(error) -> None:
    async def async_leave(case):
        raise error

    async def stream_leave(case):
        yield "x"
        raise error

    def leave(case):
        raise error

    for function in (async_leave, stream_leave, leave, lambda case: async_leave(case)):
        with pytest.raises(TargetError, match=type(error).__name__):
            ask(function)


@pytest.mark.parametrize("streams", [False, True])
def test_a_cancelled_async_call_is_cancelled_and_cleans_up(streams) -> None:
    async def main() -> None:
        entered, cleaned = asyncio.Event(), []

        async def hang(case):
            try:
                entered.set()
                await asyncio.Event().wait()
            finally:
                cleaned.append("up")

        async def hang_in_stream(case):
            yield "x"
            await hang(case)

        task = asyncio.create_task(as_target(hang_in_stream if streams else hang).invoke(CASE, CONTEXT))
        await entered.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert cleaned == ["up"]

    asyncio.run(main())


def test_a_sync_call_that_outlives_its_timeout_is_counted_as_excess() -> None:
    async def main() -> CallableTarget:
        entered, release = threading.Event(), threading.Event()

        def hang(case):
            entered.set()
            release.wait(timeout=5)
            return "late"

        target = CallableTarget(hang)
        task = asyncio.create_task(target.invoke(CASE, CONTEXT))
        await asyncio.sleep(0)
        assert entered.wait(timeout=5)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(task, timeout=0.01)
        assert target.excess == 1
        release.set()
        return target

    target = asyncio.run(main())
    deadline = time.monotonic() + 5
    while target.excess and time.monotonic() < deadline:
        time.sleep(0.001)
    assert target.excess == 0


def test_a_sync_stream_stops_at_its_next_piece_once_nobody_waits_for_it() -> None:
    async def main() -> None:
        entered, closed = threading.Event(), threading.Event()

        def endless(case):
            try:
                while True:
                    entered.set()
                    yield "more "
            finally:
                closed.set()

        target = CallableTarget(endless)
        task = asyncio.create_task(target.invoke(CASE, CONTEXT))
        await asyncio.sleep(0)
        assert entered.wait(timeout=5)
        task.cancel()
        await asyncio.wait({task})
        assert closed.wait(timeout=5)

    asyncio.run(main())


@pytest.mark.parametrize(
    "function",
    [
        lambda: "none",
        lambda case, context, more: "three",
        lambda *, case: "keyword",
        lambda case, *, model: "a required keyword",
        lambda **fields: "only keywords",
        functools.partial(plain_with_context, CASE, CONTEXT),
    ],
)
def test_a_signature_that_fits_neither_is_refused_when_the_target_is_made(function) -> None:
    with pytest.raises(ConfigurationError, match="must take `case` or `case, context`, got"):
        as_target(function)


def test_a_callable_without_a_readable_signature_is_refused() -> None:
    class Odd:
        __signature__ = "not a signature"

        def __call__(self, case): ...

    with pytest.raises(ConfigurationError, match="Odd has no readable signature"):
        as_target(Odd())


def test_a_target_is_taken_as_it_is() -> None:
    target = Simulated()
    assert as_target(target) is target
    wrapped = as_target(plain)
    assert as_target(wrapped) is wrapped
    assert isinstance(wrapped, Target)


@pytest.mark.parametrize(("thing", "returned"), [("gpt", r"'gpt' \(str\)"), (None, "None"), (5, r"5 \(int\)")])
def test_anything_else_is_refused_and_named(thing, returned) -> None:
    with pytest.raises(ConfigurationError, match=f"must be a callable or have a method `invoke`, got {returned}"):
        as_target(thing)


def test_a_class_is_refused_because_an_instance_was_meant() -> None:
    with pytest.raises(ConfigurationError, match="must be an instance, got the class Simulated"):
        as_target(Simulated)


class Asks:
    """A class that only answers."""

    version = "2"

    def __init__(self, word: str) -> None:
        self.word = word

    async def invoke(self, case: EvalCase) -> str:
        return self.word


def test_an_object_with_invoke_alone_is_a_target_known_by_its_class() -> None:
    target = as_target(Asks("Paris"))
    assert asyncio.run(target.invoke(EvalCase(prompt="?"), InvocationContext("a"))).response_text == "Paris"
    identity = target.identity()
    assert (identity["module"], identity["qualname"], identity["version"]) == (__name__, "Asks", "2")
    assert target.default_parallelism > 1
    again = pickle.loads(pickle.dumps(target))
    assert again.identity() == identity
    assert asyncio.run(again.invoke(EvalCase(prompt="?"), InvocationContext("a"))).response_text == "Paris"


def test_what_else_an_object_with_invoke_has_is_used() -> None:
    class Almost(Asks):
        model_id = "m"
        default_parallelism = 3

        def identity(self) -> dict[str, str]:
            return {"kind": "mine"}

    target = as_target(Almost("x"))
    assert (target.model_id, target.default_parallelism) == ("m", 3)


def test_an_async_function_has_several_calls_in_flight_and_any_other_one() -> None:
    async def stream(case):
        yield "a"

    async def whole(case):
        return "a"

    assert as_target(whole).default_parallelism == as_target(stream).default_parallelism == 10
    assert as_target(lambda case: "a").default_parallelism == 1


def test_parallelism_below_one_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="parallelism must be >= 1, got 0"):
        CallableTarget(plain, parallelism=0)


def test_a_callable_likes_one_call_at_a_time_and_has_no_model_unless_told() -> None:
    assert as_target(plain).default_parallelism == 1
    assert as_target(plain).model_id is None
    target = CallableTarget(plain, model_id="m", parallelism=7)
    assert (target.model_id, target.default_parallelism) == ("m", 7)


def test_identity_is_where_the_function_lives_and_its_version() -> None:
    identity = CallableTarget(plain, version="3").identity()
    assert {key: identity[key] for key in ("kind", "module", "qualname", "version")} == {
        "kind": "callable",
        "module": __name__,
        "qualname": "plain",
        "version": "3",
    }
    assert len(identity["~source"]) == 16
    assert identity["~source"] != CallableTarget(pieces).identity()["~source"]


@pytest.mark.parametrize(
    ("function", "qualname"),
    [
        (Agent(), "Agent"),
        (Agent().answer, "Agent.answer"),
        (functools.partial(with_setting, "warm"), "with_setting"),
    ],
)
def test_objects_methods_and_partials_have_the_identity_of_what_was_written(function, qualname) -> None:
    identity = as_target(function).identity()
    assert identity["qualname"] == qualname
    assert identity["~source"] is not None


def test_a_function_without_source_still_has_an_identity() -> None:
    namespace: dict[str, Any] = {}
    exec("def made_up(case):\n    return 'x'", namespace)
    identity = as_target(namespace["made_up"]).identity()
    assert identity["qualname"] == "made_up"
    assert identity["~source"] is None


@pytest.mark.parametrize("as_module", [False, True])
def test_a_script_is_known_by_its_file_and_not_as_main(tmp_path, as_module) -> None:
    (tmp_path / "my_eval.py").write_text(
        "from steelyard.targets import as_target\n"
        "def answer(case):\n    return 'x'\n"
        "print(as_target(answer).identity()['module'])\n"
    )
    argv = ["-m", "my_eval"] if as_module else ["my_eval.py"]
    done = subprocess.run([sys.executable, *argv], cwd=tmp_path, capture_output=True, text=True, timeout=20)
    assert done.stdout == "my_eval\n", done.stderr


def test_a_pickled_target_answers_and_keeps_its_identity() -> None:
    target = CallableTarget(plain_with_context, model_id="m", version="3", name="mine", parallelism=4)
    asyncio.run(target.invoke(CASE, CONTEXT))  # so that it has a thread to leave behind
    copy = pickle.loads(pickle.dumps(target))
    assert asyncio.run(copy.invoke(CASE, CONTEXT)).response_text == "plain fr 2"
    assert copy.identity() == target.identity()
    assert (copy.model_id, copy.version, copy.name, copy.default_parallelism) == ("m", "3", "mine", 4)


def test_sync_calls_really_run_at_the_same_time() -> None:
    async def main() -> None:
        barrier = threading.Barrier(5)
        target = CallableTarget(lambda case: str(barrier.wait(timeout=5)), parallelism=5)
        responses = await asyncio.gather(*(target.invoke(CASE, CONTEXT) for _ in range(5)))
        assert sorted(one.response_text for one in responses) == list("01234")

    asyncio.run(main())
