"""Backend `megablocks` on a machine without a GPU: what it refuses, its stand-ins and its weights."""

import importlib.metadata
import importlib.util

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from simbal.experts import megablocks, megablocks_ops
from simbal.experts.megablocks_weights import from_megablocks, to_megablocks

MISSING = {name for name in ("triton", "megablocks", "stk") if importlib.util.find_spec(name) is None}
needs_megablocks = pytest.mark.skipif(bool(MISSING), reason=f"{MISSING} not installed: make setup-gpu")
CUDA, CPU = torch.device("cuda"), torch.device("cpu")


@pytest.fixture
def installed(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())


@pytest.mark.parametrize(
    ("device", "dtype", "widths", "says"),
    [
        (CPU, torch.float32, (768, 768), "it needs a CUDA device"),
        (CUDA, torch.bfloat16, (768, 64), "model.d_model=768 and model.d_expert=64 must be multiples of 128"),
        (CUDA, torch.float32, (768, 768), "TF32 on CUDA: set trainer.precision=bf16-mixed"),
        (CUDA, torch.float64, (768, 768), "its kernels have no torch.float64"),
    ],
)
def test_it_says_why_it_cannot_run(installed, device, dtype, widths, says):
    assert says in megablocks.unsupported(device, dtype, *widths)


def test_on_cuda_it_runs_bf16(installed):
    assert megablocks.unsupported(CUDA, torch.bfloat16, 768, 768) is None


def test_in_the_interpreter_bf16_is_refused(installed, monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert megablocks.unsupported(CPU, torch.float32, 128, 128) is None
    assert "multiplies bfloat16 wrongly" in megablocks.unsupported(CPU, torch.bfloat16, 128, 128)


def test_a_missing_package_is_named_with_the_command_that_installs_it(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "stk" else object())
    reason = megablocks.unsupported(CUDA, torch.bfloat16, 768, 768)
    assert reason == "stk is not installed: run `make setup-gpu`"


@given(
    st.integers(1, 6).flatmap(lambda e: st.lists(st.integers(0, e - 1), min_size=1, max_size=20).map(lambda k: (e, k)))
)
def test_the_stand_in_sorts_counts_and_replicates(example):
    num_experts, keys = example
    keys_R, sorted_R, order_R = torch.tensor(keys).int(), torch.empty(len(keys)).int(), torch.empty(len(keys)).int()
    megablocks_ops.sort(keys_R, 8, sorted_R, order_R)
    assert order_R.tolist() == sorted(range(len(keys)), key=lambda row: keys[row])
    assert sorted_R.tolist() == sorted(keys)
    counts_E = megablocks_ops.histogram(keys_R, num_experts)
    assert counts_E.tolist() == [keys.count(e) for e in range(num_experts)]
    assert megablocks_ops.histogram(keys_R[None], num_experts).tolist() == [counts_E.tolist()]
    ends_E, begins_E = torch.empty_like(counts_E), torch.empty_like(counts_E)
    megablocks_ops.inclusive_cumsum(counts_E, 0, ends_E)
    megablocks_ops.exclusive_cumsum(counts_E, 0, begins_E)
    assert torch.equal(ends_E - counts_E, begins_E)
    values, copies = torch.arange(num_experts).float()[None], torch.empty(1, len(keys))
    megablocks_ops.replicate_forward(values, ends_E, copies)
    assert copies[0].tolist() == sorted(keys)
    sums = torch.empty(1, num_experts)
    megablocks_ops.replicate_backward(torch.ones(1, len(keys)), ends_E, sums)
    assert sums[0].tolist() == counts_E.tolist()


def test_the_stand_in_lists_the_block_columns_of_each_block_row():
    columns = torch.empty(6, dtype=torch.int16)
    megablocks_ops.indices(torch.tensor([256, 256, 384]), 128, 3, 2, columns)  # the second of three experts is empty
    assert columns.tolist() == [0, 1, 0, 1, 4, 5]


def test_weights_survive_megablocks_names_and_w2_is_no_copy():
    w13, w2 = torch.randn(4, 2, 8, 6), torch.randn(4, 8, 6)
    state = to_megablocks(w13, w2)
    assert {name: tuple(w.shape) for name, w in state.items()} == dict.fromkeys(("mlp.w1", "mlp.v1", "mlp.w2"), (32, 6))
    assert state["mlp.w2"].data_ptr() == w2.data_ptr()
    assert torch.equal(state["mlp.v1"][8:16], w13[1, 1])
    assert all(torch.equal(a, b) for a, b in zip(from_megablocks(state, 4), (w13, w2), strict=True))
