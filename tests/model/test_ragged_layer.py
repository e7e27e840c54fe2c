"""A layer whose tokens have any number of experts is the weighted sum of those experts, and nothing else."""

import pytest
import torch
import torch.nn.functional as F

from simbal.model.moe import MoELayer
from simbal.model.router import Router, Steering

B, S, D, E, WIDTH = 2, 12, 16, 4, 8
TOKENS_BS = torch.zeros(B, S, dtype=torch.int64)


class Above(Steering):
    """A token goes to every expert whose logit is above a threshold."""

    ragged = True

    def __init__(self, threshold: float) -> None:
        self.threshold = threshold

    def choice_scores(self, candidates):
        return candidates.logits_NE.masked_fill(candidates.logits_NE <= self.threshold, -torch.inf)


def layer(backend: str = "torch", dtype=torch.float32, renormalize: bool = True, bias: bool = False) -> MoELayer:
    torch.manual_seed(0)
    found = MoELayer(Router(D, E, 2, "softmax", renormalize, layer=0), D, WIDTH, backend, bias)
    for parameter in found.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return found.to(dtype)


def states(dtype=torch.float32) -> torch.Tensor:
    return torch.randn(B, S, D, generator=torch.Generator().manual_seed(1), dtype=dtype).requires_grad_()


def summed_up(moe: MoELayer, x_BSD: torch.Tensor, threshold: float) -> torch.Tensor:
    """Every expert on every token, weighted by 0 where it was not chosen."""
    x_ND = x_BSD.flatten(0, 1)
    logits_NE = F.linear(x_ND, moe.router.weight_ED)
    probs_NE = logits_NE.softmax(-1) * (logits_NE > threshold)
    if moe.router.renormalize:
        total_N1 = probs_NE.sum(-1, keepdim=True)
        probs_NE = probs_NE / total_N1.where(total_N1 > 0, 1)
    hidden_ENF = [F.silu(x_ND @ gate.T) * (x_ND @ up.T) for gate, up in moe.w13_E2FD]
    out_END = torch.stack([h_NF @ w2_FD for h_NF, w2_FD in zip(hidden_ENF, moe.w2_EFD, strict=True)])
    return torch.einsum("ne,end->nd", probs_NE, out_END).view_as(x_BSD)


@pytest.mark.parametrize("backend", ["reference", "torch"])
@pytest.mark.parametrize("renormalize", [True, False])
@pytest.mark.parametrize("threshold", [-100.0, 0.0, 0.5])
def test_outputs_and_gradients_are_those_of_the_weighted_sum(backend, renormalize, threshold):
    moe, x_BSD = layer(backend, torch.float64, renormalize), states(torch.float64)
    y_BSD, routing = moe(x_BSD, TOKENS_BS, Above(threshold))
    expected_BSD = summed_up(moe, x_BSD, threshold)
    torch.testing.assert_close(y_BSD, expected_BSD)
    per_token = (routing.topk_experts_NK < E).sum(1)
    assert per_token.sum() == routing.tokens_per_expert_E.sum()
    assert (per_token.min(), per_token.max()) == ((E, E) if threshold < 0 else (0, E - 1))
    wanted = [x_BSD, *moe.parameters()]
    mean_BSD = torch.randn(B, S, D, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    ours, theirs = (torch.autograd.grad((y * mean_BSD).sum(), wanted) for y in (y_BSD, expected_BSD))
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other)


@pytest.mark.parametrize("bias", [False, True])
def test_a_layer_in_which_no_token_has_an_expert_is_zero_with_gradients_of_zero(bias):
    moe, x_BSD = layer("reference", bias=bias), states()
    y_BSD, routing = moe(x_BSD, TOKENS_BS, Above(1e9))
    assert not y_BSD.any()
    assert not routing.tokens_per_expert_E.any()
    of_input, *of_weights = torch.autograd.grad(y_BSD.sum(), [x_BSD, *moe.parameters()])
    assert not of_input.any()
    assert not any(gradient.any() for gradient in of_weights), "fsdp's ranks wait for one another with the gradients"
