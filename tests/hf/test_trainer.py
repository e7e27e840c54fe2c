"""In transformers' Trainer the strategies do in each optimizer step what they do in a loop of one's own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import MixtralForCausalLM, PreTrainedModel, Trainer, TrainerCallback, TrainingArguments

from simbal.balancing import HashRouting, LoadBalancingLoss, LossFree, RouterZLoss, Schedule, SimBal, UniformRouting
from simbal.errors import UserError
from simbal.hf import attach
from simbal.hf.trainer import attach_trainer
from simbal.metrics.routing import max_vio
from tests.hf.architectures import architecture

pytestmark = pytest.mark.slow
SAMPLES, S = 20, 8
ROOT = Path(__file__).parents[2]


def samples() -> list[dict[str, Tensor]]:
    """Sequences of 8 tokens, of which the last 0 to 5 are padding: each micro-batch has another number of labels."""
    draws, found = torch.Generator().manual_seed(0), []
    for index in range(SAMPLES):
        tokens_S = torch.randint(1, 64, (S,), generator=draws)
        mask_S = (torch.arange(S) < S - index % 6).long()
        found.append(
            {"input_ids": tokens_S, "attention_mask": mask_S, "labels": tokens_S.masked_fill(mask_S == 0, -100)}
        )
    return found


def strategies() -> list:
    return [SimBal(coef=0.5), LoadBalancingLoss(coef=0.3, scope="micro"), LossFree(update_rate=0.05)]


def arguments(folder: Path, **keys: object) -> TrainingArguments:
    given = {
        "output_dir": str(folder), "per_device_train_batch_size": 2, "gradient_accumulation_steps": 3, "max_steps": 8,
        "learning_rate": 0.01, "lr_scheduler_type": "linear", "logging_steps": 2, "save_strategy": "no",
        "max_grad_norm": 1.0, "report_to": [], "use_cpu": True, "disable_tqdm": True, "weight_decay": 0.1, "seed": 1,
    }  # fmt: skip
    return TrainingArguments(**given | keys)


def made(folder: Path, kind: type[Trainer] = Trainer, callbacks: tuple = (), model: object = None, **keys) -> Trainer:
    model = model or architecture("mixtral").train()
    data = {"train_dataset": samples(), "eval_dataset": samples()[:4]}
    return kind(model=model, args=arguments(folder, **keys), callbacks=[*callbacks], **data)


def weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


class Batches(TrainerCallback):
    """Notes the micro-batches that the model is given in training, step by step."""

    def __init__(self) -> None:
        self.steps: list[list[dict]] = []

    def on_train_begin(self, args, state, control, model=None, **kwargs):
        def note(module, args, kwargs):
            if module.training:
                self.steps[-1].append({key: kwargs[key] for key in ("input_ids", "attention_mask", "labels")})

        self.handle = model.register_forward_pre_hook(note, with_kwargs=True)

    def on_step_begin(self, args, state, control, **kwargs):
        self.steps.append([])

    def on_train_end(self, args, state, control, **kwargs):
        self.handle.remove()


def loop(model: PreTrainedModel, steps: list[list[dict]]) -> list[dict[str, float]]:
    """The same by hand: of the tokens' losses the mean over the step, of the strategies' that over micro-batches."""
    groups = [
        {
            "params": [w for name, w in model.named_parameters() if (w.dim() > 1 and "norm" not in name) == decay],
            "weight_decay": rate,
        }
        for decay, rate in ((True, 0.1), (False, 0.0))
    ]
    optimizer = torch.optim.AdamW(groups, lr=0.01)
    logged = []
    with attach(model, strategies()) as balancing:
        for step, batches in enumerate(steps):
            for group in optimizer.param_groups:
                group["lr"] = 0.01 * (1 - step / len(steps))
            labels = sum(int((batch["labels"][:, 1:] != -100).sum()) for batch in batches)
            sums = {"SimBal": 0.0, "LoadBalancingLoss": 0.0}
            for batch in batches:
                logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits[:, :-1]
                cross_entropy = nn.functional.cross_entropy(
                    logits.flatten(0, 1), batch["labels"][:, 1:].flatten(), reduction="sum"
                )
                (cross_entropy / labels + balancing.loss() / len(batches)).backward()
                for name, loss in balancing.losses().items():
                    sums[name] += loss.item() / len(batches)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            logged.append({f"aux/{name}": total for name, total in sums.items()})
            logged[-1]["max_vio"] = max_vio(balancing.counts_LE).mean().item()
            balancing.step()
    return logged


def test_it_trains_as_a_loop_of_ones_own(tmp_path):
    """20 sequences by 2 are 10 micro-batches: steps of 3, 3, 3 and 1."""
    batches = Batches()
    trainer = made(tmp_path, callbacks=(batches,))
    balancing = attach_trainer(trainer, strategies())
    trainer.train()
    assert [len(step) for step in batches.steps] == [3, 3, 3, 1] * 2
    model = architecture("mixtral").train()
    expected = loop(model, batches.steps)
    torch.testing.assert_close(weights(trainer.model), weights(model), rtol=1e-4, atol=1e-5)
    assert balancing.attachment.steps == 8
    logs = [row for row in trainer.state.log_history if "loss" in row]
    assert [row["step"] for row in logs] == [2, 4, 6, 8]
    for row, pair in zip(logs, zip(expected[::2], expected[1::2], strict=True), strict=True):
        for name in expected[0]:
            assert row[name] == pytest.approx((pair[0][name] + pair[1][name]) / 2, rel=1e-3)


class OwnLoss(Trainer):
    """As trl's SFTTrainer: it computes the loss itself, and logs more."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        inputs = dict(inputs)
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        flat = outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
        loss = nn.functional.cross_entropy(*flat, reduction="sum") / num_items_in_batch
        return (loss, outputs) if return_outputs else loss


