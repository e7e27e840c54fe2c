"""The hooks on a host model: they record each forward pass and, for some strategies, change what its routers decide.

Shapes: N tokens, E experts, K experts per token.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from simbal.attach.forward_pass import Decision, ForwardPass, wide
from simbal.attach.routers import HostRouter
from simbal.balancing.composition import Composition
from simbal.errors import UserError
from simbal.model.router import Candidates, Routing, gate, largest, topk_weights

Output = tuple[Tensor, Tensor, Tensor]  # of a router: logits_NE, weights_NK, experts_NK


class Hooks:
    """The hooks on one model.

    A pass is recorded from the backbone's call to its return; what calls a router elsewhere is a recomputation.
    """

    def __init__(
        self,
        backbone: nn.Module,
        routers: Sequence[HostRouter],
        strategies: Composition,
        finish_pass: Callable[[ForwardPass, list[Routing]], None],
    ) -> None:
        self.routers, self.strategies, self.finish_pass = routers, strategies, finish_pass
        self.forget()
        # before other hooks, so that those which capture router logits get what the experts get
        hooks = [router.module.register_forward_hook(RouterHook(self, router), prepend=True) for router in routers]
        opening = backbone.register_forward_pre_hook(self._open, with_kwargs=True)
        self.handles = [*hooks, opening, backbone.register_forward_hook(self._close)]

    def forget(self) -> None:
        """Free what was recorded."""
        self.running: ForwardPass | None = None
        self.finished: tuple[ForwardPass, list[Routing]] | None = None  # the last one

    def remove(self) -> None:
        """Take all hooks off the model."""
        for handle in self.handles:
            handle.remove()
        self.handles = []

    def _open(self, backbone: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.strategies.train(backbone.training).to(self.routers[0].weight_ED.device)
        self.forget()
        self.running = ForwardPass.of_inputs(backbone, args, kwargs)

    def _close(self, backbone: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        last, self.running = self.running, None
        assert last is not None
        self.finished = last, last.routings(self.routers)
        self.finish_pass(*self.finished)

    def steered(self, router: HostRouter, logits_NE: Tensor) -> Decision:
        """Return the decision of the strategies on a router's logits, in a pass or in its recomputation."""
        if self.running:
            return steer(router, logits_NE, self.running.tokens_BS, self.strategies)
        # of which pass this is the recomputation, only its logits tell
        before = self.finished[0].decisions[router.layer] if self.finished else None
        unknown_BS = torch.empty(1, len(logits_NE), dtype=torch.int64, device="meta")
        return steer(router, logits_NE, unknown_BS, self.strategies, before)


@dataclass(frozen=True)
class RouterHook:
    """The hook on one router, which PyTorch calls after it."""

    hooks: Hooks
    router: HostRouter

    def __call__(self, module: nn.Module, args: Any, output: Output) -> Output | None:
        """Return the router's output as the strategies change it; None if they leave it alone."""
        logits_NE, weights_NK, experts_NK = output
        strategies, running = self.hooks.strategies, self.hooks.running
        decision = Decision(logits_NE, weights_NK, experts_NK, steered=False)
        if strategies.steers:
            decision = self.hooks.steered(self.router, logits_NE)
        if running:
            running.decisions[self.router.layer] = decision
        if not strategies.steers:
            return None
        probs_NK = decision.topk_probs_NK.to(weights_NK.dtype)
        return decision.logits_NE.to(logits_NE.dtype), probs_NK, decision.topk_experts_NK


def refuse_second(routers: Sequence[HostRouter]) -> None:
    """Raise `UserError` if a router has such a hook already; two biases would add up unseen."""
    if any(isinstance(hook, RouterHook) for router in routers for hook in router.module._forward_hooks.values()):
        raise UserError("the model has strategies attached: detach() them, or give attach all strategies at once")


def steer(
    router: HostRouter, logits_NE: Tensor, tokens_BS: Tensor, strategies: Composition, before: Decision | None = None
) -> Decision:
    """Return the decision that a `Router` of simbal would make on the host's logits.

    Args:
        router: whose facts are used.
        logits_NE: its products x W^T, in any dtype.
        tokens_BS: ids; on the meta device if they are unknown.
        strategies: what changes the decision.
        before: the decision of the pass of which this one may be a recomputation; then its experts are taken.

    Raises:
        UserError: the strategy chooses by token ids, and they are unknown.
    """
    with torch.autocast(logits_NE.device.type, enabled=False):
        adjusted_NE = strategies.adjust_logits(logits_NE.to(wide(logits_NE)))
        probs_NE = gate(adjusted_NE, router.gating)
        with torch.no_grad():
            if before is not None and _recomputed(adjusted_NE, before.logits_NE):
                experts_NK, steered = before.topk_experts_NK, before.steered
            else:
                scores_NE = strategies.choice_scores(Candidates(router.layer, tokens_BS, adjusted_NE, probs_NE))
                if scores_NE.is_meta:
                    raise UserError(
                        f"{strategies.chooser} chooses experts by token ids, and this forward pass has none: give the "
                        "model input_ids, and under gradient checkpointing go backward before the next forward pass"
                    )
                experts_NK, steered = largest(scores_NE, router.top_k), scores_NE is not adjusted_NE
        weights_NK = topk_weights(adjusted_NE, probs_NE, experts_NK, router.gating, router.renormalize)
    return Decision(adjusted_NE, weights_NK, experts_NK, steered)


def _recomputed(logits_NE: Tensor, before_NE: Tensor) -> bool:
    """Whether these are the same logits but for rounding."""
    return logits_NE.shape == before_NE.shape and torch.allclose(logits_NE, before_NE, rtol=1e-3, atol=1e-5)
