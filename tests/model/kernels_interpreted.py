"""The Triton kernels of head and rotary embeddings in Triton's interpreter; see `experts/test_interpreted.py`."""

import math

import pytest
import torch
import torch.nn.functional as F

from simbal.model import head, kernels
from simbal.model.attention import _Rotation, rotary_angles, rotate
from simbal.model.head import head_loss
from simbal.model.kernels import cross_entropy

Z_COEF, N, V = 0.1, 13, 53


@pytest.fixture(autouse=True)
def several_blocks_per_row(monkeypatch):
    monkeypatch.setattr(kernels, "BLOCK", 16)


def case(dtype=torch.float32):
    """Logits of 53 tokens in rows of 64, and targets."""
    g = torch.Generator().manual_seed(0)
    logits_CP = torch.full((N, 64), math.nan, dtype=dtype)
    logits_CP[:, :V] = 4 * torch.randn(N, V, generator=g)
    return logits_CP, torch.randint(0, V, (N,), generator=g)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.float16, 1e-3)])
def test_loss_and_gradient_equal_cross_entropy_plus_z_loss(dtype, tolerance):
    logits_CP, targets_C = case(dtype)
    exact_CV = logits_CP[:, :V].double().requires_grad_()
    lse_C = exact_CV.logsumexp(-1)
    loss = F.cross_entropy(exact_CV, targets_C) + Z_COEF * lse_C.square().mean()
    nll_C, got_lse_C = cross_entropy(logits_CP, V, targets_C, Z_COEF, N, True)
    torch.testing.assert_close(got_lse_C, lse_C.float())
    torch.testing.assert_close((nll_C + Z_COEF * got_lse_C.square()).mean(), loss.float())
    wanted = torch.autograd.grad(loss, exact_CV)[0]
    torch.testing.assert_close(logits_CP[:, :V].double(), wanted, atol=tolerance, rtol=0)
    assert not logits_CP[:, V:].any(), "padding rows of the head's weight would get a gradient"


def test_without_a_gradient_the_logits_stay_unchanged():
    logits_CP, targets_C = case()
    before = logits_CP.clone()
    nll_C, _ = cross_entropy(logits_CP, V, targets_C, Z_COEF, N, False)
    torch.testing.assert_close(logits_CP, before, atol=0, rtol=0, equal_nan=True)
    torch.testing.assert_close(nll_C, F.cross_entropy(before[:, :V], targets_C, reduction="none"))


@pytest.mark.filterwarnings("ignore:invalid value encountered")  # numpy's, of inf - inf
@pytest.mark.parametrize(("target", "logit"), [(V, 0.0), (-1, 0.0), (0, math.nan), (0, math.inf)])
def test_an_invalid_target_or_logit_makes_the_loss_of_its_row_nan(target, logit):
    logits_CP, targets_C = case()
    targets_C[5], logits_CP[5, 50] = target, logit
    nll_C, _ = cross_entropy(logits_CP, V, targets_C, Z_COEF, N, False)
    assert nll_C.isnan().tolist() == [row == 5 for row in range(N)]


def test_the_chunked_head_with_a_padded_vocabulary_gives_the_same_loss_and_gradients(monkeypatch):
    g = torch.Generator().manual_seed(0)
    leaves = [torch.randn(*shape, generator=g, requires_grad=True) for shape in ((N, 8), (V, 8))]
    _, targets_N = case()

    def computed():
        loss = head_loss(*leaves, targets_N, Z_COEF)
        return loss.loss, loss.nll_N, *torch.autograd.grad(loss.loss / 4, leaves)

    wanted = computed()
    monkeypatch.setattr(head, "CHUNK_LOSS", {"cpu": head.CHUNK_LOSS["cuda"]})
    monkeypatch.setattr(head, "VOCAB_MULTIPLE", {"cpu": head.VOCAB_MULTIPLE["cuda"]})
    monkeypatch.setattr(head, "CHUNK_ELEMENTS", {"cpu": 5 * V})
    torch.testing.assert_close(computed(), wanted)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.float16, 2e-3)])
def test_keys_inside_a_projection_are_rotated_with_their_gradient(dtype, tolerance):
    B, H, S, P = 2, 3, 5, 12
    g = torch.Generator().manual_seed(0)
    qkv_BSC = torch.randn(B, S, 3 * H * P, generator=g).to(dtype).requires_grad_()
    angles = rotary_angles(S + 4, P, 10_000.0, torch.device("cpu"))[:, -S:]  # as in generation
    for dy_BHSP in (torch.randn(B, H, S, P, generator=g).to(dtype), torch.ones((), dtype=dtype).expand(B, H, S, P)):
        results = []
        for turn in (_Rotation.apply, rotate):
            y_BHSP = turn(qkv_BSC.split(H * P, -1)[1].unflatten(-1, (H, P)).transpose(1, 2), angles)
            results.append((y_BHSP, torch.autograd.grad(y_BHSP, qkv_BSC, dy_BHSP)[0]))
        torch.testing.assert_close(*results, atol=tolerance, rtol=0)
