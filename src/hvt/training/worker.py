"""A local process that `launch` has started: it does a job and leaves what came of it."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import signal
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from .._openmp import wait_briefly
from ..errors import HVTError
from ..files import atomic_write
from .interrupt import Interrupted

if TYPE_CHECKING:
    from .engine import Trainer
    from .recipe import Recipe

FINISHED, DECLINED, REFUSED, INTERRUPTED, FAILED = (
    "finished", "declined", "refused", "interrupted", "failed",
)  # fmt: skip


def main(job: dict[str, Any]) -> NoReturn:
    """Do a job; what came of it is a file, so that the process that started this one can tell."""
    exchange, rank = Path(job["exchange"]), int(os.environ["RANK"])
    (exchange / f"pid-{rank}").write_text(str(os.getpid()))
    threading.Thread(target=_end_with, args=(job["parent"],), daemon=True).start()
    # Before torch is imported, which reads them then.
    os.environ["OMP_NUM_THREADS"] = str(job["threads"])
    wait_briefly()
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # nobody else is to connect
    code, outcome = 0, {"kind": FINISHED}
    try:
        import torch  # noqa: F401  while Ctrl-C still ends the process without a word

        signal.signal(signal.SIGINT, signal.default_int_handler)
        outcome = _do(job)
    except HVTError as error:
        code, outcome = 2, {"kind": REFUSED, "words": str(error)}
    except Interrupted as stopped:
        code, outcome = 130, {"kind": INTERRUPTED, "words": str(stopped)}
    except KeyboardInterrupt:
        code, outcome = 130, {"kind": INTERRUPTED, "words": "stopped"}
    except BaseException:
        code, outcome = 1, {"kind": FAILED, "words": traceback.format_exc()}
    with atomic_write(exchange / f"outcome-{rank}.json") as temporary:
        text = json.dumps(outcome | {"rank": rank, "time": time.time()})
        temporary.write_text(text, encoding="utf-8")
    sys.exit(code)


def _do(job: dict[str, Any]) -> dict[str, Any]:
    from rich.console import Console

    from .. import distributed
    from . import engine
    from .recipe import from_dict

    console = Console(quiet=job["quiet"])
    if "resume" in job:
        recipe = engine.read_recipe(job["resume"])
    else:
        recipe = from_dict(job["recipe"], "the job")
    if beat := job.get("beat"):
        seconds = _measure(recipe, beat["steps"])
        if seconds > beat["seconds"]:
            distributed.destroy_process_group()
            return {"kind": DECLINED, "seconds": seconds}
    if "resume" in job:
        result = engine.resume(job["resume"], console, job["epochs"])
    else:
        result = engine.train(recipe, job["name"], console)
    values = {one.name: getattr(result, one.name) for one in dataclasses.fields(result)}
    del values["model"]  # which is in the folder
    return {"kind": FINISHED, "result": values | {"folder": str(result.folder)}}


def _measure(recipe: Recipe, steps: int) -> float:
    """Seconds of a step in all processes together, by a model that is thrown away."""
    from rich.console import Console

    from .. import distributed
    from .engine import open_trainer

    group, device = distributed.init_process_group(recipe.device)
    trainer = open_trainer(recipe, Path(recipe.output or "."), group, device, Console(quiet=True))
    return float(group.broadcast(step_seconds(trainer, steps)))


def step_seconds(trainer: Trainer, steps: int) -> float:
    """Seconds of a whole step with its reading and its update, after two that are not counted."""
    epochs = (trainer.batches.epoch(epoch) for epoch in itertools.count())
    batches, began = itertools.chain.from_iterable(epochs), 0.0
    for update in range(2 + steps):
        if update == 2:
            began = time.perf_counter()
        trainer.learner.step(batches, update)
    return (time.perf_counter() - began) / steps


def _end_with(parent: int) -> None:
    """Stop, as by SIGTERM, when the process that started this one is gone without a word."""
    while os.getppid() == parent:
        time.sleep(1)
    os.kill(os.getpid(), signal.SIGTERM)
