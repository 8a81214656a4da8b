"""OpenAI's responses API: requests in its shape, and answers read from one object or from a stream."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import msgspec

from steelyard.records import EvalCase
from steelyard.targets.conversation import Call, Conversation, ModelAnswer, TokenUsage, asked_turns, encoded
from steelyard.targets.openai_chat import OpenAIEndpoint
from steelyard.targets.wire import (
    UNREADABLE,
    Reader,
    TextParts,
    as_arguments,
    before_done,
    earliest,
    is_blank,
    lenient_int,
    reported_error,
    usage_fields,
)
from steelyard.transport.sse import ServerSentEvent

_TERMINATORS = ("response.completed", "response.incomplete", "response.failed")
_TEXT_DELTA = "response.output_text.delta"
_APPROVAL = "mcp_approval"
_CALLS = {
    "function_call": "arguments",
    "custom_tool_call": "input",
    "apply_patch_call": "operation",
    "local_shell_call": "action",
    "shell_call": "action",
    "tool_search_call": "arguments",
    "mcp_approval_request": "arguments",
}
"""Items that ask the client for something, and the field that says for what. A function that carries one out has the
tool's name; those without a name are `apply_patch`, `local_shell`, `shell`, `tool_search` and `mcp_approval`."""
_ITEMS: Reader[dict[str, Any]] = Reader(dict[str, Any])


class OpenAIResponses(OpenAIEndpoint):
    """A model behind `POST {base_url}/responses`."""

    kind = "openai-responses"
    path = "/responses"
    turns_field = b',"input":'
    reserved = ("model", "input", "stream", "tools", "instructions")
    tool_shape = "responses"

    def _opening(self, case: EvalCase) -> Conversation:
        rest = self._tools_of(case)
        if case.system_prompt is not None:
            rest = b',"instructions":' + encoded(case.system_prompt) + rest
        return Conversation(as_items(asked_turns(case)), rest)

    def _read_stream(self, stream: list[ServerSentEvent]) -> ModelAnswer:
        return read_response_stream(stream)

    def _read_whole(self, body: bytes) -> ModelAnswer:
        return read_response_whole(body)

    def _results(self, results: Sequence[tuple[Call, str, bool]]) -> list[dict[str, Any]]:
        return [call_output(call, text, failed=failed) for call, text, failed in results]


