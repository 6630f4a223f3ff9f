"""hvt: vision transformers that get cheaper as they get deeper.

Nothing is imported before it is used, so that the command line need not wait for torch. timm learns
the models' names all the same, see `hvt._timm`.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from ._timm import register

__version__ = "0.1.0"

if TYPE_CHECKING:
    from . import power as power
    from .checkpoint.hub import from_pretrained as from_pretrained
    from .checkpoint.save_load import load as load
    from .checkpoint.save_load import save as save
    from .config import HVTConfig as HVTConfig
    from .costs import Cost as Cost
    from .costs import cost as cost
    from .deploy.embed import Embedder as Embedder
    from .deploy.evaluate import evaluate as evaluate
    from .deploy.export import export as export
    from .deploy.predict import Predictor as Predictor
    from .errors import CheckpointError as CheckpointError
    from .errors import HVTError as HVTError
    from .evaluation import Score as Score
    from .fitting.run import fit as fit
    from .model import HVT as HVT
    from .planning.run import plan as plan
    from .registry import create_model as create_model
    from .searching.run import search as search
    from .training.recipe import Recipe as Recipe
    from .training.run import train as train
    from .training.trainer import Result as Result
    from .upcycling.run import upcycle as upcycle
    from .zoo import get_config as get_config
    from .zoo import list_models as list_models

# Where each name is, for the first time it is asked for.
_HOMES = {
    "HVT": "checkpoint",  # which adds the methods that store it
    "CheckpointError": "errors",
    "Cost": "costs",
    "Embedder": "deploy.embed",
    "HVTConfig": "config",
    "HVTError": "errors",
    "Predictor": "deploy.predict",
    "Recipe": "training.recipe",
    "Result": "training.trainer",
    "Score": "evaluation",
    "cost": "costs",
    "create_model": "registry",
    "evaluate": "deploy.evaluate",
    "export": "deploy.export",
    "fit": "fitting.run",
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
__all__ = ["__version__", "power", *_HOMES]
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
