"""Backend `megablocks` in Triton's interpreter; see `test_interpreted.py`."""

import importlib
import json
import os
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.gpu import layers, upstream
from benchmarks.gpu.training import smoke_shape
from simbal.analysis.pruning import kept_plan
from simbal.errors import UserError
from simbal.experts.dispatch import RoutingPlan
from simbal.experts.megablocks import Topology
from simbal.experts.megablocks_ops import install, kernels
from simbal.experts.megablocks_weights import from_megablocks, to_megablocks
from simbal.experts.select import BACKENDS, apply_experts, choose
from simbal.model.init import initialise
from simbal.model.transformer import Transformer
from simbal.training.run import train
from tests.experts.test_backends import assert_close, case, outputs

assert os.environ.get("TRITON_INTERPRET") == "1", "run test_interpreted.py: Triton reads TRITON_INTERPRET once"
TOLERANCE = {torch.float32: 1e-5, torch.float16: 5e-3}
SIZES = {"N": 24, "D": 128, "width": 128, "E": 4}


def compare(leaves, experts_NK, dy, dtype=torch.float32):
    want = outputs(
        apply_experts, [leaf.detach().float().requires_grad_() for leaf in leaves], experts_NK, dy, "reference"
    )
    leaves = [leaves[0].to(dtype), leaves[1].float(), leaves[2].to(dtype), leaves[3].to(dtype)]
    got = outputs(apply_experts, [leaf.detach().requires_grad_() for leaf in leaves], experts_NK, dy, "megablocks")
    assert [g.dtype for g in got] == [dtype, dtype, torch.float32, dtype, dtype]
    assert_close(got, want, TOLERANCE[dtype])


@pytest.mark.parametrize(
    ("routing", "E", "K", "width", "dtype"),
    [
        ("balanced", 4, 2, 128, torch.float32),
        ("balanced", 4, 2, 128, torch.float16),
        pytest.param("skewed", 6, 3, 256, torch.float32, marks=pytest.mark.slow),  # an empty expert
        pytest.param("skewed", 6, 3, 256, torch.float16, marks=pytest.mark.slow),
        pytest.param("collapsed", 4, 2, 128, torch.float32, marks=pytest.mark.slow),
        pytest.param("balanced", 4, 1, 128, torch.float32, marks=pytest.mark.slow),
        pytest.param("balanced", 4, 4, 128, torch.float32, marks=pytest.mark.slow),
    ],
)
def test_megablocks_equals_reference(routing, E, K, width, dtype):
    leaves, experts_NK, dy = case(routing, N=24, D=128, width=width, E=E, K=K, dtype=torch.float32)
    compare([leaves[0], leaves[1], leaves[2].detach() / 6, leaves[3].detach() / 6], experts_NK, dy, dtype)


@pytest.mark.slow
def test_an_expert_of_more_rows_than_a_block():
    leaves, experts_NK, dy = case("skewed", N=150, D=128, width=128, E=3, K=1, dtype=torch.float32)
    compare([*leaves[:2], leaves[2].detach() / 6, leaves[3].detach() / 6], torch.zeros_like(experts_NK), dy)


@pytest.mark.slow
def test_it_accepts_an_expanded_gradient_and_a_strided_input():
    leaves, experts_NK, _ = case("balanced", **SIZES, dtype=torch.float32)
    leaves[0] = torch.randn(24, 256)[:, ::2]
    compare(leaves, experts_NK, torch.ones(()).expand(24, 128))


@pytest.mark.slow
def test_a_plan_of_kept_choices_gives_the_sum_over_them():
    leaves, experts_NK, _ = case("balanced", **SIZES, dtype=torch.float32)
    x, p, w13, w2 = (leaf.detach() for leaf in leaves)
    kept_NK = torch.rand(p.shape, generator=torch.Generator().manual_seed(0)) > 0.5
    p = p.masked_fill(~kept_NK, 0)
    plan = kept_plan(experts_NK, p, kept_NK, 4)
    want = BACKENDS["reference"].run(x, RoutingPlan.build(experts_NK, p, 4), w13, w2)
    torch.testing.assert_close(BACKENDS["megablocks"].run(x, plan, w13, w2), want, rtol=1e-4, atol=1e-3)


def test_mixed_dtypes_are_refused():
    leaves, experts_NK, _ = case("balanced", **SIZES, dtype=torch.float32)
    x, p, w13, w2 = leaves
    with pytest.raises(ValueError, match="must have one dtype"):
        BACKENDS["megablocks"].run(x.half(), RoutingPlan.build(experts_NK, p, 4), w13, w2)


@pytest.mark.slow
def test_block_columns_past_255():
    """Experts 256 and 257 of 258, where the gate and up matrix is 516 blocks wide and the other one 258."""
    leaves, _, dy = case("balanced", N=8, D=128, width=128, E=258, K=2, dtype=torch.float32)
    experts_NK = torch.tensor([[256, 257]]).expand(8, 2)
    compare([*leaves[:2], leaves[2].detach() / 6, leaves[3].detach() / 6], experts_NK, dy)


