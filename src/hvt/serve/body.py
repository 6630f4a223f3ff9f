"""`admitted`: the images of a request, raw or multipart, within the limits of a worker."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from typing import NamedTuple

import anyio
from fastapi import HTTPException, Request
from starlette.datastructures import UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser

from .settings import Settings

FIELD = "images"
# What a client sends that does not know the type: the last is what `curl --data-binary` says.
UNTYPED = ("", "application/octet-stream", "application/x-www-form-urlencoded")


class Upload(NamedTuple):
    """One image as it was sent."""

    name: str | None
    """Its file's name, where it has one."""
    content: bytes

    @property
    def label(self) -> str:
        """What errors call it."""
        return f"the image {self.name!r}" if self.name else "the image"


class Admission:
    """Counts the images and bytes that a worker has accepted and not answered, within limits."""

    def __init__(self, settings: Settings, show: Callable[[int], None] = lambda images: None):
        self._settings, self._show = settings, show
        self.images = self.buffered = 0

    def acquire(self, images: int = 0, buffered: int = 0) -> None:
        """Raise a 503 for what would be above a limit."""
        if self.images + images > self._settings.max_queue:
            raise _busy(f"more than {self._settings.max_queue} images")
        if self.buffered + buffered > self._settings.max_buffered:
            raise _busy(f"more than {self._settings.max_buffered} bytes")
        self.release(-images, -buffered)

    def release(self, images: int, buffered: int) -> None:
        self.images -= images
        self.buffered -= buffered
        if images:
            self._show(self.images)


def _busy(what: str) -> HTTPException:
    return HTTPException(503, f"{what} would be pending: try again later", {"Retry-After": "1"})


@contextlib.asynccontextmanager
async def admitted(request: Request) -> AsyncIterator[list[Upload]]:
    """The images of a request, admitted until the context ends; all within `--timeout`.

    They join the queue once all of the body has arrived, so that half an upload keeps nobody out.
    Raises an `HTTPException` for what is above a limit, too slow or not understood.
    """
    admission: Admission = request.app.state.admission
    seconds = request.app.state.settings.timeout
    body = _Body(request)
    images = 0
    try:
        with anyio.fail_after(seconds):
            uploads = await _uploads(request, body)
            admission.acquire(images=len(uploads))
            images = len(uploads)
            yield uploads
    except TimeoutError as error:
        if body.complete:
            raise HTTPException(504, f"no response within {seconds:g} seconds") from error
        # What may still come would be taken for the next request.
        detail, close = f"the body did not arrive within {seconds:g} seconds", "close"
        raise HTTPException(408, detail, {"Connection": close}) from error
    finally:
        admission.release(images, body.size)


class _Body:
    """The body of a request as it arrives, counted and cut off at the limits."""

    def __init__(self, request: Request) -> None:
        self._request, self._limit = request, request.app.state.settings.max_body
        self.size, self.complete = 0, False

    async def chunks(self) -> AsyncGenerator[bytes, None]:
        async for chunk in self._request.stream():
            if self.size + len(chunk) > self._limit:
                raise HTTPException(413, f"the body is larger than the {self._limit} bytes allowed")
            self._request.app.state.admission.acquire(buffered=len(chunk))
            self.size += len(chunk)
            yield chunk
        self.complete = True


async def _uploads(request: Request, body: _Body) -> list[Upload]:
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind == "multipart/form-data":
        uploads = await _files(request, body)
    elif kind in UNTYPED or kind.startswith("image/"):
        uploads = [Upload(None, b"".join([chunk async for chunk in body.chunks()]))]
    else:
        raise HTTPException(
            415,
            "unsupported content type: send an image as image/* or "
            f"application/octet-stream, or several as multipart/form-data in the field {FIELD!r}",
        )
    for upload in uploads:
        if not upload.content:
            raise HTTPException(422, f"{upload.label} is empty")
    return uploads


class _Form(MultiPartParser):
    """Starlette's parser, without a file on disk; an image needs no file's name."""

    spool_max_size = sys.maxsize
    complete = False

    def on_end(self) -> None:
        self.complete = True

    def on_headers_finished(self) -> None:
        named = self._current_part.content_disposition or b""
        if b'name="images"' in named and b"filename" not in named:  # it would be taken for text
            self._current_part.content_disposition = named + b'; filename=""'
        super().on_headers_finished()


async def _files(request: Request, body: _Body) -> list[Upload]:
    most = request.app.state.settings.max_images
    try:
        parser = _Form(request.headers, body.chunks(), max_files=most)
        form = await parser.parse()
    except MultiPartException as error:
        if error.message.startswith("Too many files"):
            detail = f"the request has more than the {most} images allowed"
            raise HTTPException(413, detail) from error
        raise HTTPException(422, f"the multipart body is damaged: {error.message}") from error
    if not parser.complete:  # Starlette drops a part that is cut short
        raise HTTPException(422, "the multipart body is damaged: its last boundary is missing")
    files = [part for part in form.getlist(FIELD) if isinstance(part, UploadFile)]
    if not files:
        raise HTTPException(422, f"the request has no image: send files in the field {FIELD!r}")
    return [Upload(file.filename or None, await file.read()) for file in files]
