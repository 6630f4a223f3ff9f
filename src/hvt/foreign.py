"""Checkpoints that others wrote: the authors' `.pth`, DeiT's, timm's and transformers'.

A pickle can run code when it is opened, so only tensors and an `argparse.Namespace` of plain values
are ever unpickled; a file that names anything else is refused by that name. The architecture is
read off the tensors themselves, with the training arguments as a help where they agree.
"""

from __future__ import annotations

import argparse
import math
import pickle
import re
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .config import HVTConfig
from .errors import CheckpointError, HVTError
from .pooling import pooled_length

State = dict[str, Tensor]

_PLAIN = (str, bytes, int, float, bool, type(None), torch.Size, torch.dtype, torch.device)


def read_pickle(path: Path) -> tuple[State, dict[str, Any]]:
    """The tensors of a `.pth` file and the training arguments beside them, if any."""
    _refuse_globals(path)
    try:
        with torch.serialization.safe_globals([argparse.Namespace]):
            content = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"{path} carries more than tensors and plain arguments ({_named(error)}), "
            "so it is not opened"
        ) from error
    except (RuntimeError, EOFError, KeyError, IndexError, ValueError, TypeError) as error:
        raise CheckpointError(
            f"{path} is damaged or cut short and cannot be read: fetch or copy it again"
        ) from error
    _refuse_objects(content, path)
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} holds a {type(content).__name__}, not a model's weights")
    arguments = content.get("args")
    state = content
    for key in ("model", "state_dict", "model_ema", "state_dict_ema"):
        if isinstance(content.get(key), dict):
            state = content[key]
            break
    tensors = {strip(k): v for k, v in state.items() if isinstance(v, Tensor)}
    return tensors, vars(arguments) if isinstance(arguments, argparse.Namespace) else {}


def strip(name: str) -> str:
    """A parameter's name without what DDP and torch.compile put before it."""
    return re.sub(r"^(module\.|_orig_mod\.)+", "", name)


def _refuse_globals(path: Path) -> None:
    """Read the names a zipped checkpoint would import, without importing them."""
    try:
        with torch.serialization.safe_globals([argparse.Namespace]):
            names = torch.serialization.get_unsafe_globals_in_checkpoint(path)
    except (RuntimeError, ValueError, pickle.UnpicklingError, EOFError, OSError, IndexError):
        return  # not a zip archive, or damaged: torch.load says which
    if names:
        raise CheckpointError(
            f"{path} carries {', '.join(sorted(names))} beside its tensors, "
            "so it is not opened: save its state_dict alone"
        )


def _named(error: Exception) -> str:
    found = re.search(r"(?:GLOBAL|global|class) ['\"]?([\w.]+)", str(error))
    return found.group(1) if found else str(error).splitlines()[0]


def _refuse_objects(value: Any, path: Path) -> None:
    if isinstance(value, argparse.Namespace):
        _refuse_objects(vars(value), path)
    elif isinstance(value, dict):
        for key, item in value.items():
            _refuse_objects(key, path)
            _refuse_objects(item, path)
    elif isinstance(value, (list, tuple, set)) and not isinstance(value, torch.Size):
        for item in value:
            _refuse_objects(item, path)
    elif not isinstance(value, (*_PLAIN, Tensor)):
        kind = type(value)
        raise CheckpointError(
            f"{path} carries a {kind.__module__}.{kind.__qualname__} beside its tensors, "
            "so it is not used"
        )


# ── the architecture, from the tensors ──────────────────────────────────────────────────────────


def infer_config(state: State, arguments: dict[str, Any], path: Path) -> HVTConfig:
    """The config whose model these tensors fit; `arguments` settle what shapes leave open."""
    needed = ("pos_embed", "patch_embed.proj.weight", "blocks.0.attn.qkv.weight", "norm.weight")
    for name in needed:
        if name not in state:
            found = ", ".join(sorted(state)[:3]) or "no tensors"
            raise CheckpointError(
                f"{path} is no HVT, DeiT or plain ViT checkpoint: it has no {name!r} "
                f"(it has {found} …)"
            )
    try:
        return _infer(state, arguments)
    except (HVTError, AttributeError, IndexError, ValueError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"{path} describes no model of this family: {error}") from error


