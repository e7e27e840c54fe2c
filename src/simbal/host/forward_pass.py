"""A forward pass of the host model: the decisions of its routers.

Shapes: B sequences, S sequence length, N = B*S tokens, E experts, K experts per token.
"""

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from simbal.errors import UserError
from simbal.host.routers import HostRouter
from simbal.model.router import Routing, count, gate


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

    def routings(self, routers: Sequence[HostRouter]) -> list[Routing]:
        """Return the routing of every layer, without padding.

        Where there was padding, sequences differ in length, and `num_sequences` is 1.

        Raises:
            UserError: a router was not called.
        """
        missing = [router.name for router in routers if router.layer not in self.decisions]
        if missing:
            raise UserError(f"{missing[0]} was not called in this forward pass, so that nothing is known of its choice")
        return [self._routing(router, self.decisions[router.layer]) for router in routers]

    def _routing(self, router: HostRouter, decision: Decision) -> Routing:
        weight_ED, kept_N = router.weight_ED, self.kept_N
        tensors = (decision.logits_NE, decision.topk_probs_NK, decision.topk_experts_NK)
        logits_NE, probs_NK, experts_NK = tensors if kept_N is None else (tensor[kept_N] for tensor in tensors)
        with torch.autocast(logits_NE.device.type, enabled=False):
            wide_NE = logits_NE.to(wide(logits_NE))
            return Routing(
                wide_NE, gate(wide_NE, router.gating), experts_NK, probs_NK.to(wide_NE.dtype),
                count(experts_NK, len(weight_ED)), weight_ED, len(self.tokens_BS) if kept_N is None else 1,
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
