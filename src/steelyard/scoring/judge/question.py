"""A judge's question: the variables of a case and its answer, and the messages built from them.

Templates are sandboxed Jinja in which each `{{ … }}` leaves a slot, filled with escaped text afterwards. While one is
rendered, no text of a case is in its output: nothing there can be mistaken for the template's words.

Untrusted text is escaped so that it cannot be taken for part of the prompt: it is put between two marker lines that
carry a code. The code is derived from the texts and occurs in none of them, so no text can contain its own end marker;
and the same texts always get the same code.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import re
import unicodedata
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import msgspec
from jinja2 import StrictUndefined, Template, TemplateError, TemplateSyntaxError, Undefined, meta, nodes, pass_context
from jinja2.runtime import Context

from steelyard.attachments import shown
from steelyard.case_templates import bounded_environment
from steelyard.errors import ConfigurationError, reject_unknown, suggestion
from steelyard.plugins import BUILT_IN, find
from steelyard.records import EvalCase, InvocationResponse
from steelyard.scoring.base import check_share
from steelyard.scoring.judge.prompts import (
    CRITERIA_NAME,
    CRITERIA_TASK_V1,
    CRITERIA_TEMPLATE_V1,
    CUSTOM_TASK,
    Prompt,
)

VARIABLES = ("question", "answer", "expected", "system_prompt", "messages", "metadata", "context")
"""What a template may use of a case and its answer."""

_TEXTS = "_texts"
_STATEMENTS = (nodes.Output, nodes.If, nodes.For, nodes.Assign, nodes.With)
DEFAULT_PROMPT = "correctness_v1"
CUSTOM_NAME = "custom"

_EXAMPLE_FIELDS = (
    "question",
    "answer",
    "expected",
    "system_prompt",
    "context",
    "other_answer",
    "metadata",
    "score",
    "passed",
    "reason",
)


class TemplateFailed(ValueError):
    """A template that cannot be filled in for a case."""


def check_template(source: object) -> None:
    """Refuse a template with bad syntax, unknown variables, or without the answer."""
    if not isinstance(source, str):
        raise ConfigurationError(f"template must be a text, got {source!r}")
    if holds_slot_marks(source):
        raise ConfigurationError("template holds a NUL character")
    try:
        _compiled(source)
        tree = _ENVIRONMENT.parse(source)
    except TemplateSyntaxError as error:
        raise ConfigurationError(f"template is not Jinja: {error.message} (line {error.lineno})") from error
    _check_statements(tree)
    used = meta.find_undeclared_variables(tree)
    for name in sorted(used - set(VARIABLES)):
        raise ConfigurationError(f"template: there is no variable {name!r}; {suggestion(name, VARIABLES)}")
    if not used & {"answer", "messages"}:
        raise ConfigurationError("template uses neither answer nor messages: the judge would not see what it judges")


def render(source: str, variables: Mapping[str, Any]) -> str:
    """Render the message with each value escaped separately; TemplateFailed when it cannot be rendered."""
    texts: list[str] = []
    try:
        message = _compiled(source).render({**variables, _TEXTS: texts})
    except TemplateError as error:
        raise TemplateFailed(f"the template cannot be filled in: {error}") from error
    except Exception as error:  # a filter may raise anything
        raise TemplateFailed(f"the template cannot be filled in: {type(error).__name__}: {error}") from error
    return fill(message, texts)


def _check_statements(tree: nodes.Template) -> None:
    """Allow only statements that write a value once: a macro's text could be written again inside another value."""
    for statement in tree.find_all(nodes.Stmt):
        if not isinstance(statement, _STATEMENTS) or getattr(statement, "recursive", False):
            kind = type(statement).__name__.lower()
            raise ConfigurationError(
                f"template: {kind} in line {statement.lineno} cannot be used here; for, if, set and with can"
            )


@pass_context
def _leave_slot(context: Context, value: Any) -> str:
    texts: list[str] = context[_TEXTS]
    texts.append(_as_text(value))
    return slot(len(texts) - 1)


def _as_text(value: Any) -> str:
    """Return a value as a judge reads it: text unchanged, anything else as JSON."""
    if isinstance(value, (str, Undefined)):
        return str(value)  # StrictUndefined raises here, naming what is missing
    if value is None:
        return "(none)"
    return json.dumps(value, ensure_ascii=False, default=str)


@lru_cache(maxsize=64)
def _compiled(source: str) -> Template:
    return _ENVIRONMENT.from_string(source)


# Jinja's globals are removed: prompts do not need `lipsum` or `cycler`, and find_undeclared_variables would call them
# unknown.
_ENVIRONMENT = bounded_environment(
    undefined=StrictUndefined, finalize=_leave_slot, trim_blocks=True, lstrip_blocks=True
)
_ENVIRONMENT.globals.clear()


