"""From a trained ViT to a cheap one: choose an image size and a placement, distil, report.

The run's folder has `upcycle.json` (what was asked), `source.safetensors`, `placement.json`,
`distilled/` as `hvt train` leaves a run, and `report.json`. Resuming skips whatever is there.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import json
import random
import shlex
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import nn

from .. import distributed
from ..checkpoint.save_load import load, save
from ..config import HVTConfig
from ..costs import arrow, cost
from ..data.fingerprint import identity
from ..data.sample import evenly
from ..data.sources import Data
from ..elastic import configs_of, label
from ..errors import HVTError, did_you_mean
from ..files import atomic_write, check_new, check_writable, expanded
from ..model import HVT
from ..terminal import print_line
from ..training.pipeline import reading_processes
from ..training.run_lock import locked
from ..training.sandwich import evaluate_settings
from ..training.state import weights_digest
from .distil import Distiller, HoldoutAgreement
from .elastic import ElasticDistiller, make_student
from .elastic import options as elastic_options
from .photos import Size, open_photos, read_views
from .placement import SHOWN, Evaluator, Ranked, candidates, describe, rank, ranking_table
from .settings import Settings, from_dict
from .source import open_source
from .student import resized
from .train import distil, resume_command, started_by


@dataclass(frozen=True)
class Row:
    """One model of the report, how close it is to the source, and what it costs."""

    name: str
    gflops: float
    params_m: float
    agreement: float
    kl: float


@dataclass
class Upcycled:
    """The result of an upcycling."""

    model: HVT
    """The best by KL on held-out photos, in evaluation mode."""
    path: Path
    folder: Path
    ranked: list[dict[str, Any]]
    """The candidates of the largest budget, best first; empty where there was only one."""
    rows: list[Row]


def upcycle(
    source: str | Path | nn.Module,
    output: str | Path,
    data: str | Path,
    *,
    run_folder: str | Path | None = None,
    console: Console | None = None,
    **settings: Any,
) -> Upcycled:
    """Make a trained plain ViT cheaper and write it to `output`.

    `source` is a checkpoint, a model or a model's name, and `data` any folder of images.
    `settings` are the fields of `Settings`, such as `gflops=0.7, minutes=30`.
    """
    names = [field.name for field in dataclasses.fields(Settings)]
    for name in settings:
        if name not in names:
            raise HVTError(f"unknown setting {name!r}: {did_you_mean(name, names)}")
    chosen = from_dict(settings)
    name = type(source).__name__ if isinstance(source, nn.Module) else Path(source).stem
    folder = Path(run_folder or f"runs/upcycle-{name}")
    group = distributed.process_group(chosen.device)
    with group as (processes, device), locked(folder, processes):
        restarted = processes.any(device, distributed.restarted())
        run = Upcycling(chosen, Path(output), str(data), folder, processes, device, console)
        run.begin(source, restarted)
        return run.run()


def resume(folder: str | Path, console: Console | None = None) -> Upcycled:
    """Resume an upcycling where it stopped."""
    folder = Path(folder)
    try:
        values = json.loads((folder / "upcycle.json").read_text())
        settings = from_dict(values["settings"])
        output, data = Path(values["output"]), str(values["data"])
        photos = values["photos"]
    except (KeyError, OSError, TypeError, ValueError) as error:
        raise HVTError(
            f"{folder} is not the folder of an upcycling run: it has no readable upcycle.json"
        ) from error
    group = distributed.process_group(settings.device)
    with group as (processes, device), locked(folder, processes):
        run = Upcycling(settings, output, data, folder, processes, device, console)
        run.reopen(photos)
        return run.run()


class Upcycling:
    """One process's part in an upcycling."""

    source: HVT
    photos: Data
    identity: dict[str, str]
    """By which a resumed run knows its photos: names, sizes, and the content of some."""

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
        self.processes, self.device, self.console = processes, device, processes.console(console)
        if settings.threads:
            torch.set_num_threads(settings.threads)
        self.workers = reading_processes(settings.workers, processes, device)

    # ── start ───────────────────────────────────────────────────────────────────────────────────

    def begin(self, source: str | Path | nn.Module, restarted: bool = False) -> None:
        """Check everything before anything is written, then fill the folder.

        A run that torchrun `restarted` finds its own files there, and resumes.
        """
        path = self.folder / "upcycle.json"
        if self.processes.broadcast(path.exists()) and not restarted:
            raise self._taken()
        if self.output.suffix != ".safetensors":
            better = self.output.with_suffix(".safetensors").name
            raise HVTError(f"{self.output} should end in .safetensors, as {better} does")
        check_new(self.output)
        batch_size, unit = self.settings.batch_size, 2 * self.processes.world_size
        if batch_size % unit:
            raise HVTError(f"batch_size={batch_size} must be a multiple of {unit} (2 × processes)")
        self.source = open_source(source)
        origin = self.source.pretrained_cfg["origin"]
        origin["command"] = started_by()
        if self.settings.license:
            origin["license"] = self.settings.license
        self._open_photos()
        self._options()  # raises before anything is written
        asked = json.loads(json.dumps(self._asked()))
        there = self.processes.broadcast(json.loads(path.read_text()) if path.exists() else asked)
        if there != asked:
            raise self._taken()
        if self.processes.is_main_process:
            save(self.source, self.folder / "source.safetensors")
            self.write("upcycle.json", asked)
        self.processes.barrier()

    def reopen(self, photos: dict[str, str]) -> None:
        """Open the source of a run that is resumed, and its photos, which must be the same."""
        check_writable(self.output)
        self.source = load(self.folder / "source.safetensors").float()
        self._open_photos()
        if self.identity != photos:
            raise HVTError(
                f"the images in {self.data} have changed since the run in {self.folder} started: "
                "restore them, or start another run"
            )

    def _asked(self) -> dict[str, Any]:
        """The run's identity; paths as they are from any folder."""
        return {
            "settings": dataclasses.asdict(self.settings),
            "output": str(self.output.absolute()),
            "data": str(expanded(self.data).absolute()),
            "photos": self.identity,
            "weights": weights_digest(self.source),
        }

    def _taken(self) -> HVTError:
        return HVTError(
            f"{self.folder} already contains a run: resume it with "
            f"{resume_command(self.folder)}, or choose another --run-folder"
        )

    def _open_photos(self) -> None:
        settings, in_chans = self.settings, self.source.config.in_chans
        self.photos = open_photos(self.data, settings.batch_size, settings.holdout, in_chans)
        self.identity = identity(self.photos)

    # ── the run ─────────────────────────────────────────────────────────────────────────────────

    def run(self) -> Upcycled:
        """Do everything that is not done yet."""
        source, photos, settings = self.source.to(self.device), self.photos, self.settings
        image = source.config.image
        self.log(
            f"{source.pretrained_cfg['origin']['source']}: {image[0]}×{image[1]}, "
            f"{cost(source).gflops:.3g} GFLOPs; {photos.name}: {len(photos.train)} photos to train "
            f"on, {len(photos.val)} held out"
        )
        chosen, tables = self._place()
        for config in chosen:
            self.log(
                f"{describe(config)}: {cost(config).gflops:.3g} GFLOPs, tokens "
                f"{arrow(list(config.tokens))}"
            )
        sizes = tuple(dict.fromkeys((image, *(config.image for config in chosen))))
        learner: Any = ElasticDistiller if settings.elastic else Distiller
        untrained = make_student(source, chosen, settings.own).to(self.device)
        make = functools.partial(learner, source=source, sizes=sizes, settings=settings)
        holdout = self._open_holdout(sizes)
        models, measure = {"untrained": untrained}, holdout.names[0]
        rows = [Row("source", cost(source).gflops, cost(source).params_m, 100.0, 0.0)]
        kl = {"untrained": self._measure("untrained", untrained, holdout, rows)}
        evaluate = functools.partial(self._figures, holdout)
        path = distil(self, copy.deepcopy(untrained), make, sizes, evaluate, measure)
        if path is not None:
            models["distilled"] = load(path, self.device).float()
            kl["distilled"] = self._measure("distilled", models["distilled"], holdout, rows)
        best = min(kl, key=kl.__getitem__)
        return self._finish(models[best], best, rows, tables)

    # ── where to pool ───────────────────────────────────────────────────────────────────────────

    def _options(self) -> list[list[HVTConfig]]:
        """What to choose from for each budget, largest first; raises where there is nothing."""
        config, settings = self.source.config, self.settings
        if settings.elastic:
            return elastic_options(config, settings)
        return [candidates(config, settings.gflops, settings.fixed)]

    def _place(self) -> tuple[list[HVTConfig], list[list[dict[str, Any]]]]:
        """The best candidates, and the tables they were chosen from; ranked by the main process."""
        path = self.folder / "placement.json"
        if not path.exists() and self.processes.is_main_process:
            found = [self._choose(configs) for configs in self._options()]
            self.write("placement.json", [{"chosen": c.to_dict(), "ranked": t} for c, t in found])
        self.processes.barrier()
        placed = json.loads(path.read_text())
        configs = [HVTConfig.from_dict(one["chosen"]) for one in placed]
        return configs, [one["ranked"] for one in placed]

    def _choose(self, configs: list[HVTConfig]) -> tuple[HVTConfig, list[dict[str, Any]]]:
        """The best of some candidates, or the best pooled one if that was asked for; logs why.

        With the table of their ranking, which is empty where there is only one.
        """
        if len(configs) == 1:
            return configs[0], []
        table = self._rank(configs)
        pooled = [row for row in table if row.config.pool_blocks]
        unpooled = [row for row in table if not row.config.pool_blocks]
        best = pooled[0] if pooled and self.settings.asks_for_pooling else table[0]
        others = unpooled if best.config.pool_blocks else pooled
        if others:
            why = "the best of all untrained" if best is table[0] else "as --pool requires"
            self.log(
                f"chosen: {describe(best.config)}, {why}: KL {best.kl:.4f} against "
                f"{others[0].kl:.4f} of {describe(others[0].config)}"
            )
        return best.config, [row.to_dict() for row in table]

    def _rank(self, configs: list[HVTConfig]) -> list[Ranked]:
        settings, photos = self.settings, self.photos
        count = min(settings.rank_photos, len(photos.train))
        # Shuffled: the first rounds see the first of them.
        spread = random.Random(0).sample(evenly(len(photos.train), count), count)
        evaluator = Evaluator(
            self.source, photos.train.subset(spread), self.device, self.workers,
            settings.skip_broken,
        )  # fmt: skip
        table = rank(evaluator, configs, settings.fixed, count, self.log)
        self.console.print(ranking_table(table))
        if len(table) > SHOWN:
            self.log(f"all {len(table)} are in {self.folder / 'placement.json'}")
        return table

    # ── end ─────────────────────────────────────────────────────────────────────────────────────

    def _open_holdout(self, sizes: Sequence[Size]) -> HoldoutAgreement:
        """This process's part of the held-out photos, at each of some image sizes."""
        rank, world_size = self.processes.rank, self.processes.world_size
        shard = self.photos.val.subset(range(rank, len(self.photos.val), world_size))
        models = [resized(self.source, size) for size in sizes]
        views = read_views(shard, models, self.workers, self.settings.skip_broken)
        by_size = dict(zip(sizes, views, strict=True))
        return HoldoutAgreement(self.source, by_size, self.processes, self.device)

    def _figures(self, holdout: HoldoutAgreement, model: HVT) -> dict[str, float]:
        """How close a model is to the source, the mean of its settings and each of them."""
        return evaluate_settings(model, holdout.figures, self.settings.largest_weight)

    def _measure(self, name: str, model: HVT, holdout: HoldoutAgreement, rows: list[Row]) -> float:
        """Log and append a row for each setting of a model; their mean KL."""
        configs, figures = configs_of(model), self._figures(holdout, model)
        closeness = "agreement" if self.source.num_classes else "cosine similarity"
        for config in configs:
            key = f"_{label(config)}" if len(configs) > 1 else ""
            kl, agreement = (figures[figure + key] for figure in holdout.names)
            full, photos = name + key.replace("_", " "), holdout.photos
            self.log(f"{full}: {closeness} {agreement:.1f} %, KL {kl:.4f} on {photos} photos")
            price = cost(config)
            rows.append(Row(full, price.gflops, price.params_m, agreement, kl))
        return figures[holdout.names[0]]

    def _finish(
        self, model: HVT, best: str, rows: list[Row], tables: list[list[dict[str, Any]]]
    ) -> Upcycled:
        """Write the model, and a report on it and others; `best` is its name among them."""
        model.eval().pretrained_cfg["origin"] = self.source.pretrained_cfg["origin"]
        if self.processes.is_main_process:
            save(model, self.output)
            listed = [asdict(row) for row in rows]
            self.write("report.json", {"output": str(self.output), "best": best, "rows": listed})
            paths = [str(self.folder / "source.safetensors"), str(self.output)]
            self.log(
                f"the model ({best}) is in {self.output}; hvt eval measures its accuracy, and "
                f"{shlex.join(['hvt', 'bench', *paths])} its speed"
            )
        self.processes.barrier()
        return Upcycled(model, self.output, self.folder, tables[0], rows)

    def log(self, text: str) -> None:
        """Print a line, in the main process."""
        print_line(self.console, text)

    def write(self, name: str, values: Any) -> None:
        with atomic_write(self.folder / name) as temporary:
            temporary.write_text(json.dumps(values, indent=2) + "\n")
