"""A server that does next to nothing, so that what is measured is the client.

Answers every POST with a short JSON body, or, at `/stream`, with chunks that carry the moment of their own sending
(`time.perf_counter()`, one clock for all processes of a machine). Prints its port once it listens.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from typing import Any

HEAD = b"HTTP/1.1 200 OK\r\nServer: lean\r\nContent-Type: application/json\r\nx-request-id: request-1\r\n"
ANSWER = b'{"id":"a","choices":[{"message":{"role":"assistant","content":"Paris"}}],"received":%.7f}'
CHUNK = b'data: {"choices":[{"delta":{"content":"word "}}],"late":%.7f,"sent":%.7f}\n\n'


class LeanProtocol(asyncio.Protocol):
    """One connection. Writes past the loop's buffers, so that a chunk leaves when it says it does."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.loop = asyncio.get_running_loop()
        self.descriptor = transport.get_extra_info("socket").fileno()
        self.pending = b""
        self.timer: asyncio.Handle | None = None

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - asyncio's own signature
        if self.timer is not None:
            self.timer.cancel()

    def data_received(self, data: bytes) -> None:
        received = time.perf_counter()
        self.pending += data
        head, blank, rest = self.pending.partition(b"\r\n\r\n")
        length = int(head.lower().partition(b"content-length:")[2].partition(b"\r")[0] or 0)
        if not blank or len(rest) < length:
            return
        self.pending = rest[length:]
        if head.startswith(b"POST /stream"):
            self.stream(json.loads(rest[:length]), received)
        else:
            body = ANSWER % received
            os.write(self.descriptor, b"%bContent-Length: %d\r\n\r\n%b" % (HEAD, len(body), body))

    def stream(self, wanted: dict[str, Any], received: float) -> None:
        """Send a number of chunks, the first after a while and the others at an even pace from there."""
        os.write(self.descriptor, HEAD + b"Transfer-Encoding: chunked\r\n\r\n")
        self.left, self.gap, self.due = wanted["chunks"], wanted["gap"], received + wanted["first"]
        self.wait()

    def wait(self) -> None:
        self.timer = self.loop.call_later(self.due - time.perf_counter(), self.send_chunk)

    def send_chunk(self) -> None:
        sent = time.perf_counter()
        chunk = CHUNK % (sent - self.due, sent)
        self.left -= 1
        os.write(self.descriptor, b"%x\r\n%b\r\n%b" % (len(chunk), chunk, b"" if self.left else b"0\r\n\r\n"))
        self.due += self.gap
        if self.left:
            self.wait()


async def serve() -> None:
    server = await asyncio.get_running_loop().create_server(LeanProtocol, "127.0.0.1", 0, backlog=2048)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    import uvloop

    uvloop.run(serve())
