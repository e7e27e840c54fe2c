"""Block shapes of the fused kernels: a static table, because tuning at run time would pick sums, and so bits, by clock.

The first entry was timed on an H100 (`benchmarks.fused_blocks`), the others on no GPU. The tests compile each for
sm_90, and for sm_80 if it fits there: no register spills, and of what was not timed two programs fit onto one SM of an
H200 (128 registers, 113 KiB of shared memory), so that one stores while the other multiplies.
Shapes: D model width, F expert hidden width, R routed rows.
"""

from dataclasses import dataclass
from math import inf


@dataclass(frozen=True)
class Blocks:
    """The block shape of one kernel: columns of a tile, steps of its sum taken at once, and Triton's launch options."""

    columns: int
    depth: int
    num_warps: int
    num_stages: int

    @property
    def options(self) -> dict[str, int]:
        """The launch options that Triton takes."""
        return {"num_warps": self.num_warps, "num_stages": self.num_stages}


@dataclass(frozen=True)
class Config:
    """The block shapes of all kernels, for widths that are multiples of `width`."""

    width: int
    rows: int  # of a tile of the three kernels over routed rows: they share one map of tiles
    up: Blocks
    down: Blocks
    hidden_grad: Blocks
    weight_grad: Blocks
    weight_rows: int  # of a tile of the weight gradient
    shared_memory: int  # bytes that one program of the most demanding kernel needs
    group: int = 16  # row tiles whose columns are done before the next rows: 16 read 3 MB of x at D = 768, L2 has 50
    programs: int = 4 * 132  # the weight gradient is cut into about this many equal ones: four for each SM of an H200
    min_chunk: int = 512  # rows below which cutting an expert costs more in partial sums than it gains

    def chunk_rows(self, R: int, tiles: int) -> int:
        """Return the rows after which the weight gradient cuts an expert, so that no long one keeps the GPU waiting.

        R rows of `tiles` tiles make R/chunk_rows * tiles = `programs` pieces. Balanced experts are shorter where the
        weights alone fill a GPU, and partial sums fit into 2 * `programs` tiles (66 MiB of fp32) whatever the model.
        """
        rows = max(self.min_chunk, R * tiles // self.programs)
        return -(-rows // self.weight_grad.depth) * self.weight_grad.depth


CONFIGS = (
    Config(
        width=256,
        rows=128,
        up=Blocks(64, 64, num_warps=8, num_stages=3),  # of gate and up each
        down=Blocks(256, 64, num_warps=8, num_stages=4),
        hidden_grad=Blocks(128, 64, num_warps=8, num_stages=5),
        weight_grad=Blocks(128, 64, num_warps=8, num_stages=5),  # the load of the tokens' order takes two stages
        weight_rows=128,
        shared_memory=200 * 1024,
    ),
    Config(
        width=128,
        rows=128,
        up=Blocks(64, 64, num_warps=8, num_stages=3),
        down=Blocks(128, 64, num_warps=8, num_stages=3),
        hidden_grad=Blocks(64, 64, num_warps=8, num_stages=4),
        weight_grad=Blocks(128, 64, num_warps=8, num_stages=5),
        weight_rows=128,
        shared_memory=97 * 1024,
    ),
    Config(
        width=64,
        rows=128,
        up=Blocks(64, 64, num_warps=8, num_stages=3),
        down=Blocks(64, 64, num_warps=8, num_stages=4),
        hidden_grad=Blocks(64, 64, num_warps=8, num_stages=4),
        weight_grad=Blocks(64, 64, num_warps=4, num_stages=5),
        weight_rows=64,
        shared_memory=97 * 1024,
    ),
)
"""The block shapes, in order of preference."""


def config_for(d_model: int, d_expert: int, shared_memory: float = inf) -> Config | None:
    """Return the first entry of `CONFIGS` whose width divides both and that needs no more shared memory, or None."""
    for config in CONFIGS:
        if d_model % config.width == d_expert % config.width == 0 and config.shared_memory <= shared_memory:
            return config
    return None


def multiple() -> int:
    """Return the number of which both widths must be a multiple."""
    return min(c.width for c in CONFIGS)
