"""Optuna's samplers and pruners, as the keys of `hydra.sweeper` name them."""

import random
from typing import Any

import optuna

from simbal.search.settings import SearchSettings


def make_sampler(settings: SearchSettings, drawn: int) -> optuna.samplers.BaseSampler:
    """The sampler of one trial, before which `drawn` points were drawn."""
    # the plain sum would make the second point of sampler_seed=0 the first of sampler_seed=1
    seed = random.Random(f"{settings.sampler_seed} {drawn}").getrandbits(32)
    if settings.sampler == "tpe":
        return optuna.samplers.TPESampler(seed=seed)
    return optuna.samplers.RandomSampler(seed=seed)


def make_pruner(settings: SearchSettings, config: dict[str, Any]) -> optuna.pruners.BasePruner:
    """As `hydra.sweeper.pruner` says, for runs with this config."""
    first, last = config["trainer"]["val_every"], config["trainer"]["max_steps"]
    if settings.pruner == "median":
        return optuna.pruners.MedianPruner(n_startup_trials=settings.pruner_startup_trials)
    if settings.pruner == "hyperband":
        return optuna.pruners.HyperbandPruner(min_resource=min(first, last), max_resource=last)
    if settings.pruner == "successive_halving":
        return optuna.pruners.SuccessiveHalvingPruner(min_resource=min(first, last))
    return optuna.pruners.NopPruner()
