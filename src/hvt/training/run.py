"""`hvt.train` and `hvt train`: a recipe by name, any field of it or of the model replaced.

A wrong argument raises an error before torch is imported.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import HVTError
from .recipe import Recipe, list_recipes, load_recipe, read_recipe

if TYPE_CHECKING:
    from .trainer import Result


def train(
    recipe: str | Path | Recipe | None = None,
    *,
    resume: str | Path | None = None,
    allow_changed_data: bool = False,
    quiet: bool = False,
    **values: Any,
) -> Result:
    """Train with a recipe: `hvt.train("digits", epochs=3, depth=4)`.

    `recipe` is a name of `hvt recipes`, the path of a `.toml` file or a `Recipe`. `values` replace
    fields of the recipe (`hvt train --help` lists them) or of `HVTConfig`. Weights, metrics and
    curves are written to the folder `output`, by default `runs/RECIPE-MODEL`, with a number if that
    exists. `resume` is the folder of a run to resume instead; `epochs` extends it, and
    `allow_changed_data` resumes even if the images have changed. `quiet` prints nothing.
    Ctrl-C raises `Interrupted` after a checkpoint. For several processes use torchrun or
    `hvt train --processes`.
    """
    name, whole = check_arguments(recipe, resume, allow_changed_data, values)

    from rich.console import Console

    from . import engine

    console = Console(quiet=True) if quiet else None
    if resume is None:
        return engine.train(whole, name, console)
    return engine.resume(resume, console, allow_changed_data=allow_changed_data, **values)


def check_arguments(
    recipe: str | Path | Recipe | None,
    resume: str | Path | None,
    allow_changed_data: bool,
    values: dict[str, Any],
) -> tuple[str, Recipe]:
    """The name and the recipe, with its fields replaced, of what is to be trained or resumed."""
    if resume is not None:
        if recipe is not None or set(values) - {"epochs", "processes"}:
            raise HVTError(
                "a resumed run uses its own recipe: give only the run, and epochs (to extend it) "
                "or processes"
            )
        return "run", read_recipe(resume).replace(**values)
    if allow_changed_data:
        raise HVTError("allow_changed_data needs resume")
    name = "run"
    if recipe is None:
        raise HVTError(f"no recipe is given: use one of {', '.join(list_recipes())}")
    if not isinstance(recipe, Recipe):
        name = Path(recipe).name.removesuffix(".toml")
        recipe = load_recipe(recipe)
    for given, other in (("model", "init"), ("init", "model")):
        if given in values:  # the recipe's own is another model
            values = {other: None, **values}
    whole = recipe.replace(**values)
    alone = [field for field in values if field.startswith("distill")]
    if alone and whole.teacher is None and not (whole.elastic and alone == ["distill_alpha"]):
        raise HVTError(f"{alone[0]} needs a teacher: name one with teacher=")
    return name, whole
