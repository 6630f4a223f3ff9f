"""What a service may be told: where it listens, how it batches, and its limits."""

from __future__ import annotations

import functools
import os
import re
from dataclasses import dataclass

from ..errors import HVTError
from ..fields import check_values, field

MAX_PIXELS = 178_956_970  # Pillow itself raises an error above
NAME = re.compile(r"\*|[a-z0-9_.-]+|[0-9a-f:.]+", re.I)  # any, a host's name, an IPv6 address

_count = functools.partial(field, ge=1)


@dataclass(frozen=True)
class Settings:
    """Limits and sizes of a service; each worker has its own queue and threads."""

    host: str = field("127.0.0.1", "address to listen on; 0.0.0.0 for all interfaces")
    allow_host: tuple[str, ...] = field((), "another host name to allow; repeatable; * allows all")
    port: int = field(8000, "port to listen on; 0 for a free one", ge=0, le=65535)
    workers: int = _count(1, "worker processes")
    max_batch_size: int = _count(16, "maximum images per batch")
    max_wait_ms: float = field(
        2.0, "milliseconds that an image waits for its batch to fill", ge=0, le=1000
    )
    threads: int = _count(1, "ONNX Runtime threads per batch")
    concurrent_batches: int = field(0, "concurrent batches per worker; 0 for one per core", ge=0)
    decoders: int = _count(2, "images decoded concurrently per worker")
    device: str = field("auto", "device: auto, cpu or cuda")
    elastic: bool = field(False, "use smaller settings of an elastic model under load")
    elastic_queue: int = _count(8, "elastic: waiting images per step to a smaller setting", ge=2)
    elastic_hold_ms: float = field(
        500.0, "elastic: milliseconds of a short queue before a larger setting", ge=0
    )
    min_gflops: float = field(0.0, "elastic: smallest setting to use, in GFLOPs", ge=0)
    max_gflops: float = field(1e6, "elastic: largest setting to use, in GFLOPs", gt=0)
    max_body: int = _count(20_000_000, "maximum bytes of a request body")
    max_pixels: int = _count(50_000_000, "maximum pixels of an image", le=MAX_PIXELS)
    max_images: int = _count(64, "maximum images per request")
    max_queue: int = _count(256, "maximum pending images per worker")
    max_buffered: int = _count(500_000_000, "maximum bytes of pending request bodies per worker")
    limit_concurrency: int = _count(1000, "maximum connections per worker; more get a 503")
    timeout: float = field(
        30.0, "seconds per request, from its headers to the response", ge=0.001, le=86400
    )
    timeout_keep_alive: int = _count(75, "seconds until an idle connection is closed")
    decode_timeout: float = field(10.0, "maximum seconds to decode an image", ge=0.001, le=86400)
    drain: float = field(
        0.5, "seconds to keep accepting requests after SIGTERM or Ctrl-C", ge=0, le=3600
    )

    def __post_init__(self) -> None:
        if isinstance(self.allow_host, list):  # as a repeated flag gives it
            object.__setattr__(self, "allow_host", tuple(self.allow_host))
        check_values(self)
        for name in self.allow_host:
            if not NAME.fullmatch(name):
                raise HVTError(
                    f"allow_host={name!r} must be a name such as images.example.org, without a "
                    "scheme and a port, or * for all"
                )
        if self.workers > 1 and os.name == "nt":
            raise HVTError(f"workers={self.workers} must be 1 on Windows")
        for part, whole in (("max_images", "max_queue"), ("max_body", "max_buffered")):
            if getattr(self, part) > getattr(self, whole):
                raise HVTError(
                    f"{part}={getattr(self, part)} must be at most {whole}="
                    f"{getattr(self, whole)}, or a full request could never be accepted"
                )

    @property
    def batch_threads(self) -> int:
        """Batches that a worker runs at once."""
        return self.concurrent_batches or max(1, cores() // (self.workers * self.threads))


def cores() -> int:
    """The cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
