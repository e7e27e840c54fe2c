"""One optimizer step: losses, clipping, learning rate, weight decay, and options that only save time or memory."""

import itertools
import shutil
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from simbal.config.schema import OptimConfig
from simbal.conformance import B, S, tiny_module
from simbal.conformance import train as train_tiny
from simbal.data.prepare import prepare
from simbal.distributed import sum_over_ranks
from simbal.errors import UserError
from simbal.model.transformer import Transformer, TransformerShape
from simbal.runs.folder import RunFolder
from simbal.training import build, callbacks
from simbal.training.optimizer import lr_factor, parameter_groups
from simbal.training.run import train
from simbal.training.validation import is_validated, next_validation
from tests.balancing.cases import CASES
from tests.composing import compose
from tests.conftest import MARKOV, SMALL
from tests.programs import run
from tests.training.run_files import OTHER_HEADS, assert_same_run, rows, weights

KEYS = ("balancing=lbl", "trainer.max_steps=5", "trainer.log_every=1", "optim.lr=0.05", "optim.betas=[0.8,0.9]",
        "optim.eps=1e-3", "optim.weight_decay=0.3", "optim.grad_clip=0.5", "optim.z_loss_coef=0.1")  # fmt: skip


def test_a_run_is_adamw_on_the_clipped_gradient_of_all_losses(small_spec):
    spec = small_spec(*KEYS)
    train(spec)
    store, (lr, (b1, b2), eps, decay) = prepare(spec.config.data, progress=False), (0.05, (0.8, 0.9), 1e-3, 0.3)
    module = build.build_module(spec, store, torch.device("cpu"), "32-true")
    loader = build.build_data(spec, store).train_dataloader()
    parameters = dict(module.model.named_parameters())
    m, v = ({name: torch.zeros_like(p) for name, p in parameters.items()} for _ in range(2))
    for step in range(5):
        (window_BT,) = loader.micro_batches(step)
        hidden_BSD, routings = module.model(window_BT[:, :-1], module.balancing)
        logits_NV = hidden_BSD.flatten(0, 1) @ module.model.head_VD.T
        z_loss = 0.1 * logits_NV.logsumexp(-1).square().mean()
        aux = module.balancing.losses(routings)["lbl"]
        loss = F.cross_entropy(logits_NV, window_BT[:, 1:].flatten()) + z_loss + aux
        gradients = dict(zip(parameters, torch.autograd.grad(loss, [*parameters.values()]), strict=True))
        norm = torch.stack([g.norm() for g in gradients.values()]).norm()
        rate = lr * lr_factor(step, 2, 5)
        with torch.no_grad():
            for name, p in parameters.items():
                g = gradients[name] * min(1.0, 0.5 / norm)
                m[name], v[name] = b1 * m[name] + (1 - b1) * g, b2 * v[name] + (1 - b2) * g**2
                first, second = m[name] / (1 - b1 ** (step + 1)), v[name] / (1 - b2 ** (step + 1))
                p.sub_(rate * (first / (second.sqrt() + eps) + decay * p * (p.ndim > 1)))
        row = next(row for row in rows(spec, "lr") if row["step"] == step + 1)
        assert row["lr"] == pytest.approx(lr * lr_factor(step + 1, 2, 5))
        assert row["train/loss"] == pytest.approx(loss.item(), rel=1e-5)
        load_LE = torch.stack([routing.tokens_per_expert_E for routing in routings]).double()
        assert row["train/max_vio"] == pytest.approx((load_LE.amax(1) / load_LE.mean(1) - 1).mean().item(), abs=1e-6)
    for name, trained in weights(spec).items():
        torch.testing.assert_close(parameters[name.removeprefix("model.")].detach(), trained, rtol=1e-3, atol=1e-5)


def test_a_step_result_has_the_losses_of_each_micro_batch_and_the_counts_of_all():
    module = tiny_module(next(case for case in CASES if case.name == "lbl"))
    first, second = train_tiny(module, range(2), micro_batches=2)
    assert (first.number, second.number) == (1, 2)
    assert [len(step.losses) for step in (first, second)] == [2, 2]
    losses = [micro["loss"] for micro in first.losses]
    assert not any(loss.requires_grad for loss in losses)
    assert first.mean_losses()["loss"] == torch.stack(losses).double().mean()
    assert sum_over_ranks(first.counts_LE).sum(1).tolist() == [B * S * module.model.shape.top_k] * len(first.counts_LE)


def test_the_speed_is_tokens_per_second_of_training_steps(small_spec, monkeypatch):
    seconds = itertools.count()  # one for each micro-batch
    monkeypatch.setattr(callbacks, "time", SimpleNamespace(perf_counter=lambda: next(seconds)))
    spec = small_spec("trainer.micro_batch=4", "trainer.max_steps=4")
    train(spec)
    assert {row["tokens_per_second"] for row in rows(spec, "train/ce")} == {8 * 16 / 2}


