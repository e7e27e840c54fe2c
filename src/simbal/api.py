"""Train runs and sweeps from Python or a notebook, and read runs as rows or data frames.

    run = simbal.train(["balancing=lbl", "trainer.max_steps=300"])
    run.config.optim.lr, run.record["metrics"]["val/ppl"], run.curve.to_pandas(), run.model()

    sweep = simbal.sweep(["name=mine", "balancing=simbal,lbl", "seed=0-4"])
    sweep = simbal.load("outputs/mine")
    sweep.runs, sweep.curves, sweep.analyses, sweep.table      # rows: lists of dicts
    sweep.table.to_pandas(), sweep.curves.to_polars()          # or data frames

User errors raise `simbal.errors.UserError` with a one-sentence message. Only `train`, `sweep` and `Run.model` import
torch.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

from simbal.analysis.result import numbers_of
from simbal.commands import PYTHON_CALL
from simbal.config.schema import Config
from simbal.errors import INTERRUPTED, UserError
from simbal.report.arms import with_folders
from simbal.report.collect import collect, read_analyses, read_run
from simbal.report.render import tidy_rows
from simbal.report.runs import ListedRun, list_run, list_runs
from simbal.report.table import build
from simbal.runs import curves
from simbal.runs.folder import RunFolder, is_run
from simbal.runs.spec import RunSpec

if TYPE_CHECKING:
    from hydra._internal.hydra import Hydra

    from simbal.model.transformer import Transformer


class Rows(list[dict[str, Any]]):
    """Rows of a table: dicts with the same keys in the same order; a missing value is None."""

    def __init__(self, rows: Sequence[Mapping[str, Any]]) -> None:
        keys = dict.fromkeys(key for row in rows for key in row)
        super().__init__({key: row.get(key) for key in keys} for row in rows)

    def to_pandas(self) -> Any:
        """Return a `pandas.DataFrame`; `UserError` if pandas is not installed."""
        return _import("pandas").DataFrame(self)

    def to_polars(self) -> Any:
        """Return a `polars.DataFrame`; `UserError` if polars is not installed."""
        columns = {key: [row[key] for row in self] for key in (self[0] if self else ())}
        return _import("polars").DataFrame(columns, strict=False)


class Run:
    """A run folder: its config, status, record, curve and model."""

    def __init__(self, path: str | Path) -> None:
        """Open a run folder; `UserError` if it is not one."""
        self.path = Path(path)
        if not is_run(self.path):
            raise UserError(f"{self.path} is not a run: use outputs/<name>/<run>")

    def __repr__(self) -> str:
        return f"<Run {self.path}: {self.status}>"

    @property
    def status(self) -> str:
        """One of finished, failed, diverged, pruned, killed, running, unfinished and damaged."""
        return list_run(self.path).status

    @cached_property
    def config(self) -> Config:
        """The resolved config, such as `run.config.optim.lr`; `UserError` if its file is damaged."""
        return RunFolder(self.path).read_spec().config

    @property
    def record(self) -> dict[str, Any] | None:
        """The content of record.json: metrics, their definitions, versions; None before the run has ended.

        Raises:
            UserError: the record is damaged.
        """
        return RunFolder(self.path).read_record()

    @property
    def curve(self) -> Rows:
        """One row per logged step, with `train/ce`, `val/loss` and others, but no values per layer.

        Raises:
            UserError: metrics.jsonl is damaged.
        """
        return Rows(_read_curve(self.path))

    def model(self, accelerator: str = "cpu", data_dir: str | None = None) -> "Transformer":
        """Load the trained model in evaluation mode.

        Args:
            accelerator: auto, cpu or cuda.
            data_dir: folder of the prepared tokens, which define the vocabulary; None: data.cache_dir of the run.

        Raises:
            UserError: the run is not finished, its checkpoint is damaged, or its data are missing.
        """
        from simbal.analysis.trained import DataPlaces, load

        return load(self.path, accelerator, DataPlaces(cache_dir=data_dir)).model


class Sweep(Sequence[Run]):
    """The runs in a folder, as a sequence and as rows.

    Every row names its run by `folder`, `arm` (as the table labels it) and `seed`.
    """

    def __init__(self, path: str | Path) -> None:
        """Open outputs/<name> or the folder of one run; `UserError` if it contains no run."""
        self.path = Path(path)
        if not self._listed:
            raise UserError(f"{self.path} contains no runs: use outputs/<name>, or outputs/<name>/<run>")

    def __repr__(self) -> str:
        return f"<Sweep {self.path}: {len(self)} runs>"

    def __len__(self) -> int:
        return len(self._listed)

    @overload
    def __getitem__(self, index: int | str) -> Run: ...
    @overload
    def __getitem__(self, index: slice) -> list[Run]: ...
    def __getitem__(self, index: int | str | slice) -> Run | list[Run]:
        """Return a run by its index or the name of its folder, or several by a slice."""
        if isinstance(index, slice):
            return [Run(listed.path) for listed in self._listed[index]]
        if isinstance(index, str):
            names = [listed.path.name for listed in self._listed]
            if index not in names:
                raise UserError(f"{self.path} has no run {index}")
            index = names.index(index)
        return Run(self._listed[index].path)

    @property
    def runs(self) -> Rows:
        """One row per run: its status, its numbers if it is finished, and its config by dotted key."""
        return Rows([listed.values for listed in self._listed])

    @property
    def curves(self) -> Rows:
        """One row per run and logged step; `UserError` if a run's metrics.jsonl is damaged."""
        return Rows([_name_run(listed) | row for listed in self._listed for row in _read_curve(listed.path)])

    @property
    def analyses(self) -> Rows:
        """One row per run and number of an analysis: `analysis`, `number`, `layer` (None: all layers) and `value`.

        Raises:
            UserError: the result of an analysis is damaged.
        """
        return Rows(
            [
                _name_run(listed) | {"analysis": name, "number": number, "layer": layer, "value": value}
                for listed in self._listed
                for name, analysis in read_analyses(listed.path / "analysis").items()
                for number, layer, value in numbers_of(analysis)
            ]
        )

    @property
    def table(self) -> Rows:
        """One row per arm and metric of the table that report.py prints, as in table.csv.

        Raises:
            UserError: the runs cannot be compared in one table.
        """
        runs = [read_run(self.path)] if is_run(self.path) else collect(self.path)
        return Rows([*tidy_rows(build(self.path.resolve().name, runs))])

    @cached_property
    def _listed(self) -> list[ListedRun]:
        return list_runs([self.path])


