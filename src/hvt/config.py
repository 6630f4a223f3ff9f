"""What an architecture is: one frozen, validated dataclass of plain values."""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass
from typing import Any

from .errors import HVTError, did_you_mean
from .fields import check_values, field

MAX_SIZE = 10_000
"""Blocks, tokens of a pooling window, and the MLP's ratio. Checking a config takes time in
proportion to its depth, and a config may come from untrusted input."""

POOLINGS = ("max", "avg", "conv")
ACTIVATIONS = ("gelu", "gelu_tanh", "quick_gelu")
# timm's IMAGENET_DEFAULT_MEAN and _STD; importing them would import torch.
IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)

Grid = tuple[int, int]
"""Rows and columns of tokens; a sequence is one row."""

_count = functools.partial(field, ge=1)
_size = functools.partial(field, ge=1, le=MAX_SIZE)
_rate = functools.partial(field, ge=0, lt=1)


def padding(dims: int, kernel: int) -> int:
    """1D pooling has no padding; 2D pooling pads as CNNs do, so that stride 2 halves the grid."""
    return (kernel - 1) // 2 if dims == 2 else 0


def window(dims: int, size: int | Grid) -> Grid:
    """Rows and columns of a kernel or stride given as one number; of a sequence, one row."""
    if isinstance(size, tuple):
        return size
    return (size, size) if dims == 2 else (1, size)


