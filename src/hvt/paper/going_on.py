"""Going on with a run, if it is the training that a row asks for."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console

from ..errors import HVTError
from ..training.engine import RESUMABLE_FIELDS, Result, read_recipe, resume
from .protocol import Training


def go_on(
    folder: Path,
    training: Training,
    asked: Mapping[str, Any],
    overrides: Mapping[str, Any],
    console: Console,
) -> Result:
    """Resume the run of a folder; one with another recipe than the one asked for is refused.

    A run can be made longer by `hvt train --resume`, and is not the row's any more then.
    """
    found = read_recipe(folder).to_dict()
    checked = {*found} - {*RESUMABLE_FIELDS} | {"data", "epochs"}
    if training.images <= training.recipe.batch_size:
        checked -= {"batch_size"}  # which is lowered to what the data can fill
    for name in sorted(checked):
        there, here = (json.loads(json.dumps(values[name])) for values in (found, asked))
        if there != here:
            raise HVTError(
                f"{folder} is a run of another training: its {name} is {there}, the row's is "
                f"{here}; move it away, or name another folder with --runs"
            )
    return resume(folder, console, **overrides)
