"""A named backend runs or gives the reason why not; `auto` follows measurements and names skipped backends."""

import importlib.util
import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from simbal.errors import UserError
from simbal.experts import fused, megablocks
from simbal.experts.fused import CONFIGS, config_for
from simbal.experts.select import BACKENDS, Backend, select_backend
from simbal.training.run import train
from tests.compiler import needs_compiler

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
FP32, BF16 = torch.float32, torch.bfloat16
MISSING = {name for name in ("triton", "megablocks", "stk") if importlib.util.find_spec(name) is None}
needs_megablocks = pytest.mark.skipif(bool(MISSING), reason=f"{MISSING} not installed: make setup-gpu")


@pytest.fixture
def all_run(monkeypatch):
    """Every backend can run, as on a GPU with all packages installed."""
    for name, backend in BACKENDS.items():
        monkeypatch.setitem(BACKENDS, name, Backend(backend.run, lambda *_: None))


@pytest.fixture
def installed(monkeypatch):
    """All packages are installed, and no GPU is visible."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())


def test_on_a_cpu_auto_takes_the_measured_backend_unless_it_cannot_run():
    assert select_backend("auto", CPU, BF16, 64, 64).name == "torch"
    choice = select_backend("auto", CPU, BF16, 30, 64)
    assert choice.name == "reference"
    assert "torch cannot run here: model.d_model=30" in choice.reason


@needs_compiler
def test_on_a_cpu_auto_takes_native_in_fp32():
    choice = select_backend("auto", CPU, FP32, 30, 64)
    assert choice.name == "native"
    assert "measured" in choice.reason


@pytest.mark.parametrize(("d_expert", "reason"), [(768, "measured 1.6 times"), (512, "the default on cuda")])
def test_on_cuda_auto_takes_the_measured_or_the_default_backend(all_run, d_expert, reason):
    choice = select_backend("auto", CUDA, BF16, 768, d_expert)
    assert choice.name == "fused"
    assert reason in choice.reason


@pytest.mark.parametrize("name", BACKENDS)
def test_a_named_backend_runs_or_is_refused_but_never_replaced(all_run, monkeypatch, name):
    assert select_backend(name, CUDA, BF16, 768, 768).name == name
    monkeypatch.setitem(BACKENDS, name, Backend(BACKENDS[name].run, lambda *_: "it is broken"))
    with pytest.raises(UserError, match=f"experts.backend={name} .*it is broken"):
        select_backend(name, CUDA, BF16, 768, 768)


@pytest.mark.parametrize("name", ["torch", "native", "megablocks", "fused"])
def test_only_reference_supports_biases(name):
    with pytest.raises(UserError, match=f"experts.backend={name} .*model.bias=true.*experts=reference"):
        select_backend(name, CPU, FP32, 64, 64, bias=True)
    assert {select_backend(n, CPU, FP32, 64, 64, bias=True).name for n in ("auto", "reference")} == {"reference"}


@pytest.mark.parametrize(
    ("backend", "device", "dtype", "widths", "names"),
    [
        (megablocks, CPU, FP32, (768, 768), "CUDA"),
        (megablocks, CUDA, BF16, (768, 64), "model.d_expert=64 must be multiples of 128"),
        (megablocks, CUDA, FP32, (768, 768), "TF32"),
        (megablocks, CUDA, torch.float64, (768, 768), "float64"),
        (megablocks, CUDA, BF16, (768, 768), None),
        (fused, CPU, FP32, (768, 768), "CUDA"),
        (fused, CUDA, FP32, (768, 768), "TF32"),
        (fused, CUDA, torch.float64, (768, 768), "float64"),
        (fused, CUDA, BF16, (768, 32), "model.d_expert=32 must be multiples of 64"),
        (fused, CUDA, BF16, (768, 192), None),
        (fused, CUDA, torch.float16, (768, 192), None),
    ],
)
def test_a_backend_says_why_it_cannot_run(installed, backend, device, dtype, widths, names):
    reason = backend.unsupported(device, dtype, *widths)
    assert reason is None if names is None else names in reason


@pytest.mark.parametrize("backend", [megablocks, fused])
def test_triton_interpreter_is_refused_in_bf16(installed, monkeypatch, backend):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert backend.unsupported(CPU, FP32, 128, 128) is None
    assert "bfloat16" in backend.unsupported(CPU, BF16, 128, 128)


def test_a_missing_package_and_too_little_shared_memory_are_named(installed, monkeypatch):
    class Turing:
        shared_memory_per_block_optin = 65536

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: Turing)
    assert "needs 99328 bytes of shared memory, but this GPU has 65536" in fused.unsupported(CUDA, BF16, 768, 768)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "stk" else object())
    assert "stk is not installed: run `make setup-gpu`" in megablocks.unsupported(CUDA, BF16, 768, 768)


@pytest.mark.parametrize(
    ("widths", "memory", "chosen"),
    [
        ((768, 1536), 232_448, 0),  # an H100
        ((768, 1536), 166_912, 1),  # an A100
        ((768, 384), 232_448, 1),
        ((768, 192), 232_448, 2),
        ((768, 768), 65_536, None),
        ((96, 768), 232_448, None),
    ],
)
def test_widths_and_shared_memory_choose_the_blocks(widths, memory, chosen):
    assert config_for(*widths, memory) is (None if chosen is None else CONFIGS[chosen])


@given(st.sampled_from(CONFIGS), st.integers(1, 600), st.lists(st.integers(0, 20_000), min_size=1, max_size=64))
def test_partial_sums_of_long_experts_fit_into_their_buffer(config, tiles, rows_E):
    R = sum(rows_E)
    chunk_rows = config.chunk_rows(R, tiles)
    parts = sum(-(-rows // chunk_rows) for rows in rows_E if rows > chunk_rows)
    assert parts <= 2 * R // chunk_rows
    assert parts * tiles <= 2 * config.programs + tiles
    assert chunk_rows % config.weight_grad.depth == 0


@pytest.mark.parametrize("width", [768, 1536])
def test_balanced_experts_of_the_papers_models_are_not_split(width):
    config, R = config_for(width, width), 4 * 16384
    for width_i in (width, 2 * width):
        tiles = (width_i // config.weight_rows) * (width // config.weight_grad.columns)
        assert config.chunk_rows(R, tiles) > 2 * R / 32


def test_a_run_prints_and_records_its_backend_and_the_reason(small_spec, capsys):
    spec = small_spec("experts=auto", "model.d_expert=8", "trainer.max_steps=1")
    train(spec)
    record = json.loads((spec.path / "record.json").read_text())
    reason = record["backend_choice"]["reason"]
    assert reason.startswith("auto chose ")
    assert reason in (spec.path / "train.log").read_text()
    assert reason in capsys.readouterr().out
