"""Whatever the logger, the run is the same, it has every row once, it goes on where it was, and it asks no network."""

import json
import os
import socket
import subprocess
import sys

import pytest
from lightning.pytorch.loggers import MLFlowLogger
from tensorboard.summary.writer import event_file_writer

from simbal.errors import UserError
from simbal.runs.folder import RunFolder
from simbal.training.lit_moe import LitMoE
from simbal.training.run import train
from tests.conftest import CONF, MARKOV, SMALL
from tests.programs import run
from tests.training.logged import expected, logged, mlflow_client
from tests.training.run_files import assert_same_run, rows

MLFLOW = pytest.param("mlflow", marks=pytest.mark.slow)  # makes the tables of a database
WANDB = pytest.param("wandb", marks=pytest.mark.slow)  # starts a process of its own
KINDS = ("tensorboard", "csv", MLFLOW, WANDB)
HOME = {"mlflow": "sqlite", "wandb": "offline"}  # where the two keep a run that nobody has asked them to send
CI = ("CI", "PYTEST_CURRENT_TEST")  # variables at which libraries say nothing to their makers
ROOT = CONF.parent


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


@pytest.mark.parametrize("kind", ["tensorboard", "csv", MLFLOW])
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
def test_mlflows_experiment_and_store_can_be_chosen(small_spec, tmp_path):
    (tmp_path / "elsewhere").mkdir()
    store = f"sqlite:///{tmp_path / 'elsewhere' / 'mlflow.db'}"
    train(small_spec("logger=mlflow", "logger.experiment=ours", f"logger.tracking_uri={store}"))
    client = mlflow_client(tmp_path / "elsewhere")
    assert len(client.search_runs([client.get_experiment_by_name("ours").experiment_id])) == 1
    assert not (tmp_path / "outputs" / "mlflow.db").exists()


@pytest.mark.slow
def test_a_lost_run_of_mlflow_is_logged_anew(logging_spec, monkeypatch):
    spec = logging_spec("logger=mlflow")
    break_at(monkeypatch, 7)
    with pytest.raises(RuntimeError, match="broken"):
        train(spec)
    (spec.path / "logger.json").write_text(json.dumps({"mlflow": "0" * 32}))
    train(spec)
    assert logged(spec).points == expected(spec)


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
def test_a_run_trains_on_when_its_server_fails_at_once_and_at_its_end(logging_spec, finished, monkeypatch):
    def fail(*_, **__):
        raise ConnectionError("no route")

    for method in ("log_hyperparams", "finalize"):
        monkeypatch.setattr(MLFlowLogger, method, fail)
    spec = logging_spec("logger=mlflow")
    train(spec)
    assert_same_run(finished(), spec)
    (said,) = RunFolder(spec.path).read_record()["warnings"]
    assert said == "MLflow has nothing of this run (ConnectionError: no route); metrics.jsonl has it"


@pytest.mark.slow
def test_a_store_that_cannot_be_used_is_one_sentence(small_spec):
    with pytest.raises(UserError, match="logger.tracking_uri=nonsense://x cannot be used: ") as refusal:
        train(small_spec("logger=mlflow", "logger.tracking_uri=nonsense://x"))
    assert "\n" not in str(refusal.value)


@pytest.mark.slow
def test_wandb_keeps_one_folder_of_the_project_and_id(small_spec, monkeypatch):
    spec = small_spec("logger=wandb", "logger.project=ours")
    break_at(monkeypatch, 7, times=2)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="broken"):
            train(spec)
    train(spec)
    (folder,) = spec.path.glob("wandb/offline-run-*")
    run_id = json.loads((spec.path / "logger.json").read_text())["wandb"]
    assert folder.name.endswith(run_id)
    content = next(folder.glob("*.wandb")).read_bytes()
    assert b"ours" in content
    assert spec.path.name.encode() in content


@pytest.mark.slow
@pytest.mark.usefixtures("forked_ranks")
def test_of_several_ranks_the_first_alone_logs(small_spec):
    spec = small_spec("logger=csv", "trainer.devices=2", "trainer.strategy=ddp", "trainer.micro_batch=4")
    train(spec)
    assert logged(spec).points == expected(spec)
    assert [file.name for file in spec.path.rglob("*.csv")] == ["metrics.csv"]


@pytest.mark.slow
def test_jobs_of_a_sweep_share_a_store_of_mlflow(tmp_path, cache_dir):
    sweep = command(tmp_path, cache_dir, "-m", "logger=mlflow", "seed=0,1", "name=two", "trainer.max_steps=6")
    done = run(*sweep, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    client = mlflow_client(tmp_path)
    runs = client.search_runs([client.get_experiment_by_name("two").experiment_id])
    assert sorted(run.info.status for run in runs) == ["FINISHED", "FINISHED"]
    assert sorted(run.data.params["seed"] for run in runs) == ["0", "1"]


@pytest.mark.parametrize(
    ("keys", "sentence"),
    [
        (("logger.kind=neptune",), "logger.kind=neptune is not one of tensorboard, csv, mlflow, wandb, none"),
        (("logger=wandb", "logger.offline=maybe"), "logger.offline=maybe must be true or false|logger.offline: Value"),
        (("logger=mlflow", "logger.tracking_uri=3"), "logger.tracking_uri=3 must be text or null"),
        (("logger=csv", "+logger.project=x"), "there is no key logger.project"),
    ],
)
def test_a_key_that_makes_no_sense_is_one_sentence(small_spec, keys, sentence):
    with pytest.raises(UserError, match=f"^({sentence})"):
        small_spec(*keys)


def asks_the_network(program: list[str], folder) -> bool:
    """Whether it asks a proxy, as every request is told to; neither tests nor CI are mentioned to it."""
    with socket.create_server(("127.0.0.1", 0)) as proxy:
        proxy.settimeout(0.2)
        address = f"http://127.0.0.1:{proxy.getsockname()[1]}"
        told = dict.fromkeys(("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy", "ALL_PROXY"), address)
        kept = {name: value for name, value in os.environ.items() if name not in CI and "proxy" not in name.lower()}
        done = subprocess.run(program, env=kept | told, capture_output=True, text=True, check=False, cwd=folder)
        assert done.returncode == 0, done.stderr
        try:
            proxy.accept()[0].close()
        except TimeoutError:
            return False
        return True


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["mlflow", "wandb"])
def test_by_default_nothing_is_sent_anywhere(tmp_path, cache_dir, kind):
    name, *keys = command(tmp_path, cache_dir, f"logger={kind}", "trainer.max_steps=6")
    assert not asks_the_network([sys.executable, str(ROOT / name), *keys], tmp_path)
    assert RunFolder(next(tmp_path.glob("default/*"))).read_record()["status"] == "finished"


@pytest.mark.slow
def test_a_request_would_have_been_seen(tmp_path):
    request = "import requests\ntry: requests.get('https://example.org', timeout=1)\nexcept OSError: pass"
    assert asks_the_network([sys.executable, "-c", request], tmp_path)
