"""The `long` protocol: rows trained for 10 to 300 epochs, in parts with a question each.

One pass over the data shows how fast a model learns; many show what it can hold. The models are
those of the CPU protocol, the recipe is `long.toml`, and each part is a table with its own epochs,
seeds and fraction of the training images.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from hvt.paper.tables import PaperRow, PaperTable

from .protocol import Protocol, Training, training_of
from .rows import TINY, get_table

SMALL = (("main", "DeiT-S"), *(("pooling_stages", f"M={stages}") for stages in range(5)))


@dataclass(frozen=True)
class Part(PaperTable):
    """Some rows of the paper's tables, trained alike."""

    epochs: int
    seeds: tuple[int, ...] = (0,)
    train_fraction: float = 1.0
    eval_every: int = 1
    """Epochs; a point of the curve costs a pass over the test images."""


def _rows(names: Iterable[tuple[str, str]]) -> tuple[PaperRow, ...]:
    return tuple(get_table(table).row(name) for table, name in names)


_LARGE = "capacity-limited, as on ImageNet: claims 1 to 3"
_FEW = "data-limited, as the paper's CIFAR-100: claim 5"
_FEW_ROWS = _rows(row for row in SMALL if row[1] in ("M=0", "M=2", "M=4"))
_POWER = "claim 8: PoWER after a long training"
_POWER_ROWS = _rows([("main", "DeiT-Ti + PoWER")])
_PARTS = (
    Part("A", "long", _LARGE, _rows(TINY), 40, (0, 1), eval_every=2),
    Part("A10", "long", "how the gaps change with length", _rows(TINY), 10),
    Part("C", "long", _FEW, _FEW_ROWS, 300, train_fraction=0.1, eval_every=15),
    Part("B", "long", "claims 2 and 5 at the small size", _rows(SMALL), 20, eval_every=2),
    Part("P", "long", _POWER, _POWER_ROWS, 40, (0, 1), eval_every=2),
)
PARTS = {part.name: part for part in _PARTS}


def training(protocol: Protocol, part: Part, row: PaperRow) -> Training:
    """What a row trains in a part."""
    (recipe,) = protocol.recipes.values()
    recipe = replace(recipe, train_fraction=part.train_fraction, eval_every=part.eval_every)
    return training_of(row, recipe, part.epochs)
