"""Why a request gets no answer: each reason is one sentence and has its status code."""

from __future__ import annotations

from ..errors import HVTError


class Refusal(HVTError):
    """A request that is not answered; `status` is HTTP's code for the reason."""

    status = 400


class SlowBody(Refusal):
    """A body that did not arrive in time."""

    status = 408


class TooLarge(Refusal):
    """A body, a picture or a number of pictures above a limit."""

    status = 413


class WrongType(Refusal):
    """Content that is not a picture, or not in a form that is understood."""

    status = 415


class Unusable(Refusal):
    """A request or a picture of the right kind that is wrong in itself, or damaged."""

    status = 422


class WrongHost(Refusal):
    """A request under a name that is not the service's."""

    status = 421


class NotFinite(Refusal):
    """An answer that is not a number, by the fault of the model."""

    status = 500


class Busy(Refusal):
    """More is waiting than the queue holds, or the service is about to stop; try again."""

    status = 503


class TooSlow(Refusal):
    """No answer within the time limit."""

    status = 504
