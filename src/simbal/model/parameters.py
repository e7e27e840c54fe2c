"""Parameter counts of a model, by part; they need no storage, so the model may be on the meta device."""

from simbal.model.moe import FeedForward, MoELayer
from simbal.model.transformer import Transformer


def count_parameters(model: Transformer) -> dict[str, int]:
    """`total` holds every parameter; `active` those that one token passes through (K of the E experts)."""
    experts = sum(_experts(layer) for layer in model.feed_forwards)
    chosen = sum(_chosen(layer) for layer in model.feed_forwards)
    total = sum(p.numel() for p in model.parameters())
    return {
        "total": total,
        "active": total - experts + chosen,
        "embedding": model.embedding.weight.numel(),
        "experts": experts,
        "router": sum(router.weight_ED.numel() for router in model.routers),
    }


def _experts(layer: MoELayer | FeedForward) -> int:
    if isinstance(layer, MoELayer):
        return layer.w13_E2FD.numel() + layer.w2_EFD.numel()
    return layer.w13_2FD.numel() + layer.w2_FD.numel()


def _chosen(layer: MoELayer | FeedForward) -> int:
    if isinstance(layer, MoELayer):
        return _experts(layer) * layer.router.top_k // len(layer.router.weight_ED)
    return _experts(layer)
