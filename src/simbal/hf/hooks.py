"""Hooks on a Hugging Face model that record each forward pass and can change the decisions of its routers.

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
from simbal.hf.routers import HFRouter, is_close
from simbal.model.router import Candidates, Routing, Steering, apply_gating, count_tokens, topk_indices

RouterOutput = tuple[Tensor, Tensor, Tensor]  # logits_NE, weights_NK, experts_NK


@dataclass(frozen=True)
class Decision:
    """The output of one router, as its experts receive it.

    Everything else is computed after the pass, because gradient checkpointing requires that the recomputation, which is
    not recorded, saves the same tensors as the first pass.
    """

    logits_NE: Tensor
    topk_probs_NK: Tensor
    topk_experts_NK: Tensor
    steered: bool  # the choice is not the K largest logits


@dataclass
class ForwardPass:
    """A forward pass and its recorded decisions. Without token ids, `tokens_BS` is on the meta device."""

    tokens_BS: Tensor
    kept_N: Tensor | None  # mask of the tokens that are not padding; None: no padding
    lengths_B: Tensor | None  # tokens of each sequence, without padding; None: all rows are full sequences
    counted: bool  # counts toward the optimizer step: in training mode and with gradients
    with_gradient: bool
    decisions: dict[int, Decision] = field(default_factory=dict)  # by layer

    @classmethod
    def of_inputs(cls, backbone: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> "ForwardPass":
        """Return a new pass for the arguments of the backbone."""
        inputs = inspect.signature(backbone.forward).bind(*args, **kwargs).arguments | dict(kwargs)
        ids_BS = inputs.get("input_ids")
        if ids_BS is None:
            ids_BS = torch.empty(inputs["inputs_embeds"].shape[:2], dtype=torch.int64, device="meta")
        mask, kept_N = inputs.get("attention_mask"), None
        if isinstance(mask, Tensor) and mask.dim() == 2:
            kept_N = mask[:, -ids_BS.shape[1] :].reshape(-1).bool()  # the mask also covers cached tokens
        with_gradient = torch.is_grad_enabled()
        kept_N = None if kept_N is None or kept_N.all() else kept_N
        lengths_B = sequence_lengths(ids_BS.shape, kept_N, inputs.get("position_ids"))
        return cls(ids_BS, kept_N, lengths_B, backbone.training and with_gradient, with_gradient)

    def routings(self, routers: Sequence[HFRouter]) -> list[Routing]:
        """Return the routing of every layer, without padding.

        With padding or packed documents, sequences differ in length and `num_sequences` is 1.

        Raises:
            UserError: a router was not called.
        """
        missing = [router.name for router in routers if router.layer not in self.decisions]
        if missing:
            raise UserError(f"{missing[0]} was not called in this forward pass")
        return [self._routing(router) for router in routers]

    def _routing(self, router: HFRouter) -> Routing:
        decision, weight_ED, kept_N = self.decisions[router.layer], router.weight_ED, self.kept_N
        tensors = (decision.logits_NE, decision.topk_probs_NK, decision.topk_experts_NK)
        logits_NE, probs_NK, experts_NK = tensors if kept_N is None else (tensor[kept_N] for tensor in tensors)
        with torch.autocast(logits_NE.device.type, enabled=False):
            logits_NE = logits_NE.to(at_least_fp32(logits_NE))
            return Routing(
                logits_NE, apply_gating(logits_NE, router.gating), experts_NK, probs_NK.to(logits_NE.dtype),
                count_tokens(experts_NK, len(weight_ED)), weight_ED,
                len(self.tokens_BS) if self.lengths_B is None else 1, router.gating, decision.steered, router.top_k,
                lengths_B=None if self.lengths_B is None else self.lengths_B.to(logits_NE.device),
            )  # fmt: skip


def sequence_lengths(shape: torch.Size, kept_N: Tensor | None, positions: Any) -> Tensor | None:
    """Return the number of tokens of each sequence, or None if every row of a batch of `shape` is one sequence.

    Without padding, a row has several sequences if its position ids, (B, S) or (1, S), restart, as in packed documents
    and in padding-free batches.
    """
    if not (isinstance(positions, Tensor) and tuple(positions.shape) in ((1, shape[1]), tuple(shape))):
        positions = torch.arange(shape[1], device=None if kept_N is None else kept_N.device)[None]
    restarts_BS = (positions[:, 1:] != positions[:, :-1] + 1).expand(shape[0], -1)
    if kept_N is None and not restarts_BS.any():
        return None
    sequence_N = nn.functional.pad(restarts_BS, (1, 0), value=True).flatten().cumsum(0)
    kept = sequence_N if kept_N is None else sequence_N[kept_N.to(sequence_N.device)]
    lengths_B: Tensor = kept.unique_consecutive(return_counts=True)[1]
    return lengths_B


def at_least_fp32(logits_NE: Tensor) -> torch.dtype:
    """Return fp32, or the dtype of the logits if it is wider."""
    return torch.promote_types(logits_NE.dtype, torch.float32)


class Hooks:
    """The hooks on one model.

    A pass is recorded from the call of the backbone to its return. At any other time, a call of a router is a
    recomputation by gradient checkpointing.
    """

    def __init__(
        self,
        backbone: nn.Module,
        routers: Sequence[HFRouter],
        steering: Steering | None = None,
        finish_pass: Callable[[ForwardPass, list[Routing]], None] = lambda last, routings: None,
        start_pass: Callable[[bool], None] = lambda training: None,
    ) -> None:
        """Register the hooks.

        Args:
            backbone: the module whose call is a forward pass.
            routers: all routers.
            steering: changes the decisions of the routers; None: decisions are only recorded.
            finish_pass: called after each pass with the pass and the routing of every layer.
            start_pass: called before each pass; the argument is True in training mode.
        """
        self.routers, self.steering, self.finish_pass, self.start_pass = routers, steering, finish_pass, start_pass
        self.paused = False  # if True, nothing is recorded or steered
        self.forget()
        # prepended, so that hooks that capture router logits see the steered logits
        hooks = [router.module.register_forward_hook(RouterHook(self, router), prepend=True) for router in routers]
        start = backbone.register_forward_pre_hook(self._start, with_kwargs=True)
        self.handles = [*hooks, start, backbone.register_forward_hook(self._finish)]

    def forget(self) -> None:
        """Free the recorded passes."""
        self.running: ForwardPass | None = None
        self.finished: tuple[ForwardPass, list[Routing]] | None = None  # the last pass

    def remove(self) -> None:
        """Remove all hooks from the model."""
        for handle in self.handles:
            handle.remove()
        self.handles = []

    def _start(self, backbone: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not self.paused:
            self.start_pass(backbone.training)
            self.forget()
            self.running = ForwardPass.of_inputs(backbone, args, kwargs)

    def _finish(self, backbone: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if not self.paused:
            assert self.running
            self.finished, self.running = (self.running, self.running.routings(self.routers)), None
            self.finish_pass(*self.finished)

    def steer(self, router: HFRouter, logits_NE: Tensor, steering: Steering) -> Decision:
        """Return the decision of `steering` under the router's rule, given logits x W^T in any dtype.

        A recomputation is recognized by its logits and chooses the same experts as the first pass.

        Raises:
            UserError: the steering needs token ids, but they are unknown.
        """
        first, tokens_BS = None, torch.empty(1, len(logits_NE), dtype=torch.int64, device="meta")
        if self.running:
            tokens_BS = self.running.tokens_BS
        elif self.finished:
            first = self.finished[0].decisions[router.layer]
        with torch.autocast(logits_NE.device.type, enabled=False):
            adjusted_NE = steering.at(router.layer).adjust_logits(logits_NE.to(at_least_fp32(logits_NE)))
            probs_NE = apply_gating(adjusted_NE, router.gating)
            with torch.no_grad():
                if first is not None and is_close(adjusted_NE, first.logits_NE, rtol=1e-3, atol=1e-5):
                    experts_NK, steered = first.topk_experts_NK, first.steered
                else:
                    candidates = Candidates(router.layer, tokens_BS, adjusted_NE, probs_NE, router.top_k)
                    scores_NE = choice_scores(router, candidates, steering)
                    experts_NK, steered = topk_indices(scores_NE, router.top_k), scores_NE is not adjusted_NE
            weights_NK = router.rule.weights(adjusted_NE, probs_NE, experts_NK)
        return Decision(adjusted_NE, weights_NK, experts_NK, steered)


def choice_scores(router: HFRouter, candidates: Candidates, steering: Steering) -> Tensor:
    """Return the scores, (N, E), by which `steering` chooses; if it returns the logits, use the router's rule."""
    scores_NE = steering.choice_scores(candidates)
    if scores_NE.is_meta:
        raise UserError(
            f"{getattr(steering, 'chooser', 'the steering')} chooses experts by token ids: pass input_ids, and with "
            "gradient checkpointing call backward before the next forward pass"
        )
    return router.choice_scores(candidates) if scores_NE is candidates.logits_NE else scores_NE


