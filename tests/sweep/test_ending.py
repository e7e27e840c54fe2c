"""How a job ended is in its record; without one its error is what it said last, or what has killed it."""

import pytest

from simbal.errors import BUSY
from simbal.runs.folder import RunFolder
from simbal.sweep.ending import ELSEWHERE, exit_reason, record_exit

TRACEBACK = "Traceback (most recent call last):\n  File 'x', line 1\n    f()\n{}\n"


@pytest.mark.parametrize(
    ("said", "status", "words"),
    [
        ("step 1\nerror: no space left\n", 1, "no space left"),
        (
            TRACEBACK.format("ValueError: bad") + "\nSet the environment variable HYDRA_FULL_ERROR=1\n",
            1,
            "ValueError: bad",
        ),
        (
            TRACEBACK.format("KeyError: 1") + "\nDuring handling\n\n" + TRACEBACK.format("OSError: 2\nmore"),
            1,
            "OSError: 2",
        ),
        (TRACEBACK.format("ValueError: bad") + "error: no space left\n", 1, "no space left"),
        ("step 1\n", -9, "killed by signal 9, possibly out of memory"),
        ("stopped by SIGTERM at step 3\n", 143, "killed by signal 15"),
        ("error: only a warning\n", -11, "killed by signal 11"),
        ("step 1\n", 0, "ended with exit code 0 and no result"),
        ("", 3, "ended with exit code 3 and no result"),
        ("\xff\n", 3, "ended with exit code 3 and no result"),
    ],
)
def test_the_reason_of_an_exit(tmp_path, said, status, words):
    console = tmp_path / "console.log"
    console.write_text("error: of an earlier attempt\n" + said, encoding="latin-1")
    assert exit_reason(console, len("error: of an earlier attempt\n"), status) == words


@pytest.fixture
def folder(write_run):
    """Of a run that has begun and has no record."""
    return RunFolder(write_run(status=None))


@pytest.mark.parametrize(("code", "status"), [(1, "failed"), (0, "failed"), (-9, "killed"), (143, "killed")])
def test_a_run_whose_process_could_not_write_its_record_gets_one(folder, code, status):
    spec = folder.read_spec()
    (folder.path / "console.log").write_text("error: no space left\n")
    error = (
        "no space left"
        if status == "failed"
        else "killed by signal 9, possibly out of memory"
        if code < 0
        else "killed by signal 15"
    )
    assert record_exit(folder, spec, code, 0) == ("failed", error)
    record = folder.read_record()
    assert (record["status"], record["error"], record["config_hash"]) == (status, error, spec.hash)


def test_a_run_that_another_process_was_quicker_at_or_holds_is_left_to_it(folder):
    spec = folder.read_spec()
    assert record_exit(folder, spec, BUSY, 0) == ELSEWHERE
    with RunFolder(folder.path).lock():
        assert record_exit(folder, spec, 1, 0) == ELSEWHERE
    assert folder.read_record() is None


def test_a_run_that_is_recorded_has_ended_as_its_record_says_whatever_became_of_its_process(write_run):
    folder = RunFolder(write_run())
    before = folder.read_record()
    assert record_exit(folder, folder.read_spec(), -9, 0) == ("done", "")
    assert folder.read_record() == before
