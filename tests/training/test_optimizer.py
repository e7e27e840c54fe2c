"""Muon against torch's, the schedules, and muP: initial spread, learning rates and attention scale by width."""

import math

import pytest
import torch

from benchmarks.coordinate_check import changes, slope
from simbal.errors import UserError
from simbal.hf.convert import architecture_of
from simbal.model.init import initialize
from simbal.model.transformer import Transformer
from simbal.training.build import transformer_shape
from simbal.training.muon import Muon, orthogonalize
from simbal.training.optimizer import build_optimizer, lr_factor, parameter_groups
from simbal.training.run import train
from tests.training.run_files import assert_same_run, train_until, weights

SIZES = ("model.bias=true", "model.num_shared_experts=1", "experts=reference", "model.kernels=torch")


def built(spec, ratio: float = 1.0) -> Transformer:
    model = Transformer(transformer_shape(spec, 0))
    initialize(model, 0, 0.02, "normal", ratio)
    return model


def settings(spec) -> dict[str, tuple[float, float, float]]:
    """Learning rate, epsilon and weight decay by parameter."""
    model = built(spec)
    names = {parameter: name for name, parameter in model.named_parameters()}
    groups = parameter_groups(model, spec.config.optim)
    return {names[p]: (group["lr"], group["eps"], group["weight_decay"]) for group in groups for p in group["params"]}


def give_gradients(model: Transformer, step: int) -> None:
    random = torch.Generator().manual_seed(step)
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=random)


def separate(name: str, weight: torch.Tensor, widths: list[int]) -> list[torch.Tensor]:
    """Every matrix of a parameter, transposed or not, without the code under test."""
    if name.endswith("qkv.weight"):
        return [*weight.split(widths)]
    return [weight] if weight.ndim == 2 else [part for row in weight for part in separate(name, row, widths)]


@pytest.mark.parametrize("muon_router", [False, True])
def test_muon_is_torchs_muon_on_every_matrix_and_adamw_on_everything_else(small_spec, monkeypatch, muon_router):
    """torch orthogonalizes in bf16, ours on a CPU in fp32: the oracle's conversion to bf16 becomes a copy."""
    spec = small_spec("optim=muon", f"optim.muon_router={muon_router}", "optim.weight_decay=0.3", *SIZES)
    optim, model = spec.config.optim, built(spec)
    names = [name for name, _ in model.named_parameters()]
    widths = model.blocks[0].attention.widths
    by_muon = [n for n in names if n.endswith(("qkv.weight", "out.weight", "w13_E2FD", "w2_EFD", "w13_2FD", "w2_FD"))]
    by_muon += [name for name in names if muon_router and name.endswith("router.weight_ED")]
    assert len(by_muon) == 2 * (6 + muon_router)
    expected = {name: p.detach().clone() for name, p in model.named_parameters()}
    parts = {name: [part.clone() for part in separate(name, expected[name], widths)] for name in by_muon}
    torchs = torch.optim.Muon(
        [p for each in parts.values() for p in each], optim.lr, 0.3, 0.95, adjust_lr_fn="match_rms_adamw"
    )
    others = [n for n in names if n not in by_muon]
    matrices = [name for name in others if expected[name].ndim > 1 and "b13" not in name and "b2" not in name]
    adamw = torch.optim.AdamW(
        [
            {"params": [expected[name] for name in matrices]},
            {"params": [expected[name] for name in others if name not in matrices], "weight_decay": 0.0},
        ],
        optim.lr, (0.9, 0.95), optim.eps, 0.3,
    )  # fmt: skip
    optimizer, _ = build_optimizer(model, optim.model_copy(update={"warmup_steps": 0, "schedule": "constant"}), 5)
    monkeypatch.setattr(torch.Tensor, "bfloat16", torch.Tensor.clone)
    for step in range(3):
        give_gradients(model, step)
        for name, parameter in model.named_parameters():
            if name in parts:
                for part, gradient in zip(parts[name], separate(name, parameter.grad, widths), strict=True):
                    part.grad = gradient.clone()
            else:
                expected[name].grad = parameter.grad.clone()
        for each in (optimizer, torchs, adamw):
            each.step()
    for name, parameter in model.named_parameters():
        if name in parts:
            for ours, theirs in zip(separate(name, parameter, widths), parts[name], strict=True):
                torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=0)
        else:
            torch.testing.assert_close(parameter.detach(), expected[name], atol=1e-6, rtol=0)


