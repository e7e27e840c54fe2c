"""The part that both sweepers share: the launcher, and the overrides of an arm."""

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.plugins.sweeper import Sweeper
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig


class LaunchingSweeper(Sweeper):
    """A sweeper that composes its jobs once, and has a launcher run them."""

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        """Make the composer and the launcher."""
        from simbal.sweep.composer import Composer
        from simbal.sweep.launchers import make_launcher

        self.config, self.loader = config, hydra_context.config_loader
        self.composer: Composer = Composer(self.loader, config)
        self.launcher = make_launcher(hydra_context, task_function, config)

    def overrides(self, lines: list[str]) -> list[Override]:
        """Return lines such as `seed=0-4` as Hydra reads them, with their spans written out.

        Raises:
            UserError: a line cannot be read.
        """
        from simbal.config.schema import integer_keys
        from simbal.sweep import spans

        return spans.parse(lines, integer_keys(), OverridesParser.create(self.loader))
