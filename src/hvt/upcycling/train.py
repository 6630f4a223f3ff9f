"""The distillation as a run of `hvt train`'s, with the source's outputs in place of labels."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ..data.loader import TrainBatches
from ..model import HVT
from ..training.interrupt import Interrupted
from ..training.learner import Learner
from ..training.optimize import seed_all
from ..training.recipe import Recipe
from ..training.state import newest_state
from ..training.trainer import Trainer
from .photos import Crops, Size
from .settings import Settings

if TYPE_CHECKING:
    from .run import Upcycling


SHARED = (
    "epochs", "minutes", "batch_size", "layer_decay", "weight_decay", "ema", "device", "amp",
    "workers", "threads", "seed", "skip_broken", "checkpoint_minutes",
)  # fmt: skip
"""Settings that are fields of a recipe as they are."""


def resume_command(folder: Path) -> str:
    """How to resume an upcycling."""
    return shlex.join(["hvt", "upcycle", "--resume", str(folder)])


def started_by() -> str:
    """The command that started this, paths without their folders."""
    program, *words = (Path(word).name if "/" in word else word for word in sys.argv)
    return shlex.join(["hvt" if program == "__main__.py" else program, *words])


def distil(
    run: Upcycling,
    model: HVT,
    learner: Callable[..., Learner],
    sizes: Sequence[Size],
    evaluate: Callable[[HVT], dict[str, float]],
    measure: str,
) -> Path | None:
    """Train a model unless that is done → its best weights; None where there are none.

    `learner` takes recipe, model, batches, processes and device; `sizes` are those of the crops.
    The best have the least of the `measure` among what `evaluate` gives.
    """
    folder, settings, processes = run.folder / "distilled", run.settings, run.processes
    best = folder / "best.safetensors"
    if not settings.epochs:
        return None
    if processes.broadcast((folder / "model.safetensors").exists()):
        return best
    batches = TrainBatches(
        run.photos.train,
        Crops(sizes, settings.scale, run.source.pretrained_cfg["interpolation"]),
        batch_size=settings.batch_size,
        seed=settings.seed + 1,  # published weights were trained on these crops
        shard_of=(processes.rank, 1, processes.world_size),
        workers=run.workers,
        skip_broken=settings.skip_broken,
        pin_memory=run.device.type == "cuda",
    )
    seed_all(settings.seed, -1, run.device)
    trainer = Trainer(
        learner(_recipe(settings), model, batches, processes, run.device),
        folder,
        run.console,
        evaluate=evaluate,
        measure=measure,
        direction="min",
        identity=run.identity,
        about=f"distilling on {len(run.photos.train)} photos",
        resume_with=resume_command(run.folder),
    )
    if trainer.run(newest_state(folder / "checkpoints", processes, run.console)).stop_asked:
        raise Interrupted(f"stopped; resume with: {resume_command(run.folder)}")
    processes.barrier()  # for the main process, which writes
    return best


def _recipe(settings: Settings) -> Recipe:
    """The settings as a recipe; the rate is that of its batch, not of 512."""
    lr = settings.lr
    return Recipe(
        lr=lr * 512 / settings.batch_size,
        warmup_lr=lr / 100,
        min_lr=lr / 100,
        warmup_epochs=min(1.0, settings.epochs / 10),
        smoothing=0.0, mixup=0.0, cutmix=0.0, rand_augment="", color_jitter=0.0, erase=0.0,
        repeats=1,
        clip_grad=1.0,
        **{name: getattr(settings, name) for name in SHARED},
    )  # fmt: skip
