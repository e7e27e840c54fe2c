"""A signal stops a run after the current step and a checkpoint; the run resumes to the same result."""

import os
import signal

import pytest

from simbal.runs.folder import RunFolder
from simbal.training.module import LitMoE
from simbal.training.run import train
from simbal.training.signals import StopRequest
from tests.child_processes import in_a_fork, wait_until
from tests.conftest import MARKOV, SMALL
from tests.programs import Program
from tests.training.run_files import assert_same_run, checkpoints

EXIT_CODES = {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGUSR1: 138, signal.SIGUSR2: 140}


def send_signal_in(monkeypatch, method, step, number, fn="fit"):
    """Send a signal to this process at the first call of a method of the module in a step."""
    original, sent = getattr(LitMoE, method), []

    def run(self, *args, **kwargs):
        if self.global_step == step and self.trainer.state.fn == fn and not sent:
            sent.append(os.kill(os.getpid(), number))
        return original(self, *args, **kwargs)

    monkeypatch.setattr(LitMoE, method, run)


@pytest.mark.parametrize(
    ("number", "method", "fn", "step", "saved"),
    [
        (signal.SIGINT, "training_step", "fit", 6, "step-00000007.ckpt"),  # in the first of two micro-batches
        (signal.SIGTERM, "validation_step", "fit", 6, "step-00000006.ckpt"),
        (signal.SIGUSR2, "validation_step", "validate", 0, None),
        (signal.SIGUSR1, "validation_step", "validate", 12, "step-00000012.ckpt"),
    ],
)
def test_a_stopped_run_saves_and_resumes_to_the_same_result(
    small_spec, finished, monkeypatch, capsys, number, method, fn, step, saved
):
    keys = ("trainer.micro_batch=4", "trainer.pes_every=3", "balancing=lf_lbl", "trainer.ckpt_every=5")
    reference, stopped = finished(*keys), small_spec(*keys)
    handlers = [signal.getsignal(number) for number in EXIT_CODES]
    with monkeypatch.context() as patch:
        send_signal_in(patch, method, step, number, fn)
        with pytest.raises(SystemExit) as end:
            train(stopped)
    assert end.value.code == EXIT_CODES[number]
    stopped_at = int(saved[5:13]) if saved else 0
    assert f"stopped by {number.name} at step {stopped_at}" in capsys.readouterr().out
    assert checkpoints(stopped)[-1:] == ([saved] if saved else [])
    assert not (stopped.path / "record.json").exists()
    assert [signal.getsignal(number) for number in EXIT_CODES] == handlers
    train(stopped)
    assert (f"resuming from step {stopped_at} of " in capsys.readouterr().out) == (saved is not None)
    assert_same_run(reference, stopped)
    assert RunFolder(stopped.path).read_record()["warnings"] == []


@pytest.mark.parametrize("method", ["training_step", "validation_step"])
def test_a_previous_handler_runs_after_the_save_and_the_run_continues(small_spec, finished, monkeypatch, method):
    """For example, submitit installs a handler for preemption."""
    reference, warned = finished(), small_spec("trainer.ckpt_every=100")
    saved = []
    before = signal.signal(signal.SIGUSR2, lambda *_: saved.extend(checkpoints(warned)))
    try:
        send_signal_in(monkeypatch, method, 6, signal.SIGUSR2)
        train(warned)
    finally:
        signal.signal(signal.SIGUSR2, before)
    assert saved == ["step-00000007.ckpt"]  # a validation is completed first
    assert_same_run(reference, warned)


@pytest.mark.slow
def test_a_stopped_program_exits_with_the_code_of_the_signal(tmp_path, cache_dir):
    steps = ("trainer.max_steps=100000", "trainer.val_every=100000", "trainer.ckpt_every=100000")
    places = (f"output_dir={tmp_path}", f"data.cache_dir={cache_dir}")
    process = Program("train.py", *SMALL, *MARKOV, *steps, *places, cwd=tmp_path)
    wait_until(lambda: process.poll() is not None or any(tmp_path.glob("default/*/progress.json")))
    process.send_signal(signal.SIGINT)
    out, err = process.communicate()
    assert process.returncode == 130, err
    assert "rerun the command to resume" in out
    assert len([*tmp_path.glob("default/*/checkpoints/step-*.ckpt")]) == 1
    assert "Traceback" not in err


def test_a_second_signal_kills_a_process_that_hangs(tmp_path):
    def hang():
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        request = StopRequest()
        with request.listen():
            os.kill(os.getpid(), signal.SIGTERM)
            (tmp_path / "received").write_text(signal.Signals(request.number).name)
            os.kill(os.getpid(), signal.SIGTERM)

    assert in_a_fork(hang) == -signal.SIGTERM
    assert (tmp_path / "received").read_text() == "SIGTERM"
