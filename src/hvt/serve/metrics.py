"""What a service counts, for Prometheus; of several workers it is their sum."""

from __future__ import annotations

import os
from pathlib import Path

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.multiprocess import MultiProcessCollector, mark_process_dead

SHARED = "PROMETHEUS_MULTIPROC_DIR"
"""The variable that names the folder where workers put their counts; set before the import."""
SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)
SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)


class Metrics:
    """The counts of one application."""

    def __init__(self) -> None:
        # Those of several processes are gathered from their files, not from a registry.
        self._registry = to = None if SHARED in os.environ else CollectorRegistry()
        self.requests = Counter("hvt_requests", "Requests", ["path", "status"], registry=to)
        self.seconds = Histogram(
            "hvt_request_seconds", "Latency of requests", ["path"], buckets=SECONDS, registry=to
        )
        self.images = Counter("hvt_images", "Classified images", registry=to)
        self.settings = Counter(
            "hvt_setting_images", "Classified images by setting", ["setting"], registry=to
        )
        self.batches = Histogram("hvt_batch_size", "Images in a batch", buckets=SIZES, registry=to)
        self.queue = Gauge(
            "hvt_queue_images", "Images waiting", registry=to, multiprocess_mode="livesum"
        )

    def text(self) -> bytes:
        """All counts in Prometheus' text format."""
        if self._registry is not None:
            return generate_latest(self._registry)
        for path in Path(os.environ[SHARED]).glob("gauge_live*.db"):
            pid = int(path.stem.rpartition("_")[2])
            try:
                os.kill(pid, 0)
            except ProcessLookupError:  # a worker that was killed has no images in its queue
                mark_process_dead(pid)
        registry = CollectorRegistry()
        MultiProcessCollector(registry)
        return generate_latest(registry)
