"""A run warns where clipping shrinks gradients that an auxiliary loss has nothing to do with."""

import pytest

from simbal.runs.folder import RunFolder
from simbal.training.run import train


@pytest.mark.parametrize(
    ("keys", "divided"),
    [
        (("optim.grad_clip=1",), False), (("balancing.simbal.coef=10", "optim.grad_clip=1"), True),
        (("balancing.simbal.coef=10",), False),
    ],
)  # fmt: skip
def test_a_gradient_that_another_divides_is_warned_of(small_spec, keys, divided, capsys):
    """That of SimBal has the norm 2 coef E sqrt(L) = 113 at a coefficient of 10, and is clipped to 1."""
    spec = small_spec("balancing=simbal", *keys)
    train(spec)
    warnings = RunFolder(spec.path).read_record()["warnings"]
    assert ["optim.grad_clip=1" in warning and " 113 " in warning for warning in warnings] == [True] * divided
    printed = [line for line in capsys.readouterr().out.splitlines() if "warning" in line]
    assert printed == [f"warning: {warning}" for warning in warnings]
