"""A client that costs little: prebuilt requests, one epoll loop, answers checked afterwards.

    python benchmarks/serve_client.py < plan.json > result.json

`serve_load.py` starts it in a process of its own; it needs nothing but Python. On few cores what a
client takes is missing to the service, so it does no more than a socket asks for.
"""

from __future__ import annotations

import base64
import contextlib
import json
import random
import selectors
import socket
import sys
import time
from collections import Counter, deque
from typing import Any

PATIENCE = 200  # times that one request is tried
PAUSE = 0.05  # seconds before trying again where nobody listens


class Load:
    """Requests over some connections: as fast as they are answered, or at a given rate.

    A request that was lost with its connection is sent again if the plan says `retry`. Else the
    client goes on until nobody listens any more: a request that is not answered counts as `reset`.
    """

    def __init__(self, plan: dict[str, Any]) -> None:
        self.address = ("127.0.0.1", plan["port"])
        self.requests = [base64.b64decode(text) for text in plan["requests"]]
        self.expected: list[list[dict[str, float]]] = plan["expected"]
        self.count: int = plan["count"]
        self.seconds: float = plan["seconds"]
        self.rate: float | None = plan.get("rate")
        self.retry: bool = plan.get("retry", False)
        self.selector = selectors.DefaultSelector()
        self.idle: deque[_Line] = deque(_Line() for _ in range(plan["connections"]))
        self.again: deque[tuple[int, float]] = deque()
        self.answers: list[tuple[int, bytes]] = []
        self.latencies: list[float] = []
        self.outcomes: Counter[str] = Counter()
        self.sent = 0
        self.open = 0
        self.stopped = False

    def run(self) -> dict[str, Any]:
        stream = random.Random(0)
        start = due = time.perf_counter()
        end = start + self.seconds
        while True:
            now = time.perf_counter()
            over = self.stopped or now >= end or self.sent >= self.count
            if over and not self.open and not self.again:
                break
            while self.idle and self.again and not self.stopped:
                self._send(self.idle.popleft(), *self.again.popleft())
            while self.idle and not over and (self.rate is None or now >= due):
                self._send(
                    self.idle.popleft(), self.sent % len(self.requests), due if self.rate else now
                )
                self.sent += 1
                if self.rate is not None:
                    due += stream.expovariate(self.rate)  # strangers come at random
                over = self.stopped or self.sent >= self.count
            if self.stopped:
                self.again.clear()
            wait = 0.05 if self.rate is None or over else max(0.0, min(0.05, due - now))
            for key, _ in self.selector.select(wait):
                self._receive(key.data)
        return self._result(time.perf_counter() - start)

    def _send(self, line: _Line, which: int, since: float) -> None:
        line.which, line.since, line.got = which, since, b""
        self.open += 1
        try:
            if line.sock is None:
                line.sock = socket.create_connection(self.address, timeout=30)
                line.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                self.selector.register(line.sock, selectors.EVENT_READ, line)
            line.sock.sendall(self.requests[which])
        except OSError as error:
            refused = isinstance(error, ConnectionRefusedError)
            self._lost(line, "refused" if refused else "reset")

    def _receive(self, line: _Line) -> None:
        assert line.sock is not None
        try:
            data = line.sock.recv(262_144)
        except OSError:
            data = b""
        if not data:
            self._lost(line, "reset") if line.which >= 0 else self._close(line)
            return
        line.got += data
        head = line.got.find(b"\r\n\r\n")
        if head < 0:
            return
        header = line.got[:head].lower()
        place = header.find(b"content-length: ") + 16
        length = int(header[place : header.find(b"\r", place) % (len(header) + 1)])
        if len(line.got) < head + 4 + length:
            return
        self.latencies.append(time.perf_counter() - line.since)
        self.outcomes[f"status {header[9:12].decode()}"] += 1
        self.answers.append((line.which, line.got[head + 4 :]))
        line.which = -1
        self.open -= 1
        if b"connection: close" in header:
            self._close(line)
        self.idle.append(line)

    def _lost(self, line: _Line, how: str) -> None:
        """A request whose connection ended before its answer."""
        which, since, line.which = line.which, line.since, -1
        self._close(line)
        self.open -= 1
        self.idle.append(line)
        self.outcomes[how] += 1
        if not self.retry:
            self.stopped = self.stopped or how == "refused"
        elif self.outcomes[how] < PATIENCE:
            self.again.append((which, since))
            if how == "refused":
                time.sleep(PAUSE)
        else:
            self.outcomes["given up"] += 1

    def _close(self, line: _Line) -> None:
        if line.sock is not None:
            with contextlib.suppress(KeyError):
                self.selector.unregister(line.sock)
            line.sock.close()
            line.sock = None

    def _result(self, taken: float) -> dict[str, Any]:
        good = [right(body, self.expected[which]) for which, body in self.answers]
        answered = zip(self.answers, good, strict=True)
        images = sum(len(self.expected[which]) for (which, _), is_right in answered if is_right)
        ordered = sorted(self.latencies) or [0.0]
        share = lambda part: 1e3 * ordered[min(len(ordered) - 1, int(part * len(ordered)))]  # noqa: E731
        return {
            "sent": self.sent,
            "answered": len(self.answers),
            "wrong": good.count(False),
            "seconds": taken,
            "requests_per_s": len(self.answers) / taken,
            "images_per_s": images / taken,
            "p50_ms": share(0.5),
            "p90_ms": share(0.9),
            "p99_ms": share(0.99),
            "max_ms": 1e3 * ordered[-1],
            "client_cpu_s": time.process_time(),
            **self.outcomes,
        }


class _Line:
    """One connection and the request that is on it."""

    def __init__(self) -> None:
        self.sock: socket.socket | None = None
        self.which, self.since, self.got = -1, 0.0, b""


def right(body: bytes, expected: list[dict[str, float]]) -> bool:
    """Whether an answer names the expected classes with their probabilities, best first."""
    try:
        answers = json.loads(body)["answers"]
    except (ValueError, KeyError):
        return False
    return len(answers) == len(expected) and all(
        list(known) == [guess["name"] for guess in answer["top"]]
        and all(abs(known[g["name"]] - g["probability"]) < 1e-4 for g in answer["top"])
        for answer, known in zip(answers, expected, strict=True)
    )


if __name__ == "__main__":
    json.dump(Load(json.load(sys.stdin)).run(), sys.stdout)
