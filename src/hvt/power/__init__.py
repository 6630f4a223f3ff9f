"""PoWER on DeiT, the paper's other baseline: search a retention, retrain with it, look at it."""

from .retention import budget_range, fit_retention, retention_for, retention_of
from .search import SearchResult, search
from .soft import SoftDeiT, harden, penalty, soften
from .survivors import survivors

__all__ = [
    "SearchResult",
    "SoftDeiT",
    "budget_range",
    "fit_retention",
    "harden",
    "penalty",
    "retention_for",
    "retention_of",
    "search",
    "soften",
    "survivors",
]
