"""The HTTP service: its routes, what they answer, and its errors in one sentence each."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

from fastapi import FastAPI, HTTPException, Request, Response
from fastapi.responses import JSONResponse
from fastapi.routing import APIRoute
from fastapi.staticfiles import StaticFiles
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.requests import ClientDisconnect

from .. import __version__
from ..checkpoint.description import PREPROCESSING
from ..costs import cost
from ..deploy.runtime import NOT_FINITE
from ..errors import HVTError
from ..terminal import printable
from .body import Admission, admitted
from .drain import drained
from .engine import Engine, Pixels, Scores
from .hierarchy import hierarchy, seen_part
from .inference import Inference
from .metrics import Metrics
from .middleware import Gate
from .schema import PROBLEMS, Predictions, images_in, top_in

PAGE = StaticFiles(directory=Path(__file__).parent / "static")


def create_app(engine: Engine) -> FastAPI:
    """The service of a model, as an ASGI application.

    Middleware that is added to it sees every route. Its `state` has what routes need: `engine`,
    `settings`, `inference`, `admission`, `metrics`, and `draining`, which is set when it is about
    to stop.
    """
    app = FastAPI(
        title="hvt",
        version=__version__,
        summary="Image classification by a vision transformer with hierarchical pooling.",
        lifespan=_lifespan,
        # They load scripts from elsewhere; /openapi.json has it all.
        docs_url=None,
        redoc_url=None,
        exception_handlers={HVTError: _failed, ClientDisconnect: _gone},
    )
    state = app.state
    state.engine, state.settings, state.metrics = engine, engine.settings, Metrics()
    state.admission = Admission(engine.settings, state.metrics.queue.set)
    engine.waiting = lambda: state.admission.images
    state.draining = False
    app.router.route_class = _Route
    _add_routes(app, state)
    _add_pages(app, state)
    app.router.route_class = APIRoute  # for routes that a user adds
    app.mount("/static", PAGE)
    app.add_middleware(Gate, service=app)
    return app


class _Route(APIRoute):
    """A route that FastAPI describes, and that reads its request itself: half of the time."""

    def get_route_handler(self) -> Callable[[Request], Awaitable[Response]]:  # type: ignore[override]
        return self.endpoint


@contextlib.asynccontextmanager
async def _lifespan(app: FastAPI) -> AsyncIterator[None]:
    state = app.state
    state.inference = Inference(state.engine, state.metrics.batches.observe)
    with drained(state):
        yield
    state.inference.close()


def _add_routes(app: FastAPI, state: Any) -> None:
    engine: Engine = state.engine
    classes = len(engine.class_names)

    @app.post(
        "/predict",
        response_model=Predictions,
        responses=PROBLEMS,
        openapi_extra=images_in(engine.settings.max_images) | top_in(classes),
        summary="The top classes of one or many images",
    )
    async def predict(request: Request) -> Response:
        """Send one image as the body, or several as multipart files in the field `images`.

        One image that cannot be read fails the whole request, with an error that names it.
        """
        start, asked = time.perf_counter(), request.query_params.get("top", min(5, classes))
        if not str(asked).isdecimal() or not 1 <= int(asked) <= classes:
            raise HTTPException(422, f"top must be a whole number from 1 to {classes}")
        top = int(asked)
        async with admitted(request) as uploads:
            scores = await state.inference.predict(uploads, top)
        predictions = [
            _prediction(engine, upload.name, each, top)
            for upload, each in zip(uploads, scores, strict=True)
        ]
        state.metrics.images.inc(len(predictions))
        for each in scores if engine.settings.elastic else ():
            state.metrics.settings.labels(each.setting).inc()
        milliseconds = round(1e3 * (time.perf_counter() - start), 3)
        content = {"model": engine.name, "milliseconds": milliseconds, "predictions": predictions}
        return Response(json.dumps(content), media_type="application/json")

    @app.post(
        "/explain",
        response_model=dict[str, Any],
        responses=PROBLEMS,
        openapi_extra=images_in(1),
        summary="The tokens of one image at each stage, and the cost of each block",
    )
    async def explain(request: Request) -> Response:
        """Send one image as in `/predict`.

        Which patches tokens come from is known of every checkpoint but those with convolutional
        pooling. Of these, and of exported files, there are counts and costs, and `untraced` says
        why. The reference of the HTTP service lists the fields.
        """
        async with admitted(request) as uploads:
            if len(uploads) > 1:
                detail = f"the request has {len(uploads)} images: send one to explain"
                raise HTTPException(413, detail)
            pixels = await state.inference.decode(uploads[0])
            explained = await state.inference.run("explain", _explain, engine, pixels)
        return Response(explained, media_type="application/json")


def _add_pages(app: FastAPI, state: Any) -> None:
    """What is about the service, and the page."""
    described = _describe(state.engine)

    @app.get("/model", response_model=dict[str, Any], summary="The model and the service's limits")
    async def model(request: Request) -> Response:
        """`gflops` are GMACs per image, `class_names` the names of the classes by label."""
        return JSONResponse(described)

    @app.get(
        "/healthz",
        response_model=dict[str, str],
        responses={503: {"model": dict[str, str], "description": "The service is draining"}},
        summary="Readiness of the service",
    )
    async def healthz(request: Request) -> Response:
        if state.draining:
            return JSONResponse({"status": "draining"}, 503)
        return JSONResponse({"status": "ok"})

    @app.get(
        "/metrics",
        response_class=Response,
        responses={200: {"content": {CONTENT_TYPE_LATEST: {"schema": {"type": "string"}}}}},
        summary="Metrics for Prometheus",
    )
    async def metrics(request: Request) -> Response:
        return Response(state.metrics.text(), headers={"Content-Type": CONTENT_TYPE_LATEST})

    @app.get("/", include_in_schema=False)
    async def page(request: Request) -> Response:
        return await PAGE.get_response("page.html", request.scope)


def _prediction(engine: Engine, source: str | None, scores: Scores, top: int) -> dict[str, Any]:
    """One image's part of the answer, as `hvt predict --json` has it."""
    if not all(map(math.isfinite, scores.probabilities)):
        raise HTTPException(500, NOT_FINITE)
    best = [
        {"label": label, "name": engine.class_names[label], "probability": probability}
        for probability, label in zip(scores.probabilities[:top], scores.labels, strict=False)
    ]
    answer = {"source": source, **best[0], "top": best}
    return answer | {"setting": scores.setting} if scores.setting else answer


