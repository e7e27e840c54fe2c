"""Backend `fused` on a machine without a GPU: what it refuses, and how it cuts work."""

import importlib.util

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from simbal.experts import fused
from simbal.experts.fused_blocks import CONFIGS, config_for

CUDA, CPU = torch.device("cuda"), torch.device("cpu")


@pytest.fixture
def compiling(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())


@pytest.mark.parametrize(
    ("device", "dtype", "widths", "says"),
    [
        (CPU, torch.float32, (768, 768), "it needs CUDA, not cpu"),
        (CUDA, torch.float32, (768, 768), "multiplies as TF32: set trainer.precision=bf16-mixed"),
        (CUDA, torch.float64, (768, 768), "needs bfloat16 or float16, not torch.float64"),
        (CUDA, torch.bfloat16, (768, 32), "model.d_expert=32 must be multiples of 64"),
    ],
)
def test_fused_says_why_it_cannot_run(compiling, device, dtype, widths, says):
    assert says in fused.unsupported(device, dtype, *widths)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_fused_runs_on_cuda_in_half_precision(compiling, dtype):
    assert fused.unsupported(CUDA, dtype, 768, 192) is None


def test_a_gpu_with_too_little_shared_memory_is_refused(compiling, monkeypatch):
    class Turing:
        shared_memory_per_block_optin = 65536

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: Turing)
    says = "needs 99328 bytes of shared memory, this GPU has 65536"
    assert says in fused.unsupported(CUDA, torch.bfloat16, 768, 768)


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
def test_partial_sums_of_cut_experts_fit_into_what_is_set_aside_for_them(config, tiles, rows_E):
    R = sum(rows_E)
    chunk_rows = config.chunk_rows(R, tiles)
    parts = sum(-(-rows // chunk_rows) for rows in rows_E if rows > chunk_rows)
    assert parts <= 2 * R // chunk_rows
    assert parts * tiles <= 2 * config.programs + tiles
    assert chunk_rows % config.weight_grad.depth == 0


@pytest.mark.parametrize(("width", "N"), [(768, 16384), (1536, 16384)])
def test_balanced_experts_of_the_papers_models_are_not_cut(width, N):
    config, R = config_for(width, width), 4 * N
    for width_i in (width, 2 * width):
        tiles = (width_i // config.weight_rows) * (width // config.weight_grad.columns)
        assert config.chunk_rows(R, tiles) > 2 * R / 32
