"""A run that is asked to stop saves itself after the step in progress, and goes on from there to the same result."""

import os
import signal

import pytest

from simbal.runs.folder import RunFolder
from simbal.training import checkpoint
from simbal.training.module import LitMoE
from simbal.training.run import train
from simbal.training.signals import StopRequest
from tests.child_processes import in_a_fork, wait_until
from tests.conftest import MARKOV, SMALL
from tests.programs import Program
from tests.training.run_files import assert_same_run

SIGNALS = {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGUSR1: 138, signal.SIGUSR2: 140}


def signal_in(monkeypatch, method, step, number, fn="fit"):
    """Send the signal to this process when `method` of the module is called in that step for the first time."""
    original, sent = getattr(LitMoE, method), []

    def run(self, *args, **kwargs):
        if self.global_step == step and self.trainer.state.fn == fn and not sent:
            sent.append(os.kill(os.getpid(), number))
        return original(self, *args, **kwargs)

    monkeypatch.setattr(LitMoE, method, run)


@pytest.mark.parametrize(
    ("number", "method", "step", "saved"),
    [
        (signal.SIGINT, "training_step", 6, "step-00000007.ckpt"),  # in the first of two micro-batches
        (signal.SIGTERM, "validation_step", 6, "step-00000006.ckpt"),
        (signal.SIGUSR1, "training_step", 6, "step-00000007.ckpt"),
        (signal.SIGUSR2, "validation_step", 6, "step-00000006.ckpt"),
    ],
)
def test_it_saves_and_goes_on_to_the_same_result(
    small_spec, finished, monkeypatch, capsys, number, method, step, saved
):
    keys = ("trainer.micro_batch=4", "trainer.pes_every=3", "balancing=lf_lbl")
    whole, stopped = finished(*keys), small_spec(*keys)
    handlers = [signal.getsignal(number) for number in SIGNALS]
    with monkeypatch.context() as patch:
        signal_in(patch, method, step, number)
        with pytest.raises(SystemExit) as end:
            train(stopped)
    assert end.value.code == SIGNALS[number]
    assert f"stopped by {number.name} at step {int(saved[5:13])}" in capsys.readouterr().out
    assert (stopped.path / "checkpoints" / saved).exists()
    assert not (stopped.path / "record.json").exists()
    assert [signal.getsignal(number) for number in SIGNALS] == handlers
    train(stopped)
    assert f"resuming from step {int(saved[5:13])} of " in capsys.readouterr().out
    assert_same_run(whole, stopped)
    assert RunFolder(stopped.path).read_record()["warnings"] == []


@pytest.mark.parametrize(("step", "checkpoints"), [(0, []), (12, ["step-00000012.ckpt", "step-00000010.ckpt"])])
def test_it_stops_in_a_validation_before_training_or_after_it(
    small_spec, finished, monkeypatch, capsys, step, checkpoints
):
    whole, stopped = finished(), small_spec("trainer.ckpt_every=5")  # no step of it is the last
    with monkeypatch.context() as patch:
        signal_in(patch, "validation_step", step, signal.SIGTERM, fn="validate")
        with pytest.raises(SystemExit) as end:
            train(stopped)
    assert end.value.code == 143
    assert f"stopped by SIGTERM at step {step}: " in capsys.readouterr().out
    assert [path.name for path in checkpoint.periodic_checkpoints(stopped.path / "checkpoints")] == checkpoints
    train(stopped)
    assert_same_run(whole, stopped)


@pytest.mark.parametrize("method", ["training_step", "validation_step"])
def test_a_signal_that_somebody_waits_for_is_his_once_the_run_is_saved_and_the_run_goes_on_if_he_returns(
    small_spec, finished, monkeypatch, method
):
    """As submitit waits for the warning of a pre-emption."""
    whole, warned = finished(), small_spec("trainer.ckpt_every=100")
    saved = []
    folder = warned.path / "checkpoints"
    before = signal.signal(signal.SIGUSR2, lambda *_: saved.extend(path.name for path in folder.iterdir()))
    try:
        signal_in(monkeypatch, method, 6, signal.SIGUSR2)
        train(warned)
    finally:
        signal.signal(signal.SIGUSR2, before)
    assert saved == ["step-00000007.ckpt"]  # a validation comes to its end before
    assert_same_run(whole, warned)


@pytest.mark.slow
@pytest.mark.parametrize("signals", [(signal.SIGINT,), (signal.SIGTERM, signal.SIGTERM)])
def test_a_program_leaves_with_the_signals_code(tmp_path, cache_dir, signals):
    steps = ("trainer.max_steps=100000", "trainer.val_every=100000", "trainer.ckpt_every=100000")
    places = (f"output_dir={tmp_path}", f"data.cache_dir={cache_dir}")
    process = Program("train.py", *SMALL, *MARKOV, *steps, *places, cwd=tmp_path)
    wait_until(lambda: process.poll() is not None or any(tmp_path.glob("default/*/progress.json")))
    for number in signals:
        process.send_signal(number)
    out, err = process.communicate()
    if len(signals) == 1:
        assert process.returncode == 128 + signals[0], err
        assert "rerun the command to resume" in out
        assert len([*tmp_path.glob("default/*/checkpoints/step-*.ckpt")]) == 1
    else:  # the second may come before the first is heard, or after it is done
        assert process.returncode in (-signals[1], 128 + signals[1])
    assert "Traceback" not in err


def test_a_second_signal_ends_a_program_that_cannot_stop(tmp_path):
    """One that hangs inside a step."""

    def hang():
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        request = StopRequest()
        with request.listen():
            os.kill(os.getpid(), signal.SIGTERM)
            (tmp_path / "heard").write_text(signal.Signals(request.number).name)
            os.kill(os.getpid(), signal.SIGTERM)

    assert in_a_fork(hang) == -signal.SIGTERM
    assert (tmp_path / "heard").read_text() == "SIGTERM"
