"""Retentions, what they cost, and the one that meets a budget.

A retention is a tuple of l_j, the tokens that leave the attention of block j, the class token
counted. A block's mass is how many patches it would keep, not yet a whole number.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from ..config import HVTConfig
from ..costs import attention_macs, mlp_macs
from ..errors import HVTError
from ..zoo import get_config

Retention = tuple[int, ...]
Mass = Sequence[float]


def check_deit(config: HVTConfig, what: str = "the model") -> None:
    """Refuse what PoWER cannot be put on."""
    reason = None
    if config.pool_blocks:
        reason = "pools its tokens"
    elif config.merge is not None:
        reason = "merges its tokens"
    elif not config.class_token:
        reason = "has no class token"
    elif config.num_prefix_tokens > 1:
        reason = "has other tokens beside the class token"
    if reason:
        raise HVTError(f"PoWER needs a DeiT, and {what} {reason}: use a deit_* model")


def budget_range(config: HVTConfig) -> tuple[float, float]:
    """The GFLOPs that a retention can cost, with the fewest tokens in every block and with all."""
    check_deit(config)
    least, most = least_tokens(config), config.tokens[0]
    ends = [(kept,) * config.depth for kept in (least, most)]
    lowest, highest = (_macs(config, retention) / 1e9 for retention in ends)
    return lowest, highest


def retention_of(mass: Mass, least: int = 1) -> Retention:
    """l_j = the mass of block j rounded up, and the class token; never rising from block to block.

    >>> retention_of([2.5, 3, 0])
    (4, 4, 1)
    """
    kept: list[int] = []
    for patches in mass:
        # A sum of float32 numbers may be a hair above the whole number it stands for.
        tokens = max(least, 1 + math.ceil(patches - 1e-4))
        kept.append(min(tokens, kept[-1]) if kept else tokens)
    return tuple(kept)


def fit_retention(config: HVTConfig, mass: Mass, gflops: float) -> Retention:
    """The retention of a mass, all blocks scaled alike so that it costs the budget.

    It costs no more, and no further token fits into the budget. A last block whose patches nobody
    reads keeps none, whatever its mass, and the others have what it would cost.
    """
    check_budget(config, gflops)
    patches, blocks = config.tokens[0] - 1, searched_blocks(config)
    mass = [m if block < blocks else 0.0 for block, m in enumerate(mass)]
    some = [m for m in mass if m > 1e-3]  # the others can only be topped up
    return _meet(
        config,
        gflops,
        lambda scale: [min(patches, scale * m) for m in mass],
        highest=patches / min(some) if some else 1.0,
        blocks=blocks,
    )


def retention_for(model: HVTConfig | str, gflops: float) -> Retention:
    """A retention that costs a budget, by a rule and without a search: an even decline.

    Each block loses the same number of patches, as far as there are any, and that number is the
    smallest that meets the budget. The named PoWER models have theirs so.

    >>> retention_for("deit_s", 2.7)
    (184, 171, 158, 145, 132, 119, 106, 93, 80, 67, 53, 40)
    """
    config = get_config(model) if isinstance(model, str) else model
    config = config.replace(retention=None)
    check_budget(config, gflops)
    patches, blocks = config.tokens[0] - 1, range(1, config.depth + 1)

    def decline(share: float) -> list[float]:  # that leaves the first block
        return [max(0.0, patches * (1 - (1 - share) * block)) for block in blocks]

    return _meet(config, gflops, decline, highest=1.0, blocks=config.depth)


def _meet(
    config: HVTConfig,
    gflops: float,
    masses: Callable[[float], list[float]],
    highest: float,
    blocks: int,
) -> Retention:
    """The costliest affordable retention of a rising family of masses.

    What is left of the budget tops up the first `blocks`, token by token.
    """
    budget, least = gflops * 1e9 + 0.5, least_tokens(config)
    low, high = 0.0, highest
    for _ in range(60):
        middle = (low + high) / 2
        fits = _macs(config, retention_of(masses(middle), least)) <= budget
        low, high = (middle, high) if fits else (low, middle)
    wanted = masses(low)
    kept = list(retention_of(wanted, least))
    while True:
        before = [config.tokens[0], *kept[:-1]]
        free = [block for block in range(blocks) if kept[block] < before[block]]
        # First where the mass is nearest to one more token; of equals the earlier block.
        for block in sorted(free, key=lambda b: kept[b] - wanted[b]):
            kept[block] += 1
            if _macs(config, kept) <= budget:
                break
            kept[block] -= 1
        else:
            return tuple(kept)


def check_budget(config: HVTConfig, gflops: float) -> None:
    """Refuse a budget that no retention meets."""
    lowest, highest = budget_range(config)
    # Either end may be asked for, whatever its last bit.
    if not lowest * (1 - 1e-9) <= gflops <= highest * (1 + 1e-9):
        raise HVTError(
            f"gflops={gflops:g} is out of reach: this model costs {lowest:.4g} GFLOPs with the "
            f"fewest tokens and {highest:.4g} with all of them, so ask for something in between"
        )


def searched_blocks(config: HVTConfig) -> int:
    """How many blocks have a retention to search: all but a last one whose patches nobody reads.

    The head of a DeiT reads the class token alone, so the logits are the same however many patches
    the last block keeps after its attention. It keeps none.
    """
    return config.depth - (config.head_pool == "token")


def least_tokens(config: HVTConfig) -> int:
    """The class token, and a patch where the head reads patches."""
    return 2 if config.head_pool == "avg" else 1


def _macs(config: HVTConfig, retention: Sequence[int]) -> int:
    """What `hvt.cost` says of a retention, quickly: multiply-adds for one image."""
    d, hidden = config.width, config.mlp_width
    patch = config.patch_size**2 * config.in_chans
    total = (config.tokens[0] - 1) * patch * d
    for n, kept in zip((config.tokens[0], *retention), retention, strict=False):
        total += attention_macs(n, d) + mlp_macs(kept, d, hidden)
    outputs = retention[-1] if config.head_pool == "" else 1
    return total + outputs * d * config.num_classes