def pooled_grid(grid: Grid, dims: int, kernel: int | Grid, stride: int | Grid) -> Grid:
    """Rows and columns after a pooling, of a sequence one row; below 1 means no token."""
    grid = grid if dims == 2 else (1, grid[0] * grid[1])
    sides = zip(grid, window(dims, kernel), window(dims, stride), strict=True)
    rows, cols = ((n + 2 * padding(dims, k) - k) // s + 1 for n, k, s in sides)
    return rows, cols


@dataclass(frozen=True)
class HVTConfig:
    """The architecture of a model.

    `HVT(config)` builds it, `cost(config)` prices it, a checkpoint stores it as JSON. An
    invalid value raises an `HVTError` that names the field, the value and a valid one.
    """

    img_size: int | tuple[int, int] = _count(224, "image height and width in pixels: N or HxW")
    patch_size: int = _count(16, "side of a square patch in pixels")
    in_chans: int = _count(3, "image channels")
    num_classes: int = field(1000, "classifier outputs; 0 for no classifier", ge=0)
    num_heads: int = _count(6, "attention heads per block")
    head_dim: int = _count(64, "width of one head; the token width is heads × this")
    embed_dim: int | None = _count(None, "token width; optional, must equal heads × head_dim")
    depth: int = _size(12, "number of blocks, L")
    stages: int | None = field(
        None, "number of pooling stages, M, spread evenly over the blocks", ge=0
    )
    pool_after: tuple[int, ...] | None = field(
        None, "blocks to pool after, instead of stages", ge=0
    )
    pool: str = field("max", "pooling kind: max, avg or conv", choices=POOLINGS)
    pool_kernel: int | tuple[int, int] = _size(3, "pooling window: N, or HxW of the grid")
    pool_stride: int | tuple[int, int] = _size(2, "pooling stride: N, or HxW of the grid")
    pool_dims: int = field(1, "1 pools the token sequence, 2 pools the token grid", ge=1, le=2)
    class_token: bool = field(False, "prepend a class token, as DeiT does")
    dist_token: bool = field(False, "a distillation token with its own head, as in DeiT")
    reg_tokens: int = field(0, "register tokens after the class token; no head reads them", ge=0)
    retention: tuple[int, ...] | None = _count(
        None, "tokens kept after each block's attention, with the class token (PoWER)"
    )
    merge: int | tuple[int, ...] | None = field(
        None,
        "tokens that each block merges into similar ones (ToMe's r); an average head counts a "
        "merged token once",
        ge=0,
    )
    proportional_attention: bool = field(
        False, "weight pooled and merged tokens in attention by the tokens they stand for"
    )
    global_pool: str | None = field(
        None, "input of the head: avg, token, or '' for all tokens", choices=("avg", "token", "")
    )
    fc_norm: bool = field(False, "norm after the average instead of before it, as timm does")
    no_embed_class: bool = field(False, "no positions for class and register tokens")
    pre_norm: bool = field(False, "norm before the first block, as CLIP does")
    norm_eps: float = field(1e-6, "epsilon of the norms", gt=0, lt=1000)
    qkv_bias: bool = field(True, "bias of queries, keys and values")
    init_values: float | None = field(
        None, "initial value of LayerScale; none for no LayerScale", gt=0, lt=1000
    )
    act_layer: str = field(
        "gelu", "activation of the MLP: gelu, gelu_tanh or quick_gelu", choices=ACTIVATIONS
    )
    mlp_ratio: float = field(4.0, "MLP width divided by token width", gt=0, le=MAX_SIZE)
    drop_rate: float = _rate(0.0, "dropout before the classifier")
    pos_drop_rate: float = _rate(0.0, "dropout after the first positional embedding")
    proj_drop_rate: float = _rate(0.0, "dropout after the attention and MLP projections")
    attn_drop_rate: float = _rate(0.0, "dropout on the attention weights")
    drop_path_rate: float = _rate(0.1, "stochastic depth of the last block, linear from 0")

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if isinstance(value, list):
                object.__setattr__(self, name, tuple(value))
        check_values(self)
        self._check_sizes()
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
            grids.append(pooled_grid(grids[-1], *self._window))
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
        """Plain values for JSON; `from_dict` is the inverse."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> HVTConfig:
        """A config from plain values."""
        check_fields(values)
        return cls(**values)

    def replace(self, **overrides: Any) -> HVTConfig:
        """The same config with other values; `stages` and `pool_after` replace each other, and
        adding or removing a class token changes the head.

        A retention is scaled to another image size, patch size or depth.
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

    def _check_sizes(self) -> None:
        for name in ("img_size", "pool_kernel", "pool_stride"):
            value = getattr(self, name)
            if not isinstance(value, tuple):
                continue
            if name != "img_size" and self.pool_dims == 1:
                raise HVTError(
                    f"{name}={value} has rows and columns: use pool_dims=2, or one number"
                )
            if value[0] == value[1]:  # one way to say square
                object.__setattr__(self, name, value[0])
        for side in self.image:
            if side % self.patch_size:
                nearest = max(self.patch_size, round(side / self.patch_size) * self.patch_size)
                raise HVTError(
                    f"patch_size={self.patch_size} does not divide img_size={self.img_size}: "
                    f"use a multiple such as {nearest} pixels, or another patch size"
                )
        if self.embed_dim is not None and self.embed_dim != self.width:
            raise HVTError(
                f"embed_dim={self.embed_dim} disagrees with num_heads × head_dim = "
                f"{self.num_heads} × {self.head_dim} = {self.width}: leave embed_dim out, or set "
                f"num_heads={max(1, self.embed_dim // self.head_dim)}"
            )
        if self.mlp_width < 1:
            raise HVTError(f"mlp_ratio={self.mlp_ratio} gives an empty MLP at width {self.width}")

    def _check_head(self) -> None:
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
        after = self.pool_after
        if after is None:
            if self.stages and self.depth % self.stages:
                divisors = [m for m in range(1, self.depth + 1) if self.depth % m == 0]
                raise HVTError(
                    f"stages={self.stages} does not divide depth={self.depth}: use one of "
                    f"{', '.join(map(str, divisors))}, or name the blocks with pool_after"
                )
        elif list(after) != sorted(set(after)) or max(after, default=0) >= self.depth:
            raise HVTError(
                f"pool_after={after} must name blocks from 0 to {self.depth - 1} (depth - 1) in "
                "rising order, each once"
            )
        elif self.stages is not None and self.stages != len(after):
            raise HVTError(
                f"stages={self.stages} disagrees with pool_after={after}: give one of them"
            )
        grids = self.grids
        for block, grid, pooled in zip(self.pool_blocks, grids, grids[1:], strict=False):
            if min(pooled) < 1:
                raise HVTError(
                    f"pooling after block {block} would leave no token: {grid[0] * grid[1]} tokens "
                    f"are too few for pool_kernel={self.pool_kernel}, use fewer stages, "
                    "a larger image or smaller patches"
                )

    def _check_retention(self) -> None:
        kept = self.retention
        if kept is None:
            return
        if not self.class_token or self.num_prefix_tokens > 1:
            raise HVTError(
                "retention needs class_token=True and no other prefix token, as in DeiT: "
                "otherwise use retention=None"
            )
        if self.pool_blocks:
            raise HVTError(
                "retention and pooling exclude each other: use stages=0, or retention=None"
            )
        if len(kept) != self.depth:
            raise HVTError(
                f"retention has {len(kept)} numbers for depth={self.depth}: give one for each block"
            )
        patches = self.grid[0] * self.grid[1]
        for block, (before, tokens) in enumerate(zip((patches + 1, *kept), kept, strict=False)):
            if tokens > before:
                raise HVTError(
                    f"retention={tokens} of block {block} must be at most the {before} tokens that "
                    "reach it"
                )
        if self.head_pool == "avg" and kept[-1] < 2:
            raise HVTError(
                "global_pool='avg' has no patch to average if retention ends with 1: "
                "use global_pool='token', or end with 2"
            )

    def _check_merge(self) -> None:
        merge = self.merge
        if merge is None:
            return
        if self.pool_blocks or self.retention is not None:
            other = "pooling" if self.pool_blocks else "retention"
            raise HVTError(f"merge and {other} exclude each other: use stages=0 and retention=None")
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

    @property
    def _window(self) -> tuple[int, int | Grid, int | Grid]:
        return self.pool_dims, self.pool_kernel, self.pool_stride


FIELDS: tuple[str, ...] = tuple(f.name for f in dataclasses.fields(HVTConfig))


def check_fields(values: dict[str, Any]) -> None:
    """Check that names are fields of `HVTConfig`; the error offers the nearest."""
    for name in values:
        if name not in FIELDS:
            raise HVTError(f"unknown override {name!r}: {did_you_mean(name, FIELDS)}")


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
    }
