"""Hooks on a Hugging Face model: they record each forward pass and can change what its routers decide.

Shapes: B sequences, S sequence length, N = B*S tokens, E experts, K experts per token.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from simbal.errors import UserError
from simbal.hf.routers import HFRouter
from simbal.model.router import Candidates, Routing, Steering, apply_gating, count_tokens, topk_indices


@dataclass(frozen=True)
class Decision:
    """The decision that one router gave to its experts.

    Nothing is computed from it inside the model: under gradient checkpointing the recomputation, which records nothing,
    would save fewer tensors than the first pass, and PyTorch refuses that.
    """

    logits_NE: Tensor
    topk_probs_NK: Tensor
    topk_experts_NK: Tensor
    steered: bool  # the choice was not that of the K largest logits: a strategy's, or one by the model's own rule


@dataclass
class ForwardPass:
    """A pass and what is recorded of it; `tokens_BS` is on the meta device, without values, if there are no ids."""

    tokens_BS: Tensor
    kept_N: Tensor | None  # the tokens that are no padding; None: all of them
    counted: bool  # it belongs to the optimizer step: in training mode, with gradients
    with_gradient: bool
    decisions: dict[int, Decision] = field(default_factory=dict)  # by layer

    @classmethod
    def of_inputs(cls, backbone: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> "ForwardPass":
        """Return a new pass, for the arguments that the backbone was called with."""
        inputs = inspect.signature(backbone.forward).bind(*args, **kwargs).arguments | dict(kwargs)
        ids_BS, embeddings_BSD = inputs.get("input_ids"), inputs.get("inputs_embeds")
        if ids_BS is None:
            shape = embeddings_BSD.shape[:2] if isinstance(embeddings_BSD, Tensor) else (0, 0)
            ids_BS = torch.empty(shape, dtype=torch.int64, device="meta")
        with_gradient = torch.is_grad_enabled()
        kept_N = _kept(inputs.get("attention_mask"), ids_BS)
        return cls(ids_BS, kept_N, backbone.training and with_gradient, with_gradient)

    def routings(self, routers: Sequence[HFRouter]) -> list[Routing]:
        """Return the routing of every layer, without padding.

        Where there was padding, sequences differ in length, and `num_sequences` is 1.

        Raises:
            UserError: a router was not called.
        """
        missing = [router.name for router in routers if router.layer not in self.decisions]
        if missing:
            raise UserError(f"{missing[0]} was not called in this forward pass, so that nothing is known of its choice")
        return [self._routing(router, self.decisions[router.layer]) for router in routers]

    def _routing(self, router: HFRouter, decision: Decision) -> Routing:
        weight_ED, kept_N = router.weight_ED, self.kept_N
        tensors = (decision.logits_NE, decision.topk_probs_NK, decision.topk_experts_NK)
        logits_NE, probs_NK, experts_NK = tensors if kept_N is None else (tensor[kept_N] for tensor in tensors)
        with torch.autocast(logits_NE.device.type, enabled=False):
            wide_NE = logits_NE.to(wide(logits_NE))
            return Routing(
                wide_NE, apply_gating(wide_NE, router.gating), experts_NK, probs_NK.to(wide_NE.dtype),
                count_tokens(experts_NK, len(weight_ED)), weight_ED, len(self.tokens_BS) if kept_N is None else 1,
                router.gating, decision.steered, router.top_k,
            )  # fmt: skip


def wide(logits_NE: Tensor) -> torch.dtype:
    """Return fp32, or the dtype of the logits if that is wider."""
    return torch.promote_types(logits_NE.dtype, torch.float32)


def _kept(mask: Any, tokens_BS: Tensor) -> Tensor | None:
    """Return which tokens a two-dimensional attention mask lets through, (N,), bool; None if it does so with all.

    Its last S columns count, as a cache may precede them.
    """
    if not isinstance(mask, Tensor) or mask.dim() != 2:
        return None
    kept_N = mask[:, -tokens_BS.shape[1] :].reshape(-1).bool()
    return None if kept_N.all() else kept_N


Output = tuple[Tensor, Tensor, Tensor]  # of a router: logits_NE, weights_NK, experts_NK


class Hooks:
    """The hooks on one model.

    A pass is recorded from the backbone's call to its return; what calls a router elsewhere is a recomputation.
    """

    def __init__(
        self,
        backbone: nn.Module,
        routers: Sequence[HFRouter],
        steering: Steering | None = None,
        finish_pass: Callable[[ForwardPass, list[Routing]], None] = lambda last, routings: None,
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

    def steered(self, router: HFRouter, logits_NE: Tensor, steering: Steering) -> Decision:
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
    router: HFRouter

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


def refuse_second(routers: Sequence[HFRouter]) -> None:
    """Raise `UserError` if a router has such a hook already; two biases would add up unseen."""
    if any(isinstance(hook, RouterHook) for router in routers for hook in router.module._forward_hooks.values()):
        raise UserError("the model has strategies attached: detach() them, or give attach all strategies at once")


@contextmanager
def paused(routers: Sequence[HFRouter]) -> Iterator[None]:
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
    router: HFRouter, logits_NE: Tensor, tokens_BS: Tensor, steering: Steering, before: Decision | None = None
) -> Decision:
    """Return the decision on the model's logits that `steering` brings about, under the rule of the router.

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
        probs_NE = apply_gating(adjusted_NE, router.gating)
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
                experts_NK = topk_indices(scores_NE, router.top_k)
        weights_NK = router.rule.weights(adjusted_NE, probs_NE, experts_NK)
    return Decision(adjusted_NE, weights_NK, experts_NK, steered)


def _recomputed(logits_NE: Tensor, before_NE: Tensor) -> bool:
    """Whether these are the same logits but for rounding."""
    return logits_NE.shape == before_NE.shape and torch.allclose(logits_NE, before_NE, rtol=1e-3, atol=1e-5)
