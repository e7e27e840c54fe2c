"""Experiments on how to balance the router of a Mixture-of-Experts language model."""
