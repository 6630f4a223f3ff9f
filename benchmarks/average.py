"""The mean of the weights of some checkpoints of one architecture, which began as one model.

    python benchmarks/average.py OUT.safetensors ONE.safetensors TWO.safetensors …

Runs that differ in their crops or their length end beside each other, and their mean is often
better than each (model soups). The built-in `imagenet` is one: docs/built-in.md.
"""

from __future__ import annotations

import argparse

import torch

import hvt


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("out")
    parser.add_argument("checkpoints", nargs="+")
    args = parser.parse_args()
    models = [hvt.load(path).float() for path in args.checkpoints]
    first = models[0]
    for path, model in zip(args.checkpoints, models, strict=True):
        if model.config != first.config or model.class_names != first.class_names:
            raise SystemExit(f"{path} is another model than {args.checkpoints[0]}")
    states = [model.state_dict() for model in models]
    mean = {name: torch.stack([s[name] for s in states]).mean(dim=0) for name in states[0]}
    first.load_state_dict(mean)
    origins = [model.pretrained_cfg.get("origin") or {} for model in models]
    if all("command" in origin for origin in origins):
        commands = " and ".join(origin["command"] for origin in origins)
        first.pretrained_cfg["origin"] = origins[0] | {"command": f"mean of: {commands}"}
    hvt.save(first.eval(), args.out)


if __name__ == "__main__":
    main()
