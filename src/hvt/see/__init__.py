"""What happens inside a model, as numbers and as images."""

from .draw import FeatureView, draw_costs, draw_features, draw_tokens
from .maps import FeatureMap, feature_maps
from .sources import TokenSources, token_sources
from .subject import Subject, open_model, open_price

__all__ = [
    "FeatureMap",
    "FeatureView",
    "Subject",
    "TokenSources",
    "draw_costs",
    "draw_features",
    "draw_tokens",
    "feature_maps",
    "open_model",
    "open_price",
    "token_sources",
]
