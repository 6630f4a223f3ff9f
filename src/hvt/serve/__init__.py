"""A model behind HTTP: pictures in, answers out, in batches, within limits, without any state."""