def test_a_trainer_with_a_loss_of_its_own_trains_the_same(tmp_path):
    found = []
    for kind in (Trainer, OwnLoss):
        trainer = made(tmp_path, kind)
        attach_trainer(trainer, strategies())
        trainer.train()
        found.append(weights(trainer.model))
    torch.testing.assert_close(found[0], found[1], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("scale", ["by labels", "by the mean"])
def test_the_strategies_share_is_the_same_however_the_trainer_scales(tmp_path, scale):
    """Without any loss of tokens, all gradient is the strategies': no accumulation may change it."""

    class NoLoss(Trainer):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            outputs = model(**inputs)
            loss = outputs.logits.sum() * 0.0
            return (loss, outputs) if return_outputs else loss

    found = []
    for accumulation in (1, 5):
        trainer = made(
            tmp_path, NoLoss, gradient_accumulation_steps=accumulation, max_steps=2, weight_decay=0.0, max_grad_norm=0
        )
        trainer.optimizer = torch.optim.SGD(trainer.model.parameters(), lr=0.01)
        trainer.model_accepts_loss_kwargs = scale == "by labels"
        attach_trainer(trainer, SimBal(coef=0.5))
        trainer.train()
        found.append(weights(trainer.model))
    torch.testing.assert_close(found[0], found[1], rtol=1e-5, atol=1e-6)
    assert not torch.equal(
        found[0]["model.layers.0.mlp.gate.weight"], weights(architecture("mixtral"))["model.layers.0.mlp.gate.weight"]
    )


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("mixtral", {"simbal": SimBal, "lf": lambda: LossFree(update_rate=0.05)}),
        ("mixtral", {"uniform": UniformRouting}),
        ("deepseek_v3", {"lf": lambda: LossFree(update_rate=0.05, bias_on="scores"), "z": RouterZLoss}),
        ("phimoe", {"lbl": LoadBalancingLoss}),  # draws its experts
    ],
)
@pytest.mark.parametrize("callbacks_too", [False, True])
def test_a_training_that_goes_on_ends_to_the_bit_where_one_without_a_stop_does(tmp_path, name, parts, callbacks_too):
    def trained(folder: Path, resume: bool) -> dict[str, Tensor]:
        trainer = made(
            folder, model=architecture(name).train(), max_steps=10, save_strategy="steps", save_steps=5,
            restore_callback_states_from_checkpoint=callbacks_too,
        )  # fmt: skip
        schedules = {"simbal": Schedule(((0, 1.0), (10, 0.0)))} if "simbal" in parts else None
        padding = {"lbl": LoadBalancingLoss(scope="micro")} if "lbl" in parts else {}
        made_parts = {key: make() for key, make in parts.items()} | padding
        balancing = attach_trainer(trainer, made_parts, schedules=schedules)
        trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-5") if resume else None)
        assert balancing.attachment.steps == 10
        return weights(trainer.model) | balancing.attachment.state_dict()["strategies"]

    whole, resumed = trained(tmp_path, False), trained(tmp_path / "resumed", True)
    assert whole.keys() == resumed.keys()
    for key, tensor in whole.items():
        assert torch.equal(tensor, resumed[key]), key


def test_a_checkpoint_of_other_strategies_is_refused(tmp_path):
    trainer = made(tmp_path, max_steps=2, save_strategy="steps", save_steps=1)
    attach_trainer(trainer, {"lf": LossFree()})
    trainer.train()
    trainer = made(tmp_path, max_steps=2)
    attach_trainer(trainer, {"simbal": SimBal()})
    with pytest.raises(UserError, match="the checkpoint of step 1 was trained with lf and not simbal"):
        trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    plain = made(tmp_path / "plain", max_steps=2, save_strategy="steps", save_steps=1)
    plain.train()
    trainer = made(tmp_path, max_steps=2)
    attach_trainer(trainer, SimBal())
    with pytest.raises(UserError, match="trained with no strategies and not SimBal: begin a new training"):
        trainer.train(resume_from_checkpoint=str(tmp_path / "plain" / "checkpoint-1"))


