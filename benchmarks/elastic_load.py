"""A step of load on `hvt serve`, plain and elastic: a quarter of saturation, then twice of it.

    python benchmarks/elastic_load.py elastic.safetensors --data IMAGES --seconds 20

Requests are sent at a fixed rate, whether or not others were answered. Saturation is what the plain
service, the largest setting in ONNX Runtime, answers to 64 connections. The client shares the cores
with the service. With a folder of class folders, in the order of the model's classes, the accuracy
of what was answered is in the results.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import contextlib
import json
import re
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import torch
from record import portable_command

from hvt.bench.measure import describe
from hvt.files import atomic_write

OUT = Path(__file__).parent / "results" / "elastic_load.json"
Sample = tuple[bytes, int]


def main() -> None:
    args = parse()
    classes = sorted(path for path in args.data.iterdir() if path.is_dir())
    files = [(path, label) for label, one in enumerate(classes) for path in sorted(one.iterdir())]
    step = max(1, len(files) // 500)
    samples = [(path.read_bytes(), label) for path, label in files[::step]]
    with service(args.model, args.serve) as url:
        saturation = asyncio.run(closed(url, samples, args.seconds))
    print(f"saturation of the plain service: {saturation:.1f} requests/s", flush=True)
    rows = []
    for name, flags in {"plain": [], "elastic": ["--elastic"]}.items():
        with service(args.model, [*flags, *args.serve]) as url:
            for load in (0.25, 2.0):
                row = asyncio.run(opened(url, samples, load * saturation, args.seconds))
                rows.append({"service": name, "load": load} | row)
                print(rows[-1], flush=True)
    report: dict[str, Any] = {"command": portable_command(sys.argv), "saturation": saturation}
    report |= {"machine": describe(torch.device("cpu")), "rows": rows}
    with atomic_write(args.out) as temporary:
        temporary.write_text(json.dumps(report, indent=2) + "\n")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="A step of load on hvt serve.")
    add = parser.add_argument
    add("model", help="an elastic checkpoint")
    add("--data", type=Path, required=True, help="a folder of class folders")
    add("--seconds", type=float, default=20.0, help="of each load")
    add("--out", type=Path, default=OUT)
    add("--serve", nargs=argparse.REMAINDER, default=[], help="flags for hvt serve; the last")
    return parser.parse_args()


@contextlib.contextmanager
def service(model: str, flags: list[str]) -> Iterator[str]:
    """The address of a running service."""
    command = [sys.executable, "-m", "hvt", "serve", model, "--port", "0", *flags]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            started = re.search(r"http://\S+:\d+", process.stdout.readline())
            if started is None:
                raise SystemExit("hvt serve did not start")
            yield f"{started[0]}/predict?top=1"
        finally:
            process.terminate()


@contextlib.asynccontextmanager
async def connected() -> AsyncIterator[httpx.AsyncClient]:
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    async with httpx.AsyncClient(timeout=120, limits=limits) as client:
        yield client


async def closed(url: str, samples: list[Sample], seconds: float, connections: int = 64) -> float:
    """Requests per second that are answered where each connection waits for its answer."""
    count, end = 0, time.perf_counter() + seconds

    async def ask(client: httpx.AsyncClient, place: int) -> None:
        nonlocal count
        while time.perf_counter() < end:
            (await client.post(url, content=samples[place % len(samples)][0])).raise_for_status()
            place, count = place + connections, count + 1

    async with connected() as client:
        await asyncio.gather(*(ask(client, place) for place in range(connections)))
    return count / seconds


async def opened(url: str, samples: list[Sample], rate: float, seconds: float) -> dict[str, Any]:
    """What becomes of requests that come at a rate."""
    took: list[float] = []
    right, lost = 0, 0
    settings: collections.Counter[str] = collections.Counter()

    async def ask(client: httpx.AsyncClient, place: int) -> None:
        nonlocal right, lost
        content, label = samples[place % len(samples)]
        began = time.perf_counter()
        try:
            answer = await client.post(url, content=content)
            answer.raise_for_status()
        except httpx.HTTPError:
            lost += 1
            return
        took.append(1e3 * (time.perf_counter() - began))
        (prediction,) = answer.json()["predictions"]
        right += prediction["label"] == label
        settings[prediction.get("setting", "plain")] += 1

    async with connected() as client:
        began, tasks = time.perf_counter(), []
        for place in range(round(rate * seconds)):
            await asyncio.sleep(max(0.0, began + place / rate - time.perf_counter()))
            tasks.append(asyncio.ensure_future(ask(client, place)))
        answered = len(took)  # within the time of the load
        await asyncio.gather(*tasks)
    took.sort()
    return {
        "sent_per_s": rate, "answered_per_s": answered / seconds, "answered": len(took),
        "lost": lost, "p50_ms": took[len(took) // 2], "p99_ms": took[len(took) * 99 // 100],
        "top1": 100 * right / len(took), "settings": dict(settings),
    }  # fmt: skip


if __name__ == "__main__":
    main()
