"""The analysis `orthogonality`: how far the rows of each router are from orthonormal, by length and angle.

Reference: arXiv 2506.14038, tables 3, 9 and 10. Their digits suggest a product in bf16.
Shapes: L MoE layers, E experts, D model width.
"""

from statistics import fmean

import torch
from torch import Tensor

from simbal.analysis.result import Result, layer_table
from simbal.analysis.subject import Subject, require_routers
from simbal.metrics.similarity import max_cosine, max_deviation, mean_squared_cosine, mean_squared_deviation, row_norms

DEFINITION = {
    "gram_deviation": "mean over all E^2 entries of (R^T R - I)^2; router and product in bf16, difference in fp32",
    "gram_deviation_fp32": "the same with router and product in fp32",
    "max_deviation_<precision>": "maximum over all E^2 entries of |R^T R - I|; router and product in this precision, "
    "difference in fp32",
    "norm_<which>": "Euclidean length of a router's row, one row per expert; fp64",
    "max_cosine": "largest absolute cosine between two rows of a router; fp64",
    "mean_squared_cosine": "mean squared cosine over the E(E-1) pairs of different rows; fp64",
    "metrics": "mean over layers",
}
COLUMNS = {
    "gram_deviation": ("(R^T R - I)^2\nbf16", ".3e"), "gram_deviation_fp32": ("\nfp32", ".3e"),
    "max_deviation_bf16": ("Max Dev\nbf16", ".2e"), "max_deviation_fp32": ("\nfp32", ".2e"),
    "norm_min": ("norm\nmin", ".3f"), "norm_mean": ("\nmean", ".3f"), "norm_max": ("\nmax", ".3f"),
    "max_cosine": ("|cosine|\nmax", ".2e"), "mean_squared_cosine": ("cosine^2\nmean", ".2e"),
}  # fmt: skip


def orthogonality(subject: Subject) -> Result:
    """Measure the final weight of each router; `NotApplicableError` for a dense model."""
    # on a CPU, because the order of summation differs between devices
    weights = [router.weight_ED.detach().cpu() for router in require_routers(subject, "orthogonality")]
    measured = [measure_router(weight_ED) for weight_ED in weights]
    layers = {name: [numbers[name] for numbers in measured] for name in COLUMNS}
    metrics = {name: fmean(values) for name, values in layers.items()}
    num_experts, d_model = weights[0].shape
    record = {
        "definition": DEFINITION,
        "num_layers": len(weights),
        "num_experts": num_experts,
        "d_model": d_model,
        "metrics": metrics,
        "layers": layers,
    }
    quantum = (2**-8) ** 2 / num_experts**2
    note = (
        f"{num_experts} experts, width {d_model}. Each diagonal entry of the bf16 product that is one rounding step "
        f"below 1 adds {quantum:.2e} to (R^T R - I)^2. Random rows have a mean squared cosine of about "
        f"{1 / d_model:.2e}."
    )
    return Result([layer_table("routers by layer", COLUMNS, layers, {"mean": metrics})], [note], record)


@torch.no_grad()
def measure_router(weight_ED: Tensor) -> dict[str, float]:
    """Return the metrics of one router by name."""
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
