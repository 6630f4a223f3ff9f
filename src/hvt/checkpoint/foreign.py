"""Checkpoints that others wrote: the authors' `.pth`, DeiT's, timm's and transformers'.

A pickle can run code when it is opened, so none is: tensors, plain values and an
`argparse.Namespace` of them are read by `pickles`, and a file that names anything else is refused
by that name. The architecture is read off the tensors themselves, with the training arguments as a
help where they agree.
"""

from __future__ import annotations

import argparse
import math
import re
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..config import HVTConfig, pooled_length
from ..errors import CheckpointError
from .container import BAD_ZIP, UnsafeCheckpointError
from .description import NOT_AS_EXPECTED, shown
from .pickles import Foreign, TensorEntry, TorchFile

State = dict[str, Tensor]


def read_pickle(path: Path) -> tuple[State, dict[str, Any]]:
    """The tensors of a `.pth` file and the training arguments beside them, if any."""
    try:
        file = TorchFile(path)
        content = file.content
        if not isinstance(content, dict):
            kind = "Tensor" if isinstance(content, TensorEntry) else type(content).__name__
            raise CheckpointError(f"{path} holds a {kind}, not a model's weights")
        state = content
        for key in ("model", "state_dict", "model_ema", "state_dict_ema"):
            if isinstance(content.get(key), dict):
                state = content[key]
                break
        entries = {str(k): v for k, v in state.items() if isinstance(v, TensorEntry)}
        tensors = stripped(file.tensors(entries), path)
    except Foreign as error:
        raise CheckpointError(
            f"{path} carries {error} beside its tensors, so it is not opened: "
            "save its state_dict alone"
        ) from error
    except CheckpointError:
        raise
    except UnsafeCheckpointError as error:
        raise CheckpointError(f"{path} is not opened: {shown(error)}") from error
    except (*NOT_AS_EXPECTED, *BAD_ZIP, RuntimeError) as error:
        raise CheckpointError(
            f"{path} is damaged or cut short and cannot be read ({shown(error)}): "
            "fetch or copy it again"
        ) from error
    arguments = content.get("args")
    return tensors, _plain(vars(arguments)) if isinstance(arguments, argparse.Namespace) else {}


def _plain(arguments: dict[str, Any]) -> dict[str, Any]:
    """Those training arguments that are a text, a number or a pair of them."""
    scalar = (str, int, float, type(None))

    def is_plain(value: Any) -> bool:
        pair = isinstance(value, (list, tuple)) and len(value) <= 2
        return all(isinstance(v, scalar) for v in value) if pair else isinstance(value, scalar)

    return {name: value for name, value in arguments.items() if is_plain(value)}


def stripped(tensors: State, path: Path) -> State:
    """The tensors by names without what DDP and torch.compile put before them."""
    plain = {re.sub(r"^(module\.|_orig_mod\.)+", "", name): t for name, t in tensors.items()}
    if len(plain) < len(tensors):
        raise CheckpointError(f"{path} has tensors both with and without module. or _orig_mod.")
    return plain


# ── the architecture, from the tensors ──────────────────────────────────────────────────────────


_NEEDED = ("pos_embed", "patch_embed.proj.weight", "blocks.0.attn.qkv.weight", "norm.weight")
_KNOWN = re.compile(
    r"(cls|dist|reg)_token|(blocks\.[0-9]+\.)?pos_embed|blocks\.[0-9]+\.ls[12]\.gamma|"
    r"(patch_embed\.proj|norm_pre|norm|fc_norm|head|head_dist)\.(weight|bias)|"
    r"blocks\.[0-9]+\.(norm1|norm2|attn\.qkv|attn\.proj|mlp\.fc1|mlp\.fc2|pool\.conv)\.(weight|bias)"
)


def infer_config(
    state: State, arguments: dict[str, Any], hints: dict[str, Any], path: Path
) -> HVTConfig:
    """The config whose model these tensors fit.

    What shapes leave open is settled by the file's own `arguments`, then by the caller's `hints`.
    """
    strange = [name for name in state if not _KNOWN.fullmatch(name)]
    if strange and len(strange) < len(state):
        more = f" and {len(strange) - 1} more" if len(strange) > 1 else ""
        raise CheckpointError(
            f"{path} is not an HVT, DeiT or plain ViT checkpoint: it has {strange[0]}{more}"
        )
    for name in _NEEDED:
        if name not in state and not (name == "norm.weight" and "fc_norm.weight" in state):
            contents = f"it has {', '.join(sorted(state)[:3])} …" if state else "it has no tensors"
            raise CheckpointError(
                f"{path} is not an HVT, DeiT or plain ViT checkpoint: it has no {name} ({contents})"
            )
    try:
        return _infer(state, arguments, hints)
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"{path} does not describe a model of this family: {error}"
        ) from error


def block_numbers(state: State) -> set[int]:
    """The blocks that have tensors."""
    return {int(m.group(1)) for name in state if (m := re.match(r"blocks\.([0-9]{1,9})\.", name))}


