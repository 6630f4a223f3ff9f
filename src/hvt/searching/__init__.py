"""Models found by training them: Optuna over the space of a plan, with successive halving."""
