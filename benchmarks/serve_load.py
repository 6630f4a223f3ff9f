"""What the service holds: throughput beside the bare model, latency at half load, nothing lost.

    python benchmarks/serve_load.py                  # the small built-in model, about six minutes
    python benchmarks/serve_load.py model.onnx --images 8

Everything is on loopback, with `hvt serve` and the client in processes of their own:

- **Saturation.** The bare model, as `hvt bench` times it, and the saturated service take turns; the
  ratio is that of the medians.
- **Half load.** Requests come at random at half the rate of saturation.
- **A worker is killed** among 10,000 requests to two workers. A request that dies with its
  connection is sent again, as the answer to an image does not depend on how often it is asked.
- **The service is told to stop** under load, ten times with one worker and ten with two. Each
  request that was sent must have been answered, until nobody listens any more.
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from PIL import Image, ImageFilter

from hvt.bench.measure import describe, interleaved, portable_command
from hvt.bench.models import open_bench_model
from hvt.deploy.predict import Predictor
from hvt.deploy.runtime import is_onnx
from hvt.files import atomic_write
from hvt.serve.engine import export_to
from hvt.serve.settings import Settings

HERE = Path(__file__).parent
CPU = torch.device("cpu")
DISTINCT = 32  # different requests, sent in turn
TOP = 5


def main() -> None:
    args = parse()
    if args.threads:
        torch.set_num_threads(args.threads)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(args.model) if is_onnx(args.model) else export_to(folder, args.model)
        assert file is not None
        traffic = Traffic(Predictor(file), Path(folder), args.images, args.size)
        report: dict[str, Any] = {
            "command": portable_command(sys.argv),
            "machine": describe(CPU),
            "model": Path(args.model).name,
            "images": f"JPEG, {traffic.size[0]} × {traffic.size[1]} pixels",
            "images_per_request": args.images,
            "connections": args.connections,
            "serve": args.serve,
        }
        report["saturation"] = saturation(file, traffic, args)
        rate = report["saturation"]["requests_per_s"] / 2
        report["half_load"] = half_load(file, traffic, args, rate)
        report["killed_worker"] = killed_worker(file, traffic, args)
        report["told_to_stop"] = [
            told_to_stop(file, traffic, args, workers)
            for workers in (1, 2)
            for _ in range(args.stops)
        ]
    with atomic_write(args.out) as temporary:
        temporary.write_text(json.dumps(report, indent=2, ensure_ascii=False) + "\n")
    if not right(report):
        raise SystemExit("answers were wrong or lost")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Throughput, latency and faithfulness of hvt serve, on loopback.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("model", nargs="?", default="cifar100", help="a checkpoint or an exported file")
    add("--images", type=int, default=1, help="images in one request")
    add("--size", type=int, nargs=2, help="width and height of the images; else the model's")
    add("--connections", type=int, help="requests under way at saturation; 64, or what fits")
    add("--requests", type=int, default=10_000, help="requests while a worker is killed")
    add("--rounds", type=int, default=5, help="turns of the bare model and the saturated service")
    add("--seconds", type=float, default=6, help="of one turn, and five times that at half load")
    add("--stops", type=int, default=10, help="stops under load, for each number of workers")
    add("--batch", type=int, default=16, help="the bare model's batch")
    add("--threads", type=int, help="the bare model's threads; torch's own choice by default")
    add("--serve", nargs=argparse.REMAINDER, default=[], help="flags for hvt serve; the last")
    add("--out", type=Path, default=HERE / "results/serve_load.json", help="the results' file")
    args = parser.parse_args()
    # Half of what a service's queue holds, so that none is refused.
    args.connections = args.connections or min(64, max(1, Settings().queue // 2 // args.images))
    return args


def right(report: dict[str, Any]) -> bool:
    parts = [report["half_load"], report["killed_worker"], *report["told_to_stop"]]
    resets = any(part.get("reset") for part in report["told_to_stop"])
    lost = resets or any(part.get("lost") or part["wrong"] for part in parts)
    return not lost and not report["saturation"]["wrong"]


# ── requests ────────────────────────────────────────────────────────────────────────────────────


class Traffic:
    """Requests as bytes, and the answers that `hvt predict` gives to their images."""

    def __init__(
        self, predictor: Predictor, folder: Path, images: int, size: Sequence[int] | None
    ) -> None:
        height, width = predictor.model.config.image
        self.size = (size[0], size[1]) if size else (width, height)
        self.requests: list[str] = []
        self.expected: list[list[dict[str, float]]] = []
        noise = np.random.default_rng(0)
        for _ in range(DISTINCT):
            files = [self._image(noise, folder / f"{n}.jpg") for n in range(images)]
            answers = predictor([str(file) for file in files])
            self.expected.append([{g.name: g.probability for g in a.top} for a in answers])
            request = _request([file.read_bytes() for file in files])
            self.requests.append(base64.b64encode(request).decode())

    def _image(self, noise: np.random.Generator, path: Path) -> Path:
        """Patches of colour: as easy to decode as a photograph is, not as noise."""
        small = noise.integers(0, 256, (5, 5, 3), dtype=np.uint8)
        large = Image.fromarray(small).resize(self.size, Image.Resampling.BICUBIC)
        large.filter(ImageFilter.SHARPEN).save(path, quality=90)
        return path

    def plan(self, port: int, connections: int, **more: Any) -> dict[str, Any]:
        common = {"count": 10**9, "seconds": 10**9, "retry": False}
        texts = {"requests": self.requests, "expected": self.expected}
        return common | texts | {"port": port, "connections": connections} | more


def _request(images: Sequence[bytes]) -> bytes:
    kind, body = "image/jpeg", images[0]
    if len(images) > 1:
        kind = "multipart/form-data; boundary=hvt"
        head = b'--hvt\r\nContent-Disposition: form-data; name="images"; filename="p"\r\n\r\n'
        body = b"".join(head + image + b"\r\n" for image in images) + b"--hvt--\r\n"
    lines = (
        f"POST /predict?top={TOP} HTTP/1.1",
        "Host: localhost",
        f"Content-Type: {kind}",
        f"Content-Length: {len(body)}",
    )
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


class Client:
    """The client's process; `result` waits for its end."""

    def __init__(self, plan: dict[str, Any]) -> None:
        command = [sys.executable, str(HERE / "serve_client.py")]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(plan).encode())
        self.process.stdin.close()

    def result(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        said = self.process.stdout.read()
        if self.process.wait():
            raise SystemExit("the client failed")
        return json.loads(said)


# ── the service ─────────────────────────────────────────────────────────────────────────────────


class Service:
    """`hvt serve` in a process of its own."""

    def __init__(self, file: Path, *flags: object) -> None:
        command = [sys.executable, "-m", "hvt", "serve", str(file), "--port", "0"]
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(
            [*command, *map(str, flags)], stdout=pipe, stderr=pipe, text=True
        )
        assert self.process.stdout is not None
        said = self.process.stdout.readline()
        match = re.search(r":(\d+) ", said)
        if match is None:
            raise SystemExit(f"hvt serve did not start: {said}{self.process.communicate()[1]}")
        self.port = int(match[1])

    def cpu(self) -> float:
        """Seconds of processor time so far, with the workers'."""
        one = psutil.Process(self.process.pid)
        times = [each.cpu_times() for each in (one, *one.children(recursive=True))]
        return sum(t.user + t.system for t in times)

    def workers(self) -> list[psutil.Process]:
        result = psutil.Process(self.process.pid).children()
        return [each for each in result if "spawn_main" in " ".join(each.cmdline())]

    def stop(self) -> dict[str, Any]:
        """Tell it to stop; its exit code and what it says it did."""
        self.process.send_signal(signal.SIGTERM)
        _, said = self.process.communicate(timeout=120)
        counts = re.findall(r"stopped: (\d+) requests accepted, (\d+) answered", said)
        return {
            "exit_code": self.process.returncode,
            "accepted": sum(int(accepted) for accepted, _ in counts),
            "answered_by_service": sum(int(answered) for _, answered in counts),
        }


@contextlib.contextmanager
def running(file: Path, *flags: object) -> Iterator[Service]:
    service = Service(file, *flags)
    try:
        yield service
    finally:
        if service.process.poll() is None:
            service.stop()


# ── what is measured ────────────────────────────────────────────────────────────────────────────


def saturation(file: Path, traffic: Traffic, args: argparse.Namespace) -> dict[str, Any]:
    bare = open_bench_model(str(file), "onnx", CPU, Path()).call(args.batch, CPU)
    times: dict[str, list[float]] = {}
    rounds: list[dict[str, Any]] = []
    with running(file, *args.serve) as service:
        for turn in range(args.rounds + 1):
            before = service.cpu()
            plan = traffic.plan(service.port, args.connections, seconds=args.seconds)
            result = Client(plan).result()
            result["service_cpu_s"] = service.cpu() - before
            if turn:  # the first warms up
                interleaved({"bare": bare}, CPU, turn, args.seconds / 2, times)
                rounds.append(result)
            show("saturation", result)
    bare_rate = args.batch / statistics.median(times["bare"])
    rate = statistics.median(result["images_per_s"] for result in rounds)
    print(f"bare {bare_rate:.0f} images/s, service {rate:.0f}: {rate / bare_rate:.2f}", flush=True)
    return {
        "bare_images_per_s": bare_rate,
        "bare_threads": torch.get_num_threads(),
        "images_per_s": rate,
        "requests_per_s": statistics.median(result["requests_per_s"] for result in rounds),
        "ratio": rate / bare_rate,
        "wrong": sum(result["wrong"] for result in rounds),
        "rounds": rounds,
    }


def half_load(
    file: Path, traffic: Traffic, args: argparse.Namespace, rate: float
) -> dict[str, Any]:
    with running(file, *args.serve) as service:
        Client(traffic.plan(service.port, args.connections, seconds=args.seconds / 2)).result()
        plan = traffic.plan(
            service.port, args.connections, seconds=5 * args.seconds, rate=rate, retry=True
        )
        result = Client(plan).result()
    show("half load", result)
    return {"rate": rate, **result, "lost": result["sent"] - result["answered"]}


def killed_worker(file: Path, traffic: Traffic, args: argparse.Namespace) -> dict[str, Any]:
    """All requests to two workers, of which one is killed when about a third is answered."""
    with running(file, *args.serve, "--workers", 2) as service:
        plan = traffic.plan(service.port, 16, count=args.requests, retry=True)
        client = Client(plan)
        victim = service.workers()[0]
        while answered(service.port) < args.requests * args.images / 3:
            time.sleep(0.2)
        victim.kill()
        result = client.result()
        workers = len(service.workers())
        stopped = service.stop()
    show("killed worker", result)
    lost = result["sent"] - result["answered"]
    return {**result, "lost": lost, "workers_after": workers, "exit_code": stopped["exit_code"]}


def answered(port: int) -> int:
    """Images so far, by the service's own metrics."""
    with contextlib.suppress(OSError):
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as response:
            match = re.search(rb"^hvt_images_total (\S+)$", response.read(), re.MULTILINE)
        return int(float(match[1])) if match else 0
    return 0


def told_to_stop(
    file: Path, traffic: Traffic, args: argparse.Namespace, workers: int
) -> dict[str, Any]:
    """Stopped under load: each request that was sent must have been answered, none reset."""
    service = Service(file, *args.serve, "--workers", workers)
    client = Client(traffic.plan(service.port, 32, seconds=600))
    stopped: dict[str, Any] = {}
    timer = threading.Timer(1 + args.seconds / 6, lambda: stopped.update(service.stop()))
    timer.start()
    result = client.result()
    timer.join()
    show("told to stop", result | stopped)
    lost = stopped["accepted"] - result["answered"]
    return {"workers": workers, **result, **stopped, "lost": lost}


def show(what: str, found: dict[str, Any]) -> None:
    shown = {k: round(v, 2) if isinstance(v, float) else v for k, v in found.items()}
    print(f"{what}: {shown}", flush=True)


if __name__ == "__main__":
    os.environ.setdefault("PYTHONWARNINGS", "ignore")
    main()
