"""The pictures of a request's body: raw or multipart, in memory only, never above the limit."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import NamedTuple

import anyio
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header
from starlette.requests import ClientDisconnect, Request

from .batcher import Ticket
from .refusals import Busy, Refusal, TooLarge, Unusable, WrongType
from .settings import Settings

FIELD = "pictures"
# What a client sends that does not know the type: the last is what `curl --data-binary` says.
UNTYPED = (b"", b"application/octet-stream", b"application/x-www-form-urlencoded")
LINGER = 1.0  # seconds for a client to finish sending what is refused already


class Upload(NamedTuple):
    """One picture as it was sent, by its file's name where it has one."""

    name: str | None
    content: bytes


async def receive_pictures(request: Request, settings: Settings, ticket: Ticket) -> list[Upload]:
    """The pictures of a request; what exceeds a limit is refused as soon as that is known."""
    try:
        ticket.take(pictures=1)
    except Busy:
        await refuse(request, settings)
        raise
    kind, options = parse_options_header(request.headers.get("content-type"))
    multipart = kind == b"multipart/form-data"
    if not multipart and not (kind in UNTYPED or kind.startswith(b"image/")):
        await refuse(request, settings)
        raise WrongType(
            "the body's type is not understood: send a picture as image/* or "
            f"application/octet-stream, or several as multipart/form-data in the field {FIELD!r}"
        )
    body = await read_body(request, settings, ticket)
    if not multipart:
        return [Upload(None, body)]
    boundary = options.get(b"boundary", b"")
    if not 1 <= len(boundary) <= 70:
        raise Unusable("the multipart body's type names no boundary of 1 to 70 characters")
    uploads = _parts(body, boundary, settings.max_pictures)
    ticket.take(pictures=len(uploads) - 1)
    return uploads


async def read_body(request: Request, settings: Settings, ticket: Ticket) -> bytes:
    """The whole body, cut off where it passes the limit, with or without a Content-Length."""
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > settings.max_body:
        await refuse(request, settings)
        raise TooLarge(f"the body has {declared} bytes, more than the {settings.max_body} allowed")
    chunks: list[bytes] = []
    size = 0
    async for chunk in request.stream():
        size += len(chunk)
        try:
            if size > settings.max_body:
                raise TooLarge(f"the body has more than the {settings.max_body} bytes allowed")
            ticket.take(size=len(chunk))
        except Refusal:
            chunks.clear()
            await refuse(request, settings)
            raise
        chunks.append(chunk)
    return chunks[0] if len(chunks) == 1 else b"".join(chunks)


async def refuse(request: Request, settings: Settings) -> None:
    """Read on for a moment without keeping anything, so that the client gets to the answer.

    A connection that is closed with bytes unread is reset, and the answer may be lost with it.
    """
    request.state.unread = True
    left = settings.max_body
    receive: Callable[[], Awaitable[dict]] = request.receive  # type: ignore[assignment]
    if "100-continue" in request.headers.get("expect", "").lower():
        return  # it has sent nothing yet, and now will not
    with anyio.move_on_after(LINGER):
        while left > 0:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise ClientDisconnect
            left -= len(message.get("body", b""))
            if not message.get("more_body"):
                request.state.unread = False
                return


def _parts(body: bytes, boundary: bytes, most: int) -> list[Upload]:
    """The files of a multipart body; python-multipart finds the borders, nothing touches a disk."""
    found: list[Upload] = []
    headers: dict[bytes, bytes] = {}
    name, value = bytearray(), bytearray()
    pieces: list[bytes] = []
    closed: list[bool] = []

    def begin() -> None:
        if len(found) == most:
            raise TooLarge(f"the request has more than the {most} pictures allowed")
        headers.clear()
        pieces.clear()

    def header_end() -> None:
        headers[bytes(name).lower()] = bytes(value)
        name.clear()
        value.clear()

    def end() -> None:
        disposition, options = parse_options_header(headers.get(b"content-disposition"))
        field = options.get(b"name", b"").decode(errors="replace")
        if disposition != b"form-data" or field != FIELD:
            raise Unusable(f"unknown field {field!r}: pictures come in the field {FIELD!r}")
        file = options.get(b"filename")
        content = pieces[0] if len(pieces) == 1 else b"".join(pieces)
        found.append(Upload(None if file is None else file.decode(errors="replace"), content))

    parser = MultipartParser(
        boundary,
        {
            "on_part_begin": begin,
            "on_header_field": lambda data, start, stop: name.extend(data[start:stop]),
            "on_header_value": lambda data, start, stop: value.extend(data[start:stop]),
            "on_header_end": header_end,
            "on_part_data": lambda data, start, stop: pieces.append(data[start:stop]),
            "on_part_end": end,
            "on_end": lambda: closed.append(True),
        },
    )
    try:
        parser.write(body)
        parser.finalize()
    except FormParserError as error:
        raise Unusable(f"the multipart body is damaged: {error}") from error
    if not closed:
        raise Unusable("the multipart body is cut short: its last boundary is missing")
    if not found:
        raise Unusable(f"the request has no picture: send some in the field {FIELD!r}")
    return found