def test_the_best_checkpoint_brings_back_its_bias(tmp_path):
    """Evaluations get worse from step to step: the first checkpoint is the best."""
    trainer = made(
        tmp_path, max_steps=3, save_strategy="steps", save_steps=1, eval_strategy="steps", eval_steps=1,
        load_best_model_at_end=True, metric_for_best_model="worse", greater_is_better=True,
    )  # fmt: skip
    scores = iter((3.0, 2.0, 1.0))
    trainer.compute_metrics = lambda prediction: {"worse": next(scores)}
    balancing = attach_trainer(trainer, LossFree(update_rate=0.05))
    trainer.train()
    assert trainer.state.best_model_checkpoint.endswith("checkpoint-1")
    assert balancing.attachment.steps == 1
    bias_LE = balancing.attachment.strategies.parts["LossFree"].bias_LE
    assert bias_LE.abs().max() == pytest.approx(0.05)
    router = trainer.model.model.layers[0].mlp.gate.weight
    first = MixtralForCausalLM.from_pretrained(tmp_path / "checkpoint-1")
    assert torch.equal(router, first.model.layers[0].mlp.gate.weight)


def test_checkpoints_and_the_saved_model_are_read_by_transformers(tmp_path):
    trainer = made(tmp_path, max_steps=1, save_strategy="steps", save_steps=1)
    attach_trainer(trainer, SimBal())
    trainer.train()
    trainer.save_model(str(tmp_path / "final"))
    for folder in ("checkpoint-1", "final"):
        again = MixtralForCausalLM.from_pretrained(tmp_path / folder)
        torch.testing.assert_close(weights(again), weights(trainer.model), rtol=0, atol=0)
    published = load_file(tmp_path / "final" / "model.safetensors")
    assert "model.layers.0.block_sparse_moe.experts.0.w1.weight" in published


def test_evaluation_is_steered_until_the_strategies_are_detached(tmp_path):
    trainer = made(tmp_path, max_steps=1)
    balancing = attach_trainer(trainer, HashRouting())
    trainer.train()
    steered = trainer.evaluate(samples()[:4])["eval_loss"]
    balancing.detach()
    assert trainer.evaluate(samples()[:4])["eval_loss"] != steered
    trainer.train()  # and the trainer goes on without them
    assert not any(key.startswith("aux/") for key in trainer.state.log_history[-1])


def test_a_pass_too_many_is_refused(tmp_path):
    class TwoPasses(Trainer):
        def compute_loss(self, model, inputs, **keys):
            model(**inputs)
            return super().compute_loss(model, inputs, **keys)

    class ReferenceLater(Trainer):
        def compute_loss(self, model, inputs, **keys):
            loss = super().compute_loss(model, inputs, **keys)
            with torch.no_grad():
                model(**inputs)
            return loss

    class OtherBackward(Trainer):
        def training_step(self, model, inputs, num_items_in_batch=None):
            model.train()
            loss = self.compute_loss(model, inputs)
            loss.backward()
            return loss.detach()

    for kind, sentence in (
        (TwoPasses, "has run the model 2 times"),
        (ReferenceLater, "has run the model without gradients, or in evaluation mode, between"),
        (OtherBackward, "goes backward otherwise than by"),
    ):
        trainer = made(tmp_path, kind)
        attach_trainer(trainer, SimBal())
        with pytest.raises(UserError, match=f"{kind.__name__} {sentence}"):
            trainer.train()


TWO_RANKS = """
import sys
from safetensors.torch import save_file
from simbal.hf.trainer import attach_trainer
from tests.hf.test_trainer import made, strategies, weights

trainer = made(sys.argv[1], gradient_accumulation_steps=1, ddp_backend="gloo", max_grad_norm=0, learning_rate=1e-3)
balancing = attach_trainer(trainer, strategies())
trainer.train()
if trainer.is_world_process_zero():
    bias = balancing.attachment.state_dict()["strategies"]
    save_file(weights(trainer.model) | bias, sys.argv[1] + "/weights.safetensors")
    print([row["max_vio"] for row in trainer.state.log_history if "loss" in row])
"""


def test_two_ranks_train_as_two_micro_batches_do(tmp_path):
    """A tie in a load is seen alike: the bias moves by the counts of both."""
    (tmp_path / "two_ranks.py").write_text(TWO_RANKS)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    subprocess.run(
        [*command, str(tmp_path / "two_ranks.py"), str(tmp_path)], check=True, cwd=ROOT,
        env=os.environ | {"PYTHONPATH": f"{ROOT}/src:{ROOT}", "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    trainer = made(tmp_path, gradient_accumulation_steps=2, max_grad_norm=0, learning_rate=1e-3)
    balancing = attach_trainer(trainer, strategies())
    trainer.train()
    alone = weights(trainer.model) | balancing.attachment.state_dict()["strategies"]
    torch.testing.assert_close(load_file(tmp_path / "weights.safetensors"), alone, rtol=1e-3, atol=1e-5)
