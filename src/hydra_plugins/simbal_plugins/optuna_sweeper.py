"""The sweeper `hydra/sweeper=optuna`: looks for the best values of keys, in batches that any launcher runs."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.utils import JobReturn
from hydra.plugins.sweeper import Sweeper
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, OmegaConf

from simbal.errors import exit_on_user_error
from simbal.sweep.search.settings import SearchSettings

if TYPE_CHECKING:
    from simbal.sweep.search.space import SearchSpace


@dataclass
class OptunaConf(SearchSettings):
    """The keys of `hydra.sweeper` with `hydra/sweeper=optuna`."""

    _target_: str = "hydra_plugins.simbal_plugins.optuna_sweeper.OptunaSweeper"


ConfigStore.instance().store(group="hydra/sweeper", name="optuna", node=OptunaConf, provider="simbal")


class OptunaSweeper(Sweeper):
    """A sweeper with one study, or one for each of `arms`; the command line wins over `params` and `arms`."""

    def __init__(self, **settings: Any) -> None:
        """Set the settings, which are the keys of `SearchSettings`."""
        self.settings = SearchSettings(**OmegaConf.to_container(OmegaConf.create(settings)))  # type: ignore[arg-type]

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        """Make the launcher."""
        from simbal.sweep.launchers import make_launcher

        self.hydra_context, self.config = hydra_context, config
        self.launcher = make_launcher(hydra_context, task_function, config)

    def sweep(self, arguments: list[str]) -> Sequence[JobReturn]:
        """Run what the studies lack and print their tables; exit code 1 for what cannot be done."""
        from simbal.files.console import console
        from simbal.sweep.composer import Composer
        from simbal.sweep.search.searches import run_searches

        assert self.hydra_context and self.config and self.launcher  # noqa: PT018
        composer = Composer(self.hydra_context.config_loader, self.config)
        with exit_on_user_error():
            self.settings.check()
            spaces = {arm: self._space(arm, arguments) for arm in self.settings.arms or [""]}
            run_searches(spaces, self.settings, composer.job, self.launcher, console())
        return []

    def _space(self, arm: str, arguments: list[str]) -> "SearchSpace":
        from simbal.config.catalogue import split_arm
        from simbal.config.schema import integer_keys
        from simbal.sweep import spans
        from simbal.sweep.search.space import build

        assert self.hydra_context
        params = [f"{key}={value}" for key, value in self.settings.params.items()]
        lines = [*params, *split_arm(arm), *arguments]
        overrides = spans.parse(lines, integer_keys(), OverridesParser.create(self.hydra_context.config_loader))
        grid = self.settings.sampler == "grid"
        return build(overrides, self.settings.replicates, integer_keys(), grid=grid)
