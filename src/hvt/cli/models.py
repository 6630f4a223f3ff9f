"""`hvt models` and `hvt cost`: the models and their costs."""

from __future__ import annotations

import argparse
import fnmatch
from typing import Any

from rich.table import Table
from rich.text import Text

from .. import zoo
from ..config import HVTConfig
from ..costs import Cost, arrow, cost
from ..errors import HVTError, did_you_mean
from ..terminal import printable
from .flags import add_command, add_fields, add_shared, keywords_of
from .output import Columns, emit, make_table, new_console, print_json

_MODELS: Columns = {
    "model": "{name:<}",
    "tokens": lambda row: arrow(row["tokens"]),
    "GFLOPs": "{gflops:.2f}",
    "params (M)": "{params_m:.2f}",
    "cheaper by": "{cheaper_by:.2f}×",
    "weights": "{weights:<}",
}


def register(commands: Any) -> None:
    parser = add_command(
        commands, "models", run_models, "list the models and their cost",
        "hvt models\nhvt models 'hvt_s_*' --json",
    )  # fmt: skip
    parser.add_argument("pattern", nargs="?", default="*", help="shell pattern, such as 'hvt_s_*'")
    add_shared(parser.add_mutually_exclusive_group(), "--csv", "--json")

    parser = add_command(
        commands, "cost", run_cost, "price a model, block by block",
        "hvt cost hvt_s_1\nhvt cost hvt_s_4 --depth 24 --num-classes 100\n"
        "hvt cost hvt_s_4 --img-size 384 --patch-size 8 --json",
    )  # fmt: skip
    parser.add_argument(
        "name", metavar="NAME", help="a model's name (see hvt models), or a .json config"
    )
    add_shared(parser, "--json")
    add_fields(parser.add_argument_group("fields to replace"), HVTConfig)


def run_models(args: argparse.Namespace) -> None:
    """List the models whose names match a pattern."""
    names = zoo.list_models(args.pattern)
    built_in = fnmatch.filter(zoo.BUILT_IN, args.pattern)
    if not names and not built_in:
        known = [*zoo.MODELS, *zoo.BUILT_IN]
        raise HVTError(f"no model matches {args.pattern!r}: {did_you_mean(args.pattern, known)}")
    priced = {name: cost(name) for name in names}
    weights = {name: "published" for name in names if name in zoo.WEIGHT_URLS}
    for name in built_in:
        priced[name], weights[name] = cost(zoo.built_in_config(name)), "built-in"
    rows = [
        {
            "name": name,
            "tokens": c.tokens,
            "gflops": c.gflops,
            "params_m": c.params_m,
            "cheaper_by": c.ratio if c.macs != c.unpooled_macs else None,
            "weights": weights.get(name),
            "note": zoo.NOTES.get(name),
        }
        for name, c in priced.items()
    ]
    emit(rows, _MODELS, json=args.json, csv=args.csv)
    if args.json or args.csv:
        return
    lines = []
    for name in built_in:
        role = ", the default model" if name == zoo.DEFAULT else ""
        lines.append(f"\n{name} is built in, with {zoo.BUILT_IN[name]}{role}")
    for note in dict.fromkeys(zoo.NOTES[name] for name in names if name in zoo.NOTES):
        noted = [name for name in names if zoo.NOTES.get(name) == note]
        lines.append(f"\n{', '.join(noted)}: {note}")
    if lines:
        new_console().print("\n".join(lines), highlight=False)


def run_cost(args: argparse.Namespace) -> None:
    """Price a model: MACs, parameters and training memory."""
    config = zoo.get_config(args.name, **keywords_of(HVTConfig, args))
    priced = cost(config)
    if args.json:
        print_json({"name": args.name, **priced.to_dict(), "config": config.to_dict()})
        return
    lines = [
        f"{priced.gflops:.2f} GFLOPs (MACs), {priced.params_m:.2f} M parameters, "
        f"{priced.activation_mb:.1f} MB activations per image"
    ]
    lines += [
        f"pooling after block {c.block}: {c.tokens_in} → {c.tokens_out} tokens, "
        f"{c.measured:.2f}× cheaper blocks (Eq. 8: α = {c.alpha:.2f})"
        for c in priced.compression
    ]
    if config.retention is not None:
        lines.append(f"{priced.ratio:.2f}× cheaper than with all tokens kept in every block")
    elif priced.compression:
        lines.append(f"{priced.ratio:.2f}× cheaper than without pooling")
    console = new_console()
    console.print(Text.assemble((printable(args.name), "bold"), f"  {arrow(priced.tokens)} tokens"))
    console.print("\n".join(lines), highlight=False)
    console.print(_block_table(priced, console.width))


def _block_table(priced: Cost, width: int) -> Table:
    blocks, inner = priced.blocks(), priced.mlp_tokens()
    unit = max(macs for _, macs in blocks) / max(5, min(30, width - 36))  # of a bar
    rows = [
        {"block": index, "tokens": tokens, "mlp": inner[index], "mmacs": macs / 1e6}
        | {"bar": "█" * max(1, round(macs / unit))}
        for index, (tokens, macs) in enumerate(blocks)
    ]
    columns = {"block": "{block:d}", "tokens": "{tokens:d}"}
    if inner != [tokens for tokens, _ in blocks]:
        columns["in MLP"] = "{mlp:d}"
    return make_table(rows, columns | {"M MACs": "{mmacs:.1f}", "": "{bar}"})
