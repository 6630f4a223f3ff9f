"""The study: where Optuna keeps it, what it is of, and its trials as rows.

Any storage of Optuna's does; several processes or machines may work on one study. A process that
works on a trial says so every few seconds. If it falls silent, its trial is queued again, with the
rungs that it had finished, for whoever is free.
"""

from __future__ import annotations

import contextlib
import json
import logging
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..errors import HVTError

HEARTBEAT = 30
"""Seconds between signs of life of a process."""
SILENT = 4
"""Heartbeats that may be missed before a trial is given to somebody else."""
TRIES, PAUSE = 10, 0.2
"""How often a study is opened while another process makes its tables, and seconds between."""
TAKEN = ("already exists", "unique constraint")
"""What databases say of a table or a row that another process has just made."""
SETTINGS = "hvt"
"""The study's attribute with what it is of."""
IMAGES = "images"
"""The setting that earlier studies do not have."""


def import_optuna() -> Any:
    """Optuna, which is an extra; quiet, for the search tells its own progress."""
    try:
        import optuna
    except ImportError as error:
        raise HVTError("a search needs Optuna: pip install 'hvt[search]'") from error
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    logging.getLogger("alembic").setLevel(logging.WARNING)
    return optuna


@contextlib.contextmanager
def quietly() -> Iterator[None]:
    """Without Optuna's notes that heartbeats are experimental, as they have been since 2021."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", import_optuna().exceptions.ExperimentalWarning)
        yield


def open_study(
    name: str, storage: str, settings: dict[str, Any], heartbeat: int = HEARTBEAT
) -> Any:
    """Create a study, or join it; with other settings its trials would not compare: refused."""
    for left in reversed(range(TRIES)):
        try:
            study = _join(name, storage, heartbeat)
            break
        except Exception as error:  # SQLAlchemy's, the driver's and Optuna's, which share no class
            if left and any(text in str(error).lower() for text in TAKEN):
                time.sleep(PAUSE)
                continue
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise HVTError(
                f"the study cannot be opened in {_without_password(storage)}: {reason}"
            ) from error
    theirs = study.user_attrs.get(SETTINGS)
    if theirs is None:
        study.set_user_attr(SETTINGS, json.loads(json.dumps(settings)))
    elif differing := differences(theirs, settings):
        raise HVTError(
            f"the study {name} was begun with other settings ({differing}): use the same, "
            "or another --study"
        )
    return study


def differences(theirs: dict[str, Any], settings: dict[str, Any]) -> str:
    """What another study was begun with, as far as it differs; empty where nothing does."""
    ours = json.loads(json.dumps(settings))
    differs = sorted(key for key in {*theirs, *ours} if theirs.get(key) != ours.get(key))
    told = [f"{key} was {theirs.get(key)!r}" for key in differs if key != IMAGES]
    if IMAGES in differs and IMAGES in theirs:
        pair = (theirs[IMAGES], ours[IMAGES])
        told += [f"another {key}" for key in ours[IMAGES] if pair[0].get(key) != pair[1][key]]
    return ", ".join(told)[:300]


def _join(name: str, storage: str, heartbeat: int) -> Any:
    optuna = import_optuna()
    with quietly():
        kept = optuna.storages.RDBStorage(
            storage,
            # SQLite gives up at once where another process writes, unless it may wait.
            engine_kwargs=_engine(storage),
            heartbeat_interval=heartbeat,
            grace_period=SILENT * heartbeat,
            heartbeat_stale_trial_callback=_queue_again,
        )
    return optuna.create_study(
        study_name=name,
        storage=kept,
        directions=["maximize", "minimize"],
        # Each trial sets a seeded one; Optuna's own for two objectives would choose before that.
        sampler=optuna.samplers.TPESampler(),
        load_if_exists=True,
    )


def _engine(storage: str) -> dict[str, Any]:
    return {"connect_args": {"timeout": 60}} if storage.startswith("sqlite") else {}


def _without_password(url: str) -> str:
    """A storage's address as it may be printed."""
    scheme, mark, rest = url.partition("://")
    return f"{scheme}{mark}{rest.rpartition('@')[2]}"


def _queue_again(study: Any, trial: Any) -> None:
    """A trial whose process fell silent: the same parameters, and the rungs that were done."""
    attributes = {k: v for k, v in trial.user_attrs.items() if k in ("rungs", "retries")}
    attributes["retries"] = attributes.get("retries", 0) + 1
    study.enqueue_trial(trial.params, user_attrs=attributes | {"again": trial.number})


def requeue(study: Any, trial: Any) -> None:
    """The same for a trial of this process that was interrupted."""
    attributes = {"rungs": trial.user_attrs.get("rungs", []), "again": trial.number}
    study.enqueue_trial(trial.params, user_attrs=attributes)


def default_storage(folder: Path) -> str:
    """A SQLite file in the search's folder, whose name may have what means more in a URL.

    Versions of SQLAlchemy differ in whether they quote: what would not come back is refused.
    """
    from sqlalchemy import URL, make_url

    path = str(folder.resolve() / "study.db")
    try:
        address = URL.create("sqlite", database=path).render_as_string()
    except UnicodeEncodeError:
        address = ""
    if not address or make_url(address).database != path or "{" in address:  # Optuna fills it in
        raise HVTError(
            f"the folder {folder} cannot have a database, for its name: use another --output"
        )
    return address


def rows_of(study: Any) -> list[dict[str, Any]]:
    """The trials that trained something, in order; those of no config within the budget are out."""
    done = []
    for trial in study.get_trials(deepcopy=False):
        attributes = trial.user_attrs
        if not attributes.get("rungs") or "config" not in attributes:
            continue
        if trial.state.name == "FAIL":  # what it had finished is with the trial that took it up
            continue
        epochs, top1 = attributes["rungs"][-1]
        done.append(
            {
                "trial": trial.number,
                "top1": top1,
                "gflops": attributes["gflops"],
                "params_m": attributes["params_m"],
                "epochs": epochs,
                "finished": bool(attributes.get("finished")),
                "complete": trial.state.name == "COMPLETE",
                "rungs": attributes["rungs"],
                "seconds": attributes.get("seconds"),
                "again": attributes.get("again"),
                "params": dict(trial.params),
                "config": attributes["config"],
            }
        )
    return done
