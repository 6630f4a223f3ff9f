"""A run: epochs, evaluations, checkpoints and figures in a folder, exact in going on."""

from __future__ import annotations

import contextlib
import json
import math
import shlex
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from rich.console import Console

from .. import distributed
from ..checkpoint.description import PREPROCESSING
from ..checkpoint.save_load import save
from ..costs import arrow
from ..data.fingerprint import identity
from ..data.sources import Data
from ..errors import HVTError
from ..evaluation import evaluate
from ..files import atomic_write
from ..model import HVT
from ..terminal import print_line
from ..zoo import MODELS
from .interrupt import Interrupted, StopSignals
from .learner import Learner
from .optimize import seed_all
from .pipeline import build_model, fit_batch, open_batches
from .recipe import Recipe, from_dict
from .run_lock import REPLACED, RunLock, discard_empty, holds_run, newest_folder, unused_folder
from .state import (
    Progress,
    StateMismatchError,
    check_progress,
    newest_state,
    read_state,
    remove_leftovers,
    set_aside,
    states,
    step_of,
    weights_digest,
    write_state,
)
from .watch import Row, Watcher, clock, draw_curves, figure, write_metrics

Evaluate = Callable[[HVT], dict[str, float]]
Direction = Literal["max", "min"]

# Where and how a run is computed, and for how long: a resumed run may have other values of these.
RESUMABLE_FIELDS = (
    "init", "data", "root", "download", "skip_broken", "output", "epochs", "accumulate", "device",
    "compile", "grad_checkpointing", "workers", "threads", "processes", "eval_every",
    "checkpoint_minutes", "max_bad_steps", "tensorboard",
)  # fmt: skip


@dataclass
class Result:
    """What a finished training gives."""

    folder: Path
    model: HVT
    metrics: dict[str, float]
    """Validation metrics of the better of the last weights and the averaged ones, at the end."""
    best: float | None
    """The best value of the run's measure over all evaluations; None where none was finite."""
    rows: list[Row]
    seconds: float
    images_per_second: float
    stop_asked: bool = False
    """Whether a signal came too late to stop it: what would follow is not to be begun."""

    @property
    def top1(self) -> float:
        """Validation top-1 at the end."""
        return self.metrics["top1"]


def train(recipe: Recipe, name: str = "run", console: Console | None = None) -> Result:
    """Train from the beginning in a new folder; the default one gets a number if it is taken."""
    processes, device = distributed.init_process_group(recipe.device)
    try:
        if recipe.processes not in (None, "auto", processes.world_size):
            raise HVTError(
                f"processes={recipe.processes}, but {processes.world_size} were started: leave it "
                "out here; hvt train and hvt.train start them"
            )
        restarted = any(processes.any(device, distributed.restarted()))
        mine = new_folder(recipe, name, not restarted) if processes.is_main_process else None
        folder = processes.broadcast(mine)
        goes_on = restarted and processes.broadcast(bool(states(folder / "checkpoints")))
        if not goes_on and processes.broadcast(holds_run(folder)):
            raise taken(folder)
        try:
            return open_trainer(recipe, folder, processes, device, console).run(goes_on)
        finally:
            if recipe.output is None and processes.is_main_process:
                discard_empty(folder)
    finally:
        distributed.destroy_process_group()


def resume(
    folder: str | Path,
    console: Console | None = None,
    epochs: float | None = None,
    **overrides: Any,
) -> Result:
    """Go on with a run where its newest good checkpoint left it.

    `epochs` makes it longer, a finished one too. The learning rate is then that of a run of so many
    epochs, so a finished one goes on with a higher rate than it ended with. `overrides` are
    fields of the recipe that change nothing of what is learnt: root, device, threads …
    """
    folder = Path(folder)
    assert set(overrides) <= set(RESUMABLE_FIELDS)
    longer = recipe = read_recipe(folder).replace(**overrides)
    if epochs is not None:
        longer = recipe.replace(epochs=epochs)
        if longer.epochs < recipe.epochs:
            raise HVTError(
                f"epochs={epochs:g} is less than the {recipe.epochs:g} of {folder}: a run can be "
                "made longer, not shorter"
            )
    processes, device = distributed.init_process_group(recipe.device)
    try:
        check_batch(recipe, processes.world_size, folder)
        trainer = open_trainer(longer, folder, processes, device, console)
        return trainer.run(True, planned=recipe.epochs)
    finally:
        distributed.destroy_process_group()


