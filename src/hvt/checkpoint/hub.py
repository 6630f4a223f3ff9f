"""Hugging Face directories and repositories, in a form that timm and transformers read too."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi, ModelCardData, snapshot_download

from ..config import HVTConfig, default_cfg
from ..costs import cost
from ..errors import HVTError, first_line
from ..files import atomic_write
from ..model import HVT
from ..zoo import MODELS
from .description import PREPROCESSING
from .reading import WEIGHT_FILES
from .save_load import load, save

_CARD = """\
---
{data}
---
# {title}

{gflops:.2f} GFLOPs (MACs), {params_m:.2f} M parameters.

To load it (a local folder from its parent folder):

```python
import hvt  # makes the architecture known to timm and transformers
model = hvt.from_pretrained({source})

import timm
model = timm.create_model({for_timm}, pretrained=True)
```

Method: Pan et al., *Scalable Vision Transformers with Hierarchical Pooling*, ICCV 2021.
"""


def save_pretrained(model: HVT, directory: str | Path, repo_id: str | None = None) -> None:
    """Write `model.safetensors`, `config.json` and a model card into a directory.

    The card's commands open the repository where one is named, else the directory.
    """
    directory = Path(directory)
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise HVTError(f"cannot write {directory}: {error.strerror}") from error
    save(model, directory / "model.safetensors")
    with atomic_write(directory / "config.json") as temporary:
        temporary.write_text(json.dumps(_config(model), indent=2) + "\n", encoding="utf-8")
    if not (directory / "README.md").exists():
        with atomic_write(directory / "README.md") as temporary:
            temporary.write_text(_card(model, directory, repo_id), encoding="utf-8")


def from_pretrained(
    source: str | Path,
    *,
    revision: str | None = None,
    cache_dir: str | Path | None = None,
    token: str | bool | None = None,
    local_files_only: bool = False,
    **overrides: Any,
) -> HVT:
    """The model of a directory or of a repository such as `user/name`; `overrides` as in `load`."""
    if os.path.isdir(source):  # noqa: PTH112 - False for a name that cannot be
        return load(source, **overrides)
    for weights in WEIGHT_FILES:
        try:
            folder = snapshot_download(
                str(source),
                revision=revision,
                cache_dir=cache_dir,
                token=token,
                local_files_only=local_files_only,
                allow_patterns=["config.json", "preprocessor_config.json", weights],
            )
        except Exception as error:  # without a network that of an HTTP library, which may change
            raise HVTError(
                f"{source} is neither a folder here nor a Hugging Face repository that can be "
                f"reached ({first_line(error)})"
            ) from error
        if (Path(folder) / weights).is_file():
            break
    return load(folder, **overrides)


def push_to_hub(
    model: HVT,
    repo_id: str,
    *,
    private: bool | None = None,
    token: str | None = None,
    commit_message: str = "Upload an hvt model",
    **options: Any,
) -> str:
    """Create the repository if need be, upload the model in one commit, return the address.

    `options` are those of huggingface_hub's `upload_folder`, such as `revision` and `create_pr`.
    """
    # Not timm's `push_to_hf_hub`, whose weights come without our description of the model.
    api = HfApi(token=token)
    with tempfile.TemporaryDirectory() as folder:
        save_pretrained(model, folder, repo_id=repo_id)
        try:
            repo = api.create_repo(repo_id, private=private, exist_ok=True)
            options |= {"repo_id": repo.repo_id, "commit_message": commit_message}
            api.upload_folder(folder_path=folder, **options)
        except Exception as error:
            raise HVTError(f"cannot upload to {repo_id} ({first_line(error)})") from error
    return str(repo)


def _card(model: HVT, directory: Path, repo_id: str | None) -> str:
    """A model card: what the model costs, and commands that open it."""
    name, priced = directory.resolve().name, cost(model.config)
    data = ModelCardData(
        library_name="hvt",
        license=(model.pretrained_cfg.get("origin") or {}).get("license"),
        pipeline_tag="image-classification",
        tags=["hvt", "timm", "vision-transformer"],
    )
    return _CARD.format(
        data=data.to_yaml(),
        title=repo_id or name,
        gflops=priced.gflops,
        params_m=priced.params_m,
        source=json.dumps(repo_id or name),
        for_timm=json.dumps(f"hf-hub:{repo_id}" if repo_id else f"local-dir:{name}"),
    )


def _config(model: HVT) -> dict[str, Any]:
    """timm's `config.json`: a registered architecture, the arguments that differ, the input.

    The number and names of the classes have their place at the top: transformers passes the number
    on beside `model_args`, and looks for the names nowhere else.
    """
    name, arguments = nearest_model(model.config)
    arguments.pop("num_classes", None)
    cfg = {key: model.pretrained_cfg[key] for key in PREPROCESSING if key in model.pretrained_cfg}
    channels = model.config.in_chans
    for key in ("mean", "std"):  # of colours, where a grey model was never trained
        values = cfg.get(key, ())
        if len(values) not in (0, channels):
            cfg[key] = [sum(values) / len(values)] * channels
    return {
        "architecture": name,
        "num_classes": model.num_classes,
        **({"label_names": list(model.class_names)} if model.class_names else {}),
        "model_args": arguments,
        "pretrained_cfg": default_cfg(model.config) | cfg | {"custom_load": False},
    }


def nearest_model(config: HVTConfig) -> tuple[str, dict[str, Any]]:
    """The named model that differs from a config in the fewest fields, and those fields."""
    values = config.to_dict()
    differences = {
        name: {k: values[k] for k, v in known.to_dict().items() if values[k] != v}
        for name, known in MODELS.items()
    }
    name = min(differences, key=lambda n: len(differences[n]))
    arguments = differences[name]
    if MODELS[name].replace(**arguments) != config:
        arguments["retention"] = config.retention  # or it would follow another image size
    return name, arguments
