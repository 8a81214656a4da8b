"""Answers as OpenAI's completions API, which base models have, gives them."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from steelyard.mock.answers import SimulatedAnswer
from steelyard.mock.dialects.chat import usage_fields

_encode = msgspec.json.encode


def whole(answer: SimulatedAnswer) -> bytes:
    """Encode an answer that is not streamed."""
    choice = {"index": 0, "text": answer.text, "logprobs": None, "finish_reason": _finish_reason(answer)}
    body = {
        "id": f"cmpl-{answer.id}",
        "object": "text_completion",
        "created": answer.created,
        "model": answer.model,
        "choices": [choice],
    }
    if answer.usage is not None:
        body["usage"] = usage_fields(answer.usage)
    return _encode(body)


def frames(answer: SimulatedAnswer) -> Iterator[bytes]:
    """Yield the events of a stream: a piece for each token, then the end. There is no reasoning: it is left blank."""
    start = b'data: {"id":"cmpl-%b","object":"text_completion","created":%d,"model":%b,"choices":[' % (
        answer.id.encode(),
        answer.created,
        _encode(answer.model),
    )
    piece = start + b'{"index":0,"text":%b,"logprobs":null,"finish_reason":%b}]}\n\n'
    for _ in answer.reasoning:
        yield piece % (b'""', b"null")
    for token in answer.tokens:
        yield piece % (_encode(token), b"null")
    last = piece % (b'""', _encode(_finish_reason(answer)))
    if answer.include_usage and answer.usage is not None:
        last += b'%b],"usage":%b}\n\n' % (start, _encode(usage_fields(answer.usage)))
    yield last + b"data: [DONE]\n\n"


def _finish_reason(answer: SimulatedAnswer) -> str:
    return "length" if answer.stop == "length" else "stop"
