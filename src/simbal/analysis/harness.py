"""Tasks of lm-evaluation-harness on local items: the harness's own prompts and metrics, and no network.

The items become JSON files in the cache, and each task a YAML file that includes the harness's own.
"""

import contextlib
import io
import json
import os
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import yaml

from simbal.analysis.benchmark_items import Benchmark, Item
from simbal.analysis.trained import TrainedRun
from simbal.atomic_file import replace_text
from simbal.data.tokenizer import Tokenizer
from simbal.errors import UserError

INSTALL = "pip install 'simbal[eval]'"
OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
ACCURACY = [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}]
BOOTSTRAP = 1  # resamples, of metrics that none of these tasks has; at 0 there is no standard error of acc either


def require_harness() -> None:
    """Raise `UserError` with the command that installs it, unless lm-eval is there."""
    if find_spec("lm_eval") is None:
        raise UserError(f"lm-evaluation-harness is not here: {INSTALL}")


def write_tasks(folder: Path, benchmarks: Mapping[str, Benchmark], items: Mapping[str, list[Item]]) -> None:
    """`<folder>/items/<task>.json` and `<folder>/tasks/<task>.yaml`; what is there and the same stays untouched."""
    spec = find_spec("lm_eval")
    assert spec is not None, "require_harness comes first"
    assert spec.submodule_search_locations is not None
    templates = Path(spec.submodule_search_locations[0], "tasks")
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


def _keep(file: Path, text: str) -> None:
    """A file that has changed is read anew into the data set library's cache, where the old stays."""
    if not (file.exists() and file.read_text(encoding="utf-8") == text):
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            replace_text(file, text)
        except OSError as error:
            raise UserError(f"cannot write {file}: {error.strerror}; set data.cache_dir of the run") from None


def scores(
    trained: TrainedRun, tokenizer: Tokenizer, batch_size: int, folder: Path, places: Mapping[str, list[int]]
) -> dict[str, dict[str, Any]]:
    """What the harness says of each task that `write_tasks` left in `folder`, on the items at `places`."""
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
    results: dict[str, dict[str, Any]] = found["results"]
    return results


@contextlib.contextmanager
def _offline() -> Iterator[None]:
    """The libraries read these variables when they are imported."""
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
