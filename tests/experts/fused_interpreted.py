"""Backend `fused` in Triton's interpreter, chosen before Triton is imported: see `test_interpreted.py`."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from simbal.analysis.pruning import kept_plan
from simbal.experts import fused_blocks
from simbal.experts.backends import reference
from simbal.experts.dispatch import RoutingPlan
from simbal.experts.fused import _tile_map, fused, unsupported
from simbal.experts.fused_blocks import Blocks, Config

NAMES = ("y", "dx", "dp", "dw13", "dw2")
TOLERANCE = {torch.float32: 1e-5, torch.float16: 5e-3}
BLOCKS = Blocks(16, 16, num_warps=1, num_stages=1)
# many tiles, ragged ones, several groups of them and cut experts at sizes that take a second
SMALL = Config(16, 16, BLOCKS, BLOCKS, BLOCKS, BLOCKS, 16, shared_memory=0, group=2, programs=48, min_chunk=16)


@pytest.fixture
def small_blocks(monkeypatch):
    monkeypatch.setattr(fused_blocks, "CONFIGS", (SMALL,))


def case(routing="balanced", N=24, D=32, width=48, E=5, K=2, dtype=torch.float32):
    """Leaves (x, p, w13, w2), the choice, and an output gradient."""
    g = torch.Generator().manual_seed(0)
    logits = torch.randn(N, E, generator=g)
    if routing == "skewed":
        logits += 3 * torch.randn(E, generator=g)
    if routing == "collapsed":
        logits[:, :K] += 40
    if routing == "empty":
        logits[:, [0, E // 2, E - 1]] -= 40
    p_NK, experts_NK = logits.softmax(-1).topk(K)
    x, dy = (torch.randn(N, D, generator=g).to(dtype) for _ in range(2))
    w13, w2 = (torch.randn(*shape, generator=g).to(dtype) / 8 for shape in ((E, 2, width, D), (E, width, D)))
    return [leaf.requires_grad_() for leaf in (x, p_NK, w13, w2)], experts_NK, dy


def outputs(fn, leaves, experts_NK, dy):
    x, p, w13, w2 = leaves
    y = fn(x, RoutingPlan.build(experts_NK, p, len(w2)), w13, w2)
    return [y.detach(), *torch.autograd.grad(y, leaves, dy)]


def assert_equals_reference(leaves, experts_NK, dy):
    got = outputs(fused, leaves, experts_NK, dy)
    exact = [leaf.detach().double().requires_grad_() for leaf in leaves]
    want = outputs(reference, exact, experts_NK, dy.double())
    for name, a, b, leaf in zip(NAMES, got, want, [leaves[0], *leaves], strict=True):
        assert (a.dtype, a.shape) == (leaf.dtype, b.shape), name
        error = ((a.double() - b).abs().max() / b.abs().max()).item()
        print(f"{name} {error:.1e}", end=" ")
        assert error <= TOLERANCE[leaves[0].dtype], f"{name} is off by {error:.1e}"


@pytest.mark.parametrize(
    ("routing", "dtype"),
    [
        ("skewed", torch.float32),
        ("empty", torch.float16),
        pytest.param("balanced", torch.float32, marks=pytest.mark.slow),
        pytest.param("collapsed", torch.float32, marks=pytest.mark.slow),
        pytest.param("empty", torch.float32, marks=pytest.mark.slow),
    ],
)
def test_fused_equals_reference_with_every_gradient(small_blocks, routing, dtype):
    assert SMALL.chunk_rows(R=48, tiles=12) < 24, "no expert would be cut"
    assert_equals_reference(*case(routing, dtype=dtype))


@pytest.mark.slow
def test_cut_experts_between_short_ones_find_their_own_partial_sums(small_blocks):
    leaves, _, dy = case(N=60, K=1)
    assert_equals_reference(leaves, torch.tensor([0] * 5 + [1] * 25 + [3] * 28 + [4] * 2)[:, None], dy)


@pytest.mark.slow
@pytest.mark.parametrize(("E", "K"), [(5, 1), (4, 4), (1, 1)])
def test_fused_equals_reference_for_one_choice_and_for_all_experts(small_blocks, E, K):
    assert_equals_reference(*case(E=E, K=K))


@pytest.mark.slow
@pytest.mark.parametrize(("config", "width"), list(zip(fused_blocks.CONFIGS, (256, 384, 192), strict=True)))
def test_shipped_blocks_equal_reference_when_rows_fill_no_tile(config, width):
    assert fused_blocks.config_for(config.width, width) is config
    assert_equals_reference(*case("empty", N=201, D=config.width, width=width, E=7, K=3))


@pytest.mark.slow
def test_shipped_blocks_cut_a_long_expert_and_add_its_parts_up():
    leaves, experts_NK, dy = case("collapsed", N=1100, D=64, width=64, E=3, K=1)
    assert fused_blocks.config_for(64, 64).chunk_rows(1100, 2) < 1100 // 2
    assert_equals_reference(leaves, experts_NK, dy)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("x", "dy"),
    [
        (torch.randn(24, 64)[:, ::2], torch.ones(()).expand(24, 32)),
        (torch.randn(32, 24).T, torch.randn(32, 24).T),
        (torch.randn(1, 32).expand(24, 32), torch.randn(48, 32)[::2]),
    ],
)
def test_fused_accepts_any_strides_of_its_input_and_of_the_gradient(small_blocks, x, dy):
    assert not x.is_contiguous()
    assert not dy.is_contiguous()
    leaves, experts_NK, _ = case()
    assert_equals_reference([x.detach().requires_grad_(), *leaves[1:]], experts_NK, dy)


@pytest.mark.slow
@given(st.data())
def test_fused_equals_reference_for_any_routing(data):
    E = data.draw(st.integers(1, 6))
    K = data.draw(st.integers(1, E))
    choice = st.permutations(range(E)).map(lambda experts: experts[:K])
    experts_NK = torch.tensor(data.draw(st.lists(choice, min_size=1, max_size=32)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fused_blocks, "CONFIGS", (SMALL,))
        leaves, _, dy = case(N=len(experts_NK), D=16, width=32, E=E, K=K)
        assert_equals_reference(leaves, experts_NK, dy)


def test_no_tokens_give_no_output_and_zero_weight_gradients(small_blocks):
    y, dx, dp, dw13, dw2 = outputs(fused, *case(N=0))
    assert (y.shape, dx.shape, dp.shape) == ((0, 32), (0, 32), (0, 2))
    assert dw13.shape == (5, 2, 48, 32)
    assert dw2.shape == (5, 48, 32)
    assert not dw13.any()
    assert not dw2.any()


@pytest.fixture
def nan_in_new_memory():
    torch.use_deterministic_algorithms(True)  # which also fills new memory
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.slow
@pytest.mark.parametrize("routing", ["empty", "collapsed"])
def test_nothing_is_read_before_it_is_written_and_experts_without_rows_get_zeros(
    small_blocks, nan_in_new_memory, routing
):
    assert torch.empty(2).new_empty(2).isnan().all()
    leaves, experts_NK, dy = case(routing)
    assert_equals_reference(leaves, experts_NK, dy)
    dw13, dw2 = outputs(fused, leaves, experts_NK, dy)[3:]
    unused = sorted(set(range(5)) - set(experts_NK.flatten().tolist()))
    assert len(unused) == 3
    assert not dw13[unused].any()
    assert not dw2[unused].any()


@pytest.mark.slow
def test_a_plan_of_kept_choices_gives_the_sum_over_them(small_blocks, nan_in_new_memory):
    leaves, experts_NK, _ = case()
    x, p, w13, w2 = (leaf.detach() for leaf in leaves)
    kept_NK = torch.rand(p.shape, generator=torch.Generator().manual_seed(0)) > 0.5
    p = p.masked_fill(~kept_NK, 0)
    want = reference(x, RoutingPlan.build(experts_NK, p, len(w2)), w13, w2)
    got = fused(x, kept_plan(experts_NK, p, kept_NK, len(w2)), w13, w2)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_fused_gives_the_same_bits_twice(small_blocks):
    first, second = (outputs(fused, *case("skewed")) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.slow
def test_fused_saves_x_and_the_pre_activations_only(small_blocks):
    (x, p, w13, w2), experts_NK, _ = case()
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        fused(x, RoutingPlan.build(experts_NK, p, 5), w13, w2)
    leaves = {t.data_ptr() for t in (x, p, w13, w2)}
    assert [tuple(t.shape) for t in saved if t.is_floating_point() and t.data_ptr() not in leaves] == [(48, 96)]


@pytest.mark.slow
def test_a_second_derivative_is_refused_rather_than_wrong(small_blocks):
    (x, p, w13, w2), experts_NK, _ = case()
    y = fused(x, RoutingPlan.build(experts_NK, p, 5), w13, w2)
    (dx,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        dx.sum().backward()


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (lambda x, w13, w2: (x, w13.transpose(-1, -2).contiguous().transpose(-1, -2), w2), "must be contiguous"),
        (lambda x, w13, w2: (x.half(), w13, w2), "must have one dtype, got torch.float16, torch.float32"),
        (lambda x, w13, w2: (x[:, :24], w13[..., :24].contiguous(), w2[..., :24].contiguous()), "multiples of 16"),
    ],
)
def test_weights_that_the_kernels_would_misread_are_refused(small_blocks, spoil, says):
    (x, p, w13, w2), experts_NK, _ = case()
    x, w13, w2 = spoil(x, w13, w2)
    with pytest.raises(ValueError, match=says):
        fused(x, RoutingPlan.build(experts_NK, p, 5), w13, w2)


@pytest.mark.parametrize(("least", "want"), [(0, 4), (1, 6)])
def test_tile_map_covers_every_row_once_and_marks_surplus_tiles(least, want):
    ends = torch.tensor([0, 5, 5, 8, 17], dtype=torch.int32)
    expert, first, partial = _tile_map(ends, 17, 6, least).tolist()
    assert len(expert) == 17 // 6 + 5
    tiles = [(1, 0, -1), (3, 5, -1), (4, 8, 0), (4, 14, 1)]
    tiles += [(0, 0, -1), (2, 5, -1)] if least else []
    assert list(zip(expert, first, partial, strict=True))[:want] == sorted(tiles)
    assert expert[want:] == [-1] * (len(expert) - want)


def test_interpreter_is_refused_for_what_it_gets_wrong():
    cpu = torch.device("cpu")
    assert unsupported(cpu, torch.float32, 64, 64) is None
    assert "bfloat16 products are wrong" in unsupported(cpu, torch.bfloat16, 64, 64)
    assert "not torch.float64" in unsupported(cpu, torch.float64, 64, 64)
