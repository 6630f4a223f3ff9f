"""The transformer, read top to bottom: patches, blocks that pool, head.

Parameter names are those of the authors' code, DeiT and timm, so that their weights fit.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from timm.layers import LayerScale, Mlp, get_act_layer, trunc_normal_
from timm.models._features import feature_take_indices
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from .config import HVTConfig, default_cfg, window
from .errors import HVTError
from .extraction import Extract, shared_softmax
from .features import feature_info
from .merging import Merge
from .pooling import Pool, as_image
from .resize import resized


class PatchEmbed(nn.Module):
    """Cut the image into P×P patches, row by row, and project each to D channels.

    The weights are those of a `Conv2d(C, D, P, P)`; it is applied as one matrix product, which
    gives contiguous tokens and is no slower than the convolution.
    """

    def __init__(self, patch_size: int, in_chans: int, width: int, bias: bool = True) -> None:
        super().__init__()
        self.proj = nn.Conv2d(in_chans, width, patch_size, patch_size, bias=bias)

    def forward(self, images: Tensor) -> Tensor:  # (B, C, H, W) → (B, N, D)
        patch = self.proj.kernel_size[0]
        b, c, h, w = images.shape
        rows, cols = h // patch, w // patch
        patches = images.reshape(b, c, rows, patch, cols, patch).permute(0, 2, 4, 1, 3, 5)
        return F.linear(
            patches.reshape(b, rows * cols, c * patch * patch),
            self.proj.weight.flatten(1),
            self.proj.bias,
        )


class Attention(nn.Module):
    """Multi-head self-attention by torch's fused kernel."""

    def __init__(self, config: HVTConfig) -> None:
        super().__init__()
        width = config.width
        self.num_heads, self.head_dim = config.num_heads, config.head_dim
        self.attn_drop = config.attn_drop_rate
        self.qkv = nn.Linear(width, 3 * width, bias=config.qkv_bias)
        self.proj = nn.Linear(width, width)
        self.proj_drop = nn.Dropout(config.proj_drop_rate)

    def forward(self, x: Tensor, bias: Tensor | None = None) -> Tensor:  # (B, N, D) → (B, N, D)
        """`bias` is added to the logits of each key, `(B or 1, 1, 1, N)`."""
        return self.with_keys(x, bias)[0]

    def with_keys(self, x: Tensor, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """The same, and the keys, `(B, heads, N, head_dim)`."""
        q, k, v = self._split(x)
        drop = self.attn_drop if self.training else 0.0
        # In bfloat16 on CPUs, plain operations train short sequences faster than the fused kernel.
        if q.is_cpu and q.dtype is torch.bfloat16 and q.shape[2] <= 256 and bias is None:
            y = F.dropout(self._weights(q, k).to(v.dtype), drop) @ v
        else:
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=bias, dropout_p=drop)
        return self._join(y), k

    def with_weights(self, x: Tensor, share: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """The same by plain operations, and the attention weights, `(B, heads, N, N)`.

        `share`, `(B, N)` in [0, 1], is how much each token counts as a key: 1 is all of it, and
        with 0 the others attend as if the token were not there.
        """
        q, k, v = self._split(x)
        weights = self._weights(q, k, share)
        drop = self.attn_drop if self.training else 0.0
        return self._join(F.dropout(weights, drop).to(v.dtype) @ v), weights

    def _weights(self, q: Tensor, k: Tensor, share: Tensor | None = None) -> Tensor:
        logits = q @ k.transpose(2, 3) * self.head_dim**-0.5
        return logits.softmax(dim=3) if share is None else shared_softmax(logits, share)

    def _split(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        qkv = self.qkv(x).unflatten(2, (3, self.num_heads, self.head_dim))
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)  # each (B, heads, N, head_dim)
        return q, k, v

    def _join(self, x: Tensor) -> Tensor:  # (B, heads, N, head_dim) → (B, N, D)
        return self.proj_drop(self.proj(x.transpose(1, 2).flatten(2)))


class DropPath(nn.Module):
    """A residual branch with stochastic depth: left out for some images of a batch.

    Scaling and adding are one operation. timm's draws for the batch it sees; for this one the mask
    can be drawn beforehand (see `HVT.draw_drop_path`), so that processes and microbatches that
    share a batch drop the same branches as one process would.
    """

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate = rate
        self.keep: Tensor | None = None  # (B,), of the next images

    def forward(self, x: Tensor, branch: Tensor) -> Tensor:
        if not self.training or self.rate == 0:
            return x + branch
        keep = self.keep
        if keep is None:
            keep = torch.rand(x.shape[0], device=x.device) >= self.rate
        return torch.addcmul(x, branch, (keep.to(x.dtype) / (1 - self.rate)).view(-1, 1, 1))

    def extra_repr(self) -> str:
        return f"{self.rate:.3f}"


class Block(nn.Module):
    """Eq. 2 and 3; the first block of a stage then pools and adds new positions, Eq. 5.

    With a retention the block drops tokens between attention and MLP instead, as PoWER does.
    """

    def __init__(self, config: HVTConfig, index: int) -> None:
        super().__init__()
        width = config.width
        rate = config.drop_path_rate * index / max(1, config.depth - 1)
        self.norm1 = nn.LayerNorm(width, eps=config.norm_eps)
        self.attn = Attention(config)
        self.ls1 = _layer_scale(config)
        self.drop_path1 = DropPath(rate)
        self.norm2 = nn.LayerNorm(width, eps=config.norm_eps)
        self.mlp = Mlp(
            width,
            config.mlp_width,
            act_layer=get_act_layer(config.act_layer),
            drop=config.proj_drop_rate,
        )
        self.ls2 = _layer_scale(config)
        self.drop_path2 = DropPath(rate)
        self.key_bias: Tensor | None
        self.register_buffer("key_bias", _key_bias(config, index), persistent=False)
        self.extract: nn.Module | None = _extraction(config, index)
        self.merge: Merge | None = _merging(config, index)
        self.pool: Pool | None = None
        self.pos_embed: nn.Parameter | None = None
        if index in config.pool_blocks:
            stage = config.pool_blocks.index(index)
            self.pool = Pool(config, stage)
            self.pos_embed = nn.Parameter(torch.zeros(1, config.tokens[stage + 1], width))

    def forward(self, x: Tensor) -> Tensor:  # (B, N, D) → (B, N', D), N' = N in most blocks
        x = self.unpooled(x, self.key_bias)
        if self.pool is not None:
            x = self.pool(x) + self.pos_embed
        return x

    def unpooled(self, x: Tensor, key_bias: Tensor | None = None) -> Tensor:
        """The block without its pooling; `key_bias` is log(size) of the keys."""
        if self.extract is None:
            x = self.drop_path1(x, self.ls1(self.attn(self.norm1(x), key_bias)))
        else:
            branch, weights = self.attn.with_weights(self.norm1(x))
            x = self.extract(self.drop_path1(x, self.ls1(branch)), weights)
        return self.feed_forward(x)

    def feed_forward(self, x: Tensor) -> Tensor:
        """The second half of a block, which acts on each token by itself."""
        return self.drop_path2(x, self.ls2(self.mlp(self.norm2(x))))

    def merging(self, x: Tensor, size: Tensor, proportional: bool) -> tuple[Tensor, Tensor]:
        """The same where blocks merge: `size`, `(B, N)`, is how many patches a token stands for."""
        bias = size.log()[:, None, None] if proportional else None
        branch, keys = self.attn.with_keys(self.norm1(x), bias)
        x = self.drop_path1(x, self.ls1(branch))
        if self.merge is not None:
            x, size = self.merge(x, keys.mean(dim=1), size)
        return self.feed_forward(x), size


class HVT(nn.Module):
    """A vision transformer with pooling between its stages; without pooling it is a DeiT.

    Meets timm's contract for classification models. Logits are logits in every mode.
    """

    def __init__(self, config: HVTConfig) -> None:
        super().__init__()
        self.config = config
        self.num_classes = config.num_classes
        self.embed_dim = self.num_features = self.head_hidden_size = config.width
        self.num_prefix_tokens = config.num_prefix_tokens
        self.global_pool = config.head_pool
        self.grad_checkpointing = False
        self.pretrained_cfg: dict[str, Any] = default_cfg(config)
        self.default_cfg = self.pretrained_cfg

        width, eps = config.width, config.norm_eps
        # CLIP's patches have no bias: the norm behind them has one.
        self.patch_embed = PatchEmbed(
            config.patch_size, config.in_chans, width, bias=not config.pre_norm
        )
        self.cls_token = _tokens(int(config.class_token), width)
        self.dist_token = _tokens(int(config.dist_token), width)
        self.reg_token = _tokens(config.reg_tokens, width)
        positions = config.tokens[0] - (self.num_prefix_tokens if config.no_embed_class else 0)
        self.pos_embed = nn.Parameter(torch.zeros(1, positions, width))
        self.pos_drop = nn.Dropout(config.pos_drop_rate)
        self.norm_pre = nn.LayerNorm(width, eps=eps) if config.pre_norm else nn.Identity()
        self.blocks = nn.ModuleList(Block(config, i) for i in range(config.depth))
        self.norm: nn.Module = nn.Identity() if config.fc_norm else nn.LayerNorm(width, eps=eps)
        self.fc_norm: nn.Module = nn.LayerNorm(width, eps=eps) if config.fc_norm else nn.Identity()
        self.head_drop = nn.Dropout(config.drop_rate)
        self.head = _classifier(width, config.num_classes)
        self.head_dist = _classifier(width, config.num_classes) if config.dist_token else None
        self.settings: nn.Module | None = None  # smaller ones, see `elastic`
        self.feature_info = feature_info(config)
        self.init_weights()

    def init_weights(self) -> None:
        """DeiT's: truncated normal of std 0.02 for linear layers, positions and prefix tokens."""
        if self.pos_embed.is_meta:  # it has only shapes
            return
        for name, parameter in self.named_parameters():
            if name.endswith(("pos_embed", "_token")):
                trunc_normal_(parameter, std=0.02)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                trunc_normal_(module.weight, std=0.02)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)

    # ── forward ─────────────────────────────────────────────────────────────────────────────────

    def forward(self, images: Tensor) -> Tensor:  # (B, C, H, W) → (B, classes)
        return self.forward_head(self.forward_features(images))

    def forward_features(self, images: Tensor) -> Tensor:
        """All tokens after the last norm: `(B, C, H, W)` → `(B, N, D)`."""
        x, size = self._embed(images), None
        for block in self.blocks:
            x, size = self._run(block, x, size)
        return self.norm(x)

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        """Eq. 6, or Eq. 4 with a class token: `(B, N, D)` → `(B, classes)`, or `(B, D)`."""
        if self.global_pool == "avg":
            x = x[:, self.num_prefix_tokens :].mean(dim=1)
        elif self.head_dist is not None:  # the average of two tokens' logits, as in DeiT
            x = self.head_drop(x[:, :2])
            if pre_logits:
                return x.mean(dim=1)
            return (self.head(x[:, 0]) + self.head_dist(x[:, 1])) / 2
        elif self.global_pool == "token":
            x = x[:, 0]
        x = self.head_drop(self.fc_norm(x))
        return x if pre_logits else self.head(x)

    def forward_intermediates(
        self,
        x: Tensor,
        indices: int | list[int] | None = None,
        return_prefix_tokens: bool = False,
        norm: bool = False,
        stop_early: bool = False,
        output_fmt: str = "NCHW",
        intermediates_only: bool = False,
    ) -> Any:
        """The output of chosen blocks, after their pooling; arguments and results as timm's.

        `NLC` returns the tokens, `NCHW` returns grids; a sequence that was pooled in 1D or lost
        tokens has no grid and is returned as one row, `(B, D, 1, N')`.
        """
        if output_fmt not in ("NCHW", "NLC"):
            raise HVTError(f"output_fmt={output_fmt!r} must be 'NCHW' or 'NLC'")
        take, last = feature_take_indices(len(self.blocks), indices)
        outputs: list[Tensor] = []
        x, size = self._embed(x), None
        for i, block in enumerate(self.blocks[: last + 1] if stop_early else self.blocks):
            x, size = self._run(block, x, size)
            if i in take:
                outputs.append(self.norm(x) if norm else x)

        prefix = self.num_prefix_tokens
        prefixes = [y[:, :prefix] for y in outputs]
        outputs = [y[:, prefix:] for y in outputs]
        if output_fmt == "NCHW":
            outputs = [self._image(y, i) for y, i in zip(outputs, sorted(set(take)), strict=True)]
        listed: list[Any] = list(outputs)
        if prefix and return_prefix_tokens:
            listed = list(zip(outputs, prefixes, strict=True))
        return listed if intermediates_only else (self.norm(x), listed)

    def _embed(self, images: Tensor) -> Tensor:
        """Eq. 1, without the class token where there is none: `(B, C, H, W)` → `(B, N, D)`."""
        want = (self.config.in_chans, *self.config.image)
        if images.ndim != 4 or tuple(images.shape[1:]) != want:
            raise HVTError(
                f"images of shape {tuple(images.shape)} do not fit: this model takes "
                f"(batch, {want[0]}, {want[1]}, {want[2]}); "
                "resize them, or the model with set_input_size"
            )
        x = self.patch_embed(images)
        if self.config.no_embed_class:
            x = x + self.pos_embed
        tokens = (self.cls_token, self.dist_token, self.reg_token)
        prefix = [token.expand(x.shape[0], -1, -1) for token in tokens if token is not None]
        if prefix:
            x = torch.cat((*prefix, x), dim=1)
        if not self.config.no_embed_class:
            x = x + self.pos_embed
        return self.norm_pre(self.pos_drop(x))

    def _run(self, block: Any, x: Tensor, size: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """A block's output and, where blocks merge, how many patches each token stands for."""
        inputs: tuple[Any, ...] = (x,)
        run: Any = block
        if self.config.merge is not None:
            size = x.new_ones(x.shape[:2]) if size is None else size
            run, inputs = block.merging, (x, size, self.config.proportional_attention)
        if self.grad_checkpointing and torch.is_grad_enabled():
            y = checkpoint(run, *inputs, use_reentrant=False)
        else:
            y = run(*inputs)
        return y if self.config.merge is not None else (y, None)

    def _image(self, tokens: Tensor, index: int) -> Tensor:  # (B, N, D) → (B, D, H, W)
        grid = self.config.grids[sum(b <= index for b in self.config.pool_blocks)]
        if tokens.shape[1] != math.prod(grid):  # PoWER and ToMe leave fewer
            grid = (1, tokens.shape[1])
        return as_image(tokens, grid).contiguous()

    # ── timm's contract ─────────────────────────────────────────────────────────────────────────

    def get_classifier(self) -> nn.Module:
        return self.head

    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:
        """Replace the head by a new one; 0 classes return features.

        The class names are dropped, even if the number of classes stays the same. All settings of
        an elastic model share the new head.
        """
        pool = self.global_pool if global_pool is None else global_pool
        self.config = self.config.replace(num_classes=num_classes, global_pool=pool)
        self.num_classes, self.global_pool = num_classes, pool
        for key in ("label_names", "label_descriptions"):
            self.pretrained_cfg.pop(key, None)
        device, dtype = self.pos_embed.device, self.pos_embed.dtype
        self.head = _classifier(self.config.width, num_classes).to(device, dtype)
        if self.head_dist is not None:
            self.head_dist = _classifier(self.config.width, num_classes).to(device, dtype)
        for setting in self.settings.children() if self.settings is not None else ():
            for head in setting._modules.keys() & {"head", "head_dist"}:
                delattr(setting, head)

    def set_input_size(
        self, img_size: int | tuple[int, int] | None = None, patch_size: int | None = None
    ) -> None:
        """Change the image size, resampling positions and patch filters."""
        old = self.config
        new = old.replace(
            img_size=old.img_size if img_size is None else img_size,
            patch_size=old.patch_size if patch_size is None else patch_size,
        )
        for name, tensor in resized(self.state_dict(), old, new).items():
            module, _, last = name.rpartition(".")
            learned = self.get_parameter(name).requires_grad  # what was frozen stays frozen
            setattr(self.get_submodule(module), last, nn.Parameter(tensor, learned))
        projection = self.patch_embed.proj
        projection.kernel_size = projection.stride = (new.patch_size, new.patch_size)
        blocks: Any = self.blocks
        for index, block in enumerate(blocks):
            block.extract, block.merge = _extraction(new, index), _merging(new, index)
            bias = _key_bias(new, index)
            block.key_bias = None if bias is None else bias.to(self.pos_embed)
            if block.pool is not None:
                block.pool.set_grid(new, new.pool_blocks.index(index))
        self.config = new
        self.feature_info = feature_info(new)
        self.pretrained_cfg["input_size"] = (new.in_chans, *new.image)

    def prune_intermediate_layers(
        self, indices: int | list[int] = 1, prune_norm: bool = False, prune_head: bool = True
    ) -> list[int]:
        """Drop what the chosen intermediates do not need; used by timm's feature extraction."""
        take, last = feature_take_indices(len(self.blocks), indices)
        self.blocks = self.blocks[: last + 1]
        if prune_norm:
            self.norm = nn.Identity()
        if prune_head:
            self.reset_classifier(0)
        return take

    def no_weight_decay(self) -> set[str]:
        """Positions and prefix tokens; timm adds biases and norms, which are one-dimensional."""
        names = (name for name, _ in self.named_parameters())
        return {name for name in names if name.endswith(("pos_embed", "_token"))}

    def group_matcher(self, coarse: bool = False) -> dict[str, Any]:
        """Which parameters belong to which layer, for layer-wise learning rates."""
        setting = r"(?:settings\.\d+\.)?"
        return {
            "stem": rf"^{setting}(?:cls_token|dist_token|reg_token|pos_embed|patch_embed|norm_pre)",
            "blocks": [
                (rf"^{setting}blocks\.(\d+)", None),
                (rf"^{setting}(?:norm|fc_norm)", (99999,)),
            ],
        }

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Recompute each block in the backward pass instead of keeping its activations."""
        self.grad_checkpointing = enable

    def draw_drop_path(self, total: int | None, rows: Tensor | None = None) -> None:
        """Draw stochastic depth now, for a global batch of `total` images.

        The next images are `rows` of it, all without. The masks hold until the next call; after
        one with None, every forward draws its own.
        """
        blocks: Any = self.blocks
        for path in (path for block in blocks for path in (block.drop_path1, block.drop_path2)):
            path.keep = None
            if total is not None and path.rate:
                keep = torch.rand(total, device=self.pos_embed.device) >= path.rate
                path.keep = keep if rows is None else keep[rows]

    # ── weights ─────────────────────────────────────────────────────────────────────────────────

    @property
    def class_names(self) -> tuple[str, ...] | None:
        """The classes by name, in order of the logits, where they are known."""
        names = self.pretrained_cfg.get("label_names")
        return tuple(names) if names and len(names) == self.num_classes else None

    # One of an elastic model's settings, see `elastic`.
    at: ClassVar[Callable[[HVT, str | float], HVT]]
    # How a model is stored is the subject of `checkpoint`, which sets these: timm calls the first
    # after a download, and the others are where other libraries have them.
    load_pretrained: ClassVar[Callable[[HVT, str], None]]
    save_pretrained: ClassVar[Callable[..., None]]
    push_to_hub: ClassVar[Callable[..., str]]
    from_pretrained: ClassVar[Callable[..., HVT]]


def _tokens(count: int, width: int) -> nn.Parameter | None:
    return nn.Parameter(torch.zeros(1, count, width)) if count else None


def _layer_scale(config: HVTConfig) -> nn.Module:
    if config.init_values is None:
        return nn.Identity()
    return LayerScale(config.width, config.init_values)


def _key_bias(config: HVTConfig, index: int) -> Tensor | None:
    """The log of how many patches each token of a block stands for; None where it is one patch.

    Merged tokens differ from image to image and bring their own.
    """
    pooled = sum(block < index for block in config.pool_blocks)
    if not config.proportional_attention or not pooled:
        return None
    rows, cols = window(config.pool_dims, config.pool_stride)
    bias = torch.full((1, 1, 1, config.tokens[pooled]), pooled * math.log(rows * cols))
    bias[..., : config.num_prefix_tokens] = 0
    return bias


def _merging(config: HVTConfig, index: int) -> Merge | None:
    """What merges the tokens of a block; None where all stay."""
    if config.merge is None or config.kept is None:
        return None
    kept = (config.tokens[0], *config.kept)
    merged = kept[index] - kept[index + 1]
    return Merge(merged, config.num_prefix_tokens) if merged else None


def _extraction(config: HVTConfig, index: int) -> Extract | None:
    """What drops the tokens of a block; None where all stay, so that it is DeiT's own block."""
    if config.retention is None:
        return None
    kept = (config.tokens[0], *config.retention)
    return Extract(kept[index + 1]) if kept[index + 1] < kept[index] else None


def _classifier(width: int, num_classes: int) -> nn.Module:
    if num_classes == 0:
        return nn.Identity()
    head = nn.Linear(width, num_classes)
    trunc_normal_(head.weight, std=0.02)
    nn.init.zeros_(head.bias)
    return head
