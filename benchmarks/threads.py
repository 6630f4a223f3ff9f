"""Training steps on a busy machine: how long threads that wait for each other wait.

    python benchmarks/threads.py --busy 2 --seconds 10

A step of a small model is hundreds of short parallel regions, and each ends when its last thread
does. OpenMP's threads spin while they wait. Where another process has a core, the spinning thread
uses up its time slice on nothing, and is not there when the other thread comes back: a region takes
as long as a time slice of the scheduler. With `OMP_WAIT_POLICY=PASSIVE` they sleep instead, which
is slow on an idle machine; with a `GOMP_SPINCOUNT` they spin for a moment and then sleep, and the
commands of hvt choose a short one.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time

from hvt._openmp import SPIN

PASSIVE = {"OMP_WAIT_POLICY": "PASSIVE"}
SPINS = (SPIN // 5, SPIN, 10 * SPIN)  # the second is that of hvt's commands
BUSY = "while True: pass"


def measure(threads: int, seconds: float) -> float:
    """Images per second of training steps on noise, by the digits recipe's model and batch."""
    import torch

    import hvt
    from hvt.training.recipe import load_recipe

    torch.set_num_threads(threads)
    recipe = load_recipe("digits")
    assert recipe.model is not None
    model = hvt.create_model(recipe.model, num_classes=10, **recipe.overrides).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    images = torch.randn(recipe.batch_size, model.config.in_chans, *model.config.image)

    def step() -> None:
        optimizer.zero_grad()
        model(images).logsumexp(1).mean().backward()
        optimizer.step()

    step()
    began, steps = time.perf_counter(), 0
    while time.perf_counter() - began < seconds:
        step()
        steps += 1
    return steps * recipe.batch_size / (time.perf_counter() - began)


def in_a_process(threads: int, seconds: float, settings: dict[str, str]) -> float:
    """The same in a process of its own, as OpenMP reads its settings when it is loaded."""
    values = {k: v for k, v in os.environ.items() if not k.startswith(("OMP_", "GOMP_", "KMP_"))}
    command = [sys.executable, __file__, "--measure", str(threads), "--seconds", str(seconds)]
    ended = subprocess.run(
        command, env=values | settings, check=True, stdout=subprocess.PIPE, text=True
    )
    return float(ended.stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--busy", type=int, default=2, help="processes that compute beside it")
    parser.add_argument("--seconds", type=float, default=10.0, help="of each measurement")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--measure", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:
        print(measure(args.measure, args.seconds))
        return
    many = args.threads
    print(f"{'images/s':<28}{'alone':>10}{f'beside {args.busy}':>12}")
    for name, threads, settings in (
        ("1 thread", 1, {}),
        (f"{many} threads", many, {}),
        (f"{many} threads, passive", many, PASSIVE),
        *((f"{many} threads, {s} spins", many, {"GOMP_SPINCOUNT": str(s)}) for s in SPINS),
    ):
        alone = in_a_process(threads, args.seconds, settings)
        others = [subprocess.Popen([sys.executable, "-c", BUSY]) for _ in range(args.busy)]
        try:
            beside = in_a_process(threads, args.seconds, settings)
        finally:
            for other in others:
                other.kill()
                other.wait()
        print(f"{name:<28}{alone:>10.0f}{beside:>12.0f}", flush=True)


if __name__ == "__main__":
    main()
