"""What a user is to be careful of in a run that goes well: sentences, which its record keeps as warnings."""

from collections.abc import Iterator, Sequence
from statistics import median

from simbal.config.schema import OptimConfig
from simbal.data.loader import ValidationSplit
from simbal.runs.spec import RunSpec
from simbal.training.lit_moe import LitMoE

FEW_DOCUMENTS = 30
LEAST_CLIPPED = 0.01  # less of a gradient makes AdamW's `eps` a share of it that shows in the loss: results/bench_grid


def idle_router(spec: RunSpec, module: LitMoE) -> Iterator[str]:
    """Yield a warning where the router learns nothing from the language model: a weight divided by itself is 1."""
    model, steering = spec.config.model, module.balancing
    several = steering.ragged and not steering.drops  # a token may have more than one expert
    if model.num_experts and model.top_k == 1 and not several and spec.config.router.renormalize:
        yield (
            "with model.top_k=1 and router.renormalize=true the weight of a token's expert is 1 whatever its logit, "
            "and only a balancing loss trains the router: set router.renormalize=false"
        )


def few_documents(spec: RunSpec, validation: ValidationSplit) -> Iterator[str]:
    """Yield a warning where the run is measured on so few documents that they say little about others.

    Those of a Markov chain differ by chance alone.
    """
    config, held_out = spec.config, len(validation.document_ends)
    if config.data.source == "synthetic":
        return
    if held_out < FEW_DOCUMENTS:
        yield (
            f"the validation split has {held_out} documents, and fewer than {FEW_DOCUMENTS} say little about others: "
            "hold out more text, as by a smaller data.validation_one_in"
        )
        return
    asked = {"data.validation_tokens": config.data.validation_tokens}
    if config.trainer.pes_every and config.model.num_experts:
        asked["trainer.pes_tokens"] = config.trainer.pes_tokens
    for key, tokens in asked.items():
        if (documents := validation.coverage(tokens)) < FEW_DOCUMENTS:
            yield (
                f"{key}={tokens} are of {documents} of {held_out:,} documents, and fewer than {FEW_DOCUMENTS} say "
                "little about others: raise it"
            )


def divided_gradients(clipped: Sequence[float], optim: OptimConfig) -> Iterator[str]:
    """Yield a warning where clipping has left so little of the gradients that AdamW's `eps` is not small beside them.

    The long gradient of an auxiliary loss does so, and changes the steps of weights that it has nothing to do with.

    Args:
        clipped: the factors by which the gradients of the logged steps were scaled.
        optim: the config's group of that name.
    """
    if clipped and median(clipped) < LEAST_CLIPPED:
        yield (
            f"optim.grad_clip={optim.grad_clip:g} has divided gradients by {1 / median(clipped):,.0f}, as the long one "
            f"of an auxiliary loss makes it do, and optim.eps={optim.eps:g} is no longer small beside what is left of "
            "the others: set optim.grad_clip=0"
        )
