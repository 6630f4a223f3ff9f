"""`hvt plan`: from a budget to a model."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ..config import FIELDS, HVTConfig
from ..costs import arrow
from ..errors import HVTError
from ..files import check_writable
from ..planning.space import KEPT, SEARCHED
from ..terminal import print_line
from .flags import add_command, add_fields, add_flag, add_shared, keywords_of
from .output import Row, make_table, new_console, note, print_json

if TYPE_CHECKING:
    from ..planning.result import Choice, Plan

_EXAMPLES = """\
hvt plan --gflops 1.25                       models at DeiT-Ti's cost
hvt plan --gflops 4.6 --img-size 384 --save plan.json
hvt train imagenet --model plan.json --root IMAGENET
hvt plan --params 6 --memory 8000 --train-batch 256
hvt plan --latency-ms 20 --mode onnx --threads 2   measures blocks on this machine, once
hvt plan --gflops 0.009 --img-size 32 --head-dim 12 --num-classes 100
"""


def register(commands: Any) -> None:
    parser = add_command(commands, "plan", run, "choose a model for a budget", _EXAMPLES)
    group = parser.add_argument_group("budgets, which can be combined")
    add_flag(group, "--gflops", "MACs per image in 10⁹", float)
    add_flag(group, "--params", "parameters in 10⁶", float)
    add_flag(group, "--latency-ms", "milliseconds per batch, predicted from measured blocks", float)
    add_flag(group, "--memory", "MB of a training step: AdamW, float32", float)
    timed = parser.add_argument_group("latency measurement")
    add_flag(timed, "--mode", "eager, onnx or int8", str, "eager")
    add_flag(timed, "--remeasure", "ignore the cached timings", bool)
    add_flag(timed, "--batch", "images per batch", int, 1, ge=1)
    add_shared(timed, "--device", "--threads")
    add_flag(parser, "--train-batch", "images of a training step, for --memory", int, 128, ge=1)
    add_flag(parser, "--count", "number of configs to print", int, 5, ge=1)
    add_flag(parser, "--choice", "which config --save writes (default: 1)", int, ge=1)
    add_flag(parser, "--save", "write the best config", metavar="FILE.json")
    add_shared(parser, "--json")
    skipped = [name for name in FIELDS if name not in (*SEARCHED, *KEPT)]
    add_fields(parser.add_argument_group("fields to fix"), HVTConfig, skip=skipped)


def run(args: argparse.Namespace) -> None:
    """Find the best models within a budget, next to the paper's scaled models and DeiT.

    Every width, depth, image, patch and pooling is priced in closed form. Fields of the model that
    are given are fixed. See docs/plan.md.
    """
    if args.choice is not None and not args.save:
        raise HVTError("--choice needs --save FILE.json: add it, or leave --choice out")
    if args.save:
        check_writable(args.save)

    from ..planning.run import plan

    planned = plan(**keywords_of(plan, args), note=note, **keywords_of(HVTConfig, args))
    if args.save:
        planned.save(args.save, args.choice or 1)
    if args.json:
        print_json(planned.to_dict())
        return
    _print(planned)
    if args.save:
        command = f"hvt train RECIPE --model {shlex.quote(args.save)}"
        print(f"{args.save} contains choice {args.choice or 1}; train it with: {command}")


def _print(planned: Plan) -> None:
    from ..planning.latency import provenance

    console = new_console()
    found = f"{planned.num_within:,} of {planned.num_configs:,} configs are within the budget"
    if planned.extrapolated:
        found += "; by cost, order extrapolated"
    console.print(found, highlight=False)
    columns: dict[str, str | Callable[[Row], str]] = {
        "": "{name:<}", "px": "{px:<}", "patch": "{patch_size:<}", "width": "{width:<}",
        "heads": "{num_heads:<}", "blocks": "{depth:<}", "pool after": "{after:<}",
        "window": "{window:<}", "tokens": "{tokens:<}", "GFLOPs": "{gflops:>}",
        "params (M)": "{params_m:>}",
    }  # fmt: skip
    if "latency_ms" in planned.budgets:
        columns["ms"] = "{latency_ms:.1f}"
    if "memory" in planned.budgets:
        columns["MB"] = "{training_memory_mb:.0f}"
    columns["share of MACs"] = "{shares}"
    table = make_table(map(_row, planned.choices), columns)
    for end in {len(planned.best) - 1, len(planned.best) + len(planned.scaled) - 1}:
        table.rows[end].end_section = True
    console.print(table)
    print_line(console, planned.order)
    if planned.machine:
        print_line(console, f"Latency: {provenance(planned.machine)}.")


def _row(choice: Choice) -> Row:
    """The cells of a choice, by the names of the columns' formats."""
    config = choice.config
    height, width = config.image
    after = ",".join(map(str, config.pool_blocks))
    if config.stages and config.stages == len(config.pool_blocks):
        after = f"{config.stages} stages"
    kernel, stride = (
        "×".join(map(str, one)) if isinstance(one, tuple) else str(one)
        for one in (config.pool_kernel, config.pool_stride)
    )
    shares = [f"{s:.0%} {part}" for part, s in choice.macs_share.items() if s >= 0.005]
    return config.to_dict() | {
        "name": choice.name,
        "px": str(height) if height == width else f"{height}×{width}",
        "width": config.width,
        "after": after or "never",
        "window": f"{config.pool_dims}D {kernel}/{stride}" if config.pool_blocks else "",
        "tokens": arrow(list(config.tokens)),
        "gflops": _figure(choice.gflops),
        "params_m": _figure(choice.params_m),
        "latency_ms": choice.latency_ms,
        "training_memory_mb": choice.training_memory_mb,
        "shares": ", ".join(shares),
    }


def _figure(value: float) -> str:
    """Two decimals as the paper prints, or three digits of what is small."""
    return f"{value:.2f}" if value >= 0.1 else f"{value:.3g}"
