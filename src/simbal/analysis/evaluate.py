"""Runs the analyses of a config, prints their tables and writes their results."""

import importlib.metadata
import inspect
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any, Protocol

import torch
from hydra.utils import get_method

from simbal.analysis.result import Result, has_settings, read_analysis, write_analysis
from simbal.analysis.subject import NotApplicableError, Subject
from simbal.analysis.trained import NOWHERE, DataPlaces, find_runs, load
from simbal.config.signatures import check_arguments
from simbal.console import console
from simbal.errors import UserError
from simbal.processes import tune_memory_allocation

# the parameter that receives the model: `subject` accepts both kinds, `trained` a run, `hf` a Hugging Face model
TRAINED, HF = "trained", "hf"
MEASURED = ("subject", TRAINED, HF)
GIVE = {TRAINED: "a trained run: set run=outputs/<name>/<run>", HF: "a Hugging Face model: set hf=FOLDER"}


class Requested(Protocol):
    """A Hugging Face model that the user asks to measure; see `simbal.hf.load`."""

    def require_results(self) -> Path:
        """Return the results folder; `UserError` if it contains results of a different model or text."""

    def load(self) -> Subject:
        """Load the model."""


@dataclass(frozen=True)
class Analysis:
    """An analysis with its settings, ready to run."""

    name: str
    function: Callable[..., Result]
    settings: Mapping[str, Any]  # `_target_` and the arguments of the function

    @property
    def measures(self) -> str | None:
        """The name of the parameter that receives the model, or None if the analysis needs no model."""
        parameters = inspect.signature(self.function).parameters
        return next((kind for kind in MEASURED if kind in parameters), None)

    def run(self, folder: Path, load_subject: Callable[[], Subject] | None, overwrite: bool) -> None:
        """Run the analysis, print its result and write it to <folder>/analysis/<name>.json.

        Without `overwrite`, keep a file with the same settings.
        """
        out, file = console(), folder / "analysis" / f"{self.name}.json"
        if not overwrite and (existing := read_analysis(file)) is not None and has_settings(existing, self.settings):
            out.print(f"already exists: {file}", soft_wrap=True)
            return
        arguments = {key: value for key, value in self.settings.items() if key != "_target_"}
        subject = load_subject() if load_subject else None
        if subject is not None:
            arguments |= {str(self.measures): subject}
        start = time.perf_counter()
        result = self.function(**arguments)
        # these affect the numbers too: the order of a sum depends on the number of threads
        conditions = {
            "seconds": time.perf_counter() - start,
            "threads": torch.get_num_threads(),
            "versions": {name: importlib.metadata.version(name) for name in ("simbal", "torch")},
        }
        if subject is not None:
            conditions["precision"] = subject.precisions
        try:
            write_analysis(file, {"analysis": self.name, "settings": self.settings, **result.record, **conditions})
        finally:  # a result that cannot be written is still printed
            if subject is not None:
                out.print(f"{self.name} of {folder}", soft_wrap=True)
            result.show(out)
            if subject is not None and len({*subject.precisions.values()}) > 1:
                out.print(subject.precision_note.format(**subject.precisions))
        out.print(f"written: {file}", soft_wrap=True)


def evaluate(
    analyses: dict[str, dict[str, Any]],
    run: str | None,
    overwrite: bool,
    accelerator: str,
    output_dir: str,
    inputs: Mapping[str, Any] | None = None,
    places: DataPlaces = NOWHERE,
    hf: Requested | None = None,
) -> None:
    """Run analyses, each on every model that the user gives.

    Args:
        analyses: `_target_` and settings of each analysis by its name.
        run: the folder of a run, or a folder of runs.
        overwrite: whether to repeat an analysis whose result exists.
        accelerator: auto, cpu or cuda.
        output_dir: folder of the results of analyses that need no model.
        inputs: further arguments, passed to the analyses that have a parameter of this name. None means not set.
        places: locations of the runs' data.
        hf: a Hugging Face model to measure instead of runs.

    Raises:
        UserError: a setting is invalid, a model is missing, no analysis has an input as a parameter, or a result cannot
            be written. With several runs, an analysis skips the runs that it does not apply to.
    """
    if hf is None:
        tune_memory_allocation()
    elif run is not None:
        raise UserError("run= and hf= cannot be combined: set one of them")
    checked = _check_analyses(analyses, inputs or {})
    with_model = [analysis for analysis in checked if analysis.measures]
    subjects = _find_subjects(with_model, run, hf, accelerator, places) if with_model else {}
    for analysis in checked:
        if not analysis.measures:
            analysis.run(Path(str(output_dir)), None, overwrite=True)
    applied = set()
    for folder, load_subject in subjects.items():
        load_once = cache(load_subject)  # not called if all results exist
        for analysis in with_model:
            try:
                analysis.run(folder, load_once, overwrite)
                applied.add(analysis.name)
            except NotApplicableError as error:
                if len(subjects) == 1:
                    raise
                console().print(f"skipped: {error}", soft_wrap=True)
    if unused := [analysis.name for analysis in with_model if analysis.name not in applied]:
        raise UserError(f"analysis={','.join(unused)} applies to none of the {len(subjects)} runs")


def _check_analyses(analyses: dict[str, dict[str, Any]], inputs: Mapping[str, Any]) -> list[Analysis]:
    """Return the analyses with their inputs; `UserError` for an invalid setting or an unused input."""
    checked = []
    for name, settings in analyses.items():
        function = get_method(settings["_target_"])
        arguments = {key: value for key, value in settings.items() if key != "_target_"}
        check_arguments(f"analysis.{name}.", function, arguments, given={*MEASURED, *inputs})
        parameters = inspect.signature(function).parameters
        used = {key: value for key, value in inputs.items() if key in parameters}
        checked.append(Analysis(name, function, settings | used))
    for key, value in inputs.items():
        if value is not None and not any(key in analysis.settings for analysis in checked):
            raise UserError(f"{key}= does not apply to analysis={','.join(analyses)}: remove it")
    return checked


def _find_subjects(
    analyses: list[Analysis], run: str | None, hf: Requested | None, accelerator: str, places: DataPlaces
) -> dict[Path, Callable[[], Subject]]:
    """Return a function that loads each model, keyed by the folder of its results.

    Raises:
        UserError: no model is given, or an analysis cannot measure this kind of model.
    """
    if run is None and hf is None:
        names = ",".join(analysis.name for analysis in analyses)
        raise UserError(f"analysis={names} needs a model: set run=outputs/<name>/<run> or hf=FOLDER")
    for analysis in analyses:
        if analysis.measures == (TRAINED if hf else HF):
            raise UserError(f"analysis={analysis.name} needs {GIVE[analysis.measures]}")
    if hf:
        return {hf.require_results(): hf.load}
    return {path: partial(load, path, accelerator, places) for path in find_runs(Path(str(run)))}
