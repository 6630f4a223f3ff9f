"""`hvt train --processes N`: the same command in N local processes, started by torch's launcher."""

from __future__ import annotations

import logging
import signal
import sys
import uuid
from collections.abc import Sequence

import torch
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from ..device import find_device
from ..errors import HVTError
from .recipe import Recipe

# A started process finds modules where this one does, and never in the working folder; 3.10 has no
# -P, and -I leaves more out. Torch sends it SIGTERM once another has failed: it has five seconds to
# print its own error.
_SAFE = "-P" if sys.version_info >= (3, 11) else "-I"
_START = """\
import os, signal, sys
signal.signal(signal.SIGTERM, lambda *_: signal.alarm(5))
os.environ.update({environment!r})
sys.path[:] = {path!r}
from hvt.__main__ import main
sys.exit(main())
"""


def launch(recipe: Recipe, words: Sequence[str]) -> int:
    """Run `hvt WORDS` in as many processes as the recipe says; returns the exit code."""
    count = recipe.processes or 1
    if not torch.distributed.is_gloo_available():
        raise HVTError(f"processes={count}: this torch has no gloo, so train in one process")
    if find_device(recipe.device).type != "cpu":
        raise HVTError(f"processes={count} is for the CPU: start one for each GPU by torchrun")
    environment = {"OMP_NUM_THREADS": str(max(1, torch.get_num_threads() // count))}
    if sys.platform == "linux":
        environment["GLOO_SOCKET_IFNAME"] = "lo"  # nobody else is to connect
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=count,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        local_addr="localhost",
        max_restarts=0,
    )
    config.signals_to_handle = "SIGTERM,SIGINT"  # not SIGHUP, which nohup has it ignore
    start = _START.format(environment=environment, path=sys.path)
    logging.disable()  # torch's banner about a process that failed
    try:
        elastic_launch(config, sys.executable)(_SAFE, "-c", start, *words)
    except SignalException:
        return 130
    except ChildFailedError as error:
        return max(2, error.get_first_failure()[1].exitcode)  # a signal's is negative
    finally:
        logging.disable(logging.NOTSET)
        for number, handler in handlers.items():
            signal.signal(number, handler)
    return 0
