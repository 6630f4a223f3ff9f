"""`hvt train --processes N`: the same command in N local processes, started by torchrun."""

from __future__ import annotations

import logging
import os
import signal
import sys
from collections.abc import Sequence

import torch
from torch.distributed import run as torchrun
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

from ..device import find_device
from ..errors import HVTError
from .recipe import Recipe


def launch(recipe: Recipe, words: Sequence[str]) -> int:
    """Run `hvt WORDS` in as many processes as the recipe says; returns the exit code."""
    count = recipe.processes or 1
    if not torch.distributed.is_gloo_available():
        raise HVTError(f"processes={count}: this torch has no gloo, so train in one process")
    if find_device(recipe.device).type != "cpu":
        raise HVTError(f"processes={count} is for the CPU: start one per GPU with torchrun")
    environment = {
        "OMP_NUM_THREADS": str(max(1, torch.get_num_threads() // count)),
        "PYTHONSAFEPATH": "1",  # no module of the working folder is imported
    }
    if sys.platform == "linux":
        environment["GLOO_SOCKET_IFNAME"] = "lo"  # nobody else is to connect
    before = dict(os.environ)
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    flags = ["--standalone", "--local-addr=localhost", f"--nproc-per-node={count}", "-m", "hvt"]
    arguments = torchrun.parse_args([*flags, *words])
    arguments.signals_to_handle = "SIGTERM,SIGINT"  # not SIGHUP, which nohup has it ignore
    logging.disable()  # torch's banner about a process that failed
    os.environ |= environment  # which the processes inherit
    try:
        torchrun.run(arguments)
    except SignalException:
        return 130
    except ChildFailedError as error:
        return max(2, error.get_first_failure()[1].exitcode)  # a signal's is negative
    finally:
        os.environ.clear()
        os.environ |= before
        logging.disable(logging.NOTSET)
        for number, handler in handlers.items():
            signal.signal(number, handler)
    return 0
