"""A folder of sweeps: start them, find their processes, and end them."""

import os
import signal
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from simbal.processes import THREADS
from tests.child_processes import alive
from tests.sweep.small_sweep import command

MARK = "SIMBAL_CHAOS"  # environment variable that all processes of a scene inherit, orphans too
POLL_SECONDS = 0.05
END_SECONDS = 40.0  # for processes to end after a signal; they take 5 s, and longer on a busy core
KEYS = ("trainer.max_steps=120", "trainer.micro_batch=4", "retry_failed=true")


@dataclass
class Sweep:
    """One command with its output file and the signals sent to it."""

    process: "subprocess.Popen[bytes]"
    output: Path
    signals: list[signal.Signals] = field(default_factory=list)


class Scene:
    """The sweeps of one folder. `injected` and `problems` grow as things happen."""

    def __init__(self, folder: Path, cache_dir: Path, *keys: str) -> None:
        """Set the folder, the data cache and overrides of the sweep."""
        self.folder, self.outputs = folder, folder / "outputs"
        self.environment = {key: value for key, value in os.environ.items() if key not in THREADS}
        self.environment[MARK] = str(folder)
        self.command = command(self.outputs, cache_dir, *KEYS, *keys)
        self.sweeps: list[Sweep] = []
        self.injected: list[str] = []  # kinds of faults
        self.problems: list[str] = []  # that a comparison of the results does not show
        self._began = time.monotonic()
        folder.mkdir(parents=True, exist_ok=True)

    def log(self, text: str) -> None:
        """Write a line to events.txt."""
        with (self.folder / "events.txt").open("a") as file:
            file.write(f"{time.monotonic() - self._began:7.2f} {text}\n")

    def count_fault(self, kind: str, detail: str) -> None:
        """Count a fault that was injected."""
        self.injected.append(kind)
        self.log(f"{kind}: {detail}")

    def report(self, problem: str) -> None:
        """Note something that must not happen."""
        self.problems.append(problem)
        self.log(f"PROBLEM: {problem}")

    def start(self) -> Sweep:
        """Run the command once more."""
        output = self.folder / f"sweep-{len(self.sweeps) + 1}.txt"
        with output.open("wb") as file:
            process = subprocess.Popen(
                self.command, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT, env=self.environment
            )
        self.sweeps.append(Sweep(process, output))
        self.log(f"{output.stem} started as process {process.pid}")
        return self.sweeps[-1]

    def running(self) -> list[Sweep]:
        """Return the sweeps that have not ended."""
        return [sweep for sweep in self.sweeps if sweep.process.poll() is None]

    @property
    def is_complete(self) -> bool:
        """Whether the last sweep has finished all runs."""
        return bool(self.sweeps) and not self.running() and self.sweeps[-1].process.returncode == 0

    def processes(self) -> list[int]:
        """Return all live processes of this folder, the sweeps included."""
        mark, found = f"{MARK}={self.folder}".encode(), []
        for entry in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):  # it has ended, or belongs to another user
                if mark in (entry / "environ").read_bytes().split(b"\0") and alive(int(entry.name)):
                    found.append(int(entry.name))
        return sorted(found)

    def jobs(self) -> list[int]:
        """Return the processes that train; each is the leader of a session."""
        sweeps, found = {sweep.process.pid for sweep in self.sweeps}, []
        for pid in self.processes():
            with suppress(ProcessLookupError):
                if pid not in sweeps and os.getsid(pid) == pid:
                    found.append(pid)
        return found

    def wait(self, seconds: float, condition: Callable[[], bool] = lambda: False) -> None:
        """Wait until `condition` is true, the time is up or no sweep runs."""
        deadline = time.monotonic() + seconds
        while self.running() and time.monotonic() < deadline and not condition():
            time.sleep(POLL_SECONDS)

    def wait_for_end(self, sweeps: list[Sweep], seconds: float) -> None:
        """Wait until the sweeps have ended; kill them and report a problem if they do not."""
        deadline = time.monotonic() + seconds
        for sweep in sweeps:
            try:
                sweep.process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                self.report(f"{sweep.output.stem} still runs {seconds:.0f} s after it should have ended")
                self.kill_all()
            self.log(f"{sweep.output.stem} ended with {sweep.process.wait()}")

    def stop_all(self) -> None:
        """Stop the sweeps as kill -9 does, so that files can be damaged while nothing runs."""
        for sweep in self.running():
            sweep.signals.append(signal.SIGKILL)
            sweep.process.kill()
            sweep.process.wait()
            self.count_fault("kill_sweep SIGKILL", f"{sweep.output.stem}, to damage files at rest")
        self.require_no_orphans()

    def require_no_orphans(self) -> None:
        """Report processes that still run some time after every sweep has ended, and kill them."""
        deadline = time.monotonic() + END_SECONDS
        while (left := self.processes()) and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)
        if left:
            self.report(f"processes {left} outlive their sweep by {END_SECONDS:.0f} s")
            self.kill_all()

    def kill_all(self) -> None:
        """Kill every process of this folder."""
        for pid in self.processes():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
