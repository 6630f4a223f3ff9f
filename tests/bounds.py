"""A limit on memory and time for reading one hostile file."""

import contextlib
import resource
import signal
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

SECONDS = 60  # a file of a few kB takes milliseconds; the machine may be busy
MEGABYTES = 1000


def _expired(number: int, frame: FrameType | None) -> None:
    raise AssertionError(f"reading took more than {SECONDS} s")


@contextlib.contextmanager
def bounded() -> Iterator[None]:
    """Fail what takes more than 1 GB beyond what the process has, or does not come to an end."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    before = signal.signal(signal.SIGALRM, _expired)
    signal.alarm(SECONDS)
    limit = pages * resource.getpagesize() + MEGABYTES * 2**20
    resource.setrlimit(resource.RLIMIT_AS, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
