"""TensorBoard, MLflow and Weights & Biases: Lightning's loggers, which receive the rows of metrics.jsonl.

MLflow and Weights & Biases receive a row once a checkpoint covers it, so that a resumed run neither repeats nor loses
rows; trackers.json counts the sent rows. TensorBoard receives each row at once: its readers drop rows that a killed run
logged after the checkpoint. A failing tracker does not stop training.
"""

import json
import logging
import os
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from secrets import token_hex
from typing import Any

from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import MLFlowLogger, TensorBoardLogger, WandbLogger

from simbal.config.schema import MLFlowConfig, WandbConfig
from simbal.distributed import is_rank_zero
from simbal.errors import UserError
from simbal.runs import curves
from simbal.runs.atomic import lock, write_json
from simbal.runs.spec import RunSpec, result_keys

log = logging.getLogger("simbal")
MAX_WANDB_TAG, MAX_WANDB_GROUP = 64, 128  # characters
SENT_FILE = "trackers.json"  # in the run's folder: the number of sent rows, and the tracker's run id


class Tracker(Callback):
    """Sends the config, the rows of metrics.jsonl and the final metrics to the tracker named in the config.

    It does nothing with logger=none and on ranks other than rank zero.
    """

    def __init__(self, spec: RunSpec) -> None:
        self.spec, self.kind, self.sent_file = spec, spec.config.logger.kind, spec.path / SENT_FILE
        self.logger: Any = None  # while the tracker is open
        self.pending: list[dict[str, Any]] = []  # rows not yet sent
        self.num_saved = 0  # number of pending rows that a checkpoint covers
        self.repeated = 0  # number of following rows that an earlier attempt has sent
        self.warnings: list[str] = []

    def open(self, step: int) -> None:
        """Open the tracker for a run that resumes from `step`, and send the rows that it has not received.

        Raises:
            UserError: MLflow cannot be used.
        """
        if self.kind == "none" or not is_rank_zero():
            return
        rows = curves.rows(self.spec.path)
        saved = json.loads(self.sent_file.read_text()) if self.sent_file.exists() else {}
        self.sent: dict[str, Any] = saved if saved.get("kind") == self.kind else {"kind": self.kind, "rows": 0}
        if self.kind == "tensorboard":
            purge_step = step if (self.spec.path / "tensorboard").exists() else None
            self.logger = TensorBoardLogger(self.spec.path, "tensorboard", version="", purge_step=purge_step)
            self.pending = [row for row in rows if row["step"] >= (purge_step or 0)]
        else:
            self.pending = rows[self.sent["rows"] :]
            self.repeated = max(0, self.sent["rows"] - len(rows))  # of a checkpoint that was damaged since
            self.logger = (open_mlflow if self.kind == "mlflow" else open_wandb)(self.spec, self.sent)
            write_json(self.sent_file, self.sent)  # if the run crashes now, it resumes under the same id
            with self.tolerate_errors():
                self.logger.log_hyperparams(result_keys(self.spec.written))
        self._send(len(self.pending))

    def add_row(self, row: dict[str, Any]) -> None:
        """Take a new row of metrics.jsonl."""
        if self.repeated:
            self.repeated -= 1
        elif self.logger is not None:
            self.pending.append(row)
            if self.kind == "tensorboard":
                self._send(1)

    def on_save_checkpoint(self, *_: Any) -> None:
        """Mark the pending rows as covered by the checkpoint."""
        self.num_saved = len(self.pending)

    def on_train_batch_start(self, *_: Any) -> None:
        """Send the rows that the latest checkpoint covers."""
        if self.num_saved:
            self._send(self.num_saved)

    def on_exception(self, *_: Any) -> None:
        """Mark the tracker's run as failed."""
        self._close("failed")

    def finish(self, metrics: Mapping[str, float | None]) -> None:
        """Send the remaining rows and the final metrics, and mark the tracker's run as finished."""
        self._send(len(self.pending))
        steps = self.spec.config.trainer.max_steps
        final = {f"final/{key}": value for key, value in metrics.items() if value is not None}
        if self.logger is not None:
            with self.tolerate_errors():
                if self.kind == "tensorboard":  # its HParams tab needs config and final metrics together
                    self.logger.log_hyperparams(result_keys(self.spec.written), final, steps)
                else:
                    self.logger.log_metrics(final, steps)
        self._close("success")

    def _send(self, count: int) -> None:
        """Send the first `count` pending rows; after a failure send nothing, so that a resumed run sends them."""
        rows, self.pending, self.num_saved = self.pending[:count], self.pending[count:], 0
        if not rows or self.logger is None:
            return
        with self.tolerate_errors():
            for row in rows:
                numbers = {key: value for key, value in row.items() if isinstance(value, int | float) and key != "step"}
                self.logger.log_metrics(numbers, row["step"])
                self.sent["rows"] += 1
                if self.kind != "tensorboard":
                    write_json(self.sent_file, self.sent)

    def _close(self, status: str) -> None:
        if self.logger is not None:
            with self.tolerate_errors():
                self.logger.finalize(status)
                if isinstance(self.logger, WandbLogger):
                    self.logger.experiment.finish(exit_code=int(status == "failed"))
            self.logger = None

    @contextmanager
    def tolerate_errors(self) -> Iterator[None]:
        """Turn any error of the tracker within the block into a warning, and close the tracker."""
        try:
            yield
        except Exception as error:  # each library raises its own errors
            reason = f"{type(error).__name__}: {str(error).partition(chr(10))[0]:.200}"
            rows = self.sent["rows"]
            self.warnings.append(f"logger={self.kind} failed after {rows} rows ({reason}); metrics.jsonl has all rows")
            log.warning("%s", self.warnings[-1])
            self.logger = None


