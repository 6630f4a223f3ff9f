"""The HTTP service: `POST /predict`, `GET /healthz`, `GET /metrics`, `GET /model`."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import json
import logging
import math
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Query, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .. import __version__
from ..checkpoint.description import PREPROCESSING
from ..costs import cost
from ..deploy.runtime import NOT_FINITE
from ..errors import HVTError
from ..terminal import printable
from . import docs, page
from .admission import AdmissionControl
from .batcher import Batcher
from .body import answer_images
from .engine import Engine
from .hosts import Hosts
from .inference import InferencePipeline
from .metrics import Metrics
from .refusals import NotFinite, RequestError
from .schema import Answers, Health, ModelInfo, problems, request_body
from .settings import Settings

NO_TELEMETRY: Any = {"tracing": False, "metrics": False, "logs": False}
LIMITS = (
    "max_body", "max_pixels", "max_images", "max_header_bytes", "max_header_count",
    "max_connections", "max_buffered_bytes", "max_batch", "max_wait_ms", "queue", "header_timeout",
    "timeout", "decode_timeout",
)  # fmt: skip


def create_app(
    settings: Settings | None = None,
    source: str | Path | None = None,
    *,
    engine: Engine | None = None,
) -> FastAPI:
    """The service of a model, as an ASGI application.

    Middleware that is added to it sees every route. Its `state` has what routes need: `engine`,
    `settings`, `inference`, `admission_control`, `hosts`, `metrics`, and `draining`,
    which is set when it is about to stop. `accepted` and `answered` count requests.
    """
    engine = engine or Engine(source, settings)
    settings = engine.settings
    metrics = Metrics()

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        batcher = Batcher(
            engine.answer,
            settings.max_batch,
            settings.max_wait_ms / 1e3,
            settings.concurrent_runs,
            metrics.batches.observe,
        )
        app.state.inference = inference = InferencePipeline(engine, batcher, settings.decoders)
        yield
        inference.close()

    app = Service(
        title="hvt",
        version=__version__,
        summary="What images show, by a vision transformer with hierarchical pooling.",
        lifespan=lifespan,
        # /docs is ours: the usual pages load scripts from elsewhere.
        docs_url=None,
        redoc_url=None,
        # FastAPI looks for OpenTelemetry's SDK at every request; without one it finds nothing.
        telemetry=None if "opentelemetry.sdk" in sys.modules else NO_TELEMETRY,
    )
    app.state.engine, app.state.settings, app.state.metrics = engine, settings, metrics
    app.state.admission_control = AdmissionControl(
        settings.queue, settings.max_buffered_bytes, metrics.queue.set
    )
    app.state.hosts = Hosts(settings)
    app.state.draining = False
    app.state.accepted = app.state.answered = 0
    app.add_exception_handler(RequestError, _refused)
    app.add_exception_handler(HVTError, _failed)
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(ClientDisconnect, _gone)
    _add_routes(app, engine, settings, metrics)
    app.include_router(page.router)
    app.include_router(docs.router)
    app.add_middleware(Shortcut, service=app)
    return app


def _add_routes(app: FastAPI, engine: Engine, settings: Settings, metrics: Metrics) -> None:
    classes = len(engine.class_names)
    described = _describe(engine, settings)

    @app.post(
        "/predict",
        response_model=Answers,
        responses=problems(408, 413, 415, 421, 422, 500, 503, 504),
        openapi_extra=request_body(settings),
        summary="The likeliest classes of one or many images",
    )
    async def predict(
        request: Request,
        top: int = Query(min(5, classes), ge=1, le=classes, description="classes to name"),
    ) -> Response:
        """Send one image as the body, or several as multipart files in the field `images`.

        One image that cannot be read refuses the whole request, by a sentence that names it.
        """
        body = await predict_images(request, top)
        return Response(body, media_type="application/json")

    @app.get(
        "/healthz",
        response_model=Health,
        responses={503: {"model": Health, "description": "The service stops, or is stuck"}},
        summary="Whether requests are welcome",
    )
    async def healthz() -> Response:
        if app.state.draining:
            return JSONResponse({"status": "draining"}, 503)
        if app.state.inference.stuck():
            return JSONResponse({"status": "stuck"}, 503)
        return JSONResponse({"status": "ok"})

    @app.get(
        "/metrics",
        response_class=Response,
        responses={200: {"content": {CONTENT_TYPE_LATEST: {"schema": {"type": "string"}}}}},
        summary="Counts and times for Prometheus",
    )
    async def show_metrics() -> Response:
        return Response(metrics.text(), headers={"Content-Type": CONTENT_TYPE_LATEST})

    @app.get("/model", response_model=ModelInfo, summary="The model and the service's limits")
    async def model() -> Response:
        return JSONResponse(described)


def _describe(engine: Engine, settings: Settings) -> dict[str, Any]:
    session, price = engine.session, cost(engine.config)
    limits = dataclasses.asdict(settings)
    return {
        "name": engine.name,
        "version": __version__,
        "precision": "int8" if session.int8 else "float32",
        "provider": session.provider,
        "image": [engine.config.in_chans, *engine.config.image],
        "preprocessing": {key: session.pretrained_cfg[key] for key in PREPROCESSING},
        "config": engine.config.to_dict(),
        "gflops": price.gflops,
        "params_m": price.params_m,
        "class_names": list(engine.class_names),
        "limits": {name: limits[name] for name in LIMITS},
    }


async def predict_images(request: Request, top: int) -> bytes:
    """What the images of a request show, in JSON."""
    start = time.perf_counter()
    state = request.app.state
    engine = state.engine
    inference = state.inference
    uploads, rows = await answer_images(request, lambda uploads: inference.predict(uploads, top))
    names = engine.class_names
    answers = []
    for upload, (values, labels) in zip(uploads, rows, strict=True):
        if not all(map(math.isfinite, values)):
            raise NotFinite(NOT_FINITE)
        guesses = [
            {"label": label, "name": names[label], "probability": value}
            for value, label in zip(values, labels, strict=True)
        ]
        answers.append({"source": upload.name, **guesses[0], "top": guesses})
    state.metrics.images.inc(len(rows))
    milliseconds = round(1e3 * (time.perf_counter() - start), 3)
    content = {"model": engine.name, "milliseconds": milliseconds, "answers": answers}
    return json.dumps(content, allow_nan=False).encode()


# ── refusals ────────────────────────────────────────────────────────────────────────────────────


async def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestError)
    headers = {"Retry-After": "1"} if error.status == 503 else None
    return JSONResponse({"detail": str(error)}, error.status, headers)


async def _failed(request: Request, error: Exception) -> Response:
    """The model's own fault, such as a file that ONNX Runtime cannot run on an image.

    What it is in full, with the file's path, is for the service's log and not for strangers.
    """
    logging.getLogger(__name__).error("%s", printable(str(error)))
    return JSONResponse({"detail": "the model cannot be run: the service's log says why"}, 500)


async def _invalid(request: Request, error: Exception) -> Response:
    """FastAPI's findings as one sentence, in the form of all other refusals."""
    assert isinstance(error, RequestValidationError)
    problems = [f"{'.'.join(map(str, e['loc'][1:]))}: {e['msg']}" for e in error.errors()]
    return JSONResponse({"detail": "; ".join(problems)}, 422)


