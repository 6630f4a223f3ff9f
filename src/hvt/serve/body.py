"""The images of a request's body: raw or multipart, in memory only, never above the limit."""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import NamedTuple, TypeVar

import anyio
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header
from starlette.requests import ClientDisconnect, Request

from .admission import Admission
from .refusals import SlowBody, TooLarge, TooSlow, UnprocessableImage, WrongType
from .settings import Settings

FIELD = "images"
SMALL = 65_536  # bytes up to which a thread would cost more than it saves
# What a client sends that does not know the type: the last is what `curl --data-binary` says.
UNTYPED = (b"", b"application/octet-stream", b"application/x-www-form-urlencoded")
Result = TypeVar("Result")


class Upload(NamedTuple):
    """One image as it was sent, by its file's name where it has one."""

    name: str | None
    content: bytes


Predict = Callable[[list[Upload]], Awaitable[Result]]


async def answer_images(request: Request, predict: Predict[Result]) -> tuple[list[Upload], Result]:
    """The images of a request and what `predict` makes of them, within the service's limits."""
    state = request.app.state
    seconds = state.settings.timeout
    with Admission(state.admission_control) as admission:
        try:
            async with _within(seconds):
                uploads = await receive_images(request, state.settings, admission)
                return uploads, await predict(uploads)
        except TimeoutError as error:
            if admission.complete:
                raise TooSlow(f"there was no answer within {seconds:g} seconds") from error
            raise SlowBody(f"the body did not arrive within {seconds:g} seconds") from error
        finally:
            if not admission.complete:  # what is still to come must not be taken for a request
                request.state.unread = True


async def receive_images(
    request: Request, settings: Settings, admission: Admission
) -> list[Upload]:
    """The images of a request; what exceeds a limit is refused as soon as that is known.

    Their places in the queue are taken once all of the body is here.
    """
    admission.check(images=1)
    # Each header once, as HTTP wants these; Starlette's own look-up takes longer.
    headers = dict(request.scope["headers"])
    kind, options = parse_options_header(headers.get(b"content-type"))
    multipart = kind == b"multipart/form-data"
    if not multipart and not (kind in UNTYPED or kind.startswith(b"image/")):
        raise WrongType(
            "the body's type is not understood: send an image as image/* or "
            f"application/octet-stream, or several as multipart/form-data in the field {FIELD!r}"
        )
    body = await read_body(request, headers.get(b"content-length", b""), settings, admission)
    admission.acquire(images=1)
    if not multipart:
        return [Upload(None, body)]
    boundary = options.get(b"boundary", b"")
    if not 1 <= len(boundary) <= 70:
        raise UnprocessableImage(
            "the multipart body's type does not name a boundary of 1 to 70 characters"
        )
    if len(body) <= SMALL:
        uploads = _parts(body, boundary, settings.max_images)
    else:
        parse = functools.partial(_parts, body, boundary, settings.max_images)
        uploads = await asyncio.get_running_loop().run_in_executor(None, parse)
    admission.acquire(images=len(uploads) - 1)
    return uploads


async def read_body(
    request: Request, declared: bytes, settings: Settings, admission: Admission
) -> bytes:
    """The whole body, cut off where it passes the limit, with or without a Content-Length."""
    most = settings.max_body
    if declared.isdigit() and (len(declared) > 18 or int(declared) > most):
        raise TooLarge(f"the body has {declared.decode()} bytes, more than the {most} allowed")
    chunks, size = admission.chunks, 0
    try:
        while True:
            message = await request.receive()
            if message["type"] == "http.disconnect":
                raise ClientDisconnect
            chunk = message.get("body", b"")
            size += len(chunk)
            if size > most:
                raise TooLarge(f"the body has more than the {most} bytes allowed")
            admission.acquire(size=len(chunk))
            chunks.append(chunk)
            if not message.get("more_body"):
                break
            if len(chunks) == 1:
                admission.wait_for_more()
    except asyncio.CancelledError:
        if not admission.evicted:
            raise
        _uncancel()
        raise SlowBody("the body came slowly, and others needed the room: try again") from None
    admission.arrived()
    body = chunks[0] if len(chunks) == 1 else b"".join(chunks)
    chunks.clear()
    return body


def _uncancel() -> None:
    """Go on after a cancellation, which Python 3.10 does not count."""
    task = asyncio.current_task()
    if task is not None and hasattr(task, "uncancel"):
        task.uncancel()


@contextlib.asynccontextmanager
async def _anyio_within(seconds: float) -> AsyncIterator[None]:
    with anyio.fail_after(seconds):
        yield


# asyncio's own is quicker, and came with Python 3.11.
_within = getattr(asyncio, "timeout", _anyio_within)


def _parts(body: bytes, boundary: bytes, most: int) -> list[Upload]:
    """The files of a multipart body; python-multipart finds the borders, nothing touches a disk."""
    uploads: list[Upload] = []
    headers: dict[bytes, bytes] = {}
    name, value = bytearray(), bytearray()
    pieces: list[bytes] = []
    closed: list[bool] = []

    def begin() -> None:
        if len(uploads) == most:
            raise TooLarge(f"the request has more than the {most} images allowed")
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
            raise UnprocessableImage(f"unknown field {field!r}: images come in the field {FIELD!r}")
        file = options.get(b"filename")
        content = pieces[0] if len(pieces) == 1 else b"".join(pieces)
        uploads.append(Upload(None if file is None else file.decode(errors="replace"), content))

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
        raise UnprocessableImage(f"the multipart body is damaged: {error}") from error
    if not closed:
        raise UnprocessableImage("the multipart body is cut short: its last boundary is missing")
    if not uploads:
        raise UnprocessableImage(f"the request has no image: send some in the field {FIELD!r}")
    return uploads
