"""Whatever the logger, the run is the same, it has every row once, it goes on where it was, and it asks no network."""

import json

import pytest
from lightning.pytorch.loggers import MLFlowLogger, WandbLogger
from tensorboard.summary.writer import event_file_writer

from simbal.runs.folder import RunFolder
from simbal.training.module import LitMoE
from simbal.training.run import train
from simbal.training.trackers import SENT_FILE
from tests.conftest import MARKOV, SMALL
from tests.programs import run
from tests.training.logged import expected, logged, mlflow_client, records
from tests.training.run_files import assert_same_run, rows

MLFLOW = pytest.param("mlflow", marks=pytest.mark.slow)  # makes the tables of a database
WANDB = pytest.param("wandb", marks=pytest.mark.slow)  # starts a process of its own
KINDS = ("tensorboard", MLFLOW, WANDB)
HOME = {"mlflow": "sqlite", "wandb": "offline"}  # where the two keep a run that nobody has asked them to send


@pytest.fixture(autouse=True)
def first_files(monkeypatch):
    """TensorBoard reads files by name, 10 before 9 of one second and process: only tests have so many."""
    monkeypatch.setattr(event_file_writer, "_global_uid", event_file_writer.AtomicCounter(0))


@pytest.fixture(scope="module")
def outputs(tmp_path_factory):
    """The `output_dir` of `logging_spec`, with a store of MLflow, whose tables take more than a second to make."""
    return tmp_path_factory.mktemp("outputs")


@pytest.fixture
def logging_spec(small_spec, tmp_path, outputs):
    """As `small_spec`, in the experiment `tmp_path.name`, so that no two tests have a run in common."""
    return lambda *keys: small_spec(f"name={tmp_path.name}", *keys, output_dir=outputs)


def break_at(monkeypatch, step: int, times: int = 1) -> None:
    """The process fails in that step, after rows that no checkpoint has seen."""
    original, left = LitMoE.training_step, [times]

    def run(self, *args):
        if self.global_step == step and left[0]:
            left[0] -= 1
            raise RuntimeError("broken")
        return original(self, *args)

    monkeypatch.setattr(LitMoE, "training_step", run)


def command(folder, cache_dir, *keys: str) -> list[str]:
    places = (f"output_dir={folder}", f"data.cache_dir={cache_dir}")
    return ["train.py", *SMALL, *MARKOV, *places, *keys]


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_is_the_same_and_has_every_row_its_config_and_its_end_once(logging_spec, finished, kind):
    plain, spec = finished(), logging_spec(f"logger={kind}")
    assert plain.hash == spec.hash
    assert plain.path.name == spec.path.name
    train(spec)
    assert_same_run(plain, spec)
    found = logged(spec)
    assert found.points == expected(spec)
    assert ("final/val/ppl", 12) in {(key, step) for key, step, _ in found.points}
    if kind != "tensorboard":  # whose hparams have a test of their own
        assert str(found.config["balancing.simbal.coef"]) == "0.1"
        assert str(found.config["seed"]) == "0"
        assert not [key for key in found.config if "dir" in key or "path" in key]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("every", [4, 6])
def test_a_run_that_breaks_and_goes_on_has_every_row_once_in_the_same_place(
    logging_spec, finished, monkeypatch, kind, every
):
    """A checkpoint of step 6 does not hold the validation of step 6, which the resumed run repeats."""
    whole, broken = finished(), logging_spec(f"logger={kind}", f"trainer.ckpt_every={every}")
    break_at(monkeypatch, 7)  # steps 2, 4 and 6 are logged, and the validation of 6
    with pytest.raises(RuntimeError, match="broken"):
        train(broken)
    assert max(row["step"] for row in rows(broken)) == 6
    before = run_id(broken) if kind in HOME else ""
    train(broken)
    assert_same_run(whole, broken)
    assert logged(broken).points == expected(broken) == expected(whole)
    if kind in HOME:
        assert run_id(broken) == before


@pytest.mark.parametrize("kind", ["tensorboard", MLFLOW])
def test_a_run_that_breaks_before_its_first_checkpoint_has_every_row_once(logging_spec, monkeypatch, kind):
    spec = logging_spec(f"logger={kind}")
    break_at(monkeypatch, 3)
    with pytest.raises(RuntimeError, match="broken"):
        train(spec)
    train(spec)
    assert logged(spec).points == expected(spec)


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_that_goes_on_with_another_logger_has_all_of_its_rows_there(logging_spec, monkeypatch, kind):
    break_at(monkeypatch, 7)
    with pytest.raises(RuntimeError, match="broken"):
        train(logging_spec("logger=none"))
    spec = logging_spec(f"logger={kind}")
    train(spec)
    assert logged(spec).points == expected(spec)


