"""A run: epochs, evaluations, checkpoints and figures in a folder, exact in going on."""

from __future__ import annotations

import contextlib
import functools
import json
import math
import shlex
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from .. import distributed
from ..checkpoint.description import PREPROCESSING
from ..checkpoint.save_load import save
from ..costs import arrow
from ..data.fingerprint import identity
from ..data.sources import Data, Images
from ..errors import HVTError
from ..evaluation import Score, evaluate
from ..files import atomic_write, open_regular
from ..model import HVT
from ..terminal import print_line
from ..zoo import MODELS
from .interrupt import Interrupted, StopSignals
from .learner import Learner
from .optimize import seed_all
from .pipeline import build_model, open_batches
from .recipe import Recipe, from_dict
from .run_lock import REPLACED, RunLock, discard_empty, holds_run, newest_folder, unused_folder
from .state import (
    COLUMNS,
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
from .watch import Row, Watcher, clock, draw_curves, write_metrics

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
    top1: float
    """Validation top-1 of the better of the last weights and the averaged ones, at the end."""
    best_top1: float
    rows: list[Row]
    seconds: float
    images_per_second: float
    stop_asked: bool = False
    """Whether a signal came too late to stop it: what would follow is not to be begun."""


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
            return Trainer(recipe, folder, processes, device, console).run(goes_on)
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
        return Trainer(longer, folder, processes, device, console).run(True, planned=recipe.epochs)
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
        with open_regular(described) as stream:
            values = dict(json.load(stream))
    except (OSError, TypeError, ValueError) as error:
        raise HVTError(f"{folder} is not the folder of a run: it has no readable {file}") from error
    return from_dict(values, str(described))


class Trainer:
    """One process's part in a run; what learns, from what and by which measure can be replaced."""

    file = "recipe.json"
    """Where the run's folder has its recipe."""
    measure = "top-1"
    """What `_evaluate` gives as top-1, in words."""
    data: Data

    def __init__(
        self,
        recipe: Recipe,
        folder: Path,
        processes: distributed.DistributedContext,
        device: torch.device,
        console: Console | None = None,
    ) -> None:
        self.recipe, self.folder, self.processes, self.device = recipe, folder, processes, device
        self.console = console or Console()
        if recipe.threads:
            torch.set_num_threads(recipe.threads)
        seed_all(recipe.seed, -1, device)
        self.learner = self._learner()
        self.batches = self.learner.batches
        self.steps = self.batches.steps
        self.total = recipe.total_steps(self.steps)
        self.epochs = math.ceil(self.total / self.steps)
        self.progress = Progress()
        self.signals = StopSignals()

    def _fit_batch(self, recipe: Recipe) -> Recipe:
        """The recipe with a batch that the data can fill, which a line tells."""
        unit = 2 * self.processes.world_size * recipe.accumulate
        if not isinstance(self.data.train, Images):
            return recipe
        most = len(self.data.train) // unit * unit
        if not most or recipe.batch_size <= most:
            return recipe
        self._say(
            f"batch_size={recipe.batch_size} is more than the {len(self.data.train)} training "
            f"images: lowered to {most}, and the learning rate with it"
        )
        return recipe.replace(batch_size=most)

    # ── what a run of another kind replaces ──────────────────────────────────────────────────────

    def _learner(self) -> Learner:
        """What learns, with its batches; sets `data`."""
        model, self.data, self.classifier = build_model(self.recipe)
        self.recipe = self._fit_batch(self.recipe)
        batches, self.val_batches = open_batches(
            self.recipe, model, self.data, self.processes, self.device
        )
        return Learner(self.recipe, model, batches, self.processes, self.device)

    def _evaluate(self, model: HVT) -> Score:
        return evaluate(
            model,
            self.val_batches,
            model.num_classes,
            self.device,
            self.processes,
            self.learner.amp,
        )

    def _merit(self, row: Row, prefix: str) -> float:
        """What the best weights have most of; answers that are no numbers have none."""
        return float(row[f"{prefix}_top1"]) if math.isfinite(row[f"{prefix}_loss"]) else -1.0

    def _check_result(self, loss: float) -> None:
        """Refuse a model that has no answers as a result."""
        if not math.isfinite(loss):
            raise HVTError(
                "the trained model's answers are not finite: lower --lr or set --clip-grad; "
                f"best.safetensors in {self.folder}, if it is there, is of an earlier epoch"
            )

    def _best_words(self) -> str:
        return f"best {self.progress.best_top1:.2f} %"

    def _resume_command(self) -> str:
        return resume_command(self.folder)

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
        row: Row = dict.fromkeys(COLUMNS, "") | {
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
        progress = self.progress
        for prefix, model in self.learner.candidates().items():
            score = self._evaluate(model)
            row[f"{prefix}_loss"], row[f"{prefix}_top1"] = score.loss, score.top1
            row[f"{prefix}_top5"] = score.top5
            if score.skipped and prefix == "val":
                self._say(f"{score.skipped} unreadable validation images were passed over")
            merit = self._merit(row, prefix)
            if merit > progress.best_top1:
                progress.best_top1 = merit
                if self.processes.is_main_process:
                    save(model, self.folder / "best.safetensors")

    def _stopped(self, where: str) -> Interrupted:
        return Interrupted(f"stopped after {where}; resume with: {self._resume_command()}")

    def _finish(self, seconds: float, speed: float) -> Result:
        rows, candidates = self.progress.rows, self.learner.candidates()
        if rows and rows[-1]["val_top1"] == "":  # a run that was made shorter, to where none is due
            self._measure(rows[-1])
        # the first of equals: the last weights
        best = max(candidates, key=lambda prefix: self._merit(rows[-1], prefix))
        self._check_result(rows[-1][f"{best}_loss"])
        model, top1 = candidates[best].eval(), rows[-1][f"{best}_top1"]
        if self.processes.is_main_process:
            save(model, self.folder / "model.safetensors")
            write_metrics(self.folder / "metrics.csv", rows)
            drawn = {self.recipe.model or "model": rows}
            draw_curves(self.folder / "curves.png", drawn, self.measure)
            what = " (averaged weights)" if best == "ema" else ""
            self._say(
                f"{self.folder}: {self.measure} {top1:.2f} %{what}, {self._best_words()}, "
                f"{clock(seconds)}, {speed:.0f} images/s; weights in model.safetensors"
            )
        return Result(self.folder, model, top1, self.progress.best_top1, rows, seconds, speed)

    # ── what is said ────────────────────────────────────────────────────────────────────────────

    def _announce(self) -> None:
        recipe, shares = self.recipe, self.batches.share_of[2]
        config = self.learner.model.config
        self._say(
            f"{recipe.model or recipe.init}{self._weights()}: "
            f"{config.image[0]}×{config.image[1]}, tokens {arrow(list(config.tokens))}; "
            f"{self.data.name}: {len(self.data.train)} training and {len(self.data.val)} "
            f"validation images, {len(self.data.class_names)} classes"
            + (" (held out of the training data)" if self.data.held_out else "")
        )
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

    def _weights(self) -> str:
        """Where the weights are from, or what became of the checkpoint's classifier."""
        recipe = self.recipe
        if recipe.pretrained or recipe.init == "pretrained":
            return " (published weights)"
        if recipe.init is None or recipe.init in MODELS:
            return " (new weights)"
        return f" ({self.classifier})"

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
            read_recipe(self.folder, self.file)
            return
        for name in (self.file, *REPLACED):
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
        with atomic_write(self.folder / self.file) as temporary:
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
        state = self.learner.state() | {"progress": progress, "run": self._identity()}
        state["total"] = self.total
        write_state(self.folder / "checkpoints", step, state, self._resume_command())

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

    def _identity(self) -> dict[str, str]:
        """What makes a run this one, as text: the recipe's fields that matter, and the data."""
        values = {k: v for k, v in self.recipe.to_dict().items() if k not in RESUMABLE_FIELDS}
        values["classes"] = self.data.class_names
        return (
            {name: json.dumps(value) for name, value in values.items()} | self._images | self._files
        )

    @functools.cached_property
    def _images(self) -> dict[str, str]:
        """The images, by which a run knows its data again wherever that lies."""
        return identity(self.data)

    @functools.cached_property
    def _files(self) -> dict[str, str]:
        """What is read from other files anew, which may have changed."""
        learner = self.learner
        cfg = learner.model.pretrained_cfg
        found = {"preprocessing": json.dumps({name: cfg[name] for name in PREPROCESSING})}
        if learner.teacher is not None:
            found["teacher's weights"] = weights_digest(learner.teacher)
        return found

    def _check(self, path: Path, state: dict[str, Any]) -> None:
        """Raise `StateMismatchError` for a state that is not of this run; nothing is changed."""
        theirs = state.get("run", {})  # earlier versions did not write it
        for name, value in self._identity().items():
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
        f"{folder} already contains a run: resume it with {resume_command(folder)}, "
        "or choose another --output"
    )


def resume_command(folder: Path) -> str:
    """How to go on with a run."""
    return shlex.join(["hvt", "train", "--resume", str(folder)])
