"""From a budget to a model: every architecture within it, and the most promising ones."""
