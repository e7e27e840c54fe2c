"""The sweeper `hydra/sweeper=optuna`: search for the best values of keys, in batches that any launcher runs."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.types import Override
from hydra.core.utils import JobReturn
from omegaconf import OmegaConf

from hydra_plugins.simbal_plugins.grid import ArmSweeper, combinations
from simbal.config.options import split_arm
from simbal.config.schema import integer_keys
from simbal.errors import UserError
from simbal.sweeping.search.space import SearchSettings, SearchSpace, build_space


@dataclass
class OptunaConf(SearchSettings):
    """The keys of `hydra.sweeper` with `hydra/sweeper=optuna`."""

    _target_: str = "hydra_plugins.simbal_plugins.optuna.OptunaSweeper"


ConfigStore.instance().store(group="hydra/sweeper", name="optuna", node=OptunaConf, provider="simbal")


class OptunaSweeper(ArmSweeper):
    """A sweeper with one Optuna study for each arm."""

    def __init__(self, **settings: Any) -> None:
        """Take the keys of `SearchSettings`."""
        self.settings = SearchSettings(**OmegaConf.to_container(OmegaConf.create(settings)))  # type: ignore[arg-type]

    def sweep(self, arguments: list[str]) -> Sequence[JobReturn]:
        """Run the missing trials of all studies and print their tables; exit with code 1 if the search fails."""
        from simbal.console import console
        from simbal.sweeping.search.search import run_searches

        assert self.launcher
        self.settings.check()
        if self.config and self.config.until == "decided":
            raise UserError("until=decided needs hydra/sweeper=grid; a search has hydra.sweeper.n_trials instead")
        self.print_replaced(self.settings.arms, arguments)
        spaces = {arm: self._space(arm, arguments) for arm in self.settings.arms or [""]}
        run_searches(spaces, self.settings, self.composer.job, self.launcher, console())
        return []

    def _space(self, arm: str, arguments: list[str]) -> SearchSpace:
        params = [f"{key}={value}" for key, value in self.settings.params.items()]
        overrides = self._drop_inapplicable(self.parse([*params, *split_arm(arm), *arguments]))
        return build_space(overrides, self.settings.replicates, integer_keys())

    def _drop_inapplicable(self, overrides: list[Override]) -> list[Override]:
        """Remove the overrides of keys that only other arms have; `UserError` for a key that only some trials have."""
        options = [override for override in overrides if self.composer.chooses_option(override)]
        lines = [str(override.input_line) for override in overrides if override not in options]
        lost = [{*self.composer.inapplicable_overrides([*choice, *lines])} for choice in combinations(options)]
        lost_by_all = set.intersection(*lost)
        for line in lines:
            if line in set.union(*lost) - lost_by_all:
                raise UserError(f"{line}: not every trial has this key; search each balancing= in its own arm")
        return [override for override in overrides if override.input_line not in lost_by_all]
