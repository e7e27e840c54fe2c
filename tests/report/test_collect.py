"""A broken or foreign file is an error that names it, never a number."""

import json
import re

import pytest

from simbal.errors import UserError
from simbal.report.collect import collect
from simbal.report.report import report
from simbal.report.table import LastSweep


def test_every_run_is_read_with_what_it_was_to_be_and_how_it_ended(write_run):
    write_run(seed=1)
    write_run(seed=2, status="failed", error="out of memory")
    folder = write_run(seed=3, status=None).parent
    first, second, third = collect(folder)
    assert (first.seed, first.finished, first.value("val/ppl"), first.value("tokens_per_second")) == (
        1,
        True,
        101.0,
        9000.0,
    )
    assert first.value("val/seu") is None
    assert (second.seed, second.finished, second.record["error"]) == (2, False, "out of memory")
    assert (third.seed, third.finished, third.record) == (3, False, None)


def test_a_missing_or_empty_folder_is_an_error_that_names_it(tmp_path):
    with pytest.raises(UserError, match=f"no folder {tmp_path / 'nowhere'}"):
        collect(tmp_path / "nowhere")
    with pytest.raises(UserError, match=f"{tmp_path} holds no runs"):
        collect(tmp_path)


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "null", '{"status": "finished"}', '{"status": "maybe", "config_hash": "x"}', "\x00", "[" * 9999,
     '{"status": NaN}'],
)  # fmt: skip
def test_a_damaged_record_counts_as_none_and_is_named_with_what_to_do(write_run, text):
    write_run(seed=0)
    path = write_run(seed=1)
    (path / "record.json").write_text(text)
    first, second = collect(path.parent)
    assert (first.finished, first.damage) == (True, "")
    assert (second.finished, second.record) == (False, None)
    assert re.search(f"{path / 'record.json'} is damaged ", second.damage)


def test_a_changed_number_is_found_out_by_the_checksum(write_run):
    path = write_run()
    text = (path / "record.json").read_text()
    (path / "record.json").write_text(text.replace("100.0", "90.0"))
    (run,) = collect(path.parent)
    assert "its checksum does not match" in run.damage


def test_a_damaged_run_is_reported_without_a_result_and_does_not_count(write_run, capsys):
    write_run(seed=0)
    path = write_run(seed=1)
    (path / "record.json").write_bytes((path / "record.json").read_bytes()[:-9])
    report(path.parent)
    written = json.loads((path.parent / "table.json").read_text())
    assert [run["seed"] for arm in written["arms"] for run in arm["runs"]] == [0]
    (line,) = written["without_result"]
    assert (line["seed"], line["status"]) == (1, "damaged")
    assert "is damaged (not JSON, or truncated)" in line["error"]
    assert "damaged" in capsys.readouterr().out


def test_a_diverged_run_is_reported_with_the_step(write_run):
    write_run(seed=0)
    layers = [{"grad_norm": 3.0, "nan": 1}, {"grad_norm": None}]
    path = write_run(seed=1, status="diverged", error="the gradient was NaN", step=17, layers=layers)
    report(path.parent)
    (line,) = json.loads((path.parent / "table.json").read_text())["without_result"]
    assert (line["status"], line["error"]) == ("diverged", "diverged at step 17: the gradient was NaN")
    page = (path.parent / "index.html").read_text()
    assert '<span class="badge">diverged</span>' in page
    assert "diverged at step 17: the gradient was NaN" in page


@pytest.mark.parametrize("text", ["", "- 1", "seed: [", "seed: 1\nchoices: 3"])
def test_a_broken_config_is_an_error_that_names_it(write_run, text):
    path = write_run()
    (path / "config.yaml").write_text(text)
    with pytest.raises(UserError, match=str(path / "config.yaml")):
        collect(path.parent)


def test_a_record_of_another_config_is_an_error_that_names_the_file(write_run):
    path = write_run()
    config = path / "config.yaml"
    config.write_text(config.read_text().replace("max_steps: ", "max_steps: 1"))
    with pytest.raises(UserError, match=r"config.yaml was changed"):
        collect(path.parent)


def test_a_copied_run_does_not_count_twice(write_run):
    path = write_run()
    path.rename(path.with_name("original"))
    write_run()
    with pytest.raises(UserError, match="are one run"):
        collect(path.parent)


def test_runs_on_different_data_are_refused_by_the_field_that_says_why(write_run):
    write_run(seed=0)
    data = {"source": "synthetic", "text": "x", "tokens": "y", "versions": {"numpy": "2.1"}}
    folder = write_run(seed=1, data=data).parent
    with pytest.raises(UserError, match=r"data.versions.numpy is '2.0' in the first and '2.1' in the second.*name="):
        collect(folder)


def test_runs_on_different_data_are_refused_though_only_the_fingerprint_says_so(write_run):
    write_run(seed=0)
    data = {"source": "synthetic", "text": "a", "tokens": "y", "versions": {"numpy": "2.0"}}
    with pytest.raises(UserError, match="data.tokens is 'b' in the first and 'y'"):
        collect(write_run(seed=1, data=data).parent)


def test_runs_with_different_definitions_are_refused_by_the_metric(write_run):
    write_run(seed=0)
    folder = write_run(seed=1, definitions={"val/max_vio": "max / mean", "val/ppl": "2 to the loss"}).parent
    with pytest.raises(UserError, match="definitions.val/ppl is 'exp of the loss' in the first and '2 to the loss'"):
        collect(folder)


def test_runs_of_different_length_are_refused_by_both_numbers(write_run):
    first = write_run(seed=0)
    second = write_run(seed=1, steps=1600)
    says = (
        f"{first} and {second} cannot stand in one table: the first was trained for 400 steps and the second for 1,600"
    )
    with pytest.raises(UserError, match=f"{says}; give one of them another name="):
        collect(first.parent)


def test_runs_of_the_sweep_that_have_no_folder_are_missing(write_run):
    path = write_run()
    runs = {path.name: "seed=0", "simbal-tiny-seed1-0": "seed=1", "simbal-tiny-seed2-0": "seed=2"}
    (path.parent / "sweep.json").write_text(json.dumps({"command": "train.py -m", "runs": runs}))
    (path.parent / "simbal-tiny-seed2-0").mkdir()  # nothing was written into it
    assert list(LastSweep.of(path.parent).never_started({path.name}).values()) == ["seed=1", "seed=2"]
    report(path.parent)
    (line, _) = json.loads((path.parent / "table.json").read_text())["missing"]
    assert line == {"run": "seed=1", "folder": "simbal-tiny-seed1-0"}
    assert "| seed=1 | missing | not started |" in (path.parent / "table.md").read_text()


def test_without_a_sweep_file_nothing_is_missing_and_a_broken_one_is_an_error(write_run):
    folder = write_run().parent
    assert LastSweep.of(folder).never_started(set()) == {}
    for text in ("{", "[]", '{"command": "x"}', '{"runs": ["a"]}', '{"runs": {"a": 3}}'):
        (folder / "sweep.json").write_text(text)
        with pytest.raises(UserError, match=f"{folder / 'sweep.json'} is broken"):
            LastSweep.of(folder)
