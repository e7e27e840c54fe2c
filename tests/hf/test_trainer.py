"""In the transformers Trainer, strategies work as in a training loop with `attach`."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import MixtralForCausalLM, PreTrainedModel, Trainer, TrainingArguments

from simbal.balancing import HashRouting, LoadBalancingLoss, LossFree, RouterZLoss, Schedule, SimBal, UniformRouting
from simbal.errors import UserError
from simbal.hf import attach
from simbal.hf.trainer import attach_trainer
from simbal.metrics.routing import max_vio
from tests.hf.architectures import architecture, host

pytestmark = pytest.mark.slow
SAMPLES, S = 20, 8
ROOT = Path(__file__).parents[2]


def samples() -> list[dict[str, Tensor]]:
    """Return sequences with 0 to 5 tokens of padding, so that micro-batches differ in their number of labels."""
    generator, found = torch.Generator().manual_seed(0), []
    for index in range(SAMPLES):
        tokens_S = torch.randint(1, 64, (S,), generator=generator)
        mask_S = (torch.arange(S) < S - index % 6).long()
        labels_S = tokens_S.masked_fill(mask_S == 0, -100)
        found.append({"input_ids": tokens_S, "attention_mask": mask_S, "labels": labels_S})
    return found


def strategies() -> list:
    return [SimBal(coef=0.5), LoadBalancingLoss(coef=0.3, scope="micro"), LossFree(update_rate=0.05)]


def trainer_of(folder: Path, kind: type[Trainer] = Trainer, model: object = None, **keys):
    given = {
        "output_dir": str(folder), "per_device_train_batch_size": 2, "gradient_accumulation_steps": 3, "max_steps": 8,
        "learning_rate": 0.01, "lr_scheduler_type": "constant", "logging_steps": 2, "save_strategy": "no",
        "max_grad_norm": 1.0, "report_to": [], "use_cpu": True, "disable_tqdm": True, "seed": 1,
    }  # fmt: skip
    args = TrainingArguments(**given | keys)
    return kind(model=model or host(), args=args, train_dataset=samples(), eval_dataset=samples()[:4])


def weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def train_in_a_loop(model: PreTrainedModel, steps: list[list[dict]]) -> list[dict[str, float]]:
    """Train on the mean token loss of each step plus the mean of the strategies' losses over its micro-batches."""
    optimizer, logged = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.0), []
    with attach(model, strategies()) as balancing:
        for batches in steps:
            num_labels = sum(int((batch["labels"][:, 1:] != -100).sum()) for batch in batches)
            sums = {"aux/SimBal": 0.0, "aux/LoadBalancingLoss": 0.0}
            for batch in batches:
                logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits[:, :-1]
                targets = batch["labels"][:, 1:].flatten()
                cross_entropy = nn.functional.cross_entropy(logits.flatten(0, 1), targets, reduction="sum")
                (cross_entropy / num_labels + balancing.loss() / len(batches)).backward()
                for name, loss in balancing.losses().items():
                    sums[f"aux/{name}"] += loss.item() / len(batches)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            logged.append(sums | {"max_vio": max_vio(balancing.counts_LE).mean().item()})
            balancing.step()
    return logged


def test_it_trains_and_logs_as_a_loop_does(tmp_path):
    """20 sequences in pairs are 10 micro-batches: steps of 3, 3, 3 and 1."""
    batches, steps = [], []
    trainer = trainer_of(tmp_path)
    record = trainer.model.register_forward_pre_hook(lambda _, args, keys: batches.append(dict(keys)), with_kwargs=True)
    balancing = attach_trainer(trainer, strategies())
    trainer.train()
    record.remove()
    for size in [3, 3, 3, 1] * 2:
        steps.append(batches[:size])
        del batches[:size]
    assert not batches
    model = host()
    expected = train_in_a_loop(model, steps)
    torch.testing.assert_close(weights(trainer.model), weights(model), rtol=1e-4, atol=1e-5)
    assert balancing.attachment.steps == 8
    logs = [row for row in trainer.state.log_history if "loss" in row]
    assert [row["step"] for row in logs] == [2, 4, 6, 8]
    for row, pair in zip(logs, zip(expected[::2], expected[1::2], strict=True), strict=True):
        for name in expected[0]:
            assert row[name] == pytest.approx((pair[0][name] + pair[1][name]) / 2, rel=1e-3)


