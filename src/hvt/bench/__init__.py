"""How fast models are: measured in turns, on a machine that is named."""
