"""The HTTP server of `steelyard view`: pages, their data, and live events."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import socket
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Iterator
from hashlib import blake2b
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import msgspec
import numpy as np
import uvicorn
from starlette.applications import Starlette
from starlette.datastructures import QueryParams
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import PlainTextResponse, RedirectResponse, Response, StreamingResponse
from starlette.routing import Route

from steelyard.daemon_threads import DaemonThreads
from steelyard.errors import ConfigurationError, RunRefused, SteelyardError
from steelyard.journal.files import OUTPUTS
from steelyard.journal.index import ROWS, Rows
from steelyard.journal.reader import belonging_rows, index_rows
from steelyard.report.labels import checked_name
from steelyard.report.page.data import CaseWork, body
from steelyard.view import pages
from steelyard.view.cases import (
    MAX_ROWS,
    MEASURED,
    CaseTable,
    SearchResult,
    file_response,
    running_case,
    search,
    terms_of,
)
from steelyard.view.label import Labelling
from steelyard.view.live import Watches
from steelyard.view.pages import charts, in_case_order
from steelyard.view.runs import (
    MAX_COMPARED,
    Comparisons,
    ListedRun,
    Matrices,
    Overviews,
    Runs,
    Suites,
    Sweeps,
    batch,
    stat_of,
)
from steelyard.view.security import Guard, is_loopback

_BACKLOG = 128
_PATIENCE = 1
"""Seconds that open connections get when the server stops."""


class _Server(uvicorn.Server):
    """A server that leaves signals to the program that runs it."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class ViewServer:
    """A page over the runs in a folder: `async with ViewServer(folder) as server: ... server.url`.

    On an address that others can reach it asks for a token, which is part of `url`. With a `labeller` answers can also
    be labelled, by whom the name is of at first: then it asks for the token on this machine too, and serves no other.
    """

    def __init__(self, folder: Path, *, host: str = "127.0.0.1", port: int = 0, labeller: str | None = None) -> None:
        if not 0 <= port <= 65_535:
            raise ConfigurationError(f"port must be between 0 and 65535, got {port}")
        if labeller is not None and not is_loopback(host):
            raise ConfigurationError(
                f"labels are taken on this machine alone, and {host} is an address that others reach"
            )
        self._runs = Runs(folder)
        self._host, self._asked_port = host, port
        self._labeller = None if labeller is None else checked_name(labeller)
        self._csrf = None if labeller is None else secrets.token_urlsafe(24)
        self.token = None if is_loopback(host) and labeller is None else secrets.token_urlsafe(24)

    async def __aenter__(self) -> ViewServer:
        listening = self._listen()
        self.port = listening.getsockname()[1]
        labels = None if self._labeller is None or self._csrf is None else (self._labeller, self._csrf)
        self._view = View(self._runs, Suites(self._runs.root, Path.cwd()), labels)
        guard = Guard(self._view.app, host=self._host, port=self.port, token=self.token, csrf=self._csrf)
        self._server = _Server(
            uvicorn.Config(
                guard,
                lifespan="off",
                ws="none",
                http="h11",
                proxy_headers=False,
                server_header=False,
                access_log=False,
                log_config=None,
                log_level="critical",
                timeout_graceful_shutdown=_PATIENCE,
            )
        )
        self._serving = asyncio.create_task(self._server.serve([listening]))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._view.watches.stop()
        self._server.should_exit = True
        await self._serving

    @property
    def url(self) -> str:
        """The address to open."""
        host = "127.0.0.1" if self._host in ("0.0.0.0", "::") else self._host
        shown = f"[{host}]" if ":" in host else host
        page = f"run/{self._runs.id_of(self._runs.root)}/label" if self._labeller and self._runs.is_run else ""
        return f"http://{shown}:{self.port}/{page}" + (f"?token={self.token}" if self.token else "")

    def _listen(self) -> socket.socket:
        family = socket.AF_INET6 if ":" in self._host else socket.AF_INET
        listening = socket.socket(family, socket.SOCK_STREAM)
        try:
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listening.bind((self._host, self._asked_port))
            listening.listen(_BACKLOG)  # from here on nobody is refused, however soon the address is opened
        except OSError as error:
            listening.close()
            raise ConfigurationError(
                f"cannot listen on {self._host} port {self._asked_port}: {error.strerror or error}"
            ) from error
        listening.setblocking(False)
        return listening


