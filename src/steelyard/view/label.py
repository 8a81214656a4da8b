"""Labelling in the browser: the page, and the one request through which a view writes something down."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from steelyard.errors import ConfigurationError
from steelyard.report.labels import MAX_COMMENT_CHARS, LabelSession
from steelyard.view import pages
from steelyard.view.runs import Runs, Suites

_MAX_SESSIONS = 16
_MAX_BODY_BYTES = 64 << 10

Result = TypeVar("Result")


class LabelRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """What the page asks to be written down."""

    labeller: str
    action: Literal["label", "skip", "undo"]
    id: str = ""
    trial: int = 0
    grade: int = -1
    comment: str = ""


_decode = msgspec.json.Decoder(LabelRequest).decode


class Labelling:
    """The labelling of runs in a folder. `read` runs a function in a thread, a few of them at once."""

    def __init__(
        self, runs: Runs, suites: Suites, labeller: str, csrf: str, read: Callable[..., Awaitable[Any]]
    ) -> None:
        self._runs, self._suites, self._labeller, self._csrf = runs, suites, labeller, csrf
        self._read = read
        self._sessions: OrderedDict[tuple[Path, str], LabelSession] = OrderedDict()

    def routes(self) -> list[Route]:
        """What is served beside the pages that only show."""
        return [
            Route("/run/{run}/label", self._page),
            Route("/api/runs/{run}/label", self._state),
            Route("/api/runs/{run}/label", self._write, methods=["POST"]),
            Route("/api/runs/{run}/agreement", self._agreement),
        ]

    async def _page(self, request: Request) -> Response:
        run = await self._place(request)
        about = {
            "id": request.path_params["run"],
            "name": self._runs.name_of(run),
            "labeller": self._labeller,
            "csrf": self._csrf,
            "max_comment": MAX_COMMENT_CHARS,
        }
        return pages.label_page(about)

    async def _state(self, request: Request) -> Response:
        session = await self._session(request, request.query_params.get("labeller", self._labeller))
        return _json(await self._read(partial(_state, session)))

    async def _write(self, request: Request) -> Response:
        asked = await _body(request)
        session = await self._session(request, asked.labeller)
        return _json(await self._read(partial(_act, session, asked)))

    async def _agreement(self, request: Request) -> Response:
        session = await self._session(request, request.query_params.get("labeller", self._labeller))
        return _json(await self._read(session.agreement))

    async def _place(self, request: Request) -> Path:
        run: Path | None = await self._read(self._runs.find, request.path_params["run"])
        if run is None:
            raise HTTPException(404, "there is no such run here")
        return run

    async def _session(self, request: Request, labeller: str) -> LabelSession:
        run = await self._place(request)
        session: LabelSession = await self._read(self._open, run, labeller)
        return session

    def _open(self, run: Path, labeller: str) -> LabelSession:
        key = (run, labeller)
        session = self._sessions.pop(key, None) or LabelSession(run, labeller, asked=partial(self._suites.asked, run))
        self._sessions[key] = session
        while len(self._sessions) > _MAX_SESSIONS:
            self._sessions.popitem(last=False)
        return session


async def _body(request: Request) -> LabelRequest:
    """What a request says, if it is short and says nothing else."""
    data = b""
    async for chunk in request.stream():
        data += chunk
        if len(data) > _MAX_BODY_BYTES:
            raise HTTPException(413, "that is too long")
    try:
        return _decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise HTTPException(400, "that is no label") from error


def _act(session: LabelSession, asked: LabelRequest) -> dict[str, Any]:
    place = (asked.id, asked.trial)
    try:
        if asked.action == "label":
            session.label(place, asked.grade, asked.comment)
        elif asked.action == "skip":
            session.skip(place, asked.comment)
        else:
            session.undo()
    except ConfigurationError as error:
        raise HTTPException(400, str(error)) from error
    return _state(session)


def _state(session: LabelSession) -> dict[str, Any]:
    """The answer to label and how far it is; of scores and strata nothing."""
    return {
        "labeller": session.labeller,
        "grades": session.grades,
        "keys": session.keys,
        "progress": session.progress,
        "item": session.current,
    }


def _json(value: Any) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")
