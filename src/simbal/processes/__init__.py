"""Processes: how they are started, how many run at once, and how each ends with the one that it works for."""
