"""A webhook: posts JSON to an address when a run starts, ends, fails, or a case ends in an error."""

from __future__ import annotations

import logging
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from http.client import HTTPException
from typing import Any
from urllib.parse import urlsplit

import msgspec

from steelyard._version import __version__
from steelyard.errors import ConfigurationError, describe
from steelyard.masking import Masker, Secret, environment_masker
from steelyard.records import Record, verdict
from steelyard.run.hooks import Hook, RunInfo
from steelyard.run.result import Result
from steelyard.stats.formatting import counted
from steelyard.stats.metrics import figures, marked_pass_rate, uncalibrated

log = logging.getLogger("steelyard")

EVENTS = ("start", "record", "error", "end", "failure")
_DEFAULT_EVENTS = ("end", "failure")
_ATTEMPTS = 3
_MAX_TEXT = 500
"""Characters of an answer or a message that are sent."""
_FIGURES = ("pass_rate", "pass_rate.ci_low", "pass_rate.ci_high", "pass_rate_all", "error_rate", "cost")


class Webhook(Hook):
    """Posts events as JSON to `url`: by default the end and the failure of a run.

    `url` and the values of `headers` are treated as secrets: they are never logged. Each post is tried three times,
    with `timeout` seconds each.
    """

    name = "webhook"

    def __init__(
        self,
        url: str,
        *,
        events: Sequence[str] = _DEFAULT_EVENTS,
        headers: Mapping[str, str] | None = None,
        timeout: float = 10.0,
    ) -> None:
        address = urlsplit(url) if isinstance(url, str) else None
        if address is None or address.scheme not in ("http", "https") or not address.hostname:
            raise ConfigurationError("a webhook's url must start with http:// or https:// and name a host")
        if not url.isprintable() or " " in url:  # a message about it later would show it
            raise ConfigurationError("a webhook's url has a space or a control character: write it as %20 or so")
        _check_headers(headers or {})
        unknown = [event for event in events if event not in EVENTS] if not isinstance(events, str) else [events]
        if unknown:
            raise ConfigurationError(f"a webhook's events are a list of {', '.join(EVENTS)}, got {unknown[0]!r}")
        if isinstance(timeout, bool) or not isinstance(timeout, int | float) or timeout <= 0:
            raise ConfigurationError(f"a webhook's timeout must be seconds above 0, got {timeout!r}")
        self._url = Secret(url)
        self._host = address.hostname
        self._events = frozenset(events)
        self._headers = {name: Secret(value) for name, value in (headers or {}).items()}
        self._timeout = float(timeout)
        self._masker = Masker([url, address.path, *(headers or {}).values()])
        self._run: RunInfo | None = None

    def on_start(self, run: RunInfo) -> None:
        """Remember the run, for what later events say of it."""
        self._run = run
        begins = f"resumes after {run.done_before:,}" if run.done_before else "starts"
        self._post("start", f"{run.suite} {begins}: {counted(run.planned, 'case')}", {})

    def on_record(self, record: Record) -> None:
        """Post the verdict of a case."""
        if "record" not in self._events:
            return
        passed = verdict(record.scores) if record.status == "ok" else None
        scores = {score.name: score.value for score in record.scores}
        content = {"id": record.id, "trial": record.trial, "status": record.status, "passed": passed, "scores": scores}
        self._post("record", f"{record.id}: {record.status}", content)

    def on_error(self, record: Record) -> None:
        """Post what went wrong with a case."""
        message = (record.error or record.error_type or "error")[:_MAX_TEXT]
        content = {"id": record.id, "trial": record.trial, "error": message}
        self._post("error", f"{record.id}: {message}", content)

    def on_end(self, result: Result) -> None:
        """Post the headline figures."""
        metrics = result.typed_metrics
        known = figures(metrics)
        content = {
            "complete": metrics.complete,
            "stopped": metrics.stopped or None,
            "planned": metrics.counts.planned,
            "ok": metrics.counts.ok,
            "errors": metrics.counts.error,
            **{name: known.get(name) for name in _FIGURES},
            "uncalibrated": uncalibrated(metrics),
        }
        passed = "" if metrics.pass_rate is None else f"passed {marked_pass_rate(metrics)}, "
        ending = "complete" if metrics.complete else f"not complete ({metrics.stopped or 'stopped'})"
        self._post("end", f"{metrics.suite}: {passed}{counted(metrics.counts.error, 'error')}, {ending}", content)

    def on_failure(self, error: BaseException) -> None:
        """Post why the run ended without a result."""
        message = environment_masker().text(describe(error))[:_MAX_TEXT]
        self._post("failure", f"the run failed: {message}", {"error": message})

    def _post(self, event: str, text: str, content: dict[str, Any]) -> None:
        if event not in self._events:
            return
        run = self._run
        about = {
            "text": text,  # what chat systems show
            "event": event,
            "suite": None if run is None else run.suite,
            "run": None if run is None or run.path is None else str(run.path),
            "model": None if run is None else run.model_id,
        }
        body = msgspec.json.encode({**about, **content})
        for attempt in range(1, _ATTEMPTS + 1):
            try:
                self._send(body)
                return
            except urllib.error.HTTPError as error:
                error.close()
                if attempt == _ATTEMPTS or (error.code < 500 and error.code != 429):
                    raise ConfigurationError(f"{self._host} answered {error.code} to the event {event}") from None
            except (OSError, HTTPException) as error:
                if attempt == _ATTEMPTS:
                    reason = self._masker.text(describe(error))
                    raise ConfigurationError(f"{self._host} cannot be reached: {reason}") from None
            time.sleep(0.5 * attempt)

    def _send(self, body: bytes) -> None:
        headers = {name: value.reveal() for name, value in self._headers.items()}
        request = urllib.request.Request(
            self._url.reveal(),
            data=body,
            headers={"Content-Type": "application/json", "User-Agent": f"steelyard/{__version__}", **headers},
            method="POST",
        )
        with _opener.open(request, timeout=self._timeout) as response:
            response.read(1)


def _check_headers(headers: Mapping[str, object]) -> None:
    """Refuse values that no request could have, as the library's message about one would show it."""
    for name, value in headers.items():
        if not isinstance(value, str):
            raise ConfigurationError(f"a webhook's header {name!r} must be text, got {type(value).__name__}")
        if "\r" in value or "\n" in value:
            raise ConfigurationError(f"a webhook's header {name!r} has a line break: leave it out")


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """Turns redirects into errors: headers with secrets go to the host that was named, and to no other."""

    def redirect_request(self, *_: Any) -> None:
        return None


_opener = urllib.request.build_opener(_NoRedirects)
