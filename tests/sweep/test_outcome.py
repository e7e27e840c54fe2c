"""The outcome of a job is in its record; without a record, it follows from the last output or the signal."""

import pytest

from simbal.errors import BUSY
from simbal.runs.folder import RunFolder
from simbal.sweeping.outcome import LOCKED, exit_reason, record_exit

TRACEBACK = "Traceback (most recent call last):\n  File 'x', line 1\n    f()\n{}\n"
CHAINED = TRACEBACK.format("KeyError: 1") + "\nDuring handling\n\n" + TRACEBACK.format("OSError: 2\nmore")
OUT_OF_MEMORY = "killed by signal 9, possibly out of memory"


@pytest.mark.parametrize(
    ("output", "code", "reason"),
    [
        ("step 1\nerror: no space left\n", 1, "no space left"),
        (TRACEBACK.format("ValueError: bad") + "\nSet the environment variable X\n", 1, "ValueError: bad"),
        (CHAINED, 1, "OSError: 2"),
        ("step 1\n", -9, OUT_OF_MEMORY),
        ("stopped by SIGTERM at step 3\n", 143, "killed by signal 15"),
        ("step 1\n", 0, "ended with exit code 0 and no result"),
        ("\xff\n", 3, "ended with exit code 3 and no result"),
    ],
)
def test_the_reason_of_an_exit(tmp_path, output, code, reason):
    console, earlier = tmp_path / "console.log", "error: of an earlier attempt\n"
    console.write_text(earlier + output, encoding="latin-1")
    assert exit_reason(console, len(earlier), code) == reason


@pytest.fixture
def folder(write_run):
    """The folder of a run that started and has no record."""
    return RunFolder(write_run(status=None))


@pytest.mark.parametrize(
    ("code", "status", "error"),
    [
        (1, "failed", "no space left"),
        (-9, "killed", OUT_OF_MEMORY),
        (143, "killed", "killed by signal 15"),
    ],
)
def test_a_run_that_could_not_write_its_record_gets_one(folder, code, status, error):
    spec = folder.read_spec()
    (folder.path / "console.log").write_text("error: no space left\n")
    assert record_exit(folder, spec, code, 0) == ("failed", error)
    record = folder.read_record()
    assert (record["status"], record["error"], record["config_hash"]) == (status, error, spec.hash)


def test_a_run_that_another_process_holds_gets_no_record(folder):
    spec = folder.read_spec()
    assert record_exit(folder, spec, BUSY, 0) == LOCKED
    with RunFolder(folder.path).lock():
        assert record_exit(folder, spec, 1, 0) == LOCKED
    assert folder.read_record() is None


def test_a_record_counts_more_than_the_exit_code(write_run):
    folder = RunFolder(write_run())
    before = folder.read_record()
    assert record_exit(folder, folder.read_spec(), -9, 0) == ("done", "")
    assert folder.read_record() == before
