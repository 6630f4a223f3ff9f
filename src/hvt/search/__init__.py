"""Models found by training them: Optuna over the space of a plan, with successive halving."""

from .._callable import make_callable

make_callable(__name__, "search")
