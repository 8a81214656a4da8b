"""A server that announces keep-alive and closes its connections all the same, in threads, as llama.cpp's does."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from dataclasses import dataclass
from typing import Any, Literal

Ending = Literal["close", "half", "never", "unanswered"]

CHAT = [
    {"choices": [{"index": 0, "delta": {"role": "assistant", "content": "Par"}}]},
    {"choices": [{"index": 0, "delta": {"content": "is"}, "finish_reason": "stop"}]},
    {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 2}},
]
RESPONSE = {
    "status": "completed",
    "output": [{"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Paris"}]}],
    "usage": {"input_tokens": 3, "output_tokens": 2},
}
MESSAGE = {
    "content": [{"type": "text", "text": "Paris"}],
    "stop_reason": "end_turn",
    "usage": {"input_tokens": 3, "output_tokens": 2},
}
STREAMS: dict[str, list[dict[str, Any]]] = {
    "/chat/completions": CHAT,
    "/responses": [
        {"type": "response.output_text.delta", "output_index": 0, "delta": "Paris"},
        {"type": "response.completed", "response": RESPONSE},
    ],
    "/messages": [
        {"type": "message_start", "message": {"content": [], "usage": {"input_tokens": 3, "output_tokens": 1}}},
        {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "Paris"}},
        {"type": "message_delta", "delta": {"stop_reason": "end_turn"}, "usage": {"output_tokens": 2}},
        {"type": "message_stop"},
    ],
}
WHOLES: dict[str, dict[str, Any]] = {
    "/chat/completions": {
        "choices": [{"index": 0, "message": {"role": "assistant", "content": "Paris"}, "finish_reason": "stop"}],
        "usage": {"prompt_tokens": 3, "completion_tokens": 2},
    },
    "/responses": RESPONSE,
    "/messages": MESSAGE,
}


@dataclass
class ClosingServer:
    """Ends a connection after `served` requests on it, `delay` seconds later, or when it was idle for `idle` seconds.

    `unanswered` reads the next request, and closes without a byte: it has acted. `read` counts the requests.
    """

    ending: Ending = "close"
    served: int = 1
    delay: float = 0.0
    idle: float | None = None
    read: int = 0
    connections: int = 0

    def __enter__(self) -> ClosingServer:
        self._lock = threading.Lock()
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=512)
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}/v1"
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            with self._lock:
                self.connections += 1
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError):
            number = 0
            while True:
                connection.settimeout(self.idle if number else None)
                request = self._request(connection)
                if request is None:
                    return
                with self._lock:
                    self.read += 1
                if self.ending == "unanswered" and number == self.served:
                    return
                connection.sendall(_answer(request))
                number += 1
                if number == self.served and self.ending in ("close", "half"):
                    break
            if self.delay:
                time.sleep(self.delay)
            if self.ending == "half":
                connection.shutdown(socket.SHUT_WR)
                connection.settimeout(5)
                while connection.recv(65536):  # whatever still comes is never looked at
                    pass

    def _request(self, connection: socket.socket) -> tuple[str, dict[str, Any]] | None:
        data = b""
        while b"\r\n\r\n" not in data:
            piece = connection.recv(65536)
            if not piece:
                return None
            data += piece
        head, _, body = data.partition(b"\r\n\r\n")
        length = next(int(line[15:]) for line in head.split(b"\r\n") if line.lower().startswith(b"content-length:"))
        while len(body) < length:
            body += connection.recv(65536)
        path = head.split(b" ", 2)[1].decode().partition("/v1")[2]
        return path, json.loads(body)


def _answer(request: tuple[str, dict[str, Any]]) -> bytes:
    path, body = request
    if not body["stream"]:
        data = json.dumps(WHOLES[path]).encode()
        return b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%b" % (len(data), data)
    head = b"HTTP/1.1 200 OK\r\nKeep-Alive: timeout=5, max=100\r\nContent-Type: text/event-stream\r\n"
    events = [f"data: {json.dumps(event)}\n\n".encode() for event in STREAMS[path]] + [b"data: [DONE]\n\n"]
    chunks = b"".join(b"%x\r\n%b\r\n" % (len(event), event) for event in events)
    return head + b"Transfer-Encoding: chunked\r\n\r\n" + chunks + b"0\r\n\r\n"