@pytest.mark.parametrize("accepts_loss_kwargs", [True, False])
def test_the_strategies_gradient_does_not_depend_on_accumulation_or_the_trainers_loss(tmp_path, accepts_loss_kwargs):
    class NoLossTrainer(Trainer):
        def compute_loss(self, model, inputs, **keys):
            return model(**inputs).logits.sum() * 0.0

    found = []
    for accumulation in (1, 5):
        keys = {"gradient_accumulation_steps": accumulation, "max_grad_norm": 0}
        trainer = trainer_of(tmp_path, NoLossTrainer, max_steps=2, **keys)
        trainer.optimizer = torch.optim.SGD(trainer.model.parameters(), lr=0.01)
        trainer.model_accepts_loss_kwargs = accepts_loss_kwargs
        attach_trainer(trainer, SimBal(coef=0.5))
        trainer.train()
        found.append(weights(trainer.model))
    torch.testing.assert_close(found[0], found[1], rtol=1e-5, atol=1e-6)
    router = "model.layers.0.mlp.gate.weight"
    assert not torch.equal(found[0][router], weights(host())[router])


@pytest.mark.parametrize(
    ("name", "make", "restores_callbacks"),
    [
        ("mixtral", lambda: {"simbal": SimBal(), "lf": LossFree(update_rate=0.05)}, True),
        ("mixtral", lambda: {"uniform": UniformRouting()}, False),
        ("deepseek_v3", lambda: {"lf": LossFree(update_rate=0.05, bias_on="scores"), "z": RouterZLoss()}, False),
    ],
)
def test_a_resumed_training_is_bit_identical(tmp_path, name, make, restores_callbacks):
    def train(folder: Path, resume: bool) -> dict[str, Tensor]:
        trainer = trainer_of(
            folder, model=architecture(name).train(), max_steps=10, save_strategy="steps", save_steps=5,
            restore_callback_states_from_checkpoint=restores_callbacks,
        )  # fmt: skip
        schedules = {"simbal": Schedule(((0, 1.0), (10, 0.0)))} if "simbal" in make() else None
        balancing = attach_trainer(trainer, make(), schedules=schedules)
        trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-5") if resume else None)
        assert balancing.attachment.steps == 10
        return weights(trainer.model) | balancing.attachment.state_dict()["strategies"]

    uninterrupted, resumed = train(tmp_path, False), train(tmp_path / "resumed", True)
    torch.testing.assert_close(uninterrupted, resumed, rtol=0, atol=0)


def test_a_checkpoint_of_other_strategies_is_refused(tmp_path):
    trainer = trainer_of(tmp_path, max_steps=1, save_strategy="steps", save_steps=1)
    attach_trainer(trainer, {"lf": LossFree()})
    trainer.train()
    trainer = trainer_of(tmp_path, max_steps=2)
    attach_trainer(trainer, SimBal())
    with pytest.raises(UserError, match="checkpoint of step 1 was trained with lf, not with SimBal"):
        trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))


