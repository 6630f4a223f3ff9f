"""Budgets: what a model may cost, which configs fit, and the error where none does."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import HVTError
from ..fields import check_value

UNITS = {"gflops": "GFLOPs", "params": "M parameters", "latency_ms": "ms", "memory": "MB"}
"""What can be bounded, and its unit."""

Floats = NDArray[np.float64]


class Budgets:
    """Upper limits of some costs; remembers how closely configs missed them, for the error."""

    def __init__(self, **limits: float | None) -> None:
        self.limits: dict[str, float] = {}
        for name, value in limits.items():
            if value is None:
                continue
            check_value(name, value, float, gt=0)
            self.limits[name] = float(value)
        if not self.limits:
            raise HVTError("no budget is given: use gflops, params, latency_ms or memory")
        self._closest: tuple[float, dict[str, float]] = (math.inf, {})

    def fits(self, costs: Mapping[str, float]) -> bool:
        return all(costs[name] <= tolerance(limit) for name, limit in self.limits.items())

    def usage(self, costs: Mapping[str, Floats], valid: Any = True) -> Floats:
        """How much of its tightest budget each config takes: it fits up to 1."""
        shares = [costs[name] / tolerance(limit) for name, limit in self.limits.items()]
        usage: Floats = np.where(valid, np.maximum.reduce(shares), np.inf)
        at = int(usage.argmin())
        if usage.flat[at] < self._closest[0]:
            closest = {name: float(costs[name].flat[at]) for name in self.limits}
            self._closest = float(usage.flat[at]), closest
        return usage

    def error(self, what: str = "config of the space") -> HVTError:
        """Which budget cannot be met, and what could be."""
        _, closest = self._closest
        if not closest:
            return HVTError(
                f"no {what} has enough tokens for its poolings: use fewer stages, a larger image "
                "or smaller patches"
            )
        tightest = max(self.limits, key=lambda name: closest[name] / self.limits[name])
        takes = " and ".join(f"{rounded_up(closest[n])} {UNITS[n]}" for n in self.limits)
        return HVTError(
            f"{tightest}={self.limits[tightest]:g} cannot be met: the closest {what} takes {takes}"
        )


def tolerance(budget: float) -> float:
    """The highest cost that counts as within a budget: half a unit of the last digit above it.

    Budgets are typed as costs are printed: DeiT-Ti's 1.2537 G MACs are the paper's 1.25.
    """
    digits = max(2, 2 - math.floor(math.log10(budget)))
    return budget + 0.5 * 10.0**-digits


def rounded_up(value: float) -> str:
    """To three digits, so that the printed number is a budget that can be met."""
    unit = 10.0 ** (math.floor(math.log10(value)) - 2)
    return f"{math.ceil(value / unit - 1e-9) * unit:.6g}"
