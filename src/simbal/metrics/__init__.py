"""The metrics of a run: their table, and pure functions that compute them from tensors."""
