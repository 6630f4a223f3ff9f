"""How OpenMP's threads wait for each other; torch reads this when it is imported."""

from __future__ import annotations

import os

SPIN = 5000
"""Turns of libgomp's loop, about a tenth of a millisecond: as long as Python takes between two
operations of a small model."""


def wait_briefly() -> None:
    """Let waiting threads spin for a moment and then sleep, unless the environment says how.

    Threads that spin on collapse beside another busy process: they use up the time that the thread
    they wait for needs (measured in docs/evidence/speed.md). Other runtimes sleep at once.
    """
    if "OMP_WAIT_POLICY" not in os.environ and "GOMP_SPINCOUNT" not in os.environ:
        os.environ.update(OMP_WAIT_POLICY="PASSIVE", GOMP_SPINCOUNT=str(SPIN))
