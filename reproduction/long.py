"""The `long` protocol: rows trained for 10 to 300 epochs, in parts with a question each.

One pass over the data shows how fast a model learns; many show what it can hold. The models are
those of the CPU protocol, the recipe is `long.toml`, and each part has its own epochs, seeds and
fraction of the training images.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from hvt.errors import HVTError, did_you_mean
from hvt.paper.tables import Row
from hvt.zoo import get_config

from .protocol import Protocol, Training, adapt, power_training, training_of
from .rows import TINY, get_table
from .run import Job, check_names, command

SMALL = (("main", "DeiT-S"), *(("pooling_stages", f"M={stages}") for stages in range(5)))


@dataclass(frozen=True)
class Part:
    """Some rows of the paper's tables, trained alike."""

    name: str
    question: str
    rows: tuple[tuple[str, str], ...]
    """Table and row."""
    epochs: int
    seeds: tuple[int, ...] = (0,)
    train_fraction: float = 1.0
    eval_every: int = 1
    """Epochs; a point of the curve costs a pass over the test images."""


PARTS = {
    part.name: part
    for part in (
        Part(
            "A",
            "capacity-limited, as on ImageNet: claims 1, 2 and 3",
            TINY,
            epochs=40,
            seeds=(0, 1),
            eval_every=2,
        ),
        Part("A10", "how the gaps change with length", TINY, epochs=10),
        Part(
            "C",
            "data-limited, as the paper's CIFAR-100: claim 5",
            tuple(row for row in SMALL if row[1] in ("M=0", "M=2", "M=4")),
            epochs=300,
            train_fraction=0.1,
            eval_every=15,
        ),
        Part("B", "claims 2 and 5 at the small size", SMALL, epochs=20, eval_every=2),
        Part(
            "P",
            "claim 8: PoWER after a long training",
            (("main", "DeiT-Ti + PoWER"),),
            epochs=40,
            seeds=(0, 1),
            eval_every=2,
        ),
    )
}


def get_part(name: str) -> Part:
    """A part by name."""
    if name not in PARTS:
        raise HVTError(f"the long protocol has no part {name!r}: {did_you_mean(name, PARTS)}")
    return PARTS[name]


def training(protocol: Protocol, part: Part, row: Row) -> Training:
    """What a row trains in a part."""
    (recipe,) = protocol.recipes.values()
    recipe = dataclasses.replace(
        recipe, train_fraction=part.train_fraction, eval_every=part.eval_every
    )
    config = adapt(get_config(row.model.removesuffix("_power"), **row.overrides), recipe)
    if row.power:
        return power_training(row, config, recipe, part.epochs)
    return training_of(row.model, config, recipe, part.epochs)


def rows_of(part: Part) -> list[Row]:
    """The part's rows, as the tables have them."""
    return [get_table(table).row(name) for table, name in part.rows]


def jobs(
    protocol: Protocol,
    parts: Iterable[Part],
    seeds: Sequence[int] | None = None,
    names: Sequence[str] = (),
    options: Sequence[str] = (),
) -> list[Job]:
    """The trainings of parts, in their order; `names` are the rows wanted, all without any."""
    parts = list(parts)
    check_names(names, [name for part in parts for _, name in part.rows])
    planned = []
    for part in parts:
        for seed in part.seeds if seeds is None else seeds:
            for row in rows_of(part):
                if names and row.name not in names:
                    continue
                flags = ["long", "--part", part.name, "--row", row.name, "--seeds", str(seed)]
                title = (f"{part.name}: {row.name}",)
                how = command(*flags, *options)
                planned.append(Job(training(protocol, part, row), seed, title, how))
    return planned
