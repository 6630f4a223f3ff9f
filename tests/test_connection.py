"""Hosts, what a client sends over a real network, and a stop that answers what was accepted."""

import argparse
import os
import random
import re
import signal
import socket
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

from hvt.cli.flags import add_fields, keywords_of
from hvt.errors import HVTError
from hvt.serve.app import create_app
from hvt.serve.engine import Engine
from hvt.serve.middleware import host_check
from hvt.serve.settings import Settings

IMAGE = encoded(drawn(random.Random(0), (32, 32)), "PNG")
slow = pytest.mark.slow
START = b"POST /predict HTTP/1.1\r\nHost: localhost\r\n"


@pytest.fixture
def app(onnx: Path) -> Callable[..., FastAPI]:
    return lambda **some: create_app(Engine(onnx, Settings(**{"concurrent_batches": 1, **some})))


# ── names, as no other site may read the service ────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("settings", "host", "allowed"),
    [
        ({}, "localhost", True),
        ({}, "app.localhost.", True),
        ({}, "127.0.0.1:8000", True),
        ({}, "[::1]:8000", True),
        ({}, "evil.example", False),
        ({}, "localhost.evil.example", False),
        ({}, "", False),
        ({}, "[::1]evil.example", False),
        ({}, "localhost:80@evil.example", False),
        ({"host": "192.168.1.5"}, "192.168.1.5:80", True),
        ({"host": "0.0.0.0"}, "192.168.1.5", True),
        ({"host": "::"}, "[2001:db8::1]:80", True),
        ({"host": "0.0.0.0"}, "evil.example", False),
        ({"allow_host": ("Hvt.Example", "other")}, "hvt.example:443", True),
        ({"allow_host": ("*",)}, "evil.example", True),
    ],
)
def test_hosts_that_are_allowed(settings: dict, host: str, allowed: bool) -> None:
    assert host_check(Settings(**settings))(host.encode()) == allowed


def test_the_flag_is_given_for_each_name() -> None:
    parser = argparse.ArgumentParser()
    add_fields(parser, Settings)
    args = parser.parse_args(["--allow-host", "example.com", "--allow-host", "x,y.example"])
    with pytest.raises(HVTError, match=re.escape("allow_host='x,y.example' must be a name")):
        Settings(**keywords_of(Settings, args))
    args = parser.parse_args(["--allow-host", "example.com", "--allow-host", "b"])
    assert Settings(**keywords_of(Settings, args)).allow_host == ("example.com", "b")


# ── what a client may send ──────────────────────────────────────────────────────────────────────


def test_headers_are_bounded(app: Callable[..., FastAPI]) -> None:
    with live(app()) as url, Raw(url) as line:
        line.send(START + b"a: " + b"b" * 70_000)
        assert line.status() == 400
        assert "connection: close" in line.head


def test_a_body_that_does_not_come_is_given_up(app: Callable[..., FastAPI]) -> None:
    with live(app(timeout=0.2)) as url, Raw(url) as line:
        assert line.send(START + b"Content-Length: 9\r\n\r\nx").status() == 408
        assert b"within 0.2 seconds" in line.body
        assert line.ended()


@pytest.mark.parametrize("chunked", [False, True])
def test_a_413_reaches_a_client_that_sends_all_before_it_reads(
    app: Callable[..., FastAPI], chunked: bool
) -> None:
    body = bytes(20_000_000)
    request = post(body)
    if chunked:
        coded = b"%x\r\n" % len(body) + body + b"\r\n0\r\n\r\n"
        request = START + b"Transfer-Encoding: chunked\r\n\r\n" + coded
    with live(small := app(max_body=10_000)) as url, Raw(url) as line:
        assert line.send(request).status() == 413
        assert small.state.admission.buffered == 0
        assert line.send(post(IMAGE)).status() == 200  # what was left was not taken for a request


def test_half_an_upload_keeps_nobody_out(app: Callable[..., FastAPI]) -> None:
    with live(app(max_queue=2, max_images=2)) as url:
        half = [Raw(url).send(post(IMAGE)[:-1]) for _ in range(8)]
        with Raw(url) as line:
            assert line.send(post(IMAGE)).status() == 200
        for each in half[:2]:
            assert each.send(IMAGE[-1:]).status() == 200
        for each in half:
            each.sock.close()


