"""Balancing strategies in the `Trainer` of transformers, or any subclass of it: `attach_trainer(trainer, SimBal())`.

Shapes: L MoE layers, E experts.
"""

import base64
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, cast

import safetensors.torch
import torch
from torch import Tensor
from transformers import PreTrainedModel, Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from simbal.balancing.base import Balancing
from simbal.config.schedule import Schedule
from simbal.distributed import sum_over_ranks, world_size
from simbal.errors import UserError
from simbal.hf.attach import Attachment, attach
from simbal.metrics.routing import max_vio

KEY = "simbal"  # of the strategies' state in trainer_state.json, which is in every checkpoint folder
MAX_VIO = "max_vio"


def attach_trainer(
    trainer: Trainer,
    strategies: Balancing | Iterable[Balancing] | Mapping[str, Balancing],
    *,
    schedules: Mapping[str, Schedule] | None = None,
    layer_reduce: str = "sum",
) -> "BalancingCallback":
    """Train the model of `trainer` with strategies, as `attach` puts them on it.

        trainer = Trainer(model=model, args=TrainingArguments(...), train_dataset=data)
        balancing = attach_trainer(trainer, [SimBal(coef=0.1), LossFree(update_rate=0.001)])
        trainer.train()

    The gradient of an optimizer step is that of the trainer's own loss plus the mean of the strategies' losses over its
    micro-batches, whatever the trainer divides its own loss by. Its log gets `aux/<strategy>`, which is no part of its
    `loss`, and `max_vio` of the steps since the last log. Every checkpoint holds the strategies' state, and
    `trainer.train(resume_from_checkpoint=...)` goes on from it; the weights in it are under the names that they have in
    the model, as the trainer would not find those of experts and routers under the published names that it writes
    (huggingface/transformers issue 48805). `from_pretrained` reads both, and `trainer.save_model()` writes the latter.

    Args:
        trainer: of transformers or a subclass, on one device or with DDP.
        strategies: as in `attach`, like the other arguments.

    Raises:
        UserError: as in `attach`; or the trainer cuts the model's weights, or makes the model anew.
    """
    args = trainer.args
    if trainer.model_init is not None:
        raise UserError("model_init makes another model for each training: give the Trainer the model itself")
    if trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled:
        raise UserError("simbal needs the whole weights of routers in each process: train without FSDP and DeepSpeed")
    if args.n_gpu > 1:
        raise UserError("simbal needs one process for each GPU: start the program with torchrun, or show it one GPU")
    attachment = attach(trainer.model, strategies, schedules=schedules, layer_reduce=layer_reduce)
    if attachment.strategies.needs_step_counts and args.gradient_accumulation_steps > 1:
        attachment.detach()
        raise UserError("scope=global needs the whole step at once: set gradient_accumulation_steps=1 or another scope")
    callback = BalancingCallback(trainer, attachment)
    trainer.callback_handler.callbacks.insert(0, callback)  # before those that write what is logged
    return callback


