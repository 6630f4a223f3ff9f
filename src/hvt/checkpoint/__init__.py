"""Checkpoints: saved, loaded, described, read from others, shared on a hub."""
