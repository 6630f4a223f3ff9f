"""What `test_distributed.py` has torchrun start in each process: steps, and a run that resumes.

Both at once, because starting takes longer than either.
"""

import contextlib
import json
import math
import sys
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from training import Waits, quiet, tiny

from hvt import distributed
from hvt.cli import main
from hvt.data.loader import Batch
from hvt.training.engine import open_trainer


def spoiled(batches: Iterator[Batch], rank: int) -> Iterator[Batch]:
    """The second batch of the second process, and of no other, holds infinities."""
    for number, batch in enumerate(batches):
        bad = rank == 1 and number == 1
        yield replace(batch, images=batch.images * math.inf, broken=2) if bad else batch


@contextlib.contextmanager
def counted_all_reduces() -> Iterator[list[int]]:
    """The sizes of what is reduced meanwhile, besides the gradients, which DDP reduces itself."""
    sizes: list[int] = []
    real = dist.all_reduce

    def all_reduce(tensor: torch.Tensor) -> None:
        sizes.append(tensor.numel())
        real(tensor)

    dist.all_reduce = all_reduce
    try:
        yield sizes
    finally:
        dist.all_reduce = real


def check(folder: Path) -> dict[str, Any]:
    with distributed.process_group("cpu") as (processes, device):
        trainer = open_trainer(tiny(folder), folder, processes, device, quiet())
        learner = trainer.learner
        batches = spoiled(trainer.batches.epoch(0), processes.rank)
        with Waits() as waits, counted_all_reduces() as reduced:
            steps = [asdict(learner.step(batches, update)) for update in range(3)]
        weights = {name: p.double().sum().item() for name, p in learner.model.named_parameters()}
        return {
            "rank": processes.rank,
            "steps": steps,
            "transfers": waits.transfers,
            "all_reduces": len(reduced),
            "score": trainer.evaluate(learner.model),
            "weights": weights,
            "any": processes.any(device, processes.rank == 1),
            "shared": processes.broadcast(f"from {processes.rank}"),
        }


if __name__ == "__main__":
    folder, stopped = Path(sys.argv[1]), sys.argv[2]
    found = check(folder)
    (folder / f"rank{found['rank']}.json").write_text(json.dumps(found))
    sys.exit(main(["train", "--resume", stopped]))