def check_batch(recipe: Recipe, processes: int, folder: str | Path) -> None:
    """Refuse to resume a run with a batch that processes cannot share; a new one's is fitted."""
    unit = 2 * processes * recipe.accumulate
    if recipe.batch_size % unit:
        raise HVTError(
            f"batch_size={recipe.batch_size} of {folder} must be a multiple of {unit} (2 × "
            "processes × accumulate): use --processes 1"
        )


def read_recipe(folder: str | Path, file: str = "recipe.json") -> Recipe:
    """The recipe of a run."""
    if folder == "":
        raise HVTError("the name of the run's folder is empty")
    described = Path(folder) / file
    try:
        values = dict(json.loads(described.read_bytes()))
    except (OSError, TypeError, ValueError) as error:
        raise HVTError(f"{folder} is not the folder of a run: it has no readable {file}") from error
    return from_dict(values, str(described))


def open_trainer(
    recipe: Recipe,
    folder: Path,
    processes: distributed.DistributedContext,
    device: torch.device,
    console: Console | None = None,
) -> Trainer:
    """What trains a classifier by a recipe: its data, model, learner and top-1."""
    if recipe.threads:
        torch.set_num_threads(recipe.threads)
    seed_all(recipe.seed, -1, device)
    model, data, classifier = build_model(recipe)
    console = (console or Console()) if processes.is_main_process else Console(quiet=True)
    fitted = fit_batch(recipe, data, processes.world_size)
    if fitted != recipe:
        print_line(
            console,
            f"batch_size={recipe.batch_size} is more than the {len(data.train)} training images: "
            f"lowered to {fitted.batch_size}, and the learning rate with it",
        )
    batches, val_batches = open_batches(fitted, model, data, processes, device)
    learner = Learner(fitted, model, batches, processes, device)

    def validate(model: HVT) -> dict[str, float]:
        score = evaluate(model, val_batches, model.num_classes, device, processes, learner.amp)
        if score.skipped and model is learner.model:
            print_line(console, f"{score.skipped} unreadable validation images were skipped")
        return {"loss": score.loss, "top1": score.top1, "top5": score.top5}

    return Trainer(
        learner,
        folder,
        console,
        evaluate=validate,
        identity=_identity(learner, data) if processes.is_main_process else {},
        about=_about(fitted, model, data, classifier),
    )


def _about(recipe: Recipe, model: HVT, data: Data, classifier: str) -> str:
    weights = classifier
    if recipe.pretrained or recipe.init == "pretrained":
        weights = "published weights"
    elif recipe.init is None or recipe.init in MODELS:
        weights = "new weights"
    config = model.config
    return (
        f"{recipe.model or recipe.init} ({weights}): {config.image[0]}×{config.image[1]}, tokens "
        f"{arrow(list(config.tokens))}; {data.name}: {len(data.train)} training and "
        f"{len(data.val)} validation images, {len(data.class_names)} classes"
        + (" (held out of the training data)" if data.held_out else "")
    )


def _identity(learner: Learner, data: Data) -> dict[str, str]:
    """What makes a run this one beside its recipe: images, classes, and what other files say."""
    cfg = learner.model.pretrained_cfg
    found = {
        "classes": json.dumps(data.class_names),
        "preprocessing": json.dumps({name: cfg[name] for name in PREPROCESSING}),
    }
    if learner.teacher is not None:
        found["teacher's weights"] = weights_digest(learner.teacher)
    return found | identity(data)


