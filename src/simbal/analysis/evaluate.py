"""Runs the analyses of a config; each is printed, and written where it can be read again."""

import importlib.metadata
import inspect
import time
from collections.abc import Callable, Mapping
from functools import cache, partial
from pathlib import Path
from typing import Any, Protocol

import torch
from hydra.utils import get_method

from simbal.analysis.result import Result, made_with, read_analysis, write_analysis
from simbal.analysis.subject import Subject, UnsuitedError
from simbal.analysis.trained import DataPlaces, load, runs_in
from simbal.config.signatures import check_arguments
from simbal.config.values import check_name
from simbal.console import console
from simbal.errors import UserError
from simbal.processes import keep_freed_memory

# the parameter of an analysis that takes what it measures: a trained run, a model of Hugging Face, or either of them
MEASURED = (OF_A_RUN, OF_A_HF_MODEL, OF_EITHER) = ("trained", "hf", "subject")
NO_INPUTS: Mapping[str, Any] = {}
NOWHERE = DataPlaces()


class Requested(Protocol):
    """A model of Hugging Face that a command asks for: see `simbal.hf.load`."""

    def require_results(self) -> Path:
        """Return the folder of its results; `UserError` if another model or text was measured there."""

    def load(self) -> Subject:
        """Load the model."""


def evaluate(
    analyses: dict[str, dict[str, Any]],
    run: str | None,
    overwrite: bool,
    accelerator: str,
    output_dir: str,
    inputs: Mapping[str, Any] = NO_INPUTS,
    places: DataPlaces = NOWHERE,
    hf: Requested | None = None,
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
        hf: a model of Hugging Face, in place of runs; its results go to its own folder.

    Raises:
        UserError: an analysis refuses its keys or the run, the disk refuses the result, or no analysis takes an input.
            Of several runs those are left out that have no weights, or nothing that an analysis is of.
    """
    if not isinstance(output_dir, str):
        raise UserError(f"output_dir={output_dir} must be the path of a folder")
    for name in analyses:
        check_name("the analysis", name)  # it names a file in the folder of a run
    if hf is None:
        keep_freed_memory()  # what a large model has held while it was loaded is given back
    elif run is not None:
        raise UserError("run= and hf= are two things to measure: give one of them")
    functions = {name: get_method(settings["_target_"]) for name, settings in analyses.items()}
    settings = _with_inputs(analyses, functions, inputs)
    kinds = {name: _measures(function) for name, function in functions.items()}
    for name, function in functions.items():
        check_arguments(f"analysis.{name}.", function, _arguments(analyses[name]), given={*MEASURED, *inputs})
    of_subjects = {name: kind for name, kind in kinds.items() if kind}
    subjects = _subjects(of_subjects, run, hf, accelerator, places) if of_subjects else {}
    for name in kinds.keys() - of_subjects:
        _once(functions[name], name, settings[name], Path(output_dir), None, overwrite=True)
    _of_each({name: partial(_once, functions[name], name, settings[name]) for name in of_subjects}, subjects, overwrite)


def _of_each(
    analyses: Mapping[str, Callable[..., None]], subjects: Mapping[Path, Callable[[], Subject]], overwrite: bool
) -> None:
    """Run each analysis of each subject; of several, one that has nothing for it is left out, and named."""
    suited = set()
    for folder, load_it in subjects.items():
        subject = cache(load_it)  # what is there already needs no model
        for name, once in analyses.items():
            try:
                once(folder, subject, overwrite)
                suited.add(name)
            except UnsuitedError as error:
                if len(subjects) == 1:
                    raise
                console().print(f"left out: {error}", soft_wrap=True)
    if unsuited := sorted(analyses.keys() - suited):
        raise UserError(f"analysis={','.join(unsuited)} has left out all of the {len(subjects)} runs")


def _subjects(
    kinds: Mapping[str, str], run: str | None, hf: Requested | None, accelerator: str, places: DataPlaces
) -> dict[Path, Callable[[], Subject]]:
    """Return what loads each thing to measure, by the folder of its results.

    Raises:
        UserError: there is none, or an analysis is not of it.
    """
    others = {
        OF_A_HF_MODEL: "works on a model of Hugging Face: give hf=FOLDER",
        OF_A_RUN: "works on a trained run: give run=outputs/<name>/<run>",
    }
    if run is None and hf is None:
        names = ", ".join(sorted(kinds))
        raise UserError(
            f"{names} works on a trained run: give run=outputs/<name>/<run>, or a model of Hugging Face by hf="
        )
    for name, kind in kinds.items():
        if kind == (OF_A_RUN if hf else OF_A_HF_MODEL):
            raise UserError(f"analysis={name} {others[kind]}")
    if hf:
        return {hf.require_results(): hf.load}
    return {path: partial(load, path, accelerator, places) for path in runs_in(Path(str(run)))}


def _with_inputs(
    analyses: dict[str, dict[str, Any]], functions: dict[str, Callable[..., Result]], inputs: Mapping[str, Any]
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
    function: Callable[..., Result],
    name: str,
    settings: dict[str, Any],
    folder: Path,
    subject: Callable[[], Subject] | None,
    overwrite: bool,
) -> None:
    out, file = console(), folder / "analysis" / f"{name}.json"
    if not overwrite and (done := read_analysis(file)) is not None and made_with(done, settings):
        out.print(f"there already: {file}", soft_wrap=True)
        return
    measured = None if subject is None else subject()
    given = {_measures(function): measured} if measured else {}
    started = time.perf_counter()
    finding = function(**given, **_arguments(settings))
    circumstances = _circumstances(time.perf_counter() - started)
    if measured is not None:
        circumstances["precision"] = measured.precisions
    try:
        write_analysis(file, {"analysis": name, "settings": settings, **finding.record, **circumstances})
    finally:  # shown last, as that ends the program where nobody reads it; and also what the disk refuses
        if measured is not None:
            out.print(f"{name} of {folder}", soft_wrap=True)
        finding.show(out)
        if measured is not None and len({*measured.precisions.values()}) > 1:
            out.print(measured.precision_note.format(**measured.precisions))
    out.print(f"written: {file}", soft_wrap=True)


def _measures(function: Callable[..., Result]) -> str:
    """Return the name of the parameter that takes what is measured; "" if nothing is."""
    parameters = inspect.signature(function).parameters
    return next((kind for kind in (OF_EITHER, OF_A_RUN, OF_A_HF_MODEL) if kind in parameters), "")


def _circumstances(seconds: float) -> dict[str, Any]:
    """Return what a number can depend on beside its settings.

    The order of a sum depends on the number of threads.
    """
    return {
        "seconds": seconds,
        "threads": torch.get_num_threads(),
        "versions": {name: importlib.metadata.version(name) for name in ("simbal", "torch")},
    }
