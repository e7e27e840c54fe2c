"""The part that both sweepers share: the launcher, and the overrides of an arm."""

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import ChoiceSweep, Override
from hydra.core.plugins import Plugins
from hydra.plugins.sweeper import Sweeper
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig


class LaunchingSweeper(Sweeper):
    """A sweeper that composes its jobs once, and has a launcher run them."""

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        """Make the composer and the launcher."""
        from simbal.sweep.composer import Composer

        self.config, self.loader = config, hydra_context.config_loader
        self.composer: Composer = Composer(self.loader, config)
        self.launcher = Plugins.instance().instantiate_launcher(hydra_context, task_function, config)

    def overrides(self, lines: list[str]) -> list[Override]:
        """Return lines such as `seed=0-4` as Hydra reads them, with their spans written out.

        Raises:
            ConfigError: a span makes no sense.
            OverrideParseException: a line is not in Hydra's grammar.
        """
        from simbal.config import spans
        from simbal.config.schema import integer_keys

        parser = OverridesParser.create(self.loader)
        return [*map(_undeferred, spans.parse(lines, integer_keys(), parser))]

    def replaced(self, arms: list[str], arguments: list[str]) -> list[str]:
        """Return a sentence for each override of the command line that takes the place of what arms set."""
        from simbal.config.options import split_arm

        given = {override.key_or_group: override for override in self.overrides(arguments)}
        lost: dict[str, list[str]] = {}
        for override in (override for arm in arms for override in self.overrides(split_arm(arm))):
            own = given.get(override.key_or_group)
            if own and own.value() != override.value():
                lost.setdefault(str(own.input_line), []).append(str(override.input_line))
        return [
            f"{own} takes the place of {', '.join(dict.fromkeys(lines))} in the sweep's arms"
            for own, lines in lost.items()
        ]


def _undeferred(override: Override) -> Override:
    """Return `key=choice(value)`, by which the command line left a value to the sweeper, as `key=value`."""
    from simbal.config import spans

    value = override.value()
    if isinstance(value, ChoiceSweep) and len(value.list) == 1 and not value.shuffle:
        return spans.read(f"{override.get_key_element()}={next(override.sweep_string_iterator())}")
    return override
