"""`hvt.train`: a recipe by name, any field of it or of the model replaced."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.console import Console

from ..config import FIELDS
from ..errors import HVTError, nearest
from . import engine
from .engine import Result
from .recipe import RECIPE_FIELDS, Recipe, load_recipe


def train(
    recipe: str | Path | Recipe | None = None,
    *,
    resume: str | Path | None = None,
    quiet: bool = False,
    **values: Any,
) -> Result:
    """Train by a recipe: `hvt.train("digits", epochs=3, depth=4)`.

    `recipe` is a name of `hvt recipes`, the path of a `.toml` file or a `Recipe`. `values` replace
    fields of the recipe (`hvt train --help` lists them) or of `HVTConfig`. The run leaves a folder,
    `output`, with weights, metrics and curves; without one it is `runs/RECIPE-MODEL`, with a number
    if that is taken. `resume` is the folder of a run to resume instead; `epochs` makes it
    longer. `quiet` prints nothing. Ctrl-C raises `Interrupted` after a checkpoint.
    """
    console = Console(quiet=True) if quiet else None
    if resume is not None:
        if recipe is not None or set(values) - {"epochs"}:
            raise HVTError("resume uses the run's own recipe: give it alone, or with epochs")
        return engine.resume(resume, console=console, **values)
    if recipe is None:
        raise HVTError("no recipe is given: use hvt.train('digits'), or resume=FOLDER")
    name = "run" if isinstance(recipe, Recipe) else Path(recipe).name.removesuffix(".toml")
    base = recipe if isinstance(recipe, Recipe) else load_recipe(recipe)
    for field in values:
        if field not in RECIPE_FIELDS and field not in FIELDS:
            hint = nearest(field, [*RECIPE_FIELDS, *FIELDS])
            raise HVTError(f"unknown field {field!r}: {hint}")
    overrides = {field: value for field, value in values.items() if field in FIELDS}
    fields = {field: value for field, value in values.items() if field in RECIPE_FIELDS}
    return engine.train(base.replace(overrides, **fields), name=name, console=console)