@pytest.mark.parametrize("block", [255, 257])
@pytest.mark.parametrize("dtype", [torch.int16, torch.int32])
def test_stk_multiplies_int16_indices_in_16_bits_in_sdd_but_not_in_dsd(block, dtype):
    """Why Topology holds both kinds; if the first assertion fails, stk or Triton has been mended."""
    blocks = 258
    g = torch.Generator().manual_seed(0)
    around = torch.randn(2 * blocks * 128, 32, generator=g)  # so that a negative offset reads numbers, not beyond
    a, b = around[blocks * 128 :], torch.randn(32, 128, generator=g)
    index, zero = torch.tensor([block], dtype=dtype), torch.zeros(1, dtype=dtype)
    rows = slice(block * 128, (block + 1) * 128)
    out = torch.empty(1, 128, 128)
    kernels()[1].sdd(a, b, (blocks * 128, 128), out, None, index, zero)
    assert torch.allclose(out[0], a[rows] @ b, atol=1e-4) == (dtype is torch.int32 or block < 256)
    data, wide, out = torch.randn(1, 128, 128, generator=g), torch.randn(blocks * 128, 128, generator=g), out[0]
    ends = torch.tensor([0, 1], dtype=torch.int32)
    kernels()[1].dsd((128, blocks * 128), data, ends, zero, index, None, None, None, False, wide, out)
    assert torch.allclose(out, data[0] @ wide[rows], atol=1e-3)


def test_the_topology_gives_each_kernel_the_width_it_needs():
    topology = Topology(torch.tensor([2, 0, 1]), 3 * 128, 256)
    assert (topology.row_Z.dtype, topology.column_Z.dtype) == (torch.int32, torch.int32)
    assert (topology.short_column_Z.dtype, topology.short_row_by_column_Z.dtype) == (torch.int16, torch.int16)
    assert topology.column_Z.tolist() == [0, 1, 0, 1, 4, 5]
    assert topology.begin_of_column.tolist() == [0, 2, 4, 4, 4, 5, 6]
    with pytest.raises(UserError, match=r"16777216 rows of 128 features.*smaller trainer.micro_batch"):
        Topology(torch.tensor([2**17]), 2**24, 128)


@pytest.mark.slow
@pytest.mark.parametrize("impl", ["sparse", "grouped"])
def test_exported_weights_make_megablocks_own_module_the_same_function(impl):
    leaves, experts_NK, dy = case("skewed", N=24, D=128, width=256, E=4, K=2, dtype=torch.float32)
    leaves = [leaf.detach() for leaf in (*leaves[:2], leaves[2] / 6, leaves[3] / 6)]
    given = layers.Case(layers.Shape("", 24, 128, 256, 4, 2), leaves, experts_NK, dy)
    want = outputs(apply_experts, [leaf.requires_grad_() for leaf in leaves], experts_NK, dy, "reference")
    assert_close(layers.step(layers.Upstream(impl), given), want, 1e-5)
    module = upstream.upstream_module(impl, 128, 256, 4, 2, torch.device("cpu"), torch.float32)
    assert set(module.state_dict()) == set(to_megablocks(*leaves[2:]))
    module.load_state_dict(to_megablocks(*leaves[2:]))
    for ours, back in zip(leaves[2:], from_megablocks(module.state_dict(), 4), strict=True):
        assert torch.equal(ours, back)


@pytest.mark.slow
def test_a_checkpoint_of_any_backend_is_the_same_model_in_any_other():
    shape = smoke_shape()
    tokens_BS = torch.randint(512, (1, 8), generator=torch.Generator().manual_seed(0))
    hidden = {}
    first = Transformer(shape, "torch")
    initialise(first, 0, 0.02, "normal")
    for name in BACKENDS:
        model = Transformer(shape, choose(name, torch.device("cpu"), torch.float32, 128, 128).name)
        model.load_state_dict(first.state_dict())
        hidden[name] = model(tokens_BS)[0].detach()
    for name, got in hidden.items():
        torch.testing.assert_close(got, hidden["reference"], rtol=1e-4, atol=1e-5, msg=name)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["megablocks", "fused"])
def test_a_run_trains_and_records_its_backend(small_spec, name):
    widths = ("model.d_model=128", "model.d_expert=128", "model.num_layers=1", "model.num_experts=2", "model.top_k=1")
    few = ("trainer.max_steps=1", "trainer.global_batch=1", "trainer.micro_batch=1")
    data = ("data.documents=4", "data.validation_tokens=16")
    runs = {}
    for backend in (name, "torch"):
        spec = small_spec(f"experts={backend}", *widths, *few, *data)
        train(spec)
        runs[backend] = json.loads((spec.path / "record.json").read_text())
    assert runs[name]["backend"] == name
    assert runs[name]["backend_choice"].get("megablocks_ops") == (install() if name == "megablocks" else None)
    assert runs[name]["metrics"]["val/loss"] == pytest.approx(runs["torch"]["metrics"]["val/loss"], rel=1e-5)


def test_gpu_check_stops_at_the_first_wrong_backend(monkeypatch):
    monkeypatch.setenv("SMOKE", "1")
    gpu_check = importlib.import_module("benchmarks.gpu_check")
    wrong = BACKENDS["torch"].run
    monkeypatch.setitem(
        BACKENDS, "torch", type(BACKENDS["torch"])(lambda *a: 1.01 * wrong(*a), BACKENDS["torch"].unsupported)
    )
    with pytest.raises(UserError, match=r"torch is wrong on balanced routing in torch.float32: y is off by 1.0e-02"):
        list(gpu_check.check(torch.device("cpu"), torch.float32))


def test_the_stand_in_is_used_and_said():
    assert install() in ("torch", "compiled")
    assert Path(sys.modules["megablocks"].__file__).is_file()
