"""The names by which a service may be called.

A page from elsewhere can give its own name the service's address (DNS rebinding), and a browser
would then let it read the answers. The Host header still has that page's name.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable

from .refusals import RequestError, WrongHost
from .settings import Settings

REMEMBERED = 1000  # Host headers that were allowed, so that each is read once


class Hosts:
    """Refuses requests to names other than localhost, the service's address and `allow_host`."""

    def __init__(self, settings: Settings) -> None:
        self._all = "*" in settings.allow_host
        self._names = {"localhost", settings.host.lower(), *settings.allow_host}
        self._any_address = settings.host in ("", "0.0.0.0", "::")
        self._allowed: set[bytes] = set()

    def check(self, headers: Iterable[tuple[bytes, bytes]], http_version: str) -> None:
        """Raise a `RequestError` for what is not called by a name of the service."""
        hosts = [value for name, value in headers if name == b"host"]
        if len(hosts) == 1 and hosts[0] in self._allowed:  # nearly always
            return
        if len(hosts) > 1 or (not hosts and http_version == "1.1"):
            raise RequestError("the request must have one Host header")
        if self._all or not hosts:  # browsers always send one
            return
        text = hosts[0].decode("latin-1")
        host = _without_port(text)
        if not self._is_ours(host):
            raise WrongHost(
                f"this service is not called {host[:255]!r}: "
                f"to allow a name, start it with --allow-host NAME"
            )
        if len(self._allowed) < REMEMBERED:
            self._allowed.add(hosts[0])

    def _is_ours(self, host: str) -> bool:
        if host in self._names or host.endswith(".localhost"):
            return True
        try:
            address = ipaddress.ip_address(host)
        except ValueError:
            return False
        # An address is nobody's to rebind, so where we listen on all of them each is as good.
        return self._any_address or address.is_loopback


def _without_port(text: str) -> str:
    """`name`, `name:8000`, `[::1]` or `[::1]:8000` as a name or an address alone."""
    text = text.strip().lower()
    if text.startswith("["):
        return text[1:].partition("]")[0]
    return text.partition(":")[0].removesuffix(".")
