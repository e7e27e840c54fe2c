"""The page of a running sweep says how far every job is, and what has failed."""

import json
import os
import re

import pytest

from simbal.report.page import live
from simbal.report.page.live import LivePage, is_followed
from simbal.runs.folder import RunFolder
from tests.report.page.test_hostile_page import HOSTILE, Page
from tests.run_folders import fake_spec


@pytest.fixture
def specs(base_spec, tmp_path):
    """Two arms of two seeds, in their order; nothing of them is written."""
    keys = {"trainer.max_steps": 40}
    return [fake_spec(base_spec, tmp_path, balancing, seed, keys) for balancing in ("lbl", "simbal") for seed in (0, 1)]


@pytest.fixture
def page(specs, sweep):
    sweep.mkdir(parents=True)
    (sweep / "sweep.json").write_text(json.dumps({"command": "train.py -m", "runs": {}}))
    os.utime(sweep / "sweep.json", (1e9, 1e9))  # long before the jobs
    return LivePage(sweep, [(f"balancing={spec.choices['balancing']} seed={spec.config.seed}", spec) for spec in specs])


def begin(spec, *steps, **progress):
    """What a job leaves that has got to the last of these steps."""
    folder = RunFolder(spec.path)
    folder.write_spec(spec)
    (spec.path / "progress.json").write_text(json.dumps({"step": steps[-1], "max_steps": 40, **progress}))
    with (spec.path / "metrics.jsonl").open("a") as curves:
        curves.writelines(
            json.dumps({"step": step, "tokens": 10 * step, "val/loss": 9 - step / 10, "train/ce": 8 - step / 10}) + "\n"
            for step in steps
        )


def end(spec, status, **fields):
    RunFolder(spec.path).write_record(
        {"status": status, "config_hash": spec.hash, "choices": spec.choices, "seed": 0} | fields
    )


def finish(spec):
    result = {
        "steps": 40,
        "tokens": 400,
        "tokens_per_second": 1.0,
        "metrics": {},
        "definitions": {},
        "data": {"tokens": "a"},
    }
    end(spec, "finished", **result)


def html(page, sweep, **changes):
    page.write(3.0, **changes)
    return (sweep / "index.html").read_text()


def cells(text):
    """The cells of every job, by its name."""
    rows = re.findall('<tr><th scope="row">(.*?)</th>(.*?)</tr>', text)
    plain = [
        [re.sub("<.*?>", "", cell) for cell in (name, *re.findall("<td.*?>(.*?)</td>", row))] for name, row in rows
    ]
    return {name: row for name, *row in plain}


def curves(text):
    return {chart["name"]: chart["panels"][0] for chart in json.loads(re.search('id="curves">(.*?)</script>', text)[1])}


def test_a_page_of_earlier_runs_stays_until_a_job_has_started(page, sweep):
    (sweep / "index.html").write_text("the table of before")
    assert html(page, sweep) == "the table of before"


def test_it_shows_where_every_job_is(page, specs, sweep):
    html_before = sweep / "index.html"
    begin(specs[0], 10, 40)
    finish(specs[0])
    begin(specs[1], 10, 20, loss=3.25, tokens_per_second=8123.4, seconds_left=65)
    assert not html_before.exists()
    text = html(page, sweep)
    jobs = cells(text)
    assert [*jobs] == [
        "balancing=lbl seed=1",
        "balancing=simbal seed=0",
        "balancing=simbal seed=1",
        "balancing=lbl seed=0",
    ]
    assert jobs["balancing=lbl seed=1"] == ["running", "20 / 40", "3.250", "7.000", "8,123", "1:05", ""]
    assert jobs["balancing=simbal seed=0"][:2] == ["queued", "0 / 40"]
    assert jobs["balancing=lbl seed=0"][:2] == ["done", "40 / 40"]
    assert '<progress max="160" value="60"' in text


def test_a_failed_job_says_why_and_what_it_printed_last(page, specs, sweep):
    begin(specs[0], 10)
    begin(specs[1], 10)
    (specs[1].path / "console.log").write_text("a\nCUDA has left us\n\n")
    end(specs[1], "failed", error="out of memory")
    state, *_, said = cells(html(page, sweep))["balancing=lbl seed=1"]
    assert (state, said) == ("failed", "failed: out of memory. Last line: CUDA has left us")


def test_what_an_earlier_sweep_has_left_is_not_running(page, specs, sweep):
    """A killed run is done again; until then its progress is of no job."""
    begin(specs[0], 10)
    begin(specs[1], 20)
    end(specs[1], "killed", error="killed by signal 9")
    for file in specs[1].path.iterdir():
        os.utime(file, (1e9 - 1, 1e9 - 1))
    assert cells(html(page, sweep))["balancing=lbl seed=1"][:2] == ["queued", "20 / 40"]


