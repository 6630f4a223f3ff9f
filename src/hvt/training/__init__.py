"""Training: recipe, engine, DDP, checkpoints, watching."""