_AT_ONCE = 4
"""Requests that read files at the same time; the others wait their turn."""
_MAX_READERS = 64
_MAX_TEXT_CHARS = 50_000
"""Characters of one text that a page is given."""

Result = TypeVar("Result")

log = logging.getLogger("steelyard")


class View:
    """The application: the runs of one folder, and the suites that may be read beside them.

    `labels` are the first labeller's name and the secret of the pages that may send labels; None: it only shows.
    """

    def __init__(self, runs: Runs, suites: Suites, labels: tuple[str, str] | None = None) -> None:
        self.runs = runs
        self._suites = suites
        self._overviews = Overviews(suites)
        self._threads = DaemonThreads()
        self._turns = asyncio.Semaphore(_AT_ONCE)
        self._tables = Tables()
        self._comparisons = Comparisons()
        self._sweeps = Sweeps(runs)
        self._matrices = Matrices(runs, suites)
        self.watches = Watches(self._threads)
        routes = {
            "/": self._list,
            "/run/{run}": self._run,
            "/compare": self._compare,
            "/sweep/{sweep}": self._sweep,
            "/matrix/{matrix}": self._matrix,
            "/api/runs": self._headlines,
            "/api/sweeps": self._sweep_headlines,
            "/api/matrices": self._matrix_headlines,
            "/api/runs/{run}/events": self._events,
            "/api/runs/{run}/overview": self._overview,
            "/api/runs/{run}/charts": self._charts,
            "/api/runs/{run}/cases": self._cases,
            "/api/runs/{run}/case": self._case,
            "/api/runs/{run}/running": self._running,
            "/api/runs/{run}/file": self._file,
        }
        self._labelling = None if labels is None else Labelling(runs, suites, *labels, self._read)
        self.app = Starlette(
            routes=[
                *(Route(path, handler) for path, handler in routes.items()),
                *(() if self._labelling is None else self._labelling.routes()),
            ],
            exception_handlers={SteelyardError: _refused, OSError: _refused, Exception: _broken},
        )

    # Pages

    async def _list(self, request: Request) -> Response:  # noqa: ARG002 - starlette's signature
        if self.runs.is_run:
            return RedirectResponse(f"/run/{self.runs.id_of(self.runs.root)}", 307)
        matrix = await self._read(lambda: self._matrices.root_id)
        if matrix is not None:
            return RedirectResponse(f"/matrix/{matrix}", 307)
        return pages.list_page({"folder": str(self.runs.root)})

    async def _run(self, request: Request) -> Response:
        place = await self._place(request)
        about = {"id": request.path_params["run"], "name": self.runs.name_of(place), "run": str(place)}
        return pages.run_page(about, label=self._labelling is not None)

    async def _compare(self, request: Request) -> Response:
        asked = request.query_params.getlist("run")[:MAX_COMPARED]
        places = [place for one in asked if (place := await self._read(self.runs.find, one)) is not None]
        if len(places) < 2 or len(places) < len(asked):
            raise HTTPException(404, "name at least two runs of this folder")
        try:
            if len(places) > 2:
                return await self._side_by_side(self._matrices.side_by_side(places))
            return pages.document_page("compare", *await self._read(self._comparisons.of, places))
        except SteelyardError as error:
            return pages.no_comparison(str(error))

    async def _matrix(self, request: Request) -> Response:
        found = await self._read(self._matrices.page_of, request.path_params["matrix"])
        if found is None:
            raise HTTPException(404, "there is no such matrix here")
        return await self._side_by_side(found)

    async def _side_by_side(self, pieces: Iterator[str]) -> Response:
        """A page as it is made, piece by piece: a run that cannot be read comes before the first."""
        first = await self._read(batch, pieces)

        async def sent() -> AsyncIterator[bytes]:
            piece = first
            while piece:
                yield piece
                piece = await self._read(batch, pieces)

        return StreamingResponse(sent(), media_type="text/html", headers=pages.side_by_side_headers())

    async def _sweep(self, request: Request) -> Response:
        found = await self._read(self._sweeps.page_of, request.path_params["sweep"])
        if found is None:
            raise HTTPException(404, "there is no such sweep here")
        return pages.document_page("sweep", *found)

    # Data

    async def _headlines(self, request: Request) -> Response:
        return _json(await self._read(self._listed), request)

    def _listed(self) -> list[ListedRun]:
        """The runs that are on no page of a matrix or a sweep."""
        inside = self._sweeps.inside()
        return [run for run in self._matrices.listed() if run.id not in inside]

    async def _matrix_headlines(self, request: Request) -> Response:
        return _json(await self._read(self._matrices.headlines), request)

    async def _sweep_headlines(self, request: Request) -> Response:
        return _json(await self._read(self._sweeps.headlines), request)

    async def _events(self, request: Request) -> Response:
        watch = self.watches.of(await self._place(request))
        if request.method == "HEAD":
            return Response(media_type="text/event-stream")
        if self.watches.readers >= _MAX_READERS:
            raise HTTPException(503, f"{_MAX_READERS} pages follow runs already", {"retry-after": "5"})
        seen = request.headers.get("last-event-id") or request.query_params.get("seen")
        return StreamingResponse(watch.events(seen), media_type="text/event-stream")

    async def _overview(self, request: Request) -> Response:
        run = await self._place(request)
        table = await self._table(run, None, figures=False)
        return _json(await self._read(self._overviews.of, run, table), request)

    async def _charts(self, request: Request) -> Response:
        table = await self._table(await self._place(request), None, figures=True)
        return _json(await self._read(charts, table.records), request)

    async def _cases(self, request: Request) -> Response:
        run, query = await self._place(request), request.query_params
        filters = [name for name in query.get("filters", "").split(",") if name]
        figures = query.get("sort") in MEASURED or not {"slow", "escalated"}.isdisjoint(filters)
        table = await self._table(run, query.get("version"), figures=figures)
        return _json(await self._read(self._page_of_cases, table, filters, query), request)

    def _page_of_cases(self, table: CaseTable, filters: list[str], query: QueryParams) -> dict[str, Any]:
        found = self._tables.search(table, query.get("search", ""))
        records = None if found is None else found.records
        chosen = table.select(filters, query.get("sort") or None, query.get("order") == "down", records)
        start, count = _whole(query.get("start", "0")), min(_whole(query.get("count", "50")), MAX_ROWS)
        whole = found is None or found.searched == len(table.records)
        return {
            "version": table.version,
            "total": len(table),
            "found": len(chosen),
            "searched": None if whole or found is None else [found.searched, len(table.records)],
            "counts": table.counts,
            "start": start,
            **table.block(chosen[start : start + count]),
        }

    async def _case(self, request: Request) -> Response:
        """One record in full: by its number in a version of the table, or by the byte at which it begins."""
        run, query = await self._place(request), request.query_params
        table = await self._table(run, query.get("version"), figures=False)
        if "record" in query:
            record, offsets = _whole(query["record"]), table.records["offset"]
            offset = int(offsets[record]) if record < len(offsets) else -1
        else:
            offset = _whole(query.get("at", ""))
        there = table.case_at(offset)
        if there is None:
            raise HTTPException(404, "no record that counts begins there")
        return _json(await self._read(self._one_case, table, *there), request)

    def _one_case(self, table: CaseTable, case: int, number: int) -> dict[str, Any]:
        record = table.record(number)
        asked = self._suites.asked(table.run, record)
        offset = int(table.records["offset"][number])
        shown = body(record, offset, asked, _MAX_TEXT_CHARS, CaseWork(table.run))
        block = table.block(np.array([case]))
        return {"version": table.version, "record": number, "body": msgspec.Raw(shown), **block}

    async def _running(self, request: Request) -> Response:
        """A case that is being worked on, as far as it has come."""
        run, query = await self._place(request), request.query_params
        case_id, trial = query.get("id", ""), _whole(query.get("trial", "0"))
        return _json(await self._read(running_case, run, case_id, trial), request)

    async def _file(self, request: Request) -> Response:
        """A file that an agent left, or a log of it."""
        run = await self._place(request)
        return await self._read(file_response, run, request.query_params.get("path", ""), self._threads)

    # What several of them need

    async def _read(self, function: Callable[..., Result], *args: Any) -> Result:
        async with self._turns:
            return await self._threads.run(function, *args)

    async def _place(self, request: Request) -> Path:
        place = await self._read(self.runs.find, request.path_params["run"])
        if place is None:
            raise HTTPException(404, "there is no such run here")
        return place

    async def _table(self, run: Path, version: str | None, *, figures: bool) -> CaseTable:
        """The cases of a run: of that version if it is at hand, with figures if they are needed."""
        known = self._tables.known(run, version, figures)
        if known is not None:
            return known
        if not figures:
            try:
                return await self._read(self._tables.from_index, run)
            except RunRefused:  # damaged: what can be read is shown all the same
                pass
        seen = stat_of(run / OUTPUTS)
        rows = await self.watches.of(run).rows()
        return await self._read(self._tables.from_rows, run, rows, seen)


