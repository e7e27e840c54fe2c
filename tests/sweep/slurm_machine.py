"""A local Slurm cluster of two nodes that writes to one folder and is removed afterwards."""

import os
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from tests.child_processes import wait_until

PROGRAMS = ("setpriv", "munged", "slurmctld", "slurmd", "sbatch", "srun")
HOST = socket.gethostname().partition(".")[0]
NODES = (HOST, f"{HOST}-2")  # ranks look for the first by its name
CONF = """\
ClusterName=tests
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller_port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
# a job that is queued again waits for cred_expire seconds
AuthInfo=socket={folder}/munge.socket,cred_expire=10
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
AccountingStorageType=accounting_storage/none
MailProg=/bin/true
MpiDefault=none
KillWait=2
JobRequeue=0
ReturnToService=0
SchedulerParameters=batch_sched_delay=0,sched_interval=1
{nodes}
PartitionName=tests Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def missing() -> str:
    """Why there can be no Slurm here; empty if there can."""
    absent = [name for name in PROGRAMS if shutil.which(name) is None]
    if absent:
        return f"Debian's slurm-wlm and munge are not installed: there is no {', '.join(absent)}"
    return "" if os.geteuid() == 0 else "slurmd starts jobs of other users, and so has to be started by root"


class SlurmMachine:
    """Slurm's commands for the machine that has its files in a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.environment = {"SLURM_CONF": str(folder / "slurm.conf")}

    def run(self, *command: str) -> str:
        """Return the output of a command."""
        variables = os.environ | self.environment
        return subprocess.run(command, env=variables, capture_output=True, text=True, check=True).stdout

    def states(self) -> dict[str, str]:
        """The state of every job that has not ended, by its number; an array's are `1_0`, `1_1`."""
        return dict(line.split() for line in self.run("squeue", "-h", "-r", "-o", "%i %T").splitlines())

    def is_ready(self) -> bool:
        """Whether all daemons have started."""
        try:
            return self.run("sinfo", "-h", "-N", "-o", "%T").split() == ["idle"] * len(NODES)
        except subprocess.CalledProcessError:
            return False


@contextmanager
def slurm_machine() -> Iterator[SlurmMachine]:
    """Start munged, slurmctld and a slurmd for each node; at the end cancel all jobs, and stop them."""
    with tempfile.TemporaryDirectory(prefix="slurm") as name:  # short, as the paths of sockets have to be
        machine = SlurmMachine(Path(name))
        _write_files(machine.folder)
        commands = (["munged", *_options_of_munge(machine.folder)], ["slurmctld", "-D"])
        with _daemons(machine, [*commands, *(["slurmd", "-D", "-N", node] for node in NODES)]):
            yield machine


@contextmanager
def _daemons(machine: SlurmMachine, commands: Sequence[Sequence[str]]) -> Iterator[None]:
    """Run daemons within the block, in sessions of their own, so that Ctrl-C leaves it to us to stop them.

    They also end if this process is killed.
    """
    variables, log = os.environ | machine.environment, machine.folder / "log"
    processes = list[subprocess.Popen[bytes]]()
    try:
        with log.open("w") as output:
            for command in commands:
                streams = {"stdin": subprocess.DEVNULL, "stdout": output, "stderr": output}
                bound = ["setpriv", "--pdeathsig=TERM", *command]
                processes.append(subprocess.Popen(bound, env=variables, start_new_session=True, **streams))
        wait_until(lambda: machine.is_ready() or any(process.poll() is not None for process in processes))
        assert machine.is_ready(), log.read_text()
        try:
            yield
        finally:
            machine.run("scancel", "--user=root")
            wait_until(lambda: not machine.states())
    finally:
        for process in reversed(processes):
            process.terminate()
            process.wait()


def _write_files(folder: Path) -> None:
    folder.chmod(0o711)  # munge wants its socket within everybody's reach
    (folder / "state").mkdir()
    key = folder / "munge.key"
    key.touch(0o600)
    key.write_bytes(os.urandom(128))
    controller_port, *ports = _free_ports(1 + len(NODES))
    nodes = (
        f"NodeName={node} NodeHostname={HOST} NodeAddr=127.0.0.1 Port={port}"
        for node, port in zip(NODES, ports, strict=True)
    )
    values = {"host": HOST, "folder": folder, "controller_port": controller_port, "nodes": "\n".join(nodes)}
    (folder / "slurm.conf").write_text(CONF.format_map(values))


def _free_ports(number: int) -> list[int]:
    with ExitStack() as held:
        sockets = [held.enter_context(socket.socket()) for _ in range(number)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]


def _options_of_munge(folder: Path) -> list[str]:
    files = {"key-file": "key", "socket": "socket", "pid-file": "pid", "log-file": "log", "seed-file": "seed"}
    return ["--foreground", *(f"--{option}={folder}/munge.{suffix}" for option, suffix in files.items())]
