"""The page, `GET /`, and what it draws below its answers, `POST /explain`."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from fastapi import FastAPI, HTTPException, Request, Response
from fastapi.staticfiles import StaticFiles
from pydantic import Field

from .body import Upload, admitted
from .decoding import decode
from .engine import Engine
from .hierarchy import Hierarchy, hierarchy, seen_part
from .inference import decode_error
from .schema import PROBLEMS, request_body

STATIC = Path(__file__).parent / "static"


class Explanation(Hierarchy):
    """What becomes of one image inside the model."""

    model: str
    milliseconds: float = Field(description="from the request's headers to this answer")


@contextlib.contextmanager
def explainer(state: Any) -> Iterator[None]:
    """One thread for explanations: a page's drawing must not keep predictions waiting."""
    state.explainer = ThreadPoolExecutor(1, thread_name_prefix="hvt-explain")
    yield
    state.explainer.shutdown(wait=False, cancel_futures=True)


def add_routes(app: FastAPI) -> None:
    """Add the page, its files and `/explain` to an application."""
    state = app.state
    static = StaticFiles(directory=STATIC)
    app.mount("/static", static)

    @app.head("/", include_in_schema=False)
    @app.get("/", include_in_schema=False)
    async def page(request: Request) -> Response:
        return await static.get_response("page.html", request.scope)

    @app.post(
        "/explain",
        response_model=Explanation,
        responses=PROBLEMS,
        openapi_extra=request_body(max_images=1),
        summary="The tokens of one image stage by stage, and what each block costs",
    )
    async def explain(request: Request) -> Response:
        """Send one image as in `/predict`.

        Which patches tokens come from is known of every checkpoint but those with convolutional
        pooling. Of these, and of exported files, there are counts and costs, and `untraced` says
        why.
        """
        start = time.perf_counter()
        async with admitted(request) as uploads:
            if len(uploads) > 1:
                detail = f"the request has {len(uploads)} images: send one to explain"
                raise HTTPException(413, detail)
            work = functools.partial(_explain, state.engine, uploads[0], start)
            explained = await asyncio.get_running_loop().run_in_executor(state.explainer, work)
        return Response(explained, media_type="application/json")


def _explain(engine: Engine, upload: Upload, start: float) -> str:
    """In a thread."""
    try:
        decoded = decode(upload.content, engine.limits)
    except Exception as error:  # damaged files raise all sorts
        raise decode_error(error, upload.label) from error
    seen = seen_part(decoded.size, engine.config, engine.session.pretrained_cfg)
    image = None if engine.model is None else engine.inputs([engine.pixels(decoded)])[0]
    described = hierarchy(engine.config, engine.model, image, seen)
    milliseconds = round(1e3 * (time.perf_counter() - start), 3)
    explanation = Explanation(model=engine.name, milliseconds=milliseconds, **dict(described))
    return explanation.model_dump_json()