def train(overrides: Sequence[str] = ()) -> Run:
    """Train a run in this process, as `simbal train` does, and return it.

    The same overrides resume an interrupted run and return a finished one at once.

    Args:
        overrides: such as `["balancing=lbl", "seed=1"]`, including `run=FOLDER` and `from=FOLDER`.

    Raises:
        UserError: an override is wrong, or the run cannot start, diverges or runs out of memory.
        KeyboardInterrupt: the user interrupts the run; its state is saved.
    """
    _check_overrides(overrides, "simbal.train", ("dry_run=true", "until=decided"))
    spec = _compose(overrides)
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # as in cli/train.py
    from simbal.training.run import train as train_spec
    from simbal.training.signals import StoppedError

    try:
        train_spec(spec)
    except StoppedError as stop:
        if stop.code == INTERRUPTED:  # a SystemExit would end a notebook's kernel
            raise KeyboardInterrupt(stop.sentence) from None
        raise
    return Run(spec.path)


def sweep(overrides: Sequence[str]) -> Sweep:
    """Run a sweep, as `simbal train -m` does: print its progress and its table, and return its runs.

    The same overrides skip finished runs and resume interrupted ones. A failed run does not stop the others: its status
    is in `Sweep.runs`, and `Sweep.table` lacks its values.

    Args:
        overrides: such as `["name=mine", "balancing=simbal,lbl", "seed=0-4"]`, including `sweeps=NAME`.

    Raises:
        UserError: an override is wrong, or the sweep cannot start.
        KeyboardInterrupt: the user interrupts the sweep; the state of its runs is saved.
    """
    from hydra.types import RunMode

    from simbal.cli.command_line import hydra_arguments
    from simbal.config import spans
    from simbal.config.messages import raise_config_errors

    _check_overrides(overrides, "simbal.sweep", ("dry_run=true", "run="))
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # as in cli/train.py
    PYTHON_CALL[:] = ["simbal", "train", "-m", *overrides]
    with raise_config_errors(overrides), _hydra() as hydra:
        for line in map(spans.read, overrides):
            if line.key_or_group in ("name", "output_dir") and line.is_sweep_override():
                raise UserError(f"{line.input_line}: simbal.sweep returns one sweep; call it once for each value")
        arguments = hydra_arguments(["-m", *overrides], "config")
        assert isinstance(arguments, list)
        config = hydra.compose_config("config", arguments[1:], RunMode.MULTIRUN, with_log_configuration=False)
        try:
            hydra.multirun("config", lambda _: None, arguments[1:], with_log_configuration=False)
        except SystemExit as end:  # some jobs failed; a SystemExit would end a notebook's kernel
            if not isinstance(end.code, str):
                raise
            print(end.code)
        return Sweep(Path(config.output_dir, config.name))


