"""One set of weights at several costs: settings, each a plain config with small parts of its own.

An elastic model is the `HVT` of its largest setting whose module `settings` holds the smaller ones.
`at` gives any of them as a plain model that shares the weights.
"""

from __future__ import annotations

import copy
import fnmatch
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .config import HVTConfig
from .costs import cost
from .errors import HVTError
from .model import HVT
from .resize import resize_positions

OWN = ("pos_embed", "norm.*", "fc_norm.*")
"""Parameters that each setting has of its own, as patterns of names; those after a pooling too."""
MAY_DIFFER = (
    "img_size", "stages", "pool_after", "pool", "pool_kernel", "pool_stride", "pool_dims",
    "retention", "merge", "proportional_attention", "drop_path_rate",
)  # fmt: skip
"""The fields of `HVTConfig` by which the settings of one model may differ."""


class ElasticSettings(nn.Module):
    """The smaller settings of a model, largest first: configs, and the parameters of their own."""

    def __init__(self, configs: Sequence[HVTConfig], own: Sequence[Mapping[str, Tensor]]) -> None:
        super().__init__()
        self.configs = tuple(configs)
        for index, tensors in enumerate(own):
            self.add_module(str(index), nn.Module())
            for name, tensor in tensors.items():
                _set_parameter(self.get_submodule(str(index)), name, nn.Parameter(tensor))

    def own(self, index: int) -> dict[str, nn.Parameter]:
        """The parameters that a setting does not share, by their names in a plain model."""
        return dict(self.get_submodule(str(index)).named_parameters())


def configs_of(model: HVT) -> tuple[HVTConfig, ...]:
    """The settings of a model, largest first; a plain model has one."""
    cheaper = model.settings.configs if isinstance(model.settings, ElasticSettings) else ()
    head = {"num_classes": model.num_classes, "global_pool": model.config.global_pool}
    return (model.config, *(config.replace(**head) for config in cheaper))


def label(config: HVTConfig) -> str:
    """A setting's name, its cost: `0.73G`."""
    return f"{cost(config).gflops:.3g}G"


def choose(configs: Sequence[HVTConfig], budget: str | float) -> int:
    """The place of the largest of some settings that costs at most so many GFLOPs."""
    try:
        most = float(budget.strip().rstrip("gG")) if isinstance(budget, str) else float(budget)
    except ValueError:
        raise HVTError(f"{budget!r} is not a budget: write GFLOPs, such as 0.7G") from None
    labels = [label(config) for config in configs]
    within = [place for place, name in enumerate(labels) if float(name[:-1]) <= most]
    if not within:
        raise HVTError(f"no setting costs {most:g} GFLOPs or less, only {', '.join(labels)}")
    return within[0]


def at(model: HVT, budget: str | float) -> HVT:
    """The largest setting of at most so many GFLOPs, `0.7` or `"0.7G"`: a plain model.

    It shares the weights: training or loading either changes both.
    """
    return plain(model, choose(configs_of(model), budget))


def largest_setting(model: HVT) -> HVT:
    """A model without its smaller settings."""
    return model if model.settings is None else plain(model, 0)


def plain(model: HVT, place: int) -> HVT:
    """One of a model's settings by its place, largest first, as a plain model sharing weights."""
    config = configs_of(model)[place]
    tensors = dict(model.named_parameters())
    if place:
        assert isinstance(model.settings, ElasticSettings)
        tensors |= model.settings.own(place - 1)
    return rebuilt(model, config, tensors)


def rebuilt(model: HVT, config: HVTConfig, tensors: Mapping[str, nn.Parameter]) -> HVT:
    """A model of another config on parameters that there are, otherwise described like a model."""
    with torch.device("meta"):
        built = HVT(config)
    names = list(built.state_dict())
    built.load_state_dict({name: tensors[name].detach() for name in names}, assign=True)
    built.set_input_size(config.img_size)  # makes what follows from the config, off meta
    for name in names:  # now the parameters themselves
        _set_parameter(built, name, tensors[name])
    known = {k: v for k, v in model.pretrained_cfg.items() if k != "input_size"}
    built.pretrained_cfg.update(known)
    return built.train(model.training)


def replica(model: nn.Module) -> Any:
    """A copy on the same weights, in evaluation mode, that can be watched or changed unnoticed."""
    shared = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    return copy.deepcopy(model, shared).eval()  # what is in the memo is not copied


def make_elastic(model: HVT, configs: Sequence[HVTConfig], own: Sequence[str] = OWN) -> HVT:
    """Give a model smaller settings, whose own parameters begin as the model's.

    Positions follow another image size; those that follow a pooling the model does not have begin
    at zero. `own` are patterns of the names of parameters that are not shared.
    """
    ordered = sorted(configs, key=lambda config: -cost(config).macs)
    check_settings((model.config, *ordered))
    shared = dict(model.named_parameters())
    tensors = [_own_tensors(shared, model.config, config, own) for config in ordered]
    model.settings = ElasticSettings(ordered, tensors).to(model.pos_embed)
    return model


def check_settings(configs: Sequence[HVTConfig]) -> None:
    """Raise an error unless these can be the settings of one model, largest first."""
    labels, first = [label(config) for config in configs], configs[0].to_dict()
    if len(set(labels)) < len(labels):
        raise HVTError(f"two settings cost the same ({', '.join(labels)}): leave one of them out")
    if sorted(labels, key=lambda text: -float(text[:-1])) != labels:
        raise HVTError(f"the settings ({', '.join(labels)}) are not in order, largest first")
    for config in configs:
        for name, value in config.to_dict().items():
            if name not in MAY_DIFFER and value != first[name]:
                raise HVTError(
                    f"all settings must have the same {name}, not {first[name]} and {value}"
                )


def _own_tensors(
    shared: Mapping[str, Tensor], base: HVTConfig, config: HVTConfig, own: Sequence[str]
) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for name, fresh in HVT(config).state_dict().items():
        there = shared.get(name)
        if name == "pos_embed":
            tensors[name] = resize_positions(shared[name].detach(), base, config, 0).clone()
        elif there is not None and there.shape == fresh.shape:
            if any(fnmatch.fnmatchcase(name, pattern) for pattern in own):
                tensors[name] = there.detach().clone()
        else:
            tensors[name] = torch.zeros_like(fresh) if name.endswith("pos_embed") else fresh
    return tensors


def _set_parameter(module: nn.Module, name: str, parameter: Any) -> None:
    """Put a parameter at a dotted name, making the modules on the way where there are none."""
    *path, last = name.split(".")
    for part in path:
        if part not in module._modules:
            module.add_module(part, nn.Module())
        module = module.get_submodule(part)
    setattr(module, last, parameter)


HVT.at = at