def open_mlflow(spec: RunSpec, sent: dict[str, Any]) -> MLFlowLogger:
    """Start or continue an MLflow run, and store its id in `sent`; `UserError` if the server cannot be used."""
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")  # must be set before the import
    from mlflow.exceptions import MlflowException

    keys, output_dir = spec.config.logger, Path(spec.config.output_dir).resolve()
    assert isinstance(keys, MLFlowConfig)
    uri = keys.tracking_uri or f"sqlite:///{output_dir / 'mlflow.db'}"
    logging.getLogger("mlflow").setLevel(logging.WARNING)
    # only one of several jobs may create the tables and the experiment
    with lock(output_dir / ".mlflow.lock", timeout=-1), warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of sqlalchemy, caused by mlflow
        try:
            logger = MLFlowLogger(
                keys.experiment or spec.config.name,
                run_name=spec.path.name,
                tracking_uri=uri,
                artifact_location=None if keys.tracking_uri else (output_dir / "mlflow").as_uri(),
                run_id=sent.get("id"),
            )
            sent["id"] = logger.run_id
            logger.experiment.update_run(sent["id"], status="RUNNING")
        except MlflowException as error:
            raise UserError(f"logger.tracking_uri={uri} cannot be used: {str(error).splitlines()[0]}") from None
    return logger


def open_wandb(spec: RunSpec, sent: dict[str, Any]) -> WandbLogger:
    """Start or continue a Weights & Biases run, and store its id in `sent`."""
    os.environ.setdefault("WANDB_ERROR_REPORTING", "false")  # must be set before the import
    import wandb

    keys = spec.config.logger
    assert isinstance(keys, WandbConfig)
    sent.setdefault("id", token_hex(8))
    logger = WandbLogger(
        name=spec.path.name.rpartition("-")[0],  # arm and seed, without the hash
        group=f"{spec.config.name}/{spec.arm}"[:MAX_WANDB_GROUP],
        project=keys.project,
        entity=keys.entity,
        tags=[tag[:MAX_WANDB_TAG] for tag in dict.fromkeys((spec.config.name, spec.arm, *spec.choices.values()))],
        id=sent["id"],
        save_dir=spec.path,
        offline=keys.offline,
        resume=None if keys.offline else "allow",
        save_code=False,
        settings=wandb.Settings(console="off", silent=True),
    )
    logger.experiment  # noqa: B018  # starts the run
    return logger
