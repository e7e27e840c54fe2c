"""Hydra plugins of simbal: imported at every start of Hydra, hence thin."""