@pytest.mark.slow
def test_mlflow_has_one_run_whose_status_is_that_of_the_process(logging_spec, outputs, tmp_path, monkeypatch):
    spec = logging_spec("logger=mlflow")
    break_at(monkeypatch, 7)
    with pytest.raises(RuntimeError, match="broken"):
        train(spec)
    client = mlflow_client(outputs)
    place = client.get_experiment_by_name(tmp_path.name).experiment_id
    (run,) = client.search_runs([place])
    assert run.info.status == "FAILED"
    train(spec)
    (run,) = client.search_runs([place])
    assert (run.info.status, run.info.run_name) == ("FINISHED", spec.path.name)


@pytest.mark.slow
def test_a_run_trains_on_when_its_server_fails_and_says_so(logging_spec, finished, monkeypatch, capsys):
    spec, sent = logging_spec("logger=mlflow"), MLFlowLogger.log_metrics

    def send(self, metrics, step=None):
        if step == 6:
            raise ConnectionError("no route to the host\nsecond line")
        sent(self, metrics, step)

    monkeypatch.setattr(MLFlowLogger, "log_metrics", send)
    train(spec)
    assert_same_run(finished(), spec)
    (warning,) = RunFolder(spec.path).read_record()["warnings"]
    assert "logger=mlflow" in warning
    assert "(ConnectionError: no route to the host)" in warning
    assert f"warning: {warning}\n" in capsys.readouterr().out


@pytest.mark.slow
def test_rows_that_a_server_lost_are_sent_when_the_run_resumes(logging_spec, monkeypatch):
    spec, sent = logging_spec("logger=mlflow"), MLFlowLogger.log_metrics

    def send(self, metrics, step=None):
        if step == 2:
            raise ConnectionError("no route to the host")
        sent(self, metrics, step)

    with monkeypatch.context() as patch:
        patch.setattr(MLFlowLogger, "log_metrics", send)
        break_at(patch, 7)
        with pytest.raises(RuntimeError, match="broken"):
            train(spec)
    train(spec)
    assert logged(spec).points == expected(spec)


@pytest.mark.slow
def test_a_row_goes_to_wandb_once_a_checkpoint_holds_it(logging_spec, monkeypatch):
    """Steps 4 and 8 have a checkpoint: a run that breaks in step 9 has sent the rows up to 8."""
    sent = []
    monkeypatch.setattr(WandbLogger, "log_metrics", lambda self, metrics, step=None: sent.append(step))
    spec = logging_spec("logger=wandb")
    break_at(monkeypatch, 9)
    with pytest.raises(RuntimeError, match="broken"):
        train(spec)
    steps = [row["step"] for row in rows(spec)]
    assert sent == [step for step in steps if step <= 8]
    train(spec)
    assert sent == [*(row["step"] for row in rows(spec)), 12]  # and the final metrics


@pytest.mark.slow
def test_wandb_names_a_run_by_its_arm_in_the_group_of_its_sweep(small_spec):
    spec = small_spec("logger=wandb", "logger.project=ours")
    train(spec)
    (file,) = spec.path.glob("wandb/offline-run-*/*.wandb")
    assert file.parent.name.endswith(run_id(spec))
    (run,) = [record.run for record in records(file) if record.HasField("run")][:1]
    assert (run.project, run.run_group, run.display_name) == ("ours", "default", spec.path.name.rpartition("-")[0])
    assert "simbal" in run.tags


def run_id(spec) -> str:
    return json.loads((spec.path / SENT_FILE).read_text())["id"]


@pytest.mark.slow
@pytest.mark.usefixtures("forked_ranks")
def test_of_several_ranks_the_first_alone_logs(small_spec):
    spec = small_spec("logger=tensorboard", "trainer.devices=2", "trainer.strategy=ddp", "trainer.micro_batch=4")
    train(spec)
    assert logged(spec).points == expected(spec)


@pytest.mark.slow
def test_jobs_of_a_sweep_share_a_store_of_mlflow(tmp_path, cache_dir):
    sweep = command(tmp_path, cache_dir, "-m", "logger=mlflow", "seed=0,1", "name=two", "trainer.max_steps=6")
    done = run(*sweep, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    client = mlflow_client(tmp_path)
    runs = client.search_runs([client.get_experiment_by_name("two").experiment_id])
    assert sorted(run.info.status for run in runs) == ["FINISHED", "FINISHED"]
    assert sorted(run.data.params["seed"] for run in runs) == ["0", "1"]
