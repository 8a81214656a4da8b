"""A mock on a free port, in a thread of this process or in a process of its own, and raw requests to it."""

from __future__ import annotations

import asyncio
import json
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from steelyard.mock import MockOptions, MockServer

STEELYARD = Path(sys.executable).with_name("steelyard")
_LAST = b"GET /health HTTP/1.1\r\nconnection: close\r\n\r\n"
_LAST_REPLY = b'{"status":"ok"}'


class Mock:
    """Where a mock is, and what it says it received."""

    def __init__(self, base_url: str) -> None:
        self.base_url = base_url
        """What an OpenAI client takes; an Anthropic client takes `url`."""
        self.url = base_url.removesuffix("/v1")
        place = urlsplit(base_url)
        self.address = (place.hostname or "", place.port or 0)

    def stats(self, *, times: bool = False) -> dict[str, Any]:
        return json.loads(self.get("/stats?times=1" if times else "/stats"))

    def reset(self) -> None:
        self.send(request("/stats/reset", b""))

    def get(self, path: str) -> bytes:
        return self.send(f"GET {path} HTTP/1.0\r\n\r\n".encode()).partition(b"\r\n\r\n")[2]

    def send(self, data: bytes) -> bytes:
        """All that comes back on a connection of its own, until the mock closes it."""
        with self.line() as line:
            line.sendall(data + _LAST)
            reply = read_all(line)
        return reply.rpartition(b"HTTP/1.1 200 OK\r\n")[0] if reply.endswith(_LAST_REPLY) else reply

    def line(self) -> socket.socket:
        return socket.create_connection(self.address, timeout=10)

    def chat(self, prompt: str = "hello", headers: str = "", **more: Any) -> tuple[int, bytes]:
        """The status and the body's bytes of one chat request."""
        reply = self.send(chat_request(prompt, headers, **more))
        head, _, body = reply.partition(b"\r\n\r\n")
        return (int(head.split()[1]) if head else 0), body


def request(path: str, body: bytes, headers: str = "") -> bytes:
    return f"POST {path} HTTP/1.1\r\nhost: mock\r\n{headers}content-length: {len(body)}\r\n\r\n".encode() + body


def chat_request(prompt: str = "hello", headers: str = "", **more: Any) -> bytes:
    messages = [{"role": "user", "content": prompt}]
    body = json.dumps({"model": "m", "messages": messages, **more}).encode()
    return request("/v1/chat/completions", body, headers)


def read_all(line: socket.socket) -> bytes:
    """What comes until the other side closes, in good order or not."""
    pieces = []
    try:
        while piece := line.recv(65_536):
            pieces.append(piece)
    except ConnectionResetError:
        pass
    return b"".join(pieces)


def read_until(line: socket.socket, ending: bytes) -> bytes:
    data = b""
    while not data.endswith(ending):
        piece = line.recv(65_536)
        assert piece, f"closed after {data!r}"
        data += piece
    return data


@contextmanager
def running_mock(**options: Any) -> Iterator[Mock]:
    """A mock with these options, in a thread, for as long as the block lasts."""
    started: list[str] = []
    ready = threading.Event()
    loop = asyncio.new_event_loop()
    stop = asyncio.Event()

    async def serve() -> None:
        async with MockServer(MockOptions(**options)) as server:
            started.append(server.base_url)
            ready.set()
            await stop.wait()

    thread = threading.Thread(target=lambda: loop.run_until_complete(serve()), daemon=True)
    thread.start()
    assert ready.wait(10)
    try:
        yield Mock(started[0])
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(10)
        loop.close()


@contextmanager
def mock_process(*flags: str) -> Iterator[tuple[Mock, subprocess.Popen[str]]]:
    """`steelyard mock` with these flags, ended with SIGTERM."""
    command = [str(STEELYARD), "mock", *flags]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield Mock(process.stdout.readline().strip()), process
        finally:
            if process.poll() is None:
                process.terminate()
                process.wait(10)
