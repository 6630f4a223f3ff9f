"""Around every request: which hosts are answered, headers that protect browsers, and counts.

A page from elsewhere can give its own name the service's address (DNS rebinding), and a browser
would then let it read the answers. The Host header still has that page's name.
"""

from __future__ import annotations

import functools
import ipaddress
import re
import time
from collections.abc import Callable

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


def host_check(settings: Settings) -> Callable[[bytes], bool]:
    """Whether a Host header is localhost, the service's address or one of `allow_host`."""
    names = {"localhost", settings.host.lower(), *map(str.lower, settings.allow_host)}
    any_address = settings.host in ("", "0.0.0.0", "::")

    @functools.lru_cache(1000)
    def allows(header: bytes) -> bool:
        match = _HOST.fullmatch(header.decode("latin-1").lower())
        if "*" in names or match is None:
            return "*" in names
        host = match[1] or match[2]
        if match[2] and (host in names or host.endswith(".localhost")):
            return True
        try:
            address = ipaddress.ip_address(host)
        except ValueError:
            return False
        # An address is nobody's to rebind, so where we listen on all of them each is as good.
        return any_address or address.is_loopback or host in names

    return allows


class Gate:
    """Answers 421 to other hosts, HEAD by GET; counts and times requests, and adds headers."""

    def __init__(self, app: ASGIApp, service: FastAPI) -> None:
        self._app, self._state = app, service.state
        self._allows = host_check(service.state.settings)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        if scope["method"] == "HEAD":  # the route of GET answers; servers leave its body out
            scope = {**scope, "method": "GET"}
        # What a POST is answered with is never shown as a page.
        headers = _NOSNIFF if scope["method"] == "POST" else _HEADERS
        start, status, state = time.perf_counter(), 500, self._state

        async def watched(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                close = [_CLOSE] if state.draining else []
                message["headers"] = [*message["headers"], *headers, *close]
            await send(message)

        hosts = [value for name, value in scope["headers"] if name == b"host"]
        app = self._app if all(map(self._allows, hosts)) else _wrong_host  # browsers send one
        try:
            await app(scope, receive, watched)
        finally:
            # Unknown paths share one label, or a client could invent any number of them.
            path = getattr(scope.get("route"), "path", "other")
            state.metrics.requests.labels(path, status).inc()
            state.metrics.seconds.labels(path).observe(time.perf_counter() - start)


_wrong_host = JSONResponse(
    {
        "detail": "the name in the Host header is not allowed: start the service with "
        "--allow-host NAME"
    },
    421,
)
