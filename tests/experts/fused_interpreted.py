"""Backend `fused` in Triton's interpreter; see `test_interpreted.py`."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from simbal.analysis.pruning import kept_plan
from simbal.experts import fused as module
from simbal.experts.backends import RoutingPlan, reference
from simbal.experts.fused import Blocks, Config, _tile_map, config_for, fused
from tests.experts import test_backends
from tests.experts.test_backends import assert_close, outputs

TOLERANCE = {torch.float32: 1e-5, torch.float16: 5e-3}
SHIPPED = module.CONFIGS
BLOCKS = Blocks(16, 16, num_warps=1, num_stages=1)
# many tiles, partly filled tiles, several groups of tiles and split experts at sizes that take a second
SMALL = Config(
    16, BLOCKS, BLOCKS, BLOCKS, BLOCKS, 16, shared_memory=0, rows=16, group=2, programs=48, min_chunk=16
)  # fmt: skip


@pytest.fixture
def small_blocks(monkeypatch):
    monkeypatch.setattr(module, "CONFIGS", (SMALL,))


@pytest.fixture
def nan_in_new_memory():
    torch.use_deterministic_algorithms(True)  # also fills new memory with NaN
    yield
    torch.use_deterministic_algorithms(False)


def case(routing="balanced", N=24, D=32, width=48, E=5, K=2, dtype=torch.float32):
    (x, p, w13, w2), experts_NK, dy = test_backends.case(routing, N, D, width, E, K, dtype)
    leaves = (x, p, w13.detach() / 4, w2.detach() / 4)
    return [leaf.requires_grad_() for leaf in leaves], experts_NK, dy


def assert_equals_reference(leaves, experts_NK, dy):
    got = outputs("fused", leaves, experts_NK, dy)
    exact = [leaf.detach().double().requires_grad_() for leaf in leaves]
    want = outputs("reference", exact, experts_NK, dy.double())
    for a, b, leaf in zip(got, want, [leaves[0], *leaves], strict=True):
        assert (a.dtype, a.shape) == (leaf.dtype, b.shape)
    assert_close(got, want, TOLERANCE[leaves[0].dtype])


@pytest.mark.parametrize(("routing", "dtype"), [("skewed", torch.float32), ("empty", torch.float16)])
def test_fused_equals_reference_with_every_gradient(small_blocks, routing, dtype):
    assert SMALL.chunk_rows(R=48, tiles=12) < 24, "no expert would be split"
    assert_equals_reference(*case(routing, dtype=dtype))


@pytest.mark.slow
def test_split_experts_between_short_ones_find_their_own_partial_sums(small_blocks):
    leaves, _, dy = case(N=60, K=1)
    assert_equals_reference(leaves, torch.tensor([0] * 5 + [1] * 25 + [3] * 28 + [4] * 2)[:, None], dy)


@pytest.mark.slow
@pytest.mark.parametrize(("config", "width"), list(zip(SHIPPED, (256, 384, 192), strict=True)))
def test_shipped_blocks_equal_reference_when_rows_do_not_fill_a_tile(config, width):
    assert config_for(config.width, width) is config
    assert_equals_reference(*case("empty", N=45, D=config.width, width=width))


@pytest.mark.slow
def test_shipped_blocks_split_a_long_expert_and_add_its_partial_sums():
    assert config_for(64, 64).chunk_rows(600, 2) < 600
    assert_equals_reference(*case("collapsed", N=600, D=64, width=64, E=2, K=1))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("x", "dy"),
    [
        (torch.randn(24, 64)[:, ::2], torch.ones(()).expand(24, 32)),
        (torch.randn(1, 32).expand(24, 32), torch.randn(32, 24).T),
    ],
)
def test_fused_accepts_any_strides_of_its_input_and_of_the_gradient(small_blocks, x, dy):
    leaves, experts_NK, _ = case()
    assert_equals_reference([x.detach().requires_grad_(), *leaves[1:]], experts_NK, dy)


@pytest.mark.slow
@settings(max_examples=8)
@given(st.data())
def test_fused_equals_reference_for_any_routing(data):
    E = data.draw(st.integers(1, 6))
    K = data.draw(st.integers(1, E))
    choice = st.permutations(range(E)).map(lambda experts: experts[:K])
    experts_NK = torch.tensor(data.draw(st.lists(choice, min_size=1, max_size=32)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "CONFIGS", (SMALL,))
        leaves, _, dy = case(N=len(experts_NK), D=16, width=32, E=E, K=K)
        assert_equals_reference(leaves, experts_NK, dy)


def test_without_tokens_the_output_is_empty_and_weight_gradients_are_zero(small_blocks):
    y, dx, dp, dw13, dw2 = outputs("fused", *case(N=0))
    assert [t.shape for t in (y, dx, dp, dw13, dw2)] == [(0, 32), (0, 32), (0, 2), (5, 2, 48, 32), (5, 48, 32)]
    assert not dw13.any()
    assert not dw2.any()


@pytest.mark.slow
@pytest.mark.parametrize("routing", ["empty", "collapsed"])
def test_memory_is_written_before_it_is_read_and_bits_repeat(small_blocks, nan_in_new_memory, routing):
    assert torch.empty(2).new_empty(2).isnan().all()
    leaves, experts_NK, dy = case(routing)
    assert_equals_reference(leaves, experts_NK, dy)
    first, second = (outputs("fused", leaves, experts_NK, dy) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    unused = sorted(set(range(5)) - set(experts_NK.flatten().tolist()))
    assert len(unused) == 3
    assert not any(weight_gradient[unused].any() for weight_gradient in first[3:])


@pytest.mark.slow
def test_a_plan_of_kept_choices_gives_the_sum_over_them_and_its_gradients(small_blocks, nan_in_new_memory):
    leaves, experts_NK, dy = case()
    x, p, w13, w2 = leaves
    kept_NK = torch.rand(p.shape, generator=torch.Generator().manual_seed(0)) > 0.5
    kept_p = p.masked_fill(~kept_NK, 0)
    want = reference(x, RoutingPlan.build(experts_NK, kept_p, len(w2)), w13, w2)
    got = fused(x, kept_plan(experts_NK, kept_p, kept_NK, len(w2)), w13, w2)
    gradients = (torch.autograd.grad(y, leaves, dy, retain_graph=True) for y in (got, want))
    torch.testing.assert_close([got, *next(gradients)], [want, *next(gradients)], rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_fused_saves_only_x_and_the_pre_activations_and_refuses_a_second_derivative(small_blocks):
    (x, p, w13, w2), experts_NK, _ = case()
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        y = fused(x, RoutingPlan.build(experts_NK, p, 5), w13, w2)
    leaves = {t.data_ptr() for t in (x, p, w13, w2)}
    assert [tuple(t.shape) for t in saved if t.is_floating_point() and t.data_ptr() not in leaves] == [(48, 96)]
    (dx,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        dx.sum().backward()


@pytest.mark.parametrize(
    ("spoil", "names"),
    [
        (lambda x, w13, w2: (x, w13.transpose(-1, -2).contiguous().transpose(-1, -2), w2), "contiguous"),
        (lambda x, w13, w2: (x.half(), w13, w2), "one dtype"),
        (lambda x, w13, w2: (x[:, :24], w13[..., :24].contiguous(), w2[..., :24].contiguous()), "widths 24 and 48"),
    ],
)
def test_weights_that_the_kernels_would_misread_are_refused(small_blocks, spoil, names):
    (x, p, w13, w2), experts_NK, _ = case()
    x, w13, w2 = spoil(x, w13, w2)
    with pytest.raises(ValueError, match=names):
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
