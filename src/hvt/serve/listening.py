"""The socket of a service: where it listens, and how it comes to hear nobody any more."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import socket
import struct
import sys

from ..errors import HVTError
from .settings import Settings

BACKLOG = 2048  # connections that wait to be accepted
SO_ATTACH_FILTER = 26  # Linux's number; Python does not name it


def bind(settings: Settings) -> socket.socket:
    """A socket at the address of the settings, on which nobody is heard yet."""
    where = f"{settings.host}:{settings.port}"
    try:
        kind = socket.SOCK_STREAM
        addresses = socket.getaddrinfo(
            settings.host, settings.port, type=kind, flags=socket.AI_PASSIVE
        )
    except socket.gaierror as error:
        raise HVTError(f"cannot listen on {where}: there is no such address here") from error
    family, *_, address = addresses[0]
    sock = socket.socket(family, kind)
    try:
        if os.name != "nt":  # there it would let two programs share a port
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
    except OSError as error:
        sock.close()
        raise _unheard(where, error) from error
    return sock


def listen(sock: socket.socket, settings: Settings) -> None:
    """Let connections come, once there is a model to answer them."""
    try:
        sock.listen(BACKLOG)
    except OSError as error:  # another program has bound the same port and was quicker
        raise _unheard(f"{settings.host}:{settings.port}", error) from error


def _unheard(where: str, error: OSError) -> HVTError:
    if error.errno == errno.EADDRINUSE:
        reason = "another program does already: stop it, or choose another --port"
    elif error.errno == errno.EACCES:
        reason = "this user may not: choose a --port above 1023"
    elif error.errno == errno.EADDRNOTAVAIL:
        reason = "this machine has no such address"
    else:
        reason = error.strerror or str(error)
    return HVTError(f"cannot listen on {where}: {reason}")


def announce(name: str, sock: socket.socket, settings: Settings) -> None:
    """Say where to find what, on standard output for whoever chose port 0."""
    host, port = sock.getsockname()[:2]
    shown = f"[{host}]" if ":" in host else host
    notes = [f"{settings.workers} workers"] if settings.workers > 1 else []
    if not settings.allow_host and host in ("0.0.0.0", "::"):
        notes.append("called by its address only: --allow-host NAME allows a name")
    notes.append("Ctrl-C stops")
    print(f"serving {name} at http://{shown}:{port} ({', '.join(notes)})", flush=True)


def refuse_connections(sock: socket.socket) -> None:
    """Let no further connection begin on a listening socket, while handshakes under way go on.

    Between the last accept and the close a connection could slip in and be reset. Linux can drop
    the SYN packets that open one; the client repeats them after a second and then finds nobody.
    """
    if sys.platform != "linux":
        return
    program = (
        (0x30, 0, 0, 13),  # load the flags of the TCP header
        (0x45, 0, 1, 0x02),  # if SYN is set, go on; else skip one
        (0x06, 0, 0, 0),  # drop
        (0x06, 0, 0, 0xFFFFFFFF),  # keep
    )
    code = b"".join(struct.pack("HBBI", *line) for line in program)
    buffer = ctypes.create_string_buffer(code)
    filter = struct.pack("HP", len(program), ctypes.addressof(buffer))
    with contextlib.suppress(OSError):  # where the kernel does not let us, the gap stays
        sock.setsockopt(socket.SOL_SOCKET, SO_ATTACH_FILTER, filter)


def allow_files(count: int) -> None:
    """Ask for as many open files as there may be connections, as far as the system allows."""
    try:
        import resource
    except ImportError:  # Windows has no such limit
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < count:
        wanted = count if hard == resource.RLIM_INFINITY else min(count, hard)
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
