"""Checkpoints: saved, loaded, described, read from others, shared on a hub.

A model does not know how it is stored, yet timm and its users expect these methods on it; they are
added to it here.
"""

from ..model import HVT
from .hub import from_pretrained, push_to_hub, save_pretrained
from .save_load import load, load_into, save

HVT.load_pretrained = load_into
HVT.save_pretrained = save_pretrained
HVT.push_to_hub = push_to_hub
HVT.from_pretrained = staticmethod(from_pretrained)

__all__ = ["HVT", "from_pretrained", "load", "push_to_hub", "save", "save_pretrained"]
