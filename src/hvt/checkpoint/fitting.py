"""Tensors against the parameters that a config has: compared, and resized to another config."""

from __future__ import annotations

import functools
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

import torch
from timm.models import adapt_input_conv
from torch import Tensor

from ..config import HVTConfig
from ..errors import CheckpointError
from ..model import HVT
from ..resize import resized
from .description import understood

State = dict[str, Tensor]


@functools.lru_cache(maxsize=64)
def parameter_shapes(config: HVTConfig) -> Mapping[str, tuple[int, ...]]:
    """The parameters of a config's model, which is built on the meta device and takes no memory."""
    with torch.device("meta"):
        return {name: tuple(tensor.shape) for name, tensor in HVT(config).state_dict().items()}


def elastic_shapes(
    config: HVTConfig, settings: Sequence[HVTConfig], names: Collection[str]
) -> Mapping[str, tuple[int, ...]]:
    """The same with smaller settings: of their own they have what is named, or not shared."""
    base = parameter_shapes(config)
    shapes = dict(base)
    for index, setting in enumerate(settings):
        for name, shape in parameter_shapes(setting).items():
            own = f"settings.{index}.{name}"
            if own in names or base.get(name) != shape:
                shapes[own] = shape
    return shapes


def compare(
    tensors: Mapping[str, Tensor], shapes: Mapping[str, tuple[int, ...]], verdict: str
) -> None:
    """Raise an error with the first tensor that is missing, unexpected or of another shape."""
    missing = [k for k in shapes if k not in tensors]
    unexpected = [k for k in tensors if k not in shapes]
    misfits = [k for k in shapes if k in tensors and tensors[k].shape != shapes[k]]
    for what, names in (("lacks", missing), ("has", unexpected), ("has another shape of", misfits)):
        if names:
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            raise CheckpointError(f"{verdict}: it {what} {names[0]}{more}")


def check_weights(
    tensors: State, config: HVTConfig, settings: Sequence[HVTConfig], path: Path
) -> None:
    """Raise an error unless these are the finite weights of a model of `config`."""
    with understood(f"{path} does not describe a usable model"):  # such as one beyond torch's sizes
        shapes = elastic_shapes(config, settings, tensors)
    compare(tensors, shapes, f"{path} does not contain the weights of its architecture")
    for name, tensor in tensors.items():
        if not tensor.is_floating_point() or tensor.itemsize < 2:
            raise CheckpointError(f"{path} stores {name} as {tensor.dtype}, not as weights")
        if not tensor.isfinite().all():
            raise CheckpointError(
                f"{path} has NaN or infinite weights in {name}, as after a diverged training: use "
                "an earlier checkpoint"
            )


def fitted(tensors: State, old: HVTConfig, new: HVTConfig, path: Path) -> State:
    """The weights as a model of `new` takes them, without the head where the classes differ."""
    alike = ("pool_blocks", "num_prefix_tokens", "no_embed_class", "pool_dims")
    if all(getattr(new, name) == getattr(old, name) for name in alike):
        tensors = tensors | resized(tensors, old, new)
    if new.in_chans != old.in_chans:
        if old.in_chans != 3:
            raise CheckpointError(
                f"{path} takes {old.in_chans} channels and cannot be adapted to {new.in_chans}: "
                "only weights for 3 channels can"
            )
        filters = "patch_embed.proj.weight"
        tensors = tensors | {filters: adapt_input_conv(new.in_chans, tensors[filters])}
    shapes = parameter_shapes(new)
    if new.num_classes != old.num_classes:
        heads = ("head.", "head_dist.")
        tensors = {k: v for k, v in tensors.items() if not k.startswith(heads)}
        shapes = {k: v for k, v in shapes.items() if not k.startswith(heads)}
    compare(tensors, shapes, f"{path} has a different architecture than requested")
    return tensors
