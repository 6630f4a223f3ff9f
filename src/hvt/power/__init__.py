"""PoWER on DeiT, the paper's other baseline: search a retention, retrain with it."""

from .retention import budget_range, retention_for
from .search import SearchResult, search

__all__ = ["SearchResult", "budget_range", "retention_for", "search"]
