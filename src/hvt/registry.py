"""The same names for timm: importing this module registers them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from timm.models import build_model_with_cfg, generate_default_cfgs, register_model

from .config import default_cfg
from .errors import HVTError
from .zoo import MODELS, NOTES, WEIGHT_URLS, get_config, is_config_file

if TYPE_CHECKING:
    from .model import HVT

default_cfgs = generate_default_cfgs(
    {
        name: default_cfg(config)
        | {"paper_ids": "arXiv:2103.10619", "license": "apache-2.0", "custom_load": True}
        | ({"url": WEIGHT_URLS[name]} if name in WEIGHT_URLS else {})
        | ({"notes": (NOTES[name],)} if name in NOTES else {})
        for name, config in MODELS.items()
    }
)


def create_model(name: str | Path, pretrained: bool = False, **overrides: Any) -> HVT:
    """A named model, with fields of `HVTConfig` replaced: `create_model("hvt_s_4", depth=24)`.

    A `.json` file of `hvt plan --save` can be used instead of a name.

    `pretrained` downloads the published ImageNet weights and resizes them to the image size;
    another number of classes gets a new head.
    """
    config = get_config(name, **overrides)  # raises errors before anything is built
    if is_config_file(name):
        if pretrained:
            raise HVTError(f"no weights are published for the config {name}: use pretrained=False")
        from .checkpoint import HVT  # see below

        return HVT(config)
    return _build(str(name), pretrained, **overrides)


def _build(name: str, pretrained: bool, **kwargs: Any) -> HVT:
    other_source = kwargs.get("pretrained_cfg") or kwargs.get("pretrained_cfg_overlay")
    if pretrained and name not in WEIGHT_URLS and not other_source:
        raise HVTError(
            f"no weights are published for {name}: use pretrained=False, "
            f"or one of {', '.join(WEIGHT_URLS)}"
        )
    # Not at the top: timm is told these names as soon as it is imported, and the first to import it
    # may be hvt.model. From `checkpoint`, because timm asks the model to load its weights.
    from .checkpoint import HVT
    from .features import FeatureMaps

    kwargs.pop("feature_cls", None)  # timm's own would take tokens for maps
    try:
        model = build_model_with_cfg(
            lambda **overrides: HVT(get_config(name, **overrides)),
            name,
            pretrained,
            pretrained_filter_fn=_without_settings,
            feature_cfg={"out_indices": None, "feature_cls": FeatureMaps},
            **kwargs,
        )
    except OSError as error:
        raise HVTError(
            f"the pretrained weights of {name} could not be fetched from {WEIGHT_URLS.get(name)} "
            f"({error}): check the network, or download the file and use hvt.load"
        ) from error
    built = getattr(model, "model", model)  # features_only wraps it
    if isinstance(built, HVT):  # timm describes the named model's input, not the one asked for
        model.pretrained_cfg["input_size"] = (built.config.in_chans, *built.config.image)
    return model


def _without_settings(state: dict[str, Any], model: Any) -> dict[str, Any]:
    """Of an elastic checkpoint, the largest setting."""
    return {name: value for name, value in state.items() if not name.startswith("settings.")}


def _register(name: str) -> None:
    def entrypoint(pretrained: bool = False, **kwargs: Any) -> HVT:
        return _build(name, pretrained, **kwargs)

    entrypoint.__name__ = entrypoint.__qualname__ = name
    entrypoint.__doc__ = f"{name}; keyword arguments are fields of HVTConfig."
    register_model(entrypoint)


__all__ = ["create_model"]  # timm adds the names

for _name in MODELS:
    _register(_name)
