"""Warns of clipping that shrinks the language model's gradients because an auxiliary loss has a long one."""

from collections.abc import Iterator, Sequence
from statistics import median

from simbal.config.schema import OptimConfig

LEAST_CLIPPED = 0.01  # less of a gradient makes AdamW's `eps` a share of it that shows in the loss: results/bench_grid


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
