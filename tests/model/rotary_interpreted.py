"""The kernel of rotary embeddings in Triton's interpreter: see `experts/test_interpreted.py`."""

import pytest
import torch

from simbal.model.attention import _Rotation, rotary_angles, rotate

B, H, S, P = 2, 3, 5, 12


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.float16, 2e-3)])
def test_queries_within_a_projection_and_their_gradient_are_turned_as_by_operators(dtype, tolerance):
    g = torch.Generator().manual_seed(0)
    qkv_BSC = torch.randn(B, S, 3 * H * P, generator=g).to(dtype).requires_grad_()
    dy_BHSP = torch.randn(B, H, S, P, generator=g).to(dtype)
    positions = rotary_angles(S + 4, P, 10_000.0, torch.device("cpu"))[:, -S:]  # as in generation

    def computed(turn):
        k_BHSP = qkv_BSC.split(H * P, -1)[1].unflatten(-1, (H, P)).transpose(1, 2)
        y_BHSP = turn(k_BHSP, positions)
        return y_BHSP, torch.autograd.grad(y_BHSP, qkv_BSC, dy_BHSP)[0]

    torch.testing.assert_close(computed(_Rotation.apply), computed(rotate), atol=tolerance, rtol=0)


def test_a_gradient_that_is_one_number_expanded_is_read_as_such():
    x_BHSP = torch.randn(B, H, S, P, generator=torch.Generator().manual_seed(0)).requires_grad_()
    angles = rotary_angles(S, P, 10_000.0, torch.device("cpu"))
    gradients = [torch.autograd.grad(turn(x_BHSP, angles).sum(), x_BHSP) for turn in (_Rotation.apply, rotate)]
    torch.testing.assert_close(*gradients)
