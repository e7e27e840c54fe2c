"""Sweeps: which runs to launch, and the processes that train them. Nothing in this package trains itself."""
