"""Checkpoints in and out: our own files whole, others' read safely, all at any size."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from ..elastic import ElasticSettings, choose, configs_of, label
from ..errors import CheckpointError, HVTError
from ..files import atomic_write
from ..model import HVT
from . import checksum
from .description import describe
from .fitting import compare, elastic_shapes, fitted, parameter_shapes
from .reading import Checkpoint, read

__all__ = ["load", "load_into", "read", "save"]


def save(
    model: HVT,
    path: str | Path,
    class_names: Sequence[str] | None = None,
    preprocessing: dict[str, Any] | None = None,
    dtype: torch.dtype | None = None,
) -> None:
    """Write weights, config, class names and preprocessing to one safetensors file, atomically.

    Names and preprocessing (mean, std, interpolation, crop_pct, crop_mode) default to the model's.
    `dtype` is the precision in the file: `torch.float16` halves its size, and `load` still returns
    the model in its own precision. The same model gives the same bytes.
    `model.pretrained_cfg["origin"]`, the source of the weights, is saved too.
    A model that does not match its config, such as a pruned one, raises an error.
    """
    metadata = {"format": "pt", "hvt": describe(model, class_names, preprocessing)}
    compare(
        model.state_dict(),
        elastic_shapes(model.config, configs_of(model)[1:], model.state_dict()),
        f"{path} was not written, because the model does not match its config",
    )
    tensors = {name: _stored(name, t, dtype) for name, t in model.state_dict().items()}
    metadata[checksum.KEY] = checksum.checksum(checksum.tensor_parts(metadata, tensors))
    with atomic_write(path) as temporary:
        save_file(tensors, temporary, metadata=metadata)
        _sort_metadata(temporary)


def _stored(name: str, tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    """A tensor in the precision of a file, which must have room for its values."""
    tensor = tensor.detach().cpu().contiguous()
    stored = tensor if dtype is None else tensor.to(dtype)
    if stored is not tensor and not stored.isfinite().all() and tensor.isfinite().all():
        largest = tensor.abs().max().item()
        raise HVTError(f"{name} has the value {largest:g}, too large for {dtype}: use another")
    return stored


def _sort_metadata(path: Path) -> None:
    """Rewrite a safetensors header in place: the library writes metadata in a random order."""
    with path.open("r+b") as file:
        size = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(size))
        header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
        text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
        assert len(text) <= size  # written as the library does, and padded with spaces
        file.seek(8)
        file.write(text.ljust(size))


def load(
    path: str | Path,
    device: str | torch.device = "cpu",
    gflops: float | str | None = None,
    **overrides: Any,
) -> HVT:
    """Load the model of a checkpoint, in evaluation mode.

    Reads our files, the authors' `.pth`, DeiT's and timm's plain ViTs (`.pth` or safetensors) and
    Hugging Face directories. `overrides` are fields of `HVTConfig`: another `img_size`,
    `patch_size` or `in_chans` resizes the weights, another `num_classes` gets a new head.

    An elastic checkpoint returns its largest setting, whose `at` returns the others; `gflops` and
    `overrides` load one setting as a plain model, with `gflops` the largest within that cost.
    """
    checkpoint = read(path, overrides)
    if gflops is not None or overrides:
        checkpoint = one_setting(checkpoint, gflops)
    config = checkpoint.config.replace(**overrides)
    tensors = checkpoint.tensors
    if not checkpoint.settings:
        tensors = fitted(tensors, checkpoint.config, config, checkpoint.path)
    model = HVT(config)
    if checkpoint.settings:
        own = [_own(checkpoint.tensors, i) for i in range(len(checkpoint.settings))]
        model.settings = ElasticSettings(checkpoint.settings, own)
    model.to(checkpoint.dtype)
    model.load_state_dict(tensors, strict=False)  # a new head is not in them
    model.pretrained_cfg.update(checkpoint.preprocessing)
    if checkpoint.class_names and len(checkpoint.class_names) == model.num_classes:
        model.pretrained_cfg["label_names"] = tuple(checkpoint.class_names)
    if checkpoint.origin:
        model.pretrained_cfg["origin"] = checkpoint.origin
    return model.to(device).eval()


def one_setting(checkpoint: Checkpoint, gflops: float | str | None = None) -> Checkpoint:
    """An elastic checkpoint's largest setting within a budget, as if it were all there is."""
    configs = (checkpoint.config, *checkpoint.settings)
    if gflops is not None and len(configs) == 1:
        raise CheckpointError(
            f"{checkpoint.path} is not elastic, its only setting is {label(configs[0])}: leave "
            "the budget out"
        )
    place = choose(configs, math.inf if gflops is None else gflops)
    own = _own(checkpoint.tensors, place - 1)
    tensors = {
        name: own[name] if name in own else checkpoint.tensors[name]
        for name in parameter_shapes(configs[place])
    }
    return dataclasses.replace(checkpoint, config=configs[place], tensors=tensors, settings=())


def _own(tensors: dict[str, Tensor], index: int) -> dict[str, Tensor]:
    """The tensors of a smaller setting's own; none of the largest, -1."""
    prefix = f"settings.{index}."
    return {k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)}


def load_into(model: HVT, path: str | Path) -> None:
    """Take a checkpoint's weights into a model of the same architecture, resizing them to it."""
    checkpoint = one_setting(read(path, model.config.to_dict()))
    ours, theirs = model.config, checkpoint.config
    tensors = fitted(checkpoint.tensors, theirs, ours, checkpoint.path)
    theirs = theirs.replace(img_size=ours.img_size, patch_size=ours.patch_size)
    for name in (*ours.to_dict(), "head_pool"):  # shapes tell neither heads nor kinds of pooling
        value, wanted = getattr(theirs, name), getattr(ours, name)
        if checkpoint.described and value != wanted and name not in _MAY_DIFFER:
            raise CheckpointError(
                f"{checkpoint.path} has another architecture: its {name} is {value!r}, the "
                f"model's is {wanted!r}"
            )
    model.load_state_dict(tensors, strict=False)


_MAY_DIFFER = (
    "in_chans", "num_classes", "embed_dim", "init_values", "stages", "pool_after", "global_pool",
    "drop_rate", "pos_drop_rate", "proj_drop_rate", "attn_drop_rate", "drop_path_rate",
)  # fmt: skip
"""Fields that weights can follow, that shapes or others tell, or that count in training only."""
