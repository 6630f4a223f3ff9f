"""Import torchvision even where its compiled operators do not load.

A torchvision wheel built for another flavour of torch (CUDA beside CPU, say) cannot load its
shared library. It does not report that, and then fails while it attaches Python code to the
operators `torchvision::nms` and `torchvision::qnms`, which the library would have declared. timm
imports torchvision, so it fails too. A classifier needs neither operator: once their
schemas exist, every part written in Python works.
"""

import sys
from collections.abc import Callable
from typing import Any

_SIGNATURE = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
_OPERATORS = ("nms", "qnms")

# A schema lives as long as the Library that declared it.
_library: Any = None


def twice(load: Callable[[], Any]) -> Any:
    """Load torchvision, and once more with its operators declared if their absence is what fails.

    What the first attempt has imported is forgotten, torchvision itself too.
    """
    global _library
    try:
        return load()
    except RuntimeError as error:
        missing = {f"operator torchvision::{name} does not exist" for name in _OPERATORS}
        # With TORCH_SHOW_CPP_STACKTRACES=1 a stack trace follows the first line.
        if _library is not None or str(error).partition("\n")[0] not in missing:
            raise
    import torch

    for name in [m for m in sys.modules if m == "torchvision" or m.startswith("torchvision.")]:
        del sys.modules[name]
    _library = torch.library.Library("torchvision", "FRAGMENT")
    for name in _OPERATORS:
        _library.define(name + _SIGNATURE)
    return load()
