"""The Python API trains runs like the command line, and reads runs as rows."""

import signal
import subprocess
import sys

import pandas
import polars
import pytest

import simbal
from simbal.analysis.result import write_analysis
from simbal.cli.commands import report
from simbal.errors import UserError
from simbal.runs.folder import RunFolder
from simbal.training.signals import StoppedError
from tests.conftest import MARKOV, SMALL


@pytest.fixture
def overrides(tmp_path, cache_dir, monkeypatch):
    """Overrides of a run of two steps; the current folder is a new one."""
    monkeypatch.chdir(tmp_path)
    values = dict(line.split("=", 1) for line in (*SMALL, *MARKOV))
    values |= {"trainer.max_steps": "2", "trainer.val_every": "1", "trainer.log_every": "1", "optim.warmup_steps": "1"}
    return [*(f"{key}={value}" for key, value in values.items()), f"data.cache_dir={cache_dir}"]


@pytest.fixture
def sweep(write_run):
    """The folder of a sweep with two arms and two seeds, one of which failed."""
    for balancing in ("lbl", "simbal"):
        for seed in range(2):
            failed = {"status": "failed", "error": "out of memory"} if (balancing, seed) == ("lbl", 1) else {}
            path = write_run(balancing, seed, **failed)
    return path.parent


def test_run_is_trained_returned_when_finished_and_can_start_another(overrides, capsys):
    run = simbal.train([*overrides, "balancing=lbl", "seed=3"])
    assert (str(run.path.parent), run.status) == ("outputs/default", "finished")
    assert (run.config.seed, run.config.trainer.max_steps, [*run.config.balancing]) == (3, 2, ["lbl"])
    assert RunFolder(run.path).is_finished(RunFolder(run.path).read_spec())
    assert len([row for row in run.curve if row["val/loss"] is not None]) == 3
    model = run.model()
    assert (model.training, model.head_VD.shape) == (False, (64, 16))
    with pytest.raises(UserError, match="accelerator=gpu is not one of auto, cpu, cuda"):
        run.model("gpu")
    assert simbal.train([*overrides, "balancing=lbl", "seed=3"]).path == run.path
    assert "finished before" in capsys.readouterr().out
    assert simbal.train([f"run={run.path}", overrides[-1]]).path == run.path
    other = simbal.train([f"from={run.path}", "seed=1", overrides[-1], "trainer.progress_bar=false", "logger=none"])
    assert (other.config.seed, other.config.optim) == (1, run.config.optim)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["balancig=lbl"], "there is no key balancig; did you mean balancing?"),
        (["optim.lr=fast"], "optim.lr"),
        (["seed=0-4"], "asks for several runs"),
        (["-m", "seed=0-4"], "simbal.train does not accept -m"),
        (["dry_run=true"], "simbal.train does not accept dry_run=true"),
        (["until=decided"], "simbal.train does not accept until=decided"),
        ("seed=1", "takes a list of overrides"),
        (["run=nowhere"], "nowhere"),
    ],
)
def test_mistake_is_refused_before_a_file_is_written(tmp_path, monkeypatch, overrides, message):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=message):
        simbal.train(overrides)
    assert [*tmp_path.iterdir()] == []


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["balancig=lbl"], "there is no key balancig"),
        (["balancing=lbl", "balancing.lbl.coef=a,0.1"], "balancing.lbl.coef"),
        (["seed=0-1", "dry_run=true"], "simbal.sweep does not accept dry_run=true"),
        (["run=nowhere"], "simbal.sweep does not accept run=nowhere"),
        (["name=a,b"], "name=a,b: simbal.sweep returns one sweep"),
        ("seed=0-1", "takes a list of overrides"),
    ],
)
def test_mistake_in_a_sweep_is_refused_before_a_file_is_written(tmp_path, monkeypatch, overrides, message):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=message):
        simbal.sweep(overrides)
    assert [*tmp_path.iterdir()] == []


@pytest.mark.slow  # starts a fork server, which imports torch
def test_sweep_prints_progress_and_returns_runs_and_table_even_if_a_run_fails(overrides, capsys):
    words = [*overrides, "name=mine", "balancing=lbl", "optim.lr=1e-2,1e30"]
    sweep = simbal.sweep(words)
    assert (str(sweep.path), len(sweep)) == ("outputs/mine", 2)
    assert [row["status"] == "finished" for row in sweep.runs].count(True) == 1
    assert any(row["metric"] == "val/ppl" for row in sweep.table)
    assert "[2/2] failed" in capsys.readouterr().out
    assert len(simbal.sweep(words)) == 2
    assert "1 finished, 1 failed before" in capsys.readouterr().out
    assert "simbal train -m " in (sweep.path / "sweep.json").read_text()


