"""From a budget to a model: every architecture that a budget buys, and the likeliest best."""
