"""Experiment trackers beside metrics.jsonl: Lightning's loggers for TensorBoard, MLflow and Weights & Biases.

A row goes to MLflow or Weights & Biases once a checkpoint holds it, so that a resumed run sends no row twice and loses
none; `trackers.json` counts the rows that were sent. TensorBoard gets each row at once: its readers drop what a killed
run logged after the checkpoint. A tracker that fails does not stop the training.
"""

import json
import logging
import os
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from secrets import token_hex
from typing import Any

from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import Logger, MLFlowLogger, TensorBoardLogger, WandbLogger

from simbal.config.schema import MLFlowConfig, WandbConfig
from simbal.errors import UserError
from simbal.runs import curves
from simbal.runs.atomic import lock, write_json
from simbal.runs.spec import RunSpec, result_keys

log = logging.getLogger("simbal")
SENT_FILE = "trackers.json"  # in the run's folder: how many rows were sent, and the ids of the run


class Tracker(Callback):
    """Sends rows of metrics.jsonl, the config and the final metrics to the tracker that the config names."""

    def __init__(self, spec: RunSpec, step: int) -> None:
        """Open the tracker; `UserError` if it cannot be used.

        Args:
            spec: the run.
            step: the step from which it resumes, where metrics.jsonl ends; 0 at its start.
        """
        self.spec, self.kind = spec, spec.config.logger.kind
        self.saved = 0  # how many of the pending rows a checkpoint holds
        self.warning = ""  # a sentence if the tracker failed
        file, rows = spec.path / SENT_FILE, curves.rows(spec.path)
        known = json.loads(file.read_text()) if file.exists() else {}
        self.sent: dict[str, Any] = known if known.get("kind") == self.kind else {"kind": self.kind, "rows": 0}
        self.pending = rows[self.sent["rows"] :]
        if self.kind == "tensorboard":
            purge_step = step if (spec.path / "tensorboard").exists() else None  # readers drop what was logged after it
            self.logger: Logger | None = TensorBoardLogger(spec.path, "tensorboard", version="", purge_step=purge_step)
            self.pending = [row for row in rows if row["step"] >= (purge_step or 0)]
        else:
            self.logger = OPEN[self.kind](spec, self.sent)
            self._try(lambda logger: logger.log_hyperparams(result_keys(spec.written)))
        self._send()

    def add_row(self, row: dict[str, Any]) -> None:
        """Take a new row of metrics.jsonl."""
        self.pending.append(row)
        if self.kind == "tensorboard":
            self._send()

    def on_save_checkpoint(self, *_: Any) -> None:
        """Note which rows the checkpoint that is being saved holds."""
        self.saved = len(self.pending)

    def on_train_batch_start(self, *_: Any) -> None:
        """Send the rows that a checkpoint holds."""
        if self.saved:
            self._send(self.saved)

    def on_exception(self, *_: Any) -> None:
        """End the tracker's run as failed."""
        self._close("failed")

    def finish(self, metrics: Mapping[str, float | None]) -> None:
        """Send what is left and the final metrics, and end the tracker's run."""
        self._send()
        steps = self.spec.config.trainer.max_steps
        final = {f"final/{key}": value for key, value in metrics.items() if value is not None}
        if self.kind == "tensorboard":  # its HParams tab needs config and final metrics together
            keys = result_keys(self.spec.written)
            self._try(lambda logger: logger.log_hyperparams(keys, final, steps))
        else:
            self._try(lambda logger: logger.log_metrics(final, steps))
        self._close("success")

    def _send(self, count: int | None = None) -> None:
        """Send the first `count` of the pending rows, or all; after a failure none, which a resumed run then sends."""
        number = len(self.pending) if count is None else count
        due, self.pending, self.saved = self.pending[:number], self.pending[number:], 0
        for row in due:
            self._try(lambda logger, row=row: logger.log_metrics(scalars(row), row["step"]))  # type: ignore[misc]
            if self.logger is None:
                return
            self.sent["rows"] += 1
            if self.kind != "tensorboard":
                write_json(self.spec.path / SENT_FILE, self.sent)

    def _close(self, status: str) -> None:
        self._try(lambda logger: logger.finalize(status))
        if isinstance(self.logger, WandbLogger):
            self._try(lambda logger: logger.experiment.finish(exit_code=int(status == "failed")))
        self.logger = None

    def _try(self, use: Callable[[Any], None]) -> None:
        """Use the logger; after an error, of whichever library, nothing more is sent."""
        try:
            if self.logger is not None:
                use(self.logger)
        except Exception as error:
            reason = f"{type(error).__name__}: {str(error).partition(chr(10))[0]:.200}"
            sent = self.sent["rows"]
            self.warning = f"logger={self.kind} failed after {sent} rows ({reason}); metrics.jsonl has all rows"
            log.warning("%s", self.warning)
            self.logger = None


def scalars(row: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers of a row of metrics.jsonl that can be drawn, by name."""
    return {key: value for key, value in row.items() if isinstance(value, int | float) and key != "step"}


def _mlflow(spec: RunSpec, sent: dict[str, Any]) -> Logger:
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")  # read when it is imported
    from mlflow.exceptions import MlflowException

    keys, output_dir = spec.config.logger, Path(spec.config.output_dir).resolve()
    assert isinstance(keys, MLFlowConfig)
    uri = keys.tracking_uri or f"sqlite:///{output_dir / 'mlflow.db'}"
    logging.getLogger("mlflow").setLevel(logging.WARNING)
    # the first of several jobs makes the tables and the experiment
    with lock(output_dir / ".mlflow.lock", timeout=-1), warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of sqlalchemy, for what mlflow does
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


def _wandb(spec: RunSpec, sent: dict[str, Any]) -> Logger:
    os.environ.setdefault("WANDB_ERROR_REPORTING", "false")  # reports of its own errors, before it is imported
    import wandb

    keys = spec.config.logger
    assert isinstance(keys, WandbConfig)
    sent.setdefault("id", token_hex(8))
    logger = WandbLogger(
        name=spec.path.name.rpartition("-")[0],  # arm and seed, without the hash
        group=spec.config.name,
        project=keys.project,
        entity=keys.entity,
        tags=[*spec.choices.values()],
        id=sent["id"],
        save_dir=spec.path,
        offline=keys.offline,
        resume=None if keys.offline else "allow",
        save_code=False,
        settings=wandb.Settings(console="off", silent=True),
    )
    logger.experiment  # noqa: B018  # starts the run
    return logger


OPEN: dict[str, Callable[[RunSpec, dict[str, Any]], Logger]] = {"mlflow": _mlflow, "wandb": _wandb}
