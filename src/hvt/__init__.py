"""hvt: vision transformers that get cheaper as they get deeper.

Nothing is imported before it is used, so that the command line need not wait for torch. timm learns
the models' names all the same, see `hvt._timm`.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from ._timm import register

__version__ = "0.1.0"

if TYPE_CHECKING:
    from . import power
    from .checkpoint.hub import from_pretrained
    from .checkpoint.save_load import load, save
    from .config import HVTConfig
    from .costs import Cost, cost
    from .deploy.evaluate import evaluate
    from .deploy.predict import Predictor
    from .errors import CheckpointError, HVTError
    from .evaluation import Score
    from .model import HVT
    from .planning.run import plan
    from .registry import create_model
    from .searching.run import search
    from .training.engine import Result
    from .training.recipe import Recipe
    from .training.run import train
    from .upcycling.run import upcycle
    from .zoo import get_config, list_models

__all__ = [
    "HVT",
    "CheckpointError",
    "Cost",
    "HVTConfig",
    "HVTError",
    "Predictor",
    "Recipe",
    "Result",
    "Score",
    "__version__",
    "cost",
    "create_model",
    "evaluate",
    "from_pretrained",
    "get_config",
    "list_models",
    "load",
    "plan",
    "power",
    "save",
    "search",
    "train",
    "upcycle",
]

# Where each name is, for the first time it is asked for.
_HOMES = {
    "HVT": "checkpoint",  # which adds the methods that store it
    "CheckpointError": "errors",
    "Cost": "costs",
    "HVTConfig": "config",
    "HVTError": "errors",
    "Predictor": "deploy.predict",
    "Recipe": "training.recipe",
    "Result": "training.engine",
    "Score": "evaluation",
    "cost": "costs",
    "create_model": "registry",
    "evaluate": "deploy.evaluate",
    "from_pretrained": "checkpoint.hub",
    "get_config": "zoo",
    "list_models": "zoo",
    "load": "checkpoint.save_load",
    "plan": "planning.run",
    "save": "checkpoint.save_load",
    "search": "searching.run",
    "train": "training.run",
    "upcycle": "upcycling.run",
}
register()


def __getattr__(name: str) -> Any:
    if name == "power":  # a package that is public itself
        return import_module(".power", __name__)
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(f".{_HOMES[name]}", __name__), name)
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
