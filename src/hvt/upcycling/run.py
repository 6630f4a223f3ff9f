"""From a trained ViT to a cheap one: place the pooling, distil the tail, distil all, report.

The run's folder has `upcycle.json` (what was asked), `source.safetensors`, `placement.json`, a
folder for each phase as `hvt train` leaves it, and `report.json`. Whatever is there already is not
done again, which is all there is to resuming.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import random
import shlex
import shutil
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

from .. import distributed
from ..checkpoint.save_load import load, save
from ..config import HVTConfig
from ..costs import arrow, cost
from ..data.loader import TrainBatches
from ..data.sample import evenly
from ..errors import HVTError, did_you_mean
from ..evaluation import Score
from ..files import atomic_write, check_folder, check_new, expanded
from ..model import HVT
from ..terminal import print_line
from ..training.interrupt import Interrupted
from ..training.pipeline import reading_processes
from ..training.recipe import from_dict as recipe_from_dict
from ..training.state import states, weights_digest
from ..training.watch import clock
from . import report
from .cache import CHUNK, Cache
from .distil import HoldoutAgreement, merit
from .phase import Phase, Work, phase_recipe, resume_command
from .photos import Photos, open_photos, read_views
from .placement import Judge, Ranked, candidates, describe, rank
from .settings import Settings, from_dict
from .source import open_source
from .student import Target, pooled, resized

TAIL_SHARE, CACHE_SHARE = 0.3, 0.6
"""Under `minutes`: the part of the tail with its cache, and in that the part of the cache."""
FEWEST = 4
"""Chunks of a cache below which the tail would only learn them by heart."""
SHOWN = 12  # rows of the printed table of placements
LEFT_OUT = "left-out.json"
"""In a phase's folder where the minutes were too few for it, so that a resumed run knows."""


@dataclass
class Upcycled:
    """What an upcycling gives."""

    model: HVT
    """The best by KL on held-out photos, in evaluation mode."""
    path: Path
    folder: Path
    ranked: list[dict[str, Any]]
    """The placements, best first; empty where it was fixed by hand."""
    rows: list[report.Row]


def upcycle(
    source: str | Path | nn.Module,
    output: str | Path,
    data: str | Path,
    *,
    run_folder: str | Path | None = None,
    console: Console | None = None,
    **settings: Any,
) -> Upcycled:
    """Make a trained plain ViT cheap and write it to `output`.

    `source` is what `open_source` takes, `data` any folder of images, `run_folder` the folder
    to work in. `settings` are the fields of `Settings`, such as `gflops=0.7, minutes=30`.
    """
    names = [field.name for field in dataclasses.fields(Settings)]
    for name in settings:
        if name not in names:
            raise HVTError(f"unknown setting {name!r}: {did_you_mean(name, names)}")
    chosen = from_dict(settings)
    if chosen.cache is not None:  # the same one if the run is resumed elsewhere
        place = str(expanded(chosen.cache).absolute())
        chosen = dataclasses.replace(chosen, cache=place)
    name = type(source).__name__ if isinstance(source, nn.Module) else Path(source).stem
    folder = Path(run_folder or f"runs/upcycle-{name}")
    processes, device = distributed.init_process_group(chosen.device)
    try:
        restarted = any(processes.any(device, distributed.restarted()))
        work = Upcycling(chosen, Path(output), str(data), folder, processes, device, console)
        work.begin(source, restarted)
        return work.run()
    finally:
        distributed.destroy_process_group()


def resume(folder: str | Path, console: Console | None = None) -> Upcycled:
    """Go on with an upcycling where it stopped."""
    folder = Path(folder)
    try:
        values = json.loads((folder / "upcycle.json").read_text())
        settings = from_dict(values["settings"])
        output, data = Path(values["output"]), str(values["data"])
        digest = values["photos"]
    except (KeyError, OSError, TypeError, ValueError) as error:
        raise HVTError(
            f"{folder} is not the folder of an upcycling: it has no readable upcycle.json"
        ) from error
    processes, device = distributed.init_process_group(settings.device)
    try:
        work = Upcycling(settings, output, data, folder, processes, device, console)
        work.go_on(digest)
        return work.run()
    finally:
        distributed.destroy_process_group()


