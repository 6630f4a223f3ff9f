"""Distributed data parallel (DDP): this process's rank, and what it exchanges with the others.

A single process without torchrun has rank 0 in a world of 1, and the same code runs.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from torch.distributed.rendezvous import rendezvous

from .device import find_device
from .errors import HVTError

COLLECTIVE_TIMEOUT = timedelta(hours=12)
"""How long processes wait for the main one, which ranks and measures some things alone: torch's ten
minutes would end that. One that dies is noticed by torchrun, whatever this is."""


_groups = itertools.count(1)
"""A number for each group that is joined: all processes join them in one order."""


class ConnectionLostError(HVTError):
    """Another process of the group has ended."""


@dataclass(frozen=True)
class DistributedContext:
    """The processes that train together: this one's rank, and collectives over all of them."""

    rank: int = 0
    world_size: int = 1

    @property
    def is_main_process(self) -> bool:
        """Whether this is rank 0, the one that prints and writes files."""
        return self.rank == 0

    def console(self, console: Console | None = None) -> Console:
        """This one, or a new one, in the main process; in the others one that prints nothing."""
        return (console or Console()) if self.is_main_process else Console(quiet=True)

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """The sum over all ranks, in place."""
        if self.world_size > 1:
            dist.all_reduce(tensor)
        return tensor

    def any(self, device: torch.device, flag: bool) -> bool:
        """Whether a flag is set on any rank."""
        own = torch.tensor(float(flag), device=collective_device(device))
        return self.all_reduce(own).item() > 0

    def broadcast(self, value: Any) -> Any:
        """The main process's value, on every rank."""
        if self.world_size == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=0)
        return box[0]

    def all_gather(self, value: Any) -> list[Any]:
        """The values of all ranks in their order, on every rank."""
        if self.world_size == 1:
            return [value]
        values = [None] * self.world_size
        dist.all_gather_object(values, value)
        return values

    def barrier(self) -> None:
        """Wait until every rank has reached this point."""
        if self.world_size > 1:
            dist.barrier()


def collective_device(device: torch.device) -> torch.device:
    """Where a tensor must lie to be reduced: NCCL takes CUDA's, gloo takes the CPU's."""
    return device if device.type == "cuda" else torch.device("cpu")


def init_process_group(device: str) -> tuple[DistributedContext, torch.device]:
    """Join the process group that torchrun started, if any; choose this rank's device."""
    try:
        world_size = int(os.environ.get("WORLD_SIZE", "1"))
        local_rank = int(os.environ.get("LOCAL_RANK", "0"))
        several = world_size > 1 and not dist.is_initialized()
        group = next(rendezvous("env://")) if several else None
    except ValueError as error:
        how = "start several processes with torchrun, or unset WORLD_SIZE"
        raise HVTError(f"{how}: {error}") from error
    place = find_device(device, local_rank)
    if group is not None:
        store, rank, _ = group
        # torch finds the addresses of a group that has ended in the store if it joins another.
        store = dist.PrefixStore(f"hvt-{next(_groups)}", store)
        if place.type == "cuda":
            torch.cuda.set_device(place)
        backend = "nccl" if place.type == "cuda" else "gloo"
        dist.init_process_group(
            backend, store=store, rank=rank, world_size=world_size, timeout=COLLECTIVE_TIMEOUT
        )
    rank = dist.get_rank() if world_size > 1 else 0
    return DistributedContext(rank, world_size), place


@contextlib.contextmanager
def process_group(device: str) -> Iterator[tuple[DistributedContext, torch.device]]:
    """`init_process_group`, left at the end; the end of another process is one sentence."""
    try:
        yield init_process_group(device)
    except RuntimeError as error:
        if connection_lost(error):
            raise ConnectionLostError("another process of the training has ended") from error
        raise
    finally:
        if dist.is_available() and dist.is_initialized():
            # A gloo thread needs Python's lock to let go of the last message. If the group ends
            # before that, it waits for the thread with the lock held, for ever: let it go first.
            time.sleep(0.1)
            dist.destroy_process_group()


def connection_lost(error: BaseException) -> bool:
    """Whether a collective failed because another process has ended; gloo has no class for it."""
    return isinstance(error, RuntimeError) and "by peer" in str(error)


def restarted() -> bool:
    """Whether torchrun started processes of this machine again after a failure of one of them."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0
