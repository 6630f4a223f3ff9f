"""Around every request: which hosts are answered, headers that protect browsers, and counts.

A page from elsewhere can give its own name the service's address (DNS rebinding), and a browser
would then let it read the answers. The Host header still has that page's name.
"""

from __future__ import annotations

import functools
import ipaddress
import re
import time
from typing import Any

from fastapi import FastAPI
from fastapi.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .settings import Settings

HEADERS = {
    "Content-Security-Policy": (
        "default-src 'self'; object-src 'none'; base-uri 'none'; form-action 'none'; "
        "frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",  # kept, and asked for again by its ETag
}
_HEADERS = [(name.lower().encode(), value.encode()) for name, value in HEADERS.items()]
_NOSNIFF = [(b"x-content-type-options", b"nosniff")]
_CLOSE = (b"connection", b"close")
# `name`, `name:8000`, `127.0.0.1:8000`, `[::1]` or `[::1]:8000`, and nothing around it.
_HOST = re.compile(r"(?:\[([0-9a-f:.]+)\]|([a-z0-9_.-]+?)\.?)(?::[0-9]{1,5})?", re.ASCII)


class AllowedHosts:
    """Whether a Host header is localhost, the service's address or one of `allow_host`."""

    def __init__(self, settings: Settings) -> None:
        self._all = "*" in settings.allow_host
        self._names = {"localhost", settings.host.lower(), *settings.allow_host}
        self._any_address = settings.host in ("", "0.0.0.0", "::")
        self.allows = functools.lru_cache(1000)(self._allows)

    def _allows(self, header: bytes) -> bool:
        match = _HOST.fullmatch(header.decode("latin-1").lower())
        if self._all or match is None:
            return self._all
        host = match[1] or match[2]
        if match[2] and (host in self._names or host.endswith(".localhost")):
            return True
        try:
            address = ipaddress.ip_address(host)
        except ValueError:
            return False
        # An address is nobody's to rebind, so where we listen on all of them each is as good.
        return self._any_address or address.is_loopback or host in self._names


class Gate:
    """Answers 421 to other hosts, HEAD by GET; counts and times requests, and adds headers."""

    def __init__(self, app: ASGIApp, service: FastAPI) -> None:
        self._app, self._state = app, service.state
        self._allows = AllowedHosts(service.state.settings).allows
        self._counters: dict[tuple[str, int], tuple[Any, Any]] = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        if scope["method"] == "HEAD":  # the route of GET answers; servers leave its body out
            scope = {**scope, "method": "GET"}
        # What a POST is answered with is never shown as a page.
        headers = _NOSNIFF if scope["method"] == "POST" else _HEADERS
        start = time.perf_counter()
        status, state = 500, self._state
        state.accepted += 1

        async def watched(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                close = [_CLOSE] if state.draining else []
                message["headers"] = [*message["headers"], *headers, *close]
            await send(message)
            if message["type"] == "http.response.body" and not message.get("more_body"):
                state.answered += 1

        hosts = [value for name, value in scope["headers"] if name == b"host"]
        app = self._app if all(map(self._allows, hosts)) else _wrong_host  # browsers send one
        try:
            await app(scope, receive, watched)
        finally:
            # Unknown paths share one label, or a client could invent any number of them.
            path = getattr(scope.get("route"), "path", "other")
            self._count(path, status, time.perf_counter() - start)

    def _count(self, path: str, status: int, seconds: float) -> None:
        counters = self._counters.get((path, status))
        if counters is None:
            metrics = self._state.metrics
            counters = metrics.requests.labels(path, str(status)), metrics.seconds.labels(path)
            self._counters[path, status] = counters
        counters[0].inc()
        counters[1].observe(seconds)


_wrong_host = JSONResponse(
    {
        "detail": "the Host header has a name that is not this service's: to allow one, start it "
        "with --allow-host NAME"
    },
    421,
)
