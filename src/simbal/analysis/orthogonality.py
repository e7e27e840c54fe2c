"""The analysis `orthogonality`: how far the routers of a run are from orthonormal rows, by lengths and by angles.

Reference: arXiv 2506.14038, tables 3, 9 and 10; that their product is in bf16 is inferred from their digits.
Shapes: L MoE layers, E experts, D model width.
"""

from statistics import fmean

import torch
from rich.table import Table
from torch import Tensor

from simbal.analysis.result import Result, numbers_table
from simbal.analysis.subject import Subject, routers_of
from simbal.metrics.similarity import max_cosine, max_deviation, mean_squared_cosine, mean_squared_deviation, row_norms

DEFINITION = {
    "gram_deviation": "mean over all E^2 entries of (R^T R - I)^2; router and product in bf16, the difference in fp32",
    "gram_deviation_fp32": "the same with router and product in fp32",
    "max_deviation_<precision>": "max over all E^2 entries of |R^T R - I|; router and product in this precision, the "
    "difference in fp32",
    "norm_<which>": "Euclidean length of a router's row, one row for each expert; fp64",
    "max_cosine": "largest absolute cosine between two rows of a router; fp64",
    "mean_squared_cosine": "mean of the squared cosine over the E(E-1) pairs of different rows; fp64",
    "metrics": "mean over layers of each of these",
}
FORMATS = {  # the heading of each number in the table, and its format
    "gram_deviation": ("(R^T R - I)^2\nbf16", ".3e"), "gram_deviation_fp32": ("\nfp32", ".3e"),
    "max_deviation_bf16": ("Max Dev\nbf16", ".2e"), "max_deviation_fp32": ("\nfp32", ".2e"),
    "norm_min": ("norm\nmin", ".3f"), "norm_mean": ("\nmean", ".3f"), "norm_max": ("\nmax", ".3f"),
    "max_cosine": ("|cosine|\nmax", ".2e"), "mean_squared_cosine": ("cosine^2\nmean", ".2e"),
}  # fmt: skip


def orthogonality(subject: Subject) -> Result:
    """Measure the final weight of every router, without data.

    Raises:
        UserError: the run is of a dense model.
    """
    # on the CPU, so that the order in which a product is summed is not the device's
    weights = [router.weight_ED.detach().cpu() for router in routers_of(subject, "orthogonality")]
    layers = [measured(weight_ED) for weight_ED in weights]
    means = {name: fmean(layer[name] for layer in layers) for name in FORMATS}
    num_experts, d_model = weights[0].shape
    record = {
        "definition": DEFINITION,
        "num_layers": len(layers),
        "num_experts": num_experts,
        "d_model": d_model,
        "metrics": means,
        "layers": {name: [layer[name] for layer in layers] for name in FORMATS},
    }
    return Result([_table(layers, means)], [_note(num_experts, d_model)], record)


@torch.no_grad()
def measured(weight_ED: Tensor) -> dict[str, float]:
    """Return all numbers of one router, by the names in `FORMATS`."""
    norms_E = row_norms(weight_ED)
    numbers = {
        "gram_deviation": mean_squared_deviation(weight_ED, torch.bfloat16),
        "gram_deviation_fp32": mean_squared_deviation(weight_ED, torch.float32),
        "max_deviation_bf16": max_deviation(weight_ED, torch.bfloat16),
        "max_deviation_fp32": max_deviation(weight_ED, torch.float32),
        "norm_min": norms_E.min(),
        "norm_mean": norms_E.mean(),
        "norm_max": norms_E.max(),
        "max_cosine": max_cosine(weight_ED.double()),
        "mean_squared_cosine": mean_squared_cosine(weight_ED.double()),
    }
    return {name: value.item() for name, value in numbers.items()}


def _table(layers: list[dict[str, float]], means: dict[str, float]) -> Table:
    headings = ("\nlayer", *(heading for heading, _ in FORMATS.values()))
    rows = ([str(index), *_cells(layer)] for index, layer in enumerate(layers))
    return numbers_table("routers by layer", headings, rows, [["mean", *_cells(means)]])


def _cells(numbers: dict[str, float]) -> list[str]:
    return [format(numbers[name], spec) for name, (_, spec) in FORMATS.items()]


def _note(num_experts: int, d_model: int) -> str:
    quantum = (2**-8) ** 2 / num_experts**2
    return (
        f"{num_experts} experts, width {d_model}. One diagonal entry of the bf16 product that is a rounding step below "
        f"1 adds {quantum:.2e} to (R^T R - I)^2; random rows have a mean squared cosine of about {1 / d_model:.2e}."
    )
