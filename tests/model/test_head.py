"""The chunked head equals cross-entropy plus z-loss, with all gradients."""

import pytest
import torch
import torch.nn.functional as F

from simbal.model import head
from simbal.model.head import head_loss


def leaves(N=13, D=8, V=11):
    g = torch.Generator().manual_seed(0)
    x_ND, weight_VD = (torch.randn(*shape, generator=g, requires_grad=True) for shape in ((N, D), (V, D)))
    targets_N = torch.randint(0, V, (N,), generator=g)
    return x_ND, weight_VD, targets_N


@pytest.mark.parametrize("rows", [1, 4, 13, 100])
def test_loss_and_gradients_equal_cross_entropy_plus_z_loss_at_any_chunk_size(monkeypatch, rows):
    x_ND, weight_VD, targets_N = leaves()
    monkeypatch.setattr(head, "CHUNK_ELEMENTS", {"cpu": rows * len(weight_VD)})
    logits_NV = x_ND @ weight_VD.T
    z = logits_NV.logsumexp(-1).square().mean()
    want = F.cross_entropy(logits_NV, targets_N) + 0.1 * z
    got = head_loss(x_ND, weight_VD, targets_N, z_coef=0.1)
    torch.testing.assert_close(got.loss, want)
    # / 4: an upstream gradient other than 1, as with gradient accumulation
    wanted, gotten = (torch.autograd.grad(loss / 4, (x_ND, weight_VD)) for loss in (want, got.loss))
    torch.testing.assert_close(gotten, wanted)
    torch.testing.assert_close(got.nll_N.mean(), F.cross_entropy(logits_NV, targets_N))


def test_a_second_derivative_is_refused():
    x_ND, weight_VD, targets_N = leaves()
    loss = head_loss(x_ND, weight_VD, targets_N, z_coef=0.1).loss
    with pytest.raises(RuntimeError, match="no second derivative"):
        torch.autograd.grad(loss, x_ND, create_graph=True)


def test_no_tensor_holds_all_logits(monkeypatch):
    x_ND, weight_VD, targets_N = leaves(N=64, D=4, V=32)
    monkeypatch.setattr(head, "CHUNK_ELEMENTS", {"cpu": 4 * 32})
    largest = 0

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            nonlocal largest
            out = func(*args, **(kwargs or {}))
            if isinstance(out, torch.Tensor) and out.shape[-1:] == (32,):
                largest = max(largest, out.numel())
            return out

    with Watch():
        head_loss(x_ND, weight_VD, targets_N, z_coef=1e-5).loss.backward()
    assert largest == 4 * 32


def test_bf16_autocast_multiplies_in_bf16_and_returns_fp32_gradients():
    x_ND, weight_VD, targets_N = leaves()
    exact = head_loss(x_ND, weight_VD, targets_N, z_coef=0.0)
    with torch.autocast("cpu", torch.bfloat16):
        rounded = head_loss(x_ND, weight_VD, targets_N, z_coef=0.0)
    assert rounded.loss.dtype is torch.float32
    assert not torch.equal(exact.nll_N, rounded.nll_N)
    torch.testing.assert_close(exact.loss, rounded.loss, atol=3e-2, rtol=3e-2)
    gradients = torch.autograd.grad(rounded.loss, (x_ND, weight_VD))
    assert all(gradient.dtype is torch.float32 for gradient in gradients)


def test_a_third_of_the_loss_has_exactly_a_third_of_the_gradient_in_bf16():
    x_ND, weight_VD, targets_N = leaves()
    x_ND, weight_VD = (leaf.detach().bfloat16().requires_grad_() for leaf in (x_ND, weight_VD))
    whole, third = (
        torch.autograd.grad(head_loss(x_ND, weight_VD, targets_N, 0.0).loss / n, (x_ND, weight_VD)) for n in (1, 3)
    )
    for gradient, of_third in zip(whole, third, strict=True):
        assert of_third.dtype is torch.bfloat16
        torch.testing.assert_close(of_third, (gradient.float() / 3).bfloat16(), rtol=0, atol=0)