def _explain(engine: Engine, pixels: Pixels) -> str:
    """In a thread."""
    setting = engine.variants[pixels.setting]
    image = None if setting.model is None else setting.inputs([pixels.values])[0]
    seen = seen_part(pixels.size, setting.config, setting.session.pretrained_cfg)
    return json.dumps(hierarchy(setting.config, setting.model, image, seen))


def _describe(engine: Engine) -> dict[str, Any]:
    session, price = engine.session, cost(engine.config)
    settings = dataclasses.asdict(engine.settings)
    return {
        "name": engine.name,
        "version": __version__,
        "precision": "int8" if session.int8 else "float32",
        "provider": session.session.get_providers()[0],
        "input_size": [engine.config.in_chans, *engine.config.image],
        "preprocessing": {key: session.pretrained_cfg[key] for key in PREPROCESSING},
        "config": engine.config.to_dict(),
        "gflops": price.gflops,
        "params_m": price.params_m,
        "class_names": list(engine.class_names),
        "limits": {
            name: value
            for name, value in settings.items()
            if name.startswith(("max_", "limit_")) or "timeout" in name
        },
    }


async def _failed(request: Request, error: Exception) -> Response:
    """The model's own fault, such as a file that ONNX Runtime cannot run on an image.

    What it is in full, with the file's path, is for the service's log and not for clients.
    """
    logging.getLogger(__name__).error("%s", printable(str(error)))
    return JSONResponse({"detail": "the model cannot be run: see the service's log"}, 500)


async def _gone(request: Request, error: Exception) -> Response:
    """Nobody is left to read this response."""
    return Response(status_code=400)