def test_the_best_checkpoint_restores_its_bias_and_transformers_loads_it(tmp_path):
    """Evaluations get worse with every step, so the first checkpoint is the best."""
    trainer = trainer_of(
        tmp_path, max_steps=3, save_strategy="steps", save_steps=1, eval_strategy="steps", eval_steps=1,
        load_best_model_at_end=True, metric_for_best_model="score", greater_is_better=True,
    )  # fmt: skip
    scores = iter((3.0, 2.0, 1.0))
    trainer.compute_metrics = lambda prediction: {"score": next(scores)}
    balancing = attach_trainer(trainer, LossFree(update_rate=0.05))
    trainer.train()
    assert trainer.state.best_model_checkpoint.endswith("checkpoint-1")
    assert balancing.attachment.steps == 1
    bias_LE = balancing.attachment.strategies.parts["LossFree"].bias_LE
    assert bias_LE.abs().max() == pytest.approx(0.05)
    trainer.save_model(str(tmp_path / "final"))
    for folder in ("checkpoint-1", "final"):
        again = MixtralForCausalLM.from_pretrained(tmp_path / folder)
        torch.testing.assert_close(weights(again), weights(trainer.model), rtol=0, atol=0)
    published = load_file(tmp_path / "final" / "model.safetensors")
    assert "model.layers.0.block_sparse_moe.experts.0.w1.weight" in published


def test_evaluation_is_steered_until_the_strategies_are_detached(tmp_path):
    trainer = trainer_of(tmp_path, max_steps=1)
    balancing = attach_trainer(trainer, HashRouting())
    trainer.train()
    steered = trainer.evaluate(samples()[:4])["eval_loss"]
    balancing.detach()
    assert trainer.evaluate(samples()[:4])["eval_loss"] != steered
    trainer.train()  # without strategies
    assert not any(key.startswith("aux/") for key in trainer.state.log_history[-1])


class TwoPassTrainer(Trainer):
    def compute_loss(self, model, inputs, **keys):
        model(**inputs)
        return super().compute_loss(model, inputs, **keys)


class OwnBackwardTrainer(Trainer):
    def training_step(self, model, inputs, num_items_in_batch=None):
        loss = self.compute_loss(model.train(), inputs)
        loss.backward()
        return loss.detach()


@pytest.mark.parametrize(
    ("kind", "part"),
    [
        (TwoPassTrainer, "must run the model once"),
        (OwnBackwardTrainer, "does not call accelerator.backward"),
    ],
)
def test_a_trainer_whose_steps_would_be_counted_wrongly_is_refused(tmp_path, kind, part):
    trainer = trainer_of(tmp_path, kind)
    attach_trainer(trainer, SimBal())
    with pytest.raises(UserError, match=f"{kind.__name__} {part}"):
        trainer.train()


TWO_RANKS = """
import sys
from safetensors.torch import save_file
from simbal.hf.trainer import attach_trainer
from tests.hf.test_trainer import strategies, trainer_of, weights

keys = {"gradient_accumulation_steps": 1, "ddp_backend": "gloo", "max_grad_norm": 0, "learning_rate": 1e-3}
trainer = trainer_of(sys.argv[1], max_steps=4, **keys)
balancing = attach_trainer(trainer, strategies())
trainer.train()
if trainer.is_world_process_zero():
    bias = balancing.attachment.state_dict()["strategies"]
    save_file(weights(trainer.model) | bias, sys.argv[1] + "/weights.safetensors")
"""


def test_two_ranks_train_as_two_micro_batches_do(tmp_path):
    (tmp_path / "two_ranks.py").write_text(TWO_RANKS)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    subprocess.run(
        [*command, str(tmp_path / "two_ranks.py"), str(tmp_path)], check=True, cwd=ROOT,
        env=os.environ | {"PYTHONPATH": f"{ROOT}/src:{ROOT}", "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    trainer = trainer_of(tmp_path, max_steps=4, gradient_accumulation_steps=2, max_grad_norm=0, learning_rate=1e-3)
    balancing = attach_trainer(trainer, strategies())
    trainer.train()
    expected = weights(trainer.model) | balancing.attachment.state_dict()["strategies"]
    torch.testing.assert_close(load_file(tmp_path / "weights.safetensors"), expected, rtol=1e-3, atol=1e-5)
