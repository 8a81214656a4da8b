"""How many tokens a text is, where no server has told: by tiktoken where that works, else by a rule of thumb.

The rule: a token for every four bytes of UTF-8, rounded up, and four more for each message. Images, sounds and files
are left out, for what they cost differs from model to model.
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
"""tiktoken fetches an encoding when it has none, and would wait for minutes on a machine that is offline."""
_LONGEST_COUNTED = 50_000
"""Characters: a longer text is estimated, as tiktoken takes quadratic time for some of them."""
_NEWEST_ENCODING = "o200k_base"
_UNSPOKEN = frozenset(
    {
        "type", "role", "id", "call_id", "tool_call_id", "tool_use_id", "status", "signature", "encrypted_content",
        "cache_control", "image_url", "input_audio", "audio", "file", "file_data", "source", "data", "annotations",
    }
)  # fmt: skip
"""Fields of messages that hold no words of theirs."""

_FAILED = "\0"
"""In place of a model's name: tiktoken is not there or cannot load, and is not asked again."""
_counters: dict[str, Count] = {}
_loading: dict[str, asyncio.Task[Count]] = {}
_threads = DaemonThreads()


def estimate(text: str) -> int:
    """The rule of thumb for one text; nothing is no token, anything else at least one."""
    return -(-len(text.encode("utf-8", "surrogatepass")) // _BYTES_PER_TOKEN)


def estimate_input_tokens(case: EvalCase) -> int:
    """Roughly what a case costs to ask: system prompt, messages, prompt, and the definitions of its tools."""
    tokens = count_input(case.messages or (), None, estimate)
    for text in (case.system_prompt, case.prompt):
        if text is not None:
            tokens += estimate(text) + _TOKENS_PER_MESSAGE
    return tokens + (estimate(_as_json(case.tools)) if case.tools else 0)


def count_input(turns: Iterable[Mapping[str, Any]], more: str | None, count: Count) -> int:
    """The tokens of a conversation, each message with its frame, and of more text that is sent along."""
    tokens = count(more) if more else 0
    for turn in turns:
        tokens += _TOKENS_PER_MESSAGE + count_words(turn, count)
    return tokens


def count_words(value: Any, count: Count) -> int:
    """The tokens of all words in a message or a list of them, in whichever API's shape."""
    return sum(map(count, _words(value)))


def _words(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            if key not in _UNSPOKEN:
                yield from _words(inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _words(inner)


async def load_counter(model: str | None) -> Count:
    """What counts a model's tokens best: its tiktoken encoding, else the rule of thumb.

    Loading takes a while, and a thread: the event loop is timing other calls. When it fails once, it is left at that.
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
    except Exception:  # noqa: BLE001 - not installed, offline, a broken file: there is the rule of thumb
        return None

    def count(text: str) -> int:
        if len(text) > _LONGEST_COUNTED:
            return estimate(text)
        return len(encoding.encode_ordinary(text))

    return count


def _as_json(value: Any) -> str:
    try:
        return msgspec.json.encode(value).decode()
    except (TypeError, ValueError, RecursionError):
        return str(value)