def _infer(state: State, arguments: dict[str, Any]) -> HVTConfig:
    width, in_chans, patch, _ = state["patch_embed.proj.weight"].shape
    prefix = int("cls_token" in state)
    blocks = {int(m.group(1)) for name in state if (m := re.match(r"blocks\.(\d+)\.", name))}
    heads, head_dim = _heads(width, arguments)
    lengths = {
        i: state[f"blocks.{i}.pos_embed"].shape[1]
        for i in sorted(blocks)
        if f"blocks.{i}.pos_embed" in state
    }
    convolved = any(".pool.conv." in name for name in state)
    image = _image(state["pos_embed"].shape[1] - prefix, patch, arguments)
    grid = (image[0] // patch, image[1] // patch)
    kernel, stride, dims = _pooling(grid, [n - prefix for n in lengths.values()], arguments)
    config = HVTConfig(
        img_size=image,
        patch_size=patch,
        in_chans=in_chans,
        num_classes=state["head.weight"].shape[0] if "head.weight" in state else 0,
        num_heads=heads,
        head_dim=head_dim,
        depth=len(blocks),
        pool_after=tuple(lengths),
        pool="conv" if convolved else arguments.get("pool", "max"),
        pool_kernel=kernel,
        pool_stride=stride,
        pool_dims=dims,
        class_token=bool(prefix),
        mlp_ratio=state["blocks.0.mlp.fc1.weight"].shape[0] / width,
    )
    even = None if lengths and config.depth % len(lengths) else config.replace(stages=len(lengths))
    return even if even and even.pool_blocks == config.pool_blocks else config


def _heads(width: int, arguments: dict[str, Any]) -> tuple[int, int]:
    heads, head_dim = arguments.get("num_heads"), arguments.get("head_dim")
    if isinstance(heads, int) and heads > 0 and width % heads == 0:
        return heads, width // heads
    if isinstance(head_dim, int) and head_dim > 0 and width % head_dim == 0:
        return width // head_dim, head_dim
    if width % 64:
        raise CheckpointError(
            f"a width of {width} does not tell the number of heads: pass num_heads to load"
        )
    return width // 64, 64


def _image(patches: int, patch: int, arguments: dict[str, Any]) -> tuple[int, int]:
    for given in (arguments.get("img_size"), arguments.get("input_size")):
        size = (given, given) if isinstance(given, int) else given
        if isinstance(size, (tuple, list)) and len(size) == 2:
            rows, cols = size[0] // patch, size[1] // patch
            if rows * cols == patches and size[0] % patch == size[1] % patch == 0:
                return size[0], size[1]
    side = math.isqrt(patches)
    if side * side != patches:
        raise CheckpointError(
            f"{patches} patches of {patch} pixels are no square: pass the model's img_size to load"
        )
    return side * patch, side * patch


def _pooling(
    grid: tuple[int, int], lengths: list[int], arguments: dict[str, Any]
) -> tuple[int, int, int]:
    """Kernel, stride and 1D or 2D that give these lengths.

    The arguments are only tried first: the authors' code ignores its own stride setting.
    """
    given = [
        (
            arguments.get("pool_kernel", arguments.get("pool_kernel_size")),
            arguments.get("pool_stride"),
            arguments.get("pool_dims", 1),
        )
    ]
    usual = [(3, 2, 1), (3, 2, 2)]
    others = [(k, s, dims) for dims in (1, 2) for s in (2, 3, 4) for k in range(2, 8)]
    for kernel, stride, dims in (*given, *usual, *others):
        if not isinstance(kernel, int) or not isinstance(stride, int):
            continue
        if _lengths(grid, kernel, stride, dims, len(lengths)) == lengths:
            return kernel, stride, dims
    raise CheckpointError(f"no pooling gives the token counts {lengths} from a {grid} grid")


def _lengths(grid: tuple[int, int], kernel: int, stride: int, dims: int, stages: int) -> list[int]:
    rows, cols = grid if dims == 2 else (1, grid[0] * grid[1])
    pad = (kernel - 1) // 2 if dims == 2 else 0
    lengths = []
    for _ in range(stages):
        cols = pooled_length(cols, kernel, stride, pad)
        rows = pooled_length(rows, kernel, stride, pad) if dims == 2 else 1
        lengths.append(rows * cols)
    return lengths


# ── Hugging Face transformers' names ────────────────────────────────────────────────────────────

_TRANSFORMERS = (
    (r"^(?:vit|deit)\.", ""),
    (r"^embeddings\.cls_token$", "cls_token"),
    (r"^embeddings\.position_embeddings$", "pos_embed"),
    (r"^embeddings\.patch_embeddings\.projection\.", "patch_embed.proj."),
    (r"^encoder\.layer\.", "blocks."),
    (r"\.layernorm_before\.", ".norm1."),
    (r"\.layernorm_after\.", ".norm2."),
    (r"\.attention\.output\.dense\.", ".attn.proj."),
    (r"\.intermediate\.dense\.", ".mlp.fc1."),
    (r"(?<!attention)\.output\.dense\.", ".mlp.fc2."),
    (r"^layernorm\.", "norm."),
    (r"^classifier\.", "head."),
)


def from_transformers(state: State) -> State:
    """A transformers ViT or DeiT state dict in our names; others come back as they are."""
    if not any(".attention.attention.query." in name for name in state):
        return state
    renamed: State = {}
    for name, tensor in state.items():
        for pattern, ours in _TRANSFORMERS:
            name = re.sub(pattern, ours, name)
        renamed[name] = tensor
    for name in [n for n in renamed if ".attention.attention.query." in n]:
        prefix, kind = re.fullmatch(r"(.*)\.attention\.attention\.query\.(\w+)", name).groups()  # type: ignore[union-attr]
        parts = [
            renamed.pop(f"{prefix}.attention.attention.{p}.{kind}")
            for p in ("query", "key", "value")
        ]
        renamed[f"{prefix}.attn.qkv.{kind}"] = torch.cat(parts)
    return renamed
