"""Pure functions from tensors to the numbers of the tables."""
