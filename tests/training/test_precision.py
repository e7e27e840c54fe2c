"""bf16 on a CPU that has no instructions for it is refused, not endured."""

from types import SimpleNamespace

import pytest
import torch

from simbal.errors import UserError
from simbal.training import build
from simbal.training.build import resolve_precision
from simbal.training.callbacks import DeviceChanges

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.fixture
def cpu_with(tmp_path, monkeypatch):
    """`cpu_with("avx2 amx_bf16")`: a processor of these flags."""

    def fake(flags: str) -> None:
        (tmp_path / "cpuinfo").write_text(f"flags\t\t: fpu {flags} sse2\n")
        monkeypatch.setattr(build, "CPU_FLAGS", tmp_path / "cpuinfo")

    return fake


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true"])
@pytest.mark.parametrize("flags", ["avx2", "avx2 avx512f avx512bw"])
def test_bf16_is_refused_on_a_cpu_without_its_instructions_in_one_sentence(cpu_with, precision, flags):
    cpu_with(flags)
    with pytest.raises(UserError, match=f"trainer.precision={precision} .*trainer.force_precision=true") as refused:
        resolve_precision(precision, CPU)
    assert "\n" not in str(refused.value)
    assert resolve_precision(precision, CPU, force=True) == precision


@pytest.mark.parametrize("flags", ["avx512f avx512_bf16", "amx_bf16 amx_tile"])
def test_bf16_is_taken_on_a_cpu_with_its_instructions(cpu_with, flags):
    cpu_with(flags)
    assert resolve_precision("bf16-true", CPU) == "bf16-true"


def test_a_run_that_goes_on_in_another_precision_says_so():
    """`auto` is 32-true on a CPU and bf16-mixed on CUDA."""
    first, second = DeviceChanges(), DeviceChanges()
    for step in (0, 3):
        first.on_train_start(SimpleNamespace(global_step=step, precision="32-true"))
    assert first.warnings == []
    second.load_state_dict(first.state_dict())
    second.on_train_start(SimpleNamespace(global_step=5, precision="bf16-mixed"))
    assert second.warnings == [
        "precision changed, and with it the rounding: 32-true from step 0, bf16-mixed from step 5"
    ]
