"""Make a built-in model's file, `src/hvt/assets/NAME.safetensors`, from a trained checkpoint.

    python benchmarks/built_in.py CHECKPOINT NAME [--class-names FILE.json] [--source WEIGHTS]
                                  [--origin TEXT] [--license NAME] [--out FILE]

The file holds float16, in which a model is half as large; it loads as float32. `--class-names` is a
JSON list, or an object whose values are the names in order. `--source` is the checkpoint that the
model was made from: a tensor that is still equal to the source's raises an error, as what is
shipped has been trained further as a whole. The file's own origin and licence are kept, unless they
are named.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import torch

import hvt
from hvt.checkpoint.save_load import read
from hvt.errors import HVTError
from hvt.zoo import BUILT_IN, built_in

MOST = 12_000_000
"""Bytes of a file that everybody downloads."""
# WordNet has one word for two of ImageNet's classes, twice.
RENAMED = {
    "n02012849": "crane (bird)",
    "n03126707": "crane (machine)",
    "n03710721": "tank suit",
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkpoint")
    parser.add_argument("name", choices=sorted(BUILT_IN))
    parser.add_argument("--class-names", type=Path, metavar="FILE.json")
    parser.add_argument("--source", help="the checkpoint that the model was made from")
    parser.add_argument("--origin", help="where the weights come from, in words")
    parser.add_argument("--license", help="of the weights, such as Apache-2.0")
    parser.add_argument("--out", type=Path, help="default: where the package has it")
    args = parser.parse_args()
    try:
        path = make(args)
    except HVTError as error:
        sys.exit(str(error))
    print(f"{path}: {path.stat().st_size / 1e6:.2f} MB, {hvt.load(path).pretrained_cfg['origin']}")


def make(args: argparse.Namespace) -> Path:
    model = hvt.load(args.checkpoint).float()
    names = class_names(args.class_names) if args.class_names else model.class_names
    if not names:
        raise HVTError(f"{args.checkpoint} does not name its classes: use --class-names")
    if len(set(names)) < len(names):
        twice = next(name for name in names if list(names).count(name) > 1)
        raise HVTError(f"two classes have the name {twice!r}")
    if args.source:
        check_trained(model, args.source)
    origin = dict(model.pretrained_cfg.get("origin", {}))
    origin |= {"source": args.origin} if args.origin else {}
    origin |= {"license": args.license} if args.license else {}
    for key in ("source", "license"):
        if key not in origin:
            flag = {"source": "--origin"}.get(key, f"--{key}")
            raise HVTError(f"{args.checkpoint} does not tell its {key}: use {flag}")
    model.pretrained_cfg["origin"] = origin
    size = 2 * sum(tensor.numel() for tensor in model.state_dict().values())
    if size > MOST:
        raise HVTError(f"{args.checkpoint} has {size} bytes in float16, more than {MOST}")
    path: Path = args.out or built_in(args.name)
    hvt.save(model, path, names, dtype=torch.float16)
    return path


def class_names(path: Path) -> list[str]:
    """Names for people: `great_white_shark` → `great white shark`."""
    values = json.loads(path.read_text(encoding="utf-8"))
    if isinstance(values, dict):
        values = [RENAMED.get(key, name) for key, name in values.items()]
    return [name.replace("_", " ") for name in values]


def check_trained(model: hvt.HVT, source: str) -> None:
    """Raise an error if a tensor equals its source's, to float16's precision."""
    before = read(source).tensors
    for name, tensor in model.state_dict().items():
        old = before.get(name)
        if old is not None and old.shape == tensor.shape and torch.equal(old.half(), tensor.half()):
            raise HVTError(f"{name} is that of {source}: train it further, or do not ship it")


if __name__ == "__main__":
    main()
