"""Peak memory of a model, measured in a process of its own, for a process never forgets its peak.

    python -m hvt.bench.peak hvt_s_1 --batch 1 16 --mode onnx

prints bytes by batch size as JSON: the most the process held, above what it held before the model
was made. So weights and activations count, in training also gradients and the optimiser's state,
and Python and torch do not. On CUDA it is what torch's allocator held.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from ..deploy.runtime import is_onnx
from ..device import find_device
from ..errors import HVTError
from . import MODES, contenders
from .measure import memory_held, memory_peak

# As -m would, but not with modules of the working folder; 3.10 has no -P, and -I leaves more out.
_SAFE = "-P" if sys.version_info >= (3, 11) else "-I"
_START = """\
import json, sys
sys.path[:] = json.loads(sys.argv.pop(1))
from hvt.bench.peak import main
main()
"""


def peak_memory(
    name: str, mode: str, batches: Sequence[int], device: torch.device, **overrides: Any
) -> dict[int, int]:
    """Bytes by batch size, from a new process; `mode` is one of a contender, or `train`."""
    if device.type == "cuda" and (mode in contenders.EXPORTED or is_onnx(name)):
        return {}  # ONNX Runtime's memory there is not torch's to count
    file: str | Path = name
    with tempfile.TemporaryDirectory() as folder:
        if mode in contenders.EXPORTED and not is_onnx(name):
            # Exported here: exporting takes more memory than running.
            model = contenders.build(name, **overrides)
            file, overrides = contenders.export_contender(name, model, mode, Path(folder)), {}
        path = json.dumps([str(place) for place in sys.path])
        command = [sys.executable, _SAFE, "-c", _START, path, str(file), "--mode", mode]
        command += ["--device", str(device), "--threads", str(torch.get_num_threads())]
        command += ["--overrides", json.dumps(overrides), "--batch", *map(str, batches)]
        answer = subprocess.run(command, capture_output=True, text=True, check=False)
    if answer.returncode:
        reason = (answer.stderr.strip().splitlines() or ["it was ended"])[-1]
        raise HVTError(f"the peak memory of {name} could not be measured: {reason}")
    return {int(batch): peak for batch, peak in json.loads(answer.stdout).items()}


def inference_peaks(
    name: str, mode: str, batches: Sequence[int], device: torch.device, **overrides: Any
) -> dict[int, int]:
    before = memory_held(device)
    model = contenders.open_contender(name, mode, device, Path(), **overrides)
    peaks: dict[int, int] = {}
    for batch in sorted(batches):  # from small to large, for a peak never falls
        with contenders.fitting(batch):
            model.call(batch, device)()
        peaks[batch] = memory_peak(device) - before
    return peaks


def training_peaks(
    name: str, batches: Sequence[int], device: torch.device, **overrides: Any
) -> dict[int, int]:
    # Kernels that are loaded at first use belong to torch, not to the model.
    small = torch.nn.Linear(8, 8).to(device)
    small(torch.ones(2, 8, device=device)).sum().backward()

    before = memory_held(device)
    model = contenders.build(name, device, **overrides)
    optimizer = contenders.adamw(model)
    peaks: dict[int, int] = {}
    # The first step makes the optimiser's state, which the second then holds beside its
    # activations.
    for batch in sorted(batches):
        with contenders.fitting(batch):
            images, classes = contenders.images(model, batch, device)
            step = contenders.train_step(model, optimizer, images, classes)
            step()
            if not peaks:
                step()
        peaks[batch] = memory_peak(device) - before
    return peaks


def main() -> None:
    parser = argparse.ArgumentParser(description="Peak memory of one model.")
    parser.add_argument("model", help="a model of hvt or timm, a checkpoint or an exported file")
    parser.add_argument("--mode", default="eager", choices=(*MODES, "train"))
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 16], help="batch sizes")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda …")
    parser.add_argument("--threads", type=int, help="CPU threads")
    parser.add_argument("--overrides", type=json.loads, default={}, help="fields, as JSON")
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    device = find_device(args.device)
    if args.mode == "train":
        peaks = training_peaks(args.model, args.batch, device, **args.overrides)
    else:
        peaks = inference_peaks(args.model, args.mode, args.batch, device, **args.overrides)
    print(json.dumps(peaks))


if __name__ == "__main__":
    main()
