"""Fields of a dataclass with their help, types and bounds, and one error for a wrong value."""

from __future__ import annotations

import dataclasses
import functools
import math
import operator
import types
import typing
from collections.abc import Callable
from typing import Any

from .errors import HVTError

MAX_THREADS = 1024

_BOUNDS: dict[str, tuple[str, Callable[[float, float], bool]]] = {
    "ge": (" of at least", operator.ge),
    "gt": (" above", operator.gt),
    "le": (" at most", operator.le),
    "lt": (" below", operator.lt),
}


def field(default: Any, help: str, *, choices: tuple[str, ...] = (), **bounds: float) -> Any:
    """A field with its help; `ge`, `gt`, `le` and `lt` bound its numbers, `choices` its text."""
    assert bounds.keys() <= _BOUNDS.keys()
    limits = {**bounds, "choices": choices} if choices else bounds
    return dataclasses.field(default=default, metadata={"help": help, **limits})


@functools.cache
def hints_of(kind: type) -> dict[str, Any]:
    """The types of a dataclass's fields, which take a while to be made of their text."""
    return typing.get_type_hints(kind)


def check_values(instance: Any) -> None:
    """Check each field of a dataclass against its type and bounds."""
    check_some(type(instance), vars(instance))


def check_some(kind: type, values: dict[str, Any]) -> None:
    """Check values of some fields of a dataclass against their types and bounds."""
    for name, default, hint, limits in _checks(kind):
        value = values.get(name, default)
        if value is not default:  # most are, and configs are made by the thousand
            check_value(name, value, hint, **limits)


def check_value(name: str, value: Any, hint: Any, **limits: Any) -> None:
    """Raise an error that names the field, the value and what would be right."""
    if not fits(value, hint, **limits):
        raise HVTError(f"{name}={value!r} must be {expected(hint, **limits)}")


def fits(value: Any, hint: Any, **limits: Any) -> bool:
    """Whether a value is of a field's type and within its bounds."""
    return any(_fits(value, option, limits) for option in options_of(hint))


def expected(hint: Any, **limits: Any) -> str:
    """What a field takes, for the end of an error: `a whole number of at least 1 or none`."""
    words = {bool: "true or false", str: "text", list: "a list", dict: "a table"}
    bounds = _bounds(limits)
    words |= {int: f"a whole number{bounds}", float: f"a number{bounds}", types.NoneType: "none"}
    if limits.get("choices"):
        words[str] = " or ".join(choice or "''" for choice in limits["choices"])
    listed = []
    for option in options_of(hint):
        if typing.get_origin(option) is not tuple:
            listed.append(words[typing.get_origin(option) or option])
        elif typing.get_args(option)[-1] is not ...:
            listed.append("a pair such as 192x256")
        elif typing.get_args(option)[0] is str:
            listed.append(f"a list of {words[str]}")
        elif typing.get_args(option)[0] is float:
            listed.append(f"numbers{bounds} such as 0.4,0.7")
        else:
            listed.append(f"whole numbers{bounds} such as 3,6")
    return " or ".join(dict.fromkeys(listed))


def options_of(hint: Any) -> tuple[Any, ...]:
    """The types that a type is a union of."""
    union = typing.get_origin(hint) in (typing.Union, types.UnionType)
    return typing.get_args(hint) if union else (hint,)


def check_whole(ge: int = 1, **values: Any) -> None:
    """Check that values are whole numbers of at least 1, or another bound."""
    for name, value in values.items():
        check_value(name, value, int, ge=ge)


@functools.cache
def _checks(kind: type) -> list[tuple[str, Any, Any, dict[str, Any]]]:
    """Name, default, type and bounds of each field."""
    hints, checks = hints_of(kind), []
    for one in dataclasses.fields(kind):
        limits = {k: v for k, v in one.metadata.items() if k in _BOUNDS or k == "choices"}
        checks.append((one.name, one.default, hints[one.name], limits))
    return checks


def _fits(value: Any, option: Any, limits: dict[str, Any]) -> bool:
    kind = typing.get_origin(option) or option
    if kind is bool or isinstance(value, bool):  # which is an int too
        return kind is bool and isinstance(value, bool)
    if kind in (int, float):
        return isinstance(value, (int, kind)) and _within(value, limits)
    if kind is str and limits.get("choices"):
        return value in limits["choices"]
    if kind is tuple and isinstance(value, tuple):
        of, *rest = typing.get_args(option)
        endless = rest == [...]
        same_length = endless or len(value) == 1 + len(rest)
        return same_length and all(fits(one, of, **limits) for one in value)
    return isinstance(value, kind)


def _within(value: float, limits: dict[str, Any]) -> bool:
    holds = (_BOUNDS[name][1](value, limits[name]) for name in _BOUNDS if name in limits)
    return abs(value) < math.inf and all(holds)


def _bounds(limits: dict[str, Any]) -> str:
    if {"ge", "le"} <= limits.keys():
        return f" from {limits['ge']:.16g} to {limits['le']:.16g}"
    words = (f"{_BOUNDS[name][0]} {limits[name]:.12g}" for name in _BOUNDS if name in limits)
    return " and".join(words)
