"""All Triton kernels compile for sm_90 and sm_80 without spilling registers; no GPU is needed."""

import os
import re
import subprocess
from collections import Counter
from pathlib import Path

import pytest
import torch

from simbal.experts.backends import RoutingPlan
from simbal.experts.fused import CONFIGS, fused

pytestmark = pytest.mark.slow
triton = pytest.importorskip("triton", reason="Triton is not installed: pip install triton==3.7.1")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("TRITON_INTERPRET=1: kernels are interpreted, not compiled", allow_module_level=True)

PTXAS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "ptxas"
TYPES = {
    "order_R": "*i64", "ends_E": "*i32", "tiles_3T": "*i32", "chunks_3T": "*i32",
    "p_slot": "*fp32", "dp_slotC": "*fp32", "partial_SIJ": "*fp32",
    "targets_C": "*i64", "nll_C": "*fp32", "lse_C": "*fp32", "weight": "fp32", "z_coef": "fp32",
    "cos_SP": "*fp32", "sin_SP": "*fp32", **{f"{x}_{axis}": "i32" for x in "xy" for axis in "BHS"}, "S": "i32",
    "num_tiles": "i32", "num_chunks": "i32", "chunk_rows": "i32", "size": "i32",
}  # fmt: skip
WIDTHS = {256: 768, 128: 384, 64: 192}  # the paper's M models, and widths that only smaller blocks divide
MEMORY = {90: 227 * 1024, 80: 163 * 1024}  # bytes of shared memory available to a program
CASES = [
    *((config, 90, "bf16") for config in CONFIGS),
    (CONFIGS[0], 90, "fp16"),
    *((config, 80, "bf16") for config in CONFIGS if config.shared_memory <= MEMORY[80]),
]


def kernels(config, width):
    """(name, kernel, constants, launch options) as `fused.py` launches them with E = 32 and K = 4."""
    from simbal.experts import fused_kernels as rows

    sizes = {"D": width, "F": width, "K": 4}
    shapes = {
        "up": (rows.up_kernel, config.up, sizes),
        "down": (rows.down_kernel, config.down, {"WIDTH_I": width, "WIDTH_J": width, "SCALED": True}),
        "dx": (rows.down_kernel, config.down, {"WIDTH_I": 2 * width, "WIDTH_J": width, "SCALED": False}),
        "hidden_grad": (rows.hidden_grad_kernel, config.hidden_grad, sizes),
    }
    for name, (kernel, blocks, constants) in shapes.items():
        tile = {"ROWS": config.rows, "COLUMNS": blocks.columns, "DEPTH": blocks.depth, "GROUP": config.group}
        yield name, kernel, constants | tile, blocks.options
    blocks = config.weight_grad
    tile = {"ROWS": config.weight_rows, "COLUMNS": blocks.columns, "DEPTH": blocks.depth}
    for name, width_i in (("dw2", width), ("dw13", 2 * width)):
        constants = {"WIDTH_I": width_i, "WIDTH_J": width, "K": 4} | tile
        yield name, rows.weight_grad_kernel, constants, blocks.options
        warps = {"num_warps": 4}
        yield f"sum of {name}", rows.sum_partials_kernel, {"IJ": width_i * width, "BLOCK": 2048}, warps
    for least in (0, 1):
        constants = {"E": 32, "LEAST": least, "BLOCK": 128}
        yield f"map, least {least}", rows.tile_map_kernel, constants, {"num_warps": 4}


