"""A program runs the same way, whether its process is forked from a server or started afresh."""

import os
import signal
import subprocess
import sys
import time
from multiprocessing import forkserver
from pathlib import Path

import pytest

from simbal.sweep.process import Afresh, ForkServer
from tests.child_processes import alive, wait_until

PROGRAM = """
import atexit, os, sys
atexit.register(print, "left in order")
print(__name__, sys.argv[1:], os.environ["COLOUR"], os.getpid() == os.getpgid(0), "decimal" in sys.modules)
print("and an error", file=sys.stderr)
if sys.argv[1:] == ["raise"]:
    raise RuntimeError("of its own")
if sys.argv[1:] == ["wait"]:
    import time
    time.sleep(1000)
sys.exit(int(sys.argv[1]))
"""


@pytest.fixture(params=["afresh", "forked"])
def starter(request):
    return Afresh() if request.param == "afresh" else ForkServer(["decimal"], {"OMP_NUM_THREADS": "1"})


@pytest.fixture
def run(starter, tmp_path):
    def start(*arguments):
        program, console = tmp_path / "program.py", tmp_path / "console.log"
        program.write_text(PROGRAM)
        return starter.start([sys.executable, str(program), *arguments], {"COLOUR": "green"}, console), console

    return start


@pytest.mark.parametrize("code", [0, 3])
def test_it_has_its_arguments_environment_group_and_exit_code(run, starter, code):
    process, console = run(str(code))
    assert process.wait() == code == process.poll()
    forked = isinstance(starter, ForkServer)
    lines = console.read_text().splitlines()
    assert f"__main__ ['{code}'] green True {forked}" in lines
    assert {"and an error", "left in order"} <= {*lines}
    assert "COLOUR" not in os.environ


def test_what_it_prints_is_added_to_the_console(run):
    run("0")[0].wait()
    process, console = run("0")
    process.wait()
    assert console.read_text().count("left in order") == 2


def test_an_exception_leaves_a_traceback_and_exit_code_1(run):
    process, console = run("raise")
    assert process.wait() == 1
    assert "RuntimeError: of its own" in console.read_text()


def test_a_signal_is_a_negative_exit_code(run):
    process, console = run("wait")
    while "and an error" not in (console.read_text() if console.exists() else ""):
        time.sleep(0.02)
    assert process.poll() is None
    os.killpg(process.pid, signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL


@pytest.mark.parametrize("seen", [True, False])
def test_a_server_that_was_killed_comes_back_with_its_environment(tmp_path, seen):
    """torch reads the number of threads when it is imported there."""
    program, console = tmp_path / "program.py", tmp_path / "console.log"
    program.write_text("import os\nprint('shade', os.environ.get('SHADE'))\n")
    server = ForkServer(["decimal"], {"SHADE": "dark"})
    pid = forkserver._forkserver._forkserver_pid
    os.kill(pid, signal.SIGKILL)
    if seen:  # else it may be asked for a process while it dies
        wait_until(lambda: not alive(pid))
    assert server.start([sys.executable, str(program)], {}, console).wait() == 0
    assert "shade dark" in console.read_text()
    assert "SHADE" not in os.environ


def test_a_module_runs_as_with_python_m(starter, tmp_path):
    console = tmp_path / "console.log"
    process = starter.start([sys.executable, "-m", "base64", "-t"], {}, console)
    assert process.wait() == 0
    assert "Aladdin:open sesame" in console.read_text()


def test_a_job_that_is_forked_has_torch_already_and_needs_no_second_to_start(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(
        "import sys, time\nloaded = 'torch' in sys.modules\nimport simbal.training.run\n"
        "assert loaded\nprint('seconds', time.process_time())\n"
    )
    parent = tmp_path / "parent.py"
    parent.write_text(
        "import sys\nfrom pathlib import Path\nfrom simbal.sweep.process import ForkServer\n"
        "if __name__ == '__main__':\n"
        "    server = ForkServer(['simbal.training.run'], {'OMP_NUM_THREADS': '1'})\n"
        f"    job = server.start([sys.executable, {str(program)!r}], {{}}, Path({str(tmp_path / 'log')!r}))\n"
        "    assert job.wait() == 0\n    assert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, str(parent)], check=True)
    used = float(Path(tmp_path / "log").read_text().split()[-1])
    assert used < 1  # of processor time, not on a clock
