"""Every kernel of `fused` in every shipped shape, the head's and that of rotations compile for sm_90 and sm_80, well.

No GPU is needed.
"""

import os
import re
import subprocess
from collections import Counter
from pathlib import Path

import pytest

from simbal.experts.fused_blocks import CONFIGS

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
WIDTHS = {256: (768, 1536), 128: (384,), 64: (192,)}  # the paper's models, and widths that only smaller blocks divide
MEMORY = {90: 227 * 1024, 80: 163 * 1024}  # bytes of shared memory that a program can have
CASES = [
    *((config, width, 90, "bf16") for config in CONFIGS for width in WIDTHS[config.width]),
    *((config, WIDTHS[config.width][0], 90, "fp16") for config in CONFIGS),
    *((config, WIDTHS[config.width][0], 80, "bf16") for config in CONFIGS if config.shared_memory <= MEMORY[80]),
]


def kernels(config, width):
    """(name, kernel, constants, launch options) as `fused.py` launches them, E = 32 and K = 4."""
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


@pytest.mark.parametrize(("config", "width", "capability", "dtype"), CASES)
def test_every_kernel_compiles_without_spills_and_uses_the_tensor_cores(
    config, width, capability, dtype, tmp_path, monkeypatch
):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    for name, kernel, constants, options in kernels(config, width):
        ptx, shared, registers, spilled = compile_kernel(kernel, constants, options, capability, dtype, tmp_path)
        products = ptx.count("wgmma.mma_async" if capability == 90 else "mma.sync")
        print(f"sm_{capability} {dtype} {width} {name}: {registers=} {spilled=} {shared=} {products=}")
        assert spilled == 0, name
        assert shared <= config.shared_memory <= MEMORY[capability], name
        if "DEPTH" in constants:
            assert products > 0, name
        # an SM has 65536 registers and 227 KiB of shared memory, and keeps 1 KiB for each program; the first was timed
        if capability == 90 and config is not CONFIGS[0]:
            assert 2 * registers * 32 * options["num_warps"] <= 65536, f"{name}: one program for an SM"
            assert 2 * (shared + 1024) <= 227 * 1024, f"{name}: one program for an SM"


@pytest.mark.parametrize("capability", [90, 80])
@pytest.mark.parametrize("with_gradient", [True, False])
def test_the_kernel_of_the_head_moves_sixteen_bytes_at_once_without_spills(
    capability, with_gradient, tmp_path, monkeypatch
):
    from simbal.model.head_kernels import BLOCK, cross_entropy_kernel

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    constants = {"V": 100_277, "P": 100_288, "WITH_GRADIENT": with_gradient, "BLOCK": BLOCK}
    ptx, _, _, spilled = compile_kernel(cross_entropy_kernel, constants, {"num_warps": 4}, capability, "bf16", tmp_path)
    assert spilled == 0
    moves = Counter(re.findall(r"(ld|st)\.global[\w.:]*\.(v4\.b32|b16) ", ptx))
    assert moves["ld", "v4.b32"] > 0
    assert moves["ld", "b16"] == 1, "only the logit of the target is read alone"
    assert (moves["st", "v4.b32"] > 0) == with_gradient
    assert moves["st", "b16"] == 0


@pytest.mark.parametrize("capability", [90, 80])
def test_the_kernel_of_rotations_compiles_without_spills(capability, tmp_path, monkeypatch):
    from simbal.model.rotary_kernels import rotary_kernel

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    constants = {"x_P": 1, "y_P": 1, "direction": 1, "H": 8, "PAIRS": 48, "HEADS": 8, "LANES": 64}
    compiled = compile_kernel(rotary_kernel, constants, {"num_warps": 2}, capability, "bf16", tmp_path)
    assert compiled[3] == 0, "spilled bytes"
