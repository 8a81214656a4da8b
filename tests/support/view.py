"""A view of a folder, served from a thread; requests to it byte by byte; and a run that goes on one word at a time."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from steelyard.view.live import Follower
from steelyard.view.server import ViewServer

_STEPS = """
import sys
from steelyard import EvalCase, EvalSet, Runner

def answer(case):
    word = sys.stdin.readline().strip()
    if word == "error":
        raise ValueError("told to")
    return case.expected if word == "right" else "something else"

cases = [EvalCase(id=f"c{i}", prompt=f"What is {i}?", expected=str(i)) for i in range(int(sys.argv[2]))]
runner = Runner(answer, EvalSet("steps", cases), ["exact"], parallelism=1, retries=0, output_path=sys.argv[1],
    progress="off")
runner.run_sync(low_memory=True, force="force" in sys.argv)
"""


@dataclass
class Reply:
    """What came back."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        assert self.status == 200, (self.status, self.body)
        return json.loads(self.body)


@dataclass
class Events:
    """A stream of server-sent events on a connection of its own."""

    line: socket.socket
    left: bytes = b""
    last_id: str = ""

    def next(self, timeout: float = 20) -> Any:
        """What the next event says."""
        self.line.settimeout(timeout)
        while True:
            block, found, rest = self.left.partition(b"\n\n")
            if not found:
                piece = self.line.recv(65_536)
                assert piece, "the stream has ended"
                self.left += piece.replace(b"\r\n", b"\n") if not self.left else piece
                continue
            self.left = rest
            fields = dict(line.split(b": ", 1) for line in block.split(b"\n") if b": " in line)
            if b"data" in fields:
                self.last_id = fields[b"id"].decode()
                return json.loads(fields[b"data"])

    def until(self, true: Any) -> Any:
        """The first event of which that is true."""
        while not true(event := self.next()):
            pass
        return event


@dataclass
class Served:
    """A server under test."""

    port: int
    folder: Path
    address: str = ""
    """What the server prints: with its token, where it asks for one."""
    open: list[socket.socket] = field(default_factory=list)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def get(self, path: str, method: str = "GET", **headers: str) -> Reply:
        """One request; a header's name is written with underscores."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=20)
        try:
            sent = {name.replace("_", "-"): value for name, value in headers.items()}
            connection.request(method, path, headers=sent)
            reply = connection.getresponse()
            return Reply(reply.status, {name.lower(): value for name, value in reply.getheaders()}, reply.read())
        finally:
            connection.close()

    def raw(self, target: bytes) -> bytes:
        """The whole answer to a request for a target that no client would send."""
        with socket.create_connection(("127.0.0.1", self.port), timeout=20) as line:
            head = b"GET %b HTTP/1.1\r\nhost: 127.0.0.1:%d\r\nconnection: close\r\n\r\n" % (target, self.port)
            line.sendall(head)
            return b"".join(iter(lambda: line.recv(65_536), b""))

    def events(self, run: str, seen: str = "") -> Events:
        line = socket.create_connection(("127.0.0.1", self.port), timeout=20)
        self.open.append(line)
        last = f"last-event-id: {seen}\r\n" if seen else ""
        # HTTP/1.0: the stream comes as it is, not in chunks.
        line.sendall(f"GET /api/runs/{run}/events HTTP/1.0\r\nhost: 127.0.0.1:{self.port}\r\n{last}\r\n".encode())
        head = b""
        while b"\r\n\r\n" not in head:
            head += line.recv(65_536)
        head, _, rest = head.partition(b"\r\n\r\n")
        assert head.split()[1] == b"200", head
        return Events(line, rest)

    def ids(self) -> dict[str, str]:
        """The ids of the runs, by their names."""
        return {run["name"]: run["id"] for run in self.get("/api/runs").json}


def read_all(follower: Follower) -> Follower:
    """The follower, once it has read all there is."""
    while not follower.advance():
        pass
    return follower


@contextlib.contextmanager
def served(folder: Path, port: int = 0, labeller: str | None = None) -> Iterator[Served]:
    """A view of the folder, for as long as the block lasts."""
    ready, loop, stop = threading.Event(), asyncio.new_event_loop(), asyncio.Event()
    started: list[Served] = []

    async def serve() -> None:
        async with ViewServer(folder, port=port, labeller=labeller) as server:
            started.append(Served(server.port, folder, server.url))
            ready.set()
            await stop.wait()

    thread = threading.Thread(target=lambda: loop.run_until_complete(serve()), daemon=True)
    thread.start()
    assert ready.wait(10)
    try:
        yield started[0]
    finally:
        for line in started[0].open:
            line.close()
        loop.call_soon_threadsafe(stop.set)
        thread.join(10)
        assert not thread.is_alive()
        loop.close()


class SteppedRun:
    """A real run in a process of its own, which answers one case for each word that it is told."""

    def __init__(self, place: Path, cases: int, *more: str) -> None:
        command = [sys.executable, "-c", _STEPS, str(place), str(cases), *more]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, text=True)

    def tell(self, *words: str) -> None:
        """Answer one more case for each word: `right`, `wrong` or `error`."""
        assert self.process.stdin is not None
        self.process.stdin.write("".join(f"{word}\n" for word in words))
        self.process.stdin.flush()

    def __enter__(self) -> SteppedRun:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.communicate(timeout=30)