@pytest.mark.slow  # starts Python anew
def test_script_without_a_main_guard_can_start_a_sweep(overrides, tmp_path):
    (tmp_path / "script.py").write_text(f"import simbal\nprint(simbal.sweep({[*overrides, 'seed=0-1']!r}))\n")
    done = subprocess.run([sys.executable, "script.py"], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout.count("<Sweep outputs/default: 2 runs>") == 1


def test_rows_of_runs_have_the_same_keys(sweep):
    rows = simbal.load(sweep).runs
    assert [(row["arm"], row["seed"], row["status"], row["val/ppl"]) for row in rows] == [
        ("lbl", 0, "finished", 100.0), ("lbl", 1, "failed", None), ("simbal", 0, "finished", 100.0),
        ("simbal", 1, "finished", 101.0),
    ]  # fmt: skip
    assert len({tuple(row) for row in rows}) == 1
    assert {"optim.lr", "balancing.simbal.coef", "when", "size", "val/max_vio"} <= rows[0].keys()


def test_rows_of_curves_and_analyses_name_their_run(sweep):
    run = next(sweep.glob("simbal-*"))
    folder = RunFolder(run)
    record = folder.read_record()
    lines = ('{"step": 0, "tokens": 0, "val/loss": 6.0, "layers": {"x": [1]}}', '{"step": 1, "tokens": 8}')
    (run / "metrics.jsonl").write_text("".join(f"{line}\n" for line in lines))
    folder.write_record(record)
    content = {"settings": {}, "definition": {}, "metrics": {"seu": 0.5, "none": None}, "layers": {"seu": [0.4, 0.6]}}
    write_analysis(run / "analysis" / "routing.json", content)
    loaded = simbal.load(sweep)
    name = {"folder": str(run), "arm": "simbal", "seed": record["seed"]}
    assert loaded.curves == [
        name | {"step": 0, "tokens": 0, "val/loss": 6.0},
        name | {"step": 1, "tokens": 8, "val/loss": None},
    ]
    assert [(row["analysis"], row["number"], row["layer"], row["value"]) for row in loaded.analyses] == [
        ("routing", "seu", None, 0.5), ("routing", "seu", 0, 0.4), ("routing", "seu", 1, 0.6)
    ]  # fmt: skip
    assert loaded[run.name].path == loaded[[one.path for one in loaded].index(run)].path == run


def test_table_equals_the_table_of_the_report(sweep, capsys):
    report([str(sweep)])
    written, table = pandas.read_csv(sweep / "table.csv"), simbal.load(sweep).table
    for column in ("metric", "mean", "balancing"):
        assert [row[column] for row in table] == [*written[column]]


def test_rows_become_data_frames(sweep):
    loaded = simbal.load(sweep)
    for rows in (loaded.runs, loaded.table):
        in_pandas, in_polars = rows.to_pandas(), rows.to_polars()
        assert (isinstance(in_pandas, pandas.DataFrame), isinstance(in_polars, polars.DataFrame)) == (True, True)
        assert in_pandas.shape == in_polars.shape == (len(rows), len(rows[0]))
        assert [*in_pandas.columns] == in_polars.columns == [*rows[0]]
    assert simbal.Rows([]).to_polars().shape == simbal.Rows([]).to_pandas().shape == (0, 0)


def test_folder_without_runs_is_refused(tmp_path):
    for open_folder in (simbal.load, simbal.Run):
        with pytest.raises(UserError, match=str(tmp_path)):
            open_folder(tmp_path)


@pytest.mark.slow  # starts Python anew
def test_reading_imports_neither_torch_nor_hydra(sweep):
    code = (
        "import sys, simbal\n"
        "assert 'simbal.api' not in sys.modules\n"
        f"loaded = simbal.load({str(sweep)!r})\n"
        "assert len(loaded.runs) == 4 and loaded.table and not loaded.curves and not loaded.analyses\n"
        "assert not {'torch', 'pandas', 'polars', 'altair', 'hydra'} & sys.modules.keys()\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(("number", "raised"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, SystemExit)])
def test_interrupt_ends_the_cell_and_not_the_kernel(overrides, monkeypatch, number, raised):
    def stop(_):
        raise StoppedError(number, 5)

    monkeypatch.setattr("simbal.training.run.train", stop)
    with pytest.raises(raised):
        simbal.train(overrides)
