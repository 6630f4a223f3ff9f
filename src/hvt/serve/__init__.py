"""A model behind HTTP: images in, answers out, in batches, within limits, without any state."""
