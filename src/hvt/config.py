"""What an architecture is: one frozen, validated dataclass of plain values."""

from __future__ import annotations

import dataclasses
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .errors import HVTError, did_you_mean
from .fields import MAX_COUNT, check_most
from .fields import field as _field
from .files import atomic_write, open_regular

MAX_SIZE = 10_000
"""Blocks, tokens of a pooling window, and the MLP's ratio. Checking a config takes time in
proportion to its depth, and the config may come from a file that was made to take for ever."""

KINDS = ("max", "avg", "conv")

Grid = tuple[int, int]
"""Rows and columns of tokens; a sequence is one row."""


def pooled_length(n: int, kernel: int, stride: int, pad: int = 0) -> int:
    """Length after pooling, `floor((n + 2·pad - kernel) / stride) + 1`; below 1 means no token."""
    return (n + 2 * pad - kernel) // stride + 1


def padding(dims: int, kernel: int) -> int:
    """1D pooling has no padding; 2D pooling pads as CNNs do, so that stride 2 halves the grid."""
    return (kernel - 1) // 2 if dims == 2 else 0


def window(dims: int, size: int | Grid) -> Grid:
    """Rows and columns of a kernel or stride given as one number; of a sequence, one row."""
    if isinstance(size, tuple):
        return size
    return (size, size) if dims == 2 else (1, size)


