"""Trackers do not change a run, and receive every row exactly once, even after a crash."""

import json

import pytest
from lightning.pytorch.loggers import MLFlowLogger, WandbLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.hparams import metadata
from tensorboard.summary.writer import event_file_writer

from simbal.report.arms import with_folders
from simbal.runs.folder import RunFolder
from simbal.training.module import LitMoE
from simbal.training.run import train
from simbal.training.trackers import SENT_FILE
from tests.conftest import MARKOV, SMALL
from tests.programs import run
from tests.training.logged import expected, logged, mlflow_client, wandb_records
from tests.training.run_files import assert_same_run, rows

MLFLOW = pytest.param("mlflow", marks=pytest.mark.slow)  # creates the tables of a database
WANDB = pytest.param("wandb", marks=pytest.mark.slow)  # starts a process of its own
KINDS = ("tensorboard", MLFLOW, WANDB)


@pytest.fixture(autouse=True)
def first_files(monkeypatch):
    """TensorBoard sorts its files by name, 10 before 9 of one process; only tests write so many."""
    monkeypatch.setattr(event_file_writer, "_global_uid", event_file_writer.AtomicCounter(0))


@pytest.fixture(scope="module")
def outputs(tmp_path_factory):
    """One `output_dir` for all tests, because MLflow takes more than a second to create its tables."""
    return tmp_path_factory.mktemp("outputs")


@pytest.fixture
def tracked_spec(small_spec, tmp_path, outputs):
    """Like `small_spec`, with a different name."""
    return lambda *keys: small_spec(f"name={tmp_path.name}", *keys, output_dir=outputs)


def crash(monkeypatch, spec, step: int) -> None:
    """Train until an error in a step, after rows that no checkpoint holds."""
    original = LitMoE.training_step

    def training_step(self, *args):
        if self.global_step == step:
            raise RuntimeError("broken")
        return original(self, *args)

    with monkeypatch.context() as patch:
        patch.setattr(LitMoE, "training_step", training_step)
        with pytest.raises(RuntimeError, match="broken"):
            train(spec)


def run_id(spec) -> str:
    return json.loads((spec.path / SENT_FILE).read_text())["id"]


@pytest.mark.parametrize("kind", KINDS)
def test_tracking_does_not_change_the_run_and_logs_every_row_the_config_and_the_result(tracked_spec, finished, kind):
    plain, spec = finished(), tracked_spec(f"logger={kind}")
    assert (plain.hash, plain.path.name) == (spec.hash, spec.path.name)
    train(spec)
    assert_same_run(plain, spec)
    points, config = logged(spec)
    assert points == expected(spec)
    assert ("final/val/ppl", 12) in {(key, step) for key, step, _ in points}
    config = config or hparams(spec)
    assert float(config["balancing.simbal.coef"]) == 0.1
    assert int(config["seed"]) == 0
    assert not [key for key in config if "dir" in key or "path" in key]


def hparams(spec) -> dict:
    """Return the config in TensorBoard's HParams tab, which shows the final metrics too."""
    events = EventAccumulator(str(spec.path / "tensorboard")).Reload()
    start = events.SummaryMetadata(metadata.SESSION_START_INFO_TAG).plugin_data.content
    experiment = events.SummaryMetadata(metadata.EXPERIMENT_TAG).plugin_data.content
    metrics = {info.name.tag for info in metadata.parse_experiment_plugin_data(experiment).metric_infos}
    assert {"final/val/loss", "final/val/ppl", "final/val/unique_experts"} <= metrics
    values = metadata.parse_session_start_info_plugin_data(start).hparams
    return {key: value.ListFields()[0][1] for key, value in values.items()}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("every", "step"), [(4, 7), (6, 7), (4, 3)])
def test_a_run_that_crashes_and_resumes_has_every_row_once(tracked_spec, finished, monkeypatch, kind, every, step):
    """A checkpoint of step 6 does not hold the validation after step 6; step 3 is before the first checkpoint."""
    reference, spec = finished(), tracked_spec(f"logger={kind}", f"trainer.ckpt_every={every}")
    crash(monkeypatch, spec, step)
    before = run_id(spec) if kind != "tensorboard" else ""
    train(spec)
    assert_same_run(reference, spec)
    assert logged(spec)[0] == expected(spec) == expected(reference)
    if kind != "tensorboard":
        assert run_id(spec) == before


