"""Whatever the logger, the run is the same, it has every row once, it goes on where it was, and it asks no network."""

import pytest
from lightning.pytorch.loggers import MLFlowLogger
from tensorboard.summary.writer import event_file_writer

from simbal.runs.folder import RunFolder
from simbal.training.lit_moe import LitMoE
from simbal.training.run import train
from tests.conftest import MARKOV, SMALL
from tests.training.logged import expected, logged, mlflow_client
from tests.training.run_files import assert_same_run, rows

MLFLOW = pytest.param("mlflow", marks=pytest.mark.slow)  # makes the tables of a database
WANDB = pytest.param("wandb", marks=pytest.mark.slow)  # starts a process of its own
KINDS = ("tensorboard", "csv", MLFLOW, WANDB)
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
def test_a_run_that_breaks_and_goes_on_has_every_row_once_in_the_same_place(logging_spec, finished, monkeypatch, kind):
    whole, broken = finished(), logging_spec(f"logger={kind}")
    break_at(monkeypatch, 7)  # steps 2, 4 and 6 are logged, and the validation of 6; the checkpoint is of step 4
    with pytest.raises(RuntimeError, match="broken"):
        train(broken)
    assert max(row["step"] for row in rows(broken)) == 6
    before = (broken.path / "logger.json").read_text() if kind in HOME else ""
    train(broken)
    assert_same_run(whole, broken)
    assert logged(broken).points == expected(broken) == expected(whole)
    if kind in HOME:
        assert (broken.path / "logger.json").read_text() == before


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
@pytest.mark.parametrize("then", ["goes on", "breaks"])
def test_a_run_trains_on_when_its_server_fails_and_says_so(logging_spec, finished, monkeypatch, capsys, then):
    spec, sent = logging_spec("logger=mlflow"), MLFlowLogger.log_metrics

    def send(self, metrics, step=None):
        if step == 6:
            raise ConnectionError("no route to the host\nsecond line")
        sent(self, metrics, step)

    monkeypatch.setattr(MLFlowLogger, "log_metrics", send)
    monkeypatch.setattr(MLFlowLogger, "finalize", lambda self, *_: self.lost and pytest.fail("it is gone"))
    if then == "breaks":
        break_at(monkeypatch, 8)
        with pytest.raises(RuntimeError, match="broken"):
            train(spec)
        assert "has nothing from step 6 on" in (spec.path / "train.log").read_text()
        return
    train(spec)
    assert_same_run(finished(), spec)
    (said,) = RunFolder(spec.path).read_record()["warnings"]
    assert "MLflow has nothing from step 6 on (ConnectionError: no route to " in said
    assert said.endswith("); metrics.jsonl has it")
    assert f"warning: {said}\n" in capsys.readouterr().out
    monkeypatch.undo()


@pytest.mark.slow
@pytest.mark.usefixtures("forked_ranks")
def test_of_several_ranks_the_first_alone_logs(small_spec):
    spec = small_spec("logger=csv", "trainer.devices=2", "trainer.strategy=ddp", "trainer.micro_batch=4")
    train(spec)
    assert logged(spec).points == expected(spec)
    assert [file.name for file in spec.path.rglob("*.csv")] == ["metrics.csv"]
