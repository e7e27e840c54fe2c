"""A process is given one thing to work on, whether it is forked from a server or started afresh."""

import os
import signal
import subprocess
import sys
from multiprocessing import forkserver
from pathlib import Path

import pytest

from simbal.processes.start import ForkServer, Spawn
from tests.child_processes import alive, wait_until
from tests.processes import program


def end_server():
    """Kill the server of this process, if there is one, and return its id; the next use starts another."""
    if pid := forkserver._forkserver._forkserver_pid:
        os.kill(pid, signal.SIGKILL)
    return pid


@pytest.fixture(autouse=True)
def no_server_of_others():
    """A server has imported what the first who wanted one asked for: neither these tests nor others get the wrong."""
    end_server()
    yield
    end_server()


@pytest.fixture(params=["afresh", "forked"])
def starter(request, monkeypatch):
    """Both import what the tests have, from the folder of the repository."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    if request.param == "afresh":
        return Spawn(program)
    return ForkServer(program.work, ["decimal"], {"OMP_NUM_THREADS": "1"})


@pytest.fixture
def run(starter, tmp_path):
    """`run(3)`: a process that is to end with this code; what it notes is in the file that comes with it."""

    def start(ending):
        notes = tmp_path / "notes"
        return starter.start({"notes": str(notes), "ending": ending}, {"COLOUR": "green"}), notes

    return start


@pytest.mark.parametrize("code", [0, 3])
def test_it_has_its_task_environment_group_and_exit_code(run, starter, code):
    process, notes = run(code)
    assert process.wait() == code == process.poll()
    preloaded = isinstance(starter, ForkServer)
    assert notes.read_text().splitlines() == [f"{code} green leads=True decimal={preloaded}", "left in order"]
    assert "COLOUR" not in os.environ


def test_an_exception_is_exit_code_1(run):
    process, notes = run("raise")
    assert process.wait() == 1
    assert "left in order" in notes.read_text()


def test_a_signal_is_a_negative_exit_code(run):
    process, notes = run("wait")
    wait_until(notes.exists)
    assert process.poll() is None
    os.killpg(process.pid, signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL


@pytest.mark.parametrize("seen", [True, False])
def test_a_server_that_was_killed_comes_back_with_its_environment(monkeypatch, tmp_path, seen):
    """torch reads the number of threads when it is imported there."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    server = ForkServer(program.work, ["decimal"], {"COLOUR": "dark"})
    pid = end_server()
    if seen:  # else it may be asked for a process while it dies
        wait_until(lambda: not alive(pid))
    assert server.start({"notes": tmp_path / "notes", "ending": 0}, {}).wait() == 0
    assert "0 dark" in (tmp_path / "notes").read_text()
    assert "COLOUR" not in os.environ


@pytest.mark.slow
def test_a_job_that_is_forked_has_torch_already_and_needs_no_second_to_start(tmp_path):
    """The processor time that it has used when it could begin to train."""
    (tmp_path / "job.py").write_text(
        "import sys, time\n"
        "def work(file):\n    loaded = 'torch' in sys.modules\n    import simbal.training.run\n"
        "    file.write_text(f'{loaded} {time.process_time()}')\n    return 0\n"
    )
    parent = tmp_path / "parent.py"
    parent.write_text(
        "import sys\nfrom pathlib import Path\nimport job\nfrom simbal.processes.start import ForkServer\n"
        "if __name__ == '__main__':\n"
        "    server = ForkServer(job.work, ['simbal.training.run'], {'OMP_NUM_THREADS': '1'})\n"
        f"    assert server.start(Path({str(tmp_path / 'said')!r}), {{}}).wait() == 0\n"
        "    assert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, str(parent)], check=True, env={**os.environ, "PYTHONPATH": str(tmp_path)})
    loaded, used = (tmp_path / "said").read_text().split()
    assert loaded == "True"
    assert float(used) < 1  # of processor time, not on a clock