class BalancingCallback(TrainerCallback):
    """The strategies on a trainer's model, as `attach_trainer` returns them.

    They stay on the model after the training, so that it is evaluated as it was trained, until `detach`.
    """

    def __init__(self, trainer: Trainer, attachment: Attachment) -> None:
        self.trainer, self.attachment = trainer, attachment
        self._unwrap: Callable[[], None] = lambda: None
        self._save_model = trainer.save_model
        trainer.save_model = self._save_under_own_names  # type: ignore[method-assign]
        self._backwards = 0  # in this optimizer step
        self._sums: dict[str, Tensor] = {}  # of what is logged, over the steps since the last log
        self._steps = 0  # those steps

    def detach(self) -> None:
        """Take the strategies off the model and out of the trainer."""
        self._unwrap()
        self.attachment.detach()
        self.trainer.save_model = self._save_model  # type: ignore[method-assign]
        self.trainer.remove_callback(self)

    def _save_under_own_names(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save the model as the trainer does; in a checkpoint without the conversion that loading it would not undo."""
        model = self.trainer.accelerator.unwrap_model(self.trainer.model)
        checkpoint = output_dir is not None and Path(output_dir).name.startswith(PREFIX_CHECKPOINT_DIR)
        if not (checkpoint and isinstance(model, PreTrainedModel)):
            self._save_model(output_dir, _internal_call)
            return
        model.save_pretrained = partial(model.save_pretrained, save_original_format=False)  # type: ignore[method-assign]
        try:
            self._save_model(output_dir, _internal_call)
        finally:
            del model.save_pretrained

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Take up the state of the checkpoint from which the training goes on; see what goes backward."""
        self.attachment.discard()
        self._backwards, self._steps, self._sums = 0, 0, {}
        if state.global_step:
            restore(self.attachment, state, f"the checkpoint of step {state.global_step}")
        else:
            self.attachment.steps = 0
        kept(state)[KEY] = saved(self.attachment)
        self._wrap_backward()

    def _wrap_backward(self) -> None:
        """Add the strategies' losses where the trainer's own is scaled already, and gradients sum up to the step's."""
        self._unwrap()
        accelerator = self.trainer.accelerator
        backward = accelerator.backward

        def with_losses(loss: Tensor, **kwargs: Any) -> None:
            backward(loss + self._share().to(loss.device), **kwargs)

        def unwrap() -> None:
            accelerator.backward, self._unwrap = backward, lambda: None

        accelerator.backward, self._unwrap = with_losses, unwrap

    def _share(self) -> Tensor:
        """Return this micro-batch's part of the strategies' losses of the step; a scalar."""
        self._backwards += 1
        if self.attachment.micro_batches != self._backwards:
            raise UserError(
                f"{type(self.trainer).__name__} has run the model {self.attachment.micro_batches} times in training "
                f"mode for {self._backwards} backward passes: strategies need one pass for each"
            )
        if not self.attachment.last_counts:
            raise UserError(
                f"{type(self.trainer).__name__} has run the model without gradients, or in evaluation mode, between "
                "the pass that it trains on and its backward pass: run it before the former"
            )
        terms = {
            name: term / self.trainer.current_gradient_accumulation_steps
            for name, term in self.attachment.losses().items()
        }
        for name, term in terms.items():
            self._add(f"aux/{name}", term.detach())
        return torch.stack([*terms.values()]).sum() if terms else torch.zeros(())

    def _add(self, name: str, number: Tensor) -> None:
        self._sums[name] = self._sums[name] + number if name in self._sums else number

    def on_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Update the strategies, unless the step was skipped for numbers that were not finite."""
        if self.attachment.micro_batches != self._backwards:
            raise UserError(
                f"{type(self.trainer).__name__} goes backward otherwise than by accelerator.backward, where the "
                "strategies' losses are added: use attach() in a loop of your own"
            )
        self._backwards = 0
        self._steps += 1
        self._add(MAX_VIO, max_vio(sum_over_ranks(self.attachment.counts_LE)).mean())
        if self.trainer.accelerator.optimizer_step_was_skipped:
            self.attachment.discard()
            return
        self.attachment.step(lr=kwargs["optimizer"].param_groups[0]["lr"])
        kept(state)[KEY] = saved(self.attachment)

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, float] | None = None,
        **kwargs: Any,
    ) -> None:
        """Add the means since the last log to the log of a training step."""
        if logs is None or "loss" not in logs or not self._steps:
            return
        means = {name: sum_over_ranks(total).item() / self._steps / world_size() for name, total in self._sums.items()}
        logs |= means
        state.log_history[-1] |= means
        self._sums, self._steps = {}, 0

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Go back to the state of the best checkpoint, if the trainer has gone back to its weights."""
        self._unwrap()
        if args.load_best_model_at_end and state.best_model_checkpoint is not None:
            best = TrainerState.load_from_json(str(Path(state.best_model_checkpoint) / "trainer_state.json"))
            restore(self.attachment, best, state.best_model_checkpoint)


def kept(state: TrainerState) -> dict[str, Any]:
    """Return the part of a trainer's state that it writes to each checkpoint for its callbacks, by name."""
    return cast(dict[str, Any], state.stateful_callbacks)


def saved(attachment: Attachment) -> dict[str, Any]:
    """Return the state of the strategies as JSON has it."""
    state = attachment.state_dict()
    tensors = {name: tensor.contiguous() for name, tensor in state["strategies"].items()}
    return {
        "steps": state["steps"],
        "strategies": [*attachment.strategies.parts],
        "tensors": base64.b64encode(safetensors.torch.save(tensors)).decode("ascii"),
    }


def restore(attachment: Attachment, state: TrainerState, source: str) -> None:
    """Set the state of the strategies that `saved` has put into a trainer's state.

    Raises:
        UserError: `source`, from which the state was read, was trained with other strategies or none.
    """
    found = kept(state).get(KEY)
    names: list[str] = found["strategies"] if found else []
    wanted = [*attachment.strategies.parts]
    if names != wanted:
        raise UserError(
            f"{source} was trained with {', '.join(names) or 'no strategies'} and not {', '.join(wanted)}: begin a new "
            "training from its weights to change that"
        )
    if found:
        tensors = safetensors.torch.load(base64.b64decode(found["tensors"]))
        attachment.load_state_dict({"steps": found["steps"], "strategies": tensors})