def test_muons_singular_values_are_near_one_and_its_directions_unchanged():
    x_MRC = torch.randn(3, 8, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    u, s, v = torch.linalg.svd(x_MRC, full_matrices=False)
    inner = u.mT @ orthogonalize(x_MRC) @ v.mT
    assert (inner.diagonal(dim1=1, dim2=2) > 0.6).all()
    assert (inner.diagonal(dim1=1, dim2=2) < 1.3).all()
    assert (inner - torch.diag_embed(inner.diagonal(dim1=1, dim2=2))).abs().max() < 1e-9
    assert len(s.unique()) > 1


def test_muon_leaves_parameters_without_a_gradient_and_keeps_all_groups_while_the_closure_runs(small_spec):
    spec = small_spec("optim=muon")
    model = built(spec)
    optimizer = Muon(parameter_groups(model, spec.config.optim), fused=True)
    before, seen = [p.clone() for p in model.parameters()], []
    optimizer.step(lambda: seen.append(len(optimizer.param_groups)))
    assert seen == [len(optimizer.param_groups)] == [4]  # Muon: queries, keys and values, other matrices; AdamW: two
    assert all(map(torch.equal, before, model.parameters()))


def test_a_killed_run_with_muon_resumes_to_the_same_bits(small_spec, tmp_path, monkeypatch):
    keys = ("optim=muon", "optim.schedule=wsd", "optim.grad_clip=0.5", "trainer.max_steps=7", "trainer.val_every=7")
    reference, killed = (small_spec(*keys, output_dir=tmp_path / name) for name in "ab")
    train(reference)
    train_until(monkeypatch, killed, 6)
    train(killed)
    assert_same_run(reference, killed)
    assert all(tensor.isfinite().all() for tensor in weights(killed).values())


@pytest.mark.parametrize(
    ("schedule", "factors"),
    [
        ("cosine", {0: 0.1, 5: 0.55, 10: 1.0, 60: 0.55, 110: 0.1, 200: 0.1}),
        ("linear", {0: 0.1, 5: 0.55, 10: 1.0, 60: 0.5, 109: 0.01, 110: 0.0}),
        ("wsd", {5: 0.55, 10: 1.0, 88: 1.0, 93.5: 1 - math.sqrt(0.25), 104.5: 1 - math.sqrt(0.75), 110: 0.0}),
        ("constant", {5: 0.55, 10: 1.0, 60: 1.0, 110: 1.0}),
    ],
)
def test_each_schedule_has_its_published_shape(schedule, factors):
    for step, factor in factors.items():
        assert lr_factor(step, 10, 110, schedule, 0.2) == pytest.approx(factor)


def test_warm_up_ends_before_the_decay_of_wsd_begins():
    assert lr_factor(50, 60, 100, "wsd", 0.8) == pytest.approx(0.1 + 0.9 * 50 / 60)
    assert lr_factor(70, 60, 100, "wsd", 0.8) == pytest.approx(1 - math.sqrt(0.25))


def test_mup_changes_nothing_at_its_base_width(small_spec):
    base = ("optim.mup_base_width=16", "optim.mup_base_head_dim=8")
    plain, scaled = (small_spec(f"optim.mup={mup}", *base) for mup in ("false", "true"))
    assert transformer_shape(plain, 0) == transformer_shape(scaled, 0)
    assert settings(plain) == settings(scaled)
    assert {values[:2] for values in settings(plain).values()} == {(plain.config.optim.lr, plain.config.optim.eps)}


def test_mup_scales_spread_rates_epsilon_decay_and_attention_with_the_width(small_spec):
    """The values of arXiv 2203.03466, table 3, for a model four times as wide as the base."""
    keys = ("optim.mup=true", "optim.mup_base_width=64", "optim.mup_base_head_dim=32", "model.d_model=256")
    spec = small_spec(*keys, "model.d_expert=128", "optim.weight_decay=0.1")
    optim, model = spec.config.optim, built(spec, 64 / 256)
    assert model.shape.attention_scale == pytest.approx(math.sqrt(32) / 128)
    group_of = {id(p): group for group in parameter_groups(model, optim) for p in group["params"]}
    block = model.blocks[0]
    for weight, lr, eps, std in (
        (model.embedding.weight, 1, 1 / 4, 0.02),
        (model.head_VD, 1 / 4, 1, 0.02 / 4),
        (block.feed_forward.router.weight_ED, 1 / 4, 1, 0.02 / 4),
        (block.attention.qkv.weight, 1 / 4, 1 / 4, 0.01),
        (block.feed_forward.w13_E2FD, 1 / 4, 1 / 4, 0.01),
    ):
        group = group_of[id(weight)]
        assert group["lr"] == pytest.approx(optim.lr * lr)
        assert group["eps"] == pytest.approx(optim.eps * eps)
        assert group["lr"] * group["weight_decay"] == pytest.approx(optim.lr * 0.1)
        assert weight.std().item() == pytest.approx(std, rel=0.05)
    gain = group_of[id(model.norm.weight)]
    assert (gain["lr"], gain["weight_decay"]) == (optim.lr, 0.0)
    assert parameter_groups(model, optim)[0]["lr"] == optim.lr
    with pytest.raises(UserError, match="optim.mup_base_head_dim"):
        architecture_of(model.shape)


def test_mup_scales_muons_rate_with_the_root_of_the_width_but_a_routers_with_the_width(small_spec):
    keys = ("optim.mup=true", "optim.mup_base_width=64", "optim.mup_base_head_dim=32", "model.d_model=256")
    spec = small_spec("optim=muon", "optim.muon_router=true", *keys, "model.d_expert=128")
    optim, model = spec.config.optim, built(spec, 64 / 256)
    rates = {id(p): group["lr"] / optim.lr for group in parameter_groups(model, optim) for p in group["params"]}
    block = model.blocks[0]
    weights = (block.attention.qkv.weight, block.feed_forward.w13_E2FD, block.feed_forward.router.weight_ED)
    assert [rates[id(weight)] for weight in weights] == pytest.approx([1 / 2, 1 / 2, 1 / 4])


@pytest.mark.parametrize("algorithm", ["adamw", "muon"])
def test_the_coordinate_check_is_flat_for_mup_only(small_spec, algorithm):
    """After a few steps, mup changes activations equally at every width; the standard parametrization does not."""
    widths, slopes = (32, 64, 128), {}
    for mup in ("true", "false"):
        keys = ("optim.mup_base_width=32", "optim.mup_base_head_dim=16", f"optim.mup={mup}", "optim.eps=1e-10")
        keys += (f"optim.algorithm={algorithm}", "optim.lr=4e-3", "optim.warmup_steps=0", "optim.schedule=constant")
        found = [changes(small_spec(*keys, f"model.d_model={w}", f"model.d_expert={w // 2}"), 3) for w in widths]
        slopes[mup] = {name: slope(widths, [each[name] for each in found]) for name in found[0]}
    assert all(abs(value) < 0.25 for value in slopes["true"].values()), slopes
    assert slopes["false"]["logits"] > 0.4, slopes
