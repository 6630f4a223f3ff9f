"""The study: its storage, its settings, and its trials as rows.

Any storage of Optuna's works, and several processes or machines may share a study. Each process
sends heartbeats; when they stop, its trial is queued again with the rungs that it had finished.
"""

from __future__ import annotations

import json
import re
import reprlib
import uuid
import warnings
from pathlib import Path
from typing import Any

from ..errors import HVTError

HEARTBEAT = 30
"""Seconds between heartbeats of a process."""
MISSED = 4
"""Heartbeats that may be missed before a trial is given to another process."""
SETTINGS = "hvt"
"""The study's attribute with its settings."""
GIVEN = "given"
"""The attribute of a trial whose config was given by the user."""
ID = "id"
"""The attribute that distinguishes it from another study of the same name."""
IMAGES = "images"
"""The setting with the identity of the data."""


def import_optuna() -> Any:
    """Optuna, which is an extra; quiet, for the search logs its own progress."""
    try:
        import optuna
    except ImportError as error:
        raise HVTError("a search needs Optuna: pip install 'hvt[search]'") from error
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    # Heartbeats have been experimental since 2021.
    warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
    return optuna


def open_study(
    name: str,
    storage: str,
    settings: dict[str, Any],
    heartbeat: int = HEARTBEAT,
    allow_changed_data: bool = False,
) -> Any:
    """Create a study, or join it; with other settings its trials would not be comparable."""
    optuna = import_optuna()
    try:
        kept = optuna.storages.RDBStorage(
            storage,
            # SQLite gives up at once where another process writes, unless it may wait.
            engine_kwargs={"connect_args": {"timeout": 60}} if storage.startswith("sqlite") else {},
            heartbeat_interval=heartbeat,
            grace_period=MISSED * heartbeat,
            heartbeat_stale_trial_callback=optuna.storages.RetryHeartbeatStaleTrialCallback(),
        )
        study = optuna.create_study(
            study_name=name,
            storage=kept,
            directions=["maximize", "minimize"],
            # Each trial sets a seeded one; Optuna's for two objectives would choose before that.
            sampler=optuna.samplers.TPESampler(),
            load_if_exists=True,
        )
    except Exception as error:  # SQLAlchemy's, the driver's and Optuna's share no class
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise HVTError(
            f"the study cannot be opened in {re.sub('//.*@', '//', storage)}: {reason}"
        ) from error
    ours = json.loads(json.dumps(settings))
    stored = study.user_attrs.get(SETTINGS, ours)
    changed = differences(stored, ours)
    images = [text for text in changed if text.startswith(f"{IMAGES}: ")]
    if changed and not (allow_changed_data and images == changed):
        advice = "use the same, or another --study"
        if images == changed:
            advice += ", or continue anyway with --allow-changed-data"
        raise HVTError(
            f"the study {name} was started with other settings ({', '.join(changed)}): {advice}"
        )
    study.set_user_attr(SETTINGS, ours)
    if ID not in study.user_attrs:
        study.set_user_attr(ID, uuid.uuid4().hex)
    return study


def differences(stored: dict[str, Any], ours: dict[str, Any], within: str = "") -> list[str]:
    """The settings that differ, each with its old and its new value."""
    changed: list[str] = []
    for key in sorted({*stored, *ours}):
        old, new = stored.get(key), ours.get(key)
        if isinstance(old, dict) and isinstance(new, dict):
            changed += differences(old, new, f"{key}: ")
        elif old != new:
            changed.append(f"{within}{key} was {reprlib.repr(old)}, now {reprlib.repr(new)}")
    return changed


def queue(study: Any, given: list[dict[str, Any]], promising: list[dict[str, Any]]) -> None:
    """Queue given configs that were not tried yet, and then promising parameters."""
    tried = [trial.user_attrs.get(GIVEN) for trial in study.get_trials(deepcopy=False)]
    for config in given:
        if config not in tried:
            study.enqueue_trial({}, user_attrs={GIVEN: config})
    for params in promising:
        study.enqueue_trial(params)


def default_storage(folder: Path) -> str:
    """A SQLite file in the search's folder."""
    path = str(folder.resolve() / "study.db")
    if set("?#%{") & set(path):  # which mean something else in a URL, or to Optuna
        raise HVTError(f"{folder} cannot hold a database because of its name: use another --output")
    return f"sqlite:///{path}"


def rows_of(study: Any) -> list[dict[str, Any]]:
    """The trials that trained something, in order; without those that failed and were retried."""
    rows = []
    for trial in study.get_trials(deepcopy=False):
        attributes = trial.user_attrs
        if not attributes.get("rungs") or trial.state.name == "FAIL":
            continue
        epochs, top1 = attributes["rungs"][-1]
        rows.append(
            {
                "trial": trial.number,
                "top1": top1,
                "epochs": epochs,
                "finished": bool(attributes.get("finished")),
                "complete": trial.state.name == "COMPLETE",
                "rungs": attributes["rungs"],
                "seconds": attributes.get("seconds"),
                "retry_of": trial.system_attrs.get("failed_trial"),
                "params": dict(trial.params),
                **attributes["model"],
            }
        )
    return rows