@dataclass(frozen=True)
class RouterHook:
    """The forward hook of one router."""

    hooks: Hooks
    router: HFRouter

    def __call__(self, module: nn.Module, args: Any, output: RouterOutput) -> RouterOutput | None:
        """Record the router's output; return the steered output, or None without steering."""
        if self.hooks.paused:
            return None
        logits, weights, experts = output
        steering = self.hooks.steering
        if steering is None:
            logits_NE, weights_NK, experts_NK = (tensor.flatten(0, -2) for tensor in output)
            decision = Decision(logits_NE, weights_NK, experts_NK, steered=not self.router.rule.is_topk)
        else:
            decision = self.hooks.steer(self.router, logits.flatten(0, -2), steering)
        if self.hooks.running:
            self.hooks.running.decisions[self.router.layer] = decision
        if steering is None:
            return None
        probs = decision.topk_probs_NK.to(weights.dtype).view_as(weights)
        return decision.logits_NE.to(logits.dtype).view_as(logits), probs, decision.topk_experts_NK.view_as(experts)


def hooks_on(routers: Sequence[HFRouter]) -> set[Hooks]:
    """Return the `Hooks` that are registered on routers."""
    hooks = (hook for router in routers for hook in router.module._forward_hooks.values())
    return {hook.hooks for hook in hooks if isinstance(hook, RouterHook)}


@contextmanager
def paused(routers: Sequence[HFRouter]) -> Iterator[None]:
    """Run the model within the block as if no strategies were attached."""
    attached = [hooks for hooks in hooks_on(routers) if not hooks.paused]
    for hooks in attached:
        hooks.paused = True
    try:
        yield
    finally:
        for hooks in attached:
            hooks.paused = False
