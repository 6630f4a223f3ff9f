"""A running service for tests: in a process of its own, or in a thread of this one."""

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from typing import Any

import uvicorn
from fastapi import FastAPI

from hvt.serve.server import _config


@contextlib.contextmanager
def live(app: FastAPI) -> Iterator[str]:
    """The application behind a network in a thread, and its address."""
    with socket.create_server(("127.0.0.1", 0), backlog=100) as sock:
        server = uvicorn.Server(_config(app, app.state.settings))
        thread = threading.Thread(target=server.run, args=[[sock]], daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{sock.getsockname()[1]}"
        finally:
            while not server.started:
                thread.join(0.01)
            server.should_exit = True
            thread.join()


class Service:
    """`hvt serve` in a process of its own."""

    def __init__(self, *words: object) -> None:
        command = [sys.executable, "-m", "hvt", "serve", *map(str, words), "--port", "0"]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
        )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        match = re.search(r"http://127\.0\.0\.1:(\d+)", line)
        assert match, (line, self.process.stderr and self.process.stderr.read())
        self.port = int(match[1])
        self.url = match[0]

    def ask(self, content: bytes) -> dict[str, Any]:
        request = urllib.request.Request(f"{self.url}/predict?top=3", content, {"content-type": ""})
        with urllib.request.urlopen(request, timeout=60) as response:
            return json.load(response)["predictions"][0]

    def stop(self) -> tuple[int, str]:
        """Its exit code and what it said on the way."""
        self.process.send_signal(signal.SIGTERM)
        _, said = self.process.communicate(timeout=60)
        return self.process.returncode, said

    def __enter__(self) -> "Service":
        return self

    def __exit__(self, *error: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.communicate()


class Raw:
    """A connection that sends bytes as they are."""

    def __init__(self, url: str) -> None:
        self.sock = socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2])), timeout=60)

    def send(self, data: bytes) -> "Raw":
        self.sock.sendall(data)
        return self

    def status(self) -> int:
        """Of the next response, or 0 if the connection ends without one."""
        got = b""
        while b"\r\n\r\n" not in got:
            data = self.sock.recv(65536)
            if not data:
                return 0
            got += data
        head, _, body = got.partition(b"\r\n\r\n")
        length = re.search(rb"content-length: (\d+)", head)
        while length is None or len(body) < int(length[1]):
            data = self.sock.recv(65536)
            assert data or length is None, "an answer was cut off"
            if not data:
                break
            body += data
        self.head, self.body = head.decode().lower(), body
        return int(head.split()[1])

    def ended(self) -> bool:
        """Whether the server has closed it, without a reset."""
        return self.sock.recv(1) == b""

    def __enter__(self) -> "Raw":
        return self

    def __exit__(self, *error: object) -> None:
        self.sock.close()


def post(content: bytes, headers: str = "", path: str = "/predict") -> bytes:
    """A request in full."""
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(content)}\r\n{headers}"
    return f"{head}\r\n".encode() + content
