"""`hvt bench`: how fast models are, beside each other, on this machine."""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Table
from rich.text import Text

from ..bench import MODES
from ..errors import HVTError, did_you_mean
from ..fields import MAX_THREADS
from ..files import check_writable
from .flags import converter
from .output import new_console

if TYPE_CHECKING:
    from ..bench.run import Row


def register(commands: Any) -> None:
    """Add the commands of this group."""
    parser = commands.add_parser(
        "bench",
        help="time models beside each other",
        description=(
            "Latency, throughput and peak memory of models of hvt and timm, of checkpoints and\n"
            "of exported files, timed in turns. GFLOPs are multiply-adds; the share of peak is\n"
            "that of the machine's fastest float32 matrix product."
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
        help="of eager, compiled, onnx, int8 (default: eager); an exported file has its own, and "
        "timm's models are left out of the last two",
    )
    parser.add_argument(
        "--batch",
        type=converter("batch", tuple[int, ...], ge=1),
        default="1,16",
        metavar="N,N,…",
        help="batch sizes (default: 1,16)",
    )
    parser.add_argument(
        "--img-size",
        type=converter("img_size", int, ge=1),
        metavar="N",
        help="pixels, for hvt's names",
    )
    parser.add_argument(
        "--threads",
        type=converter("threads", int, ge=1, le=MAX_THREADS),
        metavar="N",
        help="CPU threads (default: torch's)",
    )
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda … (default: auto)")
    parser.add_argument(
        "--rounds",
        type=converter("rounds", int, ge=1),
        default=5,
        metavar="N",
        help="turns of each (default: 5)",
    )
    parser.add_argument("--no-memory", action="store_true", help="leave out the peak memory")
    parser.add_argument("--csv", metavar="CSV", help="also write the rows, with the machine")
    parser.add_argument("--plot", metavar="PNG|SVG", help="draw images/s against GFLOPs")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.set_defaults(run=run_bench, parser=parser)


def run_bench(args: argparse.Namespace) -> None:
    modes = _modes(args.modes)
    batches = sorted(set(args.batch))

    import torch

    from ..bench.contenders import modes_of, open_contender
    from ..bench.measure import describe
    from ..bench.peak import peak_memory
    from ..bench.plot import check_image, draw
    from ..bench.run import measure, write_csv
    from ..device import find_device
    from ..resolve import resolve

    if args.threads is not None:
        torch.set_num_threads(args.threads)
    device = find_device(args.device)
    if args.csv:  # before minutes are spent on measuring
        if Path(args.csv).suffix.lower() != ".csv":
            raise HVTError(f"the table {args.csv} should end in .csv")
        check_writable(args.csv)
    if args.plot:
        check_image(args.plot)
    names = list(dict.fromkeys([args.first, *args.others]))
    entries = []
    for name in names:
        if args.img_size and resolve(name).kind not in ("model", "config"):
            raise HVTError(
                f"--img-size is for hvt's names, and {name} has a size of its own: leave one out"
            )
        overrides = {"img_size": args.img_size} if args.img_size else {}
        entries += [(name, mode, overrides) for mode in modes_of(name, modes)]
    with tempfile.TemporaryDirectory() as folder:
        opened = []
        for name, mode, overrides in entries:
            _note(f"opening {name} ({mode})")
            opened.append(open_contender(name, mode, device, Path(folder), **overrides))
            _ = opened[-1].gflops  # now, as a model of timm's may be one that cannot be counted
        memory: dict[tuple[str, str, int], int] = {}
        if os.name == "nt":
            _note("peak memory is measured on Linux and macOS only")
        elif not args.no_memory:
            for (name, _, overrides), contender in zip(entries, opened, strict=True):
                _note(f"peak memory of {name} ({contender.mode})")
                peaks = peak_memory(name, contender.mode, batches, device, **overrides)
                memory |= {(name, contender.mode, batch): held for batch, held in peaks.items()}
        rows = measure(opened, batches, device, rounds=args.rounds, memory=memory, note=_note)
    machine = describe(device)
    if args.json:
        print(json.dumps({"machine": machine, "rows": [row.to_dict() for row in rows]}, indent=2))
    else:
        _print(rows, machine)
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


def _print(rows: list[Row], machine: dict[str, Any]) -> None:
    console = new_console()
    where = machine["cpu"] if machine["device"] == "cpu" else machine["device"]
    versions = f"torch {machine['torch']}, timm {machine['timm']}"
    if machine["onnxruntime"]:
        versions += f", onnxruntime {machine['onnxruntime']}"
    console.print(
        f"{where}, {machine['threads']} of {machine['cores']} cores, float32 where not int8, "
        f"{versions}; matrix products reach {rows[0].matmul_peak_gflop_per_s:.0f} GFLOP/s",
        highlight=False,
        markup=False,
    )
    table = Table("model", "mode", box=None, header_style="bold")
    for heading in ("batch", "px", "GFLOPs", "images/s", "p50 ms", "p90", "p99", "of peak", "MB"):
        table.add_column(heading, justify="right")
    for row in rows:
        table.add_row(
            Text(row.model, overflow="fold"),
            row.mode,
            str(row.batch),
            row.pixels,
            f"{row.gflops:.2f}",
            f"{row.images_per_s:.1f}",
            f"{row.p50_ms:.1f}",
            f"{row.p90_ms:.1f}",
            f"{row.p99_ms:.1f}",
            f"{100 * row.share_of_peak:.0f} %",
            "" if row.peak_memory_mb is None else f"{row.peak_memory_mb:.0f}",
        )
    console.print(table)


def _note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
