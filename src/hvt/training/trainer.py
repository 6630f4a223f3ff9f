"""The training loop: epochs of steps, evaluations, checkpoints and figures in a run's folder."""

from __future__ import annotations

import contextlib
import json
import math
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from rich.console import Console

from ..checkpoint.save_load import save
from ..distributed import ConnectionLostError, connection_lost
from ..errors import HVTError
from ..files import atomic_write
from ..model import HVT
from ..terminal import print_line
from .interrupt import Interrupted, StopSignals, ignore_sigterm
from .learner import Learner
from .run_lock import resume_command
from .state import Progress, StateMismatchError, remove_stale_files, write_state
from .watch import Row, Watcher, clock, draw_curves, figure, write_metrics

# Where and how a run is computed, and for how long: a resumed run may have other values of these.
RESUMABLE_FIELDS = (
    "init", "data", "root", "download", "skip_broken", "output", "epochs", "accumulate", "device",
    "compile", "grad_checkpointing", "workers", "threads", "processes", "eval_every",
    "checkpoint_minutes", "max_bad_steps", "tensorboard",
)  # fmt: skip
TIMED_STEPS = 20
"""Steps after which the time that is left is estimated; shorter epochs tell it themselves."""


@dataclass
class Result:
    """The result of a training."""

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


