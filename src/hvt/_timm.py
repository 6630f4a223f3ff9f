"""Register the models with timm as soon as there is a timm, without importing it.

`import hvt` promises that timm knows our names, and `hvt --help` must not wait for torch. Both
import this package first, which cannot know who asks: a program, `python -m hvt`, a worker process.
So where timm is not imported yet, an import hook waits for it: whoever imports timm first, in
whatever order, finds the names registered. It also repairs a torchvision without operators, see
`hvt._compat`.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType


def register() -> None:
    """Register now if timm is imported, else as soon as it is."""
    if "timm" in sys.modules:
        import_module("hvt.registry")
    # By name: after `hvt` was dropped and imported again, as coverage does, the class is another.
    elif not any(type(finder).__module__ == __name__ for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


class _Finder(MetaPathFinder):
    """Finds timm and torchvision as the other finders do, and adds to how they are loaded."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name not in ("timm", "torchvision"):
            return None
        others = (finder for finder in sys.meta_path if finder is not self)
        specs = (finder.find_spec(name, path, target) for finder in others)
        spec = next((spec for spec in specs if spec is not None), None)
        if spec is not None and spec.loader is not None:
            load = self._load_timm if name == "timm" else _load_torchvision
            execute = functools.partial(load, spec.loader.exec_module)
            spec.loader.exec_module = execute  # type: ignore[method-assign]
        return spec

    def _load_timm(self, load: Callable[[ModuleType], None], module: ModuleType) -> None:
        load(module)  # which imports torchvision
        if self in sys.meta_path:
            sys.meta_path.remove(self)
        import_module("hvt.registry")


def _load_torchvision(load: Callable[[ModuleType], None], module: ModuleType) -> None:
    from ._compat import twice

    def attempt() -> None:
        sys.modules["torchvision"] = module
        load(module)

    twice(attempt)
