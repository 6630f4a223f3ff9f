"""`hvt.train` and `hvt train`: a recipe by name, any field of it or of the model replaced.

A wrong argument is refused before torch is imported.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..config import FIELDS
from ..errors import HVTError, did_you_mean
from ..zoo import is_config_file
from .recipe import RECIPE_FIELDS, Recipe, list_recipes, load_recipe

if TYPE_CHECKING:
    from .engine import Result


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
    longer. `quiet` prints nothing. Ctrl-C raises `Interrupted` after a checkpoint. `processes`
    starts so many local processes, which need no `if __name__ == "__main__"` and print to the
    standard output of this one.
    """
    name, whole = "run", None
    if resume is None:
        if recipe is None:
            raise HVTError(f"no recipe is given: use one of {', '.join(list_recipes())}")
        if not isinstance(recipe, Recipe):
            name = Path(recipe).name.removesuffix(".toml")
            recipe = load_recipe(recipe)
        for field in values:
            if field not in RECIPE_FIELDS and field not in FIELDS:
                hint = did_you_mean(field, [*RECIPE_FIELDS, *FIELDS])
                raise HVTError(f"unknown field {field!r}: {hint}")
        overrides = {field: values.pop(field) for field in FIELDS if field in values}
        if "model" not in values and recipe.model and is_config_file(recipe.model):
            # Or the run would look for the file again when it is resumed.
            overrides, values["model"] = recipe.overrides | overrides, recipe.model
        whole = recipe.replace(overrides, **values)
        alone = [field for field in values if field.startswith("distill")]
        if alone and whole.teacher is None:
            raise HVTError(f"{alone[0]} is of no use without a teacher: name one with teacher=")
    elif recipe is not None or set(values) - {"epochs", "processes"}:
        raise HVTError(
            "a resumed run has its own recipe: give it alone, or with epochs to make it longer, "
            "or processes"
        )

    from rich.console import Console

    from . import launch

    console = Console(quiet=True) if quiet else None
    if whole is None:
        return launch.resume(str(resume), console=console, **values)
    return launch.train(whole, name=name, console=console)
