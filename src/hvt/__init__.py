"""hvt: vision transformers that get cheaper as they get deeper."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from ._compat import import_torchvision

import_torchvision()

from ._version import __version__  # noqa: E402
from .checkpoint.hub import from_pretrained  # noqa: E402
from .checkpoint.save_load import load, save  # noqa: E402
from .config import HVTConfig  # noqa: E402
from .cost import Cost, cost  # noqa: E402
from .errors import CheckpointError, HVTError  # noqa: E402
from .model import HVT  # noqa: E402
from .zoo import create_model, get_config, list_models  # noqa: E402

if TYPE_CHECKING:
    from . import power
    from .deploy.predict import Predictor
    from .upcycle.run import upcycle

__all__ = [
    "HVT",
    "CheckpointError",
    "Cost",
    "HVTConfig",
    "HVTError",
    "Predictor",
    "__version__",
    "cost",
    "create_model",
    "from_pretrained",
    "get_config",
    "list_models",
    "load",
    "power",
    "save",
    "upcycle",
]


def __getattr__(name: str) -> Any:
    if name == "Predictor":  # its own imports would slow down `hvt models`
        from .deploy.predict import Predictor

        return Predictor
    if name in ("power", "upcycle"):
        return import_module(f".{name}", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