class Upcycling:
    """One process's part in an upcycling."""

    source: HVT
    photos: Photos

    def __init__(
        self,
        settings: Settings,
        output: Path,
        data: str,
        folder: Path,
        processes: distributed.DistributedContext,
        device: torch.device,
        console: Console | None,
    ) -> None:
        self.settings, self.output, self.data, self.folder = settings, output, data, folder
        self.processes, self.device, self.console = processes, device, console or Console()
        if settings.threads:
            torch.set_num_threads(settings.threads)
        self.workers = reading_processes(settings.workers, processes, device)

    # ── what is asked ───────────────────────────────────────────────────────────────────────────

    def begin(self, source: str | Path | nn.Module, restarted: bool = False) -> None:
        """See that everything fits before anything is written, then open the folder.

        One that torchrun `restarted` finds its own there, and goes on with it.
        """
        if self.processes.broadcast((self.folder / "upcycle.json").exists()) and not restarted:
            raise self._taken()
        if self.output.suffix != ".safetensors":
            better = self.output.with_suffix(".safetensors").name
            raise HVTError(f"{self.output} should end in .safetensors, as {better} does")
        check_new(self.output)
        self._check_settings()
        self.source = open_source(source)
        origin = self.source.pretrained_cfg["origin"]
        origin["command"] = _command()
        if self.settings.license:
            origin["license"] = self.settings.license
        self._open_data()
        self._check_candidates()
        asked = json.loads(json.dumps(self._asked()))
        if restarted and self.processes.broadcast(self._read_asked() not in (None, asked)):
            raise self._taken()
        if self.processes.is_main_process:
            try:
                self.folder.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise HVTError(f"cannot write {self.folder}: {error.strerror}") from error
            save(self.source, self.folder / "source.safetensors")
            self._write("upcycle.json", asked)
        self.processes.barrier()

    def _asked(self) -> dict[str, Any]:
        """What tells this run from another; paths as they are from any folder."""
        return {
            "settings": self.settings.to_dict(),
            "output": str(self.output.absolute()),
            "data": str(expanded(self.data).absolute()),
            "photos": self.photos.digest,
            "weights": weights_digest(self.source),
        }

    def _read_asked(self) -> Any:
        """What the folder's run was asked; None where there is none."""
        try:
            return json.loads((self.folder / "upcycle.json").read_text())
        except FileNotFoundError:
            return None
        except (OSError, ValueError):
            return "unreadable"

    def _taken(self) -> HVTError:
        return HVTError(
            f"{self.folder} already contains a run: resume it with "
            f"{resume_command(self.folder)}, or choose another --run-folder"
        )

    def _check_settings(self) -> None:
        """What would otherwise be found wrong once much is done, in a folder that is then taken."""
        settings, unit = self.settings, 2 * self.processes.world_size
        if settings.batch_size % unit:
            raise HVTError(
                f"batch_size={settings.batch_size} must be a multiple of {unit} (2 × processes)"
            )
        after = settings.pool_after
        if settings.gradual and after is not None and len(after) != 1:
            raise HVTError(
                f"gradual blends one pooling in, and pool_after={after} has {len(after)}: leave "
                "one of the two out, or name one block"
            )

    def _check_candidates(self) -> None:
        settings = self.settings
        pooled_ones, _ = candidates(self.source.config, settings.gflops, settings.fixed)
        if settings.gradual and all(len(one.pool_blocks) != 1 for one in pooled_ones):
            raise HVTError(
                f"gradual blends one pooling in, and within gflops={settings.gflops:g} every "
                "placement has another number of them: leave gradual out, or name another budget"
            )

    def go_on(self, digest: str) -> None:
        check_folder(self.output)
        self.source = load(self.folder / "source.safetensors").float()
        self._open_data()
        if self.photos.digest != digest:
            raise HVTError(
                f"the images in {self.data} are not those that the run in {self.folder} began "
                "with: put them back, or begin another run"
            )
        if not (self.folder / "placement.json").exists():
            self._check_candidates()

    def _open_data(self) -> None:
        settings = self.settings
        self.photos = open_photos(
            self.data,
            settings.batch_size,
            settings.holdout,
            self.source.config.in_chans,
        )
        self.labelled = report.open_labelled(settings, self.source)

    # ── the run ─────────────────────────────────────────────────────────────────────────────────

    def run(self) -> Upcycled:
        """All that is not done yet."""
        source, photos = self.source.to(self.device), self.photos
        config = source.config
        self._say(
            f"{source.pretrained_cfg['origin']['source']}: {config.image[0]}×{config.image[1]}, "
            f"{cost(config).gflops:.3g} GFLOPs; {photos.name}: {len(photos.train)} photos to learn "
            f"from, {len(photos.val)} held out"
        )
        chosen, table = self._place()
        student = pooled(resized(source, chosen.image), chosen)
        self._say(
            f"{describe(chosen)}: {cost(chosen).gflops:.3g} GFLOPs, tokens "
            f"{arrow(list(chosen.tokens))}"
        )
        held = self._hold(student)
        untrained = _own_copy(student)
        scores = {"untrained": held.measure(untrained)}
        models = {"untrained": untrained}
        sizes = tuple(dict.fromkeys((config.image, chosen.image)))
        work = Work(self.settings, self.folder, photos, Target(source, chosen), sizes, held)
        tail_epochs, all_epochs = self.settings.passes()
        self._describe_score("untrained", scores["untrained"])
        for name, epochs, phase in (
            ("tail", tail_epochs, self._tail),
            ("all", all_epochs, self._all),
        ):
            path = self.folder / name
            if not epochs:
                continue
            if self.processes.broadcast((path / LEFT_OUT).exists()):
                self._drop_cache()
                continue
            best = _best(scores)
            if not self.processes.broadcast((path / "model.safetensors").exists()):
                phase(work, _own_copy(models[best]), path, epochs)
                self.processes.barrier()  # for the main process, which writes
            if name == "tail":
                self._drop_cache()
            if not (path / "best.safetensors").exists():
                continue
            models[name] = load(path / "best.safetensors", self.device).float()
            scores[name] = held.measure(models[name])
            self._describe_score(name, scores[name])
        best = _best(scores)
        return self._finish(models, scores, best, held, table)

    def _tail(self, work: Work, model: HVT, path: Path, epochs: float) -> None:
        settings, began = self.settings, time.monotonic()
        cache = self._cache(work, model)
        most = cache.batches.steps * settings.crops
        chunks = most
        if settings.minutes is not None:
            chunks = self._affordable(cache, most)
            if chunks < min(most, FEWEST):
                if not settings.passes()[1]:
                    raise HVTError(
                        f"minutes={settings.minutes:g} are too few for a cache, without which only "
                        "all blocks could learn, and all_epochs is 0: begin in another "
                        "--run-folder with more minutes, or without all_epochs"
                    )
                self._say("the minutes are too few for a cache: all blocks learn from the start")
                if self.processes.is_main_process:
                    path.mkdir(exist_ok=True)
                    self._write(f"{path.name}/{LEFT_OUT}", {"minutes": settings.minutes})
                return
        if self.processes.is_main_process:
            cache.check_room(chunks)
        self._say(
            f"the cache: {chunks * cache.batches.batch_size} crops, "
            f"{cache.needs(chunks) / 1e9:.2f} GB to write to {cache.folder}"
        )
        try:
            cache.build(chunks, self._progress("cached", cache.batches.batch_size))
        except KeyboardInterrupt as error:
            raise Interrupted(
                f"stopped while building the cache; resume with: {resume_command(self.folder)}"
            ) from error
        rows, lr = cache.rows(chunks), settings.tail_lr

        def make(epochs: float) -> Phase:
            recipe = self._recipe(path, epochs, lr)
            return Phase(
                work, model, recipe, path, self.processes, self.device, self.console,
                rows=rows, layout=cache.layout,
            )  # fmt: skip

        if settings.minutes is not None and not (path / "phase.json").exists():
            share = 60 * settings.minutes * self._tail_share()
            left = max(share * (1 - CACHE_SHARE), share - (time.monotonic() - began))
            epochs = self._epochs_for(make(1.0), left)
        self._train(make(epochs))
        model.requires_grad_(True)

    def _tail_share(self) -> float:
        return TAIL_SHARE if self.settings.passes()[1] else 1.0

    def _drop_cache(self) -> None:
        """The run's own: one that was named is kept."""
        if self.settings.cache is None and self.processes.is_main_process:
            shutil.rmtree(self.folder / "cache", ignore_errors=True)

    def _all(self, work: Work, model: HVT, path: Path, epochs: float) -> None:
        settings = self.settings

        def make(epochs: float) -> Phase:
            recipe = self._recipe(
                path, epochs, settings.lr, layer_decay=settings.layer_decay, ema=settings.ema
            )
            return Phase(work, model, recipe, path, self.processes, self.device, self.console)

        if settings.minutes is not None and not (path / "phase.json").exists():
            share = TAIL_SHARE if (self.folder / "tail" / "phase.json").exists() else 0.0
            epochs = self._epochs_for(make(1.0), 60 * settings.minutes * (1 - share))
        self._train(make(epochs))

    def _train(self, phase: Phase) -> None:
        goes_on = self.processes.broadcast(bool(states(phase.folder / "checkpoints")))
        if phase.run(resume=goes_on).stop_asked:
            raise Interrupted(f"stopped; resume with: {resume_command(self.folder)}")

    def _recipe(self, path: Path, epochs: float, lr: float, **values: Any) -> Any:
        """A phase's recipe, which a resumed run has from its folder."""
        written = path / "phase.json"
        if self.processes.broadcast(written.exists()):
            return recipe_from_dict(json.loads(written.read_text()), str(written))
        return phase_recipe(self.settings, epochs, lr, **values)

    def _epochs_for(self, phase: Phase, seconds: float) -> float:
        """As many passes as the seconds allow, by the time of a step, of reading and measuring."""
        began = time.monotonic()
        batches = phase.batches.epoch(0)
        next(batches)
        started = time.monotonic() - began  # reading processes included
        began, count = time.monotonic(), 0
        for _ in batches:
            count += 1
            if count == 3:
                break
        reading = (time.monotonic() - began) / max(1, count)
        del batches
        step = phase.learner.seconds_per_step() + reading
        began = time.monotonic()
        phase._evaluate(phase.learner.model)
        measuring = time.monotonic() - began
        per_epoch = phase.steps * step + measuring + started
        epochs = max(1 / phase.steps, (seconds - measuring) / per_epoch)
        return float(self.processes.broadcast(round(epochs, 4)))

    def _affordable(self, cache: Cache, most: int) -> int:
        """Chunks for the cache's part of the minutes: those that are there, and by the time of one
        more as many as can be made."""
        written = self.folder / "chunks.json"
        if self.processes.broadcast(written.exists()):
            return min(most, int(json.loads(written.read_text())))
        budget = 60 * (self.settings.minutes or 0) * self._tail_share() * CACHE_SHARE
        missing = [n for n, path in enumerate(cache.paths(most)) if not path.exists()]
        first = self.processes.broadcast(missing[0] if missing else most)
        chunks = most
        if first < most:
            if self.processes.is_main_process:
                cache.check_room(first + 1)
            began = time.monotonic()
            cache.build(first + 1)
            each = max(1e-3, time.monotonic() - began)
            chunks = first + int(budget / each) * self.processes.world_size
        chunks = self.processes.broadcast(max(1, min(most, chunks)))
        if self.processes.is_main_process:
            with atomic_write(written) as temporary:
                temporary.write_text(json.dumps(chunks))
        self.processes.barrier()
        return chunks

    def _cache(self, work: Work, model: HVT) -> Cache:
        settings, train = self.settings, work.photos.train
        size = max(2, min(CHUNK, len(train)) // 2 * 2)
        least = -(-settings.batch_size // size)  # chunks that a batch needs
        batches = TrainBatches(
            train,
            work.crops(),
            batch_size=size,
            seed=settings.seed,
            workers=self.workers,
            skip_broken=settings.skip_broken,
        )
        if least > batches.steps * settings.crops:
            raise HVTError(
                f"{settings.crops} crops of each of {len(train)} photos are too few for a batch of "
                f"{settings.batch_size}: use more --crops or a smaller --batch-size"
            )
        preprocessing = ("mean", "std", "interpolation")
        identity = {
            "source": weights_digest(self.source),
            "preprocessing": {name: self.source.pretrained_cfg[name] for name in preprocessing},
            "config": model.config.to_dict(),
            "photos": work.photos.digest,
            "held_out": len(work.photos.val),
            "sizes": work.sizes,
            "scale": settings.scale,
            "seed": settings.seed,
            "chunk": size,
        }
        folder = Path(settings.cache) if settings.cache else self.folder / "cache"
        cache = Cache(
            folder, batches, model, work.target, work.sizes, self.processes, self.device, identity,
            named=settings.cache is not None,
        )  # fmt: skip
        if self.processes.is_main_process:
            cache.open()
        self.processes.barrier()
        return cache

    # ── where to pool ───────────────────────────────────────────────────────────────────────────

    def _place(self) -> tuple[HVTConfig, list[dict[str, Any]]]:
        """The placement, and the table it was chosen from; ranked by the main process."""
        path, settings = self.folder / "placement.json", self.settings
        if not path.exists() and self.processes.is_main_process:
            pooled_ones, rivals = candidates(self.source.config, settings.gflops, settings.fixed)
            table: list[Ranked] = []
            chosen = pooled_ones[0]
            if len(pooled_ones) > 1 or rivals:
                table = self._rank(pooled_ones, rivals)
                free = [row for row in table if row.config.pool_blocks] or table
                if settings.gradual:  # which blends one in
                    free = [row for row in free if len(row.config.pool_blocks) == 1]
                chosen = free[0].config
            placement = {"chosen": chosen.to_dict(), "ranked": [row.to_dict() for row in table]}
            self._write("placement.json", placement)
        self.processes.barrier()
        placement = json.loads(path.read_text())
        return HVTConfig.from_dict(placement["chosen"]), placement["ranked"]

    def _rank(self, pooled_ones: list[HVTConfig], rivals: list[HVTConfig]) -> list[Ranked]:
        settings, photos = self.settings, self.photos
        count = min(settings.rank_photos, len(photos.train))
        # In no order: the first rounds see the first of them.
        spread = random.Random(0).sample(evenly(len(photos.train), count), count)
        judge = Judge(
            self.source, photos.train.subset(spread), self.device, self.workers,
            settings.skip_broken,
        )  # fmt: skip
        table = rank(judge, pooled_ones, rivals, settings.fixed, count, self._say)
        shown = Table("placement, untrained", box=None, header_style="bold")
        for heading in ("GFLOPs", "agreement", "KL", "photos"):
            shown.add_column(heading, justify="right")
        rows = table[:SHOWN] + [row for row in table[SHOWN:] if row.config in rivals]
        for row in rows:
            shown.add_row(
                describe(row.config), f"{row.gflops:.3f}", f"{row.agreement:.1f} %",
                f"{row.kl:.4f}", str(row.photos),
            )  # fmt: skip
        self.console.print(shown)
        if len(table) > len(rows):
            self._say(f"and {len(table) - len(rows)} more in {self.folder / 'placement.json'}")
        if table[0].config in rivals and settings.pool_after != ():
            self._say(
                "untrained, the whole source on smaller images is nearer to itself than any "
                "placement: --pool-after '()' takes it"
            )
        return table

    # ── the end ─────────────────────────────────────────────────────────────────────────────────

    def _hold(self, student: HVT) -> HoldoutAgreement:
        """The held-out photos, of which this process takes its part."""
        if len(self.photos.val) < self.processes.world_size:
            raise HVTError(
                f"{len(self.photos.val)} held-out photos are too few for "
                f"{self.processes.world_size} processes: use more photos or fewer processes"
            )
        part = self.photos.val.subset(
            range(self.processes.rank, len(self.photos.val), self.processes.world_size)
        )
        views = read_views(part, [self.source, student], self.workers, self.settings.skip_broken)
        return HoldoutAgreement(self.source, views[0], views[1], self.processes, self.device)

    def _finish(
        self,
        models: dict[str, HVT],
        scores: dict[str, Score],
        best: str,
        held: HoldoutAgreement,
        table: list[dict[str, Any]],
    ) -> Upcycled:
        model = models[best].eval()
        model.pretrained_cfg["origin"] = self.source.pretrained_cfg["origin"]
        rows: list[report.Row] = []
        if self.processes.is_main_process:
            self._check_output(model)
            save(model, self.output)
            self._say(f"the model is in {self.output}")
            whole = Score(100.0, 100.0, 0.0, scores[best].images, 0, 0.0, 0, scores[best].confusion)
            rows = [report.row_of("source", self.source, whole)]
            rows += [report.row_of(name, models[name], score) for name, score in scores.items()]
            kept = {"source": self.source, **models}
            if self.labelled is not None:
                for row in rows:
                    self._say(f"measuring {row.name} on {self.settings.eval}")
                    row.top1, row.top5 = report.top(
                        kept[row.name], self.labelled, self.settings, self.device
                    )
            if self.settings.speed:
                speed = report.measure_speed(
                    {"source": self.source, "upcycled": model}, self.device, self._say
                )
                for row in rows:
                    row.speed = speed["source" if row.name == "source" else "upcycled"]
            self.console.print(report.as_table(rows, held.head))
            self._write(
                "report.json",
                {"output": str(self.output), "best": best, **report.to_dict(rows, self.device)},
            )
        self.processes.barrier()
        return Upcycled(model, self.output, self.folder, table, rows)

    def _check_output(self, model: HVT) -> None:
        """Refuse a file that another run has written meanwhile; our own is written once more."""
        if not self.output.exists():
            return
        try:
            there = load(self.output).float()
            own = there.config == model.config and weights_digest(there) == weights_digest(model)
        except HVTError:
            own = False
        if not own:
            raise HVTError(
                f"{self.output} is another model's by now: move it away, then go on with "
                f"{resume_command(self.folder)}"
            )

    # ── what is said and written ────────────────────────────────────────────────────────────────

    def _describe_score(self, name: str, score: Score) -> None:
        words = (
            "agreement {:.1f} %, KL {:.4f}"
            if self.source.num_classes
            else ("cosine similarity {:.1f} %, loss {:.4f}")
        )
        self._say(f"{name}: {words.format(score.top1, score.loss)} on {score.images} photos")

    def _progress(self, what: str, each: int) -> Any:
        printed = time.monotonic()
        began, first = printed, 0

        def note(done: int, of: int) -> None:
            nonlocal printed, first
            first = first or done - 1
            now = time.monotonic()
            if now - printed > 15 or done == of:
                printed = now
                left = (now - began) / max(1, done - first) * (of - done)
                self._say(f"{what} {done * each} of {of * each} crops, {clock(left)} left")

        return note

    def _say(self, text: str) -> None:
        if self.processes.is_main_process:
            print_line(self.console, text)

    def _write(self, name: str, values: dict[str, Any]) -> None:
        with atomic_write(self.folder / name) as temporary:
            temporary.write_text(json.dumps(values, indent=2) + "\n")


def _best(scores: dict[str, Score]) -> str:
    """The least loss; one that is not a number is none."""
    return max(scores, key=lambda name: merit(scores[name].loss))


def _own_copy(model: HVT) -> HVT:
    """A copy that shares no weight with the source."""
    return copy.deepcopy(model)


def _command() -> str:
    """How this was started, paths without their folders."""
    program, *words = map(_without_folder, sys.argv)
    return shlex.join(["hvt" if program == "__main__.py" else program, *words])


def _without_folder(word: str) -> str:
    """A path's last part, also of `--flag=PATH`."""
    flag, sign, value = word.partition("=") if word.startswith("--") else ("", "", word)
    return flag + sign + (Path(value).name if "/" in value else value)