def find_prompt(name: object, template: object, criteria: object = None) -> Prompt:
    """Return the prompt of that name, or the user's template or criteria under a name that is not a built-in's."""
    if criteria is not None:
        if template is not None or name != DEFAULT_PROMPT:
            raise ConfigurationError("criteria make a prompt by themselves: leave out prompt and template")
        task = CRITERIA_TASK_V1.format(criteria=_criteria_text(criteria))
        return Prompt(name=CRITERIA_NAME, task=task, template=CRITERIA_TEMPLATE_V1)
    if name == CRITERIA_NAME:
        raise ConfigurationError(f"{CRITERIA_NAME} is the prompt of criteria: give `criteria` in plain words")
    if template is None:
        return _named_prompt(str(name))
    check_template(template)
    if name == DEFAULT_PROMPT:
        name = CUSTOM_NAME
    if not isinstance(name, str) or not name or name in BUILT_IN["prompts"]:
        raise ConfigurationError(f"prompt names a template of your own, which cannot be called {name!r}")
    return Prompt(name=name, task=CUSTOM_TASK, template=str(template))


def _criteria_text(criteria: object) -> str:
    """Criteria as a list with a dash each: a text is one criterion for each of its lines."""
    lines = criteria.splitlines() if isinstance(criteria, str) else criteria
    if not isinstance(lines, list | tuple) or not all(isinstance(line, str) for line in lines):
        raise ConfigurationError(f"criteria must be a text or a list of texts, got {criteria!r}")
    kept = [" ".join(line.split()).removeprefix("- ") for line in lines if line.strip()]
    if not kept:
        raise ConfigurationError("criteria must not be empty: say in plain words what a good answer does")
    return "\n".join(f"- {line}" for line in kept)


def _named_prompt(name: str) -> Prompt:
    """A built-in prompt, or one that a package adds: a Prompt, or a template alone."""
    found = find("prompts", name)
    if isinstance(found, str):
        found = Prompt(name=name, task=CUSTOM_TASK, template=found)
    if not isinstance(found, Prompt):
        raise ConfigurationError(f"the prompt {name!r} must be a Prompt or a template, got {type(found).__name__}")
    if name not in BUILT_IN["prompts"]:
        check_template(found.template)
    return found if found.name == name else msgspec.structs.replace(found, name=name)


def variables_of(case: EvalCase, response: InvocationResponse) -> dict[str, Any]:
    """Return the variables that a template may use."""
    asked = _asked(case)
    return {
        "question": _question(asked),
        "answer": response.response_text or "",
        "expected": case.expected,
        "system_prompt": case.system_prompt,
        "messages": response.messages or asked,
        "metadata": case.metadata,
        "context": case.metadata.get("context"),
    }


def missing(prompt: Prompt, variables: Mapping[str, Any]) -> str | None:
    """Name what the prompt needs and the case does not have; None when nothing is missing."""
    for name in prompt.needs:
        if variables[name] is None:
            return "metadata.context" if name == "context" else name
    if prompt.pairwise and _other_answer(variables) is None:
        return "metadata.other_answer, or expected"
    return None


def question_text(prompt: Prompt, variables: Mapping[str, Any], *, swapped: bool = False) -> str:
    """Render the user message. A pairwise prompt shows two answers, ours first unless `swapped`."""
    if prompt.pairwise:
        pair = [variables["answer"], _other_answer(variables)]
        first, second = reversed(pair) if swapped else pair
        variables = {**variables, "answer_1": first, "answer_2": second}
    return render(prompt.template, variables)


def example_turns(prompt: Prompt, examples: Sequence[Mapping[str, Any]], threshold: float) -> list[dict[str, Any]]:
    """Return examples as earlier turns of the conversation: a question, and the right verdict."""
    if isinstance(examples, (str, Mapping)) or not isinstance(examples, Sequence):
        raise ConfigurationError(f"examples must be a list of mappings, got {examples!r}")
    turns: list[dict[str, Any]] = []
    for number, example in enumerate(examples):
        try:
            turns += _turns(prompt, example, threshold)
        except ValueError as error:
            raise ConfigurationError(f"examples[{number}]: {error}") from error
    return turns


def _turns(prompt: Prompt, example: Mapping[str, Any], threshold: float) -> list[dict[str, Any]]:
    if not isinstance(example, Mapping):
        raise ConfigurationError(f"must be a mapping, got {example!r}")
    reject_unknown(example, _EXAMPLE_FIELDS)
    for name in ("answer", "score"):
        if name not in example:
            raise ConfigurationError(f"has no {name}")
    check_share("score", example["score"])
    metadata = dict(example.get("metadata") or {})
    metadata |= {name: example[name] for name in ("context", "other_answer") if name in example}
    case = EvalCase(
        prompt=example.get("question"),
        system_prompt=example.get("system_prompt"),
        expected=example.get("expected"),
        metadata=metadata,
    )
    variables = variables_of(case, InvocationResponse(response_text=example["answer"]))
    lacking = missing(prompt, variables)
    if lacking is not None:
        raise ConfigurationError(f"{prompt.name} needs {lacking}")
    verdict = {
        "reason": example.get("reason") or "",
        "score": example["score"],
        "passed": example.get("passed", example["score"] >= threshold),
    }
    return [
        {"role": "user", "content": question_text(prompt, variables)},
        {"role": "assistant", "content": json.dumps(verdict, ensure_ascii=False)},
    ]


