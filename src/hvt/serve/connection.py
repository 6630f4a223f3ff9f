"""One HTTP connection: how much and how long a client may send, and how the connection is closed.

uvicorn's own protocol has no limit for headers, and closes connections that have bytes unread: that
resets them, and the client may lose an answer that was on its way.
"""

from __future__ import annotations

import array
import asyncio
import http
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from .settings import Settings

try:
    import fcntl
    import termios
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

KEEP_ALIVE = 75  # seconds; longer than proxies keep idle connections, or they race with us
QUIET = 2.0  # seconds without a byte after which a closed connection is given up
LAST = 0.2  # seconds for a request that was on its way when the service was told to stop


@dataclass
class Shared:
    """What the connections of one server have in common."""

    settings: Settings
    count: Callable[[int], None]
    """Called with the status of a refusal that never reaches the application."""
    stopping: float | None = None
    """When the server began to close its connections."""


class Connection(HttpToolsProtocol):
    """A connection whose headers are bounded, and which is closed without a reset.

    `check` has to be called now and then: all time limits are kept there, so that a request costs
    no timer.
    """

    def __init__(self, *args: Any, shared: Shared, **more: Any) -> None:
        super().__init__(*args, **more)
        self.shared, self.settings = shared, shared.settings
        self._since = time.monotonic()  # when it became the client's turn
        self._in_head = self._fresh = False
        self._head_size = self._head_bytes = 0
        self._refusal: tuple[int, str] | None = None
        self._ignore_input = False
        self._stuck: float | None = None

    # ── from and to the network ─────────────────────────────────────────────────────────────────

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self.line = Line(transport)
        super().connection_made(self.line)  # type: ignore[arg-type]
        if len(self.connections) > self.settings.max_connections:
            self._make_room()

    def connection_lost(self, exc: Exception | None) -> None:
        self.line.closed = self.line.closed or time.monotonic()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self.line.closed is not None:
            self.line.heard = time.monotonic()
            return
        if self._ignore_input:
            return
        super().data_received(data)
        if self._in_head:
            # Of the first piece, the beginning may belong to the request before.
            self._head_bytes += 0 if self._fresh else len(data)
            self._fresh = False
            if self._head_bytes > self.settings.max_header_bytes:
                self.refuse(431, self._too_many_bytes())

    def pause_writing(self) -> None:
        self._stuck = time.monotonic()
        super().pause_writing()

    def resume_writing(self) -> None:
        self._stuck = None
        super().resume_writing()

    # ── from the parser ─────────────────────────────────────────────────────────────────────────

    def on_message_begin(self) -> None:
        self._since = time.monotonic()
        self._in_head = self._fresh = True
        self._head_size = self._head_bytes = 0
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        self._head_size += len(url)
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._head_size += len(name) + len(value) + 4
        if self._head_size > self.settings.max_header_bytes:
            self._stop_parsing(431, self._too_many_bytes())
        if len(self.headers) >= self.settings.max_header_count:
            most = self.settings.max_header_count
            self._stop_parsing(431, f"the request has more than the {most} headers allowed")
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if self._head_size > self.settings.max_header_bytes:  # a long address without headers
            self._stop_parsing(431, self._too_many_bytes())
        self._in_head = False
        super().on_headers_complete()

    def on_response_complete(self) -> None:
        if not self._in_head:
            self._since = time.monotonic()
        super().on_response_complete()

    def _too_many_bytes(self) -> str:
        return f"the headers have more than the {self.settings.max_header_bytes} bytes allowed"

    def _stop_parsing(self, status: int, sentence: str) -> None:
        self._refusal = status, sentence
        raise ValueError(sentence)  # the parser makes `send_400_response` of it

    def send_400_response(self, msg: str) -> None:
        self.refuse(*(self._refusal or (400, "the request is not valid HTTP/1.1")))

    # ── refusals and limits ─────────────────────────────────────────────────────────────────────

    def refuse(self, status: int, sentence: str) -> None:
        """Answer a request that has not reached the application, or only in part, and close."""
        cycle = self.cycle
        if cycle is not None and not cycle.response_complete:
            if cycle.response_started or not cycle.more_body:
                # It was sent before the one that is refused, and gets its own answer.
                cycle.keep_alive = False
                self._ignore_input = True
                return
            cycle.disconnected = True  # for the application
            cycle.message_event.set()
        body = json.dumps({"detail": sentence}).encode()
        lines = [
            f"HTTP/1.1 {status} {http.HTTPStatus(status).phrase}",
            "content-type: application/json",
            f"content-length: {len(body)}",
            "connection: close",
        ]
        if status == 503:
            lines.append("retry-after: 1")
        self.line.write("\r\n".join(lines).encode() + b"\r\n\r\n" + body)
        self.line.close()
        self.shared.count(status)

    def check(self, now: float) -> None:
        """Close what has taken too long, and on the way out what has nothing more to say."""
        limits, line = self.settings, self.line
        if line.closed is not None:
            if now - line.heard > QUIET or now - line.closed > limits.timeout:
                line.abort()
        elif self._stuck is not None:
            if now - self._stuck > limits.timeout:  # answers are not being read
                line.abort()
        elif self._in_head:
            if now - self._since > limits.header_timeout:
                seconds = limits.header_timeout
                self.refuse(408, f"the headers did not come within {seconds:g} seconds")
        elif self._idle():
            stopping = self.shared.stopping
            if stopping is not None:
                if now - max(self._since, stopping) > LAST and not self._unread():
                    line.close()
            elif now - self._since > (limits.header_timeout if self.cycle is None else KEEP_ALIVE):
                line.close()

    def shutdown(self) -> None:
        """uvicorn closes idle connections here; `check` does, once nothing is on its way."""
        if not self._idle() and self.cycle is not None:
            self.cycle.keep_alive = False

    def _idle(self) -> bool:
        return not self._in_head and (self.cycle is None or self.cycle.response_complete)

    def _unread(self) -> bool:
        """Whether the kernel has bytes that the event loop has not handed over yet."""
        if fcntl is None or self.line.is_closing():
            return False
        count = array.array("i", [0])
        fcntl.ioctl(self.line.get_extra_info("socket").fileno(), termios.FIONREAD, count)
        return count[0] > 0

    def _make_room(self) -> None:
        """The connection that has waited longest for its client gives way to a new one."""
        others = [
            each for each in self.connections if isinstance(each, Connection) and each is not self
        ]
        for each in others:
            if each.line.closed is not None:  # answered, and there is no time for farewells
                each.line.abort()
        waiting = [each for each in others if each.line.closed is None and each._waits()]
        if not waiting:
            most = self.settings.max_connections
            self.refuse(503, f"all of the {most} connections allowed are busy: try again")
            return
        oldest = min(waiting, key=lambda each: each._since)
        if oldest._idle():
            oldest.line.abort()
        else:
            oldest.refuse(408, "the request did not come in time, and others need its connection")

    def _waits(self) -> bool:
        """Whether it is the client's turn: to ask, or to send the rest of what it began."""
        return self._idle() or self._in_head or self.cycle.more_body


class Line:
    """A transport that is closed so that the client reads all it was sent.

    The sending half is closed at once. What still comes is thrown away until the client closes its
    half or time is over: bytes left unread would reset the connection.
    """

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self.closed: float | None = None
        self.heard = 0.0
        # Bound once: requests are many.
        self.write: Callable[[bytes], None] = transport.write
        self.get_extra_info = transport.get_extra_info
        self.pause_reading = transport.pause_reading
        self.resume_reading = transport.resume_reading
        self.abort = transport.abort

    def is_closing(self) -> bool:
        return self.closed is not None or self._transport.is_closing()

    def close(self) -> None:
        if self.is_closing():
            return
        self.closed = self.heard = time.monotonic()
        self.write = lambda data: None
        self.pause_reading = lambda: None
        self._transport.write_eof()
        self.resume_reading()
