"""A study goes on from the runs in its runs.tar.xz, and its rows are held against them."""

import io
import tarfile

import pytest

from simbal.errors import BusyError, UserError
from simbal.report.collect import collect
from simbal.report.reproduce.evidence import Study, write
from simbal.report.reproduce.kept import RUNS, bring_back, keep
from simbal.report.reproduce.verify import verify
from simbal.runs.folder import RunFolder
from tests.report.reproduce.test_reproduce import RECORD, analyse, curve


@pytest.fixture
def runs(write_run):
    """The folder of two finished runs, one that has failed and one that has diverged."""
    for seed in (0, 1):
        run = write_run("lbl", seed, **RECORD)
        curve(run, [3.0, 2.0 + seed])
        analyse(run, 1.0)
        (run / "checkpoints").mkdir()
        (run / "checkpoints" / "last.ckpt").write_text("weights")
    write_run("simbal", 0, status="diverged", error="the loss is NaN", step=3)
    rate = {"optim.lr": 0.5}  # so that labels name it, also those of rows.csv
    return write_run("none", 0, status="failed", error="the disk was full", keys=rate).parent


def test_what_has_ended_comes_back_as_it_was_without_its_weights(runs, tmp_path):
    keep(collect(runs), tmp_path)
    assert bring_back(tmp_path, tmp_path / "elsewhere") == 3
    back, before = (
        collect(tmp_path / "elsewhere"),
        [run for run in collect(runs) if run.spec.choices["balancing"] != "none"],
    )
    assert [(run.record, run.analyses) for run in back] == [(run.record, run.analyses) for run in before]
    curves = [[run.loss_curve for run in runs if run.finished] for runs in (back, before)]
    assert curves == [[[(0, 3.0), (100, 2.0)], [(0, 3.0), (100, 3.0)]]] * 2
    assert not [*(tmp_path / "elsewhere").glob("*/checkpoints")]
    assert {path.name for path in (tmp_path / "elsewhere").iterdir()} == {run.path.name for run in before}


def test_the_same_runs_give_the_same_bytes(runs, tmp_path):
    keep(collect(runs), tmp_path / "a")
    bring_back(tmp_path / "a", tmp_path / "again")
    keep(collect(tmp_path / "again"), tmp_path / "b")
    assert (tmp_path / "a" / RUNS).read_bytes() == (tmp_path / "b" / RUNS).read_bytes()


def test_runs_that_have_ended_here_stay_and_what_was_begun_gives_way(runs, tmp_path):
    keep(collect(runs), tmp_path)
    ended, begun, diverged = (run.path for run in collect(runs) if run.spec.choices["balancing"] != "none")
    (ended / "mine").write_text("of this machine")
    (begun / "record.json").unlink()
    with RunFolder(begun).lock(), pytest.raises(BusyError):
        bring_back(tmp_path, runs)
    assert bring_back(tmp_path, runs) == 1
    assert (ended / "mine").exists()
    assert (begun / "record.json").exists()
    assert not (begun / "checkpoints").exists()
    assert diverged.exists()


def test_a_study_without_an_archive_has_nothing_to_bring_back(tmp_path):
    assert bring_back(tmp_path, tmp_path / "runs") == 0
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    "name", ["../config.yaml", "run/evil.py", "config.yaml", "/run/config.yaml", "run/sub/config.yaml"]
)
def test_an_archive_with_anything_else_is_refused_and_nothing_unpacked(tmp_path, name):
    with tarfile.open(tmp_path / RUNS, "w:xz") as archive:
        archive.addfile(tarfile.TarInfo(name), io.BytesIO())
    with pytest.raises(UserError, match="is not the archive of a study"):
        bring_back(tmp_path, tmp_path / "runs")
    assert not [path for path in (tmp_path / "runs").rglob("*") if path.is_file()]


def test_a_link_is_refused(tmp_path):
    link = tarfile.TarInfo("run/config.yaml")
    link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
    with tarfile.open(tmp_path / RUNS, "w:xz") as archive:
        archive.addfile(link)
    with pytest.raises(UserError, match="is not the archive of a study"):
        bring_back(tmp_path, tmp_path / "runs")


@pytest.mark.parametrize("share", [0, 0.5, 0.9])
def test_a_broken_archive_is_refused(runs, tmp_path, share):
    keep(collect(runs), tmp_path)
    whole = (tmp_path / RUNS).read_bytes()
    (tmp_path / RUNS).write_bytes(whole[: int(share * len(whole))])
    with pytest.raises(UserError, match="is not the archive of a study"):
        bring_back(tmp_path, tmp_path / "runs")


def test_a_changed_row_is_found_by_the_runs(runs, tmp_path, capsys):
    write(Study("s", [], [], ["ppl"], runs), "python train.py", tmp_path / "s")
    keep(collect(runs), tmp_path / "s")
    verify(tmp_path)
    assert "s/rows.csv: " in capsys.readouterr().out
    rows = tmp_path / "s" / "rows.csv"
    assert "lbl lr=0.002,lbl,optim.lr=0.002," in rows.read_text()
    rows.write_text(rows.read_text().replace(",0,lbl", ",1,lbl", 1))
    with pytest.raises(UserError, match="not as its rows have them"):
        verify(tmp_path)
    assert "WRONG: rows.csv is not what the runs in runs.tar.xz give" in capsys.readouterr().out
