"""Balancing strategies for the transformers Trainer and subclasses: `attach_trainer(trainer, SimBal())`.

Shapes: L MoE layers, E experts.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from transformers import PreTrainedModel, Trainer, TrainerCallback, TrainerState
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from simbal.balancing.base import Balancing
from simbal.config.schedule import Schedule
from simbal.distributed import sum_over_ranks, world_size
from simbal.errors import UserError
from simbal.hf.attach import Attachment, attach
from simbal.metrics.routing import max_vio

STATE_KEY = "simbal"  # the state of the strategies in trainer_state.json


def attach_trainer(
    trainer: Trainer,
    strategies: Balancing | Iterable[Balancing] | Mapping[str, Balancing],
    *,
    schedules: Mapping[str, Schedule] | None = None,
    layer_reduce: str = "sum",
) -> "BalancingCallback":
    """Attach strategies to the model of `trainer` and train with them.

        trainer = Trainer(model=model, args=TrainingArguments(...), train_dataset=data)
        balancing = attach_trainer(trainer, [SimBal(coef=0.1), LossFree(update_rate=0.001)])
        trainer.train()

    The gradient of an optimizer step is the gradient of the trainer's loss plus the mean of the strategies' losses over
    the micro-batches, however the trainer scales its own loss. Logs get `aux/<strategy>`, which is not part of `loss`,
    and `max_vio`, averaged over the steps since the last log.

    Checkpoints contain the state of the strategies, and `trainer.train(resume_from_checkpoint=...)` resumes from it.
    The weights in checkpoints have the model's own names, because the Trainer does not find experts and routers under
    the published names that it writes (huggingface/transformers issue 48805). `from_pretrained` reads both kinds of
    names, and `trainer.save_model()` writes published names.

    Args:
        trainer: a Trainer or a subclass, on one device, with DDP or with FSDP2.
        strategies: see `attach`.
        schedules: see `attach`.
        layer_reduce: see `attach`.

    Raises:
        UserError: see `attach`; or the trainer uses FSDP1 or DeepSpeed, or creates the model itself.
    """
    args = trainer.args
    if trainer.model_init is not None:
        raise UserError("model_init creates a new model for each training: pass model= to the Trainer")
    if trainer.is_deepspeed_enabled or (trainer.is_fsdp_enabled and not trainer.accelerator.is_fsdp2):
        raise UserError("strategies cannot read weights that DeepSpeed or FSDP1 shards: use FSDP2 (fsdp=True) or DDP")
    if args.n_gpu > 1:
        raise UserError("strategies need one process per GPU: use torchrun, or make only one GPU visible")
    attachment = attach(trainer.model, strategies, schedules=schedules, layer_reduce=layer_reduce)
    if attachment.strategies.needs_step_counts and args.gradient_accumulation_steps > 1:
        attachment.detach()
        raise UserError("scope=global needs gradient_accumulation_steps=1")
    callback = BalancingCallback(trainer, attachment)
    trainer.callback_handler.callbacks.insert(0, callback)  # before callbacks that report the logs
    return callback


class BalancingCallback(TrainerCallback):
    """The strategies of a trainer, returned by `attach_trainer`.

    They stay attached after training, so that evaluation uses them too, until `detach` is called.
    """

    def __init__(self, trainer: Trainer, attachment: Attachment) -> None:
        self.trainer, self.attachment = trainer, attachment
        self._save_model, self._backward = trainer.save_model, trainer.accelerator.backward
        trainer.save_model = self._save_under_own_names  # type: ignore[method-assign]
        trainer.accelerator.backward = self._backward_with_losses
        self._reset()

    def _reset(self) -> None:
        self._backwards = 0  # number of backward passes in this optimizer step
        self._sums: defaultdict[str, Any] = defaultdict(float)  # of logged values, over the steps since the last log
        self._steps = 0  # number of steps since the last log

    def detach(self) -> None:
        """Remove the strategies from the model and the trainer."""
        self.attachment.detach()
        self.trainer.save_model = self._save_model  # type: ignore[method-assign]
        self.trainer.accelerator.backward = self._backward
        self.trainer.remove_callback(self)

    def _save_under_own_names(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save the model as the trainer does, but write checkpoints under the model's own weight names.

        The trainer writes its state, with that of the strategies, after the model.
        """
        model = self.trainer.accelerator.unwrap_model(self.trainer.model)
        is_checkpoint = output_dir is not None and Path(output_dir).name.startswith(PREFIX_CHECKPOINT_DIR)
        if is_checkpoint:
            save_state(self.attachment, self.trainer.state)
        if not (is_checkpoint and isinstance(model, PreTrainedModel)):
            self._save_model(output_dir, _internal_call)
            return
        model.save_pretrained = partial(model.save_pretrained, save_original_format=False)  # type: ignore[method-assign]
        try:
            self._save_model(output_dir, _internal_call)
        finally:
            del model.save_pretrained

    def on_train_begin(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        """Load the state of the strategies when training resumes."""
        self.attachment.discard()
        self._reset()
        if state.global_step:
            load_state(self.attachment, state, f"the checkpoint of step {state.global_step}")
        else:
            self.attachment.steps = 0

    def _backward_with_losses(self, loss: Tensor, **kwargs: Any) -> None:
        """Add the strategies' losses to the trainer's loss, which is already scaled for the sum over micro-batches."""
        self._backwards += 1
        if self.attachment.micro_batches != self._backwards or not self.attachment.last_counts:
            name = type(self.trainer).__name__
            raise UserError(
                f"{name} must run the model once in training mode before each backward "
                "pass, and not again in between: run other passes before it, in evaluation mode"
            )
        for name, strategy_loss in self.attachment.losses().items():
            term = strategy_loss / self.trainer.current_gradient_accumulation_steps
            self._sums[f"aux/{name}"] += term.detach()
            loss = loss + term.to(loss.device)
        self._backward(loss, **kwargs)

    def on_optimizer_step(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        """Update the strategies, unless the optimizer skipped the step because of non-finite gradients."""
        if self.attachment.micro_batches != self._backwards:
            name = type(self.trainer).__name__
            raise UserError(f"{name} does not call accelerator.backward: use attach() in your own training loop")
        self._backwards = 0
        self._steps += 1
        self._sums["max_vio"] += max_vio(sum_over_ranks(self.attachment.counts_LE)).mean()
        if self.trainer.accelerator.optimizer_step_was_skipped:
            self.attachment.discard()
            return
        self.attachment.step(lr=kwargs["optimizer"].param_groups[0]["lr"])

    def on_log(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        """Add the means since the last log to the training log."""
        if "loss" not in kwargs["logs"] or not self._steps:
            return
        means = {name: sum_over_ranks(total).item() / self._steps / world_size() for name, total in self._sums.items()}
        kwargs["logs"].update(means)
        state.log_history[-1].update(means)
        self._sums.clear()
        self._steps = 0

    def on_train_end(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        """Load the state of the best checkpoint if the trainer has loaded its weights."""
        if args.load_best_model_at_end and state.best_model_checkpoint is not None:
            best = TrainerState.load_from_json(str(Path(state.best_model_checkpoint) / "trainer_state.json"))
            load_state(self.attachment, best, state.best_model_checkpoint)


def save_state(attachment: Attachment, state: TrainerState) -> None:
    """Store the state of the strategies in the trainer's state, which every checkpoint contains as JSON."""
    saved, callbacks = attachment.state_dict(), cast(dict[str, Any], state.stateful_callbacks)
    callbacks[STATE_KEY] = {
        "steps": saved["steps"],
        "strategies": [*attachment.strategies.parts],
        "tensors": {name: tensor.tolist() for name, tensor in saved["strategies"].items()},
    }


def load_state(attachment: Attachment, state: TrainerState, source: str) -> None:
    """Load the state of the strategies from a trainer's state.

    Raises:
        UserError: `source`, the origin of the state, was trained with other strategies.
    """
    saved = cast(dict[str, Any], state.stateful_callbacks).get(STATE_KEY, {})
    names, expected = saved.get("strategies", []), [*attachment.strategies.parts]
    if names != expected:
        trained_with = f"{', '.join(names) or 'no strategies'}, not with {', '.join(expected)}"
        raise UserError(f"{source} was trained with {trained_with}: start a new training from its weights")
    current = attachment.state_dict()["strategies"]
    tensors = {name: torch.tensor(value, dtype=current[name].dtype) for name, value in saved["tensors"].items()}
    attachment.load_state_dict({"steps": saved["steps"], "strategies": tensors})