def _other_answer(variables: Mapping[str, Any]) -> Any:
    other = variables["metadata"].get("other_answer")
    return variables["expected"] if other is None else other


def _asked(case: EvalCase) -> list[dict[str, Any]]:
    words: Any = case.prompt
    if case.attachments:
        files = [{"type": "text", "text": shown(one)} for one in case.attachments]
        words = [*files, *([] if case.prompt is None else [{"type": "text", "text": case.prompt}])]
    prompt = [] if words is None else [{"role": "user", "content": words}]
    return [*(case.messages or ()), *prompt]


def _question(asked: Sequence[Mapping[str, Any]]) -> str:
    """Return the text of the only message, or the conversation with its roles."""
    if len(asked) == 1:
        return _content_text(asked[0].get("content"))
    return "\n\n".join(f"{message.get('role')}: {_content_text(message.get('content'))}" for message in asked)


def _content_text(content: Any) -> str:
    """Return the text of a message; parts that are not text are replaced by their type."""
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        return "\n".join(_part_text(part) for part in content)
    return "" if content is None else json.dumps(content, ensure_ascii=False, default=str)


def _part_text(part: Any) -> str:
    if isinstance(part, Mapping):
        if "attachment" in part:
            return shown(part["attachment"])
        text = part.get("text")
        return text if isinstance(text, str) else f"({part.get('type', 'part')})"
    return str(part)


ESCAPE_VERSION = 1
"""Part of a judge's identity. Raise it when the same texts would be escaped differently."""

MAX_TEXT = 50_000
"""Characters of one text that a judge is shown; the middle of a longer one is cut."""

_SLOT = "\x00"
_SLOTS = re.compile(r"\x00(\d+)\x00")
_LINE_ENDS = re.compile(r"\r\n?|[\x85\u2028\u2029]")


def slot(number: int) -> str:
    """Return the placeholder of text `number` in a message."""
    return f"{_SLOT}{number}{_SLOT}"


def holds_slot_marks(text: str) -> bool:
    """Whether a text contains the character that marks placeholders, and so cannot be used as a message."""
    return _SLOT in text


def fill(message: str, texts: Sequence[str]) -> str:
    """Put each text, escaped, in its slot; the message's first line names the code of the markers."""
    shown = [_visible(text) for text in texts]
    code = escape_code([part for parts in shown for part in parts])

    def escaped(found: re.Match[str]) -> str:
        number = int(found[1])
        body = f"\n<<<cut {code}: {_left_out(texts[number]):,} characters>>>\n".join(shown[number])
        above = "" if message[found.start() - 1 : found.start()] in ("", "\n") else "\n"
        below = "" if message[found.end() : found.end() + 1] in ("", "\n") else "\n"
        return f"{above}<<<data {code}>>>\n{body}\n<<<end {code}>>>{below}"

    return f"The code of this message is {code}.\n\n{_SLOTS.sub(escaped, message)}"


def escape_code(texts: Sequence[str]) -> str:
    """Return 16 hex digits that occur in none of the texts, in any spelling; the same for the same texts."""
    digest = hashlib.sha256()
    for text in texts:
        data = text.encode("utf-8", "surrogatepass")
        digest.update(b"%d:%b" % (len(data), data))  # the length keeps ["ab", "c"] apart from ["a", "bc"]
    plain = [unicodedata.normalize("NFKC", text).lower() for text in texts]
    for number in itertools.count():
        attempt = digest.copy()
        attempt.update(b"#%d" % number)
        code = attempt.hexdigest()[:16]
        if not any(code in text for text in plain):
            return code
    raise AssertionError("unreachable: the count has no end")


def _visible(text: str) -> list[str]:
    """Return a text as shown: one part, or its two ends when it is too long; nothing in it is invisible."""
    if len(text) > MAX_TEXT:
        half = MAX_TEXT // 2
        return [_without_controls(text[:half]), _without_controls(text[-half:])]
    return [_without_controls(text)]


def _left_out(text: str) -> int:
    return len(text) - MAX_TEXT // 2 * 2


def _without_controls(text: str) -> str:
    return _LINE_ENDS.sub("\n", text).translate(_VISIBLE)


def _visible_table() -> dict[int, str]:
    """Map control characters to their pictures, and bidi marks, hidden characters and surrogates to U+FFFD."""
    hidden = [*range(0x80, 0xA0), 0x61C, 0x200E, 0x200F, *range(0x202A, 0x202F), *range(0x2066, 0x206A)]
    hidden += [*range(0xD800, 0xE000), *range(0xE0000, 0xE0080), 0xFEFF, 0xFFFE, 0xFFFF]
    pictures = {code: chr(0x2400 + code) for code in range(0x20) if chr(code) not in "\n\t"}
    return pictures | {0x7F: "\u2421"} | dict.fromkeys(hidden, "\ufffd")


_VISIBLE = _visible_table()
