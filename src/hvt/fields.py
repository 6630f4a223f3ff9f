"""Fields of a dataclass that say what they are for and what they may be."""

from __future__ import annotations

import dataclasses
import functools
import math
import typing
from typing import Any

from .errors import HVTError


def field(
    default: Any,
    help: str,
    *,
    ge: float | None = None,
    gt: float | None = None,
    le: float | None = None,
    lt: float | None = None,
    choices: tuple[str, ...] = (),
    metavar: str | None = None,
) -> Any:
    """A field of a dataclass with its help, what it may be, and its name in the help of a flag."""
    limits = {"ge": ge, "gt": gt, "le": le, "lt": lt, "choices": choices}
    shown = {"help": help, "metavar": metavar}
    return dataclasses.field(default=default, metadata=limits | shown)


@functools.cache
def hints_of(kind: type) -> dict[str, Any]:
    """The types of a dataclass's fields, which take a while to be made of their text."""
    return typing.get_type_hints(kind)


def check_values(instance: Any) -> None:
    """Refuse a value of a dataclass that is not of its field's type or within its limits."""
    kind: type = type(instance)
    hints = hints_of(kind)
    for one in dataclasses.fields(instance):
        value = getattr(instance, one.name)
        check_type(one.name, value, hints[one.name])
        if one.metadata and value is not None:
            _check_value(one.name, value, **one.metadata)


def check_type(name: str, value: Any, hint: Any) -> None:
    """Refuse a value that is not of a field's type."""
    plain = typing.get_origin(hint) in (dict, list, tuple)
    allowed = (hint,) if plain else typing.get_args(hint) or (hint,)
    kinds = tuple(typing.get_origin(one) or one for one in allowed)
    if float in kinds:
        kinds += (int,)
    if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
        words = {
            int: "a whole number", float: "a number", str: "text", bool: "true or false",
            list: "a list", tuple: "a list", dict: "a table", type(None): "nothing",
        }  # fmt: skip
        wanted = " or ".join(words[k] for k in kinds if k is not int or float not in kinds)
        raise HVTError(f"{name}={value!r} must be {wanted}")


MAX_THREADS = 1024
MAX_COUNT = 10**15
"""Of any whole number that is a count: with more, costs would have no number in floating point."""


def check_whole(ge: int = 1, le: int = MAX_COUNT, **values: Any) -> None:
    """Refuse what is not a whole number from 1 to `MAX_COUNT`, or within other bounds."""
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < ge:
            raise HVTError(f"{name}={value!r} must be a whole number of at least {ge}")
        check_most(name, value, le)


def check_most(name: str, value: int, le: int = MAX_COUNT) -> None:
    """Refuse a whole number that is too large; one of hundreds of digits is not repeated."""
    if value > le:
        shown = value if value < 10**18 else "…"
        raise HVTError(f"{name}={shown} must be at most {le}")


def _check_value(
    name: str,
    value: Any,
    *,
    ge: float | None,
    gt: float | None,
    le: float | None,
    lt: float | None,
    choices: tuple[str, ...],
    **_: Any,
) -> None:
    if isinstance(value, str):
        if choices and value not in choices:
            number = "" if ge is None else f" or a number of at least {ge:g}"
            raise HVTError(f"{name}={value!r} must be {' or '.join(choices)}{number}")
        return
    if isinstance(value, float) and not math.isfinite(value):
        raise HVTError(f"{name}={value!r} must be a finite number")
    limits = (
        (ge, "at least", lambda limit: value >= limit),
        (gt, "above", lambda limit: value > limit),
        (le, "at most", lambda limit: value <= limit),
        (lt, "below", lambda limit: value < limit),
    )
    bounds = [(words, limit, holds) for limit, words, holds in limits if limit is not None]
    if not all(holds(limit) for _, limit, holds in bounds):
        wanted = " and ".join(f"{words} {limit:.12g}" for words, limit, _ in bounds)
        raise HVTError(f"{name}={value!r} must be {wanted}")
