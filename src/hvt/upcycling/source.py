"""What is made cheap: a trained plain ViT from a file, by name, or as it is in memory."""

from __future__ import annotations

import copy
import os
from pathlib import Path
from typing import Any

import timm
from torch import nn

from ..checkpoint.save_load import load
from ..checkpoint.timm_vit import from_timm, is_timm_name, named_config
from ..config import HVTConfig
from ..errors import HVTError, did_you_mean
from ..model import HVT
from ..registry import create_model
from ..zoo import BUILT_IN, MODELS


def open_source(source: str | Path | nn.Module) -> HVT:
    """A trained plain ViT in float32 and evaluation mode, with its `origin`.

    A file or directory that `hvt.load` reads, a name of timm's or ours with published weights, or
    a model of either.
    """
    name = source.__class__.__name__ if isinstance(source, nn.Module) else str(source)
    model = _open(source, name)
    check_plain(model.config, name)
    model = model.float().eval()
    origin = {"source": Path(name).name}
    licence = model.pretrained_cfg.get("origin", {}).get("license")
    model.pretrained_cfg["origin"] = origin | ({"license": licence} if licence else {})
    return model


def _open(source: str | Path | nn.Module, name: str) -> HVT:
    if isinstance(source, HVT):
        return copy.deepcopy(source)
    if isinstance(source, nn.Module):
        return from_timm(source, name)
    known = isinstance(source, str) and (name in MODELS or is_timm_name(name))
    # A model's name is not that of a folder here, which `./` before it asks for.
    there = os.path.isfile if known else os.path.exists
    if name in BUILT_IN or there(source):
        return load(source)
    if name in MODELS:
        return create_model(name, pretrained=True)
    if is_timm_name(name):
        return _published(name)
    known_names = [*MODELS, *timm.list_models("*vit*"), *timm.list_models("deit*")]
    raise HVTError(
        f"{name!r} is neither a file nor a model of hvt or timm: {did_you_mean(name, known_names)}"
    )


def _published(name: str) -> HVT:
    try:
        named_config(name)  # refuses what does not fit before anything is fetched
        model: Any = timm.create_model(name, pretrained=True)
    except HVTError:
        raise
    except (OSError, RuntimeError, ValueError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise HVTError(
            f"the pretrained weights of {name} could not be fetched ({reason}): check the network, "
            "or download the file and name it instead"
        ) from error
    ours = from_timm(model, name)
    licence = model.pretrained_cfg.get("license")
    if licence:
        ours.pretrained_cfg["origin"] = {"license": licence}
    return ours


def check_plain(config: HVTConfig, name: str) -> None:
    """Refuse what is not a plain ViT, by what it is instead."""
    what = None
    if config.pool_blocks:
        what = f"it is pooled after block {config.pool_blocks[0]}"
    elif config.retention is not None or config.merge is not None:
        what = "it drops or merges tokens"
    elif config.head_pool == "":
        what = "it gives all its tokens and no feature"
    elif config.depth < 3:
        what = f"it has {config.depth} blocks, and three are the least to pool between"
    if what:
        raise HVTError(f"{name} is not a plain ViT: {what}")
