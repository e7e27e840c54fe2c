"""Hydra plugins: the sweepers `grid` and `optuna`, the launchers `procs`, `ray` and `slurm`, and the search path."""
