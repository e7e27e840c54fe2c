"""Runs from Python and notebooks: trains one as the command does, and reads what runs have left behind as rows.

    run = simbal.train(["balancing=lbl", "trainer.max_steps=300"])
    run.config.optim.lr, run.record["metrics"]["val/ppl"], run.curve.to_pandas(), run.model()

    sweep = simbal.load("outputs/default")
    sweep.runs, sweep.curves, sweep.analyses, sweep.table      # rows: lists of dicts
    sweep.table.to_pandas(), sweep.curves.to_polars()          # or a DataFrame

What a user gets wrong is a `simbal.errors.UserError`, one sentence. torch is imported by `train` and `Run.model` alone.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

from simbal.errors import INTERRUPTED, UserError

if TYPE_CHECKING:
    from simbal.config.schema import Config
    from simbal.model.transformer import Transformer
    from simbal.report.runs import ListedRun
    from simbal.runs.spec import RunSpec


class Rows(list[dict[str, Any]]):
    """Rows of a table: dicts that all have the same keys, in the same order; None where a row has no value."""

    def __init__(self, rows: Sequence[Mapping[str, Any]]) -> None:
        keys = dict.fromkeys(key for row in rows for key in row)
        super().__init__({key: row.get(key) for key in keys} for row in rows)

    def to_pandas(self) -> Any:
        """Return the rows as a `pandas.DataFrame`; `UserError` if pandas is not installed."""
        return _library("pandas").DataFrame(self)

    def to_polars(self) -> Any:
        """Return the rows as a `polars.DataFrame`; `UserError` if polars is not installed."""
        columns = {key: [row[key] for row in self] for key in (self[0] if self else ())}
        return _library("polars").DataFrame(columns, strict=False)


class Run:
    """A run, by its folder: how it was configured, how it ended, its curves and its model."""

    def __init__(self, path: str | Path) -> None:
        """Take the run in a folder; `UserError` if none is there."""
        from simbal.runs.folder import is_run

        self.path = Path(path)
        if not is_run(self.path):
            raise UserError(f"{self.path} is no run: give outputs/<name>/<run>")

    def __repr__(self) -> str:
        return f"<Run {self.path}: {self.status}>"

    @property
    def status(self) -> str:
        """How it ended, or what it is: finished, failed, diverged, pruned, killed, running, unfinished or damaged."""
        from simbal.report.runs import list_run

        return list_run(self.path).status

    @cached_property
    def config(self) -> "Config":
        """Its resolved config, such as `run.config.optim.lr`; `UserError` if its file is broken."""
        from simbal.runs.folder import RunFolder

        return RunFolder(self.path).read_spec().config

    @property
    def record(self) -> dict[str, Any] | None:
        """Its record.json: metrics, their definitions, versions, fingerprints of the data; None if it has not ended.

        Raises:
            UserError: the record is damaged.
        """
        from simbal.runs.folder import RunFolder

        return RunFolder(self.path).read_record()

    @property
    def curve(self) -> Rows:
        """What was logged, a row for each step that was: `train/ce`, `val/loss` and others; no values by layer.

        Raises:
            UserError: the file of the curves is broken.
        """
        return Rows(_logged(self.path))

    def model(self, accelerator: str = "cpu", data_dir: str | None = None) -> "Transformer":
        """Return the trained model in evaluation mode.

        Args:
            accelerator: auto, cpu or cuda.
            data_dir: the folder of the prepared tokens, which name the model's vocabulary; None: that of its config.

        Raises:
            UserError: the run is not finished, its checkpoint is damaged, or its data are nowhere.
        """
        from simbal.analysis.trained import DataPlaces, load

        return load(self.path, accelerator, DataPlaces(cache_dir=data_dir)).model


class Sweep(Sequence[Run]):
    """The runs in a folder: a sequence of them, and what they have left behind as rows.

    Every row says of which run it is by `folder`, `arm` (as the table labels it) and `seed`.
    """

    def __init__(self, path: str | Path) -> None:
        """Take outputs/<name>, or the folder of one run; `UserError` if there is no run."""
        self.path = Path(path)
        if not self._listed:
            raise UserError(f"{self.path} holds no runs: give outputs/<name>, or outputs/<name>/<run>")

    def __repr__(self) -> str:
        return f"<Sweep {self.path}: {len(self)} runs>"

    def __len__(self) -> int:
        return len(self._listed)

    @overload
    def __getitem__(self, place: int | str) -> Run: ...
    @overload
    def __getitem__(self, place: slice) -> list[Run]: ...
    def __getitem__(self, place: int | str | slice) -> Run | list[Run]:
        """Return a run by its place or the name of its folder, or several by a slice."""
        if isinstance(place, slice):
            return [Run(one.path) for one in self._listed[place]]
        if isinstance(place, int):
            return Run(self._listed[place].path)
        found = [one.path for one in self._listed if one.path.name == place]
        if not found:
            raise UserError(
                f"{self.path} has no run {place}: it has {', '.join(one.path.name for one in self._listed)}"
            )
        return Run(found[0])

    def __iter__(self) -> Iterator[Run]:
        return (Run(one.path) for one in self._listed)

    @property
    def runs(self) -> Rows:
        """A row for each run: how it ended, its numbers if it is finished, and its config by dotted key."""
        return Rows([one.values for one in self._listed])

    @property
    def curves(self) -> Rows:
        """A row for each logged step of each run; `UserError` if the curves of one are broken."""
        return Rows([_of(one) | row for one in self._listed for row in _logged(one.path)])

    @property
    def analyses(self) -> Rows:
        """A row for each number of each analysis of each run: `analysis`, `number`, `layer` (None: all) and `value`.

        Raises:
            UserError: an analysis is broken.
        """
        from simbal.analysis.result import numbers_of
        from simbal.report.collect import read_analyses

        return Rows(
            [
                _of(one) | {"analysis": name, "number": number, "layer": layer, "value": value}
                for one in self._listed
                for name, analysis in read_analyses(one.path / "analysis").items()
                for number, layer, value in numbers_of(analysis)
            ]
        )

    @property
    def table(self) -> Rows:
        """A row for each arm and metric of the table that report.py prints, as table.csv has them.

        Raises:
            UserError: the runs cannot stand in one table.
        """
        from simbal.report.collect import collect, read_run
        from simbal.report.columns import choose_columns, configured_columns
        from simbal.report.render import tidy_rows
        from simbal.report.table import build
        from simbal.runs.folder import is_run

        runs = [read_run(self.path)] if is_run(self.path) else collect(self.path)
        finished = [run for run in runs if run.finished]
        columns = configured_columns(finished)
        metrics = None if columns is None else choose_columns(columns, finished)
        return Rows([*tidy_rows(build(self.path.resolve().name, runs, metrics=metrics))])

    @cached_property
    def _listed(self) -> "list[ListedRun]":
        from simbal.report.runs import list_runs

        return list_runs([self.path])


def train(overrides: Sequence[str] = ()) -> Run:
    """Train the run that overrides describe, in this process, and return it; a finished one is returned at once.

    It is what `simbal train` does: the same checks, the same folder and record, and the same overrides given again go
    on with a run that was broken off.

    Args:
        overrides: such as `["balancing=lbl", "seed=1"]`; `run=FOLDER` and `from=FOLDER` among them.

    Raises:
        UserError: an override is wrong, the run cannot be done here, or it has diverged or run out of memory.
        KeyboardInterrupt: the user has interrupted it; it is saved.
    """
    spec = _composed(overrides)
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # as the command does, before torch is imported
    from simbal.training.run import train as train_spec
    from simbal.training.signals import StoppedError

    try:
        train_spec(spec)
    except StoppedError as stop:
        if stop.code == INTERRUPTED:  # a SystemExit would end the user's own program too
            raise KeyboardInterrupt(stop.sentence) from None
        raise
    return Run(spec.path)


def load(folder: str | Path) -> Sweep:
    """Return the runs in outputs/<name>, or the one run in outputs/<name>/<run>; `UserError` if there is none."""
    return Sweep(folder)


def _composed(overrides: Sequence[str]) -> "RunSpec":
    """Return the run that overrides describe; `UserError` for one that is wrong."""
    import hydra
    from hydra.core.global_hydra import GlobalHydra

    from simbal.cli.command_line import hydra_arguments
    from simbal.config.messages import raise_config_errors
    from simbal.config.options import CONF
    from simbal.runs.spec import RunSpec

    if isinstance(overrides, str):
        raise UserError(f"simbal.train takes a list of overrides, such as [{overrides!r}]")
    if flags := [text for text in overrides if text.startswith("-")]:
        raise UserError(f"{flags[0]} is no override: simbal.train trains one run; sweeps are for simbal train -m")
    with raise_config_errors(overrides):
        found = hydra_arguments(overrides, "config")
        if not isinstance(found, list):
            return found
        composed = None
        if "-m" not in found:  # a dry run of one run becomes that of a sweep
            outer = GlobalHydra.instance().hydra  # of a caller that is a Hydra program itself
            GlobalHydra.instance().clear()
            try:
                with hydra.initialize_config_dir(str(CONF), version_base="1.3"):
                    composed = hydra.compose("config", found, return_hydra_config=True)
            finally:
                GlobalHydra.instance().hydra = outer
    if composed is None or composed.until == "decided":
        raise UserError("dry_run=true and until=decided are for the command line: simbal.train trains one run")
    return RunSpec.from_hydra(composed)


def _of(listed: "ListedRun") -> dict[str, Any]:
    """Return what says of which run a row is."""
    seed = listed.run.seed if listed.run else None
    return {"folder": str(listed.path), "arm": listed.arm, "seed": seed}


def _logged(path: Path) -> list[dict[str, Any]]:
    from simbal.runs.curves import rows

    return [{key: value for key, value in row.items() if key != "layers"} for row in rows(path)]


def _library(name: str) -> Any:
    try:
        return import_module(name)
    except ImportError:
        raise UserError(f"{name} is not installed: pip install {name}") from None