class Trainer:
    """One process's part in a run: epochs of a learner, each followed by an evaluation.

    `evaluate` gives metrics of a model by name; `measure` is the one that the best weights are
    chosen by, and `direction` says whether more or less of it is better. `identity` is what a
    resumed run must have in common with its checkpoints, beside the recipe. `about` is said first.
    """

    def __init__(
        self,
        learner: Learner,
        folder: Path,
        console: Console | None = None,
        *,
        evaluate: Evaluate,
        measure: str = "top1",
        direction: Direction = "max",
        identity: dict[str, str],
        about: str,
        resume_command: str | None = None,
        recipe_file: str = "recipe.json",
        allow_nonfinite: bool = False,
    ) -> None:
        self.learner, self.folder, self.console = learner, folder, console or Console()
        self.recipe, self.batches = learner.recipe, learner.batches
        self.processes, self.device = learner.processes, learner.device
        self.evaluate, self.measure, self.direction = evaluate, measure, direction
        self.identity, self.about, self.recipe_file = identity, about, recipe_file
        self.resume_command = resume_command or how_to_resume(folder)
        self.allow_nonfinite = allow_nonfinite
        self.steps = self.batches.steps
        self.total = self.recipe.total_steps(self.steps)
        self.epochs = math.ceil(self.total / self.steps)
        self.progress = Progress()
        self.signals = StopSignals()

    # ── the run ─────────────────────────────────────────────────────────────────────────────────

    def run(self, resume: bool, planned: float | None = None) -> Result:
        """Train until the last epoch, or until asked to stop; a run may be longer than planned."""
        claim = RunLock(self.folder)
        refusal = self.processes.broadcast(claim.take() if self.processes.is_main_process else None)
        if refusal is not None:
            raise refusal
        try:
            return self._run(resume, planned)
        finally:
            claim.release()

    def _run(self, resume: bool, planned: float | None) -> Result:
        if resume:
            self._restore()
            if planned is not None and planned != self.recipe.epochs:
                self._lengthen(self.recipe.replace(epochs=planned).total_steps(self.steps))
        elif self.processes.is_main_process:
            self._open_folder()
        self.processes.barrier()
        self.watcher = Watcher(
            self.console,
            self.folder,
            self.recipe.tensorboard,
            quiet=not self.processes.is_main_process,
            measure=self.measure,
        )
        try:
            self._announce()
            self.started, self.saved = time.perf_counter(), time.monotonic()
            self.first_epoch, images = self.progress.epoch, 0
            with self.signals:
                for epoch in range(self.first_epoch, self.epochs):
                    began, first = time.perf_counter(), self.progress.step
                    self._epoch(epoch)
                    done = (self.progress.step - first) * self.recipe.batch_size
                    images += done
                    self._close_epoch(epoch, done / (time.perf_counter() - began))
        except BaseException as error:
            # What reads images ends with its iterator, and a traceback would keep that alive.
            traceback.clear_frames(error.__traceback__)
            raise
        finally:
            self.watcher.close()
        seconds = time.perf_counter() - self.started
        result = self._finish(seconds, images / seconds)
        (result.stop_asked,) = self.processes.any(self.device, self.signals.asked)
        return result

    def _epoch(self, epoch: int) -> None:
        progress, recipe = self.progress, self.recipe
        steps = min(self.steps, self.total - epoch * self.steps)
        self.watcher.begin(epoch, self.epochs, progress.step, steps)
        batches = self.batches.epoch(epoch, progress.step)
        began, first = time.perf_counter(), progress.step
        while progress.step < steps:
            step = self.learner.step(batches, epoch * self.steps + progress.step, self._flags)
            progress.step += 1
            progress.broken += step.broken
            if step.taken:
                progress.loss_sum += step.loss
                progress.loss_steps += 1
                progress.consecutive_nonfinite = 0
            else:
                self._count_bad_step()
            done, elapsed = progress.step - first, time.perf_counter() - began
            speed = done * recipe.batch_size / elapsed
            self.watcher.step(progress.step, steps, step.loss, speed)
            stop, due = step.flags
            if stop or due:
                self._save()
            if stop:
                raise self._stopped(f"step {progress.step} of epoch {epoch + 1}")

    def _count_bad_step(self) -> None:
        progress = self.progress
        progress.bad_steps += 1
        progress.consecutive_nonfinite += 1
        if progress.consecutive_nonfinite >= self.recipe.max_bad_steps:
            raise HVTError(
                f"the loss was not finite {progress.consecutive_nonfinite} times in a row (epoch "
                f"{progress.epoch + 1}, step {progress.step}): lower --lr or set --clip-grad; "
                f"the checkpoints in {self.folder} are as they were"
            )

    def _close_epoch(self, epoch: int, speed: float) -> None:
        progress, recipe = self.progress, self.recipe
        row: Row = {
            "epoch": epoch + 1,
            "lr": self.learner.optimizer.param_groups[-1]["lr"],
            "train_loss": _mean(progress.loss_sum, progress.loss_steps),
            "bad_steps": progress.bad_steps,
            "broken": progress.broken,
        }
        if (epoch + 1) % recipe.eval_every == 0 or epoch + 1 == self.epochs:
            self._measure(row)
        progress.rows.append(row)
        progress.epoch, progress.step = epoch + 1, 0
        progress.loss_sum, progress.loss_steps = 0.0, 0
        per_epoch = (time.perf_counter() - self.started) / (epoch + 1 - self.first_epoch)
        to_go = max(0.0, self.total / self.steps - (epoch + 1))
        self.watcher.epoch(row, self.epochs, speed, per_epoch * to_go)
        if self.processes.is_main_process:
            write_metrics(self.folder / "metrics.csv", progress.rows)
        self._save()
        if epoch + 1 < self.epochs and any(self.processes.any(self.device, self.signals.asked)):
            raise self._stopped(f"epoch {epoch + 1}")

    def _measure(self, row: Row) -> None:
        """Evaluate into a row of the table, and keep the weights if they are the best so far."""
        for prefix, model in self.learner.candidates().items():
            metrics = self.evaluate(model)
            row |= {f"{prefix}_{name}": value for name, value in metrics.items()}
            if self._better(metrics, self.progress.best):
                self.progress.best = metrics[self.measure]
                if self.processes.is_main_process:
                    save(model, self.folder / "best.safetensors")

    def _better(self, metrics: dict[str, float], best: float | None) -> bool:
        """Whether a model is better than the best so far; outputs that are not finite never are."""
        if not all(map(math.isfinite, metrics.values())):
            return False
        value = metrics[self.measure]
        return best is None or (value > best if self.direction == "max" else value < best)

    def _stopped(self, where: str) -> Interrupted:
        return Interrupted(f"stopped after {where}; resume with: {self.resume_command}")

    def _finish(self, seconds: float, speed: float) -> Result:
        rows, candidates = self.progress.rows, self.learner.candidates()
        if rows and f"val_{self.measure}" not in rows[-1]:  # a run that was made shorter
            self._measure(rows[-1])
        best, metrics = "", dict[str, float]()
        for prefix in candidates:  # the first of equals: the last weights
            theirs = {k.removeprefix(f"{prefix}_"): v for k, v in rows[-1].items() if
                      k.startswith(f"{prefix}_")}  # fmt: skip
            if self._better(theirs, metrics.get(self.measure)):
                best, metrics = prefix, theirs
        if not best and not self.allow_nonfinite:
            raise HVTError(
                "the trained model's outputs are not finite: lower --lr or set --clip-grad; "
                f"best.safetensors in {self.folder}, if it is there, is of an earlier epoch"
            )
        model = candidates[best or "val"].eval()
        if self.processes.is_main_process:
            save(model, self.folder / "model.safetensors")
            write_metrics(self.folder / "metrics.csv", rows)
            drawn = {self.recipe.model or "model": rows}
            draw_curves(self.folder / "curves.png", drawn, self.measure)
            what = " (averaged weights)" if best == "ema" else ""
            self._say(
                f"{self.folder}: {figure(self.measure, metrics.get(self.measure))}{what}, best "
                f"{figure(self.measure, self.progress.best)}, {clock(seconds)}, {speed:.0f} "
                "images/s; weights in model.safetensors"
            )
        return Result(self.folder, model, metrics, self.progress.best, rows, seconds, speed)

    # ── what is said ────────────────────────────────────────────────────────────────────────────

    def _announce(self) -> None:
        recipe, shares = self.recipe, self.batches.shard_of[2]
        self._say(self.about)
        self._say(
            f"batch {recipe.batch_size} = {self.processes.world_size} process(es) × "
            f"{recipe.accumulate} × {recipe.batch_size // shares}; "
            f"learning rate {recipe.scaled_lr:.2e}; {self.steps} steps an epoch, "
            f"{self._estimate()}, without evaluation"
        )

    def _estimate(self) -> str:
        """How many steps there are to go, and how long they take by two that are tried."""
        left = max(0, self.total - self.progress.epoch * self.steps - self.progress.step)
        each = self.learner.seconds_per_step()
        speed = self.recipe.batch_size / each
        return f"{left} to go; about {clock(each * left)} ({speed:.0f} images/s) on {self.device}"

    def _say(self, text: str) -> None:
        if self.processes.is_main_process:
            print_line(self.console, text)

    # ── the folder ──────────────────────────────────────────────────────────────────────────────

    def _open_folder(self) -> None:
        self._check_files()
        try:
            (self.folder / "checkpoints").mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise HVTError(f"cannot write {self.folder}: {error.strerror}") from error
        remove_leftovers(self.folder)
        self._write_recipe()
        with atomic_write(self.folder / "config.json") as temporary:
            temporary.write_text(json.dumps(self.learner.model.config.to_dict(), indent=2) + "\n")

    def _check_files(self) -> None:
        """Refuse to replace what no run has written."""
        with contextlib.suppress(HVTError):
            read_recipe(self.folder, self.recipe_file)
            return
        for name in (self.recipe_file, *REPLACED):
            if (self.folder / name).exists():
                raise HVTError(
                    f"{self.folder} has a {name} of something else, which a run would replace: "
                    "choose another --output"
                )

    def _check_end(self, planned: int) -> None:
        """Refuse to go on behind an end within an epoch, whose rest was not learnt from."""
        if self.progress.epoch * self.steps > planned:
            raise HVTError(
                f"{self.folder} ended within its last epoch, so it cannot be made longer: start a "
                f"new run with --init {self.folder / 'model.safetensors'}"
            )

    def _lengthen(self, planned: int) -> None:
        self._check_end(planned)
        if self.processes.is_main_process:
            self._write_recipe()

    def _write_recipe(self) -> None:
        described = self.recipe.replace(output=str(self.folder)).to_dict()
        described = {k: v for k, v in described.items() if v is not None}
        with atomic_write(self.folder / self.recipe_file) as temporary:
            temporary.write_text(json.dumps(described, indent=2) + "\n")

    def _flags(self) -> tuple[bool, bool]:
        """Whether to stop, and whether a checkpoint is due by the main process's clock."""
        minutes = (time.monotonic() - self.saved) / 60
        due = self.processes.is_main_process and minutes >= self.recipe.checkpoint_minutes
        return self.signals.asked, due

    def _save(self) -> None:
        self.saved = time.monotonic()
        # In a row of bad steps the weights may be lost already: they must not replace good ones.
        # A run that goes on from before comes to the same end.
        if not self.processes.is_main_process or self.progress.consecutive_nonfinite:
            return
        progress = vars(self.progress)
        step = self.progress.epoch * self.steps + self.progress.step
        state = self.learner.state() | {"progress": progress, "run": self._run_identity()}
        state["total"] = self.total
        write_state(self.folder / "checkpoints", step, state, self.resume_command)

    def _restore(self) -> None:
        path: Path | None = None
        state: dict[str, Any] = {}
        if self.processes.is_main_process:
            remove_leftovers(self.folder)
            path, state, passed = newest_state(self.folder / "checkpoints", self._check)
            for sentence in passed.values():
                self._say(sentence)
            set_aside(passed)
        path = self.processes.broadcast(path)
        if path is None:
            self._say("there is no good checkpoint: starting from the beginning")
            if self.processes.is_main_process:
                self._open_folder()
            return
        state = state or read_state(path)
        self.learner.restore(state)
        self.progress = Progress(**state["progress"])
        planned = state.get("total")  # earlier versions did not write it
        if isinstance(planned, int) and planned < self.total:  # by an edited recipe
            self._check_end(planned)

    def _run_identity(self) -> dict[str, str]:
        """What makes a run this one, as text: the recipe's fields that matter, and `identity`."""
        values = {k: v for k, v in self.recipe.to_dict().items() if k not in RESUMABLE_FIELDS}
        return {name: json.dumps(value) for name, value in values.items()} | self.identity

    def _check(self, path: Path, state: dict[str, Any]) -> None:
        """Raise `StateMismatchError` for a state that is not of this run; nothing is changed."""
        theirs = state.get("run", {})  # earlier versions did not write it
        for name, value in self._run_identity().items():
            if theirs.get(name, value) != value:
                shown = len(value) < 100 and not name.startswith("list of")
                now = f", which is {value} now" if shown else ""
                raise StateMismatchError(f"it was written with another {name}{now}")
        self.learner.check(state)
        check_progress(state.get("progress"), step_of(path), self.steps, self.total)


def _mean(total: float, count: int) -> float:
    """Of losses; of none, no number."""
    return total / count if count else math.nan


def new_folder(recipe: Recipe, name: str, new: bool = True) -> Path:
    """The folder of a run: the one asked for, or the default one with a number if it is taken."""
    if recipe.output is not None:
        return Path(recipe.output)
    model_name = recipe.model or Path(recipe.init or "model").stem
    folder = Path(f"runs/{name}-{model_name}")
    return unused_folder(folder) if new else newest_folder(folder)


def taken(folder: Path) -> HVTError:
    """What a new run is answered where another one is."""
    return HVTError(
        f"{folder} already contains a run: resume it with {how_to_resume(folder)}, "
        "or choose another --output"
    )


def how_to_resume(folder: Path) -> str:
    """How to go on with a run."""
    return shlex.join(["hvt", "train", "--resume", str(folder)])
