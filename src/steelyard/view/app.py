"""What is served: pages, and the data that they ask for. Everything that takes time is done in threads."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from hashlib import blake2b
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import numpy as np
from starlette.applications import Starlette
from starlette.datastructures import QueryParams
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import PlainTextResponse, RedirectResponse, Response, StreamingResponse
from starlette.routing import Route

from steelyard.errors import RunRefused, SteelyardError
from steelyard.journal.files import OUTPUTS
from steelyard.report.page_data import body
from steelyard.threads import DaemonThreads
from steelyard.view import pages
from steelyard.view.cases import MEASURED, MOST_ROWS, CaseTable
from steelyard.view.comparisons import MOST_COMPARED, Comparisons
from steelyard.view.figures import charts
from steelyard.view.live import Watches
from steelyard.view.overview import Overviews, Suites
from steelyard.view.runs import Runs, stat_of
from steelyard.view.sweeps import Sweeps
from steelyard.view.tables import Tables

_AT_ONCE = 4
"""Requests that read files at the same time; the others wait their turn."""
_MOST_READERS = 64
_LONGEST_TEXT = 50_000
"""Characters of one text that a page is given."""

Result = TypeVar("Result")

log = logging.getLogger("steelyard")


class View:
    """The application: the runs of one folder, and the suites that may be read beside them."""

    def __init__(self, runs: Runs, suites: Suites) -> None:
        self.runs = runs
        self._suites = suites
        self._overviews = Overviews(suites)
        self._threads = DaemonThreads()
        self._turns = asyncio.Semaphore(_AT_ONCE)
        self._tables = Tables()
        self._comparisons = Comparisons()
        self._sweeps = Sweeps(runs)
        self.watches = Watches(self._threads)
        routes = {
            "/": self._list,
            "/run/{run}": self._run,
            "/compare": self._compare,
            "/sweep/{sweep}": self._sweep,
            "/api/runs": self._headlines,
            "/api/sweeps": self._sweep_headlines,
            "/api/runs/{run}/events": self._events,
            "/api/runs/{run}/overview": self._overview,
            "/api/runs/{run}/charts": self._charts,
            "/api/runs/{run}/cases": self._cases,
            "/api/runs/{run}/case": self._case,
        }
        self.app = Starlette(
            routes=[Route(path, handler) for path, handler in routes.items()],
            exception_handlers={SteelyardError: _refused, OSError: _refused, Exception: _broken},
        )

    # Pages

    async def _list(self, request: Request) -> Response:  # noqa: ARG002 - starlette's signature
        if self.runs.is_run:
            return RedirectResponse(f"/run/{self.runs.id_of(self.runs.root)}", 307)
        return pages.list_page({"folder": str(self.runs.root)})

    async def _run(self, request: Request) -> Response:
        place = await self._place(request)
        about = {"id": request.path_params["run"], "name": self.runs.name_of(place), "run": str(place)}
        return pages.run_page(about)

    async def _compare(self, request: Request) -> Response:
        asked = request.query_params.getlist("run")[:MOST_COMPARED]
        places = [place for one in asked if (place := await self._read(self.runs.find, one)) is not None]
        if len(places) < 2 or len(places) < len(asked):
            raise HTTPException(404, "name at least two runs of this folder")
        try:
            return pages.document_page("compare", *await self._read(self._comparisons.of, places))
        except SteelyardError as error:
            return pages.no_comparison(str(error))

    async def _sweep(self, request: Request) -> Response:
        found = await self._read(self._sweeps.page_of, request.path_params["sweep"])
        if found is None:
            raise HTTPException(404, "there is no such sweep here")
        return pages.document_page("sweep", *found)

    # Data

    async def _headlines(self, request: Request) -> Response:
        return _json(await self._read(self.runs.headlines), request)

    async def _sweep_headlines(self, request: Request) -> Response:
        return _json(await self._read(self._sweeps.headlines), request)

    async def _events(self, request: Request) -> Response:
        watch = self.watches.of(await self._place(request))
        if request.method == "HEAD":
            return Response(media_type="text/event-stream")
        if self.watches.readers >= _MOST_READERS:
            raise HTTPException(503, f"{_MOST_READERS} pages are being told of runs already", {"retry-after": "5"})
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
        start, count = _whole(query.get("start", "0")), min(_whole(query.get("count", "50")), MOST_ROWS)
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
        shown = body(record, int(table.records["offset"][number]), asked, _LONGEST_TEXT)
        block = table.block(np.array([case]))
        return {"version": table.version, "record": number, "body": msgspec.Raw(shown), **block}

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
    """A fault of our own: told where the server was started, not to the page."""
    log.error("%s could not be answered", request.url.path, exc_info=error)
    return PlainTextResponse("this could not be answered; the server says why\n", 500)
