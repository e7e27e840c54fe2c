"""Products by oneDNN are those of torch, with every gradient and in any layout."""

import pytest
import torch
import torch.nn.functional as F

from simbal.model import matmul


@pytest.fixture(params=[True, False], ids=["onednn", "torch"])
def library(request, monkeypatch):
    if request.param and not torch.backends.mkldnn.is_available():
        pytest.skip("this torch is built without oneDNN")
    monkeypatch.setattr(matmul, "onednn_is_faster", lambda: request.param)


@pytest.mark.parametrize("rows", [0, 1, 37])
def test_mm_multiplies_any_layout(library, rows):
    a, b = torch.randn(rows, 12), torch.randn(12, 20)
    for left in (a, a.T.contiguous().T):
        for right in (b, b.T.contiguous().T):
            torch.testing.assert_close(matmul.mm(left, right), a @ b)
    torch.testing.assert_close(matmul.mm(a.T, torch.ones(rows, 3)), a.T @ torch.ones(rows, 3))


def test_linear_and_its_gradients_are_those_of_torch(library):
    x_BSD, weight_JD = torch.randn(2, 5, 12, requires_grad=True), torch.randn(8, 12, requires_grad=True)
    dy_BSJ = torch.randn(8, 5, 2).permute(2, 1, 0)  # strided, as attention hands it on
    y_BSJ = matmul.linear(x_BSD, weight_JD)
    expected_BSJ = F.linear(x_BSD, weight_JD)
    torch.testing.assert_close(y_BSJ, expected_BSJ)
    wanted = torch.autograd.grad(expected_BSJ, (x_BSD, weight_JD), dy_BSJ)
    for got, want in zip(torch.autograd.grad(y_BSJ, (x_BSD, weight_JD), dy_BSJ), wanted, strict=True):
        torch.testing.assert_close(got, want)


def test_linear_takes_an_expanded_gradient_and_frozen_operands(library):
    x_ND, weight_JD = torch.randn(4, 12, requires_grad=True), torch.randn(8, 12)
    matmul.linear(x_ND, weight_JD).sum().backward()
    torch.testing.assert_close(x_ND.grad, weight_JD.sum(0).expand(4, 12))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_dtypes_and_autocast_are_left_to_torch(monkeypatch, dtype):
    monkeypatch.setattr(matmul, "onednn_is_faster", lambda: True)
    x_ND, weight_JD = torch.randn(4, 12), torch.randn(8, 12)
    assert matmul.linear(x_ND.to(dtype), weight_JD.to(dtype)).dtype == dtype
    assert matmul.mm(x_ND.to(dtype), weight_JD.to(dtype).T).dtype == dtype
    with torch.autocast("cpu", torch.bfloat16):
        assert matmul.linear(x_ND, weight_JD).dtype == torch.bfloat16
