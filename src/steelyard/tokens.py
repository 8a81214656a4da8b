"""Token counts where the server reports none: by tiktoken where that works, else estimated.

The estimate: a token for every four bytes of UTF-8, rounded up, and four more for each message. Images, audio and files
are not counted, as their tokens differ from model to model.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeAlias

import msgspec

from steelyard.daemon_threads import DaemonThreads
from steelyard.records import EvalCase

Count: TypeAlias = Callable[[str], int]

_BYTES_PER_TOKEN = 4
_TOKENS_PER_MESSAGE = 4
_LOADING_SECONDS = 10.0
"""tiktoken downloads an encoding that it does not have, and would wait for minutes on an offline machine."""
_MAX_COUNTED = 50_000
"""Characters: a longer text is estimated, as tiktoken takes quadratic time for some texts."""
_NEWEST_ENCODING = "o200k_base"
_NOT_COUNTED = frozenset(
    {
        "type", "role", "id", "call_id", "tool_call_id", "tool_use_id", "status", "signature", "encrypted_content",
        "cache_control", "image_url", "input_audio", "audio", "file", "file_data", "source", "data", "annotations",
        "reasoning_details", "extra_content", "attachment", "inlineData", "fileData", "image", "document", "video",
    }
)  # fmt: skip
"""Fields of messages that hold no text of the message."""

_FAILED = "\0"
"""In place of a model's name: tiktoken is not installed or failed to load, and is not tried again."""
_counters: dict[str, Count] = {}
_loading: dict[str, asyncio.Task[Count]] = {}
_threads = DaemonThreads()


def estimate(text: str) -> int:
    """Estimate the tokens of one text: 0 for an empty one, else at least 1."""
    return -(-len(text.encode("utf-8", "surrogatepass")) // _BYTES_PER_TOKEN)


def estimate_input_tokens(case: EvalCase) -> int:
    """Estimate the input tokens of a case: system prompt, messages, prompt, and the definitions of its tools."""
    tokens = count_input(case.messages or (), None, estimate)
    for text in (case.system_prompt, case.prompt):
        if text is not None:
            tokens += estimate(text) + _TOKENS_PER_MESSAGE
    return tokens + (estimate(_as_json(case.tools)) if case.tools else 0)


def count_input(turns: Iterable[Mapping[str, Any]], more: str | None, count: Count) -> int:
    """Count the tokens of a conversation, with the overhead of each message, and of more text that is sent."""
    tokens = count(more) if more else 0
    for turn in turns:
        tokens += _TOKENS_PER_MESSAGE + count_words(turn, count)
    return tokens


def count_words(value: Any, count: Count) -> int:
    """Count the tokens of all text in a message or a list of them, in any API's shape."""
    return sum(map(count, _words(value)))


def _words(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            if key not in _NOT_COUNTED:
                yield from _words(inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _words(inner)


def known_counter(model: str | None) -> Count:
    """Return the counter that was loaded for a model, else the estimate: for a call that must not wait."""
    return _counters.get(model or "", estimate)


async def load_counter(model: str | None) -> Count:
    """Return the best counter for a model: its tiktoken encoding, else the estimate.

    Loading is slow, so it runs in a thread: the event loop is timing other calls. A failed load is not retried.
    """
    name = model or ""
    if name in _counters:
        return _counters[name]
    loop = asyncio.get_running_loop()
    if name not in _loading or _loading[name].get_loop() is not loop:
        _loading[name] = loop.create_task(_load(name))
    return await asyncio.shield(_loading[name])


async def _load(model: str) -> Count:
    found: Count | None = None
    if _FAILED not in _counters:
        try:
            async with asyncio.timeout(_LOADING_SECONDS):
                found = await _threads.run(_tiktoken_counter, model)
        except TimeoutError:
            pass
        if found is None:
            _counters[_FAILED] = estimate
    _loading.pop(model, None)
    return _counters.setdefault(model, found or estimate)


def _tiktoken_counter(model: str) -> Count | None:
    try:
        import tiktoken

        try:
            encoding = tiktoken.encoding_for_model(model)
        except KeyError:
            encoding = tiktoken.get_encoding(_NEWEST_ENCODING)
    except Exception:  # noqa: BLE001 - not installed, offline, a broken file: estimate instead
        return None

    def count(text: str) -> int:
        if len(text) > _MAX_COUNTED:
            return estimate(text)
        return len(encoding.encode_ordinary(text))

    return count


def _as_json(value: Any) -> str:
    try:
        return msgspec.json.encode(value).decode()
    except (TypeError, ValueError, RecursionError):
        return str(value)
