"""Runs on disk: the config and its hash, the run folder, its record and curves, and atomic writes."""
