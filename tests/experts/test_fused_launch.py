"""What `fused` launches on CUDA, up to the launch: a pretended driver compiles for sm_90 and runs nothing."""

import os

import pytest
import torch

from simbal.experts.dispatch import RoutingPlan
from simbal.experts.fused import fused

pytestmark = pytest.mark.slow
pytest.importorskip("triton", reason="Triton is not installed: pip install triton==3.7.1")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("TRITON_INTERPRET=1: kernels are interpreted, not compiled", allow_module_level=True)


class PretendedDriver:
    """As much of Triton's driver as compiling for a launch asks for."""

    def get_current_target(self):
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)

    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 0


@pytest.fixture
def compiled(monkeypatch, tmp_path):
    """Names of the kernels that were compiled, one entry each time."""
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    from simbal.experts import fused_kernels

    caches = [kernel.device_caches for kernel in vars(fused_kernels).values() if isinstance(kernel, JITFunction)]
    names = []
    run, do_compile = JITFunction.run, JITFunction._do_compile

    def count(self, *args, **kwargs):
        names.append(self.__name__)
        return do_compile(self, *args, **kwargs)

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(driver, "_active", PretendedDriver())
    monkeypatch.setattr(JITFunction, "run", lambda self, *a, **kw: run(self, *a, **kw | {"warmup": True}))
    monkeypatch.setattr(JITFunction, "_do_compile", count)
    for cache in caches:
        cache.clear()
    yield names
    for cache in caches:  # they go by the number of the device: a real one must not find these
        cache.clear()


def train_step(N, width=192, E=8, K=2):
    """The numbers are what was in memory; the counts of rows are real."""
    x, w13, w2 = (torch.randn(*s, dtype=torch.bfloat16) for s in ((N, width), (E, 2, width, width), (E, width, width)))
    p_NK, experts_NK = torch.randn(N, E).softmax(-1).topk(K)
    leaves = [leaf.requires_grad_() for leaf in (x, p_NK, w13, w2)]
    y_ND = fused(x, RoutingPlan.build(experts_NK, p_NK, E), w13, w2)
    return torch.autograd.grad(y_ND, leaves, torch.ones(()).expand_as(y_ND).to(y_ND.dtype))


def test_a_training_step_compiles_each_kernel_once_whatever_the_number_of_tokens(compiled):
    gradients = train_step(1000)
    assert [g.dtype for g in gradients] == [torch.bfloat16, torch.float32, torch.bfloat16, torch.bfloat16]
    once = ["down_kernel", "hidden_grad_kernel", "sum_partials_kernel", "tile_map_kernel", "up_kernel"]
    twice = ["down_kernel", "sum_partials_kernel", "tile_map_kernel", "weight_grad_kernel", "weight_grad_kernel"]
    assert sorted(compiled) == sorted(once + twice)
    compiled.clear()
    for N in (1, 8, 999, 1024, 4096):
        train_step(N)
    assert compiled == []
