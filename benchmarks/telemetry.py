"""MetricsLogger's fraction of the time of a training step: python -m benchmarks.telemetry [override ...]

Times every hook of `MetricsLogger` and the surrounding training steps in one process, so that noise affects both.
"""

import sys
import tempfile
import time

from benchmarks.composing import spec_of
from simbal.training.callbacks import MetricsLogger
from simbal.training.run import train

HOOKS = ("on_train_batch_start", "on_train_batch_end")
seconds = dict.fromkeys(HOOKS, 0.0)


def timed(name: str) -> None:
    """Wrap one hook with a clock."""
    hook = getattr(MetricsLogger, name)

    def wrapped(self: MetricsLogger, *args: object) -> None:
        started = time.process_time()
        hook(self, *args)
        seconds[name] += time.process_time() - started

    setattr(MetricsLogger, name, wrapped)


for name in HOOKS:
    timed(name)
with tempfile.TemporaryDirectory() as out:
    fixed = [f"output_dir={out}", "trainer.max_steps=100", "optim.warmup_steps=10", "trainer.val_every=100"]
    spec = spec_of(*fixed, *sys.argv[1:])
    started = time.process_time()
    train(spec)
    total = time.process_time() - started
spent = sum(seconds.values())
print(f"telemetry {1e3 * spent:.1f} ms of {total:.1f} s CPU: {spent / total:.3%}")
