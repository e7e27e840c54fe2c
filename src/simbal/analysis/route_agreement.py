"""The analysis `route_agreement`: how often the same tokens get the same experts in two computations of the routing.

The computations differ in dtype, backend of the experts, batch size or model. Each one is a full forward pass, so
later layers also see the effect of earlier layers' differences. The metrics are ours.
Shapes: N tokens, L MoE layers, K experts per token.
"""

import torch
from pydantic import PositiveInt
from torch import Tensor

from simbal.analysis.margin import margins
from simbal.analysis.result import Result, layer_table
from simbal.analysis.subject import Subject, require_choice
from simbal.errors import UserError
from simbal.model.router import Candidates

DEFINITION = {
    "agreement": "share of tokens whose K experts are the same in both computations; mean over layers",
    "agreement_every_layer": "share of tokens whose K experts are the same in both computations in every layer",
    "margin": "K-th largest minus (K+1)-th largest of the scores that choose a token's experts, in the first "
    "computation; median over tokens, pooled over all layers",
    "margin_differing": "the same median over the tokens whose experts differ",
    "margin_differing_max": "largest margin of a token whose experts differ",
}
COLUMNS = {
    "agreement": ("\nagreement", ".5f"), "margin": ("margin\nall", ".3g"), "margin_differing": ("\ndiffering", ".3g"),
    "margin_differing_max": ("\nlargest differing", ".3g"),
}  # fmt: skip


def route_agreement(
    subject: Subject,
    tokens: PositiveInt | None,
    batch_size: PositiveInt,
    against: str | None,
    dtype: str | None,
    backend: str | None,
    other_batch_size: PositiveInt | None,
) -> Result:
    """Compare the experts of each token in two computations. The last four arguments describe the second one.

    Args:
        subject: the model.
        tokens: validation tokens to sample; None: the whole split.
        batch_size: sequences per batch in the first computation.
        against: path of a model with the same data or tokenizer; None: the same model.
        dtype: float32, bfloat16 or float16; None: the same.
        backend: backend of the experts; None: the default.
        other_batch_size: sequences per batch; None: the same.

    Raises:
        UserError: the model is dense, the number of experts varies by token, every token gets all experts, or the
            models cannot be compared.
    """
    require_choice(subject, "route_agreement")
    is_same = against is dtype is backend is None
    other = subject if is_same else subject.variant(against, dtype, backend)
    ours, theirs = ((len(each.routers), each.num_experts, each.top_k) for each in (subject, other))
    if ours != theirs:
        raise UserError(f"against={against} has (layers, experts, K) = {theirs}, {subject.path} has {ours}")
    other_batch_size = other_batch_size or batch_size
    experts_LNK, margin_LN = choices(subject, tokens, batch_size)
    same_LN = (experts_LNK == choices(other, tokens, other_batch_size)[0]).all(2)
    by_layer = [compare(*of_layer) for of_layer in zip(same_LN, margin_LN, strict=True)]
    layers = {name: [numbers[name] for numbers in by_layer] for name in COLUMNS}
    every_layer = same_LN.all(0).double().mean().item()
    metrics = compare(same_LN, margin_LN) | {"agreement_every_layer": every_layer}
    compared = {"first": describe(subject, batch_size), "second": describe(other, other_batch_size)}
    record = {"tokens": same_LN.shape[1], "compared": compared, "metrics": metrics, "layers": layers}
    notes = [f"{record['tokens']:,} tokens; {every_layer:.5f} of them get the same experts in every layer."]
    notes += [f"{place}: {computation}" for place, computation in compared.items()]
    table = layer_table("tokens with the same experts", COLUMNS, layers, {"all": metrics})
    return Result([table], notes, {"definition": DEFINITION, **record})


@torch.no_grad()
def choices(subject: Subject, tokens: int | None, batch_size: int) -> tuple[Tensor, Tensor]:
    """Return the experts of every token in ascending order, (L, N, K), and the margins of the choice, (L, N)."""
    steering, batches = subject.steering, []
    for batch in subject.track_predictions("route_agreement", batch_size, tokens):
        experts, gaps = [], []
        for layer, routing in enumerate(batch.routings):
            candidates = Candidates(layer, batch.windows_BT[:, :-1], routing.logits_NE, routing.probs_NE, routing.top_k)
            gaps.append(margins(steering.choice_scores(candidates), routing.top_k)[0].cpu())
            experts.append(routing.topk_experts_NK.sort(dim=1).values.to(torch.int16).cpu())
        batches.append((torch.stack(experts), torch.stack(gaps)))
    experts_LNK, margins_LN = (torch.cat(parts, 1) for parts in zip(*batches, strict=True))
    return experts_LNK, margins_LN


def compare(same: Tensor, margin: Tensor) -> dict[str, float | None]:
    """Return the agreement and margins of tokens, given masks and margins of any shape."""
    differing = margin[~same]
    return {
        "agreement": same.double().mean().item(),
        "margin": margin.median().item(),
        "margin_differing": differing.median().item() if len(differing) else None,
        "margin_differing_max": differing.max().item() if len(differing) else None,
    }


def describe(subject: Subject, batch_size: int) -> str:
    """Return the model and the settings of a computation in words."""
    settings = f"{subject.precisions['analyzed']}, experts: {subject.backend}"
    return f"{subject.path}, {settings}, {subject.sequences(batch_size)} sequences per batch"
