"""Connections are bounded in headers, number and time, and none is reset when the service stops."""

import collections
import concurrent.futures
import json
import os
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI
from hostile import drawn, encoded
from serving import Raw, Service, live, post

from hvt.serve.app import create_app
from hvt.serve.settings import Settings

IMAGE = encoded(drawn(random.Random(0), (32, 32)), "PNG")
START = b"POST /predict HTTP/1.1\r\nHost: localhost\r\n"


@pytest.fixture
def app(onnx: Path) -> Callable[..., FastAPI]:
    return lambda **settings: create_app(Settings(**{"runs": 1, **settings}), onnx)


# ── what a client may send ──────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("sent", "words"),
    [
        (START + b"a: b\r\n" * 100, "more than the 20 headers"),
        (START + b"a: " + b"b" * 5000 + b"\r\n\r\n", "more than the 4096 bytes"),
        (START + b"a" * 5000, "more than the 4096 bytes"),
        (b"GET /" + b"a" * 5000 + b" HTTP/1.1\r\n\r\n", "more than the 4096 bytes"),
    ],
)
def test_headers_are_bounded(app: Callable[..., FastAPI], sent: bytes, words: str) -> None:
    with live(app(max_header_bytes=4096, max_header_count=20)) as url, Raw(url) as line:
        line.send(sent)
        for _ in range(300):  # what is endless goes on, as long as somebody takes it
            line.send(b"c" * 4096)
        assert line.status() == 431
        assert words in json.loads(line.body)["detail"]
        assert "connection: close" in line.head
        assert line.ended()


def test_trailers_are_headers_too(app: Callable[..., FastAPI]) -> None:
    chunked = b"Transfer-Encoding: chunked\r\n\r\n1\r\nx\r\n0\r\n"
    with live(app(max_header_count=20)) as url, Raw(url) as line:
        line.send(START + chunked + b"a: b\r\n" * 100)
        assert line.status() == 431


@pytest.mark.parametrize(
    ("sent", "status"), [(START, 408), (START + b"Content-Length: 9\r\n\r\nx", 408), (b"", 0)]
)
def test_what_does_not_come_is_given_up(
    app: Callable[..., FastAPI], sent: bytes, status: int
) -> None:
    with live(app(header_timeout=0.2, timeout=0.2)) as url, Raw(url) as line:
        assert line.send(sent).status() == status
        assert status == 0 or "0.2 seconds" in json.loads(line.body)["detail"]
        assert status == 0 or line.ended()


def test_what_is_not_http_is_refused_after_what_was(app: Callable[..., FastAPI]) -> None:
    with live(app()) as url, Raw(url) as line:
        assert line.send(post(IMAGE) + b"nonsense\r\n\r\n").status() == 200
        assert line.ended()
        with Raw(url) as other:
            assert other.send(b"nonsense\r\n\r\n").status() == 400
            assert "HTTP" in json.loads(other.body)["detail"]


def test_half_open_uploads_take_no_place_in_the_queue(app: Callable[..., FastAPI]) -> None:
    with live(app(queue=2, max_images=2)) as url:
        half = [Raw(url).send(post(IMAGE)[:-1]) for _ in range(8)]
        with Raw(url) as line:
            assert line.send(post(IMAGE)).status() == 200
        for each in half[:2]:
            assert each.send(IMAGE[-1:]).status() == 200
        for each in half:
            each.sock.close()


def test_the_connection_that_waits_longest_gives_way(app: Callable[..., FastAPI]) -> None:
    with live(app(max_connections=2)) as url, Raw(url) as first, Raw(url) as second:
        first.send(START)
        assert second.send(post(IMAGE)).status() == 200
        with Raw(url) as third:
            assert third.send(post(IMAGE)).status() == 200
        assert first.status() == 408
        assert "others need its connection" in first.body.decode()
        assert first.ended()


@pytest.mark.parametrize("chunked", [False, True])
def test_a_413_reaches_a_client_that_sends_all_before_it_reads(
    app: Callable[..., FastAPI], chunked: bool
) -> None:
    body = bytes(20_000_000)
    request = post(body)
    if chunked:
        coded = b"%x\r\n" % len(body) + body + b"\r\n0\r\n\r\n"
        request = START + b"Transfer-Encoding: chunked\r\n\r\n" + coded
    with live(app(max_body=10_000)) as url, Raw(url) as line:
        assert line.send(request).status() == 413
        assert line.ended()


# ── the process ends ────────────────────────────────────────────────────────────────────────────

HANGS = """
import sys, time
from hvt.serve.app import create_app
from hvt.serve.server import run
from hvt.serve.settings import Settings

app = create_app(Settings(port=0, timeout=0.5, drain=0), sys.argv[1])

@app.get("/thread")
async def thread() -> None:
    app.state.inference._pool.submit(time.sleep, 600)  # as a decoder whose client has gone

@app.get("/loop")
async def loop() -> None:
    time.sleep(600)

run(app)
"""


@pytest.mark.parametrize("where", [pytest.param("thread", marks=pytest.mark.slow), "loop"])
def test_a_process_told_to_stop_ends_whatever_hangs(onnx: Path, where: str) -> None:
    pipe: Any = subprocess.PIPE
    command = [sys.executable, "-c", HANGS, str(onnx)]
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, env=os.environ) as process:
        try:
            assert process.stdout is not None
            url = process.stdout.readline().split()[3]
            with Raw(url) as line:
                line.send(f"GET /{where} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
                threading.Event().wait(0.3)
                process.send_signal(signal.SIGTERM)
                _, said = process.communicate(timeout=60)
        finally:
            process.kill()
    assert process.returncode == {"thread": 0, "loop": 1}[where], said
    assert "stopped: 1 requests accepted" in said


# ── stopping ────────────────────────────────────────────────────────────────────────────────────


def ask_until_refused(service: Service, keep_alive: bool, count: collections.Counter[str]) -> None:
    """Requests one after the other, until nobody listens; counts what becomes of each."""
    request = post(IMAGE, "" if keep_alive else "Connection: close\r\n")
    line: Raw | None = None
    while True:
        if line is None:
            try:
                line = Raw(service.url)
            except ConnectionRefusedError:
                count["refused"] += 1
                return
        try:
            status = line.send(request).status()
        except (ConnectionResetError, BrokenPipeError):
            status = 0
        count[str(status) if status else "reset"] += 1
        if status != 200 or "connection: close" in line.head:
            line.sock.close()
            line = None


def stop_under_load(onnx: Path, workers: int, clients: int = 16) -> collections.Counter[str]:
    count: collections.Counter[str] = collections.Counter()
    flags = ("--drain", 0, "--workers", workers, "--max-wait-ms", 0)
    with Service(onnx, *flags) as service, concurrent.futures.ThreadPoolExecutor(clients) as pool:
        asked = [
            pool.submit(ask_until_refused, service, number % 2 == 0, count)
            for number in range(clients)
        ]
        while count["200"] < 5 * clients:
            threading.Event().wait(0.01)
        code, said = service.stop()
        for each in asked:
            each.result()
    assert code == 0, said
    assert count["refused"] == clients
    return count


@pytest.mark.parametrize("workers", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_service_that_stops_under_load_resets_no_request(onnx: Path, workers: int) -> None:
    count = stop_under_load(onnx, workers)
    assert set(count) == {"200", "refused"}, count


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2])
def test_twenty_stops_under_load_reset_no_request(onnx: Path, workers: int) -> None:
    counts = [stop_under_load(onnx, workers) for _ in range(20)]
    print(f"\n{sum(counts, collections.Counter())}")
    assert all(set(count) == {"200", "refused"} for count in counts), counts
