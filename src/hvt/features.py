"""Feature maps for dense tasks: what each block gives, and timm's `features_only`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from timm.models._features import FeatureGetterNet, feature_take_indices
from torch import Tensor, nn

from .config import HVTConfig, window
from .errors import HVTError
from .pooling import as_tokens, to_grid


def feature_info(config: HVTConfig) -> list[dict[str, Any]]:
    """What each block gives, in timm's form.

    `reduction` is pixels per token side on a grid. A `sequence`, pooled in 1D or short of dropped
    tokens, has no grid; its reduction is the patch size, that of the patch grid `FeatureMaps`
    stretches it back to.
    """
    stride = max(window(config.pool_dims, config.pool_stride))
    info = []
    for i in range(config.depth):
        pooled = sum(b <= i for b in config.pool_blocks)
        tokens = config.tokens[pooled] if config.kept is None else config.kept[i]
        whole = config.kept is None or tokens == config.tokens[0]
        on_grid = whole and (config.pool_dims == 2 or not pooled)
        info.append(
            {
                "module": f"blocks.{i}",
                "num_chs": config.width,
                "reduction": config.patch_size * (stride**pooled if on_grid else 1),
                "tokens": tokens - config.num_prefix_tokens,
                "sequence": not on_grid,
            }
        )
    return info


def last_blocks(config: HVTConfig) -> list[int]:
    """The last block of each stage; blocks before the first pooling are a stage too.

    >>> last_blocks(HVTConfig(stages=4))
    [2, 5, 8, 11]
    """
    return [block - 1 for block in config.pool_blocks if block] + [config.depth - 1]


class FeatureMaps(FeatureGetterNet):
    """timm's feature extractor with one level per stage and maps as large as their reduction says.

    `out_indices` are blocks, or how many of the last ones; by default the last of each stage. Token
    grids are unchanged. A sequence that was pooled in 1D is stretched back to the patch grid, as
    in the paper's Figure 3. The tokens of PoWER do not form a grid: an error.
    """

    def __init__(
        self, model: nn.Module, out_indices: int | Sequence[int] | None = None, norm: bool = False
    ) -> None:
        config: HVTConfig = model.config  # type: ignore[assignment]
        levels = last_blocks(config) if out_indices is None else out_indices
        blocks, _ = feature_take_indices(
            config.depth, levels if isinstance(levels, int) else list(levels)
        )
        # Sorted, because that is how they come, and what is said of them must be in that order.
        super().__init__(model, tuple(sorted(set(blocks))), norm=norm)
        self.sequences: list[bool] = self.feature_info.get("sequence")
        if config.kept is not None and any(self.sequences):
            block = self.feature_info.out_indices[self.sequences.index(True)]
            raise HVTError(
                f"features_only has no map after block {block}: tokens were dropped or merged, and "
                "the rest do not form a grid; use forward_intermediates(images, output_fmt='NLC')"
            )

    def forward(self, images: Tensor) -> list[Tensor]:  # (B, C, H, W) → (B, D, H/r, W/r) each
        maps = super().forward(images)
        config: HVTConfig = self.model.config  # type: ignore[assignment]
        return [
            to_grid(as_tokens(y), config.grid) if sequence else y  # (B, D, 1, N') → (B, D, H, W)
            for y, sequence in zip(maps, self.sequences, strict=True)
        ]
