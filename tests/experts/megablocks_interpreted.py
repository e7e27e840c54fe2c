"""Backend `megablocks` in Triton's interpreter, and runs with both Triton backends; see `test_interpreted.py`."""

import json

import pytest
import torch

from benchmarks.gpu.training import smoke_shape
from simbal.analysis.pruning import kept_plan
from simbal.errors import UserError
from simbal.experts.backends import RoutingPlan
from simbal.experts.megablocks import Topology, import_kernels
from simbal.experts.select import BACKENDS, select_backend
from simbal.model.init import initialize
from simbal.model.transformer import Transformer
from simbal.training.run import train
from tests.experts.test_backends import assert_close, case, outputs

TOLERANCE = {torch.float32: 1e-5, torch.float16: 5e-3}
FP32, FP16 = torch.float32, torch.float16


def scaled_case(routing, N=24, width=128, E=4, K=2):
    leaves, experts_NK, dy = case(routing, N=N, D=128, width=width, E=E, K=K, dtype=FP32)
    return [*leaves[:2], leaves[2].detach() / 6, leaves[3].detach() / 6], experts_NK, dy


def compare(leaves, experts_NK, dy, dtype=FP32):
    exact = [leaf.detach().float().requires_grad_() for leaf in leaves]
    want = outputs("reference", exact, experts_NK, dy)
    rounded = [leaves[0].to(dtype), leaves[1].float(), leaves[2].to(dtype), leaves[3].to(dtype)]
    got = outputs("megablocks", [leaf.detach().requires_grad_() for leaf in rounded], experts_NK, dy)
    assert [g.dtype for g in got] == [dtype, dtype, FP32, dtype, dtype]
    assert_close(got, want, TOLERANCE[dtype])


@pytest.mark.parametrize(
    ("routing", "sizes", "dtype"),
    [
        ("balanced", {}, FP32),
        ("balanced", {"K": 1, "E": 2}, FP16),
        pytest.param("skewed", {"E": 5, "width": 256}, FP32, marks=pytest.mark.slow),  # an empty expert
        pytest.param("collapsed", {"K": 1}, FP32, marks=pytest.mark.slow),
        pytest.param("balanced", {"K": 2, "E": 2}, FP32, marks=pytest.mark.slow),
        pytest.param("collapsed", {"N": 150, "E": 2, "K": 1}, FP32, marks=pytest.mark.slow),  # more rows than a block
    ],
)
def test_megablocks_equals_reference(routing, sizes, dtype):
    compare(*scaled_case(routing, **sizes), dtype)


@pytest.mark.slow
def test_it_accepts_an_expanded_gradient_and_a_strided_input():
    leaves, experts_NK, _ = scaled_case("balanced", E=2, K=1)
    leaves[0] = torch.randn(24, 256)[:, ::2]
    compare(leaves, experts_NK, torch.ones(()).expand(24, 128))


@pytest.mark.slow
def test_a_plan_of_kept_choices_gives_the_sum_over_them():
    leaves, experts_NK, _ = scaled_case("balanced")
    x, p, w13, w2 = (leaf.detach() for leaf in leaves)
    kept_NK = torch.rand(p.shape, generator=torch.Generator().manual_seed(0)) > 0.5
    p = p.masked_fill(~kept_NK, 0)
    plan = kept_plan(experts_NK, p, kept_NK, 4)
    want = BACKENDS["reference"].run(x, RoutingPlan.build(experts_NK, p, 4), w13, w2)
    torch.testing.assert_close(BACKENDS["megablocks"].run(x, plan, w13, w2), want, rtol=1e-4, atol=1e-3)


def test_mixed_dtypes_are_refused():
    (x, p, w13, w2), experts_NK, _ = scaled_case("balanced")
    with pytest.raises(ValueError, match="one dtype"):
        BACKENDS["megablocks"].run(x.half(), RoutingPlan.build(experts_NK, p, 4), w13, w2)


