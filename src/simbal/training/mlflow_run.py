"""A run in MLflow that goes on where it was, under its own id, without logging anything twice."""

import logging
import os
import warnings
from collections.abc import Mapping
from functools import cached_property

os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")  # read when it is imported

from lightning.pytorch.loggers import MLFlowLogger
from mlflow.exceptions import MlflowException
from mlflow.tracking import MlflowClient

from simbal.errors import UserError


def open_run(tracking_uri: str, experiment: str, artifacts: str | None, name: str, run_id: str | None) -> "MLFlowRun":
    """Return the run with this id, or a new one if there is none.

    Args:
        tracking_uri: the store: sqlite:///FILE or a server.
        experiment: its name; it is made if there is none.
        artifacts: where a new experiment is to keep files, of which we log none; None: the store's own choice.
        name: the name of a new run.
        run_id: the id that the run had; None at its start.

    Raises:
        UserError: the store cannot be used.
    """
    logging.getLogger("mlflow").setLevel(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of sqlalchemy, for what mlflow does
            client = MlflowClient(tracking_uri)
            known = run_id if run_id is not None and _is_there(client, run_id) else None
            known = known or _new_run(client, experiment, artifacts, name)
            client.update_run(known, status="RUNNING")
    except MlflowException as error:
        sentence = str(error).splitlines()[0]
        raise UserError(f"logger.tracking_uri={tracking_uri} cannot be used: {sentence}") from None
    return MLFlowRun(tracking_uri=tracking_uri, run_id=known)


def _new_run(client: MlflowClient, experiment: str, artifacts: str | None, name: str) -> str:
    found = client.get_experiment_by_name(experiment)
    place = found.experiment_id if found else client.create_experiment(experiment, artifact_location=artifacts)
    return str(client.create_run(place, run_name=name).info.run_id)


def _is_there(client: MlflowClient, run_id: str) -> bool:
    try:
        return bool(client.get_run(run_id).info.lifecycle_stage == "active")
    except MlflowException as error:
        if error.error_code != "RESOURCE_DOES_NOT_EXIST":
            raise
        return False


class MLFlowRun(MLFlowLogger):
    """Lightning's logger, which leaves out what the store already has of a metric at a step.

    The store keeps duplicates, and removes nothing.
    """

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
        """Log the metrics that are new at this step; called by Lightning."""
        if new := {key: value for key, value in metrics.items() if (key, step) not in self.logged}:
            super().log_metrics(new, step)