def _infer(state: State, arguments: dict[str, Any], hints: dict[str, Any]) -> HVTConfig:
    width, in_chans, patch, _ = state["patch_embed.proj.weight"].shape
    tokens = ("cls_token", "dist_token", "reg_token")
    prefix = sum(state[name].shape[1] for name in tokens if name in state)
    blocks = block_numbers(state)
    image, unplaced = _image(state["pos_embed"].shape[1], prefix, patch, arguments, hints)
    arguments = hints | _legal(arguments)
    if "norm_pre.weight" in state:
        _ask_for(("act_layer", "norm_eps"), arguments)
    heads, head_dim = _heads(width, arguments)
    lengths = {
        i: state[f"blocks.{i}.pos_embed"].shape[1]
        for i in sorted(blocks)
        if f"blocks.{i}.pos_embed" in state
    }
    convolved = any(".pool.conv." in name for name in state)
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
        class_token="cls_token" in state,
        dist_token="dist_token" in state,
        reg_tokens=state["reg_token"].shape[1] if "reg_token" in state else 0,
        no_embed_class=unplaced,
        fc_norm="fc_norm.weight" in state,
        pre_norm="norm_pre.weight" in state,
        qkv_bias="blocks.0.attn.qkv.bias" in state,
        init_values=1e-5 if "blocks.0.ls1.gamma" in state else None,
        mlp_ratio=state["blocks.0.mlp.fc1.weight"].shape[0] / width,
        **({"global_pool": "avg"} if "fc_norm.weight" in state else {})
        | {name: arguments[name] for name in _KINDS if arguments.get(name) is not None},
    )
    even = None if lengths and config.depth % len(lengths) else config.replace(stages=len(lengths))
    return even if even and even.pool_blocks == config.pool_blocks else config


_KINDS: dict[str, Any] = {"act_layer": str, "norm_eps": (int, float), "global_pool": str}
"""Fields that others' arguments may have under the same name for another thing."""


def _legal(arguments: dict[str, Any]) -> dict[str, Any]:
    """Without what means something else: MAE's `global_pool` is True or False."""
    return {
        name: value
        for name, value in arguments.items()
        if name not in _KINDS or (isinstance(value, _KINDS[name]) and not isinstance(value, bool))
    }


_LARGEST = 1024
"""Up to ViT-L's width, heads of 64 channels are the rule; ViT-H's have 80, others 88 or 104."""


def _ask_for(names: tuple[str, ...], arguments: dict[str, Any]) -> None:
    """Refuse a norm before the blocks, as CLIP has, without what CLIPs differ in."""
    missing = [name for name in names if name not in arguments]
    if missing:
        raise CheckpointError(
            "it has a norm before its blocks, as CLIP's models have, and tensors do not tell "
            f"{' and '.join(missing)}: pass them to load, such as act_layer='quick_gelu' and "
            "norm_eps=1e-5 for OpenAI's, or name the model of timm"
        )


def _heads(width: int, arguments: dict[str, Any]) -> tuple[int, int]:
    heads, head_dim = arguments.get("num_heads"), arguments.get("head_dim")
    if isinstance(heads, int) and heads > 0 and width % heads == 0:
        return heads, width // heads
    if isinstance(head_dim, int) and head_dim > 0 and width % head_dim == 0:
        return width // head_dim, head_dim
    if width % 64 or width > _LARGEST:
        raise CheckpointError(
            f"a width of {width} does not tell the number of heads: pass num_heads to load"
        )
    return width // 64, 64


def _image(
    positions: int, prefix: int, patch: int, arguments: dict[str, Any], hints: dict[str, Any]
) -> tuple[tuple[int, int], bool]:
    """Height and width, and whether the prefix tokens are without positions.

    A hint may be the size to load at, so it counts only where the patches make no square.
    """
    asked = arguments.get("no_embed_class", hints.get("no_embed_class"))
    options = [(positions - prefix, False), (positions, True)] if prefix else [(positions, False)]
    sides = (arguments.get("img_size"), arguments.get("input_size")), (hints.get("img_size"),)
    for stated, squares in ((sides[0], False), ((), True), (sides[1], False)):
        fits = []
        for patches, unplaced in options:
            square = (math.isqrt(max(patches, 0)) * patch,) if squares else stated
            fits += [(size, unplaced) for size in _sizes(patches, patch, square)]
        if len({unplaced for _, unplaced in fits}) > 1:
            if asked is not None:
                return next(fit for fit in fits if fit[1] == bool(asked))
            raise CheckpointError(
                f"{positions} positions may or may not include those of {prefix} prefix tokens: "
                "pass no_embed_class to load"
            )
        if fits:
            return fits[0]
    patches = positions - prefix
    raise CheckpointError(
        f"{patches} patches of {patch} pixels are not a square: pass the model's img_size to load"
    )


def _sizes(patches: int, patch: int, stated: tuple[Any, ...]) -> list[tuple[int, int]]:
    """Those of some sizes that have so many patches."""
    sizes = []
    for value in stated:
        size = (value, value) if isinstance(value, int) else value
        if isinstance(size, (tuple, list)) and len(size) == 2 and patches > 0:
            rows, cols = size[0] // patch, size[1] // patch
            if rows * cols == patches and size[0] % patch == size[1] % patch == 0:
                sizes.append((size[0], size[1]))
    return sizes


