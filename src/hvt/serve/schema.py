"""What the service answers in JSON, for its OpenAPI description."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, Field

from .body import FIELD


class ClassScore(BaseModel):
    """A class and its probability."""

    label: int = Field(ge=0, description="the index of the class among the logits")
    name: str = Field(description="the name of the class")
    probability: float = Field(ge=0, le=1.000001)


class Prediction(ClassScore):
    """The top-1 class of one image, and its `top` classes."""

    source: str | None = Field(description="the file name, if one was sent")
    top: list[ClassScore] = Field(description="the top classes, best first")
    setting: str = Field("", description="the setting of an elastic model that classified it")


class Predictions(BaseModel):
    """The predictions for the images of a request, in their order."""

    model: str
    milliseconds: float = Field(description="from the request's headers to the response")
    predictions: list[Prediction]


class Problem(BaseModel):
    """An error, in one sentence."""

    detail: str


REASONS = {
    408: "The body did not arrive in time",
    413: "The body, an image or the number of images is above a limit",
    415: "Not an image, or an unsupported content type",
    421: "The Host header is not allowed",
    422: "A damaged image or request, or a value out of range",
    500: "The model's outputs are not finite, or it cannot be run",
    503: "The queue is full or the service is shutting down: retry after Retry-After seconds",
    504: "No response within the time limit",
}
PROBLEMS: dict[int | str, dict[str, Any]] = {
    status: {"model": Problem, "description": reason} for status, reason in REASONS.items()
}
"""The errors of `/predict` and `/explain`, for their description."""

RAW = ("image/jpeg", "image/png", "image/webp", "image/gif", "application/octet-stream")
"""How an image may be named; every other image type does as well."""


def images_in(max_images: int) -> dict[str, Any]:
    """How images are sent, for the description of a route."""
    binary = {"type": "string", "format": "binary"}
    images = {"type": "array", "items": binary, "minItems": 1, "maxItems": max_images}
    form = {"type": "object", "properties": {FIELD: images}, "required": [FIELD]}
    content: dict[str, Any] = {kind: {"schema": binary} for kind in RAW}
    encoding = {FIELD: {"contentType": ", ".join(RAW)}}
    content["multipart/form-data"] = {"schema": form, "encoding": encoding}
    return {"requestBody": {"required": True, "content": content}}


def top_in(classes: int) -> dict[str, Any]:
    """How many classes are asked for, for the description of a route."""
    limits = {"type": "integer", "minimum": 1, "maximum": classes, "default": min(5, classes)}
    top = {"name": "top", "in": "query", "description": "classes to return", "schema": limits}
    return {"parameters": [top]}
