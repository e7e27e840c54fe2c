"""Trains the run in one folder on several devices: `python -m simbal.training.worker FOLDER DEVICES STRATEGY`.

Lightning starts this command once more for every other rank. From the process of a sweep or a notebook it would start
that program's command instead.
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
from simbal.training.failures import RANK_ERROR, record_lost_worker
from simbal.training.signals import SIGNALS, StoppedError


def run_worker(spec: RunSpec) -> None:
    """Train the run in a worker process and wait for its end; signals are passed on to it.

    Raises:
        SystemExit: with the worker's exit code, if that is not 0; the worker has printed why.
        UserError: one of the processes was killed.
    """
    folder, keys = RunFolder(spec.path), spec.config.trainer
    with folder.lock():
        folder.write_spec(spec)
        (folder.path / RANK_ERROR).unlink(missing_ok=True)
    command = [sys.executable, "-m", "simbal.training.worker", str(folder.path), str(keys.devices), keys.strategy]
    worker = subprocess.Popen(command, start_new_session=True)
    with passed_on(worker):
        code = worker.wait()
    if code < 0:
        run = {"config_hash": spec.hash, "choices": spec.choices, "seed": spec.config.seed}
        raise UserError(record_lost_worker(folder, run, signal.Signals(-code).name))
    if code:
        raise SystemExit(code)


@contextmanager
def passed_on(worker: "subprocess.Popen[bytes]") -> Iterator[None]:
    """Send signals on to the worker within the block, and then call the handler that was there before, as submitit's.

    That handler waits until the worker has saved.
    """
    received: list[signal.Signals] = []

    def pass_on(number: int, frame: FrameType | None) -> None:
        received.append(signal.Signals(number))
        worker.send_signal(number)

    before = {number: signal.signal(number, pass_on) for number in SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    for number in received[:1]:
        handler = before[number]
        if callable(handler) and handler is not signal.default_int_handler:
            handler(number, None)


def main(folder: Path, devices: int, strategy: str) -> None:
    """Be a rank of the run in `folder`; rank zero alone prints and starts the others.

    `devices` and `strategy` may be others than in its config.yaml: a run can resume on other devices.
    """
    from simbal.data.prepare import prepare
    from simbal.training.run import train_rank  # which imports this module

    other = int(os.environ.get("LOCAL_RANK", "0")) > 0
    saved = RunFolder(folder).read_spec()
    trainer = saved.config.trainer.model_copy(update={"devices": devices, "strategy": strategy})
    spec = replace(saved, config=saved.config.model_copy(update={"trainer": trainer}), trusted=True)
    with (
        ends_with(os.getppid(), grace=0 if other else GRACE_SECONDS),
        Path(os.devnull).open("w", encoding="utf-8") as nowhere,
        redirect_stdout(nowhere) if other else nullcontext(),
    ):
        try:
            train_rank(spec, prepare(spec.config.data, progress=False))
        except StoppedError:
            if not other:  # to Lightning another exit code than 0 means a lost rank
                raise
        except UserError:
            if not other:  # rank zero prints it
                raise
            raise SystemExit(1) from None


if __name__ == "__main__":
    with exit_codes(), exit_on_user_error():
        main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