OPTIM = OptimConfig(
    lr=5e-4, weight_decay=0.01, betas=[0.9, 0.95], eps=1e-8, decay_router=False, warmup_steps=2000, z_loss_coef=0,
    grad_clip=0, aux_layer_reduce="sum",
    algorithm="adamw", momentum=0.95, muon_router=False, schedule="cosine", decay_fraction=0.2, mup=False,
    mup_base_width=128, mup_base_head_dim=32,
)  # fmt: skip


@pytest.mark.parametrize(
    ("step", "rate"), [(0, 5e-5), (1000, 2.75e-4), (2000, 5e-4), (10500, 2.75e-4), (19000, 5e-5), (20000, 5e-5)]
)
def test_the_learning_rate_follows_the_paper(step, rate):
    assert 5e-4 * lr_factor(step, 2000, 19_000) == pytest.approx(rate)


@pytest.mark.parametrize(("size", "lr"), [("m", 5e-4), ("l", 3e-4)])
def test_the_presets_of_the_paper_have_its_optimizer(size, lr):
    (run,) = compose([f"optim=paper_{size}", "trainer.max_steps=19000"])
    expected = {"lr": lr, "warmup_steps": 2000, "weight_decay": 0.01, "betas": [0.9, 0.95], "schedule": "cosine"}
    assert {key: run["flat"][f"optim.{key}"] for key in expected} == expected


def test_weight_decay_excludes_norms_and_by_default_routers():
    model = nn.ModuleDict(
        {"router": nn.Linear(3, 2, bias=False), "norm": nn.RMSNorm(3), "out": nn.Linear(3, 5, bias=False)}
    )
    decayed, plain = parameter_groups(model, OPTIM)
    assert [tuple(p.shape) for p in decayed["params"]] == [(5, 3)]
    assert plain["weight_decay"] == 0
    assert {tuple(p.shape) for p in plain["params"]} == {(2, 3), (3,)}


@given(st.integers(0, 10**6), st.integers(1, 5000), st.sampled_from(["log", "none"]))
def test_the_next_validation_is_the_first_later_step_that_is_validated(step, every, at):
    following = next_validation(step, every, at)

    def is_due(s: int) -> bool:
        return s % every == 0 or (at == "log" and s < every and s & (s - 1) == 0)

    assert step < following <= (step // every + 1) * every
    assert not any(map(is_due, range(step + 1, following)))
    assert is_due(following)
    assert is_validated(following, every, at)


@pytest.mark.parametrize("choice", [("balancing=ortho_param",), ("balancing=lf_lbl", *OTHER_HEADS)])
def test_activation_checkpointing_changes_no_bit(finished, choice):
    keys = (*choice, "trainer.micro_batch=4", "trainer.pes_every=5", "trainer.max_steps=6")
    assert_same_run(finished(*keys), finished(*keys, "trainer.activation_checkpointing=true"))


def test_activation_checkpointing_saves_fewer_tensors_for_the_backward_pass():
    shape = TransformerShape(64, 4, 32, 2, 16, 4, 2, 1e4, 1e-5, "softmax", True)

    def saved_bytes(activation_checkpointing: bool) -> int:
        model = Transformer(shape, "torch", activation_checkpointing)
        sizes = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: sizes.append(t.nbytes) or t, lambda t: t):
            model(torch.zeros(2, 16, dtype=torch.int64))
        return sum(sizes)

    assert saved_bytes(True) < saved_bytes(False) / 3


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler")
def test_a_compiled_model_has_the_same_loss_up_to_rounding(finished, small_spec, cache_dir, tmp_path):
    """The compiled run is another process: dynamo refuses code whose lines are counted for coverage."""
    keys = ("balancing=lf_lbl", "trainer.micro_batch=4", "model.num_layers=1")
    plain, compiled = finished(*keys), small_spec(*keys, "trainer.compile=true", output_dir=tmp_path)
    places = (f"output_dir={tmp_path}", f"data.cache_dir={cache_dir}")
    done = run("train.py", *SMALL, *MARKOV, *places, *keys, "trainer.compile=true", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert weights(plain).keys() == weights(compiled).keys()
    losses = [RunFolder(spec.path).read_record()["metrics"]["val/loss"] for spec in (plain, compiled)]
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)


@pytest.mark.parametrize(
    ("flags", "precision", "accepted"),
    [
        ("avx2 avx512f avx512bw", "bf16-mixed", False),
        ("avx2", "bf16-true", False),
        ("avx512f avx512_bf16", "bf16-true", True),
        ("amx_bf16 amx_tile", "bf16-true", True),
    ],
)
def test_bf16_is_refused_on_a_cpu_without_bf16_instructions(tmp_path, monkeypatch, flags, precision, accepted):
    (tmp_path / "cpuinfo").write_text(f"flags\t\t: fpu {flags} sse2\n")
    monkeypatch.setattr(build, "CPU_FLAGS", tmp_path / "cpuinfo")
    cpu = torch.device("cpu")
    assert build.resolve_precision(precision, cpu, force=True) == precision
    if accepted:
        assert build.resolve_precision(precision, cpu) == precision
    else:
        with pytest.raises(UserError, match=f"trainer.precision={precision} .*trainer.force_precision=true"):
            build.resolve_precision(precision, cpu)
