"""Who may ask, and what a page may do: checked before any other code sees a request.

A web site that a browser also has open must not read runs through it. So the name that a request gives this server
must be one of its names (a site can point its own name at 127.0.0.1), a request that another site's page makes is
turned away, nothing but reading is served, and on an address that others can reach a token is asked for.

A server for labels also takes what a person says of an answer: only on this machine, only with the token, and only
from its own page, which knows a second secret that no other site can read.
"""

from __future__ import annotations

import hmac
import ipaddress
import re
import socket
from http.cookies import CookieError, SimpleCookie
from urllib.parse import parse_qs, quote

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

LOOPBACK = ("127.0.0.1", "localhost", "[::1]")
_COOKIE = "steelyard-view-"
CSRF_HEADER = "x-steelyard-csrf"
_LABELS = re.compile(r"/api/runs/[\w.~-]+/label")
"""The one address that may be written to."""
_HEADERS = {
    "cache-control": "no-store",
    "content-security-policy": "default-src 'none'; frame-ancestors 'none'; base-uri 'none'; form-action 'none'",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
}


def page_policy(nonce: str) -> str:
    """The policy of a page: its own scripts and styles, and requests to this server alone."""
    return (
        f"default-src 'none'; script-src 'nonce-{nonce}'; style-src 'nonce-{nonce}'; img-src data:; "
        "connect-src 'self'; frame-ancestors 'none'; base-uri 'none'; form-action 'none'"
    )


def is_loopback(host: str) -> bool:
    """Whether an address is one that only this machine can reach."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


class Guard:
    """Lets through what a page of this server asks, and turns the rest away."""

    def __init__(self, app: ASGIApp, *, host: str, port: int, token: str | None, csrf: str | None = None) -> None:
        if csrf is not None and (token is None or not is_loopback(host)):
            raise ValueError("what can be written to needs a token and an address of this machine")
        self._app = app
        self._csrf = csrf
        """What a page of this server sends with each label; None where nothing is taken."""
        self._port = port
        self._token = token
        self._cookie = f"{_COOKIE}{port}"
        self._names = {*LOOPBACK, _in_a_url(host)}
        if not is_loopback(host):
            self._names.add(socket.gethostname().lower())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            raise RuntimeError(f"this server speaks http, not {scope['type']}")
        refusal = self._refusal(scope)

        async def send_guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in _HEADERS.items():
                    headers.setdefault(name, value)
            await send(message)

        await (self._app if refusal is None else refusal)(scope, receive, send_guarded)

    def _refusal(self, scope: Scope) -> Response | None:
        """Why a request is not answered; None when it is."""
        headers = Headers(scope=scope)
        writes = scope["method"] not in ("GET", "HEAD")
        if writes and not (self._csrf is not None and scope["method"] == "POST" and _LABELS.fullmatch(scope["path"])):
            return PlainTextResponse("this server only shows\n", 405, {"allow": "GET, HEAD"})
        hosts = headers.getlist("host")
        if len(hosts) != 1 or not self._is_mine(hosts[0]):
            return PlainTextResponse("this server does not go by that name\n", 421)
        if not self._is_same_site(headers, hosts[0]):
            return PlainTextResponse("asked by a page of another site\n", 403)
        if writes and not self._is_own_page(headers):
            return PlainTextResponse("a label is taken from a page of this server alone: load it again\n", 403)
        return self._token_refusal(scope, headers) if self._token is not None else None

    def _is_mine(self, host: str) -> bool:
        """Whether a Host header names this server: one of its names, or with a token any bare address."""
        name, port = _split(host.lower())
        if port != self._port:
            return False
        return name in self._names or (self._token is not None and _is_address(name))

    def _is_same_site(self, headers: Headers, host: str) -> bool:
        """Whether no other site's page asks. A link to here may be followed from anywhere: that shows it nothing."""
        origins = headers.getlist("origin")
        if origins and origins != [f"http://{host}"]:
            return False
        site = headers.get("sec-fetch-site", "same-origin")
        followed = headers.get("sec-fetch-mode") == "navigate" and headers.get("sec-fetch-dest") == "document"
        return site in ("same-origin", "none") or (followed and not origins)

    def _is_own_page(self, headers: Headers) -> bool:
        """Whether a page of this server asks for something to be written: it says so and knows the secret."""
        kind = headers.get("content-type", "").partition(";")[0].strip().lower()
        known = _same(headers.get(CSRF_HEADER, ""), self._csrf or "")
        return bool(headers.getlist("origin")) and kind == "application/json" and known

    def _token_refusal(self, scope: Scope, headers: Headers) -> Response | None:
        """Ask for the token: in the address the first time, in a cookie from then on."""
        assert self._token is not None
        given = parse_qs(scope["query_string"].decode("latin-1")).get("token", [""])[-1]
        if given and _same(given, self._token):
            reply = RedirectResponse("/" + quote(scope["path"]).lstrip("/"), 303)
            reply.set_cookie(self._cookie, self._token, httponly=True, samesite="strict", path="/")
            return reply
        if _same(_cookie(headers.get("cookie", ""), self._cookie), self._token):
            return None
        return PlainTextResponse("open the address that `steelyard view` printed: it has a token\n", 401)


def _split(host: str) -> tuple[str, int]:
    name, colon, port = host.rpartition(":")
    if not colon or host.endswith("]"):
        return host, 80
    return name, int(port) if port.isascii() and port.isdigit() and len(port) <= 5 else -1


def _in_a_url(host: str) -> str:
    return f"[{host}]" if ":" in host else host.lower()


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name.removeprefix("[").removesuffix("]"))
    except ValueError:
        return False
    return True


def _cookie(header: str, name: str) -> str:
    try:
        found = SimpleCookie(header).get(name)
    except CookieError:
        return ""
    return found.value if found is not None else ""


def _same(one: str, other: str) -> bool:
    return hmac.compare_digest(one.encode("utf-8", "replace"), other.encode())
