"""What a host model's own code adds to its loss for the sake of its routers, found by running it.

Shapes: B sequences, S sequence length, N = B*S tokens, P passes, E experts, K experts per token.
"""

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn

from simbal.balancing.base import Balancing
from simbal.balancing.lbl import LoadBalancingLoss, PooledLoadBalancingLoss
from simbal.errors import UserError
from simbal.host.forward_pass import ForwardPass
from simbal.host.hooks import Hooks
from simbal.host.routers import HostRouter, find_backbone, find_routers
from simbal.model.router import Routing, gate

HUGE = 1e20  # by so many labels the cross-entropy is divided, and only what is added to it is left
S = 16


@dataclass(frozen=True)
class Observed:
    """A pass in training mode: what was added to the cross-entropy, and the decisions of every layer's router."""

    added: Tensor  # a scalar, with its gradient
    routings: list[Routing]  # of the tokens that the attention mask lets through
    all_routings: list[Routing]  # of all tokens


class Subject:
    """A host model that is run on random tokens; it is left as it was, random numbers of the process included."""

    def __init__(self, model: nn.Module) -> None:
        """Find the routers.

        Raises:
            UserError: as `find_routers`; or the model is no whole language model.
        """
        self.model, self.routers = model, find_routers(model)
        self.backbone = find_backbone(model, self.routers)
        embedding: Any = getattr(model, "get_input_embeddings", lambda: None)()
        if not isinstance(embedding, nn.Module) or not hasattr(embedding, "weight"):
            raise UserError(f"{type(model).__name__} has no input embeddings: give a language model with its head")
        self.embedding: Tensor = embedding.weight  # type: ignore[assignment]
        if any(parameter.is_meta for parameter in model.parameters()):
            raise UserError(f"the weights of {type(model).__name__} are not all in memory, and gradients are to flow")

    def batch(self, seed: int, sequences: int, distinct: int) -> dict[str, Tensor]:
        """Return B x S random token ids, of so many distinct ones, all of them labels."""
        draws = torch.Generator().manual_seed(seed)
        vocabulary = torch.randint(1, len(self.embedding), (distinct,), generator=draws)
        tokens_BS = vocabulary[torch.randint(distinct, (sequences, S), generator=draws)].to(self.embedding.device)
        return {"input_ids": tokens_BS, "labels": tokens_BS, "attention_mask": torch.ones_like(tokens_BS)}

    def batches(self) -> list[dict[str, Tensor]]:
        """Return batches whose tokens spread over the experts to very different degrees."""
        return [self.batch(seed, *sizes) for seed, sizes in enumerate(((1, 1), (2, 3), (2, 32), (3, 6), (1, 16)))]

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        """Return the model's loss of a batch, a scalar."""
        loss: Tensor = self._run(batch).loss
        return loss

    @cached_property
    def divides(self) -> bool:
        """Whether the model divides its cross-entropy by the number of labels that it is given."""
        taken = inspect.signature(self.model.forward).parameters.values()
        if not any(each.name == "num_items_in_batch" or each.kind is each.VAR_KEYWORD for each in taken):
            return False
        batch = self.batch(0, 1, S)
        one, many = (self._run(batch, num_items_in_batch=torch.tensor(n)).loss.detach() for n in (1.0, HUGE))
        return bool(abs(one - many) > 1e-3 * abs(one))

    def _run(self, batch: dict[str, Tensor], **keys: object) -> Any:
        torch.manual_seed(0)
        output = self.model(**batch, use_cache=False, **keys)
        if getattr(output, "loss", None) is None:
            raise UserError(f"{type(self.model).__name__} returns no loss for labels: give a language model")
        return output

    def observe(self, batch: dict[str, Tensor], **keys: object) -> Observed:
        """Run the model on a batch.

        Args:
            batch: its inputs and labels.
            keys: of the model's forward pass, such as output_router_logits.
        """
        passes: list[tuple[ForwardPass, list[Routing]]] = []
        if self.divides:
            keys["num_items_in_batch"] = torch.tensor(HUGE)
        hooks = Hooks(self.backbone, self.routers, None, lambda *of_pass: passes.append(of_pass))
        try:
            output = self._run(batch, **keys)
        finally:
            hooks.remove()
        added = output.loss
        if not self.divides:
            added = added - cross_entropy(output.logits, batch["labels"])
        last, routings = passes[-1]
        return Observed(added, routings, replace(last, kept_N=None).routings(self.routers))


