"""`hvt bench`: the speed of models on this machine."""

from __future__ import annotations

import argparse
import os
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..bench import MODES
from ..plot import figure_path
from .flags import add_command, add_flag, add_shared
from .output import emit, note, print_json

if TYPE_CHECKING:
    from ..bench.models import BenchModel

_EXAMPLES = """\
hvt bench deit_s hvt_s_1 hvt_s_4 --batch 1,16
hvt bench hvt_s_4 --modes eager,compiled,onnx,int8 --csv > speed.csv
hvt bench deit_s hvt_s_4 pit_s_224 --batch 16 --plot speed.png
hvt bench model.safetensors model.onnx resnet50 --threads 2 --json
"""
_COLUMNS = {
    "model": "{model}",
    "mode": "{mode:<}",
    "batch": "{batch:d}",
    "px": "{pixels:>}",
    "GFLOPs": "{gflops:.2f}",
    "images/s": "{images_per_s:.1f}",
    "p50 ms": "{p50_ms:.1f}",
    "p90": "{p90_ms:.1f}",
    "p99": "{p99_ms:.1f}",
    "of peak": "{share_of_peak:.0%}",
    "MB": "{peak_memory_mb:.0f}",
}


def register(commands: Any) -> None:
    parser = add_command(commands, "bench", run, "compare the speed of models", _EXAMPLES)
    text = "models' names (hvt's or timm's), .json configs, checkpoints or .onnx files"
    parser.add_argument("others", nargs="+", metavar="MODEL", help=text)
    text = f"any of {', '.join(MODES)}; timm's models run only eager and compiled"
    add_flag(parser, "--modes", text, tuple[str, ...], "eager", metavar="MODES", choices=MODES)
    add_flag(parser, "--batch", "batch sizes", tuple[int, ...], "1,16", ge=1)
    add_flag(parser, "--img-size", "pixels, for hvt's models and checkpoints", int, ge=1)
    add_shared(parser, "--threads", "--device")
    add_flag(parser, "--rounds", "timing rounds", int, 5, ge=1)
    add_flag(parser, "--no-memory", "do not measure peak memory", bool)
    add_shared(parser, "--plot")
    add_shared(parser.add_mutually_exclusive_group(), "--csv", "--json")


def run(args: argparse.Namespace) -> None:
    """Time models of hvt and timm, plans, checkpoints and ONNX files, interleaved.

    GFLOPs are MACs per image; the share of peak is that of the machine's fastest float32 matrix
    product.
    """
    if args.plot:
        figure_path(args.plot)

    import torch

    from ..bench.measure import describe
    from ..bench.models import modes_of, open_bench_model
    from ..bench.plot import draw
    from ..bench.run import busy, measure
    from ..device import find_device

    if args.threads is not None:
        torch.set_num_threads(args.threads)
    device, batches = find_device(args.device), sorted(set(args.batch))
    overrides = {"img_size": args.img_size} if args.img_size else {}
    names = list(dict.fromkeys(args.others))
    entries = [(n, mode) for n in names for mode in modes_of(n, list(dict.fromkeys(args.modes)))]
    with tempfile.TemporaryDirectory() as folder:
        opened = []
        for name, mode in entries:
            note(f"opening {name} ({mode})")
            opened.append(open_bench_model(name, mode, device, Path(folder), **overrides))
            _ = opened[-1].gflops  # now, as the MACs of some timm models cannot be counted
        memory = {} if args.no_memory else _memory(opened, batches, device, overrides)
        measured = measure(opened, batches, device, rounds=args.rounds, memory=memory, note=note)
    machine, rows, warning = describe(device), [asdict(row) for row in measured], busy(measured)
    if args.json:
        print_json({"machine": machine, "busy": warning is not None, "rows": rows})
    else:
        if not args.csv:
            print(_heading(machine, measured[0].matmul_peak_gflop_per_s))
        emit([row | machine for row in rows], _COLUMNS, csv=args.csv)
    if warning:
        note(warning)
    if args.plot:
        draw(measured, machine, args.plot)


def _memory(
    models: list[BenchModel], batches: list[int], device: Any, overrides: dict[str, Any]
) -> dict[tuple[str, str, int], int]:
    """Peak bytes by name, mode and batch."""
    from ..bench.peak import peak_memory

    if os.name == "nt":
        note("peak memory is measured on Linux and macOS only")
        return {}
    memory: dict[tuple[str, str, int], int] = {}
    for model in models:
        note(f"peak memory of {model.name} ({model.mode})")
        peaks = peak_memory(model, batches, device, **overrides)
        memory |= {(model.name, model.mode, batch): held for batch, held in peaks.items()}
    return memory


def _heading(machine: dict[str, Any], peak: float) -> str:
    where = machine["cpu"] if machine["device"] == "cpu" else machine["device"]
    libraries = [name for name in ("torch", "timm", "onnxruntime") if machine[name]]
    return (
        f"{where}, {machine['threads']} of {machine['cores']} cores, float32 where not int8, "
        f"{', '.join(f'{name} {machine[name]}' for name in libraries)}; matrix products reach "
        f"{peak:.0f} GFLOP/s"
    )
