"""The architecture of weights that others saved, inferred from the tensors themselves.

The authors' `.pth`, DeiT's, timm's and transformers' files hold no config of ours. Training
arguments beside the tensors help where they agree with them.
"""

from __future__ import annotations

import contextlib
import math
from pathlib import Path
from typing import Any

from ..config import HVTConfig
from ..errors import CheckpointError, HVTError
from .description import understood
from .fitting import State

Size = tuple[int, int]

_NEEDED = (
    "pos_embed", "patch_embed.proj.weight", "blocks.0.attn.qkv.weight", "blocks.0.mlp.fc1.weight"
)  # fmt: skip
_ARGUMENTS: dict[str, Any] = {
    "img_size": (int, tuple, list), "input_size": (int, tuple, list), "num_heads": int,
    "head_dim": int, "pool": str, "pool_kernel": int, "pool_kernel_size": int, "pool_stride": int,
    "pool_dims": int, "no_embed_class": bool, "act_layer": str, "norm_eps": (int, float),
    "global_pool": str,
}  # fmt: skip
"""What arguments may settle, and of which type; MAE's `global_pool` is True or False."""


def infer_config(
    state: State, arguments: dict[str, Any], hints: dict[str, Any], path: str | Path
) -> HVTConfig:
    """The config whose model these tensors are of, if one has them all; `check_weights` compares.

    What shapes leave open is settled by the file's own `arguments`, then by the caller's `hints`.
    """
    for name in _NEEDED:
        if name not in state:
            contents = f"it has {', '.join(sorted(state)[:3])} …" if state else "it has no tensors"
            raise CheckpointError(
                f"{path} is not an HVT, DeiT or plain ViT checkpoint: it has no {name} ({contents})"
            )
    with understood(f"{path} does not describe a model of this family"):
        return _infer(state, _typed(arguments), _typed(hints))


def _typed(values: dict[str, Any]) -> dict[str, Any]:
    """Those of some values that are known arguments of the right type."""
    return {
        name: values[name]
        for name, kind in _ARGUMENTS.items()
        if isinstance(values.get(name), kind) and (kind is bool) == isinstance(values[name], bool)
    }


def _infer(state: State, arguments: dict[str, Any], hints: dict[str, Any]) -> HVTConfig:
    width, in_chans, patch, _ = state["patch_embed.proj.weight"].shape
    tokens = ("cls_token", "dist_token", "reg_token")
    prefix = sum(state[name].shape[1] for name in tokens if name in state)
    image, unplaced = _image(state["pos_embed"].shape[1], prefix, patch, arguments, hints)
    known = hints | arguments
    untold = [name for name in ("act_layer", "norm_eps") if name not in known]
    if "norm_pre.weight" in state and untold:
        raise HVTError(
            "it has a norm before its blocks, like CLIP, and its tensors do not determine "
            f"{' and '.join(untold)}: pass them to load, such as act_layer='quick_gelu' and "
            "norm_eps=1e-5 for OpenAI's models, or use the name of the timm model"
        )
    heads, head_dim = _heads(width, known)
    pooled = sorted(int(name.split(".")[1]) for name in state if name.endswith(".pos_embed"))
    lengths = [state[f"blocks.{i}.pos_embed"].shape[1] - prefix for i in pooled]
    convolved = any(".pool.conv." in name for name in state)
    averaged = {"global_pool": "avg"} if "fc_norm.weight" in state else {}
    kinds = ("act_layer", "norm_eps", "global_pool")
    config = HVTConfig(
        img_size=image,
        patch_size=patch,
        in_chans=in_chans,
        num_classes=state["head.weight"].shape[0] if "head.weight" in state else 0,
        num_heads=heads,
        head_dim=head_dim,
        depth=len({name.split(".")[1] for name in state if name.startswith("blocks.")}),
        pool="conv" if convolved else known.get("pool", "max"),
        class_token="cls_token" in state,
        dist_token="dist_token" in state,
        reg_tokens=state["reg_token"].shape[1] if "reg_token" in state else 0,
        no_embed_class=unplaced,
        fc_norm="fc_norm.weight" in state,
        pre_norm="norm_pre.weight" in state,
        qkv_bias="blocks.0.attn.qkv.bias" in state,
        init_values=1e-5 if "blocks.0.ls1.gamma" in state else None,
        mlp_ratio=state["blocks.0.mlp.fc1.weight"].shape[0] / width,
        **averaged | {name: known[name] for name in kinds if name in known},
    )
    return _pooled(config, tuple(pooled), lengths, known)


_LARGEST = 1024
"""Up to ViT-L's width, heads of 64 channels are the rule; ViT-H's have 80, others 88 or 104."""


def _heads(width: int, known: dict[str, Any]) -> Size:
    heads, head_dim = known.get("num_heads", 0), known.get("head_dim", 0)
    if heads > 0 and width % heads == 0:
        return heads, width // heads
    if head_dim > 0 and width % head_dim == 0:
        return width // head_dim, head_dim
    if width % 64 or width > _LARGEST:
        raise HVTError(
            f"a width of {width} does not determine the number of heads: pass num_heads to load"
        )
    return width // 64, 64


def _image(
    positions: int, prefix: int, patch: int, arguments: dict[str, Any], hints: dict[str, Any]
) -> tuple[Size, bool]:
    """Height and width, and whether the prefix tokens are without positions.

    A hint may be the size to load at, so it counts only where the patches make no square.
    """
    told = arguments.get("no_embed_class", hints.get("no_embed_class"))
    stated = [arguments[key] for key in ("img_size", "input_size") if key in arguments]
    for unplaced in (False, True) if told is None else (told,):
        patches = positions - (0 if unplaced else prefix)
        square = math.isqrt(max(patches, 0)) * patch
        for size in (*stated, square, *([hints["img_size"]] if "img_size" in hints else [])):
            sides = (size, size) if isinstance(size, int) else tuple(size)[-2:]  # after channels
            whole = all(side % patch == 0 for side in sides)
            if whole and math.prod(sides) // patch**2 == patches > 0:
                return sides, unplaced
    raise HVTError(
        f"{positions - prefix} patches of {patch} pixels are not a square: pass the model's "
        "img_size to load"
    )


def _pooled(
    config: HVTConfig, blocks: tuple[int, ...], lengths: list[int], known: dict[str, Any]
) -> HVTConfig:
    """The config with the pooling after these blocks that gives these lengths.

    The arguments are only tried first: the authors' code ignores its own stride setting. Others
    than the usual are not guessed, as several windows give the same lengths.
    """
    even = blocks == config.replace(stages=len(blocks)).pool_blocks if blocks else True
    places = {"stages": len(blocks)} if even else {"pool_after": blocks}
    kernel = known.get("pool_kernel", known.get("pool_kernel_size", 3))
    stated = (kernel, known.get("pool_stride", 2), known.get("pool_dims", 1))
    for kernel, stride, dims in (stated, (3, 2, 1), (3, 2, 2)):
        with contextlib.suppress(HVTError):  # this one leaves no token
            pooled = config.replace(
                **places, pool_kernel=kernel, pool_stride=stride, pool_dims=dims
            )
            if [rows * cols for rows, cols in pooled.grids[1:]] == lengths:
                return pooled
    raise HVTError(
        f"the usual pooling does not give the token counts {lengths} from a {config.grid} grid: "
        "pass pool_kernel, pool_stride and pool_dims to load"
    )
