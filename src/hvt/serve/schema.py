"""What the service says in JSON, for its OpenAPI description."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, Field

from .body import FIELD
from .settings import Settings


class ClassScore(BaseModel):
    """A class and how likely it is."""

    label: int = Field(ge=0, description="the index of the class among the logits")
    name: str = Field(description="the class by name")
    probability: float = Field(ge=0, le=1.000001)


class Prediction(BaseModel):
    """What one image shows: the likeliest class, and the `top` of them."""

    source: str | None = Field(description="the file's name where it was sent")
    label: int = Field(ge=0, description="the index of the class among the logits")
    name: str = Field(description="the class by name")
    probability: float = Field(ge=0, le=1.000001)
    top: list[ClassScore] = Field(description="the likeliest classes, best first")


class Answers(BaseModel):
    """What the images of a request show, in their order."""

    model: str
    milliseconds: float = Field(description="from the request's headers to this answer")
    answers: list[Prediction]


class Problem(BaseModel):
    """Why there is no answer, in one sentence."""

    detail: str


class Health(BaseModel):
    """Whether requests are welcome."""

    status: str = Field(
        description="ok, draining before the service stops, or stuck if nobody gets an answer"
    )


class ModelInfo(BaseModel):
    """The model that answers and the limits of its service."""

    name: str
    version: str = Field(description="of hvt")
    precision: str = Field(description="float32 or int8")
    provider: str = Field(description="what ONNX Runtime computes with")
    image: list[int] = Field(description="channels, height and width of the model's input")
    preprocessing: dict[str, Any]
    config: dict[str, Any]
    gflops: float = Field(description="multiply-adds in 10⁹ for one image")
    params_m: float = Field(description="parameters in millions")
    class_names: list[str] = Field(description="the classes by label")
    limits: dict[str, float]


REASONS = {
    408: "The body did not arrive in time",
    413: "The body, an image or the number of images is above a limit",
    415: "Not an image, or not a form in which images can be sent",
    421: "The Host header has a name that is not the service's",
    422: "A damaged image or request, or a value out of its range",
    500: "The model's answer is not a finite number",
    503: "Too much is waiting, or the service is about to stop: Retry-After says when to come",
    504: "No answer within the time limit",
}

RAW = ("image/jpeg", "image/png", "image/webp", "image/gif", "application/octet-stream")
"""How an image may be named; every other image type does as well."""


def problems(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """The refusals of an operation, for its description."""
    responses: dict[int | str, dict[str, Any]] = {}
    for status in statuses:
        responses[status] = {"model": Problem, "description": REASONS[status]}
        if status == 503:
            wait = {"description": "seconds", "schema": {"type": "integer"}}
            responses[status]["headers"] = {"Retry-After": wait}
    return responses


def request_body(settings: Settings) -> dict[str, Any]:
    """How images are sent, for the description."""
    binary = {"type": "string", "format": "binary"}
    images = {"type": "array", "items": binary, "minItems": 1, "maxItems": settings.max_images}
    form = {
        "type": "object",
        "properties": {FIELD: images},
        "required": [FIELD],
        "additionalProperties": False,
    }
    content: dict[str, Any] = {kind: {"schema": binary} for kind in RAW}
    encoding = {FIELD: {"contentType": ", ".join(RAW)}}
    content["multipart/form-data"] = {"schema": form, "encoding": encoding}
    return {"requestBody": {"required": True, "content": content}}