def as_items(messages: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return messages as items of this API: one with tool calls becomes several, a tool's result a result item."""
    return [item for message in messages for item in _items(message)]


def _items(message: dict[str, Any]) -> Iterator[dict[str, Any]]:
    role, content = message.get("role"), message.get("content")
    if role is None:
        yield message
    elif role == "tool":
        output = content if isinstance(content, str) else _text(content)
        yield {"type": "function_call_output", "call_id": message.get("tool_call_id"), "output": output}
    else:
        if isinstance(content, str):
            yield {"role": role, "content": content}
        elif isinstance(content, list):
            kind = "output_text" if role == "assistant" else "input_text"
            fields = {key: value for key, value in message.items() if key != "tool_calls"}
            yield {**fields, "content": [_part(part, kind) for part in content]}
        yield from map(_function_call, message.get("tool_calls") or ())


def _function_call(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call.get("function") or {}
    return {
        "type": "function_call",
        "call_id": call.get("id"),
        "name": function.get("name"),
        "arguments": function.get("arguments") or "{}",
    }


def _part(part: Any, text_kind: str) -> Any:
    if not isinstance(part, Mapping):
        return {"type": text_kind, "text": str(part)}
    if part.get("type") == "text":
        return {**part, "type": text_kind}
    if part.get("type") == "file" and isinstance(part.get("file"), Mapping):
        return {"type": "input_file", **part["file"]}
    if part.get("type") != "image_url":
        return part
    image = part.get("image_url")
    fields = dict(image) if isinstance(image, Mapping) else {"url": image}
    return {"type": "input_image", "image_url": fields.pop("url", None), **fields}


def _text(content: Any) -> str:
    parts = content if isinstance(content, list) else []
    return "".join(part["text"] for part in parts if isinstance(part, Mapping) and isinstance(part.get("text"), str))


def read_usage(usage: Any, oddities: list[str]) -> TokenUsage | None:
    """Read this API's usage, leniently: an odd count is left out and named, the answer is kept."""
    fields = usage_fields(usage, oddities)
    if fields is None:
        return None
    return TokenUsage(
        fields.count("input_tokens", "prompt_tokens"),
        fields.count("output_tokens", "completion_tokens"),
        fields.count("input_tokens_details.cached_tokens"),
        fields.count("output_tokens_details.reasoning_tokens"),
        cost=fields.cost(),
    )


class _Response(msgspec.Struct, gc=False):
    status: str | None = None
    output: list[dict[str, Any]] | None = None
    usage: Any = None
    incomplete_details: Any = None
    error: Any = None


class _StreamEvent(msgspec.Struct, gc=False):
    """One event. Nested objects stay bytes: a stream repeats them, and only the last is read."""

    type: str = ""
    delta: Any = None
    output_index: Any = 0
    item: msgspec.Raw = msgspec.Raw(b"null")
    response: msgspec.Raw = msgspec.Raw(b"null")


_RESPONSES = Reader(_Response)


_EVENTS = Reader(_StreamEvent)


def read_response_whole(body: bytes) -> ModelAnswer:
    """Read an answer that came as one object."""
    response = _RESPONSES.read(body)
    if response.output is None or not is_blank(response.error) or response.status in ("failed", "cancelled"):
        raise reported_error(msgspec.json.decode(body))
    return _answer(response, response.output)


def read_response_stream(stream: list[ServerSentEvent]) -> ModelAnswer:
    """Read a streamed answer; it is complete with its `response.completed` or `response.incomplete`."""
    received, _ = before_done(stream)
    pieces, fault = _EVENTS.read_all(received)
    response: _Response | None = None
    items: dict[int, dict[str, Any]] = {}
    first: dict[bool, float] = {}
    content = TextParts()
    for event, piece in zip(received, pieces, strict=False):
        kind = piece.type
        if kind in _TERMINATORS:
            response = _RESPONSES.read(bytes(piece.response))
            if kind == "response.failed" and fault is None:
                fault = reported_error(response.error or "the response failed")
        elif kind == "error" and fault is None:
            fault = reported_error(_without_kind(msgspec.json.decode(event.data)))
        elif kind == "response.output_item.done":
            items[lenient_int(piece.output_index) or 0] = _ITEMS.read(bytes(piece.item))
        if piece.type == _TEXT_DELTA and isinstance(piece.delta, str) and piece.delta:
            content.add_text(piece.delta, event.at)
        elif (is_reasoning := _token_kind(piece)) is not None:
            first.setdefault(is_reasoning, event.at)
            content.note_token(event.at)
    output = [items[index] for index in sorted(items)]
    if response is None or not output:
        output += _from_deltas(content.text.removeprefix(_answer(_Response(), output).text))
    answer = _answer(response or _Response(), (response.output if response is not None else None) or output)
    answer.first_call, answer.first_reasoning = first.get(False), first.get(True)
    answer.first_content = earliest(content.first_text, answer.first_call)
    answer.token_times = content.token_times()
    if content.text == answer.text:
        answer.text_times = content.times()
    answer.terminated = answer.complete = response is not None
    answer.fault = fault
    return answer


def _without_kind(error: Any) -> Any:
    """Return an error event's fields without its type, which is always `error`."""
    return {key: value for key, value in error.items() if key != "type"} if isinstance(error, dict) else error


def _token_kind(piece: _StreamEvent) -> bool | None:
    """True when the event brings reasoning, False when it brings a part of the answer, None when it brings neither."""
    if piece.type.endswith(".delta"):
        return "reasoning" in piece.type if piece.delta else None
    if piece.type == "response.output_item.added":
        kind = str(_ITEMS.read(bytes(piece.item)).get("type"))
        return False if kind.endswith("_call") or kind in _CALLS else None
    return None


def _from_deltas(text: str) -> list[dict[str, Any]]:
    """Return the unfinished text of a stream that broke off, as the item it would have become."""
    content = [{"type": "output_text", "text": text}]
    return [{"type": "message", "role": "assistant", "content": content}] if text else []


def _answer(response: _Response, output: list[dict[str, Any]]) -> ModelAnswer:
    texts: list[str] = []
    refusals: list[str] = []
    for item in output:
        for part in item.get("content") or () if item.get("type") == "message" else ():
            if part.get("type") == "output_text":
                texts.append(part.get("text") or "")
            elif part.get("type") == "refusal":
                refusals.append(part.get("refusal") or "")
    answered = {item.get("call_id") for item in output if str(item.get("type")).endswith("_output")}
    calls = [call for item in output if (call := _call(item)) is not None and call.id not in answered]
    answer = ModelAnswer(
        messages=output,
        text="".join(texts),
        refusal="".join(refusals) if refusals else None,
        calls=calls,
        stop_reason=_stop_reason(response, bool(calls)),
    )
    answer.usage = read_usage(response.usage, answer.oddities)
    return answer


def _call(item: dict[str, Any]) -> Call | None:
    """Return the call that an item asks the client to make; None for other items, and for calls the server makes."""
    kind = str(item.get("type"))
    field = _CALLS.get(kind)
    if field is None or (kind == "tool_search_call" and item.get("execution") == "server"):
        return None
    identifier = item.get("id") if kind == "mcp_approval_request" else item.get("call_id") or item.get("id")
    usual = kind.removesuffix("_call")
    name = _APPROVAL if kind == "mcp_approval_request" else item.get("name") or usual
    kept = {key: item[key] for key in ("server_label", "name", "arguments") if key in item}
    value = kept if kind == "mcp_approval_request" else item.get(field)
    return Call(str(identifier or ""), str(name), as_arguments(value), "function" if kind == "function_call" else usual)


def call_output(call: Call, text: str, *, failed: bool) -> dict[str, Any]:
    """Return the result of a call as the item that this API expects for its kind."""
    if call.kind == "mcp_approval_request":
        approved = not failed and text.strip().lower() in ("true", "yes", "approve")
        return {"type": "mcp_approval_response", "approval_request_id": call.id, "approve": approved}
    if call.kind == "apply_patch":
        status = "failed" if failed else "completed"
        return {"type": "apply_patch_call_output", "call_id": call.id, "status": status, "output": text}
    if call.kind == "shell":
        outcome = {"type": "exit", "exit_code": int(failed)}
        streams = {"stdout": "" if failed else text, "stderr": text if failed else "", "outcome": outcome}
        return {"type": "shell_call_output", "call_id": call.id, "output": [streams]}
    if call.kind == "tool_search":
        found = _found_tools(text)
        return {
            "type": "tool_search_output",
            "call_id": call.id,
            "execution": "client",
            "status": "completed",
            "tools": found,
        }
    if call.kind == "local_shell":  # the guide names it by its call_id, the specification by its id
        return {"type": "local_shell_call_output", "id": call.id, "call_id": call.id, "output": text}
    kind = "custom_tool_call_output" if call.kind == "custom_tool" else "function_call_output"
    return {"type": kind, "call_id": call.id, "output": text}


def _found_tools(text: str) -> list[Any]:
    try:
        found = msgspec.json.decode(text)
    except UNREADABLE:
        return []
    return found if isinstance(found, list) else []


def _stop_reason(response: _Response, called: bool) -> str | None:
    """Return why the model stopped, in the chat API's words where this API has no word for it."""
    if response.status == "incomplete":
        details = response.incomplete_details
        reason = details.get("reason") if isinstance(details, dict) else None
        return reason if isinstance(reason, str) and reason else "incomplete"
    if response.status == "completed":
        return "tool_calls" if called else "stop"
    return response.status
