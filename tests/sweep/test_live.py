"""The page of a sweep follows its jobs from a thread, and says how the sweep ended."""

import json
import re

import pytest

from simbal.report.page.live import LivePage
from simbal.sweep import live
from simbal.sweep.composer import Job
from simbal.sweep.live import LivePages
from simbal.sweep.resume import write_sweep
from tests.child_processes import wait_until
from tests.run_folders import changed_spec


@pytest.fixture
def jobs(base_spec, tmp_path, monkeypatch):
    monkeypatch.setattr(live, "LEAST_SECONDS", 0.01)
    specs = [changed_spec(base_spec, {"output_dir": str(tmp_path), "seed": seed}) for seed in (0, 1)]
    made = [Job([f"seed={spec.config.seed}"], spec) for spec in specs]
    write_sweep(made)
    return made


@pytest.fixture
def file(jobs):
    return jobs[0].spec.path.parent / "index.html"


def begin(job, step):
    job.spec.path.mkdir(exist_ok=True)
    (job.spec.path / "progress.json").write_text(json.dumps({"step": step, "max_steps": 400}))


def steps(file):
    return int(re.search('<progress max="[0-9]+" value="([0-9]+)"', file.read_text())[1])


def test_the_page_is_there_from_the_first_job_on_and_follows_it(jobs, file):
    with LivePages() as pages:
        pages.follow(jobs)
        begin(jobs[0], 10)
        wait_until(lambda: file.exists() and steps(file) == 10)
        begin(jobs[1], 30)
        wait_until(lambda: steps(file) == 40)
        pages.end()
        begin(jobs[1], 50)
    assert steps(file) == 40  # the report writes the next one
    assert " data-stopped>" not in file.read_text()


def test_the_page_of_a_stopped_sweep_says_so_and_one_that_has_not_begun_has_none(jobs, file):
    def sweep(begun):
        with LivePages() as pages:
            pages.follow(jobs)
            if begun:
                begin(jobs[0], 10)
                wait_until(file.exists)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        sweep(begun=False)
    assert not file.exists()
    with pytest.raises(KeyboardInterrupt):
        sweep(begun=True)
    assert " data-stopped>" in file.read_text()


def test_a_disk_that_refuses_does_not_end_it(jobs, file):
    with LivePages() as pages:
        pages.follow(jobs)
        file.mkdir()
        begin(jobs[0], 10)
        wait_until(lambda: any(page.begun_with is not None for page in pages.pages))
        file.rmdir()
        wait_until(file.is_file)


def test_a_page_that_takes_long_is_written_less_often(jobs, monkeypatch):
    seconds = iter([0.0, 0.02] * 1000)
    monkeypatch.setattr(live.time, "thread_time", lambda: next(seconds))
    monkeypatch.setattr(LivePage, "write", lambda *_: None)
    with LivePages() as pages:
        pages.every = 0.01
        pages.follow(jobs)
        wait_until(lambda: pages.every == pytest.approx(0.02 / live.SHARE))