class Trainer:
    """One process's part in a run: epochs of a learner, each followed by an evaluation.

    `evaluate` gives metrics of a model by name; `measure` is the one that the best weights are
    chosen by, and `direction` says whether more or less of it is better. `evaluation_seconds` says
    how long an evaluation will take. `identity` is what a resumed run must have in common with its
    state, beside the recipe; names that end in `images` are of the data. `about` is printed first,
    and `draw` adds figures of the trained model to the folder.
    """

    def __init__(
        self,
        learner: Learner,
        folder: Path,
        console: Console | None = None,
        *,
        evaluate: Callable[[HVT], dict[str, float]],
        evaluation_seconds: Callable[[HVT], float] = lambda model: 0.0,
        measure: str = "top1",
        direction: Literal["max", "min"] = "max",
        identity: dict[str, str],
        about: str,
        resume_with: str | None = None,
        draw: Callable[[HVT, Path], None] = lambda model, folder: None,
    ) -> None:
        self.learner, self.folder = learner, folder
        self.recipe, self.batches = learner.recipe, learner.batches
        self.processes, self.device = learner.processes, learner.device
        self.console = self.processes.console(console)
        self.evaluate, self.evaluation_seconds = evaluate, evaluation_seconds
        self.measure, self.direction, self.identity = measure, direction, identity
        self.about, self.draw = about, draw
        self.resume_with = resume_with or resume_command(folder)
        self.steps = self.batches.steps
        self.total = self.recipe.total_steps(self.steps)
        self.epochs = math.ceil(self.total / self.steps)
        self.progress, self.signals = Progress(), StopSignals()

    def run(self, state: dict[str, Any] | None = None, allow_changed_data: bool = False) -> Result:
        """Train from the beginning or from a state, to the last epoch or until asked to stop."""
        if state is not None:
            self._restore(state, allow_changed_data)
        if self.processes.is_main_process:
            self._open_folder()
        self.processes.barrier()
        board = self.recipe.tensorboard and self.processes.is_main_process
        self.watcher = Watcher(
            self.console, self.folder / "tensorboard" if board else None, self.measure
        )
        try:
            self._announce()
            self.learner.warm_up()
            self.started, self.saved = time.perf_counter(), time.monotonic()
            self.ticked, self.evaluating = self.started, 0.0
            if self.recipe.minutes is not None and self.processes.is_main_process:
                models = self.learner.candidates()
                self.evaluating = len(models) * self.evaluation_seconds(models["val"])
            self.first_epoch, images = self.progress.epoch, 0
            with self.signals:
                while self.progress.epoch < self.epochs and not self._over():
                    epoch = self.progress.epoch
                    began, first = time.perf_counter(), self.progress.step
                    self._epoch(epoch)
                    done = (self.progress.step - first) * self.recipe.batch_size
                    images += done
                    self._close_epoch(epoch, done / (time.perf_counter() - began))
        except BaseException as error:
            # What reads images ends with its iterator, and a traceback would keep that alive.
            traceback.clear_frames(error.__traceback__)
            if connection_lost(error):
                ignore_sigterm()
                raise ConnectionLostError(
                    f"another process of the training has ended; resume with: {self.resume_with}"
                ) from error
            raise
        finally:
            self.watcher.close()
        seconds = time.perf_counter() - self.started
        result = self._finish(seconds, images / seconds)
        result.stop_asked = self.processes.any(self.device, self.signals.asked)
        return result

    def _epoch(self, epoch: int) -> None:
        progress = self.progress
        steps = min(self.steps, self.total - epoch * self.steps)
        self.watcher.begin(epoch, self.epochs, progress.step, steps)
        batches = self.batches.epoch(epoch, progress.step)
        began, first = time.perf_counter(), progress.step
        while progress.step < steps and not self._over():
            update = epoch * self.steps + progress.step
            position = max(update, int(self.total * progress.time_used))
            step = self.learner.step(batches, update, self._flags, position)
            progress.step += 1
            progress.broken += step.broken
            if step.taken:
                progress.loss_sum += step.loss
                progress.loss_steps += 1
                progress.consecutive_nonfinite = 0
            else:
                self._count_bad_step()
            done, elapsed = progress.step - first, time.perf_counter() - began
            self.watcher.step(
                progress.step, steps, step.loss, done * self.recipe.batch_size / elapsed
            )
            if done == 1:
                started = elapsed  # with the start of the reading processes
            if done == TIMED_STEPS and epoch == self.first_epoch:
                each = (elapsed - started) / (done - 1)
                self._estimate(each, started - each)
            stop, due, progress.time_used = step.flags
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
                f"the checkpoints in {self.folder} are unchanged"
            )

    def _close_epoch(self, epoch: int, speed: float) -> None:
        progress, recipe = self.progress, self.recipe
        loss = progress.loss_sum / progress.loss_steps if progress.loss_steps else math.nan
        row: Row = {
            "epoch": epoch + 1,
            "lr": self.learner.optimizer.param_groups[-1]["lr"],
            "train_loss": loss,
            "bad_steps": progress.bad_steps,
            "broken": progress.broken,
        }
        if (epoch + 1) % recipe.eval_every == 0 or epoch + 1 == self.epochs or self._over():
            if time.monotonic() - self.saved > 60:  # or SIGTERM in a long evaluation loses much
                self._save()
            self._measure(row)
            used = self.processes.broadcast(self._flags()[2])
            progress.time_used = max(progress.time_used, used)
        progress.rows.append(row)
        progress.epoch, progress.step = epoch + 1, 0
        progress.loss_sum, progress.loss_steps = 0.0, 0
        per_epoch = (time.perf_counter() - self.started) / (epoch + 1 - self.first_epoch)
        to_go = max(0.0, self.total / self.steps - (epoch + 1))
        self.watcher.epoch(row, self.epochs, speed, self._seconds_left(per_epoch * to_go))
        if self.processes.is_main_process:
            with self._writing():
                write_metrics(self.folder / "metrics.csv", progress.rows)
        self._save()
        if epoch + 1 < self.epochs and self.processes.any(self.device, self.signals.asked):
            raise self._stopped(f"epoch {epoch + 1}")

    def _measure(self, row: Row) -> None:
        """Evaluate into a row of the table, and keep the weights if they are the best so far."""
        began = time.perf_counter()
        self.progress.stale += 1
        for prefix, model in self.learner.candidates().items():
            metrics = self.evaluate(model)
            row |= {f"{prefix}_{name}": value for name, value in metrics.items()}
            if self._better(metrics, self.progress.best):
                self.progress.best, self.progress.stale = metrics[self.measure], 0
                if self.processes.is_main_process:
                    with self._writing():
                        save(model, self.folder / "best.safetensors")
        self.evaluating = time.perf_counter() - began

    def _over(self) -> bool:
        """Whether the run ends before its last epoch, by its minutes or its patience."""
        patience = self.recipe.patience
        tired = patience is not None and self.progress.stale >= patience
        return self.progress.time_used >= 1 or tired

    def _better(self, metrics: dict[str, float], best: float | None) -> bool:
        """Whether a model is better than the best so far; outputs that are not finite never are."""
        if not all(map(math.isfinite, metrics.values())):
            return False
        value = metrics[self.measure]
        return best is None or (value > best if self.direction == "max" else value < best)

    def _stopped(self, where: str) -> Interrupted:
        return Interrupted(f"stopped after {where}; resume with: {self.resume_with}")

    def _finish(self, seconds: float, speed: float) -> Result:
        rows, candidates = self.progress.rows, self.learner.candidates()
        best, metrics = "", dict[str, float]()
        for prefix in candidates:  # the first of equals: the last weights
            figures = {k.partition("_")[2]: v for k, v in rows[-1].items() if k.startswith(prefix)}
            if self._better(figures, metrics.get(self.measure)):
                best, metrics = prefix, figures
        if not best:
            raise HVTError(
                "the trained model's outputs are not finite: lower --lr or set --clip-grad; "
                f"best.safetensors in {self.folder}, if present, is from an earlier epoch"
            )
        model = candidates[best].eval()
        if self.processes.is_main_process:
            with self._writing():
                save(model, self.folder / "model.safetensors")
                write_metrics(self.folder / "metrics.csv", rows)
                curves = {self.recipe.model or "model": rows}
                draw_curves(self.folder / "curves.png", curves, self.measure)
                self.draw(model, self.folder)
            which = " (averaged weights)" if best == "ema" else ""
            self._say(
                f"{self.folder}: {figure(self.measure, metrics.get(self.measure))}{which}, best "
                f"{figure(self.measure, self.progress.best)}, {clock(seconds)}, {speed:.0f} "
                "images/s; weights in model.safetensors"
            )
        return Result(self.folder, model, metrics, self.progress.best, rows, seconds, speed)

    # ── what is printed ─────────────────────────────────────────────────────────────────────────

    def _announce(self) -> None:
        recipe, shards = self.recipe, self.batches.shard_of[2]
        left = max(0, self.total - self.progress.epoch * self.steps - self.progress.step)
        self._say(self.about)
        self._say(
            f"batch {recipe.batch_size} = {self.processes.world_size} process(es) × "
            f"{recipe.accumulate} × {recipe.batch_size // shards}; "
            f"learning rate {recipe.scaled_lr:.2e}; {self.steps} steps per epoch, {left} left"
            + (f" in at most {clock(60 * recipe.minutes)}" if recipe.minutes else "")
            + f" on {self.device}"
        )
        if left and self.batches.workers:
            self._say(f"starting {self.batches.workers} reading process(es)")

    def _estimate(self, step: float, started: float) -> None:
        """How long the rest takes, by the steps so far and the first batch of an evaluation."""
        if not self.processes.is_main_process:
            return
        progress, models = self.progress, self.learner.candidates()
        evaluation = self.evaluating or len(models) * self.evaluation_seconds(models["val"])
        steps = self.total - progress.epoch * self.steps - progress.step
        epochs = self.epochs - progress.epoch
        evaluations = math.ceil(epochs / self.recipe.eval_every)
        seconds = steps * step + (epochs - 1) * started + evaluations * evaluation
        left, speed = clock(self._seconds_left(seconds)), self.recipe.batch_size / step
        self._say(f"about {left} left: {speed:.0f} images/s, evaluation {clock(evaluation)}")

    def _seconds_left(self, seconds: float) -> float:
        """The rest of a run that needs so many more seconds, unless its minutes end it before."""
        if self.recipe.minutes is not None:
            used = self.progress.seconds + time.perf_counter() - self.ticked
            seconds = min(seconds, max(0.0, 60 * self.recipe.minutes - used))
        return 0.0 if self._over() else seconds

    def _say(self, text: str) -> None:
        print_line(self.console, text)

    # ── the folder ──────────────────────────────────────────────────────────────────────────────

    def _open_folder(self) -> None:
        try:
            (self.folder / "checkpoints").mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise HVTError(f"cannot write {self.folder}: {error.strerror}") from error
        remove_stale_files(self.folder)
        described = self.recipe.replace(output=str(self.folder)).to_dict()
        described = {k: v for k, v in described.items() if v is not None}
        config = self.learner.model.config.to_dict()
        for name, values in {"recipe.json": described, "config.json": config}.items():
            with self._writing(), atomic_write(self.folder / name) as temporary:
                temporary.write_text(json.dumps(values, indent=2) + "\n")

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        """A file that cannot be written ends a run that can be resumed."""
        try:
            yield
        except HVTError as error:
            raise HVTError(f"{error}; make room, then resume with: {self.resume_with}") from error

    def _flags(self) -> tuple[float, ...]:
        """Whether to stop, whether a checkpoint is due, and the share of the time that is used.

        The latter two go by the main process's clock. The last evaluation is to end in time, too.
        """
        if not self.processes.is_main_process:
            return self.signals.asked, 0, 0
        due = (time.monotonic() - self.saved) / 60 >= self.recipe.checkpoint_minutes
        if self.recipe.minutes is None:
            return self.signals.asked, due, 0
        now = time.perf_counter()
        self.progress.seconds, self.ticked = self.progress.seconds + now - self.ticked, now
        allowed = max(1e-9, 60 * self.recipe.minutes - self.evaluating)
        return self.signals.asked, due, self.progress.seconds / allowed

    def _save(self) -> None:
        self.saved = time.monotonic()
        # In a row of bad steps the weights may be lost already: they must not replace good ones.
        # A run that resumes from before comes to the same end.
        if not self.processes.is_main_process or self.progress.consecutive_nonfinite:
            return
        step = self.progress.epoch * self.steps + self.progress.step
        state = self.learner.state() | {
            "progress": vars(self.progress),
            "run": self._run_identity(),
            "total": self.total,
        }
        with self._writing():
            write_state(self.folder / "checkpoints", step, state)

    def _restore(self, state: dict[str, Any], allow_changed_data: bool) -> None:
        """Continue from a state; raises `StateMismatchError` if it is not of this run."""
        for name, value in self._run_identity().items() if self.processes.is_main_process else ():
            if (before := state["run"].get(name)) != value:
                self._check_change(name, before, value, allow_changed_data)
        self.progress = Progress(**state["progress"])
        done = self.progress.epoch * self.steps + self.progress.step
        if state["total"] != self.total and done > min(state["total"], self.total):
            raise StateMismatchError(
                f"{self.folder} has run {done} steps and cannot be resumed to {self.total}: a run "
                "can be extended, unless it ended within an epoch, but not shortened; start a new "
                f"one with --init {self.folder / 'model.safetensors'}"
            )
        try:
            self.learner.restore(state)
        except (KeyError, RuntimeError, ValueError) as error:
            raise StateMismatchError(
                f"the checkpoint of {self.folder} does not fit its model: {error}"
            ) from error

    def _check_change(self, name: str, before: str, now: str, allow_changed_data: bool) -> None:
        changed = f"{name} changed since the run started"
        if name not in self.identity or now.isdecimal():  # the rest are digests and long lists
            changed = f"{name} changed from {before} to {now} since the run started"
        how = "restore recipe.json and the data"
        if name.endswith("images"):
            if allow_changed_data:
                return self._say(changed)
            how = "restore the images, or resume anyway with --allow-changed-data"
        raise StateMismatchError(f"{self.folder} cannot be resumed: {changed}; {how}")

    def _run_identity(self) -> dict[str, str]:
        """What makes a run this one, as text: the recipe's fields that matter, and `identity`."""
        values = {k: v for k, v in self.recipe.to_dict().items() if k not in RESUMABLE_FIELDS}
        return {name: json.dumps(value) for name, value in values.items()} | self.identity
