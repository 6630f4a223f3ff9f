"""The page, `GET /`, and what it draws below its answers, `POST /explain`."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hashlib
import mimetypes
import time
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from importlib.resources import files
from typing import NamedTuple

from fastapi import APIRouter, FastAPI, Request, Response
from pydantic import Field

from .body import Upload, answer_images
from .engine import Engine
from .hierarchy import Hierarchy, hierarchy, seen_part
from .refusals import TooLarge
from .schema import problems, request_body
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


class Part(NamedTuple):
    """A file of the page as it is sent."""

    content: bytes
    media_type: str
    etag: str


def _parts() -> dict[str, Part]:
    """All that is sent, read once; nothing else can be asked for."""
    parts = {}
    for file in files("hvt.serve").joinpath("static").iterdir():
        kind = mimetypes.guess_type(file.name)[0]
        if kind is not None:
            content = file.read_bytes()
            etag = f'"{hashlib.sha256(content).hexdigest()[:16]}"'
            text = f"{kind}; charset=utf-8" if kind.startswith("text/") else kind
            parts[file.name] = Part(content, text, etag)
    return parts


PARTS = _parts()


@contextlib.asynccontextmanager
async def _lifespan(app: FastAPI) -> AsyncIterator[None]:
    # One thread: a page's drawing must not keep answers waiting.
    app.state.explainer = ThreadPoolExecutor(1, thread_name_prefix="hvt-explain")
    yield
    app.state.explainer.shutdown(wait=False, cancel_futures=True)


router = APIRouter(lifespan=_lifespan)


class Explanation(Hierarchy):
    """What becomes of one image inside the model that answers."""

    model: str
    milliseconds: float = Field(description="from the request's headers to this answer")


@router.api_route("/", methods=["GET", "HEAD"], include_in_schema=False)
async def page(request: Request) -> Response:
    return _sent(request, PARTS["page.html"])


@router.api_route("/static/{name}", methods=["GET", "HEAD"], include_in_schema=False)
async def part(request: Request, name: str) -> Response:
    if name not in PARTS:
        return Response("there is no such file\n", 404, HEADERS, "text/plain")
    return _sent(request, PARTS[name])


def _sent(request: Request, part: Part) -> Response:
    headers = HEADERS | {"ETag": part.etag}
    asked = request.headers.get("if-none-match", "")
    if part.etag in (tag.strip().removeprefix("W/") for tag in asked.split(",")):
        return Response(status_code=304, headers=headers)
    return Response(part.content, headers=headers, media_type=part.media_type)


@router.post(
    "/explain",
    response_model=Explanation,
    responses=problems(408, 413, 415, 421, 422, 500, 503, 504),
    openapi_extra=request_body(Settings(max_images=1)),
    summary="The tokens of one image stage by stage, and what each block costs",
)
async def explain(request: Request) -> Response:
    """Send one image as in `/predict`.

    Which patches tokens come from is known of every checkpoint but those with convolutional
    pooling. Of these, and of exported files, there are counts and costs, and `untraced` says why.
    """
    start = time.perf_counter()
    state = request.app.state

    async def explain_upload(uploads: list[Upload]) -> str:
        if len(uploads) > 1:
            raise TooLarge(f"the request has {len(uploads)} images: send one to explain")
        loop = asyncio.get_running_loop()
        work = functools.partial(_explained, state.engine, uploads[0], start)
        return await loop.run_in_executor(state.explainer, work)

    _, explained = await answer_images(request, explain_upload)
    return Response(explained, media_type="application/json")


def _explained(engine: Engine, upload: Upload, start: float) -> str:
    """In a thread."""
    what = f"the image {upload.name!r}" if upload.name else "the image"
    decoded = engine.read(upload.content, what)
    seen = seen_part(decoded.size, engine.config, engine.session.pretrained_cfg)
    image = None if engine.model is None else engine.inputs([engine.pixels(decoded)])[0]
    described = hierarchy(engine.config, engine.model, image, seen)
    milliseconds = round(1e3 * (time.perf_counter() - start), 3)
    explanation = Explanation(model=engine.name, milliseconds=milliseconds, **dict(described))
    return explanation.model_dump_json()
