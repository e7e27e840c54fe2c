"""What of a run Mixtral and Llama cannot say.

Mixtral's router takes the K largest of a softmax over all experts and divides them by their sum, which is a softmax
over the K chosen logits: our `gating=softmax` with `renormalize=true`. Nothing else decides or weighs a choice there.
Reference: MixtralTopKRouter in transformers 5.23.
Shapes: B sequences, S tokens, N = B*S, E experts.
"""

import torch

from simbal.balancing.composition import Composition
from simbal.errors import UserError
from simbal.model.router import Candidates, gate
from simbal.run_spec import RunSpec


def require_expressible(spec: RunSpec, where: object) -> None:
    """`UserError` if a key of the config gives a model that computes something else; `where` names the run."""
    router = spec.config["router"]
    reason = ""
    if spec.config["data"]["document_mask"]:
        reason = "data.document_mask=true: attention there goes beyond the document"
    elif spec.config["model"]["num_experts"] and router["gating"] != "softmax":
        reason = f"router.gating={router['gating']}: Mixtral gates by a softmax"
    elif spec.config["model"]["num_experts"] and not router["renormalize"]:
        reason = "router.renormalize=false: Mixtral divides the chosen weights by their sum"
    if reason:
        raise UserError(f"{where} cannot be exported, for its {reason}")


@torch.no_grad()
def require_unsteered(balancing: Composition, num_layers: int, num_experts: int, where: object) -> None:
    """`UserError` if a strategy still has a hand on a router in evaluation mode, whatever it did in training.

    One that has none returns the very logits that it was given.
    """
    logits_NE, tokens_BS = torch.zeros(1, num_experts), torch.zeros(1, 1, dtype=torch.int64)
    for name, part in balancing.eval().parts.items():
        if part.adjust_logits(logits_NE) is not logits_NE:
            raise UserError(
                f"{where} cannot be exported, for its balancing.{name} adjusts the router's logits: Mixtral gates them "
                "as they are"
            )
        for layer in range(num_layers):
            candidates = Candidates(layer, tokens_BS, logits_NE, gate(logits_NE, "softmax"))
            if part.choice_scores(candidates) is not logits_NE:
                raise UserError(
                    f"{where} cannot be exported, for its balancing.{name} steers the choice of experts: Mixtral takes "
                    "those of the largest logits"
                )
