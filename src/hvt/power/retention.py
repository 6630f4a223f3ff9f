"""Retentions, what they cost, and the one that meets a budget.

A retention is a tuple of l_j, the tokens that leave the attention of block j, the class token
counted. A block's mass is how many patches it would keep, not yet a whole number.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from ..config import HVTConfig
from ..costs import cost
from ..errors import HVTError
from ..zoo import get_config

Retention = tuple[int, ...]
Mass = Sequence[float]


def check_deit(config: HVTConfig) -> None:
    """Raise an error if PoWER cannot be applied to a model."""
    reasons = {
        "pools its tokens": bool(config.pool_blocks),
        "merges its tokens": config.merge is not None,
        "has no class token": not config.class_token,
        "has other tokens beside the class token": config.num_prefix_tokens > 1,
    }
    for reason, applies in reasons.items():
        if applies:
            raise HVTError(f"PoWER needs a DeiT, but the model {reason}: use a deit_* model")


def budget_range(config: HVTConfig) -> tuple[float, float]:
    """The GFLOPs that a retention can cost, with the fewest tokens in every block and with all."""
    check_deit(config)
    lowest, highest = (
        cost(config, retention=(kept,) * config.depth).gflops
        for kept in (min_tokens(config), config.tokens[0])
    )
    return lowest, highest


def retention_of(mass: Mass, lowest: int = 1) -> Retention:
    """l_j = the mass of block j rounded up, and the class token; never rising from block to block.

    >>> retention_of([2.5, 3, 0])
    (4, 4, 1)
    """
    kept: list[int] = []
    for patches in mass:
        # A sum of float32 numbers may be a hair above the whole number it stands for.
        tokens = max(lowest, 1 + math.ceil(patches - 1e-4))
        kept.append(min(tokens, kept[-1]) if kept else tokens)
    return tuple(kept)


def fit_retention(config: HVTConfig, mass: Mass, gflops: float) -> Retention:
    """The retention of a mass, all blocks scaled alike so that it costs the budget.

    It costs no more, and no further token fits into the budget. A last block whose patches are not
    read keeps none, whatever its mass, and the others get what it would cost.
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
    smallest that meets the budget. This gives the named PoWER models theirs.

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
    lowest = min_tokens(config)

    def affordable(kept: Sequence[int]) -> bool:
        return cost(config, retention=tuple(kept)).macs <= gflops * 1e9 + 0.5

    low, high = 0.0, highest
    for _ in range(60):
        middle = (low + high) / 2
        fits = affordable(retention_of(masses(middle), lowest))
        low, high = (middle, high) if fits else (low, middle)
    wanted = masses(low)
    kept = list(retention_of(wanted, lowest))
    while True:
        before = [config.tokens[0], *kept[:-1]]
        free = [block for block in range(blocks) if kept[block] < before[block]]
        # First where the mass is nearest to one more token; of equals the earlier block.
        for block in sorted(free, key=lambda b: kept[b] - wanted[b]):
            kept[block] += 1
            if affordable(kept):
                break
            kept[block] -= 1
        else:
            return tuple(kept)


def check_budget(config: HVTConfig, gflops: float) -> None:
    """Raise an error if no retention meets a budget."""
    lowest, highest = budget_range(config)
    # Either end may be asked for, whatever its last bit.
    if not lowest * (1 - 1e-9) <= gflops <= highest * (1 + 1e-9):
        raise HVTError(
            f"gflops={gflops:g} is out of range: this model costs {lowest:.4g} GFLOPs with the "
            f"fewest tokens and {highest:.4g} with all of them"
        )


def searched_blocks(config: HVTConfig) -> int:
    """How many blocks have a retention to search: all but a last one whose patches are not read.

    The head of a DeiT reads only the class token, so the logits are the same however many patches
    the last block keeps after its attention. It keeps none.
    """
    return config.depth - (config.head_pool == "token")


def min_tokens(config: HVTConfig) -> int:
    """The class token, and a patch where the head reads patches."""
    return 2 if config.head_pool == "avg" else 1