def load(folder: str | Path) -> Sweep:
    """Open the runs in outputs/<name>, or the single run in outputs/<name>/<run>; `UserError` if it contains none."""
    return Sweep(folder)


def _check_overrides(overrides: Sequence[str], function: str, refused: tuple[str, ...]) -> None:
    """Raise `UserError` unless `overrides` is a list of overrides without flags and `refused` ones."""
    if isinstance(overrides, str):
        raise UserError(f"{function} takes a list of overrides, such as [{overrides!r}]")
    for text in overrides:
        if text.startswith(("-", *refused)):
            raise UserError(f"{function} does not accept {text}: remove it, or use the command line")


@contextmanager
def _hydra() -> Iterator["Hydra"]:
    """Yield a Hydra that composes the configs of simbal, and restore the caller's afterwards."""
    import hydra
    from hydra.core.global_hydra import GlobalHydra

    from simbal.config.options import CONF

    outer = GlobalHydra.instance().hydra  # the caller may be a Hydra program itself
    GlobalHydra.instance().clear()
    try:
        with hydra.initialize_config_dir(str(CONF), version_base="1.3"):
            ours = GlobalHydra.instance().hydra
            assert ours
            yield ours
    finally:
        GlobalHydra.instance().hydra = outer


def _compose(overrides: Sequence[str]) -> RunSpec:
    """Return the run that overrides describe; `UserError` for a wrong one."""
    import hydra

    from simbal.cli.command_line import hydra_arguments
    from simbal.config.messages import raise_config_errors

    with raise_config_errors(overrides):
        arguments = hydra_arguments(overrides, "config")
        if not isinstance(arguments, list):
            return arguments  # the run that run= names
        with _hydra():
            composed = hydra.compose("config", arguments, return_hydra_config=True)
    return with_folders([RunSpec.from_hydra(composed)])[0]


def _name_run(listed: ListedRun) -> dict[str, Any]:
    """Return the columns that name the run of a row."""
    seed = listed.run.spec.config.seed if listed.run else None
    return {"folder": str(listed.path), "arm": listed.arm, "seed": seed}


def _read_curve(path: Path) -> list[dict[str, Any]]:
    return [{key: value for key, value in row.items() if key != "layers"} for row in curves.rows(path)]


def _import(name: str) -> Any:
    try:
        return import_module(name)
    except ImportError:
        raise UserError(f"{name} is not installed: pip install {name}") from None
