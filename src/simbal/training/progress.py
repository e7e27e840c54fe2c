"""The live progress bar of one run, on the terminal only."""

from typing import Any

import lightning as L
from lightning.pytorch.callbacks import Callback
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from simbal.training.telemetry import Telemetry


class ProgressBar(Callback):
    """Steps, losses, tokens/s and time left, as `Telemetry` last measured them: it costs no `self.log`."""

    def __init__(self, telemetry: Telemetry, description: str) -> None:
        self.telemetry = telemetry
        self.progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("{task.fields[shown]}"),
            TimeRemainingColumn(elapsed_when_finished=True),
        )
        self.task = self.progress.add_task(description, total=None, shown="")

    def on_train_start(self, trainer: L.Trainer, *_: Any) -> None:
        """Start where the run starts."""
        self.progress.update(self.task, total=trainer.max_steps, completed=trainer.global_step)
        self.progress.start()

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        """Move on."""
        self.progress.update(self.task, completed=trainer.global_step, shown=self.telemetry.shown)

    def teardown(self, *_: Any, **__: Any) -> None:
        """Leave the last state on the screen, also after an error."""
        self.progress.stop()
