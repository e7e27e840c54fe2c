"""Searches for the best values of keys: Optuna studies whose trials are runs."""
