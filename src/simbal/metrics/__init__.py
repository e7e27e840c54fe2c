"""The metrics of a run: their table, and pure functions from tensors to their numbers."""
