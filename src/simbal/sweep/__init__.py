"""Sweeps: what there is to run, and processes that run it; nothing here trains."""
