"""What a service counts, for Prometheus; of several workers it is their sum."""

from __future__ import annotations

import os

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.multiprocess import MultiProcessCollector

SHARED = "PROMETHEUS_MULTIPROC_DIR"
"""The variable that names the folder where workers put their counts; set before the import."""
SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)
SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)


class Metrics:
    """The counts of one application."""

    def __init__(self) -> None:
        # Those of several processes are gathered from their files, not from a registry.
        self._registry = None if SHARED in os.environ else CollectorRegistry()
        to = self._registry
        self.requests = Counter(
            "hvt_requests", "Requests that were answered", ["path", "status"], registry=to
        )
        self.seconds = Histogram(
            "hvt_request_seconds", "Time of a request", ["path"], buckets=SECONDS, registry=to
        )
        self.images = Counter("hvt_images", "Images that were classified", registry=to)
        self.batches = Histogram(
            "hvt_batch_images", "Images that shared a batch", buckets=SIZES, registry=to
        )
        self.queue = Gauge(
            "hvt_queue_images",
            "Images that were accepted and not answered yet",
            multiprocess_mode="livesum",
            registry=to,
        )
        self._children: dict[tuple[str, int], tuple[Counter, Histogram]] = {}

    def count(self, path: str, status: int, seconds: float) -> None:
        """One request that was answered."""
        children = self._children.get((path, status))
        if children is None:
            children = self.requests.labels(path, str(status)), self.seconds.labels(path)
            self._children[path, status] = children
        children[0].inc()
        children[1].observe(seconds)

    def text(self) -> bytes:
        """All counts in Prometheus' text format."""
        registry = self._registry
        if registry is None:
            registry = CollectorRegistry()
            MultiProcessCollector(registry)
        return generate_latest(registry)