@dataclass(frozen=True)
class HVTConfig:
    """Everything that tells one model of the family from another.

    `HVT(config)` builds it, `cost(config)` prices it, a checkpoint carries it as JSON. A value
    that cannot work is refused here, by an `HVTError` that names the field and what would be right.
    """

    img_size: int | tuple[int, int] = _field(224, "image height and width in pixels: N or HxW")
    patch_size: int = _field(16, "side of a square patch in pixels")
    in_chans: int = _field(3, "image channels")
    num_classes: int = _field(1000, "outputs of the classifier; 0 leaves it out")
    num_heads: int = _field(6, "attention heads per block")
    head_dim: int = _field(64, "width of one head; the token width is heads × this")
    embed_dim: int | None = _field(None, "token width; only to state it, must be heads × head_dim")
    depth: int = _field(12, "number of blocks, L")
    stages: int | None = _field(None, "number of pooling stages, M, spread evenly over the blocks")
    pool_after: tuple[int, ...] | None = _field(None, "the blocks to pool after, instead of stages")
    pool: str = _field("max", "pooling kind: max, avg or conv")
    pool_kernel: int | tuple[int, int] = _field(3, "pooling window: N, or HxW of the grid")
    pool_stride: int | tuple[int, int] = _field(2, "pooling stride: N, or HxW of the grid")
    pool_dims: int = _field(1, "1 pools the token sequence, 2 pools the token grid")
    class_token: bool = _field(False, "prepend a class token, as DeiT does")
    dist_token: bool = _field(False, "a second, distilled token with a head of its own, as in DeiT")
    reg_tokens: int = _field(0, "register tokens after the class token, read by no head")
    retention: tuple[int, ...] | None = _field(
        None, "tokens that leave each block's attention, class token counted: PoWER"
    )
    merge: int | tuple[int, ...] | None = _field(
        None,
        "tokens that each block merges into their most similar ones: ToMe's r; an average head "
        "counts a merged token once",
    )
    proportional_attention: bool = _field(
        False, "a pooled or merged token counts in attention as the tokens it stands for"
    )
    global_pool: str | None = _field(None, "what the head reads: avg, token, or '' for all tokens")
    fc_norm: bool = _field(False, "norm after the average instead of before it, as timm does")
    no_embed_class: bool = _field(False, "no positions for class and register tokens")
    pre_norm: bool = _field(False, "norm before the first block, as CLIP does")
    norm_eps: float = _field(1e-6, "epsilon of the norms")
    qkv_bias: bool = _field(True, "bias of queries, keys and values")
    init_values: float | None = _field(None, "LayerScale's first value; none leaves it out")
    act_layer: str = _field("gelu", "activation of the MLP: gelu, gelu_tanh or quick_gelu")
    mlp_ratio: float = _field(4.0, "hidden width of the MLP over the token width")
    drop_rate: float = _field(0.0, "dropout before the classifier")
    pos_drop_rate: float = _field(0.0, "dropout after the first positional embedding")
    proj_drop_rate: float = _field(0.0, "dropout after the attention and MLP projections")
    attn_drop_rate: float = _field(0.0, "dropout on the attention weights")
    drop_path_rate: float = _field(0.1, "stochastic depth of the last block, linear from 0")

    def __post_init__(self) -> None:
        self._normalise()
        self._check_ranges()
        self._check_width()
        self._check_head()
        self._check_pooling()
        self._check_retention()
        self._check_merge()

    # ── what follows from the fields ────────────────────────────────────────────────────────────

    @property
    def image(self) -> tuple[int, int]:
        """Height and width of the image."""
        return self.img_size if isinstance(self.img_size, tuple) else (self.img_size, self.img_size)

    @property
    def grid(self) -> tuple[int, int]:
        """Rows and columns of patches."""
        return self.image[0] // self.patch_size, self.image[1] // self.patch_size

    @property
    def width(self) -> int:
        """D, the width of a token."""
        return self.num_heads * self.head_dim

    @property
    def mlp_width(self) -> int:
        # A ratio that was found by dividing two widths may be just below what gives them back.
        return int(self.width * self.mlp_ratio + 1e-6)

    @property
    def num_prefix_tokens(self) -> int:
        """Class, distilled and register tokens, which are never pooled or merged."""
        return int(self.class_token) + int(self.dist_token) + self.reg_tokens

    @property
    def head_pool(self) -> str:
        """`global_pool`, or what follows from the class token where it is not set."""
        if self.global_pool is None:
            return "token" if self.class_token else "avg"
        return self.global_pool

    @property
    def pool_blocks(self) -> tuple[int, ...]:
        """The blocks whose output is pooled: the first of each stage, 0, L/M, 2L/M …"""
        if self.pool_after is not None:
            return self.pool_after
        stages = self.stages or 0
        return tuple(m * (self.depth // stages) for m in range(stages))

    @property
    def grids(self) -> tuple[tuple[int, int], ...]:
        """Rows and columns of tokens at first and after each pooling; 1D pooling leaves one row."""
        grids = [self.grid]
        for _ in self.pool_blocks:
            grids.append(self._pooled(grids[-1]))
        return tuple(grids)

    @property
    def tokens(self) -> tuple[int, ...]:
        """Sequence length at first and after each pooling, with the class token where there is one.

        With a retention or merging, at first and after each block that has fewer.

        >>> HVTConfig(stages=4).tokens
        (196, 97, 48, 23, 11)
        """
        lengths = [rows * cols + self.num_prefix_tokens for rows, cols in self.grids]
        for kept in self.kept or ():
            if kept < lengths[-1]:
                lengths.append(kept)
        return tuple(lengths)

    @property
    def kept(self) -> tuple[int, ...] | None:
        """Tokens that leave each block's attention: PoWER's or ToMe's; None where all do.

        At most half of the patches can be merged in one block, however many are asked for.
        """
        if self.merge is None:
            return self.retention
        asked = (self.merge,) * self.depth if isinstance(self.merge, int) else self.merge
        patches, kept = self.grid[0] * self.grid[1], []
        for merged in asked:
            patches -= min(merged, patches // 2)
            kept.append(patches + self.num_prefix_tokens)
        return tuple(kept)

    # ── plain data ──────────────────────────────────────────────────────────────────────────────

    def to_dict(self) -> dict[str, Any]:
        """Plain values that JSON can carry; `from_dict` is the way back."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> HVTConfig:
        """A config from plain values, refusing names that are not fields."""
        check_fields(values)
        return cls(**values)

    def replace(self, **overrides: Any) -> HVTConfig:
        """The same config with other values; `stages` and `pool_after` displace each other, and
        a class token asked for or dropped takes the head along.

        A retention follows another image size, patch size or depth in proportion.
        """
        check_fields(overrides)
        if "pool_after" in overrides:
            overrides.setdefault("stages", None)
        elif "stages" in overrides:
            overrides.setdefault("pool_after", None)
        if {"num_heads", "head_dim"} & set(overrides):
            overrides.setdefault("embed_dim", None)
        if overrides.get("class_token", self.class_token) != self.class_token:
            overrides.setdefault("global_pool", None)
        resizes = {"img_size", "patch_size", "depth"} & set(overrides)
        if self.retention is not None and resizes and "retention" not in overrides:
            whole = dataclasses.replace(self, **overrides, retention=None)
            overrides["retention"] = self._retained(whole)
        return dataclasses.replace(self, **overrides)

    # ── validation ──────────────────────────────────────────────────────────────────────────────

    def _normalise(self) -> None:
        size = self.img_size
        if isinstance(size, (list, tuple)):
            if len(size) != 2:
                raise HVTError(f"img_size={size!r} must be one number or (height, width)")
            size = (size[0], size[1])
            object.__setattr__(self, "img_size", size[0] if size[0] == size[1] else size)
        for name in ("pool_kernel", "pool_stride"):
            value = getattr(self, name)
            if isinstance(value, (list, tuple)):
                if len(value) != 2:
                    raise HVTError(f"{name}={value!r} must be one number or (rows, columns)")
                same = value[0] == value[1] and self.pool_dims == 2
                object.__setattr__(self, name, value[0] if same else tuple(value))
        if isinstance(self.merge, (list, tuple)):
            object.__setattr__(self, "merge", tuple(self.merge))
        if isinstance(self.pool_after, (list, tuple)):
            object.__setattr__(self, "pool_after", tuple(self.pool_after))
        elif self.pool_after is not None:
            raise HVTError(
                f"pool_after={self.pool_after!r} must be a list of blocks, such as (0, 6)"
            )
        if isinstance(self.retention, (list, tuple)):
            object.__setattr__(self, "retention", tuple(self.retention))
        elif self.retention is not None:
            raise HVTError(f"retention={self.retention!r} must be a list of token counts")

    def _check_ranges(self) -> None:
        whole = {
            "img_size height": (self.image[0], 1),
            "img_size width": (self.image[1], 1),
            "patch_size": (self.patch_size, 1),
            "in_chans": (self.in_chans, 1),
            "num_classes": (self.num_classes, 0),
            "num_heads": (self.num_heads, 1),
            "head_dim": (self.head_dim, 1),
            "depth": (self.depth, 1),
            "stages": (0 if self.stages is None else self.stages, 0),
            "reg_tokens": (self.reg_tokens, 0),
        }
        for name in ("pool_kernel", "pool_stride"):
            value = getattr(self, name)
            if isinstance(value, tuple):
                whole[f"{name} rows"], whole[f"{name} columns"] = (value[0], 1), (value[1], 1)
            else:
                whole[name] = (value, 1)
        if self.embed_dim is not None:
            whole["embed_dim"] = (self.embed_dim, 1)
        for name, (value, least) in whole.items():
            if not _is_whole(value) or value < least:
                raise HVTError(f"{name}={value!r} must be a whole number of at least {least}")
            timed = name in ("depth", "pool_kernel", "pool_stride")
            check_most(name, value, MAX_SIZE if timed else MAX_COUNT)
        for name in ("drop_rate", "pos_drop_rate", "proj_drop_rate", "attn_drop_rate"):
            self._check_share(name)
        self._check_share("drop_path_rate")
        if not isinstance(self.mlp_ratio, (int, float)) or not 0 < self.mlp_ratio < math.inf:
            raise HVTError(f"mlp_ratio={self.mlp_ratio!r} must be a finite number above 0")
        if self.mlp_ratio > MAX_SIZE:
            raise HVTError(f"mlp_ratio={self.mlp_ratio!r} must be at most {MAX_SIZE}")
        for name in (
            "class_token", "dist_token", "proportional_attention", "fc_norm", "no_embed_class",
            "pre_norm", "qkv_bias",
        ):  # fmt: skip
            if not isinstance(getattr(self, name), bool):
                raise HVTError(f"{name}={getattr(self, name)!r} must be True or False")
        for name in ("norm_eps", "init_values"):
            value = getattr(self, name)
            if value is None and name == "init_values":
                continue
            if isinstance(value, bool) or not isinstance(value, (int, float)):
                raise HVTError(f"{name}={value!r} must be a number")
            if not 0 < value < 1000:
                raise HVTError(f"{name}={value!r} must be above 0 and below 1000")
        if self.act_layer not in ACTIVATIONS:
            hint = did_you_mean(str(self.act_layer), ACTIVATIONS)
            raise HVTError(f"act_layer={self.act_layer!r} is unknown: {hint}")
        for side in self.image:
            if side % self.patch_size:
                fits = max(self.patch_size, round(side / self.patch_size) * self.patch_size)
                raise HVTError(
                    f"patch_size={self.patch_size} does not divide img_size={self.img_size}: "
                    f"use a multiple such as {fits} pixels, or another patch size"
                )

    def _check_share(self, name: str) -> None:
        value = getattr(self, name)
        if not isinstance(value, (int, float)) or not 0 <= value < 1:
            raise HVTError(f"{name}={value!r} must be a number in [0, 1)")

    def _check_width(self) -> None:
        if self.embed_dim is not None and self.embed_dim != self.width:
            raise HVTError(
                f"embed_dim={self.embed_dim} disagrees with num_heads × head_dim = "
                f"{self.num_heads} × {self.head_dim} = {self.width}: leave embed_dim out, or set "
                f"num_heads={max(1, self.embed_dim // self.head_dim)}"
            )
        if self.mlp_width < 1:
            raise HVTError(f"mlp_ratio={self.mlp_ratio} leaves the MLP no width at {self.width}")

    def _check_head(self) -> None:
        if self.global_pool not in (None, "", "avg", "token"):
            raise HVTError(f"global_pool={self.global_pool!r} must be 'avg', 'token' or ''")
        if self.global_pool == "token" and not self.class_token:
            raise HVTError("global_pool='token' needs class_token=True; use global_pool='avg'")
        if self.dist_token and not (self.class_token and self.head_pool == "token"):
            raise HVTError(
                "dist_token=True needs class_token=True and global_pool='token': its head's logits "
                "are averaged with the class token's"
            )
        if self.fc_norm and self.head_pool != "avg":
            raise HVTError(
                f"fc_norm=True needs global_pool='avg', not {self.head_pool!r}: use fc_norm=False"
            )

    def _check_pooling(self) -> None:
        if self.pool not in KINDS:
            raise HVTError(f"pool={self.pool!r} is unknown: {did_you_mean(str(self.pool), KINDS)}")
        if not _is_whole(self.pool_dims) or self.pool_dims not in (1, 2):
            raise HVTError(f"pool_dims={self.pool_dims!r} must be 1 (sequence) or 2 (grid)")
        for name in ("pool_kernel", "pool_stride"):
            value = getattr(self, name)
            if isinstance(value, tuple) and self.pool_dims == 1:
                raise HVTError(
                    f"{name}={value} has rows and columns: use pool_dims=2, or one number"
                )
        if self.pool_after is not None:
            after = self.pool_after
            if not all(_is_whole(b) and 0 <= b < self.depth for b in after):
                raise HVTError(
                    f"pool_after={after} must name blocks from 0 to {self.depth - 1} (depth - 1)"
                )
            if list(after) != sorted(set(after)):
                raise HVTError(f"pool_after={after} must rise, each block once")
            if self.stages is not None and self.stages != len(after):
                raise HVTError(
                    f"stages={self.stages} disagrees with pool_after={after}: give one of them"
                )
        elif self.stages and self.depth % self.stages:
            divisors = [m for m in range(1, self.depth + 1) if self.depth % m == 0]
            raise HVTError(
                f"stages={self.stages} does not divide depth={self.depth}: use one of "
                f"{', '.join(map(str, divisors))}, or name the blocks with pool_after"
            )
        grid = self.grid
        for block in self.pool_blocks:
            pooled = self._pooled(grid)
            if min(pooled) < 1:
                raise HVTError(
                    f"pooling after block {block} would leave no token: {grid[0] * grid[1]} tokens "
                    f"are too few for pool_kernel={self.pool_kernel}, use fewer stages, "
                    "a larger image or smaller patches"
                )
            grid = pooled

    def _check_retention(self) -> None:
        kept = self.retention
        if kept is None:
            return
        most = self.grid[0] * self.grid[1] + 1
        if not self.class_token or self.num_prefix_tokens > 1:
            raise HVTError(
                "retention needs class_token=True and no other prefix token, as DeiT has; "
                "else use retention=None"
            )
        if self.pool_blocks:
            raise HVTError(
                "retention and pooling exclude each other: use stages=0, or retention=None"
            )
        if len(kept) != self.depth:
            raise HVTError(
                f"retention has {len(kept)} numbers for depth={self.depth}: give one for each block"
            )
        for block, (before, tokens) in enumerate(zip((most, *kept), kept, strict=False)):
            if not _is_whole(tokens) or not 1 <= tokens <= most:
                raise HVTError(
                    f"retention={tokens!r} of block {block} must be a whole number from 1 to {most}"
                )
            if tokens > before:
                raise HVTError(
                    f"retention={tokens} of block {block} must not be above the {before} tokens "
                    "that the block before leaves"
                )
        if self.head_pool == "avg" and kept[-1] < 2:
            raise HVTError(
                "global_pool='avg' has no patch to read where retention ends with 1: "
                "use global_pool='token', or let it end with 2"
            )

    def _check_merge(self) -> None:
        merge = self.merge
        if merge is None:
            return
        if self.pool_blocks or self.retention is not None:
            other = "pooling" if self.pool_blocks else "retention"
            raise HVTError(f"merge and {other} exclude each other: use stages=0 and retention=None")
        for merged in merge if isinstance(merge, tuple) else (merge,):
            if not _is_whole(merged) or merged < 0:
                raise HVTError(f"merge={merged!r} must be a whole number of at least 0")
        if isinstance(merge, tuple) and len(merge) != self.depth:
            raise HVTError(
                f"merge has {len(merge)} numbers for depth={self.depth}: give one for each block, "
                "or one for all"
            )

    def _retained(self, other: HVTConfig) -> tuple[int, ...]:
        """This retention for another number of patches or blocks: the share at each relative depth.

        Between two blocks the share is a straight line; the result is rounded up.
        """
        patches, wanted = self.tokens[0] - 1, other.tokens[0] - 1
        shares = [patches, *(kept - 1 for kept in self.retention or ())]
        retained = []
        for block in range(1, other.depth + 1):
            index, rest = divmod(block * self.depth, other.depth)
            after = shares[min(index + 1, self.depth)]
            between = shares[index] * (other.depth - rest) + after * rest  # times other.depth
            retained.append(1 - (-wanted * between // (patches * other.depth)))
        return tuple(retained)

    def _pooled(self, grid: tuple[int, int]) -> tuple[int, int]:
        if self.pool_dims == 1:
            grid = (1, grid[0] * grid[1])
        kernels = window(self.pool_dims, self.pool_kernel)
        strides = window(self.pool_dims, self.pool_stride)
        rows, cols = (
            pooled_length(n, kernel, stride, padding(self.pool_dims, kernel))
            for n, kernel, stride in zip(grid, kernels, strides, strict=True)
        )
        return rows, cols


ACTIVATIONS = ("gelu", "gelu_tanh", "quick_gelu")
# timm's IMAGENET_DEFAULT_MEAN and _STD; importing them would import torch.
IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)
FIELDS: tuple[str, ...] = tuple(f.name for f in dataclasses.fields(HVTConfig))


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def check_fields(values: dict[str, Any]) -> None:
    """Refuse names that are not fields of `HVTConfig`, offering the nearest."""
    for name in values:
        if name not in FIELDS:
            raise HVTError(f"unknown override {name!r}: {did_you_mean(name, FIELDS)}")


MAX_FILE = 2**20
"""Bytes of a config file; 10,000 blocks with a retention take 60 kB."""


def is_config_file(name: str | Path) -> bool:
    """Whether the name of a model is that of a config file, by its form."""
    return str(name).lower().endswith(".json")


def read_config(path: str | Path) -> HVTConfig:
    """The config in a JSON file: `hvt plan --save` writes one, and a run's folder has one."""
    try:
        with open_regular(path) as file:
            content = file.read(MAX_FILE + 1)
    except OSError as error:
        raise HVTError(f"cannot read the config {path}: {error.strerror or error}") from error
    if len(content) > MAX_FILE:
        raise HVTError(f"{path} is not a config: it is larger than {MAX_FILE // 2**20} MB")
    try:
        values = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise HVTError(f"{path} is not a config: it is not valid JSON ({error})") from error
    if not isinstance(values, dict):
        raise HVTError(f"{path} is not a config: it must be an object with the model's fields")
    try:
        return HVTConfig.from_dict(values)
    except (HVTError, TypeError) as error:  # TypeError: a comparison with a value of another type
        raise HVTError(f"{path} is not a config: {error}") from error


def write_config(config: HVTConfig, path: str | Path) -> None:
    """A config as JSON, for `read_config` and `hvt train --model FILE`."""
    with atomic_write(path) as temporary:
        temporary.write_text(json.dumps(config.to_dict(), indent=2) + "\n")


def default_cfg(config: HVTConfig) -> dict[str, Any]:
    """timm's description of a model's input and head: ImageNet's statistics, DeiT's evaluation."""
    return {
        "num_classes": config.num_classes,
        "input_size": (config.in_chans, *config.image),
        "fixed_input_size": True,
        "interpolation": "bicubic",
        "crop_pct": 0.875,
        "crop_mode": "center",
        "mean": IMAGENET_MEAN,
        "std": IMAGENET_STD,
        "first_conv": "patch_embed.proj",
        "classifier": "head",
        "license": "apache-2.0",
    }
