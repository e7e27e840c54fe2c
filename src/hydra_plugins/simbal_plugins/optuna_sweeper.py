"""The sweeper `hydra/sweeper=optuna`: looks for the best values of keys, in batches that any launcher runs."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.types import Override
from hydra.core.utils import JobReturn
from omegaconf import OmegaConf

from hydra_plugins.simbal_plugins.grid import combinations
from hydra_plugins.simbal_plugins.sweeper import LaunchingSweeper
from simbal.errors import UserError, exit_on_user_error
from simbal.sweep.search.settings import SearchSettings

if TYPE_CHECKING:
    from simbal.sweep.search.space import SearchSpace


@dataclass
class OptunaConf(SearchSettings):
    """The keys of `hydra.sweeper` with `hydra/sweeper=optuna`."""

    _target_: str = "hydra_plugins.simbal_plugins.optuna_sweeper.OptunaSweeper"


ConfigStore.instance().store(group="hydra/sweeper", name="optuna", node=OptunaConf, provider="simbal")


class OptunaSweeper(LaunchingSweeper):
    """A sweeper with one study, or one for each of `arms`; the command line wins over `params` and `arms`."""

    def __init__(self, **settings: Any) -> None:
        """Set the settings, which are the keys of `SearchSettings`."""
        self.settings = SearchSettings(**OmegaConf.to_container(OmegaConf.create(settings)))  # type: ignore[arg-type]

    def sweep(self, arguments: list[str]) -> Sequence[JobReturn]:
        """Run what the studies lack and print their tables; exit code 1 for what cannot be done."""
        from simbal.console import console
        from simbal.sweep.search.run import run_searches

        assert self.launcher
        with exit_on_user_error():
            self.settings.check()
            if self.config and self.config.until == "decided":
                raise UserError("until=decided is for hydra/sweeper=grid: a search has a number of trials instead")
            for said in self.replaced(self.settings.arms, arguments):
                console().print(said, markup=False, highlight=False, soft_wrap=True)
            spaces = {arm: self._space(arm, arguments) for arm in self.settings.arms or [""]}
            run_searches(spaces, self.settings, self.composer.job, self.launcher, console())
        return []

    def _space(self, arm: str, arguments: list[str]) -> "SearchSpace":
        from simbal.config.options import split_arm
        from simbal.config.schema import integer_keys
        from simbal.sweep.search.space import build

        params = [f"{key}={value}" for key, value in self.settings.params.items()]
        overrides = self._own_keys(self.overrides([*params, *split_arm(arm), *arguments]))
        grid = self.settings.sampler == "grid"
        return build(overrides, self.settings.replicates, integer_keys(), grid=grid)

    def _own_keys(self, overrides: list[Override]) -> list[Override]:
        """Return the overrides of an arm without those of keys that only the options of other arms have.

        Raises:
            UserError: for a key that some of its trials have and others do not.
        """
        options = [override for override in overrides if self.composer.chooses_option(override)]
        lines = [str(override.input_line) for override in overrides if override not in options]
        foreign = [set(self.composer.foreign([*choice, *lines])) for choice in combinations(options)]
        everywhere = set.intersection(*foreign)
        for line in lines:
            if line in set.union(*foreign) - everywhere:
                raise UserError(f"{line}: not every trial has this key: search each balancing= in an arm of its own")
        return [override for override in overrides if override.input_line not in everywhere]
