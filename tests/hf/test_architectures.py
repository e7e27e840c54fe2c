"""Every architecture of the guide's table can be attached and trained, as the table says."""

import pytest
import torch
from torch import nn

from simbal.balancing import Balancing, LoadBalancingLoss, LossFree, RouterZLoss, SimBal
from simbal.errors import UserError
from simbal.hf import attach
from simbal.hf.describe import said
from simbal.hf.routers import find_routers
from tests.hf.architectures import RULE, architecture
from tests.hf.guide import table
from tests.hf.test_model_bias import tokens

STEPS = 20


def test_the_table_has_every_architecture():
    assert [*table()] == [*RULE]


def by_load(model: nn.Module) -> tuple[list[Balancing], str]:
    """The strategy that moves a bias by the load, and the table's words for it."""
    rule = find_routers(model)[0].rule
    if rule.biased:
        return [LossFree(update_rate=0.05, bias_on="scores")], "LossFree, in the model's own bias"
    if rule.plain:
        return [LossFree(update_rate=0.05)], "LossFree, any chooser"
    with pytest.raises(UserError, match="changes what routers decide"):
        attach(model, LossFree())
    return [], "losses alone: it draws its experts"


@pytest.mark.parametrize("name", RULE)
def test_it_is_attached_and_trained(name):
    model = architecture(name).train()
    choosers, words = by_load(model)
    losses = {"SimBal": SimBal(), "LoadBalancingLoss": LoadBalancingLoss(coef=0.1), "RouterZLoss": RouterZLoss(0.01)}
    first, before = {}, {key: tensor.clone() for key, tensor in model.state_dict().items()}
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    with attach(model, losses | dict(zip(["LossFree"], choosers, strict=False))) as balancing:
        for _ in range(STEPS):
            loss = model(input_ids=tokens(), labels=tokens()).loss
            terms = {key: term.item() for key, term in balancing.losses().items()}
            (loss + balancing.loss()).backward()
            assert all(router.weight_ED.grad.abs().sum() > 0 for router in balancing.routers)
            optimizer.step()
            optimizer.zero_grad()
            balancing.step()
            first = first or terms | {"loss": loss.item()}
    assert all(end < first[key] for key, end in (terms | {"loss": loss.item()}).items())
    moved = {key for key, tensor in model.state_dict().items() if not torch.equal(tensor, before[key])}
    assert any(key.endswith("e_score_correction_bias") for key in moved) == bool(
        choosers and choosers[0].bias_on == "scores"
    )
    assert table()[name] | {
        "its routers": said(balancing.routers[0].rule), "trained 20 steps with": ", ".join(losses), "the load by": words
    } == table()[name]  # fmt: skip
