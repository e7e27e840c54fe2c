"""Loggers that write curves besides metrics.jsonl: TensorBoard, a CSV file, MLflow or Weights & Biases.

All of them get the rows of metrics.jsonl, the config once and the final metrics at the end; none has a part in the
training, which goes on without MLflow or Weights & Biases if they fail. When a run goes on from a checkpoint, so does
what it logged:

    tensorboard  what a killed process logged after the checkpoint is marked as replaced
    csv          the file is written anew from metrics.jsonl
    mlflow       the same run goes on; what it has of a step already is not logged again
    wandb        offline, the folder is written anew under the same id. Online, the same run goes on, and steps after
                 the checkpoint appear twice: nothing that has been sent can be taken back
"""

import logging
import os
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from secrets import token_hex
from typing import Any, ClassVar

import lightning as L
import orjson
from lightning.pytorch.loggers import CSVLogger, Logger, MLFlowLogger, TensorBoardLogger, WandbLogger

from simbal.config.schema import MLFlowConfig, WandbConfig
from simbal.distributed import is_first
from simbal.errors import UserError
from simbal.files.disk import write_json
from simbal.files.locks import lock
from simbal.runs.spec import RunSpec, result_keys

log = logging.getLogger("simbal")
IDS_FILE = "logger.json"  # in the run's folder: its ids where it is logged
Built = tuple[Logger, int]  # and the first step whose rows it lacks


def attach(
    trainer: L.Trainer, spec: RunSpec, folder: Path, step: int, rows: Callable[[], list[dict[str, Any]]]
) -> None:
    """Give the trainer of the first rank the logger that the config names.

    Args:
        trainer: the one that logs from now on.
        spec: the run.
        folder: the run's.
        step: where the run goes on; 0 at its start.
        rows: reads those of metrics.jsonl, which end there.
    """
    kind = spec.config.logger.kind
    if kind == "none" or not is_first():
        return
    logger, lacking = BUILDERS[kind](spec, folder, step)
    if kind != "tensorboard":  # whose tab HParams wants the final metrics with them
        logger.log_hyperparams(result_keys(spec.written))
    for row in rows():
        if row["step"] >= lacking:
            logger.log_metrics(scalars(row), row["step"])
    trainer.logger = logger


