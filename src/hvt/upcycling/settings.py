"""What an upcycling is: one frozen dataclass, which the flags of `hvt upcycle` fill."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..errors import HVTError
from ..fields import MAX_THREADS, check_values, field
from ..training.recipe import MAX_EPOCHS

PLACEMENT = (
    "img_size", "pool_after", "pool", "pool_dims", "pool_stride", "pool_kernel",
    "proportional_attention",
)  # fmt: skip
"""The fields of `HVTConfig` that may be fixed by hand."""
OWN = ("*norm*", "*bias")
"""Beside the positions, which each setting of an elastic model has of its own."""


@dataclass(frozen=True)
class Settings:
    """Everything but the source, the photos and the file to write."""

    gflops: float | None = field(None, "budget: MACs per image in 10⁹", gt=0)

    elastic: tuple[float, ...] | None = field(
        None,
        "make one elastic checkpoint with a setting per budget in GFLOPs, such as 0.4,0.7",
        gt=0,
    )
    own: tuple[str, ...] = field(
        OWN, "elastic: name pattern of parameters that are separate for each setting; repeatable"
    )
    freeze: bool = field(
        False, "elastic: train only the separate parameters of the smaller settings; the "
        "largest setting stays the source",
    )  # fmt: skip
    own_lr: float | None = field(
        None, "elastic: learning rate of the separate parameters (default: --lr)", gt=0
    )
    every_setting: bool = field(
        False, "elastic: train all settings in each step, not largest, smallest and one other"
    )
    largest_weight: float = field(2.0, "elastic: weight of the largest setting's loss", gt=0)

    img_size: int | tuple[int, int] | None = field(None, "image size: N or HxW")
    pool_after: tuple[int, ...] | None = field(None, "blocks to pool after; () pools nowhere")
    pool: str | None = field(
        None, "require pooling: max, avg or any", choices=("max", "avg", "any")
    )
    pool_dims: int | None = field(None, "1 pools the sequence, 2 the grid", ge=1, le=2)
    pool_stride: int | tuple[int, int] | None = field(
        None, "pooling stride: N, or HxW of the grid", ge=1
    )
    pool_kernel: int | tuple[int, int] | None = field(
        None, "pooling window: N, or HxW of the grid", ge=1
    )
    proportional_attention: bool | None = field(
        None, "weight pooled tokens in attention by the tokens they stand for"
    )
    rank_photos: int = field(256, "photos to rank the best placements on", ge=1)

    epochs: float = field(10.0, "passes over the photos; 0 for no training", ge=0, le=MAX_EPOCHS)
    minutes: float | None = field(
        None, "time limit in minutes; the learning rate follows the clock", gt=0
    )
    batch_size: int = field(16, "crops per step over all processes", ge=2)
    lr: float = field(1e-4, "learning rate for this batch size", gt=0)
    layer_decay: float | None = field(
        0.85, "learning rate of a block relative to the next", gt=0, le=1
    )
    weight_decay: float = field(0.02, "weight decay of AdamW", ge=0)
    ema: float = field(0.0, "EMA decay of the weights; 0 disables it", ge=0, lt=1)
    mixup: float = field(0.0, "fraction of crops that are blended with another", ge=0, le=1)
    scale: float = field(0.5, "smallest area of a random crop", gt=0, le=1)
    holdout: int = field(500, "photos held out for evaluation, at most a fifth", ge=1)
    skip_broken: bool = field(False, "skip unreadable photos and count them")

    license: str | None = field(None, "licence of the source, recorded in the output")

    device: str = field("auto", "auto, cpu, cuda …")
    amp: str = field(
        "auto",
        "mixed precision: auto (bfloat16 on GPUs), off, bfloat16, float16",
        choices=("auto", "off", "bfloat16", "float16"),
    )
    workers: int = field(-1, "reading processes; -1 chooses", ge=-1)
    threads: int | None = field(None, "CPU threads per process", ge=1, le=MAX_THREADS)
    seed: int = field(0, "seed of crops and order", ge=0)
    checkpoint_minutes: float = field(10.0, "minutes between checkpoints within an epoch", ge=0)

    def __post_init__(self) -> None:
        check_values(self)
        if self.elastic is not None and self.gflops is not None:
            raise HVTError("elastic already names the budgets: leave gflops out")
        if self.elastic is not None and len(set(self.elastic)) < 2:
            raise HVTError(f"elastic={self.elastic} needs at least two budgets, such as 0.4,0.7")
        if self.elastic is not None and self.mixup:
            raise HVTError("an elastic model is trained without mixup: leave it out")

    @property
    def fixed(self) -> dict[str, Any]:
        """What of the placement was chosen by hand, as fields of `HVTConfig`."""
        values = {name: getattr(self, name) for name in PLACEMENT}
        return {name: value for name, value in values.items() if value not in (None, "any")}

    @property
    def asks_for_pooling(self) -> bool:
        """Whether the unpooled source on smaller images will not do."""
        return self.pool == "any" or bool(self.fixed.keys() - {"img_size"})


def from_dict(values: dict[str, Any]) -> Settings:
    """Settings from plain values: JSON has lists where there were tuples."""
    plain: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in values.items()}
    return Settings(**plain)
