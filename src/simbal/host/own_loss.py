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
from simbal.balancing.lbl import LoadBalancingLoss, PooledLoadBalancingLoss, RouterZLoss
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
    noise: float  # the largest relative change of a hidden state on the way from its block to the router


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
        loss: Tensor = self._run(batch, 0).loss
        return loss

    @contextmanager
    def random_biases(self) -> Iterator[None]:
        """Give each bias on the choice other values within the block."""
        held = [router.bias for router in self.routers if router.bias is not None]
        before = [bias.detach().clone() for bias in held]
        with torch.no_grad():
            for bias in held:
                bias.normal_(std=0.2)
        try:
            yield
        finally:
            with torch.no_grad():
                for bias, values in zip(held, before, strict=True):
                    bias.copy_(values)

    @cached_property
    def divides(self) -> bool:
        """Whether the model divides its cross-entropy by the number of labels that it is given."""
        taken = inspect.signature(self.model.forward).parameters.values()
        if not any(each.name == "num_items_in_batch" or each.kind is each.VAR_KEYWORD for each in taken):
            return False
        batch = self.batch(0, 1, S)
        one, many = (self._run(batch, 0, num_items_in_batch=torch.tensor(n)).loss.detach() for n in (1.0, HUGE))
        return bool(abs(one - many) > 1e-3 * abs(one))

    def _run(self, batch: dict[str, Tensor], seed: int, **keys: object) -> Any:
        torch.manual_seed(seed)
        output = self.model(**batch, use_cache=False, **keys)
        if getattr(output, "loss", None) is None:
            raise UserError(f"{type(self.model).__name__} returns no loss for labels: give a language model")
        return output

    def observe(self, batch: dict[str, Tensor], seed: int = 0, **keys: object) -> Observed:
        """Run the model on a batch.

        Args:
            batch: its inputs and labels.
            seed: of what the model draws.
            keys: of the model's forward pass, such as output_router_logits.
        """
        passes: list[tuple[ForwardPass, list[Routing]]] = []
        if self.divides:
            keys["num_items_in_batch"] = torch.tensor(HUGE)
        hooks = Hooks(self.backbone, self.routers, None, lambda *of_pass: passes.append(of_pass))
        with noise_at(self.model, self.routers[0]) as noise:
            try:
                output = self._run(batch, seed, **keys)
            finally:
                hooks.remove()
        added = output.loss
        if not self.divides:
            added = added - cross_entropy(output.logits, batch["labels"])
        last, routings = passes[-1]
        return Observed(added, routings, replace(last, kept_N=None).routings(self.routers), max(noise))


def cross_entropy(logits_BSV: Tensor, labels_BS: Tensor) -> Tensor:
    """Return the mean cross-entropy of the next tokens, in nats; a scalar."""
    return nn.functional.cross_entropy(logits_BSV[:, :-1].float().flatten(0, 1), labels_BS[:, 1:].flatten())


@contextmanager
def noise_at(model: nn.Module, router: HostRouter) -> Iterator[list[float]]:
    """Measure within the block how far the hidden states that a router gets are from those that its block gets."""
    found: list[float] = [0.0]
    before: list[Tensor] = []
    block = model.get_submodule(router.name.rpartition(".")[0])

    def keep(module: nn.Module, args: tuple[Any, ...]) -> None:
        before[:] = [args[0].detach().clone()] if args else []  # a block may change it in place

    def compare(module: nn.Module, args: tuple[Any, ...]) -> None:
        if before and args[0].numel() == before[0].numel():
            x, noisy = before[0].flatten().float(), args[0].detach().flatten().float()
            found.append(float(((noisy - x).abs() / x.abs().clamp(min=1e-6)).max()))

    handles = [block.register_forward_pre_hook(keep), router.module.register_forward_pre_hook(compare)]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


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
    """A reading of the load balancing loss, E sum_i f_i P_i: f sums to K, P is a mean of probabilities."""

    together: str  # the tokens of all layers | of each layer | of each sequence in each layer
    gating: str
    carried_out: bool  # f counts the choice that was carried out, not that of the K largest logits

    def of(self, routings: Sequence[Routing]) -> Tensor:
        """Return the loss, the mean over layers; a scalar."""
        seen = [
            replace(
                routing, gating=self.gating, probs_NE=gate(routing.logits_NE, self.gating),
                steered=routing.steered and not self.carried_out,
            )
            for routing in routings
        ]  # fmt: skip
        strategy: Balancing = PooledLoadBalancingLoss(1.0)
        if self.together != "all layers":
            strategy = LoadBalancingLoss(1.0, scope="micro" if self.together == "each layer" else "sequence")
        return strategy.losses(seen, None).mean()


def readings(routers: Sequence[HostRouter]) -> list[Reading]:
    """Return the readings that can differ on these routers, the most usual first."""
    gatings = dict.fromkeys(("softmax", routers[0].gating))
    together = ("all layers", "each layer", "each sequence")[1 if len(routers) == 1 else 0 :]
    choices = (False,) if routers[0].rule.plain else (False, True)
    return [Reading(*kind) for kind in product(together, gatings, choices)]


def z_loss(routings: Sequence[Routing]) -> Tensor:
    """Return the mean over layers of the router z-loss; a scalar."""
    return RouterZLoss(1.0).losses(routings, None).mean()


@dataclass(frozen=True)
class Fit:
    """What was added, as a sum: `balance` x a reading of the load balancing loss + `z` x the router z-loss."""

    reading: Reading | None
    balance: float
    z: float

    def of(self, routings: Sequence[Routing]) -> float:
        """Return the sum for these decisions."""
        balance = self.balance * float(self.reading.of(routings).detach()) if self.reading else 0.0
        return balance + (self.z * float(z_loss(routings).detach()) if self.z else 0.0)


def fit(passes: Sequence[Observed], routers: Sequence[HostRouter], tolerance: float) -> Fit | None:
    """Return the first sum that gives what was added in every pass; None if none does.

    Args:
        passes: without padding, more than two.
        routers: of the model.
        tolerance: of the relative deviation.
    """
    added_P = torch.stack([observed.added.detach().double().cpu() for observed in passes])
    z_P = torch.stack([z_loss(observed.routings).detach().double().cpu() for observed in passes])
    for reading in readings(routers):
        balance_P = torch.stack([reading.of(observed.routings).detach().double().cpu() for observed in passes])
        for terms in ([balance_P], [balance_P, z_P]):
            factors = _solve(terms, added_P, tolerance)
            if factors:
                return Fit(reading, factors[0], factors[1] if len(factors) > 1 else 0.0)
    factors = _solve([z_P], added_P, tolerance)
    return Fit(None, 0.0, factors[0]) if factors else None


def _solve(terms: Sequence[Tensor], added_P: Tensor, tolerance: float) -> list[float] | None:
    matrix_PT = torch.stack([*terms], 1)
    factors_T = torch.linalg.lstsq(matrix_PT, added_P[:, None]).solution[:, 0]
    deviation_P = (matrix_PT @ factors_T - added_P).abs()
    shares_T = (factors_T * matrix_PT.mean(0)).abs() / added_P.mean().abs()
    close = bool((deviation_P <= tolerance * added_P.abs()).all())
    return factors_T.tolist() if close and bool((shares_T > 2 * tolerance).all()) else None