@pytest.mark.slow
def test_block_columns_past_255():
    """Experts 256 and 257 of 258: the gate and up matrix is 516 blocks wide, the down matrix 258."""
    leaves, _, dy = scaled_case("balanced", N=8, E=258)
    compare(leaves, torch.tensor([[256, 257]]).expand(8, 2), dy)


@pytest.mark.parametrize("dtype", [torch.int16, torch.int32])
def test_stk_multiplies_int16_indices_in_16_bits_in_sdd_but_not_in_dsd(dtype):
    """The reason why Topology keeps both dtypes. If the first assertion fails, stk or Triton has fixed the bug."""
    blocks, block = 258, 257
    g = torch.Generator().manual_seed(0)
    around = torch.randn(2 * blocks * 128, 32, generator=g)  # so that a negative offset stays in the tensor
    a, b = around[blocks * 128 :], torch.randn(32, 128, generator=g)
    index, zero = torch.tensor([block], dtype=dtype), torch.zeros(1, dtype=dtype)
    rows = slice(block * 128, (block + 1) * 128)
    out = torch.empty(1, 128, 128)
    import_kernels()[1].sdd(a, b, (blocks * 128, 128), out, None, index, zero)
    assert torch.allclose(out[0], a[rows] @ b, atol=1e-4) == (dtype is torch.int32)
    data, wide, out = torch.randn(1, 128, 128, generator=g), torch.randn(blocks * 128, 128, generator=g), out[0]
    ends = torch.tensor([0, 1], dtype=torch.int32)
    import_kernels()[1].dsd((128, blocks * 128), data, ends, zero, index, None, None, None, False, wide, out)
    assert torch.allclose(out, data[0] @ wide[rows], atol=1e-3)


def test_the_topology_gives_each_kernel_the_index_dtype_it_needs():
    topology = Topology(torch.tensor([2, 0, 1]), 3 * 128, 256)
    assert (topology.row_Z.dtype, topology.column_Z.dtype) == (torch.int32, torch.int32)
    assert (topology.short_column_Z.dtype, topology.short_row_by_column_Z.dtype) == (torch.int16, torch.int16)
    assert topology.column_Z.tolist() == [0, 1, 0, 1, 4, 5]
    assert topology.begin_of_column.tolist() == [0, 2, 4, 4, 4, 5, 6]
    with pytest.raises(UserError, match=r"16777216 rows of 128 features.*smaller trainer.micro_batch"):
        Topology(torch.tensor([2**17]), 2**24, 128)


@pytest.mark.slow
def test_a_checkpoint_of_any_backend_is_the_same_model_in_any_other():
    tokens_BS = torch.randint(512, (1, 8), generator=torch.Generator().manual_seed(0))
    models = {name: Transformer(smoke_shape(), name) for name in BACKENDS}
    initialize(models["reference"], 0, 0.02, "normal")
    want = models["reference"](tokens_BS)[0].detach()
    for name, model in models.items():
        select_backend(name, torch.device("cpu"), FP32, 128, 128)
        model.load_state_dict(models["reference"].state_dict())
        torch.testing.assert_close(model(tokens_BS)[0].detach(), want, rtol=1e-4, atol=1e-5, msg=name)


@pytest.mark.slow
def test_runs_with_triton_backends_end_like_a_run_with_torch(small_spec):
    widths = ("model.d_model=128", "model.d_expert=128", "model.num_layers=1", "model.num_experts=2", "model.top_k=1")
    few = ("trainer.max_steps=1", "trainer.global_batch=1", "trainer.micro_batch=1")
    data = ("data.documents=4", "data.validation_tokens=16")
    losses = {}
    for backend in ("torch", "megablocks", "fused"):
        spec = small_spec(f"experts={backend}", *widths, *few, *data)
        train(spec)
        record = json.loads((spec.path / "record.json").read_text())
        assert record["backend"] == backend
        assert ("triton" in record["backend_choice"]) == (backend != "torch")
        losses[backend] = record["metrics"]["val/loss"]
    assert losses["megablocks"] == pytest.approx(losses["torch"], rel=1e-5)
    assert losses["fused"] == pytest.approx(losses["torch"], rel=1e-5)
