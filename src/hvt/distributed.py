"""Processes: one, or as many as torchrun started, on one machine or several."""

from __future__ import annotations

import os
import time
import uuid
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from .device import find_device
from .errors import HVTError

PATIENCE = 30 * 60
"""Seconds to wait for the other processes, as long as torch does."""


@dataclass(frozen=True)
class Team:
    """This process among the others of a training."""

    rank: int = 0
    local_rank: int = 0
    size: int = 1

    @property
    def leads(self) -> bool:
        """The process that prints and writes."""
        return self.rank == 0

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """The sum over all processes."""
        if self.size > 1:
            dist.all_reduce(tensor)
        return tensor

    def any(self, device: torch.device, *flags: bool) -> list[bool]:
        """For each flag, whether it is raised in any process."""
        if self.size == 1:
            return list(flags)
        wire = device if device.type == "cuda" else torch.device("cpu")
        return [n > 0 for n in self.sum(torch.tensor(flags, device=wire).float()).tolist()]

    def share(self, value: Any) -> Any:
        """The leader's value, in every process."""
        if self.size == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=0)
        return box[0]

    def gather(self, value: Any) -> list[Any]:
        """Every process's value, by rank, in every process."""
        if self.size == 1:
            return [value]
        values = [None] * self.size
        dist.all_gather_object(values, value)
        return values

    def wait(self) -> None:
        """Until every process is here."""
        if self.size > 1:
            dist.barrier()


def join(device: str) -> tuple[Team, torch.device]:
    """Join the processes that torchrun started, or be alone; choose this process's device."""
    size = int(os.environ.get("WORLD_SIZE", "1"))
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    place = find_device(device, local_rank)
    if size == 1:
        return Team(), place
    if not dist.is_initialized():
        if place.type == "cuda":
            torch.cuda.set_device(place)
        backend = "nccl" if place.type == "cuda" else "gloo"
        rank = int(os.environ["RANK"])
        store = _unused_store(rank, size)
        dist.init_process_group(backend, store=store, rank=rank, world_size=size)
    return Team(dist.get_rank(), local_rank, size), place


def leave() -> None:
    """Part from the other processes."""
    if dist.is_available() and dist.is_initialized():
        # A gloo thread needs Python's lock to let go of the last message. If the group ends before
        # that, it waits for the thread with the lock held, for ever: so let the lock go first.
        time.sleep(0.1)
        dist.destroy_process_group()


def restarted() -> bool:
    """Whether torchrun started processes of this machine again after a failure of one of them."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0


def _unused_store(rank: int, size: int) -> dist.Store:
    """torchrun's store, under a prefix of this attempt alone.

    torchrun keeps one store over all restarts, in which the addresses of dead processes still stand
    (pytorch/pytorch#135712), and its count of restarts differs between machines. So the first
    process chooses a prefix and answers whoever greets it, by a name that was never used before.
    """
    store, *_ = next(rendezvous("env://"))
    name = uuid.uuid4().hex
    if rank:
        store.set(f"hello/{rank}", name)
        prefix = store.get(f"answer/{name}").decode()  # waits
        store.set(f"thanks/{prefix}/{rank}", "")
        return dist.PrefixStore(prefix, store)
    waiting, deadline = set(range(1, size)), time.monotonic() + PATIENCE
    while waiting:
        if time.monotonic() > deadline:
            raise HVTError(f"{len(waiting)} of {size} processes have not come within half an hour")
        time.sleep(0.02)
        for other in tuple(waiting):
            if store.check([f"thanks/{name}/{other}"]):
                waiting.remove(other)
            elif store.check([f"hello/{other}"]):  # perhaps from an earlier attempt
                store.set(f"answer/{store.get(f'hello/{other}').decode()}", name)
    return dist.PrefixStore(name, store)