def _pooling(
    grid: tuple[int, int], lengths: list[int], arguments: dict[str, Any]
) -> tuple[int, int, int]:
    """Kernel, stride and 1D or 2D that give these lengths.

    The arguments are only tried first: the authors' code ignores its own stride setting.
    """
    stated = [
        (
            arguments.get("pool_kernel", arguments.get("pool_kernel_size")),
            arguments.get("pool_stride"),
            arguments.get("pool_dims", 1),
        )
    ]
    usual = [(3, 2, 1), (3, 2, 2)]
    others = [(k, s, dims) for dims in (1, 2) for s in (2, 3, 4) for k in range(2, 8)]
    for kernel, stride, dims in (*stated, *usual, *others):
        if not isinstance(kernel, int) or not isinstance(stride, int) or min(kernel, stride) < 1:
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
    (r"^(?:cls_)?classifier\.", "head."),
    (r"^distillation_classifier\.", "head_dist."),
)


def from_transformers(state: State, path: Path) -> State:
    """A transformers ViT or DeiT state dict in our names; others come back as they are."""
    if not any(".attention.attention.query." in name for name in state):
        return state
    renamed: State = {}
    for name, tensor in state.items():
        for pattern, ours in _TRANSFORMERS:
            name = re.sub(pattern, ours, name)
        renamed[name] = tensor
    # Its DeiTs have the token whether or not a head reads it; one that none reads is a register.
    distilled = renamed.pop("embeddings.distillation_token", None)
    if distilled is not None:
        renamed["dist_token" if "head_dist.weight" in renamed else "reg_token"] = distilled
    for name in [n for n in renamed if ".attention.attention.query." in n]:
        names = [name.replace(".query.", f".{part}.") for part in ("query", "key", "value")]
        try:
            joined = torch.cat([renamed.pop(part) for part in names])
        except (KeyError, RuntimeError) as error:
            raise CheckpointError(f"{path} has no {' or '.join(names)} that fit") from error
        renamed[name.replace(".attention.attention.query.", ".attn.qkv.")] = joined
    return renamed


def transformers_config(config: dict[str, Any]) -> tuple[dict[str, Any], list[Any] | None]:
    """What a transformers `config.json` knows and weights do not tell, and the class names."""
    if config.get("hidden_act", "gelu") != "gelu":
        raise ValueError(f"hidden_act={config['hidden_act']!r}, where this family has gelu")
    labels = {int(index): name for index, name in (config.get("id2label") or {}).items()}
    known = {"num_heads": config.get("num_attention_heads")}
    known["norm_eps"] = config.get("layer_norm_eps")
    known["img_size"] = config.get("image_size")
    if sorted(labels) != list(range(len(labels))):
        raise ValueError("id2label does not number the classes from 0")
    names = [labels[index] for index in range(len(labels))]
    return {name: value for name, value in known.items() if value is not None}, names or None


# PIL's numbers, and timm's names for them.
_RESAMPLE = {
    0: "nearest", 1: "lanczos", 2: "bilinear", 3: "bicubic", 4: "box", 5: "hamming"
}  # fmt: skip


def transformers_preprocessing(processor: dict[str, Any]) -> dict[str, Any]:
    """timm's terms for a transformers `preprocessor_config.json`.

    What it leaves out is as in transformers' own processors of ViT and DeiT.
    """
    kind = processor.get("image_processor_type") or processor.get("feature_extractor_type")
    usual: dict[str, Any] = {"size": 224, "resample": 2}
    if str(kind).startswith("DeiT"):
        usual = {"size": 256, "crop_size": 224, "do_center_crop": True, "resample": 3}
    processor = usual | {name: value for name, value in processor.items() if value is not None}
    factor = processor.get("rescale_factor", 1 / 255)
    if not processor.get("do_rescale", True) or not math.isclose(factor, 1 / 255, rel_tol=1e-3):
        raise ValueError("the images' values are not brought to 0 … 1, as this family's are")
    theirs = {"mean": processor.get("image_mean"), "std": processor.get("image_std")}
    if not processor.get("do_normalize", True):
        theirs = {"mean": [0.0] * 3, "std": [1.0] * 3}
    theirs = {name: [0.5] * 3 if value is None else value for name, value in theirs.items()}
    number = processor.get("resample")
    theirs["interpolation"] = None if number is None else _RESAMPLE[number]
    known = {name: value for name, value in theirs.items() if value is not None}
    known["crop_pct"] = 1.0
    size = processor.get("size")
    if size is not None and not (isinstance(size, dict) and "shortest_edge" in size):
        known["crop_mode"] = "squash"  # to height × width, whatever shape the image has
    if processor.get("do_center_crop"):
        known["crop_pct"] = _side(processor["crop_size"]) / _side(processor["size"])
    return known


def _side(size: Any) -> float:
    """Pixels from transformers' `224`, `{"height": 224, …}` or `{"shortest_edge": 224}`."""
    if isinstance(size, dict):
        size = size["shortest_edge" if "shortest_edge" in size else "height"]
    return float(size)
