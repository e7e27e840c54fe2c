"""Worker process of a run on several devices: `python -m simbal.training.worker FOLDER DEVICES STRATEGY`.

Lightning reruns the command of its process for every other rank. In the process of a sweep or a notebook, this would
be the wrong command.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, redirect_stdout
from dataclasses import replace
from pathlib import Path
from types import FrameType

from simbal.errors import UserError, exit_codes, exit_on_user_error
from simbal.processes import GRACE_SECONDS, ends_with
from simbal.runs.folder import RunFolder
from simbal.runs.spec import RunSpec
from simbal.training.failures import RANK_ERROR, record_killed_worker
from simbal.training.signals import SIGNALS, StoppedError


def run_on_ranks(spec: RunSpec) -> None:
    """Train the run on several devices in a worker process, and wait for it.

    Raises:
        SystemExit: with the exit code of a worker that failed and printed the error.
        UserError: a process was killed.
    """
    folder, trainer = RunFolder(spec.path), spec.config.trainer
    with folder.lock():
        folder.write_spec(spec)
        (folder.path / RANK_ERROR).unlink(missing_ok=True)
    command = [sys.executable, "-m", "simbal.training.worker", str(folder.path), str(trainer.devices), trainer.strategy]
    worker = subprocess.Popen(command, start_new_session=True)
    with forward_signals(worker):
        code = worker.wait()
    if code < 0:
        run = {"config_hash": spec.hash, "choices": spec.choices, "seed": spec.config.seed}
        raise UserError(record_killed_worker(folder, run, signal.Signals(-code).name))
    if code:
        raise SystemExit(code)


@contextmanager
def forward_signals(worker: "subprocess.Popen[bytes]") -> Iterator[None]:
    """Forward signals to the worker within the block; afterwards, call the previous handler of a received signal."""
    received: list[int] = []

    def forward(number: int, frame: FrameType | None) -> None:
        received.append(number)
        worker.send_signal(number)

    previous = {number: signal.signal(number, forward) for number in SIGNALS}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
    for received_number in received[:1]:
        other = previous[signal.Signals(received_number)]
        if callable(other) and other is not signal.default_int_handler:  # such as submitit's
            other(received_number, None)


def main(folder: Path, devices: int, strategy: str) -> None:
    """Train as one rank of the run in `folder`; rank zero launches the other ranks and prints.

    `devices` and `strategy` override config.yaml, because a run can resume on other devices.
    """
    from simbal.data.prepare import prepare
    from simbal.training.run import train_rank  # imports this module

    is_rank_zero = os.environ.get("LOCAL_RANK", "0") == "0"
    saved = RunFolder(folder).read_spec()
    trainer = saved.config.trainer.model_copy(update={"devices": devices, "strategy": strategy})
    spec = replace(saved, config=saved.config.model_copy(update={"trainer": trainer}), trusted=True)
    with (
        ends_with(os.getppid(), grace=GRACE_SECONDS if is_rank_zero else 0),
        Path(os.devnull).open("w", encoding="utf-8") as devnull,
        nullcontext() if is_rank_zero else redirect_stdout(devnull),
    ):
        try:
            train_rank(spec, prepare(spec.config.data, progress=False))
        except StoppedError:
            if is_rank_zero:
                raise
            # return normally: Lightning treats any other exit code as a lost rank
        except UserError:
            if is_rank_zero:
                raise
            raise SystemExit(1) from None  # rank zero prints the error


if __name__ == "__main__":
    with exit_codes(), exit_on_user_error():
        main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
