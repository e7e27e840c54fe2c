"""The hooks on a host model: they record each forward pass and, where it is steered, change what its routers decide.

Shapes: N tokens, E experts, K experts per token.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from simbal.errors import UserError
from simbal.host.forward_pass import Decision, ForwardPass, wide
from simbal.host.routers import HostRouter
from simbal.model.router import Candidates, Routing, Steering, gate, largest

Output = tuple[Tensor, Tensor, Tensor]  # of a router: logits_NE, weights_NK, experts_NK


class Hooks:
    """The hooks on one model.

    A pass is recorded from the backbone's call to its return; what calls a router elsewhere is a recomputation.
    """

    def __init__(
        self,
        backbone: nn.Module,
        routers: Sequence[HostRouter],
        steering: Steering | None,
        finish_pass: Callable[[ForwardPass, list[Routing]], None],
        start_pass: Callable[[bool], None] = lambda training: None,
    ) -> None:
        """Hook the routers.

        Args:
            backbone: the module whose call is a forward pass.
            routers: all of them.
            steering: what changes their decisions; None: nothing does.
            finish_pass: is given each pass at its end, with the routing of every layer.
            start_pass: is told at a pass's start whether it is in training mode.
        """
        self.routers, self.steering, self.finish_pass, self.start_pass = routers, steering, finish_pass, start_pass
        self.paused = False  # nothing is recorded or steered
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
        if self.paused:
            return
        self.start_pass(backbone.training)
        self.forget()
        self.running = ForwardPass.of_inputs(backbone, args, kwargs)

    def _close(self, backbone: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if self.paused:
            return
        last, self.running = self.running, None
        assert last is not None
        self.finished = last, last.routings(self.routers)
        self.finish_pass(*self.finished)

    def steered(self, router: HostRouter, logits_NE: Tensor, steering: Steering) -> Decision:
        """Return the steered decision on a router's logits, in a pass or in its recomputation."""
        if self.running:
            return steer(router, logits_NE, self.running.tokens_BS, steering)
        # of which pass this is the recomputation, only its logits tell
        before = self.finished[0].decisions[router.layer] if self.finished else None
        unknown_BS = torch.empty(1, len(logits_NE), dtype=torch.int64, device="meta")
        return steer(router, logits_NE, unknown_BS, steering, before)


@dataclass(frozen=True)
class RouterHook:
    """The hook on one router, which PyTorch calls after it."""

    hooks: Hooks
    router: HostRouter

    def __call__(self, module: nn.Module, args: Any, output: Output) -> Output | None:
        """Return the router's output as it is steered; None if it is left alone."""
        if self.hooks.paused:
            return None
        logits, weights, experts = output
        logits_NE, weights_NK, experts_NK = (tensor.flatten(0, -2) for tensor in output)
        steering, running = self.hooks.steering, self.hooks.running
        decision = Decision(logits_NE, weights_NK, experts_NK, steered=not self.router.rule.plain)
        if steering is not None:
            decision = self.hooks.steered(self.router, logits_NE, steering)
        if running:
            running.decisions[self.router.layer] = decision
        if steering is None:
            return None
        probs = decision.topk_probs_NK.to(weights.dtype).view_as(weights)
        return decision.logits_NE.to(logits.dtype).view_as(logits), probs, decision.topk_experts_NK.view_as(experts)


def refuse_second(routers: Sequence[HostRouter]) -> None:
    """Raise `UserError` if a router has such a hook already; two biases would add up unseen."""
    if any(isinstance(hook, RouterHook) for router in routers for hook in router.module._forward_hooks.values()):
        raise UserError("the model has strategies attached: detach() them, or give attach all strategies at once")


@contextmanager
def paused(routers: Sequence[HostRouter]) -> Iterator[None]:
    """Let the model run within the block as if none of these hooks were on its routers."""
    on_routers = (hook for router in routers for hook in router.module._forward_hooks.values())
    running = [*{hook.hooks for hook in on_routers if isinstance(hook, RouterHook) and not hook.hooks.paused}]
    for hooks in running:
        hooks.paused = True
    try:
        yield
    finally:
        for hooks in running:
            hooks.paused = False


def steer(
    router: HostRouter, logits_NE: Tensor, tokens_BS: Tensor, steering: Steering, before: Decision | None = None
) -> Decision:
    """Return the decision on the host's logits that `steering` brings about, under the rule of the router.

    Args:
        router: whose facts are used.
        logits_NE: its products x W^T, in any dtype.
        tokens_BS: ids; on the meta device if they are unknown.
        steering: what changes the decision; where it returns the logits as its scores, the rule chooses.
        before: the decision of the pass of which this one may be a recomputation; then its experts are taken.

    Raises:
        UserError: the steering chooses by token ids, and they are unknown.
    """
    with torch.autocast(logits_NE.device.type, enabled=False):
        adjusted_NE = steering.adjust_logits(logits_NE.to(wide(logits_NE)))
        probs_NE = gate(adjusted_NE, router.gating)
        with torch.no_grad():
            if before is not None and _recomputed(adjusted_NE, before.logits_NE):
                experts_NK, steered = before.topk_experts_NK, before.steered
            else:
                candidates = Candidates(router.layer, tokens_BS, adjusted_NE, probs_NE, router.top_k)
                scores_NE = steering.choice_scores(candidates)
                if scores_NE.is_meta:
                    name = getattr(steering, "chooser", "the steering")
                    raise UserError(
                        f"{name} chooses experts by token ids, and this forward pass has none: give the model "
                        "input_ids, and under gradient checkpointing go backward before the next forward pass"
                    )
                if scores_NE is adjusted_NE and not router.rule.plain:
                    scores_NE = router.rule.scores(probs_NE, router.bias_E)
                steered = scores_NE is not adjusted_NE
                experts_NK = largest(scores_NE, router.top_k)
        weights_NK = router.rule.weights(adjusted_NE, probs_NE, experts_NK)
    return Decision(adjusted_NE, weights_NK, experts_NK, steered)


def _recomputed(logits_NE: Tensor, before_NE: Tensor) -> bool:
    """Whether these are the same logits but for rounding."""
    return logits_NE.shape == before_NE.shape and torch.allclose(logits_NE, before_NE, rtol=1e-3, atol=1e-5)