@pytest.mark.parametrize("kind", [MLFLOW, WANDB])
def test_rows_after_a_damaged_checkpoint_are_not_sent_twice(tracked_spec, monkeypatch, kind):
    spec = tracked_spec(f"logger={kind}", "trainer.ckpt_every=2")
    crash(monkeypatch, spec, 7)
    (spec.path / "checkpoints" / "step-00000006.ckpt").write_bytes(b"")
    train(spec)
    assert logged(spec)[0] == expected(spec)


@pytest.mark.parametrize("kind", KINDS)
def test_a_tracker_chosen_on_resume_has_all_rows(tracked_spec, monkeypatch, kind):
    crash(monkeypatch, tracked_spec("logger=none"), 7)
    spec = tracked_spec(f"logger={kind}")
    train(spec)
    assert logged(spec)[0] == expected(spec)


@pytest.mark.slow
def test_a_failing_server_does_not_stop_a_run_and_the_resumed_run_sends_what_it_lost(
    tracked_spec, finished, monkeypatch, capsys, outputs, tmp_path
):
    spec, log_metrics = tracked_spec("logger=mlflow"), MLFlowLogger.log_metrics

    def fail(self, metrics, step=None):
        if step == 2:
            raise ConnectionError("no route to the host\nsecond line")
        log_metrics(self, metrics, step)

    client = mlflow_client(outputs)

    def runs():
        return client.search_runs([client.get_experiment_by_name(tmp_path.name).experiment_id])

    with monkeypatch.context() as patch:
        patch.setattr(MLFlowLogger, "log_metrics", fail)
        crash(patch, spec, 7)
    crash(monkeypatch, spec, 9)
    assert [run.info.status for run in runs()] == ["FAILED"]
    train(spec)
    assert logged(spec)[0] == expected(spec)
    assert [(run.info.status, run.info.run_name) for run in runs()] == [("FINISHED", spec.path.name)]
    other = tracked_spec("logger=mlflow", "seed=1", "trainer.max_steps=4")
    monkeypatch.setattr(MLFlowLogger, "log_metrics", fail)
    train(other)
    (warning,) = RunFolder(other.path).read_record()["warnings"]
    assert "logger=mlflow" in warning
    assert "(ConnectionError: no route to the host)" in warning
    assert f"warning: {warning}\n" in capsys.readouterr().out


@pytest.mark.slow
def test_wandb_names_a_run_by_its_arm_and_gets_a_row_once_a_checkpoint_holds_it(small_spec, monkeypatch):
    sent = []
    monkeypatch.setattr(WandbLogger, "log_metrics", lambda self, metrics, step=None: sent.append(step))
    (spec,) = with_folders([small_spec("logger=wandb", "logger.project=ours")], ["balancing", "optim.lr"])
    crash(monkeypatch, spec, 9)
    assert sent == [row["step"] for row in rows(spec) if row["step"] <= 8]  # steps 4 and 8 have a checkpoint
    (file,) = spec.path.glob("wandb/offline-run-*/*.wandb")
    assert file.parent.name.endswith(run_id(spec))
    (run,) = [record.run for record in wandb_records(file) if record.HasField("run")][:1]
    assert (run.project, run.run_group) == ("ours", "default/simbal-lr_0.01")
    assert run.display_name == "simbal-lr_0.01-seed0"
    assert {"default", "simbal-lr_0.01", "simbal"} <= {*run.tags}


@pytest.mark.slow
@pytest.mark.usefixtures("forked_ranks")
def test_only_rank_zero_logs(small_spec):
    spec = small_spec("logger=tensorboard", "trainer.devices=2", "trainer.strategy=ddp", "trainer.micro_batch=4")
    train(spec)
    assert logged(spec)[0] == expected(spec)


@pytest.mark.slow
def test_jobs_of_a_sweep_share_one_mlflow_store(tmp_path, cache_dir):
    places = (f"output_dir={tmp_path}", f"data.cache_dir={cache_dir}")
    keys = (*SMALL, *MARKOV, *places, "logger=mlflow", "seed=0,1", "name=two", "trainer.max_steps=2")
    done = run("train.py", "-m", *keys, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    client = mlflow_client(tmp_path)
    runs = client.search_runs([client.get_experiment_by_name("two").experiment_id])
    assert sorted(run.info.status for run in runs) == ["FINISHED", "FINISHED"]
    assert sorted(run.data.params["seed"] for run in runs) == ["0", "1"]
