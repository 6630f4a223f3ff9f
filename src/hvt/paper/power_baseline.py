"""The paper's baseline of DeiT with PoWER: a search from a trained DeiT, then retraining."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console

from ..checkpoint.save_load import read
from ..costs import cost
from ..errors import HVTError
from ..power import search
from ..training.engine import Result, train
from .going_on import go_on
from .protocol import Training


def search_and_retrain(
    training: Training,
    seed: int,
    deit: Path,
    folder: Path,
    overrides: Mapping[str, Any],
    console: Console,
) -> tuple[Result, float | None]:
    """Search and retrain in a folder, or go on there; the search's time, if it was done now.

    A search that was stopped begins anew, as it is short; its result is kept for the training.
    """
    steps = training.power
    assert steps is not None
    # The architecture is the checkpoint's from here on.
    recipe = dataclasses.replace(training.recipe, model=None, overrides={}, seed=seed)
    recipe = recipe.replace(tensorboard=False, **overrides)
    searched, seconds = folder / "searched.safetensors", None
    again = recipe.replace(init=str(searched), epochs=steps.retrain, output=str(folder))
    if (folder / "recipe.json").exists():
        return go_on(folder, training, again.to_dict(), overrides, console), None
    gflops = steps.share * cost(training.config).gflops
    if searched.exists():
        _check(searched, training, gflops)
    else:
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise HVTError(f"cannot write {folder}: {error.strerror}") from error
        began = time.perf_counter()
        looking = recipe.replace(init=str(deit), epochs=steps.search)
        search(looking, gflops, output=searched, console=console)
        seconds = time.perf_counter() - began
    return train(again, console=console), seconds


def _check(searched: Path, training: Training, gflops: float) -> None:
    """Refuse what cannot be of this row's search: another model, or one that costs more."""
    config = read(searched).config
    if config.retention is None:
        why = "has no retention"
    elif config.replace(retention=None) != training.config:
        why = "is another model"
    elif cost(config).gflops > gflops:
        why = f"costs {cost(config).gflops:.4g} GFLOPs, above the row's {gflops:.4g}"
    else:
        return
    raise HVTError(f"{searched} is not of the row's search, as it {why}: move it away")
