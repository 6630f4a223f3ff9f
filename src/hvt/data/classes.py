"""Which of a model's classes are those of some data: by name, or by order where that is asked."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from ..errors import HVTError, did_you_mean

_SHOWN = 3  # pairs of names that a line has room for
_BY_ORDER = "if both have the same classes in the same order, use --match-by-order"


@dataclass(frozen=True)
class ClassMatch:
    """Where the classes of some data are among a model's."""

    by: Literal["name", "order", "label"]
    """`label` where the data has no names, only the indices of the model's logits."""
    data_names: tuple[str, ...]
    model_names: tuple[str, ...]
    """Empty where the model does not know them."""
    places: tuple[int, ...]
    """For each label of the data, the index of the logit."""

    def describe(self) -> str:
        """What was matched, in one line."""
        if self.by == "label":
            return "classes matched by label: the data does not name its classes"
        if self.by == "name":
            count = f"{len(self.places)} of the model's {len(self.model_names)}"
            return f"classes matched by name: {count}"
        if not self.model_names:
            return f"classes matched by order: the model does not name its {len(self.places)}"
        pairs = [f"{data} = {model}" for data, model in self.pairs[:_SHOWN]]
        more = [f"{len(self.pairs) - _SHOWN} more"] if len(self.pairs) > _SHOWN else []
        return f"classes matched by order: {', '.join(pairs + more)}"

    @property
    def pairs(self) -> list[tuple[str, str]]:
        """Each class of the data and the model's class that it is taken for."""
        names = self.model_names or self.data_names
        places = zip(self.data_names, self.places, strict=True)
        return [(name, names[place]) for name, place in places]


def match_classes(
    data_names: Sequence[str],
    model_names: Sequence[str] | None,
    num_classes: int,
    where: str,
    by_order: bool = False,
) -> ClassMatch:
    """Find the classes of `where` among a model's.

    By name, the data may have fewer classes, in any order; one that the model does not know is an
    error, and so is one whose name two of the model's classes have, unless all names are the same.
    By order, there must be equally many, and no name may say otherwise: it is for names of another
    kind (ImageNet's `n01440764` and `tench`) and for models that know no names.
    """
    names, known = tuple(data_names), tuple(model_names or ())
    if not names:
        return ClassMatch("label", names, known, tuple(range(num_classes)))
    if by_order:
        _check_order(names, known, num_classes, where)
        return ClassMatch("order", names, known, tuple(range(num_classes)))
    if not known:
        raise HVTError(
            f"the model does not name its {num_classes} classes, {where} has {len(names)}: "
            + (_BY_ORDER if len(names) == num_classes else "a model with class names is needed")
        )
    if names == known:  # also where a name occurs twice, as ImageNet's crane does
        return ClassMatch("name", names, known, tuple(range(num_classes)))
    places = {name: place for place, name in enumerate(known)}
    unknown = [name for name in names if name not in places]
    if unknown:
        offer = textwrap.shorten(did_you_mean(unknown[0], known), 200, placeholder=" …")
        raise HVTError(
            f"the class {unknown[0]!r} of {where} is not among the model's {len(known)} classes: "
            + (_BY_ORDER if len(unknown) == len(names) == len(known) else offer)
        )
    counts = Counter(known)
    twice = next((name for name in names if counts[name] > 1), None)
    if twice is not None:
        raise HVTError(
            f"the class {twice!r} of {where} matches {counts[twice]} classes of the model: give "
            "each a unique name by hvt.save(hvt.load(MODEL), FILE, class_names=NAMES)"
        )
    return ClassMatch("name", names, known, tuple(places[name] for name in names))


def _check_order(
    names: tuple[str, ...], known: tuple[str, ...], num_classes: int, where: str
) -> None:
    if len(names) != num_classes:
        raise HVTError(
            f"{where} has {len(names)} classes and the model {num_classes}: only equally many can "
            "be matched by order"
        )
    shared = set(names) & set(known)
    for name, other in zip(names, known or names, strict=True):
        if name in shared and name != other:
            raise HVTError(
                f"the class {name!r} of {where} has another index among the model's classes: "
                "match them by name, without --match-by-order"
            )
