"""`hvt bench`: how fast models are, beside each other, on this machine."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..bench import MODES
from ..errors import HVTError, did_you_mean
from ..fields import MAX_THREADS
from ..files import check_writable
from .flags import add_number, converter
from .output import add_output_flags, emit, print_json

if TYPE_CHECKING:
    from ..bench.models import BenchModel
    from ..bench.run import BenchRow


def register(commands: Any) -> None:
    """Add the commands of this group."""
    parser = commands.add_parser(
        "bench",
        help="time models beside each other",
        description=(
            "Latency, throughput and peak memory of models of hvt and timm, of plans, checkpoints\n"
            "and ONNX files, timed in turns. GFLOPs are MACs per image; the share of peak is that\n"
            "of the machine's fastest float32 matrix product."
        ),
        epilog=(
            "examples:\n  hvt bench deit_s hvt_s_1 hvt_s_4 --batch 1,16\n"
            "  hvt bench hvt_s_4 --modes eager,compiled,onnx,int8 --csv speed.csv\n"
            "  hvt bench deit_s hvt_s_4 pit_s_224 --batch 16 --plot speed.png\n"
            "  hvt bench model.safetensors model.onnx resnet50 --threads 2 --json"
        ),
    )
    parser.add_argument(
        "first",
        metavar="MODEL",
        help="a model's name (hvt's or timm's), a .json config, a checkpoint or an .onnx file",
    )
    parser.add_argument("others", nargs="*", metavar="MODEL", help="more of them")
    parser.add_argument(
        "--modes",
        default="eager",
        help="of eager, compiled, onnx, int8 (default: eager); an ONNX file has its own, and "
        "timm's models are left out of the last two",
    )
    parser.add_argument(
        "--batch",
        type=converter("batch", tuple[int, ...], ge=1),
        default="1,16",
        metavar="N,N,…",
        help="batch sizes (default: 1,16)",
    )
    add_number(parser, "--img-size", "pixels, for hvt's models", ge=1)
    add_number(parser, "--threads", "CPU threads (default: torch's)", ge=1, le=MAX_THREADS)
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda … (default: auto)")
    add_number(parser, "--rounds", "turns of each", 5, ge=1)
    parser.add_argument("--no-memory", action="store_true", help="leave out the peak memory")
    parser.add_argument("--csv", metavar="CSV", help="also write the rows, with the machine")
    parser.add_argument("--plot", metavar="PNG|SVG", help="draw images/s against GFLOPs")
    add_output_flags(parser)
    parser.set_defaults(run=run_bench, parser=parser)


def run_bench(args: argparse.Namespace) -> None:
    modes = _modes(args.modes)
    batches = sorted(set(args.batch))

    import torch

    from ..bench.measure import describe
    from ..bench.models import open_bench_model
    from ..bench.plot import draw
    from ..bench.run import busy, measure, write_csv
    from ..device import find_device

    if args.threads is not None:
        torch.set_num_threads(args.threads)
    device = find_device(args.device)
    _check_files(args)
    overrides = {"img_size": args.img_size} if args.img_size else {}
    entries = _entries(args, modes)
    with tempfile.TemporaryDirectory() as folder:
        opened = []
        for name, mode in entries:
            _note(f"opening {name} ({mode})")
            opened.append(open_bench_model(name, mode, device, Path(folder), **overrides))
            _ = opened[-1].gflops  # now, as the MACs of some timm models cannot be counted
        memory = {} if args.no_memory else _memory(opened, batches, device, overrides)
        rows = measure(opened, batches, device, rounds=args.rounds, memory=memory, note=_note)
    machine = describe(device)
    if args.json:
        described = [row.to_dict() for row in rows]
        print_json({"machine": machine, "busy": busy(rows) is not None, "rows": described})
    else:
        _print(rows, machine)
    if warning := busy(rows):
        _note(warning)
    if args.csv:
        write_csv([row.to_dict() | machine for row in rows], args.csv)
    if args.plot:
        draw(rows, machine, args.plot)


def _modes(text: str) -> list[str]:
    modes = list(dict.fromkeys(part.strip() for part in text.split(",")))
    for mode in modes:
        if mode not in MODES:
            raise HVTError(f"unknown mode {mode!r}: {did_you_mean(mode, MODES)}")
    return modes


def _check_files(args: argparse.Namespace) -> None:
    """Raise an error for files that cannot be written, before minutes are spent on measuring."""
    from ..plot import figure_path

    if args.csv:
        if Path(args.csv).suffix.lower() != ".csv":
            raise HVTError(f"the table {args.csv} should end in .csv")
        check_writable(args.csv)
    if args.plot:
        figure_path(args.plot)


def _entries(args: argparse.Namespace, modes: list[str]) -> list[tuple[str, str]]:
    """The models and the modes to time each in."""
    from ..bench.models import modes_of
    from ..resolve import resolve

    entries = []
    for name in dict.fromkeys([args.first, *args.others]):
        if args.img_size and resolve(name).kind not in ("model", "config"):
            raise HVTError(
                f"--img-size is for hvt's names, and {name} has a size of its own: leave one out"
            )
        entries += [(name, mode) for mode in modes_of(name, modes)]
    return entries


def _memory(
    models: list[BenchModel], batches: list[int], device: Any, overrides: dict[str, Any]
) -> dict[tuple[str, str, int], int]:
    """Peak bytes by name, mode and batch."""
    from ..bench.peak import peak_memory

    if os.name == "nt":
        _note("peak memory is measured on Linux and macOS only")
        return {}
    memory: dict[tuple[str, str, int], int] = {}
    for model in models:
        _note(f"peak memory of {model.name} ({model.mode})")
        peaks = peak_memory(model, batches, device, **overrides)
        memory |= {(model.name, model.mode, batch): held for batch, held in peaks.items()}
    return memory


def _print(rows: list[BenchRow], machine: dict[str, Any]) -> None:
    where = machine["cpu"] if machine["device"] == "cpu" else machine["device"]
    libraries = [name for name in ("torch", "timm", "onnxruntime") if machine[name]]
    print(
        f"{where}, {machine['threads']} of {machine['cores']} cores, float32 where not int8, "
        f"{', '.join(f'{name} {machine[name]}' for name in libraries)}; matrix products reach "
        f"{rows[0].matmul_peak_gflop_per_s:.0f} GFLOP/s"
    )
    columns = {
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
    emit((row.to_dict() for row in rows), columns)


def _note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
