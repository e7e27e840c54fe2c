"""From Python: a run is trained as the command trains it, and what runs have left is read as rows."""

import signal
import subprocess
import sys

import pandas
import polars
import pytest
from simbal.cli.report import main as report

import simbal
from simbal.analysis.result import write_analysis
from simbal.errors import UserError
from simbal.runs.folder import RunFolder
from simbal.training.signals import StoppedError
from tests.conftest import MARKOV, SMALL


@pytest.fixture
def overrides(tmp_path, cache_dir, monkeypatch):
    """Those of a run of two steps, in a working folder of its own."""
    monkeypatch.chdir(tmp_path)
    values = dict(line.split("=", 1) for line in (*SMALL, *MARKOV))
    values |= {"trainer.max_steps": "2", "trainer.val_every": "1", "trainer.log_every": "1", "optim.warmup_steps": "1"}
    return [*(f"{key}={value}" for key, value in values.items()), f"data.cache_dir={cache_dir}"]


@pytest.fixture
def sweep(write_run):
    """Two arms of two seeds each, one of whose runs has failed."""
    for balancing in ("lbl", "simbal"):
        for seed in range(2):
            failed = {"status": "failed", "error": "out of memory"} if (balancing, seed) == ("lbl", 1) else {}
            path = write_run(balancing, seed, **failed)
    return path.parent


def test_a_run_is_trained_as_by_the_command(overrides):
    run = simbal.train([*overrides, "balancing=lbl", "seed=3"])
    assert (str(run.path.parent), run.status) == ("outputs/default", "finished")
    assert (run.config.seed, run.config.trainer.max_steps, [*run.config.balancing]) == (3, 2, ["lbl"])
    assert run.record["choices"]["balancing"] == "lbl"
    assert RunFolder(run.path).finished(RunFolder(run.path).read_spec())
    losses = [row["val/loss"] for row in run.curve if row["val/loss"] is not None]
    assert len(losses) == 3
    assert losses[-1] > 0
    model = run.model()
    assert not model.training
    assert model.head_VD.shape == (64, 16)
    with pytest.raises(UserError, match="accelerator=gpu is not one of auto, cpu, cuda"):
        run.model("gpu")


def test_a_finished_run_is_returned_and_one_can_be_begun_from_it(overrides, capsys):
    first = simbal.train(overrides)
    assert simbal.train(overrides).path == first.path
    assert "finished before" in capsys.readouterr().out
    assert simbal.train([f"run={first.path}", overrides[-1]]).path == first.path
    other = simbal.train([f"from={first.path}", "seed=1", overrides[-1], "trainer.progress_bar=false", "logger=none"])
    assert (other.config.seed, other.config.optim) == (1, first.config.optim)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (["balancig=lbl"], "there is no key balancig; did you mean balancing?"),
        (["optim.lr=fast"], "optim.lr"),
        (["seed=0-4"], "asks for several runs"),
        (["-m", "seed=0-4"], "-m is no override"),
        (["dry_run=true"], "are for the command line"),
        (["until=decided"], "are for the command line"),
        ("seed=1", "takes a list of overrides"),
        (["run=nowhere"], "nowhere"),
    ],
)
def test_what_is_wrong_is_refused_before_anything_is_made(tmp_path, monkeypatch, wrong, said):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=said):
        simbal.train(wrong)
    assert [*tmp_path.iterdir()] == []


def test_runs_are_rows_that_all_have_the_same_keys(sweep):
    rows = simbal.load(sweep).runs
    assert [(row["arm"], row["seed"], row["status"], row["val/ppl"]) for row in rows] == [
        ("lbl", 0, "finished", 100.0), ("lbl", 1, "failed", None), ("simbal", 0, "finished", 100.0),
        ("simbal", 1, "finished", 101.0),
    ]  # fmt: skip
    assert len({tuple(row) for row in rows}) == 1
    assert {"optim.lr", "balancing.simbal.coef", "when", "size", "val/max_vio"} <= rows[0].keys()


def test_curves_and_analyses_say_of_which_run_they_are(sweep):
    run = next(sweep.glob("simbal-*"))
    rows = (
        '{"step": 0, "tokens": 0, "val/loss": 6.0, "layers": {"x": [1]}}\n{"step": 1, "tokens": 8, "train/ce": 5.0}\n'
    )
    run_folder = RunFolder(run)
    record = run_folder.read_record()
    (run / "metrics.jsonl").write_text(rows)
    run_folder.write_record(record)
    content = {"settings": {}, "definition": {}, "metrics": {"seu": 0.5, "none": None}, "layers": {"seu": [0.4, 0.6]}}
    write_analysis(run / "analysis" / "routing.json", content)
    loaded = simbal.load(sweep)
    whose = {"folder": str(run), "arm": "simbal", "seed": record["seed"]}
    assert loaded.curves == [
        whose | {"step": 0, "tokens": 0, "val/loss": 6.0, "train/ce": None},
        whose | {"step": 1, "tokens": 8, "val/loss": None, "train/ce": 5.0},
    ]
    assert [(row["analysis"], row["number"], row["layer"], row["value"]) for row in loaded.analyses] == [
        ("routing", "seu", None, 0.5), ("routing", "seu", 0, 0.4), ("routing", "seu", 1, 0.6)
    ]  # fmt: skip


def test_the_table_is_that_of_the_report(sweep, capsys):
    report([str(sweep)])
    written = pandas.read_csv(sweep / "table.csv")
    table = simbal.load(sweep).table
    assert [row["metric"] for row in table] == [*written["metric"]]
    assert [row["mean"] for row in table] == [*written["mean"]]
    assert [row["balancing"] for row in table] == [*written["balancing"]]


def test_rows_become_data_frames(sweep):
    loaded = simbal.load(sweep)
    for rows in (loaded.runs, loaded.table):
        ours, theirs = rows.to_pandas(), rows.to_polars()
        assert (isinstance(ours, pandas.DataFrame), isinstance(theirs, polars.DataFrame)) == (True, True)
        assert ours.shape == theirs.shape == (len(rows), len(rows[0]))
        assert [*ours.columns] == theirs.columns == [*rows[0]]
    assert loaded.runs.to_polars()["val/ppl"].to_list() == [100.0, None, 100.0, 101.0]
    assert simbal.Rows([]).to_polars().shape == simbal.Rows([]).to_pandas().shape == (0, 0)


@pytest.mark.parametrize("place", ["nowhere", "empty"])
def test_a_folder_without_runs_is_refused(tmp_path, place):
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match=place):
        simbal.load(tmp_path / place)
    with pytest.raises(UserError, match="is no run"):
        simbal.Run(tmp_path / place)


@pytest.mark.slow
def test_neither_the_package_nor_reading_imports_torch(sweep):
    code = (
        "import sys, simbal\n"
        "assert 'simbal.api' not in sys.modules\n"
        f"loaded = simbal.load({str(sweep)!r})\n"
        "assert len(loaded.runs) == 4 and loaded.table and not loaded.curves and not loaded.analyses\n"
        "assert not {'torch', 'pandas', 'polars', 'altair', 'hydra'} & sys.modules.keys()\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(("number", "raised"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, SystemExit)])
def test_an_interrupted_run_ends_the_cell_and_not_the_program(overrides, monkeypatch, number, raised):
    def stopped(_):
        raise StoppedError(number, 5)

    monkeypatch.setattr("simbal.training.run.train", stopped)
    with pytest.raises(raised):
        simbal.train(overrides)
