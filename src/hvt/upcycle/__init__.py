"""A trained ViT made cheap: pooled where it hurts least, then distilled into itself.

`hvt.upcycle(...)` is `hvt.upcycle.run.upcycle`: the module can be called, for Python would put it
in the place of a function of the same name as soon as anything of it is imported.
"""

from __future__ import annotations

import sys
import types
from typing import Any


class _Callable(types.ModuleType):
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        from .run import upcycle

        return upcycle(*args, **kwargs)


sys.modules[__name__].__class__ = _Callable