def compile_kernel(kernel, constants, options, capability, dtype, folder):
    """PTX, shared memory, registers and spilled bytes."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = kernel.arg_names
    signature = {n: "constexpr" if n in constants else TYPES.get(n, f"*{dtype}") for n in names}
    aligned = {(i,): [["tt.divisibility", 16]] for i, n in enumerate(names) if signature[n].startswith("*")}
    values = {(names.index(name),): value for name, value in constants.items()}
    source = ASTSource(kernel, signature, constexprs=values, attrs=aligned)
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    ptx = folder / "kernel.ptx"
    ptx.write_text(compiled.asm["ptx"])
    gpu = f"--gpu-name=sm_{capability}" + ("a" if capability == 90 else "")
    command = (PTXAS, "-v", gpu, ptx, "-o", folder / "kernel.cubin")
    log = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    registers, spilled = ([int(n) for n in re.findall(p, log)] for p in (r"Used (\d+) registers", r"(\d+) bytes spill"))
    assert registers, log
    return compiled.asm["ptx"], compiled.metadata.shared, max(registers), sum(spilled)


@pytest.mark.parametrize(("config", "capability", "dtype"), CASES)
def test_every_kernel_compiles_without_spills_and_uses_the_tensor_cores(
    config, capability, dtype, tmp_path, monkeypatch
):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    for name, kernel, constants, options in kernels(config, WIDTHS[config.width]):
        ptx, shared, registers, spilled = compile_kernel(kernel, constants, options, capability, dtype, tmp_path)
        products = ptx.count("wgmma.mma_async" if capability == 90 else "mma.sync")
        assert spilled == 0, name
        assert shared <= config.shared_memory <= MEMORY[capability], name
        if "DEPTH" in constants:
            assert products > 0, name
        # an SM has 65536 registers and 227 KiB of shared memory, of which it reserves 1 KiB per program
        if capability == 90 and config is not CONFIGS[0]:
            assert 2 * registers * 32 * options["num_warps"] <= 65536, f"{name}: only one program fits onto an SM"
            assert 2 * (shared + 1024) <= 227 * 1024, f"{name}: only one program fits onto an SM"


@pytest.mark.parametrize(("capability", "with_gradient"), [(90, True), (90, False), (80, True)])
def test_the_kernel_of_the_head_moves_sixteen_bytes_at_once_without_spills(
    capability, with_gradient, tmp_path, monkeypatch
):
    from simbal.model.kernels import BLOCK, cross_entropy_kernel

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    constants = {"V": 100_277, "P": 100_288, "WITH_GRADIENT": with_gradient, "BLOCK": BLOCK}
    ptx, _, _, spilled = compile_kernel(cross_entropy_kernel, constants, {"num_warps": 4}, capability, "bf16", tmp_path)
    assert spilled == 0
    moves = Counter(re.findall(r"(ld|st)\.global[\w.:]*\.(v4\.b32|b16) ", ptx))
    assert moves["ld", "v4.b32"] > 0
    assert moves["ld", "b16"] == 1, "only the target's logit is read separately"
    assert (moves["st", "v4.b32"] > 0) == with_gradient
    assert moves["st", "b16"] == 0


@pytest.mark.parametrize("capability", [90, 80])
def test_the_rotary_kernel_compiles_without_spills(capability, tmp_path, monkeypatch):
    from simbal.model.kernels import rotary_kernel

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    constants = {"x_P": 1, "y_P": 1, "direction": 1, "H": 8, "PAIRS": 48, "HEADS": 8, "LANES": 64}
    compiled = compile_kernel(rotary_kernel, constants, {"num_warps": 2}, capability, "bf16", tmp_path)
    assert compiled[3] == 0, "spilled bytes"


class FakeDriver:
    """The part of Triton's driver that is needed to compile for a launch."""

    def get_current_target(self):
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)

    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 0


@pytest.fixture
def compiled(monkeypatch, tmp_path):
    """Names of the compiled kernels, one entry per compilation; launches compile for sm_90 and run nothing."""
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
    monkeypatch.setattr(driver, "_active", FakeDriver())
    monkeypatch.setattr(JITFunction, "run", lambda self, *a, **kw: run(self, *a, **kw | {"warmup": True}))
    monkeypatch.setattr(JITFunction, "_do_compile", count)
    for cache in caches:
        cache.clear()
    yield names
    for cache in caches:  # their keys are device numbers, so a real device would find these entries
        cache.clear()


def train_step(N, width=192, E=8, K=2):
    """Outputs are uninitialized memory; the numbers of rows are real."""
    x, w13, w2 = (torch.randn(*s, dtype=torch.bfloat16) for s in ((N, width), (E, 2, width, width), (E, width, width)))
    p_NK, experts_NK = torch.randn(N, E).softmax(-1).topk(K)
    leaves = [leaf.requires_grad_() for leaf in (x, p_NK, w13, w2)]
    y_ND = fused(x, RoutingPlan.build(experts_NK, p_NK, E), w13, w2)
    return torch.autograd.grad(y_ND, leaves, torch.ones(()).expand_as(y_ND).to(y_ND.dtype))


def test_a_training_step_compiles_each_kernel_once_for_any_number_of_tokens(compiled):
    gradients = train_step(1000)
    assert [g.dtype for g in gradients] == [torch.bfloat16, torch.float32, torch.bfloat16, torch.bfloat16]
    once = ["down_kernel", "hidden_grad_kernel", "sum_partials_kernel", "tile_map_kernel", "up_kernel"]
    twice = ["down_kernel", "sum_partials_kernel", "tile_map_kernel", "weight_grad_kernel", "weight_grad_kernel"]
    assert sorted(compiled) == sorted(once + twice)
    compiled.clear()
    for N in (1, 8, 999, 1024, 4096):
        train_step(N)
    assert compiled == []
