"""Hyperparameter search with Optuna: a trial is one run, or one run for each seed."""
