"""Attachments: found and checked, identified by content, in each API's own shape, and never in a journal."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import pickle
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest

from steelyard import EvalCase, EvalSet, Runner
from steelyard.attachments import (
    MAX_FILE,
    AttachmentFolder,
    BadAttachment,
    all_attached,
    media_type_of,
    resolved,
    with_contents,
    without_contents,
)
from steelyard.cache.store import fingerprint_of
from steelyard.errors import SuiteError, TargetError
from steelyard.suite.identity import case_fingerprint, content_digest
from steelyard.suite.suite_file import read_suite_file
from steelyard.targets import AnthropicMessages, Bedrock, Gemini, OpenAIChat, OpenAICompletions, OpenAIResponses
from steelyard.targets.endpoint import EndpointTarget
from tests.support.cli import run_cli
from tests.support.mock import running_mock
from tests.support.scripted_transport import CONTEXT, ScriptedTransport, chat_whole, whole

PNG = b"\x89PNG\r\n\x1a\n" + b"pixels" * 100
PDF = b"%PDF-1.7\n" + b"page" * 100
WAV = b"RIFF\x00\x00\x00\x00WAVEfmt " + b"sound" * 100
KINDS = [OpenAIChat, OpenAIResponses, AnthropicMessages, Gemini, Bedrock]


def encoded(content: bytes) -> str:
    return base64.b64encode(content).decode()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, content in (("a.png", PNG), ("b.pdf", PDF), ("c.wav", WAV), ("notes.txt", b"Paris is big.")):
        (tmp_path / name).write_bytes(content)
    return tmp_path


def found(folder: Path, *attachments: Any, **more: Any) -> EvalCase:
    return resolved(EvalCase(id="a", prompt="What?", attachments=list(attachments), **more), AttachmentFolder(folder))


def sent(kind: type[EndpointTarget], case: EvalCase, **options: Any) -> Any:
    """What a target sends for a case."""
    transport = ScriptedTransport(whole({"error": {"message": "no", "type": "invalid_request_error"}}, status=400))
    target = kind("m", base_url="http://localhost/v1", stream=False, transport=transport, **options)
    with pytest.raises(TargetError, match="no"):
        asyncio.run(target.invoke(case, CONTEXT))
    return transport.body


def refusal(kind: type[EndpointTarget], case: EvalCase) -> str:
    transport = ScriptedTransport()
    with pytest.raises(TargetError) as caught:
        asyncio.run(kind("m", base_url="http://localhost/v1", transport=transport).invoke(case, CONTEXT))
    assert not transport.requests
    return str(caught.value)


def test_a_file_has_its_type_size_and_digest(folder: Path) -> None:
    (one,) = found(folder, "a.png").attachments
    assert (one.name, one.media_type, one.size) == ("a.png", "image/png", len(PNG))
    assert one.sha256 == hashlib.sha256(PNG).hexdigest()
    assert one.read() == PNG


@pytest.mark.parametrize(
    ("content", "name", "kind"),
    [
        (PNG, "wrong.jpg", "image/png"),
        (b"\xff\xd8\xff\xe0", "x", "image/jpeg"),
        (b"RIFF\0\0\0\0WEBPVP8 ", "x", "image/webp"),
        (b"\0\0\0\x18ftypM4A ", "x", "audio/mp4"),
        (b"\0\0\0\x18ftypheic", "x", "image/heic"),
        (b"hello", "a.MD", "text/markdown"),
        (b"hello", "a", None),
    ],
)
def test_the_first_bytes_say_what_a_file_is_and_else_its_ending(content: bytes, name: str, kind: str | None) -> None:
    assert media_type_of(content, name) == kind


def test_urls_data_and_mappings_are_attachments_too(folder: Path) -> None:
    case = found(
        folder,
        "https://example.com/x/cat.jpg?size=2",
        f"data:image/png;base64,{encoded(PNG)}",
        "data:text/plain,Hi%20there",
        {"path": "a.png", "name": "shot", "media_type": "image/x-own"},
        {"url": "https://example.com/get?id=1", "media_type": "application/pdf"},
        {"bytes": PNG, "path": None},
        (folder / "a.png").as_uri(),
    )
    linked, data, text, named, typed, raw, file = case.attachments
    assert (linked.url, linked.media_type, linked.sha256) == (
        "https://example.com/x/cat.jpg?size=2",
        "image/jpeg",
        None,
    )
    assert (data.media_type, data.read()) == ("image/png", PNG)
    assert (text.media_type, text.read()) == ("text/plain", b"Hi there")
    assert (named.name, named.media_type) == ("shot", "image/x-own")
    assert (typed.name, typed.media_type) == ("get", "application/pdf")
    assert raw.read() == PNG
    assert (file.name, file.path, file.url) == ("a.png", str(folder / "a.png"), None)


@pytest.mark.parametrize(
    ("written", "problem"),
    [
        ("missing.png", "no such file"),
        ("", "needs either a path, a url or data"),
        (".", "not a regular file"),
        ("empty.png", "is empty"),
        ("unknown", "cannot be told"),
        ("ftp://example.com/a.png", "must be http, https"),
        ("https://example.com/a", "add media_type"),
        ("https:///a.png", "has no host"),
        ("data:image/png;base64,***", "base64"),
        ("data:oops", "is not a data URL"),
        ({"pfad": "a.png"}, "unknown key 'pfad'"),
        ({"path": 3}, "must be text"),
        (7, "must be a path, a URL or a mapping"),
        ("huge.png", f"at most {MAX_FILE:,}"),
    ],
)
def test_a_bad_attachment_is_named(folder: Path, written: Any, problem: str) -> None:
    (folder / "empty.png").touch()
    (folder / "unknown").write_bytes(b"?")
    with (folder / "huge.png").open("wb") as file:
        file.truncate(MAX_FILE + 1)
    with pytest.raises(BadAttachment, match=problem):
        found(folder, written)


def test_all_attachments_of_a_case_are_limited_together(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("steelyard.attachments.MAX_CASE", 1000)
    part = [{"role": "user", "content": [{"attachment": "a.png"}]}]
    with pytest.raises(BadAttachment, match="bytes together"):
        found(folder, "a.png", messages=part)


class TestInFiles:
    def test_paths_are_relative_to_the_suite_or_the_case_file(self, folder: Path) -> None:
        (folder / "s.yaml").write_text("cases: [{id: a, prompt: What?, attachments: [a.png]}]")
        (folder / "data").mkdir()
        (folder / "data" / "d.png").write_bytes(PNG)
        row = {"id": "a", "prompt": "What?", "attachments": ["d.png", "../a.png"]}
        (folder / "data" / "cases.jsonl").write_text(json.dumps(row) + "\n")
        (folder / "t.yaml").write_text("cases: data/cases.jsonl")
        assert [one.name for case in read_suite_file(folder / "s.yaml").cases for one in case.attachments] == ["a.png"]
        names = [one.name for case in read_suite_file(folder / "t.yaml").cases for one in case.attachments]
        assert names == ["d.png", "../a.png"]

    def test_a_csv_cell_is_one_path_or_a_json_list(self, folder: Path) -> None:
        (folder / "c.csv").write_text('prompt,attachments\nWhat?,a.png\nAnd?,"[""a.png"", ""b.pdf""]"\nNone?,\n')
        cases = list(EvalSet.from_csv(folder / "c.csv"))
        assert [[one.name for one in case.attachments] for case in cases] == [["a.png"], ["a.png", "b.pdf"], []]

    def test_a_template_may_name_the_file(self, folder: Path) -> None:
        (folder / "rows.jsonl").write_text(json.dumps({"image": "a.png", "question": "What?"}))
        suite = EvalSet.from_jsonl(
            folder / "rows.jsonl", fields={"prompt": "{{ question }}", "attachments": "{{ image }}"}
        )
        assert [one.name for case in suite for one in case.attachments] == ["a.png"]

    @pytest.mark.parametrize("how", ["absolute", "upward", "link", "message", "url"])
    def test_a_data_file_cannot_attach_what_is_outside_its_folder(self, folder: Path, how: str) -> None:
        inner = folder / "inner"
        inner.mkdir()
        (inner / "link.png").symlink_to(folder / "a.png")
        path = {"absolute": str(folder / "a.png"), "link": "link.png"}.get(how, "../a.png")
        row: dict[str, Any] = {"prompt": "What?", "attachments": [path]}
        if how in ("message", "url"):
            url = (folder / "a.png").as_uri()
            part = {"attachment": path} if how == "message" else {"type": "image_url", "image_url": {"url": url}}
            row = {"messages": [{"role": "user", "content": [part]}]}
        (inner / "cases.jsonl").write_text(json.dumps(row) + "\n")
        with pytest.raises(SuiteError, match=r"cases.jsonl:1: .* is outside .*attachments_from"):
            list(EvalSet.from_jsonl(inner / "cases.jsonl"))
        (inner / "s.yaml").write_text("cases: cases.jsonl\nattachments_from: ..")
        if how in ("absolute", "url"):  # the others are relative to that folder now
            ((one,),) = [all_attached(case) for case in read_suite_file(inner / "s.yaml").cases]
            assert one.read() == PNG

    def test_a_suite_file_may_attach_from_anywhere(
        self, folder: Path, tmp_path_factory: pytest.TempPathFactory
    ) -> None:
        elsewhere = tmp_path_factory.mktemp("elsewhere")
        (elsewhere / "s.yaml").write_text(f"cases: [{{prompt: What?, attachments: ['{folder / 'a.png'}']}}]")
        ((one,),) = [case.attachments for case in read_suite_file(elsewhere / "s.yaml").cases]
        assert (one.name, one.read()) == ("a.png", PNG)

    def test_a_bad_path_says_where_it_is_written(self, folder: Path) -> None:
        (folder / "s.yaml").write_text("cases:\n- {prompt: a}\n- {prompt: b, attachments: [z.png]}")
        with pytest.raises(SuiteError, match=r"s.yaml:3: cases\[1\]: the attachment 'z.png' cannot be read"):
            list(read_suite_file(folder / "s.yaml").cases)

    def test_spooled_cases_keep_their_attachments(self, folder: Path) -> None:
        rows = [{"prompt": "What?", "attachments": [str(folder / "a.png"), f"data:image/png;base64,{encoded(PNG)}"]}]
        (before,) = EvalSet("s", rows)
        (after,) = EvalSet("s", iter(rows)).spool(folder / "run.jsonl")
        assert after == before
        assert case_fingerprint(after) == case_fingerprint(before)


class TestIdentity:
    def test_a_changed_file_changes_the_fingerprint_and_the_cache_key_but_not_the_id(self, folder: Path) -> None:
        def marks() -> tuple[Any, ...]:
            case = found(folder, "a.png", messages=[{"role": "user", "content": [{"attachment": "b.pdf"}]}])
            fingerprint = fingerprint_of(case, target_parameters={}, model_id="m")
            assert fingerprint is not None
            return content_digest(case), case_fingerprint(case), fingerprint.key

        first = marks()
        assert marks() == first
        (folder / "a.png").write_bytes(PNG + b"!")
        second = marks()
        (folder / "b.pdf").write_bytes(PDF + b"!")
        third = marks()
        assert first[0] == second[0] == third[0]
        assert len({first[1], second[1], third[1]}) == len({first[2], second[2], third[2]}) == 3

    def test_a_suite_that_moves_keeps_its_fingerprints(
        self, folder: Path, tmp_path_factory: pytest.TempPathFactory
    ) -> None:
        other = tmp_path_factory.mktemp("other")
        (other / "a.png").write_bytes(PNG)
        assert case_fingerprint(found(folder, "a.png")) == case_fingerprint(found(other, "a.png"))

    def test_cases_that_differ_in_a_file_have_different_ids(self, folder: Path) -> None:
        assert content_digest(found(folder, "a.png")) != content_digest(found(folder, "b.pdf"))
        assert content_digest(found(folder)) == content_digest(EvalCase(prompt="What?"))

    def test_a_file_that_changes_between_plan_and_call_is_an_error_and_not_sent(self, folder: Path) -> None:
        case = found(folder, "a.png")
        (folder / "a.png").write_bytes(PDF)
        assert "changed while the suite was being run" in refusal(OpenAIChat, case)


class TestShapes:
    """What is sent, checked with the providers' own clients: their types, or their validators."""

    def test_openai_chat(self, folder: Path) -> None:
        openai = pytest.importorskip("openai.types.chat.chat_completion_content_part_param")
        (message,) = sent(OpenAIChat, found(folder, "a.png", "c.wav", "b.pdf"))["messages"]
        assert message["content"] == [
            {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{encoded(PNG)}"}},
            {"type": "input_audio", "input_audio": {"data": encoded(WAV), "format": "wav"}},
            {"type": "file", "file": {"filename": "b.pdf", "file_data": f"data:application/pdf;base64,{encoded(PDF)}"}},
            {"type": "text", "text": "What?"},
        ]
        assert_type(openai.ChatCompletionContentPartParam, message["content"])

    def test_openai_responses(self, folder: Path) -> None:
        openai = pytest.importorskip("openai.types.responses.response_input_content_param")
        case = found(folder, "a.png", "b.pdf", "https://example.com/d.pdf")
        (message,) = sent(OpenAIResponses, case)["input"]
        assert message["content"] == [
            {"type": "input_image", "image_url": f"data:image/png;base64,{encoded(PNG)}"},
            {"type": "input_file", "filename": "b.pdf", "file_data": f"data:application/pdf;base64,{encoded(PDF)}"},
            {"type": "input_file", "filename": "d.pdf", "file_url": "https://example.com/d.pdf"},
            {"type": "input_text", "text": "What?"},
        ]
        shapes = [{"detail": "auto", **part} if part["type"] == "input_image" else part for part in message["content"]]
        assert_type(openai.ResponseInputContentParam, shapes)

    def test_anthropic(self, folder: Path) -> None:
        anthropic = pytest.importorskip("anthropic.types.content_block_param")
        case = found(folder, "a.png", "b.pdf", "notes.txt", "https://example.com/d.pdf", "https://example.com/e.png")
        (message,) = sent(AnthropicMessages, case)["messages"]
        assert message["content"] == [
            {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": encoded(PNG)}},
            {
                "type": "document",
                "source": {"type": "base64", "media_type": "application/pdf", "data": encoded(PDF)},
                "title": "b.pdf",
            },
            {
                "type": "document",
                "source": {"type": "text", "media_type": "text/plain", "data": "Paris is big."},
                "title": "notes.txt",
            },
            {"type": "document", "source": {"type": "url", "url": "https://example.com/d.pdf"}, "title": "d.pdf"},
            {"type": "image", "source": {"type": "url", "url": "https://example.com/e.png"}},
            {"type": "text", "text": "What?"},
        ]
        assert_type(anthropic.ContentBlockParam, message["content"])

    def test_gemini(self, folder: Path) -> None:
        types = pytest.importorskip("google.genai.types")
        case = found(folder, "a.png", "c.wav", "b.pdf", "https://example.com/d.pdf")
        (message,) = sent(Gemini, case)["contents"]
        assert message["parts"] == [
            {"inlineData": {"mimeType": "image/png", "data": encoded(PNG)}},
            {"inlineData": {"mimeType": "audio/wav", "data": encoded(WAV)}},
            {"inlineData": {"mimeType": "application/pdf", "data": encoded(PDF)}},
            {"fileData": {"mimeType": "application/pdf", "fileUri": "https://example.com/d.pdf"}},
            {"text": "What?"},
        ]
        parts = types.Content.model_validate(message).parts
        assert [part.inline_data.data for part in parts[:3]] == [PNG, WAV, PDF]

    def test_bedrock(self, folder: Path) -> None:
        session = pytest.importorskip("botocore.session")
        validate = pytest.importorskip("botocore.validate")
        case = found(folder, "a.png", "c.wav", {"path": "b.pdf", "name": "the_plan v2.pdf"}, "s3://bucket/d.pdf")
        (message,) = sent(Bedrock, case, api_key="k")["messages"]
        assert message["content"] == [
            {"image": {"format": "png", "source": {"bytes": encoded(PNG)}}},
            {"audio": {"format": "wav", "source": {"bytes": encoded(WAV)}}},
            {"document": {"format": "pdf", "name": "the-plan v2", "source": {"bytes": encoded(PDF)}}},
            {"document": {"format": "pdf", "name": "d", "source": {"s3Location": {"uri": "s3://bucket/d.pdf"}}}},
            {"text": "What?"},
        ]
        model = session.get_session().get_service_model("bedrock-runtime")
        report = validate.ParamValidator().validate(message, model.shape_for("Message"))
        assert not report.has_errors(), report.generate_report()

    def test_what_an_api_does_not_take_is_refused_before_anything_is_sent(self, folder: Path) -> None:
        assert "takes no attachments" in refusal(OpenAICompletions, found(folder, "a.png"))
        assert "takes images, PDF and text" in refusal(AnthropicMessages, found(folder, "c.wav"))
        assert "only images from a URL" in refusal(OpenAIChat, found(folder, "https://example.com/d.pdf"))
        assert "fetches nothing from the web" in refusal(Bedrock, found(folder, "https://example.com/d.png"))
        (folder / "x.bmp").write_bytes(b"BM")
        assert "png, jpeg, gif or webp" in refusal(Bedrock, found(folder, "x.bmp"))

    @pytest.mark.parametrize("kind", KINDS)
    def test_parts_of_messages_are_sent_alike_and_no_file_url_ever(
        self, folder: Path, kind: type[EndpointTarget]
    ) -> None:
        url = (folder / "a.png").as_uri()
        shapes = [{"attachment": "a.png"}, {"type": "image_url", "image_url": {"url": url}}]
        options = {"api_key": "k"} if kind is Bedrock else {}
        for part in shapes:
            messages = [{"role": "user", "content": [part, {"type": "text", "text": "What?"}]}]
            case = resolved(EvalCase(id="a", messages=messages), AttachmentFolder(folder))
            assert sent(kind, case, **options) == sent(kind, found(folder, "a.png"), **options)
        raw = EvalCase(id="a", messages=[{"role": "user", "content": [shapes[1]]}])  # no suite has read this one
        assert "file:" not in json.dumps(sent(kind, raw, **options))

    def test_details_of_an_image_part_are_kept(self, folder: Path) -> None:
        part = {"type": "image_url", "image_url": {"url": "a.png", "detail": "high"}}
        case = resolved(EvalCase(id="a", messages=[{"role": "user", "content": [part]}]), AttachmentFolder(folder))
        image = sent(OpenAIChat, case)["messages"][0]["content"][0]["image_url"]
        assert image == {"url": f"data:image/png;base64,{encoded(PNG)}", "detail": "high"}

    def test_without_a_prompt_they_go_into_the_last_message(self, folder: Path) -> None:
        case = EvalCase(id="a", messages=[{"role": "user", "content": "What?"}], attachments=["a.png"])
        loaded = with_contents(resolved(case, AttachmentFolder(folder)))
        assert loaded.messages == with_contents(found(folder, "a.png")).messages


def assert_type(expected: Any, values: list[Any]) -> None:
    """The values are of a client's type, with nothing in them that it does not know."""
    from pydantic import TypeAdapter

    for value in values:
        read = TypeAdapter(expected).validate_python(value)
        assert read == value


class TestInARun:
    def test_the_journal_has_a_digest_instead_of_the_content(self, folder: Path) -> None:
        reply = whole(chat_whole({"content": "a cat"}))
        target = OpenAIChat("m", base_url="http://localhost/v1", transport=ScriptedTransport(reply), store_payload=True)
        case = EvalCase(id="a", prompt="What?", attachments=[str(folder / "a.png")])
        result = Runner(target, EvalSet("s", [case]), output_path=folder / "run").run_sync()
        written = (folder / "run" / "outputs.jsonl").read_text()
        assert encoded(PNG)[:200] not in written
        (record,) = result.iter_responses()
        image = record.input_payload["messages"][0]["content"][0]["image_url"]["url"]
        assert image == f"[image/png, {len(PNG)} bytes, sha256 {hashlib.sha256(PNG).hexdigest()}]"
        assert record.input_prompt == "What?"

    def test_base64_of_every_api_is_left_out(self) -> None:
        text = encoded(PNG)
        for body in (
            {"source": {"bytes": text}},
            {"inlineData": {"mimeType": "image/png", "data": text}},
            {"file": {"file_data": f"data:application/pdf;base64,{text}"}},
        ):
            assert text not in json.dumps(without_contents(body))
        kept = {"data": "short", "url": "https://example.com/" + "a b" * 200, "text": text}
        assert without_contents(kept) == kept

    def test_a_changed_file_is_asked_again_and_an_unchanged_one_comes_from_the_cache(self, folder: Path) -> None:
        transport = ScriptedTransport(whole(chat_whole({"content": "a cat"})))
        target = OpenAIChat("m", base_url="http://localhost/v1", stream=False, transport=transport)
        suite = EvalSet("s", [EvalCase(id="a", prompt="What?", attachments=[str(folder / "a.png")])])
        for name, requests in (("one", 1), ("two", 1), ("three", 2)):
            if name == "three":
                (folder / "a.png").write_bytes(PNG + b"!")
            Runner(target, suite, output_path=folder / name, cache=folder / "cache").run_sync()
            assert len(transport.requests) == requests

    def test_in_a_tool_loop_they_are_sent_with_each_turn(self, folder: Path) -> None:
        call = {"tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}]}
        transport = ScriptedTransport(
            whole(chat_whole(call, finish="tool_calls")), whole(chat_whole({"content": "done"}))
        )
        target = OpenAIChat(
            "m", base_url="http://localhost/v1", stream=False, transport=transport, functions={"f": lambda: "ok"}
        )
        response = asyncio.run(target.invoke(found(folder, "a.png"), CONTEXT))
        assert response.response_text == "done"
        assert [json.dumps(body).count(encoded(PNG)) for body in transport.bodies] == [1, 1]
        assert encoded(PNG)[:100] not in json.dumps(response.messages)

    def test_the_mock_takes_them_in_every_api(self, folder: Path) -> None:
        with running_mock(output_tokens=4) as mock:
            for kind in KINDS:
                address = mock.url if kind in (Gemini, Bedrock) else mock.base_url
                target = kind("m", base_url=address, api_key="k")
                suite = EvalSet("s", [found(folder, "a.png", "b.pdf")])
                result = Runner(target, suite, output_path=folder / kind.kind).run_sync()
                assert [record.status for record in result.iter_responses()] == ["ok"]

    def test_a_worker_gets_the_content_with_the_case(self, folder: Path) -> None:
        sent_along = pickle.dumps(
            found(folder, "a.png", messages=[{"role": "user", "content": [{"attachment": "b.pdf"}]}])
        )
        for name in ("a.png", "b.pdf"):
            (folder / name).unlink()
        case = pickle.loads(sent_along)
        assert [one.read() for one in all_attached(case)] == [PNG, PDF]
        assert deepcopy(case).attachments[0] is case.attachments[0]
        assert encoded(PNG) in json.dumps(sent(OpenAIChat, case))

    def test_a_file_that_is_gone_before_it_is_sent_to_a_worker_is_that_cases_error(self, folder: Path) -> None:
        case = found(folder, "a.png")
        (folder / "a.png").unlink()
        with pytest.raises(TargetError, match=r"a\.png cannot be read"):
            pickle.loads(pickle.dumps(case)).attachments[0].read()

    def test_a_function_reads_them(self, folder: Path) -> None:
        def size(case: EvalCase) -> str:
            return str(len(case.attachments[0].read()))

        suite = EvalSet("s", [EvalCase(id="a", prompt="What?", attachments=[str(folder / "a.png")])])
        result = Runner(size, suite, output_path=folder / "run").run_sync()
        assert [record.response_text for record in result.iter_responses()] == [str(len(PNG))]

    def test_a_dry_run_says_that_they_are_not_counted(self, folder: Path) -> None:
        (folder / "s.yaml").write_text(
            "target: {openai-chat: {model: m, base_url: 'http://localhost:1'}}\n"
            "cases: [{prompt: What?, attachments: [a.png, 'https://example.com/b.png']}]"
        )
        ended = run_cli(folder, "run", "s.yaml", "--dry-run")
        assert f"without 2 attachments ({len(PNG)} bytes)" in " ".join(ended.out.split())
        assert ended.code == 0

    def test_reports_name_them(self, folder: Path) -> None:
        from steelyard.report.case import turns

        case = found(folder, "a.png")
        result = Runner(lambda case: "a cat", EvalSet("s", [case]), output_path=folder / "run").run_sync()
        (record,) = result.iter_responses()
        assert turns(record, case)[0].text == f"[attachment a.png, image/png, {len(PNG)} bytes]\n\nWhat?"