async def _gone(request: Request, error: Exception) -> Response:
    """Nobody hears this answer any more."""
    return Response(status_code=400)


# ── the way in ──────────────────────────────────────────────────────────────────────────────────


class Shortcut:
    """Leads the plain `POST /predict` past FastAPI's router, which costs as much as an image.

    It is the innermost middleware: what a user adds later is around it and sees every request.
    Whatever needs a word about its query, its method or its path goes to the router.
    """

    def __init__(self, app: ASGIApp, service: FastAPI) -> None:
        classes = len(service.state.engine.class_names)
        self._app, self._service = app, service
        self._route = next(route for route in service.routes if _path(route) == "/predict")
        self._tops = {f"top={top}".encode(): top for top in range(1, classes + 1)}
        self._tops[b""] = min(5, classes)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        top = None
        if scope["type"] == "http" and scope["path"] == "/predict" and scope["method"] == "POST":
            top = self._tops.get(scope["query_string"])
        if top is None:
            await self._app(scope, receive, send)
            return
        scope["route"] = self._route
        request = Request(scope, receive)
        try:
            body = await predict_images(request, top)
        except (HVTError, ClientDisconnect) as error:
            handlers = self._service.exception_handlers
            kind = next(kind for kind in type(error).__mro__ if kind in handlers)
            answered = handlers[kind](request, error)
            response = await answered if inspect.isawaitable(answered) else answered
            await response(scope, receive, send)
            return
        # The two messages of a Response, of which making the object costs more than sending them.
        headers = [(b"content-length", b"%d" % len(body)), (b"content-type", b"application/json")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})


def _path(route: Any) -> str:
    """Unknown paths share one name, or a stranger could invent any number of them."""
    return getattr(route, "path", "other")


class Service(FastAPI):
    """Checks the Host of every request, counts and times it, and hands it to FastAPI."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await super().__call__(scope, receive, send)
            return
        start = time.perf_counter()
        status = 500
        state = self.state
        state.accepted += 1

        async def watched(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                # Where more could not be answered, or would be taken for what was left unread.
                if state.draining or scope.get("state", {}).get("unread"):
                    message["headers"] = [*message["headers"], (b"connection", b"close")]
            await send(message)
            if message["type"] == "http.response.body" and not message.get("more_body"):
                state.answered += 1

        try:
            try:
                state.hosts.check(scope["headers"], scope["http_version"])
            except RequestError as error:
                scope.setdefault("state", {})["unread"] = True
                response = await _refused(Request(scope), error)
                await response(scope, receive, watched)
            else:
                await super().__call__(scope, receive, watched)
        finally:
            seconds = time.perf_counter() - start
            state.metrics.count(_path(scope.get("route")), status, seconds)
