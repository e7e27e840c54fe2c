"""The head's kernel in Triton's interpreter, chosen before Triton is imported: see `experts/test_interpreted.py`."""

import math

import pytest
import torch
import torch.nn.functional as F

from simbal.model import head, head_kernels
from simbal.model.head import head_loss
from simbal.model.head_kernels import cross_entropy

Z_COEF, N, V = 0.1, 13, 53


@pytest.fixture(autouse=True)
def several_ragged_blocks_a_row(monkeypatch):
    monkeypatch.setattr(head_kernels, "BLOCK", 16)


def case(dtype=torch.float32):
    """Logits of 53 tokens in rows of 64, and targets."""
    g = torch.Generator().manual_seed(0)
    logits_CP = torch.full((13, 64), math.nan, dtype=dtype)
    logits_CP[:, :V] = 4 * torch.randn(13, V, generator=g)
    targets_C = torch.randint(0, V, (13,), generator=g)
    return logits_CP, targets_C


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.float16, 1e-3)])
def test_loss_and_gradient_are_those_of_cross_entropy_plus_z_loss(dtype, tolerance):
    logits_CP, targets_C = case(dtype)
    exact_CV = logits_CP[:, :V].double().requires_grad_()
    lse_C = exact_CV.logsumexp(-1)
    loss = F.cross_entropy(exact_CV, targets_C) + Z_COEF * lse_C.square().mean()
    nll_C, got_lse_C = cross_entropy(logits_CP, V, targets_C, Z_COEF, N, True)
    torch.testing.assert_close(got_lse_C, lse_C.float())
    torch.testing.assert_close((nll_C + Z_COEF * got_lse_C.square()).mean(), loss.float())
    wanted = torch.autograd.grad(loss, exact_CV)[0]
    torch.testing.assert_close(logits_CP[:, :V].double(), wanted, atol=tolerance, rtol=0)
    assert not logits_CP[:, V:].any(), "rows of the head's weight that are no tokens' would get a gradient"


def test_without_a_gradient_the_logits_stay_as_they_are():
    logits_CP, targets_C = case()
    before = logits_CP.clone()
    nll_C, _ = cross_entropy(logits_CP, V, targets_C, Z_COEF, N, False)
    torch.testing.assert_close(logits_CP, before, atol=0, rtol=0, equal_nan=True)
    torch.testing.assert_close(nll_C, F.cross_entropy(before[:, :V], targets_C, reduction="none"))


@pytest.mark.parametrize("wrong", [V, -1])
def test_a_target_that_is_no_token_makes_the_loss_nan(wrong):
    logits_CP, targets_C = case()
    targets_C[5] = wrong
    nll_C, _ = cross_entropy(logits_CP, V, targets_C, Z_COEF, N, False)
    assert nll_C.isnan().tolist() == [row == 5 for row in range(13)]


@pytest.mark.filterwarnings("ignore:invalid value encountered")  # numpy's, of inf - inf
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_logit_that_is_no_number_makes_the_loss_nan(value):
    logits_CP, targets_C = case()
    logits_CP[7, 50] = value
    nll_C, _ = cross_entropy(logits_CP, V, targets_C, Z_COEF, N, False)
    assert nll_C.isnan().tolist() == [row == 7 for row in range(13)]


def test_the_head_is_the_same_with_it_and_a_padded_vocabulary_chunk_by_chunk(monkeypatch):
    g = torch.Generator().manual_seed(0)
    leaves = [torch.randn(*shape, generator=g, requires_grad=True) for shape in ((13, 8), (53, 8))]
    _, targets_N = case()

    def computed():
        loss = head_loss(*leaves, targets_N, Z_COEF)
        return loss.loss, loss.nll_N, *torch.autograd.grad(loss.loss / 4, leaves)

    wanted = computed()
    monkeypatch.setattr(head, "OF_CHUNK", {"cpu": head.OF_CHUNK["cuda"]})
    monkeypatch.setattr(head, "MULTIPLE", {"cpu": head.MULTIPLE["cuda"]})
    monkeypatch.setattr(head, "CHUNK_ELEMENTS", {"cpu": 5 * 53})
    torch.testing.assert_close(computed(), wanted)
