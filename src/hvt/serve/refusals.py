"""Why a request gets no answer: each reason is one sentence and has its status code."""

from __future__ import annotations

from ..errors import HVTError


class RequestError(HVTError):
    """A request that is not answered; `status` is HTTP's code for the reason."""

    status = 400


class SlowBody(RequestError):
    """A body that did not arrive in time."""

    status = 408


class TooLarge(RequestError):
    """A body, an image or a number of images above a limit."""

    status = 413


class WrongType(RequestError):
    """Content that is not an image, or not in a form that is understood."""

    status = 415


class UnprocessableImage(RequestError):
    """A request or an image of the right kind that is wrong in itself, or damaged."""

    status = 422


class WrongHost(RequestError):
    """A request under a name that is not the service's."""

    status = 421


class NotFinite(RequestError):
    """An answer that is not a number, by the fault of the model."""

    status = 500


class Busy(RequestError):
    """More is waiting than the queue holds, or the service is about to stop; try again."""

    status = 503


class TooSlow(RequestError):
    """No answer within the time limit."""

    status = 504
