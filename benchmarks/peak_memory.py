"""Peak memory of a model's training step, to be run in a process of its own.

    python benchmarks/peak_memory.py hvt_s_1 --batch 1 16

prints bytes by batch size as JSON: the most the process held by the end of two steps, above what it
held before the model was made. So weights, gradients, optimiser state and activations count, and
Python and torch do not. On CUDA it is what torch's allocator held.
"""

from __future__ import annotations

import argparse
import json

import contenders
import torch
from measure import memory_held, memory_peak, pick_device


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("model", help="a model of hvt or timm")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 16], help="batch sizes")
    parser.add_argument("--device", help="cpu, cuda, …; CUDA where there is one by default")
    args = parser.parse_args()
    contenders.check([args.model])
    print(json.dumps(training_peaks(args.model, args.batch, pick_device(args.device))))


def training_peaks(name: str, batches: list[int], device: torch.device) -> dict[int, int]:
    # Kernels that are loaded at first use belong to torch, not to the model.
    small = torch.nn.Linear(8, 8).to(device)
    small(torch.ones(2, 8, device=device)).sum().backward()

    before = memory_held(device)
    model = contenders.build(name, device)
    optimizer = contenders.adamw(model)
    peaks: dict[int, int] = {}
    # From small to large, for the peak of a process never falls. The first step makes the
    # optimiser's state, which the second then holds beside its activations.
    for batch in sorted(batches):
        step = contenders.train_step(model, optimizer, *contenders.pictures(batch, device))
        step()
        if not peaks:
            step()
        peaks[batch] = memory_peak(device) - before
    return peaks


if __name__ == "__main__":
    main()
