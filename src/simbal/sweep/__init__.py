"""Sweeps: the plan of what is to be run, and the processes that run it; nothing here trains."""