def scalars(row: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers of a row of metrics.jsonl that can be drawn, by name."""
    return {key: value for key, value in row.items() if isinstance(value, int | float) and key != "step"}


def finish(trainer: L.Trainer, spec: RunSpec, metrics: Mapping[str, float | None]) -> list[str]:
    """Log the final metrics, end the logger's run, and return a sentence if something could not be logged."""
    logger, step = trainer.logger, spec.config.trainer.max_steps
    if logger is None:
        return []
    final = {f"final/{key}": value for key, value in metrics.items() if value is not None}
    if isinstance(logger, TensorBoardLogger):
        logger.log_hyperparams(result_keys(spec.written), final, step)
    else:
        logger.log_metrics(final, step)
    logger.finalize("success")
    if isinstance(logger, _WandbLogger):
        logger.end()
    return [logger.lost] if isinstance(logger, _ServedLogger) and logger.lost else []


def _tensorboard(spec: RunSpec, folder: Path, step: int) -> Built:
    purge_step = step if (folder / "tensorboard").exists() else None  # readers drop what was logged from there on
    return TensorBoardLogger(folder, "tensorboard", version="", purge_step=purge_step), purge_step or 0


def _csv(spec: RunSpec, folder: Path, step: int) -> Built:
    return CSVLogger(folder, "csv", version="", flush_logs_every_n_steps=1), 0  # removes the file that is there


def _mlflow(spec: RunSpec, folder: Path, step: int) -> Built:
    """Open the run in MLflow that has the folder's id, or make one; `UserError` if the store cannot be used."""
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")  # read when it is imported
    from mlflow.exceptions import MlflowException
    from mlflow.tracking import MlflowClient

    keys, output_dir = spec.config.logger, Path(spec.config.output_dir).resolve()
    assert isinstance(keys, MLFlowConfig)
    tracking_uri = keys.tracking_uri or f"sqlite:///{output_dir / 'mlflow.db'}"
    artifacts = (output_dir / "mlflow").as_uri() if keys.tracking_uri is None else None  # of which we log none
    logging.getLogger("mlflow").setLevel(logging.WARNING)
    # the first of several jobs makes the tables and the experiment
    with lock(output_dir / ".mlflow.lock", timeout=-1), warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of sqlalchemy, for what mlflow does
        try:
            client = MlflowClient(tracking_uri)
            run_id = _ids(folder).get("mlflow")
            if run_id is None or not _is_in_mlflow(client, run_id):
                name = keys.experiment or spec.config.name
                found = client.get_experiment_by_name(name)
                experiment = found.experiment_id if found else client.create_experiment(name, artifacts)
                run_id = str(client.create_run(experiment, run_name=folder.name).info.run_id)
            client.update_run(run_id, status="RUNNING")
        except MlflowException as error:
            sentence = str(error).splitlines()[0]
            raise UserError(f"logger.tracking_uri={tracking_uri} cannot be used: {sentence}") from None
    _remember(folder, "mlflow", run_id)
    return _MLFlowLogger(tracking_uri=tracking_uri, run_id=run_id), 0


def _is_in_mlflow(client: Any, run_id: str) -> bool:
    from mlflow.exceptions import MlflowException

    try:
        return bool(client.get_run(run_id).info.lifecycle_stage == "active")
    except MlflowException as error:
        if error.error_code != "RESOURCE_DOES_NOT_EXIST":
            raise
        return False


class _ServedLogger(Logger):
    """A logger whose server may fail while a run trains: from then on nothing is logged there, and the run says so."""

    server: ClassVar[str]
    lost = ""  # a sentence, once that has happened

    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        """Log the config."""
        with self.losing("of this run"):
            super().log_hyperparams(params, *args, **kwargs)  # type: ignore[safe-super]

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Log metrics, if nothing is lost yet; called by Lightning."""
        if not self.lost:
            with self.losing(f"from step {step} on"):
                super().log_metrics(dict(metrics), step)  # type: ignore[safe-super]

    def finalize(self, status: str = "success") -> None:
        """Say how the run stands; called by Lightning, also while it fails for another reason."""
        if not self.lost:
            with self.losing("of its end"):
                super().finalize(status)

    @contextmanager
    def losing(self, what: str) -> Iterator[None]:
        """Keep the sentence of an error within the block, instead of raising it."""
        try:
            yield
        except Exception as error:  # of requests, a database or a process: each library has its own
            said = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
            self.lost = self.lost or f"{self.server} has nothing {what} ({said:.200}); metrics.jsonl has it"
            log.warning("%s", self.lost)


class _NewMetrics(MLFlowLogger):
    """A logger that leaves out what the store already has of a metric at a step, as the store keeps duplicates."""

    @cached_property
    def logged(self) -> set[tuple[str, int]]:
        """The (metric, step) pairs that were there when the run was opened."""
        client, run_id = self.experiment, self.version
        return {
            (key, metric.step)
            for key in client.get_run(run_id).data.metrics
            for metric in client.get_metric_history(run_id, key)
        }

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Log the metrics that are new at this step."""
        if new := {key: value for key, value in metrics.items() if (key, step) not in self.logged}:
            super().log_metrics(new, step)


class _MLFlowLogger(_ServedLogger, _NewMetrics):
    """The logger of a run in MLflow."""

    server = "MLflow"


def _wandb(spec: RunSpec, folder: Path, step: int) -> Built:
    os.environ.setdefault("WANDB_ERROR_REPORTING", "false")  # reports of its own errors, before it is imported
    import wandb

    keys = spec.config.logger
    assert isinstance(keys, WandbConfig)
    if (run_id := _ids(folder).get("wandb")) is None:
        run_id = token_hex(8)
        _remember(folder, "wandb", run_id)
    if keys.offline:
        shutil.rmtree(folder / "wandb", ignore_errors=True)
    run = wandb.init(
        project=keys.project,
        name=folder.name,
        id=run_id,
        dir=folder,
        mode="offline" if keys.offline else "online",
        resume=None if keys.offline else "allow",
        save_code=False,
        settings=wandb.Settings(console="off", silent=True),
    )
    run.define_metric("trainer/global_step")
    run.define_metric("*", step_metric="trainer/global_step", step_sync=True)
    return _WandbLogger(experiment=run), 0 if keys.offline or not step else step + 1


class _WandbLogger(_ServedLogger, WandbLogger):
    """A logger that ends its run when training fails, so that the process that writes it ends too."""

    server = "Weights & Biases"

    def finalize(self, status: str = "success") -> None:
        """End the run if it has failed; called by Lightning."""
        super().finalize(status)
        if status == "failed":
            self.end(exit_code=1)

    def end(self, exit_code: int = 0) -> None:
        """End the run."""
        with self.losing("of its end"):
            self.experiment.finish(exit_code=exit_code)


BUILDERS: dict[str, Callable[[RunSpec, Path, int], Built]] = {
    "tensorboard": _tensorboard,
    "csv": _csv,
    "mlflow": _mlflow,
    "wandb": _wandb,
}


def _ids(folder: Path) -> dict[str, str]:
    try:
        return dict(orjson.loads((folder / IDS_FILE).read_bytes()))
    except (OSError, ValueError, TypeError):  # absent or damaged: it is logged under a new id
        return {}


def _remember(folder: Path, kind: str, run_id: str) -> None:
    write_json(folder / IDS_FILE, _ids(folder) | {kind: run_id})
