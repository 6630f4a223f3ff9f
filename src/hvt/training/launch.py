"""`hvt train --processes N`: the same command in N local processes, started by torch's launcher."""

from __future__ import annotations

import logging
import signal
import sys
import tempfile
import uuid
from collections.abc import Sequence
from pathlib import Path

import torch
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException, Std
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
    """Run `hvt WORDS` in as many processes as the recipe says; returns the exit code.

    What they print on stderr is printed at the end, once where several print the same, and that of
    the first process last: it has the command that resumes.
    """
    count = recipe.processes or 1
    if not torch.distributed.is_gloo_available():
        raise HVTError(f"processes={count}: this torch has no gloo, so train in one process")
    if find_device(recipe.device).type != "cpu":
        raise HVTError(f"processes={count} is for the CPU: start one for each GPU by torchrun")
    environment = {"OMP_NUM_THREADS": str(max(1, torch.get_num_threads() // count))}
    if sys.platform == "linux":
        environment["GLOO_SOCKET_IFNAME"] = "lo"  # nobody else is to connect
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    with tempfile.TemporaryDirectory() as folder:
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=count,
            logs_specs=DefaultLogsSpecs(folder, redirects=Std.ERR),
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
            return _exit_code(error)
        finally:
            logging.disable(logging.NOTSET)
            for number, handler in handlers.items():
                signal.signal(number, handler)
            _print_errors(Path(folder))
    return 0


def _exit_code(error: ChildFailedError) -> int:
    """That of the process that failed first; prints which ones a signal has ended."""
    for rank, failure in error.failures.items():
        if failure.exitcode < 0 and failure.signal_name() not in ("SIGTERM", "SIGALRM"):
            print(
                f"hvt: process {rank} was ended by {failure.signal_name()}, as the system does "
                "where memory is short",
                file=sys.stderr,
            )
    code = error.get_first_failure()[1].exitcode
    return code if code > 0 else 2


def _print_errors(folder: Path) -> None:
    texts = [path.read_text(errors="replace") for path in sorted(folder.glob("*/*/*/stderr.log"))]
    printed: dict[str, str] = {}
    for text in texts:
        printed.setdefault(text.partition(": ")[2], text)  # after "hvt (1): "
    sys.stderr.write("".join(reversed(printed.values())))