def test_curves_grow_with_the_files_also_after_a_run_was_rewound(page, specs, sweep):
    begin(specs[0], 0, 10)
    assert curves(html(page, sweep))["loss"]["x"] == [0, 100]
    with (specs[0].path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 20, "tokens": 200, "val/loss": 1.5}\n{"step": 30, "tok')
    panel = curves(html(page, sweep))["loss"]
    assert (panel["x"], panel["curves"][0]["y"]) == ([0, 100, 200], [9, 8, 1.5])
    (specs[0].path / "metrics.jsonl").write_text('{"step": 0, "tokens": 0, "val/loss": 5}\n')
    assert curves(html(page, sweep))["loss"]["curves"][0]["y"] == [5]


def test_the_line_of_an_arm_is_of_its_finished_runs_and_the_others_are_single_seeds(page, specs, sweep):
    begin(specs[0], 0, 40)
    begin(specs[1], 0)
    assert curves(html(page, sweep))["loss"]["x"] == [0]  # as far as both have come
    finish(specs[0])
    panel = curves(html(page, sweep))["loss"]
    assert panel["x"] == [0, 400]
    assert panel["curves"][0]["seeds"]["1"]["y"] == [9]


def test_it_refreshes_itself_until_it_is_stopped(page, specs, sweep):
    begin(specs[0], 10)
    assert '<noscript><meta http-equiv="refresh" content="3"></noscript>' in html(page, sweep)
    assert is_followed(sweep / "index.html")
    stopped = html(page, sweep, stopped=True)
    assert 'http-equiv="refresh"' not in stopped
    assert " data-stopped>" in stopped
    assert not is_followed(sweep / "index.html")


def test_a_page_that_was_written_long_ago_is_followed_by_nobody(page, specs, sweep, monkeypatch):
    begin(specs[0], 10)
    html(page, sweep)
    now = live.time.time()
    monkeypatch.setattr(live.time, "time", lambda: now + 1000)
    assert not is_followed(sweep / "index.html")


def test_the_time_left_goes_by_the_steps_since_the_first_look(page, specs, sweep, monkeypatch):
    begin(specs[0], 20)
    page.write(3.0)
    page.started = 1000.0
    monkeypatch.setattr(live.time, "time", lambda: 1060.0)
    os.utime(specs[0].path / "progress.json", (2000, 2000))
    begin(specs[0], 30)
    assert "<dd>13:00</dd>" in html(page, sweep).replace("\n", "")  # 130 steps at 10 a minute


def test_hostile_words_stay_words(base_spec, tmp_path, sweep, page, specs):
    words = " ".join(HOSTILE)
    spec = fake_spec(base_spec, tmp_path, "none", 5, {"balancing.none.note": words, "trainer.max_steps": 40})
    hostile = LivePage(sweep, [(words, spec), ("harmless", specs[0])])
    begin(specs[0], 10)
    begin(spec, 10)
    harmless = Page(html(page, sweep))
    (spec.path / "console.log").write_text(words)
    end(spec, "failed", error=words)
    text = html(hostile, sweep)
    found = Page(text)
    assert found.scripts == harmless.scripts
    assert {tag for tag, _ in found.tags} <= {tag for tag, _ in harmless.tags} | {"span"}
    assert not set(found.data[0]) & {"<", ">", "&"}


def test_broken_lines_and_files_do_not_stop_it(page, specs, sweep):
    begin(specs[0], 10)
    with (specs[0].path / "metrics.jsonl").open("a") as file:
        file.write(
            '{\n[]\n{"step": "x"}\n{"step": 20, "tokens": 200, "val/loss": "<b>"}\n{"step": 1e999, "tokens": 1}\n'
        )
    (specs[0].path / "record.json").write_text("{")
    assert cells(html(page, sweep))["balancing=lbl seed=0"][0] == "running"


def test_a_look_goes_to_the_runs_that_run_and_to_a_few_of_the_others_in_turn(base_spec, tmp_path, sweep, monkeypatch):
    monkeypatch.setattr(live, "LOOKS", 2)
    sweep.mkdir(parents=True)
    (sweep / "sweep.json").write_text(json.dumps({"command": "", "runs": {}}))
    os.utime(sweep / "sweep.json", (1e9, 1e9))
    specs = [fake_spec(base_spec, tmp_path, "lbl", seed, {"trainer.max_steps": 40}) for seed in range(12)]
    page = LivePage(sweep, [(f"seed={spec.config.seed}", spec) for spec in specs])
    for spec in specs[:4]:
        begin(spec, 10)
        finish(spec)
    begin(specs[4], 10)
    page.write(3.0)
    begin(specs[11], 10)  # not the next one
    looked, real = [], live.Follower.look
    monkeypatch.setattr(live.Follower, "look", lambda each, started: looked.append(each) or real(each, started))
    for _ in range(3):
        looked.clear()
        page.write(3.0)
        assert len(looked) <= 2 + 2 + 2
        assert not any(each.state == "done" for each in looked)
    assert cells(html(page, sweep))["seed=11"][:2] == ["running", "10 / 40"]


def test_of_very_many_jobs_the_most_urgent_are_listed_and_the_others_counted(page, specs, sweep, monkeypatch):
    monkeypatch.setattr(live, "MOST_JOBS", 1)
    begin(specs[2], 10)
    text = html(page, sweep)
    assert [*cells(text)] == ["balancing=simbal seed=0"]
    assert "3 more jobs are not listed." in text
