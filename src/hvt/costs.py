"""What a config costs, in closed form: MACs, parameters and training memory per layer.

The paper's "FLOPs" are multiply-accumulates (MACs) of the matrix products and convolutions; norms,
biases, softmax, pooling and additions are not counted.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .config import HVTConfig, window
from .errors import HVTError
from .zoo import get_config

if TYPE_CHECKING:
    from .model import HVT

FLOAT32 = 4  # bytes


@dataclass(frozen=True)
class Layer:
    """One row of the table: an embedding, half a block, a pooling, the norm or the head."""

    name: str
    tokens_in: int
    tokens_out: int
    macs: int
    """MACs per image."""
    params: int
    activation_bytes: int
    """What autograd saves for the backward pass of one float32 image, without dropout, the image
    itself and the parameters."""


@dataclass(frozen=True)
class Compression:
    """What one pooling does to the cost of a block."""

    block: int
    tokens_in: int
    tokens_out: int
    alpha: float
    """Eq. 8: `2 + 2 / (12 d/n + 1)`, for a sequence that halves exactly."""
    measured: float
    """The same ratio at the true lengths: φ(n, d) / φ(n', d)."""


@dataclass(frozen=True, repr=False)
class Cost:
    """Totals and a row per layer for one image."""

    layers: list[Layer]
    tokens: list[int]
    """Sequence length at first and each time it gets shorter."""
    compression: list[Compression]
    unpooled_macs: int
    """MACs per image of the same model without pooling, all tokens kept."""

    @property
    def macs(self) -> int:
        return sum(layer.macs for layer in self.layers)

    @property
    def params(self) -> int:
        return sum(layer.params for layer in self.layers)

    @property
    def gflops(self) -> float:
        """MACs per image in 10⁹, which the paper calls GFLOPs."""
        return self.macs / 1e9

    @property
    def params_m(self) -> float:
        """Parameters in 10⁶."""
        return self.params / 1e6

    @property
    def activation_mb(self) -> float:
        """Training activations of one float32 image in 10⁶ bytes."""
        return sum(layer.activation_bytes for layer in self.layers) / 1e6

    @property
    def ratio(self) -> float:
        """How many times cheaper than the same model without pooling, all tokens kept."""
        return self.unpooled_macs / self.macs

    def blocks(self) -> list[tuple[int, int]]:
        """Input tokens and MACs of each block with its pooling."""
        rows: dict[int, tuple[int, int]] = {}
        for layer in self.layers:
            if layer.name.startswith("blocks."):
                index = int(layer.name.split(".")[1])
                tokens, macs = rows.get(index, (layer.tokens_in, 0))
                rows[index] = tokens, macs + layer.macs
        return [rows[index] for index in sorted(rows)]

    def mlp_tokens(self) -> list[int]:
        """Input tokens of each block's MLP: with PoWER, fewer than its attention's."""
        return [layer.tokens_in for layer in self.layers if layer.name.endswith(".mlp")]

    def __repr__(self) -> str:
        size = f"{self.gflops:.2f} GFLOPs, {self.params_m:.2f} M parameters"
        return f"Cost({size}, tokens {arrow(self.tokens)})"

    def to_dict(self) -> dict[str, Any]:
        return {
            "gflops": self.gflops,
            "params_m": self.params_m,
            "activation_mb": self.activation_mb,
            "ratio": self.ratio,
            **asdict(self),
        }


def cost(model: HVTConfig | HVT | str | Path, **overrides: Any) -> Cost:
    """The cost of a config, model or named model, without building it.

    >>> round(cost("hvt_s_4").gflops, 2)
    1.39
    """
    config = (
        get_config(model) if isinstance(model, (str, Path)) else getattr(model, "config", model)
    )
    if not isinstance(config, HVTConfig):
        raise HVTError(
            f"a {type(model).__name__} cannot be priced: give a model, its config or its name"
        )
    config = config.replace(**overrides)
    layers = _layers(config)
    unpooled = config.replace(stages=0, retention=None, merge=None)
    return Cost(
        layers=layers,
        tokens=list(config.tokens),
        compression=_compression(config),
        unpooled_macs=sum(layer.macs for layer in _layers(unpooled)),
    )


def block_macs(n: int, d: int, mlp_width: int | None = None) -> int:
    """Eq. 7: φ(n, d) = 12nd² + 2n²d at an MLP ratio of 4."""
    hidden = 4 * d if mlp_width is None else mlp_width
    return attention_macs(n, d) + mlp_macs(n, d, hidden)


def attention_macs(n: int, d: int) -> int:
    return 4 * n * d * d + 2 * n * n * d


def mlp_macs(n: int, d: int, hidden: int) -> int:
    return 2 * n * d * hidden


def arrow(tokens: list[int]) -> str:
    """Sequence lengths as text; a long list is shortened in the middle.

    >>> arrow([196, 97, 48])
    '196 → 97 → 48'
    """
    shown = [*map(str, tokens)]
    if len(shown) > 6:
        shown[3:-1] = ["…"]
    return " → ".join(shown)


def _layers(config: HVTConfig) -> list[Layer]:
    d, prefix = config.width, config.num_prefix_tokens
    patch = config.patch_size**2 * config.in_chans
    patches, n = config.tokens[0] - prefix, config.tokens[0]
    # CLIP has a norm's weight and bias in place of the patches' bias; the norm keeps its input and
    # two statistics per token. The convolution keeps the unfolded patches.
    params = (patch + (2 if config.pre_norm else 1) + prefix) * d
    params += (patches if config.no_embed_class else n) * d
    kept = patches * patch + (n * d + 2 * n if config.pre_norm else 0)
    layers = [Layer("patch_embed", patches, n, patches * patch * d, params, FLOAT32 * kept)]
    stage = 0
    for index in range(config.depth):
        kept = n if config.kept is None else config.kept[index]
        layers.append(_attention(f"blocks.{index}.attn", n, kept, config))
        n = kept
        layers.append(_mlp(f"blocks.{index}.mlp", n, config))
        if index in config.pool_blocks:
            stage += 1
            pooled = config.tokens[stage]
            layers.append(_pooling(f"blocks.{index}.pool", n, pooled, config))
            n = pooled
    # The norm keeps its input and two statistics per token; after the average, there is one token.
    normed = 1 if config.fc_norm else n
    layers.append(Layer("norm", n, normed, 0, 2 * d, FLOAT32 * (normed * d + 2 * normed)))
    if config.num_classes:
        inputs = n if config.head_pool == "" else 2 if config.dist_token else 1
        # An average is a tensor of its own; one token, or all, are views that keep the whole norm.
        held = d if config.head_pool == "avg" else n * d
        heads = 2 if config.dist_token else 1
        macs, params = inputs * d * config.num_classes, heads * (d + 1) * config.num_classes
        layers.append(Layer("head", n, inputs, macs, params, FLOAT32 * held))
    return layers


def _attention(name: str, n: int, kept: int, config: HVTConfig) -> Layer:
    """The attention of a block on `n` tokens, of which it passes on `kept`.

    ToMe's search for pairs is not counted, as its authors do not: half of the patches' average keys
    times the other half's, `n² · head_dim / 4`.
    """
    d = config.width
    # Held: block input and its norm (2d), q, k, v (3d), the attended values (d); two statistics
    # of the norm per token and, per head, the softmax's normaliser.
    held = FLOAT32 * (6 * n * d + 2 * n + n * config.num_heads)
    if kept < n and config.merge is None:
        # The attention weights in place of the normaliser; what the kept tokens are gathered from,
        # and their 64-bit indices.
        held += FLOAT32 * (n - 1) * n * config.num_heads
        held += FLOAT32 * n * d + 8 * kept if kept > 1 else 0
    params = 2 * d + 3 * d * (d + int(config.qkv_bias)) + (d + 1) * d
    if config.init_values is not None:  # LayerScale keeps what it scales
        params, held = params + d, held + FLOAT32 * n * d
    return Layer(name, n, kept, attention_macs(n, d), params, held)


def _mlp(name: str, n: int, config: HVTConfig) -> Layer:
    d, hidden = config.width, config.mlp_width
    # Kept: input and its norm (2d), before and after GELU (2 hidden), the norm's statistics.
    kept = 2 * n * d + 2 * n * hidden + 2 * n
    params = 2 * d + (d + 1) * hidden + (hidden + 1) * d
    if config.init_values is not None:
        params, kept = params + d, kept + n * d
    return Layer(name, n, n, mlp_macs(n, d, hidden), params, FLOAT32 * kept)


def _pooling(name: str, n: int, pooled: int, config: HVTConfig) -> Layer:
    d, outputs = config.width, pooled - config.num_prefix_tokens
    macs, params = 0, pooled * d
    kept = FLOAT32 * n * d  # its input, prefix included: what is pooled is a view of it
    if config.pool == "conv":
        rows, cols = window(config.pool_dims, config.pool_kernel)
        macs = outputs * rows * cols * d * d
        params += rows * cols * d * d + d
    elif config.pool == "max":
        kept += 8 * outputs * d  # the winners' 64-bit indices
    return Layer(name, n, pooled, macs, params, kept)


def _compression(config: HVTConfig) -> list[Compression]:
    d, lengths = config.width, config.tokens
    return [
        Compression(
            block=block,
            tokens_in=n,
            tokens_out=pooled,
            alpha=2 + 2 / (12 * d / n + 1),
            measured=block_macs(n, d, config.mlp_width) / block_macs(pooled, d, config.mlp_width),
        )
        for block, n, pooled in zip(config.pool_blocks, lengths, lengths[1:], strict=False)
    ]