def cross_entropy(logits_BSV: Tensor, labels_BS: Tensor) -> Tensor:
    """Return the mean cross-entropy of the next tokens, in nats; a scalar."""
    return nn.functional.cross_entropy(logits_BSV[:, :-1].float().flatten(0, 1), labels_BS[:, 1:].flatten())


@contextmanager
def undisturbed(model: nn.Module, trained: Sequence[Tensor]) -> Iterator[None]:
    """Train `model` within the block, with gradients of `trained` alone; then all is as before."""
    modes = [(module, module.training) for module in model.modules()]
    states = [(parameter, parameter.requires_grad, parameter.grad) for parameter in model.parameters()]
    buffers = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]  # some models move a bias in training
    devices = sorted({p.device.index for p in model.parameters() if p.device.type == "cuda"})
    kept = {id(tensor) for tensor in trained}
    with torch.random.fork_rng(devices), torch.enable_grad():
        try:
            for parameter, _, _ in states:
                parameter.grad = None
                parameter.requires_grad_(id(parameter) in kept)
            model.train()
            yield
        finally:
            for module, training in modes:
                module.training = training
            for parameter, requires_grad, gradient in states:
                parameter.requires_grad_(requires_grad)
                parameter.grad = gradient
            with torch.no_grad():
                for buffer, values in buffers:
                    buffer.copy_(values)


@dataclass(frozen=True)
class Reading:
    """A reading of the load balancing loss, E sum_i f_i P_i: f counts the K largest logits, P is a mean probability."""

    together: str  # the tokens of all layers | of each layer | of each sequence in each layer
    gating: str

    def of(self, routings: Sequence[Routing]) -> Tensor:
        """Return the loss, the mean over layers; a scalar."""
        seen = [
            replace(routing, gating=self.gating, probs_NE=gate(routing.logits_NE, self.gating)) for routing in routings
        ]
        strategy: Balancing = PooledLoadBalancingLoss(1.0)
        if self.together != "all layers":
            strategy = LoadBalancingLoss(1.0, scope="micro" if self.together == "each layer" else "sequence")
        return strategy.losses(seen, None).mean()


@dataclass(frozen=True)
class Fit:
    """What was added, as `factor` x a reading of the load balancing loss."""

    reading: Reading
    factor: float

    def of(self, routings: Sequence[Routing]) -> float:
        """Return the loss for these decisions."""
        return self.factor * float(self.reading.of(routings).detach())


def fit(passes: Sequence[Observed], routers: Sequence[HostRouter], tolerance: float) -> Fit | None:
    """Return the first reading, the most usual first, that gives what was added in every pass; None if none does.

    Args:
        passes: without padding, more than two.
        routers: of the model.
        tolerance: of the relative deviation.
    """
    added_P = torch.stack([observed.added.detach().double().cpu() for observed in passes])
    gatings = dict.fromkeys(("softmax", routers[0].gating))
    together = ("all layers", "each layer", "each sequence")[1 if len(routers) == 1 else 0 :]
    for reading in (Reading(*kind) for kind in product(together, gatings)):
        loss_P = torch.stack([reading.of(observed.routings).detach().double().cpu() for observed in passes])
        factor = float((loss_P @ added_P) / (loss_P @ loss_P))
        if bool(((factor * loss_P - added_P).abs() <= tolerance * added_P.abs()).all()):
            return Fit(reading, factor)
    return None
