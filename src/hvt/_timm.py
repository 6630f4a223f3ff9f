"""Register the models with timm as soon as there is a timm, without importing it.

`import hvt` promises that timm knows our names, and `hvt --help` must not wait for torch. Both
import this package first, which cannot know who asks: a program, `python -m hvt`, a worker process.
So where timm is not imported yet, an import hook waits for it: whoever imports timm first, in
whatever order, finds the names registered. It also repairs a torchvision without operators, see
`hvt._compat`.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType


def register() -> None:
    """Register now if timm is imported, else as soon as it is."""
    if "timm" in sys.modules:
        import_module("hvt.registry")
    elif not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


class _Finder(MetaPathFinder):
    """Finds timm and torchvision as the other finders do, and wraps their loaders."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name not in ("timm", "torchvision"):
            return None
        for finder in sys.meta_path:
            spec = None if finder is self else finder.find_spec(name, path, target)
            if spec is not None:
                if spec.loader is not None:
                    spec.loader = _Loader(self, spec.loader)
                return spec
        return None


class _Loader(Loader):
    """Loads a module by its own loader, which it then leaves in its place."""

    def __init__(self, finder: _Finder, loader: Loader) -> None:
        self.finder, self.loader = finder, loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self.loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        assert module.__spec__ is not None
        module.__loader__ = module.__spec__.loader = self.loader  # resources are read through it
        if module.__name__ == "torchvision":
            self._load_torchvision(module)
            return
        self.loader.exec_module(module)  # which imports torchvision
        if self.finder in sys.meta_path:
            sys.meta_path.remove(self.finder)
        import_module("hvt.registry")

    def _load_torchvision(self, module: ModuleType) -> None:
        from ._compat import twice

        def load() -> None:
            sys.modules["torchvision"] = module
            self.loader.exec_module(module)

        twice(load)
