"""What the analysis `routing` prints: use of experts, entropies, and overlap of choices; each fits 100 columns."""

from collections.abc import Mapping, Sequence
from math import log
from typing import Any

from rich.table import Table

from simbal.analysis.routing_totals import PIECES
from simbal.console import new_grid

USE = {
    "seu_128": "SEU\n128", "seu_512": "SEU\n512", "seu": "SEU\n{seq_len}", "unique_experts": "experts\nused",
    "dead_experts": "\ndead", "near_dead_experts": "near-\ndead", "max_vio": "\nMaxVio", "gini": "\nGini",
    "squared_variation": "\nCV^2",
}  # fmt: skip
SURENESS = {
    "entropy_topk": "entropy\ntop-K", "entropy_full": "entropy\nfull", "entropy_load": "entropy\nload",
    "mutual_information": "mutual\ninformation", "similarity_correlation": "similarity\ncorrelation",
    "saturation": "\nsaturation",
}  # fmt: skip


def tables(
    layers: Mapping[str, Sequence[Any]], metrics: Mapping[str, float], overlap: Mapping[str, Any], seq_len: int
) -> list[Table]:
    """Two tables with a line for each layer, and one with a line for each bin that holds pairs."""
    use = {name: heading.format(seq_len=seq_len) for name, heading in USE.items()}
    return [
        _by_layer("use of experts by layer", use, layers, metrics),
        _by_layer("entropy (nats) and similarity by layer", SURENESS, layers, metrics),
        _by_bin(overlap),
    ]


def notes(record: Mapping[str, Any], lengths: Mapping[str, int], against: str | None) -> list[str]:
    """On how many tokens; what the numbers would be without preference; what was left out."""
    num_experts, top_k, seq_len = record["num_experts"], record["top_k"], record["seq_len"]
    said = [
        f"{record['tokens']:,} tokens in {record['sequences']:,} sequences, {record['pairs']:,} pairs of tokens. "
        f"{num_experts} experts, {top_k} for each token: entropies are at most {log(top_k):.3f} (top-K) and "
        f"{log(num_experts):.3f} nats; choices by chance overlap by {top_k / num_experts:.3f}.",
        "The last line is the sum over layers of experts used, dead and near-dead (less than a tenth of the mean "
        "load), and the mean over layers of all else.",
    ]
    too_long = [str(length) for length in PIECES if f"seu_{length}" not in lengths]
    if too_long:
        said.append(f"SEU at {' and '.join(too_long)} is left out: sequences have {seq_len} tokens.")
    unused = {length: seq_len % length for length in lengths.values() if seq_len % length}
    said += [f"SEU {length} leaves out the last {rest} tokens of each sequence." for length, rest in unused.items()]
    if "similarity_correlation" not in record["metrics"]:
        said.append("A similarity correlation is undefined where all pairs have the same cosine.")
    if against is not None:
        said.append(
            f"Saturation is against {against}; the experts of runs that started from other weights share no order."
        )
    return said


def _by_layer(
    title: str, columns: Mapping[str, str], layers: Mapping[str, Sequence[Any]], metrics: Mapping[str, float]
) -> Table:
    shown = {name: heading for name, heading in columns.items() if name in layers}
    grid = new_grid(title)
    grid.add_column("\nlayer")
    for heading in shown.values():
        grid.add_column(heading, justify="right")
    for index in range(len(layers["seu"])):
        grid.add_row(str(index), *(_cell(layers[name][index]) for name in shown))
    grid.add_section()
    grid.add_row("all", *(_cell(metrics.get(name), counted="experts" in name) for name in shown))
    return grid


def _cell(value: float | None, counted: bool = False) -> str:
    if value is None:
        return "-"
    return str(int(value)) if counted or isinstance(value, int) else f"{value:.4f}"


def _by_bin(overlap: Mapping[str, Any]) -> Table:
    grid = new_grid("pairs of tokens, all layers")
    grid.add_column("cosine of inputs")
    grid.add_column("pairs", justify="right")
    grid.add_column("overlap of choices", justify="right")
    rows = zip(overlap["from"], overlap["to"], overlap["pairs"], overlap["overlap"], strict=True)
    for low, high, pairs, mean in rows:
        if pairs:
            grid.add_row(f"{low:+.2f} to {high:+.2f}", f"{pairs:,}", f"{mean:.4f}")
    return grid
