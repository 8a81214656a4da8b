"""What an answer with an error status means."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from typing import Any

import pytest

from steelyard.errors import TargetError, TransientError
from steelyard.protocols import HttpReply
from steelyard.transport import error_message, request_id, retry_after, status_error


def reply(status: int, body: object = b"", **headers: str) -> HttpReply:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    names = {name.replace("_", "-"): value for name, value in headers.items()}
    return HttpReply(status, names, [data[:7], data[7:]], [0.1, 0.2], 0.2, 0.0)


@pytest.mark.parametrize("status", [408, 409, 425, 429, 500, 502, 503, 504, 520, 529, 599])
def test_what_may_pass_is_transient(status: int) -> None:
    assert isinstance(status_error(reply(status)), TransientError)


@pytest.mark.parametrize("status", [301, 307, 400, 401, 403, 404, 413, 415, 422, 451])
def test_what_will_not_pass_is_final(status: int) -> None:
    assert type(status_error(reply(status))) is TargetError


@pytest.mark.parametrize(("status", "overloaded"), [(429, True), (503, True), (529, True), (500, False), (408, False)])
def test_too_much_to_do_is_told_apart(status: int, overloaded: bool) -> None:
    error = status_error(reply(status))
    assert isinstance(error, TransientError)
    assert error.overloaded is overloaded


def test_an_account_without_credit_is_not_asked_again() -> None:
    body = {
        "error": {
            "message": "You exceeded your current quota",
            "type": "insufficient_quota",
            "code": "insufficient_quota",
        }
    }
    assert type(status_error(reply(429, body))) is TargetError


def test_the_server_may_say_itself_whether_to_try_again() -> None:
    assert type(status_error(reply(500, x_should_retry="false"))) is TargetError
    assert isinstance(status_error(reply(400, x_should_retry="true")), TransientError)


BODIES: list[tuple[Any, str]] = [
    (
        {"error": {"message": "No such model", "type": "invalid_request_error", "code": "model_not_found"}},
        "No such model",
    ),
    ({"type": "error", "error": {"type": "overloaded_error", "message": "Overloaded"}}, "Overloaded"),
    (
        {"error": {"code": "429", "message": "Requests to this deployment exceeded its rate"}},
        "Requests to this deployment",
    ),
    (
        {"object": "error", "message": "prompt is too long", "type": "BadRequestError", "code": 400},
        "prompt is too long",
    ),
    ({"error": "model 'm' not found"}, "model 'm' not found"),
    (
        {"error": {"code": 500, "message": "context shift is disabled", "type": "server_error"}},
        "context shift is disabled",
    ),
    ({"detail": "Not Found"}, "Not Found"),
    ({"detail": [{"loc": ["body", "messages", 0], "msg": "field required"}]}, "body.messages.0: field required"),
    ({"message": "Forbidden"}, "Forbidden"),
    ([{"error": {"code": 400, "message": "API key not valid", "status": "INVALID_ARGUMENT"}}], "API key not valid"),
    (b"upstream connect error", "upstream connect error"),
    (
        b"<html><head><style>a{b}</style></head><body><h1>502 Bad&nbsp;Gateway</h1>nginx</body></html>",
        "502 Bad Gateway nginx",
    ),
    ({"unheard": "of"}, '{"unheard": "of"}'),
    (b'{"error": {"mess', '{"error": {"mess'),
    (b"\xff\xfe\x00", "\ufffd\ufffd\x00"),
]


@pytest.mark.parametrize(("body", "message"), BODIES)
def test_the_providers_message_is_found(body: Any, message: str) -> None:
    assert message in str(status_error(reply(400, body)))


def test_an_empty_body_has_no_message() -> None:
    assert error_message(b"") is None
    assert error_message(b"null") == "null"
    assert error_message(b'{"error": {}}') == '{"error": {}}'
    assert str(status_error(reply(404))) == "HTTP 404: no message"


def test_a_message_given_goes_before_what_the_body_says() -> None:
    error = status_error(reply(400, {"error": "raw"}), provider_message="in better words")
    assert str(error) == "HTTP 400: in better words"


def test_kind_and_request_id_are_told() -> None:
    body = {"error": {"message": "slow down", "type": "requests", "code": "rate_limit_exceeded"}}
    error = status_error(reply(429, body, x_request_id="req-7"))
    assert str(error) == "HTTP 429 (rate_limit_exceeded): slow down [request id req-7]"
    assert request_id({"request-id": "req-8"}) == "req-8"
    assert request_id({"content-type": "x"}) is None


def test_long_pages_are_cut_short_in_linear_time() -> None:
    assert len(str(status_error(reply(500, b"<p>" + b"word " * 200_000)))) < 400
    assert len(str(status_error(reply(500, b"<" * 1_000_000)))) < 400
    assert len(str(status_error(reply(500, b"<script" * 200_000)))) < 400
    assert len(str(status_error(reply(500, b"<!--" * 200_000)))) < 400
    assert len(str(status_error(reply(500, {"error": "long " * 10_000})))) < 2_100


def test_deeply_nested_bodies_do_no_harm() -> None:
    assert isinstance(status_error(reply(500, b'{"error":' * 100_000)), TransientError)
    assert isinstance(status_error(reply(500, b'{"error":' * 500 + b'"x"' + b"}" * 500)), TransientError)


def test_a_redirect_tells_where_to_without_its_query() -> None:
    error = status_error(reply(308, b"<h1>Moved</h1>", location="https://other.example/v1?key=hidden"))
    assert "https://other.example/v1" in str(error)
    assert "hidden" not in str(error)


@pytest.mark.parametrize(
    ("headers", "seconds"),
    [
        ({"retry-after": "7"}, 7.0),
        ({"retry-after": "0.5"}, 0.5),
        ({"retry-after": "0"}, 0.0),
        ({"retry-after": "31536000"}, 31_536_000.0),
        ({"retry-after": "9", "retry-after-ms": "1500"}, 1.5),
        ({"retry-after": "9", "retry-after-ms": "soon"}, 9.0),
        ({"retry-after": "-3"}, None),
        ({"retry-after": "nan"}, None),
        ({"retry-after": "inf"}, None),
        ({"retry-after": "soon"}, None),
        ({"retry-after": ""}, None),
        ({"retry-after": "Wed, 99 Foo 2026 07:28:00 GMT"}, None),
        ({"retry-after": "Wed, 21 Oct 2015 07:28:00 GMT"}, None),
        ({"retry-after": "Wed, 21 Oct 20150000000000000000000 07:28:00 GMT"}, None),
        ({"retry-after": "Wed, 21 Oct 2035 07:28:00 +99999999999999999999"}, None),
        ({}, None),
    ],
)
def test_how_long_to_stay_away(headers: dict[str, str], seconds: float | None) -> None:
    assert retry_after(headers) == seconds


def test_a_date_is_read_against_the_servers_own_clock() -> None:
    """A server whose clock is years behind still gets the half minute that it asked for."""
    headers = {"date": "Wed, 21 Oct 2015 07:28:00 GMT", "retry-after": "Wed, 21 Oct 2015 07:28:30 GMT"}
    assert retry_after(headers) == 30.0


def test_a_date_without_another_is_read_against_this_clock() -> None:
    later = format_datetime(datetime.now(UTC) + timedelta(seconds=60), usegmt=True)
    seconds = retry_after({"retry-after": later})
    assert seconds is not None
    assert 50 < seconds <= 60


def test_the_wait_is_handed_on() -> None:
    error = status_error(reply(429, retry_after="3"))
    assert isinstance(error, TransientError)
    assert error.retry_after == 3.0
