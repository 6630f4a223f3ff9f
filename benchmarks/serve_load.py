"""What `hvt serve` holds on loopback: requests per second and latency, driven by wrk.

    python benchmarks/serve_load.py                  # the small built-in model, half a minute
    python benchmarks/serve_load.py model.onnx --connections 1 16 --serve --threads 2

Every request is the same JPEG of the model's own size. wrk shares the cores with the service. Any
status but 200 and any connection that breaks counts as an error.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from record import portable_command

import hvt
from hvt.bench.measure import describe
from hvt.files import atomic_write

HERE = Path(__file__).parent
SCRIPT = """
wrk.method = "POST"
wrk.headers["Content-Type"] = "image/jpeg"
wrk.body = io.open("IMAGE", "rb"):read("*a")
done = function(summary, latency)
  local e = summary.errors
  print(string.format(
    '{"requests": %d, "seconds": %f, "p50_ms": %f, "p90_ms": %f, "p99_ms": %f, "errors": %d}',
    summary.requests, summary.duration / 1e6, latency:percentile(50) / 1e3,
    latency:percentile(90) / 1e3, latency:percentile(99) / 1e3,
    e.connect + e.read + e.write + e.status + e.timeout))
end
"""


def main() -> None:
    args = parse()
    wrk = shutil.which("wrk")
    if wrk is None:
        raise SystemExit("wrk is not installed: apt install wrk, or brew install wrk")
    with tempfile.TemporaryDirectory() as folder:
        image, script = Path(folder) / "image.jpg", Path(folder) / "post.lua"
        paint(hvt.Predictor(args.model).model.config.image, image)
        script.write_text(SCRIPT.replace("IMAGE", str(image)))
        command = [sys.executable, "-m", "hvt", "serve", args.model, "--port", "0", *args.serve]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as service:
            try:
                assert service.stdout is not None
                started = re.search(r"http://\S+:\d+", service.stdout.readline())
                if started is None:
                    raise SystemExit("hvt serve did not start")
                load = [wrk, "-t", "1", "-s", str(script), f"{started[0]}/predict"]
                drive(load, 64, 2)  # warms up
                rows = [drive(load, count, args.seconds) for count in args.connections]
            finally:
                service.terminate()
    report = {"command": portable_command(sys.argv), "machine": describe(torch.device("cpu"))}
    with atomic_write(args.out) as temporary:
        temporary.write_text(
            json.dumps(report | {"model": args.model, "rows": rows}, indent=2) + "\n"
        )
    if any(row["errors"] for row in rows):
        raise SystemExit("some requests were not answered with 200")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Requests per second and latency of hvt serve, on loopback.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("model", nargs="?", default="cifar100", help="what hvt serve takes")
    add("--connections", type=int, nargs="+", default=[1, 8, 64], help="requests under way")
    add("--seconds", type=int, default=10, help="of each")
    add("--serve", nargs=argparse.REMAINDER, default=[], help="flags for hvt serve; the last")
    add("--out", type=Path, default=HERE / "results/serve_wrk.json", help="the results' file")
    return parser.parse_args()


def paint(size: tuple[int, int], path: Path) -> None:
    """Patches of colour: as easy to decode as a photograph is, not as noise."""
    small = np.random.default_rng(0).integers(0, 256, (5, 5, 3), dtype=np.uint8)
    Image.fromarray(small).resize(size[::-1], Image.Resampling.BICUBIC).save(path, quality=90)


def drive(load: list[str], connections: int, seconds: int) -> dict[str, Any]:
    """One run of wrk."""
    flags = ["-c", str(connections), "-d", f"{seconds}s"]
    said = subprocess.run([*load, *flags], check=True, capture_output=True, text=True).stdout
    row = {"connections": connections} | json.loads(said.splitlines()[-1])
    row["requests_per_s"] = row["requests"] / row["seconds"]
    print({key: round(value, 2) for key, value in row.items()}, flush=True)
    return row


if __name__ == "__main__":
    main()
