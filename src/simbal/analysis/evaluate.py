"""Runs the analyses of a config; each is printed, and written where it can be read again."""

import importlib.metadata
import inspect
import time
from collections.abc import Callable, Mapping
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from hydra.utils import get_method

from simbal.analysis.shared.finding import Finding, made_with, read_analysis, write_analysis
from simbal.analysis.shared.trained import DataPlaces, TrainedRun, load, runs_in
from simbal.config.values import check_arguments, check_name
from simbal.errors import UserError
from simbal.files.console import console
from simbal.processes.heap import keep_freed_memory

OF_A_RUN = "trained"  # the parameter of an analysis that works on a trained run
NO_INPUTS: Mapping[str, Any] = {}
NOWHERE = DataPlaces()


def evaluate(
    analyses: dict[str, dict[str, Any]],
    run: str | None,
    overwrite: bool,
    accelerator: str,
    output_dir: str,
    inputs: Mapping[str, Any] = NO_INPUTS,
    places: DataPlaces = NOWHERE,
) -> None:
    """Run each analysis: its `_target_`, called with its other keys.

    Args:
        analyses: the keys of each, by its name.
        run: a run's folder or a folder of runs, for analyses of a trained model.
        overwrite: do again what is there already.
        accelerator: auto, cpu or cuda.
        output_dir: results of analyses without a run go to <output_dir>/analysis/<name>.json; else to the run's folder.
        inputs: more keys, for those analyses that have a parameter of the name; None: the user gave none.
        places: where the data of the runs are, beside where their configs say that they are.

    Raises:
        UserError: an analysis refuses its keys or the run, the disk refuses the result, or no analysis takes an input.
    """
    if not isinstance(output_dir, str):
        raise UserError(f"output_dir={output_dir} must be the path of a folder")
    for name in analyses:
        check_name("the analysis", name)  # it names a file in the folder of a run
    keep_freed_memory()
    functions = {name: get_method(settings["_target_"]) for name, settings in analyses.items()}
    settings = _with_inputs(analyses, functions, inputs)
    for name, function in functions.items():
        check_arguments(f"analysis.{name}.", function, _arguments(analyses[name]), given={OF_A_RUN, *inputs})
    of_runs = {name for name, function in functions.items() if OF_A_RUN in inspect.signature(function).parameters}
    if of_runs and run is None:
        raise UserError(f"{', '.join(sorted(of_runs))} works on a trained run: give run=outputs/<name>/<run>")
    for name in analyses.keys() - of_runs:
        _once(functions[name], name, settings[name], Path(output_dir), None, overwrite=True)
    for path in runs_in(Path(str(run))) if of_runs else ():
        trained = cache(partial(load, path, accelerator, places))  # what is there already needs no model
        for name in [name for name in analyses if name in of_runs]:
            _once(functions[name], name, settings[name], path, trained, overwrite)


def _with_inputs(
    analyses: dict[str, dict[str, Any]], functions: dict[str, Callable[..., Finding]], inputs: Mapping[str, Any]
) -> dict[str, dict[str, Any]]:
    """Return the keys of each analysis, with the inputs that it has parameters for."""
    taken = {name: inspect.signature(function).parameters for name, function in functions.items()}
    for key, value in inputs.items():
        if value is not None and not any(key in parameters for parameters in taken.values()):
            raise UserError(f"{key}= is not for analysis={','.join(analyses)}: leave it out")
    return {name: keys | {key: inputs[key] for key in inputs if key in taken[name]} for name, keys in analyses.items()}


def _arguments(settings: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in settings.items() if key != "_target_"}


def _once(
    function: Callable[..., Finding],
    name: str,
    settings: dict[str, Any],
    folder: Path,
    trained: Callable[[], TrainedRun] | None,
    overwrite: bool,
) -> None:
    out, file = console(), folder / "analysis" / f"{name}.json"
    if not overwrite and (done := read_analysis(file)) is not None and made_with(done, settings):
        out.print(f"there already: {file}", soft_wrap=True)
        return
    run = None if trained is None else trained()
    given = {} if run is None else {OF_A_RUN: run}
    started = time.perf_counter()
    finding = function(**given, **_arguments(settings))
    seconds = time.perf_counter() - started
    if run is not None:
        out.print(f"{name} of {folder}", soft_wrap=True)
    finding.show(out)
    if run is not None and len({*run.precisions.values()}) > 1:
        out.print("The run was trained in {trained} and is analysed in {analysed}.".format(**run.precisions))
    circumstances = _circumstances(seconds) | ({} if run is None else {"precision": run.precisions})
    write_analysis(file, {"analysis": name, "settings": settings, **finding.record, **circumstances})
    out.print(f"written: {file}", soft_wrap=True)


def _circumstances(seconds: float) -> dict[str, Any]:
    """Return what a number can depend on beside its settings.

    The order of a sum depends on the number of threads.
    """
    return {
        "seconds": seconds,
        "threads": torch.get_num_threads(),
        "versions": {name: importlib.metadata.version(name) for name in ("simbal", "torch")},
    }