def test_connections_above_the_limit_are_answered_with_503(app: Callable[..., FastAPI]) -> None:
    with live(app(limit_concurrency=2)) as url, Raw(url) as first:
        assert first.send(post(IMAGE)).status() == 200
        with Raw(url) as second:
            assert second.send(post(IMAGE)).status() == 503


UPGRADE = "Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABk\r\n"


def test_an_offer_of_http2_is_answered_as_http1(app: Callable[..., FastAPI]) -> None:
    """As Java's HttpClient and `curl --http2` send it, with the body behind it."""
    with live(app()) as url, Raw(url) as line:
        assert line.send(post(IMAGE, UPGRADE)).status() == 200
        assert b'"predictions"' in line.body


# ── stopping ────────────────────────────────────────────────────────────────────────────────────

HANGS = """
import sys, time
from hvt.serve import drain
from hvt.serve.app import create_app
from hvt.serve.engine import Engine
from hvt.serve.server import run
from hvt.serve.settings import Settings

drain.MARGIN = 0.5
app = create_app(Engine(sys.argv[1], Settings(port=0, timeout=0.5, drain=0)))

@app.get("/loop")
async def loop() -> None:
    print("hangs", flush=True)
    time.sleep(600)

run(app)
"""


def test_a_process_told_to_stop_ends_whatever_hangs(onnx: Path) -> None:
    pipe: Any = subprocess.PIPE
    command = [sys.executable, "-c", HANGS, str(onnx)]
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, env=os.environ) as process:
        try:
            assert process.stdout is not None
            match = re.search(r"http://[\d.:]+", process.stdout.readline())
            assert match
            with Raw(match[0]) as line:
                line.send(b"GET /loop HTTP/1.1\r\nHost: localhost\r\n\r\n")
                assert process.stdout.readline() == "hangs\n"
                process.send_signal(signal.SIGTERM)
                _, said = process.communicate(timeout=60)
        finally:
            process.kill()
    assert process.returncode == 1
    assert "in loop" in said  # where it hangs


@pytest.mark.parametrize(
    ("workers", "number"),
    [(1, signal.SIGTERM), (1, signal.SIGINT), pytest.param(2, signal.SIGTERM, marks=slow)],
)
def test_a_stop_turns_healthz_503_first_and_answers_what_was_accepted(
    onnx: Path, workers: int, number: signal.Signals
) -> None:
    with Service(onnx, "--drain", 1, "--workers", workers) as service:
        with Raw(service.url) as half, Raw(service.url) as health:
            half.send(post(IMAGE)[:-1])
            get = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n"
            assert health.send(get).status() == 200
            service.process.send_signal(number)
            while health.send(get).status() == 200:
                threading.Event().wait(0.01)
            assert b"draining" in health.body
            assert "connection: close" in health.head
            with Raw(service.url) as late:  # still welcome
                assert late.send(post(IMAGE)).status() == 200
            while listens(service.port):
                threading.Event().wait(0.01)
            assert half.send(IMAGE[-1:]).status() == 200
        _, said = service.process.communicate(timeout=60)
    assert service.process.returncode == 0
    loaded = workers + (workers > 1)  # once more to check it before workers are started
    assert said.count("loading model.onnx\n") == said.count("warming up\n") == loaded


def listens(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), timeout=60).close()
    except ConnectionRefusedError:
        return False
    return True


def test_every_promise_names_a_test_that_exists() -> None:
    page = Path(__file__).parents[1] / "docs/security.md"
    if not page.exists():
        pytest.skip("a source distribution has no docs/")
    named = set(re.findall(r"`(test_\w+)`", page.read_text(encoding="utf-8")))
    tests = "".join(path.read_text(encoding="utf-8") for path in Path(__file__).parent.glob("*.py"))
    assert named
    assert {name for name in named if f"def {name}(" not in tests} == set()
