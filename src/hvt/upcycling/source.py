"""What is made cheap: a trained plain ViT from a file, by name, or as it is in memory."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

from torch import nn

from ..checkpoint.timm_vit import from_timm, named_config
from ..config import HVTConfig
from ..errors import HVTError
from ..model import HVT
from ..resolve import build, resolve, timm_errors


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
    named = resolve(source)
    if named.kind != "timm":
        model = build(named, pretrained=named.kind != "checkpoint")
        assert isinstance(model, HVT)
        return model
    with timm_errors(named.name):
        named_config(named.name)  # raises where it does not fit, before anything is fetched
    theirs: Any = build(named, pretrained=True)
    ours = from_timm(theirs, named.name)
    if licence := theirs.pretrained_cfg.get("license"):
        ours.pretrained_cfg["origin"] = {"license": licence}
    return ours


def check_plain(config: HVTConfig, name: str) -> None:
    """Raise an error that says what a model is instead of a plain ViT."""
    what = None
    if config.pool_blocks:
        what = f"it is pooled after block {config.pool_blocks[0]}"
    elif config.retention is not None or config.merge is not None:
        what = "it drops or merges tokens"
    elif config.head_pool == "":
        what = "it returns all its tokens instead of one feature"
    elif config.depth < 3:
        what = f"it has {config.depth} blocks, and pooling needs at least three"
    if what:
        raise HVTError(f"{name} is not a plain ViT: {what}")
