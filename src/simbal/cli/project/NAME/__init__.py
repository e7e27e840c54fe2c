"""Experiments with my own balancing strategies."""
