"""Connections are bounded in headers, number and time, and none is reset when the service stops."""

import collections
import concurrent.futures
import threading
from pathlib import Path

import pytest
from hostile import drawn, encoded
from serving import Raw, Service, post

PICTURE = encoded(drawn(__import__("random").Random(0), (32, 32)), "PNG")


# ── stopping ────────────────────────────────────────────────────────────────────────────────────


def ask_until_refused(service: Service, keep_alive: bool, count: collections.Counter[str]) -> None:
    """Requests one after the other, until nobody listens; counts what becomes of each."""
    request = post(PICTURE, "" if keep_alive else "Connection: close\r\n")
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


@pytest.mark.parametrize("workers", [1, 2])
def test_a_service_that_stops_under_load_resets_no_request(onnx: Path, workers: int) -> None:
    count = stop_under_load(onnx, workers)
    assert set(count) == {"200", "refused"}, count


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2])
def test_twenty_stops_under_load_reset_no_request(onnx: Path, workers: int) -> None:
    counts = [stop_under_load(onnx, workers) for _ in range(20)]
    print(f"\n{sum(counts, collections.Counter())}")
    assert all(set(count) == {"200", "refused"} for count in counts), counts
