"""From a budget to a model: every architecture that a budget buys, and the likeliest best."""

from .._callable import make_callable

make_callable(__name__, "plan")
