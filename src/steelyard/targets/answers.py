"""Answers from elsewhere as a target: what another system answered, by the ids of the cases. Nothing is called."""

from __future__ import annotations

import gzip
import hashlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from steelyard.errors import ConfigurationError, TargetError
from steelyard.protocols import Identity, InvocationContext
from steelyard.records import EvalCase, InvocationResponse
from steelyard.targets.conversation import ModelAnswer

_IDS = ("id", "case_id", "custom_id")
_TEXTS = ("response_text", "answer", "output", "completion", "response")


class Answers:
    """Gives the answers of a JSONL file: `{"id": …, "answer": …}`, a run's `outputs.jsonl`, or a batch's output.

    A line's answer is for the case of that id, and the trial if it has one. All of them are held in memory.
    """

    def __init__(self, path: str, *, model: str | None = None, parallelism: int = 50) -> None:
        self.path = Path(path)
        self.default_parallelism = parallelism
        self._answers: dict[tuple[str, int | None], InvocationResponse] = {}
        digest = hashlib.sha256()
        for number, line in enumerate(_lines(self.path), 1):
            digest.update(line)
            if line.strip():
                try:
                    self._add(line)
                except (ValueError, TypeError, msgspec.DecodeError, msgspec.ValidationError) as error:
                    raise ConfigurationError(f"{self.path}:{number}: is no answer: {error}") from error
        self._digest = digest.hexdigest()
        self.model_id = model or f"answers-{self._digest[:12]}"

    def __repr__(self) -> str:
        return f"Answers({str(self.path)!r}, {len(self._answers):,} of them)"

    def identity(self) -> Identity:
        """The content of the file: other answers are another target."""
        return {"kind": "answers", "model": self.model_id, "sha256": self._digest}

    async def invoke(self, case: EvalCase, context: InvocationContext) -> InvocationResponse:
        """Return the answer to this case; TargetError where there is none, or the other system failed."""
        found = self._answers.get((case.id, context.trial)) or self._answers.get((case.id, None))
        if found is None:
            raise TargetError(f"{self.path.name} has no answer for the case {case.id!r}, trial {context.trial}")
        response = msgspec.structs.replace(found, input_prompt=case.prompt)
        if response.error is not None:
            raise TargetError(response.error, partial=msgspec.structs.replace(response, error=None))
        return response

    def _add(self, line: bytes) -> None:
        fields = msgspec.json.decode(line)
        if not isinstance(fields, dict):
            raise ValueError("a line must be an object")
        batch = _batch_id(fields)
        case_id = batch or next((fields[name] for name in _IDS if fields.get(name) is not None), None)
        if case_id is None:
            raise ValueError(f"it has no id: one of {', '.join(_IDS)}")
        trial = fields.get("trial")
        key = (str(case_id), trial if isinstance(trial, int) else None)
        if key in self._answers:
            raise ValueError(f"the id {case_id} is duplicated")
        self._answers[key] = _own_answer(fields) if batch is None else _batch_answer(fields)


def _own_answer(fields: Mapping[str, Any]) -> InvocationResponse:
    """Read a line in our own words: an answer, or the fields of a record."""
    known = {name: fields[name] for name in InvocationResponse.__struct_fields__ if name in fields and name != "id"}
    if known.get("response_text") is None:
        text = next((fields[name] for name in _TEXTS if fields.get(name) is not None), None)
        if text is None and not known.get("messages") and known.get("error") is None:
            raise ValueError(f"it has no answer: one of {', '.join(_TEXTS)}")
        known["response_text"] = text if text is None or isinstance(text, str) else msgspec.json.encode(text).decode()
    return msgspec.convert(known, InvocationResponse)


def _batch_id(fields: Mapping[str, Any]) -> str | None:
    """How a batch names a request; None for a line of no batch. OpenAI's lines have another `id` besides."""
    named = fields.get("custom_id")
    if named is None and "modelInput" in fields:  # Bedrock
        named = fields.get("recordId")
    if named is None and "id" not in fields and isinstance(fields.get("response") or fields.get("error"), dict):
        named = fields.get("key")  # Gemini
    return None if named is None else str(named)


def _batch_answer(fields: Mapping[str, Any]) -> InvocationResponse:
    """Read a line of a batch's output, of whichever provider."""
    body, failed = _batch_body(fields)
    if failed:
        return InvocationResponse(error=f"the batch has an error: {msgspec.json.encode(failed).decode()}"[:1000])
    if not isinstance(body, dict):
        raise ValueError("it has no answer of a batch: response, result or modelOutput")
    try:
        answer = _reader_of(body)(msgspec.json.encode(body))
    except TargetError as error:
        return InvocationResponse(error=str(error))
    response = fields.get("response")
    usage = answer.usage
    return InvocationResponse(
        response_text=answer.text or answer.refusal,
        messages=answer.messages,
        stop_reason=answer.stop_reason,
        num_tokens_input=None if usage is None else usage.input,
        num_tokens_output=None if usage is None else usage.output,
        num_tokens_input_cached=None if usage is None else usage.cached,
        num_tokens_output_reasoning=None if usage is None else usage.reasoning,
        num_tokens_input_cache_write=None if usage is None else usage.cache_write,
        request_id=response.get("request_id") if isinstance(response, dict) else None,
    )


def _batch_body(fields: Mapping[str, Any]) -> tuple[Any, Any]:
    """The answer in a line of a batch as the API gives it, or what went wrong."""
    response, result = fields.get("response"), fields.get("result")
    failed = fields.get("error")
    if isinstance(result, dict):  # Anthropic
        ended = result.get("type")
        return result.get("message"), result.get("error") or failed or (None if ended in (None, "succeeded") else ended)
    if "recordId" in fields:  # Bedrock
        return fields.get("modelOutput"), failed
    if not isinstance(response, dict):
        return None, failed
    if "body" not in response:  # Gemini
        return response, failed or response.get("error")
    body, status = response.get("body"), response.get("status_code")
    return body, failed or (body or status if isinstance(status, int) and status >= 400 else None)


def _reader_of(body: Mapping[str, Any]) -> Callable[[bytes], ModelAnswer]:
    """What reads an answer of this API."""
    from steelyard.targets.anthropic import read_anthropic_whole
    from steelyard.targets.bedrock import read_bedrock_whole
    from steelyard.targets.gemini import read_gemini_whole
    from steelyard.targets.openai_chat import read_chat_whole
    from steelyard.targets.openai_responses import read_response_whole

    if "choices" in body:
        return read_chat_whole
    if "candidates" in body or "promptFeedback" in body:
        return read_gemini_whole
    if isinstance(body.get("output"), dict):
        return read_bedrock_whole
    return read_response_whole if "output" in body else read_anthropic_whole


def _lines(path: Path) -> Iterator[bytes]:
    try:
        with gzip.open(path) if path.name.endswith(".gz") else path.open("rb") as file:
            yield from file
    except (OSError, EOFError) as error:
        raise ConfigurationError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}") from error
