"""A classifier trained by a recipe: from the beginning in a new folder, or resumed."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from .. import distributed
from ..errors import HVTError
from ..terminal import print_line
from .learner import Learner
from .optimize import seed_all
from .pipeline import (
    Validation,
    build_model,
    class_weights,
    fit_to_data,
    identity_of,
    open_batches,
    summary,
)
from .recipe import Recipe, read_recipe
from .run_lock import found_run, locked, new_folder, resume_command
from .sandwich import ElasticLearner, evaluate_settings, give_stages
from .state import newest_state
from .trainer import RESUMABLE_FIELDS, Result, Trainer


def train(recipe: Recipe, name: str = "run", console: Console | None = None) -> Result:
    """Train from the beginning in a new folder; the default one gets a number if it is taken."""
    with distributed.process_group(recipe.device) as (processes, device):
        _check_started(recipe.processes, processes)
        restarted = processes.any(device, distributed.restarted())
        mine = new_folder(recipe, name, restarted) if processes.is_main_process else None
        folder = processes.broadcast(mine)
        with locked(folder, processes):
            found = processes.broadcast(found_run(folder))
            if found and not restarted:
                raise HVTError(
                    f"{folder} already contains a run ({found}): resume it with "
                    f"{resume_command(folder)}, or choose another --output"
                )
            if found:
                recipe = read_recipe(folder)  # whose batch is the one that was fitted to the data
            return _run(recipe, folder, processes, device, console)


def resume(
    folder: str | Path,
    console: Console | None = None,
    allow_changed_data: bool = False,
    **overrides: Any,
) -> Result:
    """Resume a run from its newest good checkpoint.

    `overrides` are fields of the recipe that change nothing of what is learned: root, device,
    threads … and `epochs`, which makes it longer, a finished one too. The learning rate is then
    that of a run of so many epochs, so a finished one continues with a higher rate than its last.
    """
    folder = Path(folder)
    assert set(overrides) <= set(RESUMABLE_FIELDS)
    recipe = read_recipe(folder).replace(**overrides)
    with distributed.process_group(recipe.device) as (processes, device), locked(folder, processes):
        _check_started(overrides.get("processes"), processes)
        return _run(recipe, folder, processes, device, console, allow_changed_data)


def _run(
    recipe: Recipe,
    folder: Path,
    processes: distributed.DistributedContext,
    device: torch.device,
    console: Console | None,
    allow_changed_data: bool = False,
) -> Result:
    """Train in a folder from its newest good checkpoint, if it has one."""
    console = processes.console(console)
    state = newest_state(folder / "checkpoints", processes, console)
    if state is None and (folder / "recipe.json").exists():
        print_line(console, "no usable checkpoint: starting from the beginning")
    trainer = open_trainer(recipe, folder, processes, device, console, state)
    return trainer.run(state, allow_changed_data)


def open_trainer(
    recipe: Recipe,
    folder: Path,
    processes: distributed.DistributedContext,
    device: torch.device,
    console: Console | None = None,
    state: dict[str, Any] | None = None,
) -> Trainer:
    """What trains a classifier by a recipe: its data, model, learner and top-1.

    With the `state` of a run, the model is built as it describes it, and `init` is not read.
    """
    console = processes.console(console)
    if recipe.threads:
        torch.set_num_threads(recipe.threads)
    seed_all(recipe.seed, -1, device)
    if recipe.elastic:
        recipe = recipe.replace({"stages": min(recipe.elastic)})  # the model is the largest setting
    say = functools.partial(print_line, console)
    built = build_model(recipe, described=state, say=say)
    if state is None:
        recipe = fit_to_data(recipe, built.data, processes.world_size, say)
    batches, val_batches = open_batches(recipe, built.model, built.data, processes, device)
    kind = Learner
    if recipe.elastic:
        kind = ElasticLearner
        give_stages(built.model, recipe.elastic)
    weights = class_weights(recipe, built.data)
    learner = kind(recipe, built.model, batches, processes, device, weights)
    validation = Validation(val_batches, learner, console)
    return Trainer(
        learner,
        folder,
        console,
        evaluate=functools.partial(evaluate_settings, evaluate=validation),
        evaluation_seconds=validation.seconds,
        draw=validation.draw_worst,
        identity=identity_of(learner, built.data) if processes.is_main_process else {},
        about=summary(recipe, built),
    )


def _check_started(count: int | None, processes: distributed.DistributedContext) -> None:
    if count not in (None, processes.world_size):
        raise HVTError(
            f"processes={count}, but {processes.world_size} were started: start them with "
            f"hvt train --processes {count} or with torchrun"
        )