def _json(value: Any, request: Request) -> Response:
    """The value as JSON; only that it is the same where the browser has it already."""
    data = msgspec.json.encode(value)
    tag = f'"{blake2b(data, digest_size=9).hexdigest()}"'
    if request.headers.get("if-none-match") == tag:
        return Response(status_code=304, headers={"etag": tag})
    return Response(data, media_type="application/json", headers={"etag": tag, "cache-control": "no-cache"})


def _whole(text: str) -> int:
    """A number that a request gives, which is never trusted to be one."""
    if not (text.isascii() and text.isdigit() and len(text) <= 18):
        raise HTTPException(400, "that is not a whole number")
    return int(text)


def _refused(request: Request, error: Exception) -> Response:  # noqa: ARG001 - starlette's signature
    """A run that cannot be shown, and why."""
    return PlainTextResponse(f"{error}\n", 409)


def _broken(request: Request, error: Exception) -> Response:
    """A bug in the server: logged where it was started, not shown on the page."""
    log.error("%s could not be answered", request.url.path, exc_info=error)
    return PlainTextResponse("internal error; see the log of the server\n", 500)


_MAX_TABLES = 8
_MAX_RECORDS = 2_000_000
"""Records in all tables together."""
_MAX_SEARCHES = 16


class _Kept(msgspec.Struct):
    table: CaseTable
    seen: object
    """What the journal's file was when the table was made: another one, or more of it, gives another table."""


