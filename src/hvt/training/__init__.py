"""Training: recipe, engine, processes, checkpoints, watching."""
