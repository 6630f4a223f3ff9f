"""The page, `GET /`, and what it draws below its answers, `POST /explain`."""

from __future__ import annotations

import time
from pathlib import Path

from fastapi import FastAPI, HTTPException, Request, Response
from fastapi.staticfiles import StaticFiles

from .body import admitted
from .engine import Engine
from .hierarchy import Hierarchy, hierarchy, seen_part
from .inference import Decoded
from .schema import PROBLEMS, request_body

STATIC = Path(__file__).parent / "static"


def add_routes(app: FastAPI) -> None:
    """Add the page, its files and `/explain` to an application."""
    state = app.state
    static = StaticFiles(directory=STATIC)
    app.mount("/static", static)

    @app.get("/", include_in_schema=False)
    async def page(request: Request) -> Response:
        return await static.get_response("page.html", request.scope)

    @app.post(
        "/explain",
        response_model=Hierarchy,
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
            decoded = await state.inference.decode(uploads[0])
            explained = await state.inference.explain(_explain, state.engine, decoded)
        explained.milliseconds = round(1e3 * (time.perf_counter() - start), 3)
        return Response(explained.model_dump_json(), media_type="application/json")


def _explain(engine: Engine, decoded: Decoded) -> Hierarchy:
    """In a thread."""
    seen = seen_part(decoded.size, engine.config, engine.session.pretrained_cfg)
    image = None if engine.model is None else engine.inputs([decoded.pixels])[0]
    return hierarchy(engine.config, engine.model, image, seen, engine.name)