class Tables:
    """Tables of cases by run and version."""

    def __init__(self) -> None:
        self._kept: list[_Kept] = []
        self._searches: OrderedDict[tuple[Path, str, tuple[str, ...]], SearchResult] = OrderedDict()

    def known(self, run: Path, version: str | None, figures: bool) -> CaseTable | None:
        """The table of that version, else the present one; None unless it was made before."""
        tables = [kept for kept in self._kept if kept.table.run == run and (kept.table.has_figures or not figures)]
        for kept in tables:
            if kept.table.version == version:
                return kept.table
        now = stat_of(run / OUTPUTS)
        return next((kept.table for kept in tables if kept.seen == now), None)

    def from_index(self, run: Path) -> CaseTable:
        """The table as the index has it, completed from the journal where it is behind; writes nothing."""
        seen = stat_of(run / OUTPUTS)
        rows = belonging_rows(run, index_rows(run)) if seen is not None else np.empty(0, dtype=ROWS)
        return self._keep(CaseTable(run, in_case_order(rows)), seen)

    def from_rows(self, run: Path, rows: Rows, seen: object) -> CaseTable:
        """The table of rows in case order that have figures; `seen` is what the journal was before they were read."""
        return self._keep(CaseTable(run, rows), seen)

    def search(self, table: CaseTable, query: str) -> SearchResult | None:
        """Which records hold these words; None when there are no words."""
        terms = terms_of(query)
        if not terms or not len(table):
            return None
        key = (table.run, table.version, terms)
        found = self._searches.pop(key, None) or search(table.run, table.records, terms)
        self._searches[key] = found
        while len(self._searches) > _MAX_SEARCHES:
            self._searches.popitem(last=False)
        return found

    def _keep(self, table: CaseTable, seen: object) -> CaseTable:
        kept = [_Kept(table, seen), *self._kept][:_MAX_TABLES]
        while len(kept) > 1 and sum(len(one.table.records) for one in kept) > _MAX_RECORDS:
            kept.pop()
        self._kept = kept
        return table
