"""The HTTP service: `POST /predict`, `GET /healthz`, `GET /metrics`, `GET /model`."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import math
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from fastapi import FastAPI, HTTPException, Query, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.requests import ClientDisconnect

from .. import __version__
from ..checkpoint.description import PREPROCESSING
from ..costs import cost
from ..deploy.runtime import NOT_FINITE
from ..errors import HVTError
from ..terminal import printable
from . import page
from .batcher import Batcher
from .body import Admission, admitted
from .drain import drained
from .engine import Engine
from .inference import Inference
from .metrics import Metrics
from .middleware import Gate
from .schema import PROBLEMS, Health, ModelInfo, Predictions, request_body
from .settings import Settings

NO_TELEMETRY: Any = {"tracing": False, "metrics": False, "logs": False}


def create_app(
    settings: Settings | None = None,
    source: str | Path | None = None,
    *,
    engine: Engine | None = None,
) -> FastAPI:
    """The service of a model, as an ASGI application.

    Middleware that is added to it sees every route. Its `state` has what routes need: `engine`,
    `settings`, `inference`, `admission`, `metrics`, and `draining`, which is set when it is about
    to stop. `accepted` and `answered` count requests.
    """
    engine = engine or Engine(source, settings)
    app = FastAPI(
        title="hvt",
        version=__version__,
        summary="Image classification by a vision transformer with hierarchical pooling.",
        lifespan=_lifespan,
        # They load scripts from elsewhere; /openapi.json has it all.
        docs_url=None,
        redoc_url=None,
        # FastAPI looks for OpenTelemetry's SDK at every request; without one it finds nothing.
        telemetry=None if "opentelemetry.sdk" in sys.modules else NO_TELEMETRY,
    )
    state = app.state
    state.engine, state.settings, state.metrics = engine, engine.settings, Metrics()
    state.admission = Admission(engine.settings, state.metrics.queue.set)
    state.draining = False
    state.accepted = state.answered = 0
    app.add_exception_handler(HVTError, _failed)
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(ClientDisconnect, _gone)
    _add_routes(app, engine)
    page.add_routes(app)
    app.add_middleware(Gate, service=app)
    return app


@contextlib.asynccontextmanager
async def _lifespan(app: FastAPI) -> AsyncIterator[None]:
    state, settings = app.state, app.state.settings
    batcher = Batcher(
        state.engine.predict,
        settings.max_batch_size,
        settings.max_wait_ms / 1e3,
        settings.batch_threads,
        state.metrics.batches.observe,
    )
    state.inference = Inference(state.engine, batcher, settings.decoders)
    with drained(state):
        yield
    state.inference.close()


def _add_routes(app: FastAPI, engine: Engine) -> None:
    classes, state = len(engine.class_names), app.state
    described = _describe(engine)

    @app.post(
        "/predict",
        response_model=Predictions,
        responses=PROBLEMS,
        openapi_extra=request_body(engine.settings.max_images),
        summary="The top classes of one or many images",
    )
    async def predict(
        request: Request,
        top: int = Query(min(5, classes), ge=1, le=classes, description="classes to return"),
    ) -> Response:
        """Send one image as the body, or several as multipart files in the field `images`.

        One image that cannot be read fails the whole request, with an error that names it.
        """
        start = time.perf_counter()
        async with admitted(request) as uploads:
            scores = await state.inference.predict(uploads, top)
        predictions = [
            _prediction(engine, upload.name, *each)
            for upload, each in zip(uploads, scores, strict=True)
        ]
        state.metrics.images.inc(len(predictions))
        milliseconds = round(1e3 * (time.perf_counter() - start), 3)
        content = {"model": engine.name, "milliseconds": milliseconds, "predictions": predictions}
        return Response(json.dumps(content), media_type="application/json")

    @app.get(
        "/healthz",
        response_model=Health,
        responses={503: {"model": Health, "description": "The service is about to stop"}},
        summary="Whether requests are welcome",
    )
    async def healthz() -> Response:
        if state.draining:
            return JSONResponse({"status": "draining"}, 503)
        return JSONResponse({"status": "ok"})

    @app.get(
        "/metrics",
        response_class=Response,
        responses={200: {"content": {CONTENT_TYPE_LATEST: {"schema": {"type": "string"}}}}},
        summary="Counts and times for Prometheus",
    )
    async def metrics() -> Response:
        return Response(state.metrics.text(), headers={"Content-Type": CONTENT_TYPE_LATEST})

    @app.get("/model", response_model=ModelInfo, summary="The model and the service's limits")
    async def model() -> Response:
        return JSONResponse(described)


def _prediction(
    engine: Engine, source: str | None, values: list[float], labels: list[int]
) -> dict[str, Any]:
    """One image's part of the answer, as `hvt predict --json` has it."""
    if not all(map(math.isfinite, values)):
        raise HTTPException(500, NOT_FINITE)
    top = [
        {"label": label, "name": engine.class_names[label], "probability": value}
        for value, label in zip(values, labels, strict=True)
    ]
    return {"source": source, **top[0], "top": top}


def _describe(engine: Engine) -> dict[str, Any]:
    session, price = engine.session, cost(engine.config)
    settings = dataclasses.asdict(engine.settings)
    limits = ("timeout", "decode_timeout", "limit_concurrency")
    return {
        "name": engine.name,
        "version": __version__,
        "precision": "int8" if session.int8 else "float32",
        "provider": session.provider,
        "input_size": [engine.config.in_chans, *engine.config.image],
        "preprocessing": {key: session.pretrained_cfg[key] for key in PREPROCESSING},
        "config": engine.config.to_dict(),
        "gflops": price.gflops,
        "params_m": price.params_m,
        "class_names": list(engine.class_names),
        "limits": {
            name: value
            for name, value in settings.items()
            if name.startswith("max_") or name in limits
        },
    }


async def _failed(request: Request, error: Exception) -> Response:
    """The model's own fault, such as a file that ONNX Runtime cannot run on an image.

    What it is in full, with the file's path, is for the service's log and not for clients.
    """
    logging.getLogger(__name__).error("%s", printable(str(error)))
    return JSONResponse({"detail": "the model cannot be run: the service's log says why"}, 500)


async def _invalid(request: Request, error: Exception) -> Response:
    """FastAPI's findings as one sentence, in the form of all other errors."""
    assert isinstance(error, RequestValidationError)
    problems = [f"{'.'.join(map(str, e['loc'][1:]))}: {e['msg']}" for e in error.errors()]
    return JSONResponse({"detail": "; ".join(problems)}, 422)


async def _gone(request: Request, error: Exception) -> Response:
    """Nobody is left to read this response."""
    return Response(status_code=400)
