"""A package that can be called, where a public function has the name of its package.

`hvt.upcycle(...)` is `hvt.upcycle.run.upcycle`: Python would put the package in the place of a
function of the same name as soon as anything of it is imported.
"""

from __future__ import annotations

import sys
import types
from importlib import import_module
from typing import Any


def make_callable(package: str, name: str) -> None:
    """Let a package be called as the function `name` of its module `run`."""

    class Callable(types.ModuleType):
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            return getattr(import_module(".run", package), name)(*args, **kwargs)

    sys.modules[package].__class__ = Callable
